"""The shipped digits model: the folder, its scales, and that it draws well enough to learn, and no better."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from verl_digen.data.digits import TRAIN_TEMPLATES, VAL_TEMPLATES, digit_prompts, load_scans
from verl_digen.models.digits import ASSETS, ensure_digits_model
from verl_digen.models.family import Guidance, family_for
from verl_digen.rewards.functions.digit_classifier import digit_probabilities


@pytest.fixture(scope="module")
def family(digits_path):
    family = family_for(digits_path)(digits_path)
    family.load_conditioner()
    return family


def test_shipped_files_are_small_and_safe():
    files = [file for file in ASSETS.rglob("*") if file.is_file()]
    assert sum(file.stat().st_size for file in files) < 4e6
    assert {file.suffix for file in files} == {".json", ".safetensors"}


def test_sizes_and_schedule(family):
    assert family.default_size() == (8, 8, 1) and family.latent_shape(8, 8) == (1, 8, 8)
    torch.testing.assert_close(family.sigmas(10, 8, 8), torch.linspace(1, 0, 11), rtol=0, atol=1e-7)
    with pytest.raises(ValueError, match="at most 8 for this model, got 16 x 8"):
        family.sigmas(10, 16, 8)
    family.check_parts(family.path)


def test_every_word_of_every_prompt_is_known_and_fits(family):
    for prompt in sum(digit_prompts(), []):
        tokens = family.tokenizer(prompt).input_ids
        assert family.tokenizer.unk_token_id not in tokens and len(tokens) <= family.tokenizer.model_max_length, prompt


def test_prompts_encode_alone_as_together_and_apart_from_each_other(family):
    prompts = [texts[0] for texts in digit_prompts()]
    together = family.encode_prompts(prompts)
    assert together[0]["prompt_embeds"].shape == (8, 32) and together[0]["pooled_prompt_embeds"].shape == (32,)
    for prompt, encoded in zip(prompts, together, strict=True):
        assert all(torch.equal(encoded[key], family.encode_prompts([prompt])[0][key]) for key in encoded)
    pooled = torch.stack([encoded["pooled_prompt_embeds"] for encoded in together])
    assert torch.cdist(pooled, pooled).fill_diagonal_(9).min() > 1


def test_decode_is_inverted_by_the_reward():
    """Real scans, brought to the model's scale and decoded, are read by the classifier as scans."""
    family = family_for(ASSETS)(ASSETS)
    images, labels = load_scans()
    pixels = family.decode(torch.from_numpy(images / 8 - 1).unsqueeze(1))
    assert pixels.dtype == np.uint8 and pixels.shape == (len(images), 8, 8, 1)
    np.testing.assert_allclose(pixels[..., 0] * (16 / 255), images, atol=16 / 255 / 2 + 1e-6)
    assert (digit_probabilities(pixels).argmax(axis=1) == labels).mean() > 0.97
    assert family.decode(torch.tensor([[[[-3.0, 3.0]]]])).ravel().tolist() == [0, 255]


@torch.no_grad()
def accuracy(family, templates, guidance, samples):
    labels = np.arange(samples) % 10
    texts = [digit_prompts(templates)[digit][i // 10 % len(templates)] for i, digit in enumerate(labels)]
    table = dict(zip(sorted(set(texts)), family.encode_prompts(sorted(set(texts))), strict=True))
    cond = {key: torch.stack([table[text][key] for text in texts]) for key in ("prompt_embeds", "pooled_prompt_embeds")}
    empty = family.encode_prompts([""])[0]
    negative = {key: value.expand(samples, *value.shape) for key, value in empty.items()}
    x = torch.randn(samples, *family.latent_shape(8, 8), generator=torch.Generator().manual_seed(1))
    transformer, sigmas = family.load_transformer(), family.sigmas(10, 8, 8)
    for sigma, following in zip(sigmas[:-1], sigmas[1:], strict=True):
        x = x + (following - sigma) * family.predict(
            transformer, x, sigma.expand(samples), cond, guidance, negative if guidance.uses_cfg else None
        )
    return (digit_probabilities(family.decode(x)).argmax(axis=1) == labels).mean()


@pytest.mark.slow
def test_accuracy_leaves_room_to_learn_and_guidance_helps(family):
    """About 0.5 on prompts of either kind (standard error 0.03 with 300 samples)."""
    plain = accuracy(family, VAL_TEMPLATES, Guidance(), 300)
    assert 0.4 <= plain <= 0.66
    assert abs(accuracy(family, TRAIN_TEMPLATES, Guidance(), 300) - plain) < 0.15
    assert accuracy(family, VAL_TEMPLATES, Guidance(scale=3.0), 100) > plain + 0.1


def test_copy_is_idempotent_and_never_overwrites(tmp_path):
    model = ensure_digits_model(tmp_path / "model")
    before = {file: file.stat().st_mtime_ns for file in model.rglob("*") if file.is_file()}
    assert ensure_digits_model(model) == model
    assert {file: file.stat().st_mtime_ns for file in model.rglob("*") if file.is_file()} == before
    (model / "model_index.json").write_text("{}")
    with pytest.raises(ValueError, match="not the shipped digits model"):
        ensure_digits_model(model)


@pytest.mark.slow
def test_rebuild_is_deterministic(tmp_path):
    from verl_digen.models.digits_pretrain import build_digits_model

    images, labels = load_scans()
    arguments = (torch.from_numpy(images / 8 - 1).unsqueeze(1), torch.from_numpy(labels), digit_prompts())
    for name in ("a", "b"):
        torch.manual_seed(hash(name) % 1000)
        build_digits_model(tmp_path / name, *arguments, iterations=2, batch_size=4)
    files = sorted(file.relative_to(tmp_path / "a") for file in (tmp_path / "a").rglob("*") if file.is_file())
    assert files == sorted(file.relative_to(ASSETS) for file in ASSETS.rglob("*") if file.is_file())
    assert all((tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes() for file in files)
    family_for(tmp_path / "a")(tmp_path / "a").load_transformer()
