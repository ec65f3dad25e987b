"""Every place where the gradient of an open transaction can be, so that it can be dropped or set aside as a whole.

FSDP2 keeps gradients that were not reduced yet beside the parameters: in the unsharded parameter, or, when the reduce
dtype differs, in an accumulator of its own. Neither is reached by ``zero_grad``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule


def _slots(module: torch.nn.Module) -> Iterator[tuple[Any, str]]:
    """(owner, attribute) of every gradient."""
    for parameter in module.parameters():
        if parameter.requires_grad:
            yield parameter, "grad"
    for child in module.modules():
        if not isinstance(child, FSDPModule):
            continue
        state = child._get_fsdp_state()
        groups = getattr(state, "_fsdp_param_groups", None)
        if groups is None:  # torch before 2.10 has one group per module
            groups = [state._fsdp_param_group] if state._fsdp_param_group is not None else []
        for group in groups:
            for sharded in group.fsdp_params:
                yield sharded, "unsharded_accumulated_grad"
                if hasattr(sharded, "_unsharded_param"):
                    yield sharded._unsharded_param, "grad"


@dataclass
class HeldGradients:
    """Gradients taken out of a module by :func:`take_gradients`."""

    parts: list[tuple[Any, str, torch.Tensor, torch.device]] = field(default_factory=list)


def drop_gradients(module: torch.nn.Module) -> None:
    """Forget every gradient of ``module``, reduced or not."""
    for owner, name in _slots(module):
        setattr(owner, name, None)


def recover(module: torch.nn.Module) -> None:
    """Bring ``module`` back after an exception inside its forward or backward; it has no gradients then.

    Raises:
        RuntimeError: this torch cannot bring an FSDP2 module back.
    """
    if isinstance(module, FSDPModule):
        if not hasattr(module, "reset_iter_state"):
            raise RuntimeError(
                f"torch {torch.__version__} has no FSDPModule.reset_iter_state: FSDP2 cannot go on after an "
                "out-of-memory error"
            )
        module.reset_iter_state()
    drop_gradients(module)


def take_gradients(module: torch.nn.Module, device: torch.device | None = None) -> HeldGradients:
    """Take the gradients out of ``module``, which then has none.

    Args:
        device: copy them there (offload); None keeps the tensors as they are, without a copy.
    """
    held = HeldGradients()
    for owner, name in _slots(module):
        gradient = getattr(owner, name)
        if gradient is None:
            continue
        setattr(owner, name, None)
        held.parts.append((owner, name, gradient if device is None else gradient.to(device), gradient.device))
    return held


@torch.no_grad()
def give_back_gradients(held: HeldGradients) -> None:
    """Put gradients back where they were taken; what was accumulated there meanwhile is added."""
    for owner, name, gradient, device in held.parts:
        gradient, newer = gradient.to(device), getattr(owner, name)
        setattr(owner, name, gradient if newer is None else gradient.add_(newer))
    held.parts.clear()


def has_gradients(module: torch.nn.Module) -> bool:
    """Whether any gradient is there."""
    return any(getattr(owner, name) is not None for owner, name in _slots(module))
