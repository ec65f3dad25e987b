"""The bundled reward functions and their registry."""

from __future__ import annotations

import numpy as np
import pytest

from verl_digen.data.digits import halves, load_scans
from verl_digen.rewards.functions import available_rewards, get_reward, register_reward
from verl_digen.rewards.functions.digit_classifier import digit_probabilities, train_classifier


def pixels_of(scan):
    return np.round(scan * (255 / 16)).astype(np.uint8)[..., None]


def test_registry_lists_what_is_available():
    assert {"digit_classifier", "jpeg_compressibility"} <= set(available_rewards())
    with pytest.raises(ValueError, match="unknown reward 'beauty'; available: .*digit_classifier, .*jpeg_compress"):
        get_reward("beauty")
    with pytest.raises(ValueError, match="'digit_classifier' is taken by verl_digen"):
        register_reward("digit_classifier")(lambda images, prompt, ground_truth, extra: {"score": 1.0})


def test_classifier_scores_the_prompted_digit():
    images, labels = load_scans()
    scan, label = pixels_of(images[0]), int(labels[0])
    right = get_reward("digit_classifier")(scan, "", str(label), {})
    wrong = get_reward("digit_classifier")(scan, "", str((label + 1) % 10), {})
    assert right["score"] > 0.9 and right["acc"] == 1.0
    assert wrong["score"] < 0.1 and wrong["acc"] == 0.0


def test_shipped_weights_are_scikit_learns_classifier():
    images, labels = load_scans()
    classifier = train_classifier(halves(images)[0], halves(labels)[0])
    probabilities = digit_probabilities(pixels_of(images))
    quantised = pixels_of(images)[..., 0] * (16 / 255)
    np.testing.assert_allclose(probabilities, classifier.predict_proba(quantised.reshape(-1, 64) / 8 - 1), atol=0.02)
    np.testing.assert_allclose(probabilities.sum(axis=1), 1)
    right = probabilities.argmax(axis=1) == labels
    assert halves(right)[0].mean() > 0.99 and halves(right)[1].mean() > 0.95  # learned from; not seen


@pytest.mark.parametrize(
    ("images", "ground_truth", "message"),
    [
        (np.zeros((8, 8, 1), np.float32), "1", r"got float32 \[8, 8, 1\]"),
        (np.zeros((16, 16, 1), np.uint8), "1", r"got uint8 \[16, 16, 1\]"),
        (np.zeros((8, 8, 1), np.uint8), "seven", "got 'seven'"),
        (np.zeros((8, 8, 1), np.uint8), "", "got ''"),
    ],
)
def test_classifier_refuses_what_it_cannot_read(images, ground_truth, message):
    with pytest.raises(ValueError, match=message):
        get_reward("digit_classifier")(images, "", ground_truth, {})


@pytest.mark.parametrize("channels", [1, 3])
def test_flat_pictures_compress_better_than_noise(channels):
    reward = get_reward("jpeg_compressibility")
    flat = np.full((64, 64, channels), 128, np.uint8)
    noise = np.random.default_rng(0).integers(0, 256, flat.shape, np.uint8)
    scores = [reward(picture, "", "", {})["score"] for picture in (flat, noise)]
    assert scores[1] < scores[0] < 0
    coarse = reward(noise, "", "", {}, quality=20)
    assert coarse["score"] > scores[1] and coarse["jpeg_kb"] == -coarse["score"]
    video = reward(np.stack([flat, noise]), "", "", {})
    assert video["score"] == pytest.approx(np.mean(scores))


def test_jpeg_refuses_other_arrays():
    for bad in (np.zeros((8, 8, 3)), np.zeros((8, 8), np.uint8), np.zeros((8, 8, 4), np.uint8)):
        with pytest.raises(ValueError, match="jpeg_compressibility reads uint8"):
            get_reward("jpeg_compressibility")(bad, "", "", {})
