"""The range of every number of veRL's that a diffusion run reads, in one table, checked at start (I10).

veRL and torch take most of them as they come: a gradient clipped to 0 trains nothing and one clipped to -1 ascends,
with a healthy norm in the log.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from omegaconf import DictConfig, OmegaConf


@dataclass(frozen=True, kw_only=True)
class Range:
    """Numbers from ``low`` to ``high``; the ends belong to it unless it says otherwise.

    Attributes:
        above, below: ``low``, ``high`` are left out.
        whole: integers only.
        null: may also be null.
    """

    low: float = -math.inf
    high: float = math.inf
    above: bool = False
    below: bool = False
    whole: bool = False
    null: bool = False

    def holds(self, value: Any) -> bool:
        if value is None:
            return self.null
        if isinstance(value, bool) or not isinstance(value, int if self.whole else int | float):
            return False
        over = value > self.low if self.above else value >= self.low
        under = value < self.high if self.below else value <= self.high
        return math.isfinite(value) and over and under

    def __str__(self) -> str:
        ends = []
        if self.low > -math.inf:
            ends.append(f"above {self.low:g}" if self.above else f"at least {self.low:g}")
        if self.high < math.inf:
            ends.append(f"below {self.high:g}" if self.below else f"at most {self.high:g}")
        kind = "a whole number" if self.whole else "a finite number"
        return " ".join([kind, " and ".join(ends)]).strip() + (", or null" if self.null else "")


POSITIVE = Range(low=0, above=True)
NOT_NEGATIVE = Range(low=0)
SHARE = Range(low=0, high=1)
COUNT = Range(low=1, whole=True)
COUNT_OR_NULL = Range(low=1, whole=True, null=True)
WHOLE = Range(whole=True)

ACTOR, OPTIM, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.actor.optim", "actor_rollout_ref.rollout"
RANGES: dict[str, Range] = {
    f"{ACTOR}.clip_ratio": POSITIVE,
    f"{ACTOR}.clip_ratio_high": Range(low=0, above=True, null=True),
    f"{ACTOR}.clip_ratio_low": Range(low=0, high=1, above=True, below=True, null=True),
    f"{ACTOR}.fsdp_config.fsdp_size": Range(low=-1, whole=True),
    f"{ACTOR}.kl_loss_coef": NOT_NEGATIVE,
    f"{ACTOR}.ppo_epochs": COUNT,
    f"{ACTOR}.ppo_mini_batch_size": COUNT,
    f"{OPTIM}.clip_grad": Range(low=0, null=True),
    f"{OPTIM}.lr": POSITIVE,
    f"{OPTIM}.lr_warmup_steps": Range(low=-1, whole=True),
    f"{OPTIM}.lr_warmup_steps_ratio": SHARE,
    f"{OPTIM}.min_lr_ratio": Range(low=0, high=1, null=True),
    f"{OPTIM}.num_cycles": POSITIVE,
    f"{OPTIM}.weight_decay": NOT_NEGATIVE,
    "actor_rollout_ref.model.lora_alpha": Range(low=1, whole=True),
    "actor_rollout_ref.model.lora_rank": Range(low=0, whole=True),
    f"{ROLLOUT}.checkpoint_engine.update_weights_bucket_megabytes": COUNT,
    f"{ROLLOUT}.n": COUNT,
    f"{ROLLOUT}.n_gpus_per_node": Range(low=0, whole=True),
    f"{ROLLOUT}.nnodes": Range(low=0, whole=True),
    f"{ROLLOUT}.val_kwargs.n": COUNT,
    "data.seed": Range(whole=True, null=True),
    "data.train_batch_size": COUNT,
    "reward.num_workers": COUNT,
    "trainer.max_actor_ckpt_to_keep": COUNT_OR_NULL,
    "trainer.n_gpus_per_node": COUNT,
    "trainer.nnodes": COUNT,
    "trainer.save_freq": WHOLE,
    "trainer.test_freq": WHOLE,
    "trainer.total_epochs": COUNT,
    "trainer.total_training_steps": COUNT_OR_NULL,
}


def _betas(config: DictConfig) -> str | None:
    betas = OmegaConf.select(config, f"{OPTIM}.betas")
    betas = list(betas) if OmegaConf.is_list(betas) or isinstance(betas, list | tuple) else betas
    each = Range(low=0, high=1, below=True)
    if not isinstance(betas, list) or len(betas) != 2 or not all(each.holds(beta) for beta in betas):
        return f"{OPTIM}.betas={betas} must be two numbers, each {str(each).removeprefix('a finite number ')}"
    return None


def _schedule(config: DictConfig) -> str | None:
    kind = OmegaConf.select(config, f"{OPTIM}.lr_scheduler_type")
    known = ("constant", "cosine")
    return None if kind in known else f"{OPTIM}.lr_scheduler_type={kind} must be one of {', '.join(known)}"


def _kl(config: DictConfig) -> str | None:
    weight, used = (OmegaConf.select(config, f"{ACTOR}.{name}") for name in ("kl_loss_coef", "use_kl_loss"))
    if used and weight == 0:
        return f"{ACTOR}.kl_loss_coef=0 leaves out the KL that {ACTOR}.use_kl_loss=true asks for"
    return None


def _shards(config: DictConfig) -> str | None:
    size = OmegaConf.select(config, f"{ACTOR}.fsdp_config.fsdp_size")
    ranks = config.trainer.nnodes * config.trainer.n_gpus_per_node
    if size == -1 or (size > 0 and ranks % min(size, ranks) == 0):
        return None
    return f"{ACTOR}.fsdp_config.fsdp_size={size} must be -1 (all) or divide the {ranks} Trainer ranks"


# What is no single number.
TOGETHER: tuple[Callable[[DictConfig], str | None], ...] = (_betas, _schedule, _kl, _shards)


def check_ranges(config: DictConfig) -> None:
    """Refuse numbers of veRL's options that no run can mean.

    Raises:
        ValueError: names every such option with its value and its range.
    """
    wrong = []
    for name, allowed in RANGES.items():
        value = OmegaConf.select(config, name)
        if not allowed.holds(value):
            wrong.append(f"{name}={value} must be {allowed}")
    if not wrong:
        wrong = [problem for check in TOGETHER if (problem := check(config)) is not None]
    if wrong:
        raise ValueError("; ".join(wrong))
