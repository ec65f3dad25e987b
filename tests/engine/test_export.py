"""Checkpoints as other programs load them: stock diffusers and peft give the Trainer's prediction."""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from tests.engine.harness import Options, build_engine
from verl_digen.cli import export as command
from verl_digen.config.digen import EMAConfig
from verl_digen.engine.checkpoint import save_engine
from verl_digen.models.adapter import check_adapter
from verl_digen.models.family import Guidance
from verl_digen.models.tiny import build_tiny

EMA = {"ema": EMAConfig(enable=True, decay=0.5, every=1)}
LORA = {"lora_rank": 2, "lora_alpha": 6}
SMALL_SHARDS = ["--shard-size", "100KB"]


@pytest.fixture(scope="module")
def sd3_path(tmp_path_factory) -> Path:
    return build_tiny("sd3", tmp_path_factory.mktemp("sd3"))


def options(path: Path, **changes) -> Options:
    model = {"path": str(path), **changes.pop("model", {})}
    return Options(model=model, **{"dtype": "float32", "digen": EMA, **changes})


@torch.no_grad()
def train(engine) -> None:
    """Move the trained weights, and their average by half of it."""
    for _, parameter in engine.named_trainable():
        parameter.mul_(1.1).add_(0.05)
    engine.ema.update()


def inputs(family) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return {
        "x": torch.randn(2, *family.latent_shape(*family.default_size()), generator=generator),
        "sigma": torch.tensor([0.9, 0.25]),
        "prompt_embeds": torch.randn(2, 7, 64, generator=generator),
        "pooled_prompt_embeds": torch.randn(2, 64, generator=generator),
    }


@torch.no_grad()
def predicted(engine, averaged: bool = False) -> torch.Tensor:
    """The Trainer's prediction, by its current weights or their average."""
    given = inputs(engine.family)
    x, sigma = given.pop("x"), given.pop("sigma")
    engine.module.eval()
    with engine.averaged_weights() if averaged else torch.no_grad():
        return engine.family.predict(engine.module, x, sigma, given, Guidance())


@torch.no_grad()
def stock(transformer, family) -> torch.Tensor:
    """What diffusers' transformer gives by itself."""
    given = inputs(family)
    dtype = next(transformer.parameters()).dtype
    return transformer(
        hidden_states=given["x"].to(dtype),
        timestep=given["sigma"] * 1000,
        encoder_hidden_states=given["prompt_embeds"].to(dtype),
        pooled_projections=given["pooled_prompt_embeds"].to(dtype),
        return_dict=False,
    )[0]


def export(*arguments) -> int:
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    return command.run(parser.parse_args([str(argument) for argument in arguments]))


def pipeline(path):
    from diffusers import DiffusionPipeline

    return DiffusionPipeline.from_pretrained(path)


def two_ranks(rank: int, path: str, out: str) -> None:
    """A rank of two that writes a full and a LoRA checkpoint, and what it predicts by them."""
    dist.init_process_group("gloo", init_method=f"file://{out}/store", rank=rank, world_size=2)
    for name, model, contents in (("full", {}, ("model", "hf_model")), ("lora", LORA, ("model",))):
        engine = build_engine(options(Path(path), model=model, contents=contents))
        train(engine)
        save_engine(engine, f"{out}/{name}/global_step_1/actor")
        given = {kind: predicted(engine, averaged=kind == "ema") for kind in ("current", "ema")}
        if rank == 0:
            save_file(given, f"{out}/{name}/predicted.safetensors")
    dist.barrier()
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def written(sd3_path, tmp_path_factory) -> Path:
    """Checkpoints of two ranks in ``full`` and ``lora``."""
    out = tmp_path_factory.mktemp("two_ranks")
    torch.multiprocessing.spawn(two_ranks, args=(str(sd3_path), str(out)), nprocs=2)
    return out


def expected(written: Path, name: str) -> dict[str, torch.Tensor]:
    found = load_file(written / name / "predicted.safetensors")
    assert (found["current"] - found["ema"]).abs().max() > 1e-2, "the test would not tell them apart"
    return found


@pytest.mark.parametrize("weights", ["current", "ema"])
def test_a_full_run_of_two_ranks_loads_into_the_stock_pipeline(written, sd3_path, tmp_path, weights):
    out = tmp_path / "model"
    checkpoint = written / "full" / "global_step_1"
    assert export(checkpoint, "--out", out, "--weights", weights, *SMALL_SHARDS) == 0
    assert len(list((out / "transformer").glob("*.safetensors"))) > 1
    assert json.loads((out / "transformer" / "config.json").read_text())["_class_name"] == "SD3Transformer2DModel"
    loaded = pipeline(out)
    torch.testing.assert_close(stock(loaded.transformer, family(sd3_path)), expected(written, "full")[weights])


def test_the_dtype_of_an_export_is_the_one_asked_for(written, sd3_path, tmp_path):
    out = tmp_path / "model"
    assert export(written / "full" / "global_step_1", "--out", out, "--dtype", "bfloat16") == 0
    (file,) = (out / "transformer").glob("*.safetensors")
    assert {value.dtype for value in load_file(file).values()} == {torch.bfloat16}
    difference = stock(pipeline(out).transformer, family(sd3_path)) - expected(written, "full")["current"]
    assert 0 < difference.abs().max() < 0.1


def test_hf_model_in_a_checkpoint_of_two_ranks_is_stock_diffusers(written, sd3_path):
    from diffusers import SD3Transformer2DModel

    transformer = SD3Transformer2DModel.from_pretrained(written / "full" / "global_step_1" / "actor" / "transformer")
    torch.testing.assert_close(stock(transformer, family(sd3_path)), expected(written, "full")["current"])


@pytest.mark.parametrize("weights", ["in the checkpoint", "current", "ema"])
def test_an_adapter_of_two_ranks_loads_into_stock_diffusers_and_peft(written, sd3_path, tmp_path, weights):
    from peft import PeftModel

    checkpoint, out = written / "lora" / "global_step_1", tmp_path / "adapter"
    if weights == "in the checkpoint":
        out, weights = checkpoint / "actor" / "lora_adapter", "current"
    else:
        assert export(checkpoint, "--out", out, "--weights", weights) == 0
    wanted = expected(written, "lora")[weights]
    loaded = pipeline(sd3_path)
    loaded.load_lora_weights(out)
    torch.testing.assert_close(stock(loaded.transformer, family(sd3_path)), wanted)
    (config,) = loaded.transformer.peft_config.values()
    assert (config.r, config.lora_alpha) == (2, 6)
    wrapped = PeftModel.from_pretrained(pipeline(sd3_path).transformer, out)
    torch.testing.assert_close(stock(wrapped, family(sd3_path)), wanted)


def family(path):
    from verl_digen.models.family import family_for

    return family_for(path)(path)


# ---- start adapters ----------------------------------------------------------------------------------------------


@pytest.fixture
def adapter(written) -> Path:
    return written / "lora" / "global_step_1" / "actor" / "lora_adapter"


def in_model_names(file: Path, target: Path) -> Path:
    """The tensors by peft's names in the model, without alpha."""
    names = {
        name.removeprefix("transformer.").replace(".weight", ".default.weight"): value
        for name, value in load_file(file).items()
    }
    save_file(names, target)
    return target


@pytest.mark.parametrize("form", ["checkpoint", "engine folder", "folder", "diffusers file", "peft folder"])
def test_a_start_adapter_of_any_form_predicts_as_the_run_that_wrote_it(written, sd3_path, tmp_path, adapter, form):
    path = {
        "checkpoint": written / "lora" / "global_step_1",
        "engine folder": written / "lora" / "global_step_1" / "actor",
        "folder": adapter,
        "diffusers file": adapter / "pytorch_lora_weights.safetensors",
        "peft folder": tmp_path,
    }[form]
    if form == "peft folder":
        for name in ("adapter_model.safetensors", "adapter_config.json"):
            shutil.copy(adapter / name, tmp_path)
    engine = build_engine(options(sd3_path, model={**LORA, "lora_adapter_path": str(path)}))
    torch.testing.assert_close(predicted(engine), expected(written, "lora")["current"])


def test_an_adapter_without_alpha_counts_as_alpha_equal_to_rank(sd3_path, tmp_path, adapter):
    """As stock loaders take it; names as in the model are read too."""
    file = in_model_names(adapter / "pytorch_lora_weights.safetensors", tmp_path / "lora.safetensors")
    with pytest.raises(ValueError, match=r"alpha 2 \(the file names none, which means the rank\).*lora_alpha=6"):
        build_engine(options(sd3_path, model={**LORA, "lora_adapter_path": str(tmp_path)}))
    build_engine(options(sd3_path, model={"lora_rank": 2, "lora_alpha": 2, "lora_adapter_path": str(file)}))


@pytest.mark.parametrize("form", ["diffusers", "peft"])
@pytest.mark.parametrize(
    ("rank", "alpha", "facts"),
    [
        (4, 6, ["rank 2", "lora_rank=4"]),
        (2, 8, ["alpha 6", "lora_alpha=8"]),
        (1, 3, ["rank 2", "lora_rank=1", "alpha 6", "lora_alpha=3"]),
    ],
)
def test_another_rank_or_alpha_is_an_error_with_both_numbers(adapter, tmp_path, form, rank, alpha, facts):
    if form == "peft":
        for name in ("adapter_model.safetensors", "adapter_config.json"):
            shutil.copy(adapter / name, tmp_path)
        adapter = tmp_path
    with pytest.raises(ValueError, match="lora_adapter_path") as error:
        check_adapter(adapter, rank=rank, alpha=alpha)
    assert all(fact in str(error.value) for fact in facts)


def test_a_rank_1_adapter_does_not_broadcast_into_rank_4(sd3_path, tmp_path):
    save_engine(build_engine(options(sd3_path, model={"lora_rank": 1, "lora_alpha": 4}, digen={})), str(tmp_path))
    with pytest.raises(ValueError, match="rank 1, but actor_rollout_ref.model.lora_rank=4"):
        build_engine(options(sd3_path, model={"lora_rank": 4, "lora_alpha": 4, "lora_adapter_path": str(tmp_path)}))


def test_other_target_modules_and_files_that_hold_no_adapter_are_named(sd3_path, tmp_path, adapter):
    with pytest.raises(ValueError, match=r"holds \d+ tensors \(.*target_modules"):
        build_engine(options(sd3_path, model={**LORA, "target_modules": ["to_q"], "lora_adapter_path": str(adapter)}))
    with pytest.raises(ValueError, match="does not exist"):
        check_adapter(tmp_path / "nowhere", rank=2, alpha=6)
    with pytest.raises(ValueError, match="no pytorch_lora_weights.safetensors"):
        check_adapter(tmp_path, rank=2, alpha=6)
    with pytest.raises(ValueError, match="none of them named lora_A"):
        check_adapter(sd3_path / "transformer" / "diffusion_pytorch_model.safetensors", rank=2, alpha=6)
    (tmp_path / "adapter_model.safetensors").write_text("version https://git-lfs.github.com/spec/v1")
    with pytest.raises(ValueError, match="no complete safetensors file"):
        check_adapter(tmp_path, rank=2, alpha=6)


# ---- bad arguments of the command -----------------------------------------------------------------------------------


def test_what_the_command_cannot_do_is_named(written, sd3_path, tmp_path, capsys):
    checkpoint = written / "full" / "global_step_1"
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    for arguments, words in (
        ([tmp_path, "--out", tmp_path / "o"], "state.json is missing"),
        ([checkpoint, "--out", tmp_path / "full"], "exists already and is not empty"),
        ([checkpoint, "--out", tmp_path / "o", "--model", tmp_path / "gone"], "--model FOLDER"),
    ):
        assert export(*arguments) == 2
        assert words in capsys.readouterr().err
    assert not (tmp_path / "o").exists()


def test_averaged_weights_that_were_not_saved_are_named(sd3_path, tmp_path, capsys):
    save_engine(build_engine(options(sd3_path, digen={})), str(tmp_path / "actor"))
    assert export(tmp_path, "--out", tmp_path / "o", "--weights", "ema") == 2
    assert "holds no ema weights (it holds: model" in capsys.readouterr().err
