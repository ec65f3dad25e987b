"""Validation metrics by name. A function takes all samples of a validation at once and says what they are like:

``fn(images, prompts, ground_truths, **kwargs) -> {key: float, ...}``

with ``images`` a list of uint8 [H, W, C] (videos [F, H, W, C]), one per sample, and the prompt and the ground truth of
each. It sees the samples of one data source; its figures are logged as ``val-aux/SOURCE/NAME/KEY`` and train nothing.
Every module of this folder is imported when a function is first asked for: a new metric is one new file.
"""

from __future__ import annotations

from verl_digen.rewards.registry import Registry

METRICS = Registry("validation metric", __name__)
register_metric = METRICS.register
