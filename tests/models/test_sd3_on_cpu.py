"""The SD3 family against diffusers' own pipeline, on a tiny random SD3.5."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch

from verl_digen.models.family import Guidance, family_for

PROMPTS = ["a red cat", "the blue dog on the moon"]


@pytest.fixture(scope="module")
def family(sd3_path):
    family = family_for(sd3_path)(sd3_path)
    family.load_conditioner()
    return family


@pytest.fixture(scope="module")
def transformer(family):
    return family.load_transformer()


def batch(rows):
    return {key: torch.stack([row[key] for row in rows]) for key in rows[0]}


@pytest.fixture(scope="module")
def inputs(family):
    torch.manual_seed(1)
    x = torch.randn(2, *family.latent_shape(*family.default_size()))
    return x, torch.tensor([0.9, 0.25]), batch(family.encode_prompts(PROMPTS)), batch(family.encode_prompts(["", ""]))


def test_generation_equals_the_diffusers_pipeline(family, transformer, sd3_path):
    """Prompt encoding, schedule, guidance, Euler steps and decoding together give the pipeline's picture."""
    from diffusers import StableDiffusion3Pipeline

    pipeline = StableDiffusion3Pipeline.from_pretrained(sd3_path)
    pipeline.set_progress_bar_config(disable=True)
    x = torch.randn(1, *family.latent_shape(32, 32), generator=torch.Generator().manual_seed(3))
    expected = pipeline(
        PROMPTS[0], num_inference_steps=4, guidance_scale=3.0, latents=x, output_type="np", height=32, width=32
    ).images
    cond, negative = batch(family.encode_prompts(PROMPTS[:1])), batch(family.encode_prompts([""]))
    sigmas = family.sigmas(4, 32, 32)
    with torch.no_grad():
        for sigma, following in zip(sigmas[:-1], sigmas[1:], strict=True):
            v = family.predict(transformer, x, sigma.expand(1), cond, Guidance(scale=3.0), negative)
            x = x + (following - sigma) * v
    pixels = family.decode(x)
    assert pixels.dtype == np.uint8 and pixels.shape == (1, 32, 32, 3)
    assert np.abs(pixels.astype(int) - np.round(expected * 255).astype(int)).max() <= 1


def test_predict_is_one_call_of_the_transformer(family, transformer, inputs):
    x, sigma, cond, _ = inputs
    v = family.predict(transformer, x, sigma, cond, Guidance())
    expected = transformer(
        hidden_states=x,
        timestep=sigma * 1000,
        encoder_hidden_states=cond["prompt_embeds"],
        pooled_projections=cond["pooled_prompt_embeds"],
    ).sample
    assert torch.equal(v, expected)


@pytest.mark.parametrize("guidance", [Guidance(scale=4.5), Guidance(scale=0.0), Guidance(scale=3.0, rescale=True)])
def test_guidance_in_one_forward_equals_two(family, transformer, inputs, guidance):
    x, sigma, cond, negative = inputs
    together = family.predict(transformer, x, sigma, cond, guidance, negative)
    apart = family.predict(transformer, x, sigma, cond, replace(guidance, split=True), negative)
    torch.testing.assert_close(together, apart, rtol=1e-5, atol=1e-5)
    v_cond, v_neg = (family.predict(transformer, x, sigma, c, Guidance()) for c in (cond, negative))
    if not guidance.rescale:
        torch.testing.assert_close(together, v_neg + guidance.scale * (v_cond - v_neg), rtol=1e-5, atol=1e-5)


def test_predict_runs_in_the_models_dtype_and_returns_that_of_x(family, sd3_path, inputs):
    x, sigma, cond, _ = inputs
    half = family_for(sd3_path)(sd3_path, dtype=torch.bfloat16)
    model, seen = half.load_transformer(), {}
    model.register_forward_pre_hook(lambda _, __, kwargs: seen.update(kwargs), with_kwargs=True)
    assert half.predict(model, x, sigma, cond, Guidance()).dtype == torch.float32
    assert seen["hidden_states"].dtype == seen["encoder_hidden_states"].dtype == torch.bfloat16
    assert torch.equal(seen["timestep"], sigma * 1000)  # fp32: bf16 cannot tell 995 from 1000
    half.compute_dtype = torch.float32
    half.predict(model.float(), x.double(), sigma, cond, Guidance())
    assert seen["hidden_states"].dtype == torch.float32


def test_predict_in_float64(family, transformer, inputs):
    x, sigma, cond, _ = inputs
    double = family.load_transformer().double()
    v = family.predict(double, x.double(), sigma, cond, Guidance())
    assert v.dtype == torch.float64
    torch.testing.assert_close(v.float(), family.predict(transformer, x, sigma, cond, Guidance()), rtol=1e-4, atol=1e-5)


def test_wrong_inputs_of_predict_are_refused(family, transformer, inputs):
    x, sigma, cond, negative = inputs
    with pytest.raises(ValueError, match="needs the embeddings of a negative prompt"):
        family.predict(transformer, x, sigma, cond, Guidance(scale=0.0))
    with pytest.raises(ValueError, match=r"shape \[2\].*got \[1\]"):
        family.predict(transformer, x, sigma[:1], cond, Guidance())
    with pytest.raises(ValueError, match="no embedded guidance, but 3.5"):
        family.predict(transformer, x, sigma, cond, Guidance(embedded=3.5))
    short = {**negative, "prompt_embeds": negative["prompt_embeds"][:, :5]}
    with pytest.raises(ValueError, match="differ in shape"):
        family.predict(transformer, x, sigma, cond, Guidance(scale=2.0), short)


def test_prompt_embeddings_do_not_depend_on_the_other_prompts(family):
    together, alone = family.encode_prompts(PROMPTS), family.encode_prompts(PROMPTS[1:])
    assert together[1].keys() == alone[0].keys() == {"prompt_embeds", "pooled_prompt_embeds"}
    assert all(torch.equal(together[1][key], alone[0][key]) for key in alone[0])
    assert together[0]["pooled_prompt_embeds"].shape == (64,) and together[0]["prompt_embeds"].shape == (16 + 256, 64)
    assert not torch.equal(together[0]["prompt_embeds"], together[1]["prompt_embeds"])


def test_model_without_t5(sd3_path, tmp_path, inputs):
    model = shutil.copytree(sd3_path, tmp_path / "model", ignore=shutil.ignore_patterns("*_3"))
    index = json.loads((model / "model_index.json").read_text())
    index |= {"text_encoder_3": [None, None], "tokenizer_3": [None, None]}
    (model / "model_index.json").write_text(json.dumps(index))
    family = family_for(model)(model)
    family.load_conditioner()
    encoded = family.encode_prompts(PROMPTS[:1])[0]
    assert torch.equal(encoded["pooled_prompt_embeds"], inputs[2]["pooled_prompt_embeds"][0])
    assert torch.equal(encoded["prompt_embeds"][16:], torch.zeros(256, 64))


@pytest.mark.parametrize("steps", [1, 4, 10])
def test_sigmas_are_the_schedulers_and_follow_the_shift_formula(family, sd3_path, steps):
    from diffusers import FlowMatchEulerDiscreteScheduler

    scheduler = FlowMatchEulerDiscreteScheduler.from_pretrained(sd3_path, subfolder="scheduler")
    scheduler.set_timesteps(steps)
    sigmas = family.sigmas(steps, 32, 32)
    assert torch.equal(sigmas, scheduler.sigmas)
    assert sigmas.dtype == torch.float32 and len(sigmas) == steps + 1 and sigmas[-1] == 0

    def shifted(sigma):
        return 3 * sigma / (1 + 2 * sigma)

    unshifted = np.linspace(1.0, shifted(0.001), steps)  # SD3's scheduler shifts its smallest sigma twice
    np.testing.assert_allclose(sigmas[:-1].numpy(), shifted(unshifted), rtol=1e-5)


def test_sigmas_of_a_shift_that_depends_on_the_resolution(build_sd3, tmp_path):
    path = build_sd3(tmp_path / "model", use_dynamic_shifting=True, base_image_seq_len=16, max_image_seq_len=144)
    family = family_for(path)(path)
    small, large = family.sigmas(4, 16, 16), family.sigmas(4, 48, 48)
    mu = 1.15  # 12 x 12 tokens is the largest sequence, which has max_shift
    sigma = np.linspace(1.0, 0.001, 4)
    np.testing.assert_allclose(large[:-1].numpy(), np.exp(mu) / (np.exp(mu) + 1 / sigma - 1), rtol=1e-5)
    assert (small[1:-1] < large[1:-1]).all()
    assert family.effective_parameters(4, 48, 48)["shift"] == pytest.approx(np.exp(mu))


def test_unusable_schedule_and_step_count_are_refused(build_sd3, tmp_path, family):
    with pytest.raises(ValueError, match="num_steps must be at least 1, got 0"):
        family.sigmas(0, 32, 32)
    path = build_sd3(tmp_path / "model", invert_sigmas=True)
    with pytest.raises(ValueError, match="wanted 5 falling values"):
        family_for(path)(path).sigmas(4, 32, 32)


def test_sizes(family):
    assert family.default_size() == (32, 32, 1)
    assert family.latent_shape(32, 48) == (4, 16, 24)
    for size, message in [
        ((30, 32), r"multiples of 4, got 30 x 32"),
        ((0, 32), r"multiples of 4, got 0 x 32"),
        ((32, 100), r"at most 96 for this model, got 32 x 100"),
        ((32, 32, 5), r"num_frames must be 1, got 5"),
    ]:
        with pytest.raises(ValueError, match=message):
            family.check_size(*size)


def test_lora_targets_exist_and_every_one_matches(family):
    from peft import LoraConfig

    model = family.load_transformer()
    model.add_adapter(LoraConfig(r=2, target_modules=list(family.lora_target_modules)))
    adapted = {
        name.removesuffix(".lora_A.default") for name, _ in model.named_modules() if name.endswith("lora_A.default")
    }
    for target in family.lora_target_modules:
        assert any(name.endswith(f".{target}") for name in adapted), target
    assert len(adapted) == 2 * 8 - 1  # the last block has no text output


def test_transformer_is_loaded_frozen_and_in_eval_mode(transformer):
    assert not transformer.training
    assert not any(parameter.requires_grad for parameter in transformer.parameters())


def test_dispatched_attention_gives_the_same_result_and_gradients(family, inputs):
    x, sigma, cond, _ = inputs
    results = []
    for backend in (None, "native", "_native_math"):
        model = family.load_transformer(attention_backend=backend).requires_grad_(True)
        v = family.predict(model, x, sigma, cond, Guidance())
        v.square().mean().backward()
        results.append((v.detach(), model.transformer_blocks[0].attn.add_k_proj.weight.grad))
    for v, gradient in results[1:]:
        torch.testing.assert_close(v, results[0][0], rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(gradient, results[0][1], rtol=1e-4, atol=1e-7)
    assert family.attention_backend == "_native_math"


def test_attention_backend_reaches_every_layer(family, inputs, monkeypatch):
    from diffusers.models import attention_dispatch

    x, sigma, cond, _ = inputs
    seen, original = [], attention_dispatch.dispatch_attention_fn
    monkeypatch.setattr(
        attention_dispatch,
        "dispatch_attention_fn",
        lambda *args, backend=None, **kwargs: seen.append(backend) or original(*args, backend=backend, **kwargs),
    )
    family.predict(family.load_transformer(attention_backend="_native_math"), x, sigma, cond, Guidance())
    assert seen == ["_native_math"] * 3  # two joint layers, and the image-only one of the dual-attention block


@pytest.mark.parametrize("backend", ["_flash_3", "flash_hub", "nonsense"])
def test_attention_backend_that_cannot_be_had(family, backend):
    with pytest.raises(ValueError, match=rf"'{backend}' cannot be had here on cpu; available: .*native"):
        family.load_transformer(attention_backend=backend)


def test_model_that_ignores_the_attention_switch_is_refused(family, monkeypatch):
    monkeypatch.setattr(type(family), "install_dispatched_attention", lambda self, transformer: None)
    with pytest.raises(ValueError, match="JointAttnProcessor2_0 do not use diffusers' dispatcher"):
        family.load_transformer(attention_backend="native")


def test_effective_parameters_echo_what_is_used(family, transformer):
    echo = family.effective_parameters(4, 32, 48, guidance=Guidance(scale=0.0), transformer=transformer.bfloat16())
    transformer.float()
    assert json.loads(json.dumps(echo)) == echo
    assert echo["shift"] == 3.0 and echo["guidance_scale"] == 0.0 and echo["dtype"] == "bfloat16"
    assert (echo["height"], echo["width"], echo["num_steps"], echo["latent_shape"]) == (32, 48, 4, [4, 16, 24])
    assert echo["sigmas"] == family.sigmas(4, 32, 48).tolist()
