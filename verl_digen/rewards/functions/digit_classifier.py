"""How surely a classifier trained on real handwritten digits reads the prompted digit in the picture.

The classifier is scikit-learn's MLP with 128 hidden units on one half of ``load_digits`` (the judges of
:mod:`verl_digen.rewards.metrics.digit_quality` have the other). Its weights ship with the package
and its forward is two matrix products in numpy, because reward workers start often and training it takes seconds.
"""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from verl_digen.rewards.functions import register_reward

WEIGHTS = Path(__file__).parents[1] / "assets" / "digit_classifier.npz"
_ARRAYS = ("hidden_weight", "hidden_bias", "output_weight", "output_bias")


@register_reward("digit_classifier")
def digit_classifier(images: np.ndarray, prompt: str, ground_truth: str, extra: dict) -> dict[str, Any]:
    """Probability (0..1) of the digit ``ground_truth`` as ``score``; ``acc`` is 1.0 if no other is likelier, else 0.0.

    Args:
        images: uint8 [8, 8, 1], 0 is paper and 255 is ink.
        ground_truth: the digit, "0" to "9".

    Raises:
        ValueError: another shape or dtype, or no digit.
    """
    if images.shape != (8, 8, 1) or images.dtype != np.uint8:
        raise ValueError(f"digit_classifier reads uint8 [8, 8, 1], got {images.dtype} {list(images.shape)}")
    if ground_truth not in list("0123456789"):
        raise ValueError(f"digit_classifier needs a ground truth from '0' to '9', got {ground_truth!r}")
    probabilities = digit_probabilities(images[None])[0]
    digit = int(ground_truth)
    return {"score": float(probabilities[digit]), "acc": float(probabilities.argmax() == digit)}


def digit_probabilities(pixels: np.ndarray) -> np.ndarray:
    """Class probabilities fp64 [N, 10] of pixels uint8 [N, 8, 8, 1].

    Pixels 0..255 are the classifier's ink 0..16 times 255/16 (what decoding an image of ``ink / 8 - 1`` gives).
    """
    ink = pixels.reshape(len(pixels), 64).astype(np.float64) * (16 / 255)
    weights = _weights()
    hidden = np.maximum((ink / 8 - 1) @ weights["hidden_weight"] + weights["hidden_bias"], 0)
    logits = hidden @ weights["output_weight"] + weights["output_bias"]
    exponentials = np.exp(logits - logits.max(axis=1, keepdims=True))
    return exponentials / exponentials.sum(axis=1, keepdims=True)


@cache
def _weights() -> dict[str, np.ndarray]:
    with np.load(WEIGHTS, allow_pickle=False) as file:
        return {name: file[name].astype(np.float64) for name in _ARRAYS}


def train_classifier(images: np.ndarray, labels: np.ndarray, seed: int = 0) -> Any:
    """scikit-learn's MLP(128) fitted on scans [N, 8, 8] with values 0..16, scaled to -1..1."""
    from sklearn.neural_network import MLPClassifier

    return MLPClassifier((128,), max_iter=300, random_state=seed).fit(images.reshape(-1, 64) / 8 - 1, labels)


def save_classifier(classifier: Any, file: Path = WEIGHTS) -> Path:
    """Write the weights of a fitted classifier, fp32, where the reward reads them."""
    arrays = (classifier.coefs_[0], classifier.intercepts_[0], classifier.coefs_[1], classifier.intercepts_[1])
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_name(f".{os.getpid()}.{file.name}")
    np.savez_compressed(partial, **{n: a.astype(np.float32) for n, a in zip(_ARRAYS, arrays, strict=True)})
    os.replace(partial, file)
    _weights.cache_clear()
    return file
