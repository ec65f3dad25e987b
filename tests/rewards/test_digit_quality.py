"""The judges of generated digits: scikit-learn's own on scans the reward has not seen, and figures of known samples."""

from __future__ import annotations

import numpy as np
import pytest

from verl_digen.data.digits import halves, load_scans
from verl_digen.rewards.metrics import METRICS
from verl_digen.rewards.metrics.digit_quality import (
    digit_quality,
    knn_reads,
    save_judges,
    squared_distances,
    svm_reads,
    train_svm,
)


def scans(part=slice(None)):
    """Pixels uint8 [N, 8, 8, 1] and digits [N] of real scans."""
    images, labels = load_scans()
    return np.round(images * (255 / 16)).astype(np.uint8)[..., None][part], labels[part]


def judged(pixels, digits):
    return digit_quality(list(pixels), [""] * len(pixels), [str(digit) for digit in digits])


def test_it_is_registered_under_its_name():
    assert METRICS.get("digit_quality") is digit_quality
    with pytest.raises(ValueError, match="unknown validation metric 'beauty'; available: digit_quality"):
        METRICS.get("beauty")


def test_shipped_judges_are_scikit_learns_and_know_only_their_half():
    from sklearn.neighbors import KNeighborsClassifier

    images, labels = load_scans()
    (unseen, learned), (unseen_labels, learned_labels) = halves(images), halves(labels)
    distances = squared_distances(unseen.reshape(-1, 64) / 16)
    svm = train_svm(learned, learned_labels)
    assert (svm_reads(distances) == svm.predict(unseen.reshape(-1, 64) / 16)).mean() > 0.998
    knn = KNeighborsClassifier(5).fit(learned.reshape(-1, 64), learned_labels)
    assert (knn_reads(distances) == knn.predict(unseen.reshape(-1, 64))).mean() > 0.995  # equal distances
    assert (svm_reads(distances) == unseen_labels).mean() > 0.97
    assert (knn_reads(distances) == unseen_labels).mean() > 0.97


def test_real_scans_have_the_figures_of_the_docstring():
    pixels, digits = scans()
    found = judged(pixels, digits)
    assert found["judge_svm"] > 0.98 and found["judge_knn"] > 0.98
    assert found["distance"] < 0.02  # each is its own neighbour, up to the rounding to uint8
    assert found["spread"] == pytest.approx(0.165, abs=0.002)
    flat = pixels.reshape(-1, 64) / 255
    others = squared_distances(flat)
    others[others < 1e-3] = np.inf  # not itself
    assert np.sqrt(others.min(axis=1)).mean() == pytest.approx(1.03, abs=0.01)


def test_hacked_and_collapsed_samples_are_seen():
    """One scan for every sample of a digit has no spread; noise is far from every scan and read by no judge."""
    pixels, digits = scans()
    first = np.array([np.flatnonzero(digits == digit)[0] for digit in range(10)]).repeat(5)
    collapsed = judged(pixels[first], digits[first])
    assert collapsed["spread"] < 1e-12 and min(collapsed["judge_svm"], collapsed["judge_knn"]) >= 0.9
    noise = np.random.default_rng(0).integers(0, 256, (200, 8, 8, 1)).astype(np.uint8)
    found = judged(noise, np.arange(200) % 10)
    assert found["distance"] > 2.0 and max(found["judge_svm"], found["judge_knn"]) < 0.3
    assert found["spread"] > 0.2


def test_what_is_no_digit_is_refused():
    with pytest.raises(ValueError, match=r"reads uint8 \[8, 8, 1\], got float32 \[8, 8, 1\], uint8 \[16, 16, 3\]"):
        digit_quality([np.zeros((8, 8, 1), np.float32), np.zeros((16, 16, 3), np.uint8)], ["", ""], ["1", "2"])
    with pytest.raises(ValueError, match=r"from '0' to '9', got \['ten'\]"):
        digit_quality([np.zeros((8, 8, 1), np.uint8)], [""], ["ten"])


def test_judges_are_rebuilt_from_other_scans(tmp_path):
    """What is written is what the fitted machine says, scan by scan."""
    images, labels = load_scans()
    svm = train_svm(images[:200], labels[:200])
    file = save_judges(svm, images[200:300], images[:200], labels[:200], tmp_path / "judges.npz")
    with np.load(file) as saved:
        assert saved["scans"].shape == (300, 64) and saved["labels"].tolist() == labels[:200].tolist()
        x = images[300:400].reshape(-1, 64) / 16
        kernel = np.exp(-saved["gamma"] * ((x[:, None] - saved["scans"][None, -200:] / 16) ** 2).sum(-1))
        scores = kernel @ saved["coefficients"] + saved["intercepts"]
    expected = np.stack([machine.decision_function(x) for machine in svm.estimators_], axis=1)
    np.testing.assert_allclose(scores, expected, atol=1e-4)
