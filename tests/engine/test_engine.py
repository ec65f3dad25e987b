"""The engine: publishing, EMA, checkpoints without pickles, exact resume (I8, I9)."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file

from tests.engine.harness import (
    Options,
    build_engine,
    build_sampler,
    files,
    fragment,
    initial_rows,
    one_step,
    rule,
    same_bits,
    snapshot,
    to_rows,
)
from verl_digen.config.digen import EMAConfig
from verl_digen.engine.checkpoint import load_engine, save_engine
from verl_digen.engine.ema import ParameterEMA
from verl_digen.sync.checksum import tensors_checksum

EMA = {"ema": EMAConfig(enable=True, decay=0.5, every=2)}
WITH_HF = ("model", "optimizer", "extra", "hf_model")


@pytest.fixture
def rows():
    return initial_rows("float64")


def train(engine, rows, steps: int) -> None:
    for step in range(steps):
        one_step(engine, rule(), rows, on_policy=step == 0)


# ---- EMA -------------------------------------------------------------------------------------------------------


def test_ema_formula_and_no_alias():
    parameter = torch.nn.Parameter(torch.tensor([1.0, 2.0], dtype=torch.float64))
    ema = ParameterEMA([("p", parameter)], decay=0.75, every=2)
    assert ema.average["p"].data_ptr() != parameter.data_ptr()
    with torch.no_grad():
        parameter.fill_(5.0)
    assert ema.average["p"].tolist() == [1.0, 2.0]
    ema.update()
    assert ema.average["p"].tolist() == [1.0, 2.0]  # every second commit
    ema.update()
    assert ema.average["p"].tolist() == [0.75 * 1 + 0.25 * 5, 0.75 * 2 + 0.25 * 5]


def test_averages_are_swapped_in_and_the_weights_come_back_bit_for_bit(rows):
    engine = build_engine(Options(digen=EMA))
    train(engine, rows, 2)
    before = snapshot(engine)
    own = tensors_checksum(engine.get_per_tensor_param()[0])
    with engine.averaged_weights():
        for name, parameter in engine.named_trainable():
            assert torch.equal(parameter, engine.ema.average[name])
            assert parameter.data_ptr() != engine.ema.average[name].data_ptr()
        assert tensors_checksum(engine.get_per_tensor_param()[0]) != own
    assert same_bits(snapshot(engine), before)
    with pytest.raises(RuntimeError, match="validation"), engine.averaged_weights():
        raise RuntimeError("validation failed")
    assert same_bits(snapshot(engine), before)
    assert engine.ema.commits == 2


# ---- checkpoints -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        Options(digen=EMA, optim={"lr_scheduler_type": "cosine", "lr_warmup_steps": 2}, contents=WITH_HF),
        Options(model={"lora_rank": 2}),
        Options(optim={"optimizer": "SGD", "override_optimizer_config": {"momentum": 0.9}, "lr": 0.1}),
    ],
    ids=["full-ema-cosine", "lora", "sgd-momentum"],
)
def test_a_loaded_engine_goes_on_bit_for_bit(tmp_path, rows, options):
    engine = build_engine(options)
    train(engine, rows, 3)
    save_engine(engine, str(tmp_path / "ck"))
    saved, schedule = snapshot(engine), engine.lr_scheduler.state_dict()
    metrics = one_step(engine, rule(), rows, on_policy=False)
    continued = snapshot(engine)

    fresh = build_engine(options)
    load_engine(fresh, str(tmp_path / "ck"))
    assert same_bits(snapshot(fresh), saved) and fresh.lr_scheduler.state_dict() == schedule
    assert one_step(fresh, rule(), rows, on_policy=False) == metrics
    assert same_bits(snapshot(fresh), continued)

    load_engine(engine, str(tmp_path / "ck"))  # over an engine that has gone on
    assert same_bits(snapshot(engine), saved)
    if engine.ema is not None:
        assert engine.ema.commits == 3


def test_nothing_is_pickled_and_other_programs_can_load_it(tmp_path, rows):
    engine = build_engine(Options(digen=EMA, contents=WITH_HF))
    train(engine, rows, 1)
    save_engine(engine, str(tmp_path))
    written = files(tmp_path)
    assert {file.suffix for file in written} == {".safetensors", ".json"}
    for file in written:
        if file.suffix == ".json":
            json.loads(file.read_text())
        else:
            assert load_file(file)
    exported = load_file(tmp_path / "transformer" / "diffusion_pytorch_model.safetensors")
    assert same_bits(exported, engine.module.state_dict())


@pytest.mark.parametrize(
    ("other", "option"),
    [
        (Options(dtype="float32"), "arithmetic"),
        (Options(model={"lora_rank": 2}), "lora_rank"),
        (Options(digen=EMA), "ema.enable"),
    ],
    ids=["dtype", "lora", "ema"],
)
def test_a_checkpoint_of_another_kind_is_refused(tmp_path, rows, other, option):
    engine = build_engine(Options())
    save_engine(engine, str(tmp_path))
    target = build_engine(other)
    before = snapshot(target)
    with pytest.raises(ValueError, match="was written with") as error:
        load_engine(target, str(tmp_path))
    assert option in str(error.value) and "torch.float64" in str(error.value)
    assert same_bits(snapshot(target), before)


def test_a_lora_checkpoint_of_another_scale_is_refused(tmp_path):
    """The tensors would fit, but the adapter would weigh twice as much."""
    save_engine(build_engine(Options(model={"lora_rank": 2, "lora_alpha": 4})), str(tmp_path))
    target = build_engine(Options(model={"lora_rank": 2, "lora_alpha": 8}))
    with pytest.raises(ValueError, match=r"'alpha': 4.*'alpha': 8.*lora_alpha"):
        load_engine(target, str(tmp_path))


@pytest.mark.parametrize(
    ("contents", "kinds", "lacks"),
    [
        (("model",), {"model", "ema"}, r"\['optimizer', 'extra'\]"),
        (("model", "optimizer"), {"model", "ema", "optim"}, r"\['extra'\]"),
        (("optimizer", "extra"), {"optim"}, r"\['model'\]"),
        (("extra", "hf_model"), set(), r"\['model', 'optimizer'\]"),
    ],
    ids=lambda value: "+".join(value) if isinstance(value, tuple) else "",
)
def test_save_contents_says_what_is_written_and_what_a_resume_lacks(tmp_path, rows, contents, kinds, lacks):
    engine = build_engine(Options(digen=EMA, contents=contents))
    train(engine, rows, 1)
    save_engine(engine, str(tmp_path))
    written = {name.partition(".")[0] for file in (tmp_path / "weights").glob("*") for name in load_file(file)}
    state = json.loads((tmp_path / "state.json").read_text())
    assert written == kinds
    assert ("param_groups" in state, "lr_scheduler" in state) == ("optimizer" in contents, "extra" in contents)
    assert (tmp_path / "transformer").exists() == ("hf_model" in contents)
    before = snapshot(engine)
    with pytest.raises(ValueError, match=rf"save_contents=.*lacks {lacks}.*resume_mode=disable"):
        load_engine(engine, str(tmp_path))
    assert same_bits(snapshot(engine), before)


def test_an_incomplete_checkpoint_is_refused(tmp_path):
    with pytest.raises(ValueError, match="state.json is missing"):
        load_engine(build_engine(Options()), str(tmp_path))


def test_checkpoints_go_to_local_paths_only(tmp_path):
    with pytest.raises(ValueError, match="default_hdfs_dir"):
        build_engine(Options()).save_checkpoint(str(tmp_path), "hdfs://somewhere")


# ---- publishing to a sampler -----------------------------------------------------------------------------------


@pytest.mark.parametrize("model", [{}, {"lora_rank": 2}], ids=["full", "lora"])
def test_published_weights_arrive_and_change_what_is_sampled(rows, model):
    options = Options(model=model)
    engine, sampler = build_engine(options), build_sampler(options)
    first = sampler.load_weights(engine.get_per_tensor_param()[0], 0)
    assert first == (tensors_checksum(engine.get_per_tensor_param()[0]), len(engine.trainable_parameters()))
    old = sampler.run(fragment()).result.x_final
    train(engine, rows, 2)
    second = sampler.load_weights(engine.get_per_tensor_param()[0], 1)
    assert second[0] != first[0] and second[1] == first[1] > 0 and sampler.version == 1
    assert not torch.equal(sampler.run(fragment()).result.x_final, old)


def test_a_publish_that_does_not_fit_leaves_no_version():
    options = Options()
    engine, sampler = build_engine(options), build_sampler(options)
    tensors = list(engine.get_per_tensor_param()[0])
    sampler.load_weights(tensors, 0)
    name, tensor = tensors[0]
    for wrong in (tensors[1:], [*tensors, ("unknown.weight", tensor)], [(name, tensor[:1]), *tensors[1:]]):
        with pytest.raises(ValueError):
            sampler.load_weights(wrong, 1)
        assert sampler.version is None
    sampler.load_weights(tensors, 2)
    assert sampler.version == 2


def test_a_sample_is_the_same_with_whomever_it_is_denoised():
    sampler = build_sampler(Options())
    together = sampler.run(fragment())
    alone = sampler.run(fragment([("b", 1)]))
    assert alone.noise_hashes == together.noise_hashes[3:]
    torch.testing.assert_close(alone.result.latents[0], together.result.latents[3], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(alone.result.log_probs[0], together.result.log_probs[3], rtol=1e-12, atol=1e-12)


# ---- the reference of a run that starts from an adapter --------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
def test_the_reference_of_a_run_that_starts_from_an_adapter_is_that_adapter(tmp_path, dtype):
    """KL 0 at the first step, more than 0 later; the frozen adapter is neither trained nor published."""
    lora = {"lora_rank": 2, "lora_alpha": 4}
    first = build_engine(Options(dtype=dtype, model=lora))
    for step in range(2):
        one_step(first, rule(), initial_rows(dtype), on_policy=step == 0)
    save_engine(first, str(tmp_path))
    options = Options(dtype=dtype, model={**lora, "lora_adapter_path": str(tmp_path)}, reference=True)
    engine, sampler = build_engine(options), build_sampler(options)
    sampler.load_weights(engine.get_per_tensor_param()[0], 0)
    assert not any("reference" in name for name, _ in engine.named_trainable())
    assert set(engine.computed) == set(sampler.computed()) - {"pos_embed.pos_embed"}
    rows = to_rows(sampler.run(fragment()), fragment().samples)
    with_kl = rule(loss={"kl_beta": 0.1})
    assert one_step(engine, with_kl, rows)["kl"] == 0
    assert one_step(engine, with_kl, rows, on_policy=False)["kl"] > 0
    fresh = build_engine(Options(dtype=dtype, model=lora, reference=True))
    assert one_step(fresh, with_kl, rows, on_policy=False)["kl"] == 0  # B = 0: the adapter switched off is the same


# ---- resume with other options ---------------------------------------------------------------------------------


def test_other_options_of_the_optimizer_are_taken_over_on_resume_and_named(tmp_path, rows, caplog):
    def said() -> list[str]:
        return [r.getMessage() for r in caplog.records if r.name.startswith("verl_digen")]

    options = {"lr_scheduler_type": "cosine"}
    engine = build_engine(Options(optim=options))
    train(engine, rows, 2)
    save_engine(engine, str(tmp_path))
    same = build_engine(Options(optim=options))
    load_engine(same, str(tmp_path))
    assert said() == []
    other = build_engine(Options(optim={**options, "lr": 2e-3, "weight_decay": 0.5, "betas": (0.5, 0.6)}))
    load_engine(other, str(tmp_path))
    (line,) = said()
    for words in ("lr 0.001 -> 0.002", "weight_decay 0.01 -> 0.5", "betas (0.9, 0.999) -> (0.5, 0.6)"):
        assert words in line
    group, before = other.optimizer.param_groups[0], same.optimizer.param_groups[0]
    assert group["lr"] == pytest.approx(2 * before["lr"]) and group["weight_decay"] == 0.5
    assert group["betas"] == (0.5, 0.6)
    train(other, rows, 1)
    train(same, rows, 1)
    assert other.optimizer.param_groups[0]["lr"] == pytest.approx(2 * same.optimizer.param_groups[0]["lr"])
