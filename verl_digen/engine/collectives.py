"""The collectives of a tile, so that a rank whose tile failed half-way does not leave the others alone.

The ranks of FSDP2 run through a tile together: each waits in every collective for the others. No backend can end a
collective that the others have entered, and ending the process group would end the run. So a rank that runs out of
memory begins the tile again with one cell that does not count, leaves out the collectives that it has done already, and
takes part in the rest. The order of the collectives follows from the model alone, not from the number of cells.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

GATHER, REDUCE = "gather", "reduce"


class _Collective:
    """FSDP2's interface of a custom communication: allocates its buffers and is called."""

    def __init__(self, owner: Collectives, kind: str):
        self._owner, self._kind = owner, kind

    def allocate(self, size, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor, input_tensor, group, op=None, async_op: bool = False) -> Any:
        if self._owner.left_out(self._kind):
            return None  # the output is never used for anything that counts
        if self._kind == GATHER:
            return dist.all_gather_into_tensor(output_tensor, input_tensor, group=group, async_op=async_op)
        return dist.reduce_scatter_tensor(output_tensor, input_tensor, op=op, group=group, async_op=async_op)


class Collectives:
    """Counts the collectives of FSDP2 modules, tile by tile.

    Args:
        modules: every FSDP2 module that a tile runs through.

    Attributes:
        gathers: all-gathers that were done so far.
    """

    def __init__(self, modules: list[FSDPModule]):
        self.gathers = 0
        self._alone = False
        self._done = {GATHER: 0, REDUCE: 0}
        self._skip = {GATHER: 0, REDUCE: 0}
        gather, reduce = _Collective(self, GATHER), _Collective(self, REDUCE)
        for module in modules:
            module.set_custom_all_gather(gather)
            module.set_custom_reduce_scatter(reduce)

    @classmethod
    def of(cls, modules: list[FSDPModule]) -> Collectives | None:
        """For ``modules``; None where this torch has no way to go on after a failure."""
        needed = ("set_custom_all_gather", "set_custom_reduce_scatter", "reset_iter_state")
        return cls(modules) if all(hasattr(FSDPModule, name) for name in needed) else None

    def begin_tile(self) -> None:
        """A tile starts; all modules are sharded, or all are whole."""
        self._done = {GATHER: 0, REDUCE: 0}
        self._skip = {GATHER: 0, REDUCE: 0}

    def begin_again(self) -> None:
        """The tile failed and is run once more: what it has done is left out."""
        self._skip, self._done = self._done, {GATHER: 0, REDUCE: 0}

    def gather_alone(self, alone: bool) -> None:
        """Whether this rank has lost parameters that the others keep whole: nobody answers its all-gathers then."""
        self._alone = alone

    def left_out(self, kind: str) -> bool:
        """Note a collective; whether it is left out."""
        self._done[kind] += 1
        if self._done[kind] <= self._skip[kind] or (self._alone and kind == GATHER):
            return True
        self.gathers += kind == GATHER
        return False
