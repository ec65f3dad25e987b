"""An EMULATED judge, for tests and benchmarks of the control plane only: it takes a configured time."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from verl_digen.rewards.functions import register_reward


@register_reward("emulated")
def emulated(
    images: np.ndarray, prompt: str, ground_truth: str, extra: dict, *, latency_s: float = 0.0
) -> dict[str, Any]:
    """Mean brightness in 0..1, after ``latency_s`` seconds.

    Args:
        images: uint8 [H, W, C] or [F, H, W, C].

    Raises:
        ValueError: a negative latency.
    """
    if latency_s < 0:
        raise ValueError(f"emulated reward: latency_s={latency_s} must not be negative")
    time.sleep(latency_s)
    return {"score": float(images.mean()) / 255.0}
