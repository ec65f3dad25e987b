"""Published models on the meta device: sizes, LoRA targets, FSDP units, latent shapes and schedules."""

from __future__ import annotations

import json

import numpy as np
import pytest

from verl_digen.models.family import available_families
from verl_digen.models.lora import add_lora
from verl_digen.models.presets import PRESETS, get_preset

# parameters of the transformers of the published checkpoints
PARAMETERS = {
    "sd3.5-medium": 2_243_171_520,
    "sd3.5-large": 8_056_627_520,
    "flux.1-dev": 11_901_408_320,
    "qwen-image": 20_430_401_088,
    "wan2.1-t2v-1.3b": 1_418_996_800,
    "wan2.1-t2v-14b": 14_288_491_584,
    "wan2.2-ti2v-5b": 4_999_787_712,
    "hunyuanvideo": 12_821_012_544,
}
UNITS = {
    "sd3.5-medium": 24,
    "sd3.5-large": 38,
    "flux.1-dev": 19 + 38,
    "qwen-image": 60,
    "wan2.1-t2v-1.3b": 30,
    "wan2.1-t2v-14b": 40,
    "wan2.2-ti2v-5b": 30,
    "hunyuanvideo": 20 + 40 + 2,
}


@pytest.fixture(scope="module", params=PRESETS, ids=str)
def name(request):
    return request.param


@pytest.fixture(scope="module")
def model(name):
    return PRESETS[name].build()


@pytest.fixture
def family(name, model, tmp_path):
    """The family on a folder with the published configurations and no weights."""
    preset = PRESETS[name]
    cls = available_families()[preset.family]
    scheduler = {"_class_name": "FlowMatchEulerDiscreteScheduler", **preset.scheduler}
    parts = {"transformer": ("config.json", dict(model.config)), "vae": ("config.json", preset.vae)}
    parts["scheduler"] = ("scheduler_config.json", scheduler)
    for part, (file, config) in parts.items():
        (tmp_path / part).mkdir()
        (tmp_path / part / file).write_text(json.dumps(config))
    for part in ("transformer", "vae"):
        (tmp_path / part / "diffusion_pytorch_model.safetensors").write_bytes(b"")
    index = {
        part: ["diffusers", preset.transformer_class if part == "transformer" else "AutoencoderKL"] for part in parts
    }
    index["scheduler"] = ["diffusers", scheduler["_class_name"]]
    (tmp_path / "model_index.json").write_text(json.dumps({"_class_name": cls.pipeline_classes[0], **index}))
    family = object.__new__(cls)  # its constructor wants weights
    family.path, family.shift = tmp_path, None
    return family


def test_parameters_are_the_published_ones(name, model):
    count = sum(p.numel() for p in model.parameters())
    assert count == PARAMETERS[name]
    assert abs(count / 1e9 / PRESETS[name].published_billions - 1) < 0.11  # the authors round


def test_every_parameter_is_in_a_sharded_unit_or_small(name, model):
    units = [m for m in model.modules() if type(m).__name__ in model._no_split_modules]
    assert len(units) == UNITS[name]
    inside = {id(p) for unit in units for p in unit.parameters()}
    outside = sum(p.numel() for p in model.parameters() if id(p) not in inside)
    assert outside < 0.12 * PARAMETERS[name]  # the root unit: gathered as a whole


def test_lora_binds_every_target(name, model):
    cls = available_families()[PRESETS[name].family]
    fresh = PRESETS[name].build()
    bound = add_lora(fresh, rank=4, alpha=8, target_modules=cls.lora_target_modules, dtype=fresh.dtype)
    names = {n for n, _ in fresh.named_parameters() if "lora_A" in n}
    assert bound == 2 * len(names)
    for target in cls.lora_target_modules:
        assert any(f".{target}.lora_A" in n for n in names), target


def test_latent_shape_and_tokens(name, family):
    preset = get_preset(name)
    assert family.latent_shape(*preset.size) == preset.latent_shape
    family.check_size(*family.default_size())
    positions = int(np.prod(preset.latent_shape[1:]))
    assert positions / preset.tokens == 4


def test_schedule(name, family):
    """Shift: the one published, or the one that depends on the resolution, computed from the formula."""
    preset = get_preset(name)
    sigmas = family.sigmas(10, *preset.size).numpy().astype(float)
    shift = family._effective_shift(10, *preset.size)
    if "max_shift" in preset.scheduler:
        slope = (preset.scheduler["max_shift"] - 0.5) / (preset.scheduler["max_image_seq_len"] - 256)
        assert shift == pytest.approx(np.exp(0.5 + slope * (preset.tokens - 256)))
    else:
        assert shift == preset.scheduler.get("shift", preset.scheduler.get("flow_shift"))
    unshifted = sigmas[:-1] / (shift - (shift - 1) * sigmas[:-1])
    if "shift_terminal" in preset.scheduler:
        assert sigmas[-2] == pytest.approx(preset.scheduler["shift_terminal"])
    elif preset.family != "sd3":  # SD3's scheduler shifts its smallest sigma twice
        np.testing.assert_allclose(np.diff(unshifted), -0.1, atol=2e-3)
    assert sigmas[0] == pytest.approx(1.0, abs=1e-3)


def test_unknown_model_lists_what_is_there():
    with pytest.raises(ValueError, match="unknown model 'flux'; available: sd3.5-medium, .*hunyuanvideo"):
        get_preset("flux")
