"""Reward functions by name. A function takes one sample's pixels and says how good they are:

``fn(images, prompt, ground_truth, extra, **kwargs) -> {"score": float, ...}``

with ``images`` uint8 [H, W, C] (video [F, H, W, C]). Further keys of the result are reported beside the score.
A function that cannot judge a sample raises; it never returns a value in place of a judgement. Every module of this
folder is imported when a function is first asked for: a new reward is one new file.
"""

from __future__ import annotations

from verl_digen.rewards.registry import Registry

REWARDS = Registry("reward", __name__)
register_reward, available_rewards, get_reward = REWARDS.register, REWARDS.available, REWARDS.get
