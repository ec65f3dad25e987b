"""How many cells a tile has: a fixed limit, or a size found while training; smaller after an out-of-memory.

The search itself is :class:`verl_digen.schedule.tsp.TileBudget`; this class measures for it and makes all ranks come to
the same answer, because the number of tiles is the number of collectives.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from verl_digen.config.digen import TspConfig
from verl_digen.platform.memory import allocated_bytes, peak_memory_bytes, reset_peak_memory, total_bytes
from verl_digen.schedule.tsp import TileBudget, cells_that_fit

GIB = float(1 << 30)


def largest_of_all_ranks(values: Sequence[float], device: torch.device) -> list[float]:
    """Element-wise maximum over the ranks."""
    tensor = torch.tensor(list(values), dtype=torch.float64, device=device)
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
    return tensor.tolist()


class TileSize:
    """The tile size of a rank; the same on all ranks.

    Args:
        max_cells: never more than this; None for no limit.
        auto: search for the size, from one cell on.
        memory_fraction: share of the device's memory that a tile may fill (search only).
        device: of the training rank.
        agree: largest of each value over the ranks.
        total: bytes of the device, or None where memory is not measured (CPU).
        synchronize: waits for the device, at both ends of a measured tile.
    """

    def __init__(
        self,
        *,
        max_cells: int | None,
        auto: bool,
        memory_fraction: float,
        device: torch.device,
        agree: Callable[[Sequence[float], torch.device], list[float]] = largest_of_all_ranks,
        total: int | None = None,
        synchronize: Callable[[], None] = lambda: None,
    ):
        self.auto, self.memory_fraction, self.device = auto, memory_fraction, device
        self._agree, self._synchronize = agree, synchronize
        self._total = total_bytes() if total is None else total
        limit = 1 << 20 if max_cells is None else max_cells
        self.budget = TileBudget(size=1 if auto else limit, limit=limit, settled=not auto)
        self._fitted = 0
        self._seconds = self._cells = self._bytes = 0.0
        self.splits = 0

    @classmethod
    def of(cls, tsp: TspConfig, device: torch.device, synchronize: Callable[[], None]) -> TileSize:
        """As the configuration says, with nothing known yet."""
        return cls(
            max_cells=tsp.max_cells,
            auto=tsp.auto,
            memory_fraction=tsp.memory_fraction,
            device=device,
            synchronize=synchronize,
        )

    @property
    def cells(self) -> int:
        """Most cells of a tile now."""
        return self.budget.size

    def is_new(self, cells: int) -> bool:
        """Whether no tile of this size has been run yet by any rank, so that it might not fit."""
        return cells > self._fitted

    def fitted(self, largest: int) -> None:
        """All tiles of a fragment whose largest was planned with this many cells were run, if need be in pieces."""
        self._fitted = max(self._fitted, min(largest, self.cells))

    @property
    def searching(self) -> bool:
        return not self.budget.settled

    def measure(self, cells: int, run: Callable[[], None]) -> None:
        """Run a tile; while the search lasts, note its time and memory."""
        if not self.searching:
            run()
            return
        reset_peak_memory()
        base = allocated_bytes()
        self._synchronize()
        started = time.perf_counter()
        run()
        self._synchronize()
        seconds = time.perf_counter() - started
        if cells >= self._cells:
            self._cells, self._seconds = float(cells), seconds
            self._bytes = max(0.0, float(peak_memory_bytes() - base)) if self._total else 0.0

    def out_of_memory(self, cells: int) -> int:
        """A tile of ``cells`` did not fit on this rank; the size for its pieces.

        Raises:
            ValueError: it was one cell.
        """
        self.splits += 1
        return self.budget.out_of_memory(cells)

    def agree_on_failures(self, pieces: int) -> int:
        """Most pieces that any rank has still to run; if there are any, all ranks go on with the smallest size.

        Every rank calls it with its own number, after tiles of a size that is new.
        """
        most, smallest = self._agree([pieces, -self.budget.size], self.device)
        if most:
            self.budget.settle(int(-smallest))
        return int(most)

    def end_of_fragment(self) -> None:
        """Agree with the other ranks on the next size. Every rank calls it after every fragment."""
        if not self.searching:
            return
        per_cell = self._seconds / self._cells if self._cells else 0.0
        fits = float(self.budget.limit)
        if self._total and self._bytes:
            free = (self.memory_fraction * self._total - allocated_bytes()) / GIB
            fits = float(max(1, cells_that_fit(free, self._bytes / self._cells / GIB)))
        slowest, smallest = self._agree([per_cell, -fits], self.device)
        self._seconds = self._cells = self._bytes = 0.0
        self.budget.limit = max(self.budget.size, min(self.budget.limit, int(-smallest)))
        if slowest > 0:
            self.budget.observe(self.budget.size, slowest * self.budget.size)
