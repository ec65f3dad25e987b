"""The plan: sizes that follow from a configuration, and every disagreement with its numbers and option (I10)."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys

import pytest
from hydra import compose, initialize_config_module
from omegaconf import OmegaConf
from safetensors.torch import load_file

from verl_digen.config.model import DiffusionModelConfig
from verl_digen.config.plan import resolve_plan, transformer_size

GLOBAL_WITH_KL = [
    "trainer.v1.digen.gap.enable=true",
    "trainer.v1.digen.algorithm.norm=global",
    "actor_rollout_ref.actor.use_kl_loss=true",
]
NO_KL = "actor_rollout_ref.actor.use_kl_loss=false"
DISAGGREGATED = ["trainer.v1.digen.placement=disaggregated", "actor_rollout_ref.rollout.nnodes=1"]
D = "trainer.v1.digen"


@pytest.fixture
def plan(digits):
    return lambda *overrides: resolve_plan(digits(*overrides, resolve=False))


# ---- sizes -----------------------------------------------------------------------------------------------------


def test_the_recipe(plan):
    p = plan()
    assert (p.prompts, p.n, p.samples) == (10, 16, 160)
    assert (p.logical_batches, p.prompts_per_batch, p.epochs) == (1, 10, 1)
    assert (p.transitions, p.cells_per_batch) == (9, 160 * 9)  # the last of 10 steps is not trained
    assert (p.trainer_ranks, p.replicas, p.fragment_size) == (1, 1, 160)
    assert p.on_policy and p.one_shot and p.with_reference and p.lora_rank == 0
    assert (p.loss, p.clip_low, p.clip_high, p.kl_beta, p.seed) == ("flow_grpo", 1e-3, 1e-3, 0.04, 42)


def test_parameters_are_those_of_the_model_itself(plan, digits_dir):
    (file,) = (digits_dir / "model" / "transformer").glob("*.safetensors")
    p = plan()
    assert p.transformer_parameters == sum(t.numel() for t in load_file(file).values())
    assert p.transformer_bytes == 4 * p.transformer_parameters


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["actor_rollout_ref.actor.ppo_mini_batch_size=2"], {"logical_batches": 5, "cells_per_batch": 2 * 16 * 9}),
        (["actor_rollout_ref.actor.ppo_mini_batch_size=5"], {"on_policy": False}),
        (["actor_rollout_ref.actor.ppo_epochs=2"], {"epochs": 2, "on_policy": False}),
        (["trainer.n_gpus_per_node=2"], {"trainer_ranks": 2, "replicas": 2, "fragment_size": 80}),
        (["trainer.n_gpus_per_node=3"], {"fragment_size": 54}),
        ([*DISAGGREGATED, "actor_rollout_ref.rollout.n_gpus_per_node=3"], {"trainer_ranks": 1, "replicas": 3}),
        ([f"{D}.sampling.batch_size=7"], {"fragment_size": 7}),
        ([f"{D}.sampling.batch_size=7000"], {"fragment_size": 160}),
        ([f"{D}.gap.enable=true"], {"one_shot": False, "fragment_size": 16}),
        ([f"{D}.gap.enable=true", f"{D}.gap.fragment_size=3"], {"fragment_size": 3}),
        ([f"{D}.gap.enable=true", f"{D}.gap.fragment_size=15"], {"fragment_size": 8}),  # half a group of 16
        ([f"{D}.gap.enable=true", f"{D}.gap.fragment_size=40"], {"fragment_size": 32}),
        ([f"{D}.preset=digen"], {"one_shot": False}),
        ([f"{D}.gap.enable=true", f"{D}.algorithm.norm=global", NO_KL], {"one_shot": False}),
        (GLOBAL_WITH_KL, {"one_shot": True}),
        ([f"{D}.sampling.selection.kind=window", f"{D}.sampling.selection.window_size=2"], {"transitions": 2}),
        ([f"{D}.sampling.selection.kind=fraction", f"{D}.sampling.selection.fraction=0.5"], {"transitions": 4}),
        (["actor_rollout_ref.actor.kl_loss_coef=3"], {"kl_beta": 3.0, "with_reference": True}),
        (["actor_rollout_ref.actor.use_kl_loss=false"], {"kl_beta": 0.0, "with_reference": False}),
        (["actor_rollout_ref.actor.clip_ratio_low=1e-5"], {"clip_low": 1e-5, "clip_high": 1e-3}),
        (["actor_rollout_ref.model.lora_rank=4"], {"lora_rank": 4}),
        (["data.seed=0"], {"seed": 0}),
        (["data.seed=null"], {"seed": 42}),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_sizes(plan, overrides, expected):
    p = plan(*overrides)
    assert {name: getattr(p, name) for name in expected} == expected


def test_rows_tell_the_plan(plan):
    def text(*overrides):
        return dict(plan(*overrides).rows())

    rows = text(*DISAGGREGATED, f"{D}.preset=digen", f"{D}.tsp.max_cells=64", f"{D}.accelerator_type.rollout=L4")
    assert rows["mode"] == "disaggregated + GAP + TSP" and rows["Generator pool"] == "1 replicas of L4"
    assert (
        rows["tile"].startswith("samples x transitions, at most 64 cells")
        and "ratio exactly 1" in rows["anchor of the ratio"]
    )
    assert "rollout log-probs" in text("actor_rollout_ref.actor.ppo_epochs=2")["anchor of the ratio"]
    assert text("actor_rollout_ref.model.lora_rank=4")["fine-tuning"] == "LoRA rank 4"
    assert "falls back to one-shot" in text(*GLOBAL_WITH_KL)["note"]
    searched = text(f"{D}.tsp.auto=true", f"{D}.tsp.memory_fraction=0.5")["tile"]
    assert "within 50% of a device's memory, fewer where that is faster" in searched


# ---- refusals --------------------------------------------------------------------------------------------------


REFUSED = [
    (["actor_rollout_ref.actor.ppo_mini_batch_size=3"], ["data.train_batch_size=10", "ppo_mini_batch_size=3"]),
    (["actor_rollout_ref.actor.ppo_mini_batch_size=20"], ["data.train_batch_size=10", "ppo_mini_batch_size=20"]),
    (["actor_rollout_ref.actor.ppo_mini_batch_size=0"], ["ppo_mini_batch_size=0 must be a whole number at least 1"]),
    (["actor_rollout_ref.rollout.n=1"], ["actor_rollout_ref.rollout.n=1", "at least 2"]),
    (["trainer.nnodes=0"], ["trainer.nnodes=0 must be a whole number at least 1"]),
    ([f"{D}.placement=disaggregated"], ["rollout.nnodes=0", "rollout.n_gpus_per_node=1", "no device"]),
    ([*DISAGGREGATED, "actor_rollout_ref.rollout.n_gpus_per_node=0"], ["nnodes=1", "n_gpus_per_node=0"]),
    (["actor_rollout_ref.rollout.nnodes=2"], ["rollout.nnodes=2", "placement=colocated"]),
    ([f"{D}.accelerator_type.rollout=L4"], ["accelerator_type.rollout=L4", "None", "colocated"]),
    *(
        ([f"actor_rollout_ref.rollout.{name}=2"], [f"rollout.{name}=2", "set it to 1"])
        for name in ("tensor_model_parallel_size", "data_parallel_size", "pipeline_model_parallel_size")
    ),
    (
        [
            f"{D}.sampling.selection.kind=window",
            f"{D}.sampling.selection.window_size=2",
            f"{D}.sampling.selection.window_range=[8,12]",
        ],
        [f"{D}.sampling.selection", "[8, 12)", "10 steps"],
    ),
    (
        [
            f"{D}.sampling.selection.kind=window",
            f"{D}.sampling.selection.window_size=3",
            f"{D}.sampling.selection.window_range=[2,4]",
        ],
        [f"{D}.sampling.selection", "window_size 3", "[2, 4)"],
    ),
    ([f"{D}.sampling.selection.kind=window"], [f"{D}.sampling.selection", "window_size"]),
    (
        [f"{D}.sampling.selection.kind=fraction", f"{D}.sampling.selection.fraction=0.05"],
        [f"{D}.sampling.selection", "0.05 of 9 steps"],
    ),
    ([f"{D}.sampling.num_steps=1"], ["num_steps 1"]),
    ([f"{D}.arithmetic=float64"], [f"{D}.arithmetic=float64", "model.dtype=float32"]),
    (["actor_rollout_ref.model.dtype=float64"], [f"{D}.arithmetic=float32", "model.dtype=float64"]),
    (["data.train_files=missing.parquet"], ["data.train_files", "missing.parquet does not exist"]),
    (["data.train_files=null"], ["data.train_files=None", "prompts to train"]),
    (["data.train_files=[]"], ["data.train_files=[]", "prompts to train"]),
    (["data.val_files=null"], ["data.val_files=None", "trainer.test_freq=8", "trainer.test_freq=-1"]),
    (["data.val_files=[]", "trainer.test_freq=-1"], ["data.val_files=[]", "val_before_train=True"]),
    (["actor_rollout_ref.rollout.val_kwargs.n=0"], ["val_kwargs.n=0 must be a whole number at least 1"]),
    (["trainer.val_only=true", "trainer.val_before_train=false"], ["trainer.val_only=true", "val_before_train=true"]),
    ([f"{D}.validation.batch_size=0"], [f"{D}.validation.batch_size=0 must be a positive"]),
    (["data.val_files=[missing.parquet]"], ["data.val_files", "missing.parquet does not exist"]),
    ([f"~{D}.rewards.digit_classifier"], [f"{D}.rewards", "reward.custom_reward_function.path"]),
    (["actor_rollout_ref.actor.policy_loss.loss_mode=vanilla"], ["'vanilla'", "flow_grpo"]),
    (["actor_rollout_ref.actor.strategy=fsdp"], ["actor.strategy=fsdp (needs fsdp2)", "digen: default"]),
    (["actor_rollout_ref.rollout.name=vllm"], ["rollout.name=vllm (needs diffusers)"]),
    (
        ["actor_rollout_ref.rollout.checkpoint_engine.backend=naive", "algorithm.adv_estimator=grpo"],
        ["backend=naive (needs digen)", "algorithm.adv_estimator=grpo (needs digen_group)"],
    ),
    (["reward.reward_manager.name=naive"], ["reward.reward_manager.name=naive (needs diffusion)"]),
    *(
        ([f"actor_rollout_ref.actor.checkpoint.save_contents={given}"], [f"save_contents={shown}", "hf_model"])
        for given, shown in (("[]", "[]"), ("[model,weights]", "['model', 'weights']"))
    ),
    (
        ["actor_rollout_ref.model.path=nowhere"],
        ["model.path=nowhere", "no diffusion_pytorch_model.safetensors"],
    ),
    ([f"+{D}.gap.fragmentsize=3"], [f"{D}.gap.fragmentsize", "did you mean 'fragment_size'"]),
]


@pytest.mark.parametrize(("overrides", "words"), REFUSED, ids=[" ".join(o) for o, _ in REFUSED])
def test_refused_with_the_numbers_and_the_option(plan, overrides, words):
    with pytest.raises(ValueError) as error:
        plan(*overrides)
    for word in words:
        assert word in str(error.value)


@pytest.mark.parametrize("files", ["null", "[]", "missing.parquet"])
def test_a_run_without_validation_needs_no_validation_prompts(plan, files):
    plan(f"data.val_files={files}", "trainer.test_freq=-1", "trainer.val_before_train=false")


def test_checkpoints_that_cannot_be_resumed_are_noted(plan):
    assert plan().notes == ()
    (note,) = plan("actor_rollout_ref.actor.checkpoint.save_contents=[model,extra]").notes
    assert "cannot be resumed" in note and note.endswith("lacks optimizer")


def test_weights_in_another_format_are_refused(tmp_path, digits_dir):
    shutil.copytree(digits_dir / "model", tmp_path / "model")
    for file in (tmp_path / "model" / "transformer").glob("*.safetensors"):
        file.rename(file.with_suffix(".bin"))
    with pytest.raises(ValueError, match="pickled weights are not loaded"):
        transformer_size(str(tmp_path / "model"))


# ---- the model section -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"dtype": "int8"}, "model.dtype='int8'"),
        ({"dtype": "float16"}, "model.dtype='float16': gradients are not scaled.*use bfloat16"),
        ({"lora_rank": -1}, "model.lora_rank=-1"),
        ({"target_modules": ["to_q"]}, "lora_rank=0"),
        ({"lora_adapter_path": "adapter"}, "lora_rank=0"),
        ({"path": "nowhere"}, "model_index.json"),
    ],
)
def test_model_options_are_checked(digits_dir, options, words):
    with pytest.raises(ValueError, match=words):
        DiffusionModelConfig(**{"path": str(digits_dir / "model"), **options})


def test_model_yaml_has_every_option_of_the_dataclass(digits):
    from dataclasses import fields

    model = OmegaConf.to_container(digits().actor_rollout_ref.model)
    options = [f for f in fields(DiffusionModelConfig) if f.init and f.name != "_target_"]
    assert set(model) - {"_target_"} == {f.name for f in options}
    defaults = {f.name: f.default for f in options if f.name != "path"}
    assert {name: model[name] for name in defaults} == defaults


# ---- what veRL's own command finds -----------------------------------------------------------------------------


def test_veRLs_command_finds_our_groups(digits_dir):
    """``python -m verl.trainer.main_ppo +digen=default``: our hydra plugin adds the search path by itself."""
    with initialize_config_module(config_module="verl.trainer.config", version_base=None):
        config = compose(
            "ppo_trainer",
            overrides=[
                "+digen=default",
                f"actor_rollout_ref.model.path={digits_dir / 'model'}",
                f"data.train_files={digits_dir / 'train.parquet'}",
                f"data.val_files={digits_dir / 'val.parquet'}",
                "+trainer.v1.digen.rewards.digit_classifier.weight=1.0",
                "trainer.n_gpus_per_node=1",
            ],
        )
    assert config.trainer.v1.trainer_mode == "digen"
    assert config.actor_rollout_ref.model._target_ == "verl_digen.config.model.DiffusionModelConfig"
    OmegaConf.resolve(config)
    assert resolve_plan(config).samples == 32 * 8


def test_the_plan_imports_no_ray():
    """The plan is made before anything is started; importing it must stay cheap."""
    look = "print(json.dumps([m in sys.modules for m in ('ray', 'torch', 'verl')]))"
    code = f"import sys, json, verl_digen.config.plan; {look}"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert json.loads(out.stdout.splitlines()[-1]) == [False, False, False]
