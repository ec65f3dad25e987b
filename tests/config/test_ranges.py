"""Numbers of veRL's that no run can mean are refused at start, every one of them (I10)."""

from __future__ import annotations

import fnmatch
import math

import pytest
from omegaconf import OmegaConf

from verl_digen.config.ranges import RANGES, check_ranges
from verl_digen.config.unread import READ, _defaults
from verl_digen.engine.optimizer import check_optimizer

OPTIM = "actor_rollout_ref.actor.optim"
# Sections with checks of their own: ours, Ray's, the TransferQueue's.
ELSEWHERE = ("trainer.v1.digen.*", "ray_kwargs.*", "transfer_queue.*", "recipe.*")


def test_every_number_that_is_read_has_a_range():
    _, resolved = _defaults()
    numbers = {
        name
        for name, value in resolved.items()
        if isinstance(value, int | float) and not isinstance(value, bool)
        if any(fnmatch.fnmatchcase(name, pattern) for pattern in READ)
        if not any(fnmatch.fnmatchcase(name, pattern) for pattern in ELSEWHERE)
    }
    assert numbers - set(RANGES) == set() and len(numbers) > 20
    assert {name for name in RANGES if not any(fnmatch.fnmatchcase(name, pattern) for pattern in READ)} == set()


def test_the_recipe_passes(digits):
    check_ranges(digits())


@pytest.fixture(scope="module")
def config(digits):
    return digits()


@pytest.mark.parametrize("name", sorted(RANGES))
def test_what_lies_outside_is_refused_with_the_range(config, name):
    allowed, before = RANGES[name], OmegaConf.select(config, name)
    outside = [math.nan, math.inf, True, "text"]
    outside += [allowed.low if allowed.above else allowed.low - 1] if allowed.low > -1e9 else []
    outside += [allowed.high if allowed.below else allowed.high + 1] if allowed.high < 1e9 else []
    outside += [1.5] if allowed.whole else []
    outside += [] if allowed.null else [None]
    for value in outside:
        OmegaConf.update(config, name, value)
        with pytest.raises(ValueError) as error:
            check_ranges(config)
        assert f"{name}={value} must be {allowed}" in str(error.value)
    OmegaConf.update(config, name, before)
    check_ranges(config)


@pytest.mark.parametrize(
    "override",
    [f"{OPTIM}.clip_grad=0", f"{OPTIM}.clip_grad=null", f"{OPTIM}.weight_decay=0", f"{OPTIM}.betas=[0,0]"],
)
def test_the_ends_that_mean_something_are_accepted(digits, override):
    check_ranges(digits(override))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ([f"{OPTIM}.betas=[0.9,1.0]"], r"betas=\[0.9, 1.0\] must be two numbers, each at least 0 and below 1"),
        ([f"{OPTIM}.betas=[0.9]"], r"betas=\[0.9\] must be two numbers"),
        ([f"{OPTIM}.betas=0.9"], "betas=0.9 must be two numbers"),
        ([f"{OPTIM}.lr_scheduler_type=linear"], "lr_scheduler_type=linear must be one of constant, cosine"),
        (
            ["actor_rollout_ref.actor.use_kl_loss=true", "actor_rollout_ref.actor.kl_loss_coef=0"],
            "kl_loss_coef=0 leaves out the KL",
        ),
        (
            ["trainer.n_gpus_per_node=3", "actor_rollout_ref.actor.fsdp_config.fsdp_size=2"],
            "fsdp_size=2 must be -1 .all. or divide the 3 Trainer ranks",
        ),
        (["actor_rollout_ref.actor.fsdp_config.fsdp_size=0"], "fsdp_size=0"),
        ([f"{OPTIM}.lr=-1", "trainer.total_epochs=0"], "optim.lr=-1 must .*; trainer.total_epochs=0 must"),
    ],
)
def test_what_is_no_single_number(digits, overrides, message):
    with pytest.raises(ValueError, match=message):
        check_ranges(digits(*overrides))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"optimizer": "AdamX"}, "optimizer=AdamX: there is no torch.optim.AdamX"),
        ({"optimizer_impl": "nowhere"}, "nowhere.AdamW cannot be built"),
        ({"override_optimizer_config": {"eps": -1.0}}, "torch.optim.AdamW cannot be built: Invalid epsilon"),
        ({"override_optimizer_config": {"epsilon": 1.0}}, "cannot be built: .*unexpected keyword argument 'epsilon'"),
        ({"optimizer": "SGD", "betas": (0.5, 0.9)}, r"betas=\[0.5, 0.9\] is not read by torch.optim.SGD"),
        ({"lr_warmup_steps": 11}, "lr_warmup_steps=11 is more than the 10 optimizer steps"),
    ],
)
def test_the_optimizer_judges_its_own_options(options, message):
    from verl.workers.config import FSDPOptimizerConfig

    check_optimizer(FSDPOptimizerConfig(lr=1e-3, lr_warmup_steps=10), 10)
    with pytest.raises(ValueError, match=message):
        check_optimizer(FSDPOptimizerConfig(**{"lr": 1e-3, **options}), 10)
