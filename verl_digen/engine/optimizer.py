"""The optimizer's options, checked before anything is loaded."""

from __future__ import annotations

import torch
from verl.workers.config.optimizer import FSDPOptimizerConfig, build_optimizer


def check_optimizer(config: FSDPOptimizerConfig, updates: int) -> None:
    """Build the optimizer for one number, so that it judges its own options.

    Args:
        updates: optimizer steps of the whole run.

    Raises:
        ValueError: an unknown class, an option that it does not have or refuses, ``betas`` that it does not read, or a
            warm-up that does not end within the run.
    """
    prefix = "actor_rollout_ref.actor.optim"
    name = f"{config.optimizer_impl}.{config.optimizer}"
    try:
        optimizer = build_optimizer([torch.nn.Parameter(torch.zeros(1))], config)
    except AttributeError as error:  # veRL's message lists everything the module has
        raise ValueError(f"{prefix}.optimizer={config.optimizer}: there is no {name}") from error
    except (ImportError, TypeError, ValueError, AssertionError, RuntimeError) as error:
        raise ValueError(f"{prefix}: {name} cannot be built: {error}") from error
    default = tuple(FSDPOptimizerConfig.__dataclass_fields__["betas"].default)
    if tuple(config.betas) != default and "betas" not in optimizer.defaults:
        raise ValueError(f"{prefix}.betas={list(config.betas)} is not read by {name}; remove it")
    if config.lr_warmup_steps > updates:
        raise ValueError(
            f"{prefix}.lr_warmup_steps={config.lr_warmup_steps} is more than the {updates} optimizer steps of the run, "
            "so the learning rate would never be reached; lower it"
        )
