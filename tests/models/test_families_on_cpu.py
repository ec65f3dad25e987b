"""Every family against the stock diffusers pipeline, on tiny random models in the real folder layout."""

from __future__ import annotations

import importlib
import json
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
import torch

from verl_digen.diffusion.denoise import denoise, run_to_end
from verl_digen.models.family import Guidance, family_for, stack_conditions
from verl_digen.models.lora import add_lora
from verl_digen.models.tiny import build_tiny

PROMPTS = ["a red cat", "the old blue dog walking on the green moon"]


@dataclass(frozen=True)
class Case:
    """A family at a small size.

    Attributes:
        guidance: as the recipes use it; ``call`` says the same to the stock pipeline.
        adapted: modules that LoRA binds in the tiny model.
        unlike: its prompt tensors have the prompt's own length.
    """

    name: str
    size: tuple[int, int, int]
    guidance: Guidance
    call: dict = field(default_factory=dict)
    adapted: int = 0
    unlike: bool = False


CASES = [
    Case("sd3", (32, 48, 1), Guidance(scale=4.5), {"guidance_scale": 4.5}, adapted=2 * 8 - 1),
    Case("flux", (32, 48, 1), Guidance(embedded=3.5), {"guidance_scale": 3.5}, adapted=2 * 12 + 2 * 3),
    Case(
        "qwen_image",
        (32, 48, 1),
        Guidance(scale=4.0, rescale=True),
        {"true_cfg_scale": 4.0, "negative_prompt": " "},
        adapted=2 * 12,
        unlike=True,
    ),
    Case("wan", (32, 48, 9), Guidance(scale=4.5), {"guidance_scale": 4.5, "num_frames": 9}, adapted=2 * 8),
    Case(
        "hunyuan_video",
        (32, 48, 5),
        Guidance(embedded=6.0),
        {"guidance_scale": 6.0, "num_frames": 5},
        adapted=2 * 8 + 2 * 3 + 4,
    ),
]


@pytest.fixture(scope="module", params=CASES, ids=lambda case: case.name)
def case(request):
    return request.param


@pytest.fixture(scope="module")
def path(case, tmp_path_factory):
    return build_tiny(case.name, tmp_path_factory.mktemp(case.name))


@pytest.fixture(scope="module")
def family(path, case):
    family = family_for(path)(path)
    assert family.name == case.name
    family.load_conditioner()
    return family


@pytest.fixture(scope="module")
def transformer(family):
    return family.load_transformer()


def conditions(family, case, prompts):
    """Prompt and, with CFG, negative prompt tensors as batches."""
    cond = stack_conditions(family.encode_prompts(prompts))
    negative = stack_conditions(family.encode_prompts([""] * len(prompts))) if case.guidance.uses_cfg else None
    return cond, negative


def inputs(family, case, prompts=PROMPTS):
    torch.manual_seed(1)
    x = torch.randn(len(prompts), *family.latent_shape(*case.size))
    sigma = torch.tensor([0.9, 0.25, 0.6])[: len(prompts)]
    return x, sigma, *conditions(family, case, prompts)


@pytest.mark.parametrize("prompt", PROMPTS)
def test_ode_sampling_equals_the_stock_pipeline(family, transformer, path, case, prompt):
    """Encoding, schedule, packing, positions, masks, guidance, Euler steps and decoding give the pipeline's output."""
    import diffusers

    pipeline = getattr(diffusers, json.loads((path / "model_index.json").read_text())["_class_name"])
    pipeline = pipeline.from_pretrained(path)
    pipeline.set_progress_bar_config(disable=True)
    if hasattr(pipeline.vae, "enable_tiling") and case.name == "hunyuan_video":
        pipeline.vae.enable_tiling()
    height, width, frames = case.size
    x = torch.randn(1, *family.latent_shape(*case.size), generator=torch.Generator().manual_seed(3))
    given = x
    if case.name in ("flux", "qwen_image"):
        given = importlib.import_module("verl_digen.models.packed").pack_latents(x)
    options = {"num_inference_steps": 4, "height": height, "width": width, "latents": given, **case.call}
    expected_latents = pipeline(prompt, output_type="latent", **options)[0]
    expected = np.asarray(pipeline(prompt, output_type="np", **options)[0])
    cond, negative = conditions(family, case, [prompt])
    result = run_to_end(
        denoise(
            lambda x, sigma, i: family.predict(transformer, x, sigma, cond, case.guidance, negative=negative),
            x,
            family.sigmas(4, *case.size),
            kind="ode",
            eta=0.0,
            selections=None,
            noise_fn=None,
            dtype=torch.float32,
            record=False,
        )
    )
    final = result.x_final
    if case.name in ("flux", "qwen_image"):
        final = importlib.import_module("verl_digen.models.packed").pack_latents(final)
    torch.testing.assert_close(final, torch.as_tensor(expected_latents).reshape(final.shape), rtol=0, atol=1e-5)
    pixels = family.decode(result.x_final)
    assert pixels.dtype == np.uint8 and pixels.shape == ((1, *expected.shape[1:]))
    assert pixels.shape[-3:] == (height, width, 3) and (frames == 1 or pixels.shape[1] == frames)
    assert np.abs(pixels.astype(int) - np.round(expected * 255).astype(int)).max() <= 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_training_and_sampling_predict_the_same_bits(family, path, case, dtype):
    """With gradients, and gradient checkpointing, the forward is the one without; the model's fp32 modules stay."""
    own = family_for(path)(path, dtype=dtype)
    model = own.load_transformer()
    x, sigma, cond, negative = inputs(family, case)
    with torch.no_grad():
        sampled = own.predict(model, x, sigma, cond, case.guidance, negative)
    model.requires_grad_(True).train()
    trained = own.predict(model, x, sigma, cond, case.guidance, negative)
    model.enable_gradient_checkpointing()
    checkpointed = own.predict(model, x, sigma, cond, case.guidance, negative)
    assert torch.equal(sampled, trained) and torch.equal(sampled, checkpointed)
    checkpointed.square().mean().backward()
    without = [name for name, p in model.named_parameters() if p.grad is None]
    assert all("attn" in name or "norm" in name or "context" in name or "txt" in name for name in without), without
    kept = {p.dtype for name, p in model.named_parameters()}
    assert kept == ({dtype, torch.float32} if case.name == "wan" else {dtype})


def test_batched_prompts_equal_single_ones(family, transformer, case):
    """Prompts of unlike length in one batch: what is padded is masked, and nobody sees it."""
    prompts = [PROMPTS[0], " ".join([PROMPTS[1]] * 8)]
    x, sigma, cond, negative = inputs(family, case, prompts)
    lengths = {len(row["prompt_embeds"]) for row in family.encode_prompts(prompts)}
    assert (len(lengths) > 1) == case.unlike
    together = family.predict(transformer, x, sigma, cond, case.guidance, negative)
    for i, prompt in enumerate(prompts):
        one = conditions(family, case, [prompt])
        alone = family.predict(transformer, x[i : i + 1], sigma[i : i + 1], one[0], case.guidance, one[1])
        torch.testing.assert_close(together[i : i + 1], alone, rtol=1e-5, atol=1e-5)


def test_prompt_and_guidance_reach_the_model(family, transformer, case):
    x, sigma, cond, negative = inputs(family, case)
    v = family.predict(transformer, x, sigma, cond, case.guidance, negative)
    swapped = {key: value.flip(0) for key, value in cond.items()}
    assert not torch.equal(v, family.predict(transformer, x, sigma, swapped, case.guidance, negative))
    other = (
        Guidance(embedded=case.guidance.embedded + 1)
        if case.guidance.embedded is not None
        else Guidance(scale=case.guidance.scale + 1, rescale=case.guidance.rescale)
    )
    assert not torch.equal(v, family.predict(transformer, x, sigma, cond, other, negative))


def test_split_guidance_equals_one_forward(family, transformer, case):
    if not case.guidance.uses_cfg:
        with pytest.raises(ValueError, match="embedded guidance"):
            family.predict(transformer, *inputs(family, case)[:3], Guidance())
        return
    x, sigma, cond, negative = inputs(family, case)
    together = family.predict(transformer, x, sigma, cond, case.guidance, negative)
    apart = family.predict(transformer, x, sigma, cond, replace(case.guidance, split=True), negative)
    torch.testing.assert_close(together, apart, rtol=1e-5, atol=1e-5)


def test_lora_binds_its_targets(family, case):
    model = family.load_transformer()
    bound = add_lora(model, rank=2, alpha=4, target_modules=family.lora_target_modules, dtype=torch.float32)
    assert bound == 2 * case.adapted
    adapted = {name for name, _ in model.named_parameters() if "lora_A" in name}
    for target in family.lora_target_modules:
        assert any(f".{target}.lora_A" in name for name in adapted), target


def test_sharded_units_are_named_by_the_model(transformer):
    units = set(transformer._no_split_modules)
    assert {type(module).__name__ for module in transformer.modules()} & units


def test_vae_has_the_dtype_it_wants(path, case):
    half = family_for(path)(path, dtype=torch.bfloat16)
    half.load_conditioner()
    assert half.pipeline.vae.dtype == (torch.float32 if case.name == "wan" else torch.bfloat16)


def test_sizes_that_cannot_be_made_are_refused(family, case):
    height, width, frames = case.size
    for size in [(height + 1, width, frames), (height, 0, frames), (height, width, frames + 1)]:
        with pytest.raises(ValueError, match=str(size[0]) if size[2] == frames else str(size[2])):
            family.check_size(*size)


def test_shift_of_the_request_replaces_the_models_own(path, case):
    family = family_for(path)(path)
    family.shift = 5.0
    if case.name in ("flux", "qwen_image"):
        with pytest.raises(ValueError, match="sampling.shift=5: the schedule .* takes its shift from the resolution"):
            family.sigmas(4, *case.size)
        return
    assert family.effective_parameters(4, *case.size, guidance=case.guidance)["shift"] == 5.0
    sigmas = family.sigmas(4, *case.size)
    assert (sigmas[1:-1] != family_for(path)(path).sigmas(4, *case.size)[1:-1]).all()


def test_effective_parameters_are_plain_and_complete(family, transformer, case):
    echo = family.effective_parameters(4, *case.size, guidance=case.guidance, transformer=transformer)
    assert json.loads(json.dumps(echo)) == echo
    assert echo["family"] == case.name and echo["num_steps"] == 4 and echo["shift"] > 0
    assert (echo["guidance_scale"], echo["guidance_embedded"]) == (case.guidance.scale, case.guidance.embedded)


def test_prepare_tiny_writes_a_model_and_names_the_families(tmp_path, capsys):
    from verl_digen.cli.main import main

    assert main(["prepare", "tiny", "flux", "--out", str(tmp_path / "model")]) == 0
    assert family_for(tmp_path / "model").name == "flux"
    assert main(["prepare", "tiny", "fluks", "--out", str(tmp_path / "other")]) == 2
    assert "'fluks'; available: flux, hunyuan_video, qwen_image, sd3, wan" in capsys.readouterr().err


def test_prompts_of_unlike_length_need_a_mask():
    rows = [{"prompt_embeds": torch.ones(2, 3)}, {"prompt_embeds": torch.ones(4, 3)}]
    with pytest.raises(ValueError, match=r"\[2, 3\] and \[4, 3\].*beside a mask"):
        stack_conditions(rows)
    masked = stack_conditions([row | {"prompt_mask": torch.ones(len(row["prompt_embeds"]))} for row in rows])
    assert masked["prompt_mask"].tolist() == [[1, 1, 0, 0], [1, 1, 1, 1]]
    assert masked["prompt_embeds"].shape == (2, 4, 3) and masked["prompt_embeds"][0, 2:].abs().max() == 0
