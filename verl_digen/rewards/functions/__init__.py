"""Reward functions by name. A function takes one sample's pixels and says how good they are:

``fn(images, prompt, ground_truth, extra, **kwargs) -> {"score": float, ...}``

with ``images`` uint8 [H, W, C] (video [F, H, W, C]). Further keys of the result are reported beside the score.
A function that cannot judge a sample raises; it never returns a value in place of a judgement. Every module of this
folder is imported when a function is first asked for: a new reward is one new file.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from typing import Any

RewardFunction = Callable[..., dict[str, Any]]

_REWARDS: dict[str, RewardFunction] = {}


def register_reward(name: str) -> Callable[[RewardFunction], RewardFunction]:
    """Decorator: make a reward function known under ``name``."""

    def decorator(function: RewardFunction) -> RewardFunction:
        known = _REWARDS.get(name)
        if known is not None and (known.__module__, known.__qualname__) != (
            function.__module__,
            function.__qualname__,
        ):
            raise ValueError(f"reward {name!r} is taken by {known.__module__}.{known.__qualname__}")
        _REWARDS[name] = function
        return function

    return decorator


def available_rewards() -> list[str]:
    """Names of all registered rewards."""
    for module in pkgutil.iter_modules(__path__, f"{__name__}."):
        importlib.import_module(module.name)
    return sorted(_REWARDS)


def get_reward(name: str) -> RewardFunction:
    """The reward function called ``name``.

    Raises:
        ValueError: there is none; the message lists those there are.
    """
    names = available_rewards()
    if name not in _REWARDS:
        raise ValueError(f"unknown reward {name!r}; available: {', '.join(names)}")
    return _REWARDS[name]
