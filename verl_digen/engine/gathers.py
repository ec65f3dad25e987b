"""The all-gathers of a tile, so that a rank which runs out of memory in the middle of one can still take part in it.

The ranks of FSDP2 run through a tile together: each waits in every all-gather for the others' shards. A rank that stops
half-way gives the rest of its shards (:meth:`GatherLog.make_up`), the others finish their tile, and what the rank did
not get done is tried again later. This needs to know which all-gathers are left: their order is the same in every tile,
and it is recorded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch.distributed.fsdp import FSDPModule

try:
    from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather
except ImportError:  # a torch without it: nothing can be recorded, GatherLog.of returns None
    DefaultAllGather = object


class _Recorded(DefaultAllGather):
    """FSDP2's own all-gather, with a note for each call."""

    def __init__(self, module: FSDPModule, note: Callable[[FSDPModule], None]):
        self._module, self._note = module, note

    def __call__(self, *args, **kwargs):
        work = super().__call__(*args, **kwargs)
        self._note(self._module)
        return work


class GatherLog:
    """Records the all-gathers of FSDP2 modules, tile by tile.

    Args:
        modules: every FSDP2 module that a tile runs through.

    Attributes:
        count: all-gathers so far.
    """

    def __init__(self, modules: Sequence[FSDPModule]):
        self._modules = list(modules)
        self._issued: list[FSDPModule] = []
        self._order: list[FSDPModule] | None = None
        self._constant = True
        self.count = 0
        self._recording = False
        for module in self._modules:
            module.set_custom_all_gather(_Recorded(module, self._note))

    @classmethod
    def of(cls, *roots: torch.nn.Module | None) -> GatherLog | None:
        """A log of all FSDP2 modules in ``roots``; None where this torch cannot record or go on after a failure."""
        if not all(hasattr(FSDPModule, name) for name in ("set_custom_all_gather", "reset_iter_state")):
            return None
        return cls([m for root in roots if root is not None for m in root.modules() if isinstance(m, FSDPModule)])

    def _note(self, module: FSDPModule) -> None:
        self.count += 1
        if self._recording:
            self._issued.append(module)

    @property
    def known(self) -> bool:
        """Whether a tile was recorded."""
        return self._order is not None

    @property
    def constant(self) -> bool:
        """Whether all tiles did the same all-gathers, so that those left of a tile are known."""
        return self._constant

    @contextmanager
    def tile(self) -> Iterator[None]:
        """A tile; every module is sharded after it, so that each tile begins alike."""
        self._issued.clear()
        self._recording = True
        try:
            yield
        finally:
            self._recording = False
        for module in self._modules:
            module.reshard()
        if self._order is None:
            self._order = list(self._issued)
        elif self._order != self._issued:
            self._constant = False

    def make_up(self) -> None:
        """After a failure in a tile: the all-gathers that other ranks still wait for. No module is in use."""
        for module in self._order[len(self._issued) :]:
            module.unshard()
            module.reshard()
