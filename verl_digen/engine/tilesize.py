"""How many cells a tile has: found by a dry run before the first transaction, remembered per (model, shape), and
halved when memory runs out later.

The rows of a dry run are made up; they have the shapes of real ones. All ranks come to the same size, because the
number of tiles is the number of collectives.
"""

from __future__ import annotations

import json
import os
import time
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist

from verl_digen.config.digen import TspConfig
from verl_digen.engine.tiles import SampleRow
from verl_digen.engine.transaction import StepRule, Transaction, TransactionError
from verl_digen.platform.memory import peak_memory_bytes, reset_peak_memory
from verl_digen.schedule.tsp import grow_tile, shrink_tile

FILE = "tile_sizes.json"
ONE_CELL = (
    "a tile of 1 cell does not fit into memory; reduce the resolution, shard over more ranks (trainer.nnodes, "
    "trainer.n_gpus_per_node) or set actor_rollout_ref.model.enable_gradient_checkpointing=true"
)


def largest_of_all_ranks(values: list[float], device: torch.device) -> list[float]:
    """Element-wise maximum over the ranks."""
    tensor = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
    return tensor.tolist()


class DryRun:
    """Tiles of made-up rows on this rank, together with the other ranks.

    Args:
        engine: in training mode, without an open transaction.
        rule: how cells are scored; the same passes are made as in training.
        tsp: ``auto`` and ``memory_fraction``.
        latent_shape: of one sample.
        cond, negative: prompt tensors of one prompt, without batch dimension.
        total: bytes of the device; None where memory has no limit of ours (CPU).
    """

    def __init__(
        self,
        engine,
        rule: StepRule,
        tsp: TspConfig,
        *,
        latent_shape: tuple[int, ...],
        cond: dict[str, torch.Tensor],
        negative: dict[str, torch.Tensor] | None,
        total: int | None,
    ):
        self.engine, self.rule, self.tsp = engine, rule, tsp
        self._room = None if total is None else tsp.memory_fraction * total - _optimizer_state_to_come(engine)
        self._row = SampleRow(
            uid="dry run",
            j=0,
            latents=torch.zeros(2, *latent_shape),
            sigmas=torch.tensor([0.9, 0.8]),
            starts=(0,),
            log_probs=torch.zeros(1),
            advantage=1.0,
            cond=cond,
            negative=negative,
        )

    def find(self, largest: int) -> int:
        """Most cells of a tile, up to ``largest``.

        Without ``tsp.auto`` the largest that fits of ``largest``, half of it, a quarter, and so on; with it, doubled
        from 1 on for as long as that fits and makes a cell cheaper.

        Raises:
            TransactionError: one cell does not fit into memory.
        """
        size = grow_tile(self.seconds, largest) if self.tsp.auto else shrink_tile(self.seconds, largest)
        if not size:
            raise TransactionError(ONE_CELL)
        return size

    def seconds(self, cells: int) -> float | None:
        """Time of a tile on the slowest rank; None if it does not fit on every rank."""
        engine = self.engine
        transaction = Transaction(engine, self.rule, planned_cells=cells, on_policy=True)
        rows = [self._copy(number) for number in range(cells)]
        reset_peak_memory()
        engine.family.synchronize()
        started = time.perf_counter()
        try:
            transaction.accumulate(rows, [[(number, 0) for number in range(cells)]], idle_row=self._row)
            engine.family.synchronize()
            elapsed = time.perf_counter() - started
        finally:
            transaction.abort()
        full = self._room is not None and peak_memory_bytes() > self._room
        slowest, failed = largest_of_all_ranks([elapsed, float(full or transaction.too_large > 0)], engine.device)
        return None if failed else slowest

    def _copy(self, number: int) -> SampleRow:
        return replace(self._row, j=number)


def _optimizer_state_to_come(engine) -> float:
    """Bytes that an optimizer with two moments takes at its first step."""
    if engine.optimizer.state:
        return 0.0
    local = (p.to_local() if hasattr(p, "to_local") else p for p in engine.trainable_parameters())
    return 2.0 * sum(p.numel() * p.element_size() for p in local)


class TileSize:
    """The tile size of a run, on the driver; remembered in the run's folder.

    Args:
        folder: ``trainer.default_local_dir``.
        key: model, shape and whatever else the size depends on.
        largest: cells of the largest tile that the plan asks for.

    Attributes:
        cells: most cells of a tile.
        known: whether ``cells`` comes from an earlier start of the run, or a dry run.
    """

    def __init__(self, folder: str, key: str, largest: int):
        self._file = Path(folder) / FILE
        self._key = key
        remembered = self._all().get(key)
        self.known = remembered is not None
        self.cells = min(largest, remembered or largest)

    def found(self, cells: int) -> None:
        """A dry run came to this size."""
        self.cells, self.known = cells, True
        self._remember()

    def halve(self, too_large: int) -> None:
        """A tile of ``too_large`` cells did not fit.

        Raises:
            TransactionError: it was one cell.
        """
        if too_large <= 1:
            raise TransactionError(ONE_CELL)
        self.cells = min(self.cells, too_large // 2)
        self._remember()

    def _remember(self) -> None:
        """Other models and shapes keep theirs."""
        sizes = self._all() | {self._key: self.cells}
        self._file.parent.mkdir(parents=True, exist_ok=True)
        beside = self._file.with_suffix(".new")
        beside.write_text(json.dumps(sizes, indent=1, sort_keys=True))
        os.replace(beside, self._file)

    def _all(self) -> dict[str, int]:
        return json.loads(self._file.read_text()) if self._file.is_file() else {}
