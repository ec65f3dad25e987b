"""Whether generated digits look like digits, asked of judges that are not the reward.

An accurate policy may still have hacked its reward: samples that the classifier is sure of and nobody else can read, or
one and the same sample for every noise. So: two classifiers of other kinds, fitted on the half of the real scans that
the reward classifier has not seen (a support vector machine, and the nearest neighbours), how far a sample is from the
nearest real scan, and how much the samples of a digit differ.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import numpy as np

from verl_digen.rewards.metrics import register_metric

JUDGES = Path(__file__).parents[1] / "assets" / "digit_judges.npz"
NEIGHBOURS = 5
REAL = {"judge_svm": 0.98, "judge_knn": 0.98, "distance": 1.03, "spread": 0.165}
"""The figures of the real scans: of judges that have not seen them, and with other scans as neighbours."""


@register_metric("digit_quality")
def digit_quality(
    images: Sequence[np.ndarray], prompts: Sequence[str], ground_truths: Sequence[str]
) -> dict[str, float]:
    """Figures of the samples; see :data:`REAL` for those of real scans.

    - ``judge_svm``, ``judge_knn``: share of the samples in which the judge reads the prompted digit;
    - ``distance``: Euclidean distance to the nearest real scan, pixels in 0..1, mean over the samples;
    - ``spread``: std of a pixel over the samples of a digit, mean over pixels and digits.

    Args:
        images: uint8 [8, 8, 1] each, 0 is paper and 255 is ink.
        ground_truths: the digit of each, "0" to "9".

    Raises:
        ValueError: another shape or dtype, or no digit.
    """
    wrong = {f"{image.dtype} {list(image.shape)}" for image in images if (image.dtype, image.shape) != _READ}
    if wrong:
        raise ValueError(f"digit_quality reads uint8 [8, 8, 1], got {', '.join(sorted(wrong))}")
    strange = sorted(set(ground_truths) - set("0123456789"))
    if strange:
        raise ValueError(f"digit_quality needs ground truths from '0' to '9', got {strange}")
    pixels = np.stack(images).reshape(len(images), 64) / 255
    digits = np.array([int(text) for text in ground_truths])
    distances = squared_distances(pixels)
    return {
        "judge_svm": float((svm_reads(distances) == digits).mean()),
        "judge_knn": float((knn_reads(distances) == digits).mean()),
        "distance": float(np.sqrt(distances.min(axis=1)).mean()),
        "spread": float(np.mean([pixels[digits == digit].std(axis=0).mean() for digit in np.unique(digits)])),
    }


_READ = (np.dtype(np.uint8), (8, 8, 1))


def squared_distances(pixels: np.ndarray) -> np.ndarray:
    """Squared distances [N, 1797] of pixels [N, 64] in 0..1 to all real scans: the reward's half, the judges' half."""
    scans = _judges()["scans"]
    products = pixels @ scans.T
    return np.maximum((pixels**2).sum(1)[:, None] + (scans**2).sum(1)[None] - 2 * products, 0)


def svm_reads(distances: np.ndarray) -> np.ndarray:
    """The digit [N] that the support vector machine (RBF kernel, one against the rest) reads."""
    judges = _judges()
    kernel = np.exp(-judges["gamma"] * distances[:, -len(judges["coefficients"]) :])
    return (kernel @ judges["coefficients"] + judges["intercepts"]).argmax(axis=1)


def knn_reads(distances: np.ndarray) -> np.ndarray:
    """The digit [N] of most of the nearest neighbours; the smaller one of equals."""
    judges = _judges()
    nearest = np.argsort(distances[:, -len(judges["labels"]) :], axis=1, kind="stable")[:, :NEIGHBOURS]
    return np.array([np.bincount(row, minlength=10).argmax() for row in judges["labels"][nearest]])


@cache
def _judges() -> dict[str, np.ndarray]:
    """``scans`` [1797, 64] in 0..1; of the judges' half ``labels`` [M] and ``coefficients`` [M, 10]."""
    with np.load(JUDGES, allow_pickle=False) as file:
        arrays = {name: file[name] for name in file.files}
    arrays["scans"] = arrays["scans"] / 16
    arrays["coefficients"] = arrays["coefficients"].astype(np.float64)
    return arrays


def train_svm(images: np.ndarray, labels: np.ndarray):
    """scikit-learn's SVC per digit against the rest, fitted on scans [M, 8, 8] with values 0..16, scaled to 0..1."""
    from sklearn.multiclass import OneVsRestClassifier
    from sklearn.svm import SVC

    flat = images.reshape(-1, 64) / 16
    return OneVsRestClassifier(SVC(gamma=1 / (64 * flat.var()))).fit(flat, labels)


def save_judges(svm, unseen: np.ndarray, images: np.ndarray, labels: np.ndarray, file: Path = JUDGES) -> Path:
    """Write what the judges need.

    Args:
        svm: fitted on ``images``.
        unseen: the other scans [L, 8, 8]; only the distance to the nearest scan reads them.
        images, labels: the judges' scans [M, 8, 8], values 0..16, and their digits [M].
    """
    coefficients = np.zeros((len(images), 10), np.float32)
    for digit, machine in enumerate(svm.estimators_):
        coefficients[machine.support_, digit] = machine.dual_coef_[0]
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_name(f".{os.getpid()}.{file.name}")
    np.savez_compressed(
        partial,
        scans=np.concatenate([unseen, images]).reshape(-1, 64).astype(np.uint8),
        labels=labels.astype(np.uint8),
        coefficients=coefficients,
        intercepts=np.array([machine.intercept_[0] for machine in svm.estimators_]),
        gamma=np.array(svm.estimators_[0].gamma),
    )
    os.replace(partial, file)
    _judges.cache_clear()
    return file
