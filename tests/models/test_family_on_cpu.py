"""Guidance, the registry of families and the check of a model folder's parts."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from verl_digen.models.family import (
    Guidance,
    ModelFamily,
    available_families,
    family_for,
    guided_velocity,
    register_family,
)


@given(scale=st.floats(-20, 20))
def test_guidance_is_off_only_at_one(scale):
    assert Guidance(scale=scale).uses_cfg is (scale != 1.0)


def test_guidance_scale_zero_is_the_negative_prompt_alone():
    v_cond, v_neg = torch.randn(2, 3, 4, 4), torch.randn(2, 3, 4, 4)
    assert torch.equal(guided_velocity(v_cond, v_neg, Guidance(scale=0.0), (1, 2, 3)), v_neg)


def test_guidance_rescale_restores_the_conditional_norm():
    v_cond, v_neg = torch.randn(2, 3, 4, 4), torch.randn(2, 3, 4, 4)
    plain = guided_velocity(v_cond, v_neg, Guidance(scale=4.0), (1, 2, 3))
    v = guided_velocity(v_cond, v_neg, Guidance(scale=4.0, rescale=True), (1, 2, 3))
    torch.testing.assert_close(v.flatten(1).norm(dim=1), v_cond.flatten(1).norm(dim=1))
    torch.testing.assert_close(torch.cosine_similarity(v.flatten(1), plain.flatten(1)), torch.ones(2))


def test_guided_velocity_of_bf16_is_computed_in_fp32():
    v_cond, v_neg = torch.randn(1, 64).bfloat16(), torch.randn(1, 64).bfloat16()
    v = guided_velocity(v_cond, v_neg, Guidance(scale=7.0), (1,))
    assert torch.equal(v, v_neg.float() + 7.0 * (v_cond.float() - v_neg.float()))


@pytest.mark.parametrize("bad", [{"scale": float("nan")}, {"embedded": float("inf")}, {"rescale": True}])
def test_bad_guidance_is_refused(bad):
    with pytest.raises(ValueError, match="guidance"):
        Guidance(**bad)


def test_family_is_found_by_pipeline_class_or_name(sd3_path, digits_path):
    assert family_for(sd3_path).name == "sd3"
    assert family_for(digits_path).name == "digits"
    assert family_for(digits_path, name="sd3").name == "sd3"


def test_unknown_family_lists_what_is_available(tmp_path):
    with pytest.raises(ValueError, match=r"unknown model family 'flux9'.*digits \(DigitsPipeline\).*sd3"):
        family_for(tmp_path, name="flux9")
    (tmp_path / "model_index.json").write_text(json.dumps({"_class_name": "WonderPipeline"}))
    with pytest.raises(ValueError, match=r"'WonderPipeline'.*sd3 \(StableDiffusion3Pipeline\)"):
        family_for(tmp_path)


def test_missing_folder_and_broken_index_are_explained(tmp_path):
    with pytest.raises(ValueError, match="does not exist"):
        family_for(tmp_path / "nowhere")
    (tmp_path / "model_index.json").write_text("{")
    with pytest.raises(ValueError, match=r"cannot read .*model_index.json"):
        family_for(tmp_path)


def test_a_name_cannot_be_registered_twice():
    taken = available_families()["sd3"]
    with pytest.raises(ValueError, match=r"'sd3' is taken by verl_digen.models.sd3.SD3Family"):
        register_family(type("Other", (ModelFamily,), {"name": "sd3", "pipeline_classes": ()}))
    assert available_families()["sd3"] is taken


def test_all_missing_parts_are_listed_at_once(sd3_path, tmp_path):
    family = family_for(sd3_path)
    family.check_parts(sd3_path)
    model = shutil.copytree(sd3_path, tmp_path / "model")
    next((model / "vae").glob("*.safetensors")).rename(model / "vae" / "weights.bin")
    (model / "tokenizer_2" / "tokenizer.json").unlink()
    (model / "scheduler" / "scheduler_config.json").unlink()
    shutil.rmtree(model / "text_encoder_2")
    with pytest.raises(ValueError, match="4 thing") as error:
        family.check_parts(model)
    for expected in ("pickled weights are not loaded", "tokenizer_2: none of", "no scheduler_config", "no folder"):
        assert expected in str(error.value)


def test_part_of_another_library_is_not_built(digits_path, tmp_path):
    model = shutil.copytree(digits_path, tmp_path / "model")
    index = json.loads((model / "model_index.json").read_text())
    index["transformer"] = ["evil", "Model"]
    (model / "model_index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match="'evil'; only parts of diffusers and transformers"):
        family_for(model)(model).load_transformer()
