"""``trainer.v1.digen``: yaml and dataclasses say the same, and what cannot be meant is refused by name (I10)."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from omegaconf import OmegaConf

import verl_digen.config
from verl_digen.config.digen import (
    DigenConfig,
    GapConfig,
    RewardSpec,
    SelectionConfig,
    TspConfig,
    parse_digen,
)

YAML = Path(verl_digen.config.__file__).parent / "digen" / "default.yaml"


def written() -> dict:
    return OmegaConf.to_container(OmegaConf.load(YAML))["trainer"]["v1"]["digen"]


def parse(**sections):
    return parse_digen(OmegaConf.merge(OmegaConf.create(written()), sections))


# ---- yaml and dataclasses --------------------------------------------------------------------------------------


def test_yaml_equals_the_dataclass_defaults():
    mechanisms = {"gap": dataclasses.asdict(GapConfig()), "tsp": dataclasses.asdict(TspConfig())}  # before the preset
    assert written() == dataclasses.asdict(DigenConfig()) | mechanisms


def test_every_option_is_mentioned_and_none_besides():
    def names(cls, prefix=""):
        for f in dataclasses.fields(cls):
            value = f.default_factory() if f.default is dataclasses.MISSING else f.default
            if dataclasses.is_dataclass(value):
                yield from names(type(value), f"{prefix}{f.name}.")
            else:
                yield prefix + f.name

    def leaves(node, prefix=""):
        for key, value in node.items():
            if isinstance(value, dict) and value:
                yield from leaves(value, f"{prefix}{key}.")
            else:
                yield prefix + key

    assert sorted(leaves(written())) == sorted(names(DigenConfig))


def test_defaults_parse():
    assert parse_digen(OmegaConf.create(written())) == DigenConfig()


def test_presets():
    assert (DigenConfig().gap.enable, DigenConfig().tsp.enable) == (False, False)
    preset = parse(preset="digen")
    assert (preset.gap.enable, preset.tsp.enable) == (True, True)
    assert parse(preset="digen", gap={"fragment_size": 3}).gap.fragment_size == 3
    # what is written wins over the preset
    one_of_two = parse(preset="digen", tsp={"enable": False})
    assert (one_of_two.gap.enable, one_of_two.tsp.enable) == (True, False)
    assert parse(preset="digen", gap={"enable": False}).gap.enable is False


def test_rewards_are_typed():
    (spec,) = parse(rewards={"sharp": {"weight": 2, "kwargs": {"a": [1]}}}).rewards.values()
    assert spec == RewardSpec(weight=2.0, kwargs={"a": [1]})


# ---- refusals --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ({"gapp": {"enable": True}}, ["trainer.v1.digen.gapp", "did you mean 'gap'", "tsp"]),
        ({"gap": {"enabled": True}}, ["trainer.v1.digen.gap.enabled", "did you mean 'enable'", "fragment_size"]),
        (
            {"sampling": {"selection": {"windowsize": 2}}},
            ["trainer.v1.digen.sampling.selection.windowsize", "did you mean 'window_size'"],
        ),
        ({"rewards": {"sharp": {"wieght": 1}}}, ["rewards.sharp.wieght", "did you mean 'weight'"]),
        ({"zzz": 1}, ["trainer.v1.digen.zzz", "Options there:", "placement"]),
    ],
)
def test_unknown_names_are_refused_with_the_closest_one(override, words):
    with pytest.raises(ValueError) as error:
        parse_digen(OmegaConf.create(override))
    for word in words:
        assert word in str(error.value)
    assert ("did you mean" in str(error.value)) == any("did you mean" in word for word in words)


@pytest.mark.parametrize(
    ("override", "option", "value"),
    [
        ({"sampling": {"num_steps": "many"}}, "sampling.num_steps", "many"),
        ({"sampling": {"num_steps": 2.5}}, "sampling.num_steps", "2.5"),
        ({"gap": {"enable": "perhaps"}}, "gap.enable", "perhaps"),
        ({"sampling": {"selection": {"window_range": 3}}}, "sampling.selection.window_range", ""),
        ({"failure": {"max_retries": None}}, "failure.max_retries", ""),
        ({"rewards": {"sharp": {"weight": "heavy"}}}, "rewards.sharp.weight", "heavy"),
    ],
)
def test_wrong_types_are_refused_with_the_option_and_the_value(override, option, value):
    with pytest.raises(ValueError) as error:
        parse_digen(OmegaConf.create(override))
    assert f"trainer.v1.digen.{option}" in str(error.value) and value in str(error.value)


IMPOSSIBLE = [
    ({"preset": "fast"}, "preset='fast'"),
    ({"placement": "mixed"}, "placement='mixed'"),
    ({"arithmetic": "bfloat16"}, "arithmetic='bfloat16'"),
    ({"sampling": {"kind": "ode"}}, "sampling.kind='ode'"),
    ({"sampling": {"num_steps": 0}}, "sampling.num_steps=0"),
    ({"sampling": {"eta": 0.0}}, "sampling.eta=0.0"),
    ({"sampling": {"eta": float("nan")}}, "sampling.eta=nan"),
    ({"sampling": {"eta": float("inf")}}, "sampling.eta=inf"),
    ({"sampling": {"height": 0}}, "sampling.height=0"),
    ({"sampling": {"width": -8}}, "sampling.width=-8"),
    ({"sampling": {"num_frames": 0}}, "sampling.num_frames=0"),
    ({"sampling": {"batch_size": 0}}, "sampling.batch_size=0"),
    ({"sampling": {"guidance_rescale": True}}, "guidance_rescale=true"),
    ({"sampling": {"selection": {"kind": "some"}}}, "selection.kind='some'"),
    ({"sampling": {"selection": {"mode": "falling"}}}, "selection.mode='falling'"),
    ({"sampling": {"selection": {"per": "run"}}}, "selection.per='run'"),
    ({"sampling": {"selection": {"window_size": 2}}}, "selection.window_size=2"),
    ({"sampling": {"selection": {"kind": "fraction", "fraction": 0.5, "window_size": 2}}}, "selection.window_size=2"),
    ({"sampling": {"selection": {"kind": "window", "window_size": 2, "fraction": 0.5}}}, "selection.fraction=0.5"),
    ({"sampling": {"selection": {"kind": "window", "window_size": 2, "stride": 2}}}, "selection.stride=2"),
    ({"sampling": {"selection": {"kind": "window", "window_size": 2, "iterations": 3}}}, "selection.iterations=3"),
    ({"sampling": {"selection": {"mode": "progressive"}}}, "selection.mode=progressive"),
    ({"validation": {"num_steps": 0}}, "validation.num_steps=0"),
    ({"validation": {"grid_samples": -1}}, "validation.grid_samples=-1"),
    ({"algorithm": {"norm": "batch"}}, "algorithm.norm='batch'"),
    ({"algorithm": {"kl_form": "k3"}}, "algorithm.kl_form='k3'"),
    ({"algorithm": {"adv_max": 0.0}}, "algorithm.adv_max=0.0"),
    ({"ema": {"decay": 1.0}}, "ema.decay=1.0"),
    ({"ema": {"decay": -0.1}}, "ema.decay=-0.1"),
    ({"ema": {"every": 0}}, "ema.every=0"),
    ({"ema": {"validate": True}}, "ema.enable=true"),
    ({"gap": {"fragment_size": 4}}, "gap.fragment_size=4"),
    ({"gap": {"enable": True, "fragment_size": 0}}, "gap.fragment_size=0"),
    ({"gap": {"enable": True}, "sampling": {"batch_size": 4}}, "sampling.batch_size=4"),
    ({"preset": "digen", "sampling": {"batch_size": 4}}, "sampling.batch_size=4"),
    ({"tsp": 4}, "int is not a subclass of TspConfig"),
    ({"tsp": {"max_cells": 0}}, "tsp.max_cells=0"),
    ({"failure": {"max_retries": -1}}, "failure.max_retries=-1"),
    *(
        ({"failure": {f"{name}_timeout_s": value}}, f"failure.{name}_timeout_s={float(value)}")
        for name in ("generate", "reward", "train", "sync")
        for value in (0, float("inf"))
    ),
    ({"tcss": {"max_stale_ratio": 0.25}}, "tcss.max_stale_ratio=0.25 is not read with trainer.v1.digen.tcss.enable"),
    ({"tcss": {"correction": "decoupled"}}, "tcss.correction=decoupled is not read"),
    ({"tcss": {"enable": True, "weight_cap": 3.0}}, "tcss.weight_cap=3.0 is not read with trainer.v1.digen.tcss.corr"),
    ({"tcss": {"enable": True, "max_stale_ratio": 0.0}}, "tcss.max_stale_ratio=0.0"),
    ({"tcss": {"enable": True, "max_stale_ratio": 1.5}}, "tcss.max_stale_ratio=1.5"),
    ({"tcss": {"enable": True, "correction": "vtrace"}}, "tcss.correction='vtrace'"),
    ({"tcss": {"enable": True}, "gap": {"enable": True}}, "tcss.enable=true needs trainer.v1.digen.placement=disagg"),
    ({"tcss": {"enable": True}, "placement": "disaggregated"}, "tcss.enable=true needs trainer.v1.digen.gap.enable"),
    ({"reward_workers": {"num_gpus": -1}}, "reward_workers.num_gpus=-1.0"),
    ({"reward_workers": {"num_gpus": 1.5}}, "reward_workers.num_gpus=1.5"),
    ({"accelerator_type": {"reward": "L4"}}, "accelerator_type.reward=L4 is not read"),
    ({"threads": {"trainer": 0}}, "threads.trainer=0"),
    ({"threads": {"rollout": -2}}, "threads.rollout=-2"),
]


@pytest.mark.parametrize(("override", "words"), IMPOSSIBLE, ids=[words for _, words in IMPOSSIBLE])
def test_impossible_values_are_refused(override, words):
    with pytest.raises(ValueError) as error:
        parse_digen(OmegaConf.create(override))
    assert words in str(error.value) and "trainer.v1.digen." in str(error.value)


@pytest.mark.parametrize(
    "selection",
    [
        {"kind": "window", "window_size": 2, "window_range": [1, 5]},
        {"kind": "window", "window_size": 2, "mode": "progressive", "stride": 2, "iterations": 3},
        {"kind": "fraction", "fraction": 0.5, "per": "step"},
    ],
)
def test_selections_that_are_read_are_accepted(selection):
    assert parse(sampling={"selection": selection}).sampling.selection == SelectionConfig(**selection)
