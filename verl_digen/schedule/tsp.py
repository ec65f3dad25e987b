"""TSP: the Trainer's work as a grid of cells (samples × trained transitions), cut into tiles.

Invariants:
- every cell of a fragment is in exactly one tile of exactly one rank;
- no tile is larger than the budget;
- every rank runs the same number of tiles, so that the collectives inside a tile meet; a rank with less
  work gets smaller or empty tiles.

A tile is a range of the flattened grid, so it can be cut along either axis: ``order="sample"`` puts the
transitions of one sample next to each other, ``order="transition"`` the samples of one transition.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from verl_digen.schedule.work import Tile


@dataclass(frozen=True, slots=True)
class TilePlan:
    """All tiles of a fragment.

    Attributes:
        samples, transitions: the grid.
        order: how a cell index maps to the grid, ``"sample"`` or ``"transition"``.
        tiles: round-major, every round has one tile per rank.
    """

    samples: int
    transitions: int
    order: str
    tiles: tuple[Tile, ...]

    @property
    def rounds(self) -> int:
        return 1 + max(tile.round for tile in self.tiles)

    def of_rank(self, rank: int) -> tuple[Tile, ...]:
        """Tiles of one rank in the order they run."""
        return tuple(tile for tile in self.tiles if tile.rank == rank)

    def grid(self, tile: Tile) -> Iterator[tuple[int, int]]:
        """Cells of a tile as (sample, transition)."""
        if self.order == "sample":
            for cell in range(tile.start, tile.stop):
                yield divmod(cell, self.transitions)
        else:
            for cell in range(tile.start, tile.stop):
                transition, sample = divmod(cell, self.samples)
                yield sample, transition


def even_cut(start: int, stop: int, parts: int) -> list[tuple[int, int]]:
    """Cut a range into ``parts`` ranges whose lengths differ by at most one, longer ones first."""
    length, extra = divmod(stop - start, parts)
    ranges = []
    for part in range(parts):
        end = start + length + (1 if part < extra else 0)
        ranges.append((start, end))
        start = end
    return ranges


def tile_rounds(samples: int, transitions: int, ranks: int, max_cells: int, tsp: bool = True) -> tuple[int, int]:
    """Tiles per rank and cells of the fullest rank, without building the plan.

    Without TSP a rank keeps whole samples and a tile never holds more than one transition of them.
    """
    if not tsp:
        own = -(-samples // ranks)
        return transitions * -(-own // max_cells), own * transitions
    cells = -(-samples * transitions // ranks)
    return -(-cells // max_cells), cells


def plan_tiles(samples: int, transitions: int, *, ranks: int, max_cells: int, order: str = "sample") -> TilePlan:
    """Deal the cells of a fragment to the ranks evenly and cut each share into tiles.

    Shares differ by at most one cell; so do the tiles of a rank. Source: arXiv 2606.24369 (timestep
    parallelism), with uneven sizes.

    Raises:
        ValueError: a size below one, or an unknown order.
    """
    if min(samples, transitions, ranks, max_cells) < 1:
        raise ValueError(
            f"tile plan: samples={samples}, transitions={transitions}, ranks={ranks}, max_cells={max_cells} "
            f"must all be at least 1"
        )
    if order not in ("sample", "transition"):
        raise ValueError(f"tile plan: unknown order {order!r}; known: sample, transition")
    rounds, _ = tile_rounds(samples, transitions, ranks, max_cells)
    tiles = [
        Tile(rank, index, start, stop)
        for rank, share in enumerate(even_cut(0, samples * transitions, ranks))
        for index, (start, stop) in enumerate(even_cut(*share, rounds))
    ]
    tiles.sort(key=lambda tile: (tile.round, tile.rank))
    return TilePlan(samples, transitions, order, tuple(tiles))


def plan_without_tsp(samples: int, transitions: int, *, ranks: int, max_cells: int) -> TilePlan:
    """The reference path: every rank keeps whole samples, a tile never spans two transitions."""
    if min(samples, transitions, ranks, max_cells) < 1:
        raise ValueError(
            f"tile plan: samples={samples}, transitions={transitions}, ranks={ranks}, max_cells={max_cells} "
            f"must all be at least 1"
        )
    shares = even_cut(0, samples, ranks)
    parts = -(-(shares[0][1] - shares[0][0]) // max_cells)
    tiles = tuple(
        Tile(rank, transition * parts + part, transition * samples + start, transition * samples + stop)
        for transition in range(transitions)
        for part in range(parts)
        for rank, share in enumerate(shares)
        for start, stop in [even_cut(*share, parts)[part]]
    )
    return TilePlan(samples, transitions, "transition", tiles)


def cells_that_fit(free_gib: float, gib_per_cell: float) -> int:
    """Largest tile for a memory budget; 0 when not even one cell fits.

    Args:
        free_gib: memory left after weights, gradients and optimizer state.
        gib_per_cell: activations of one cell.
    """
    if gib_per_cell <= 0:
        raise ValueError(f"tile budget: gib_per_cell={gib_per_cell} must be above zero")
    return max(0, int(free_gib / gib_per_cell + 1e-9))


def grow_tile(seconds: Callable[[int], float | None], limit: int, gain: float = 0.03) -> int:
    """Cells of the tile that makes a cell cheapest: doubled from 1 on while that helps and fits.

    Args:
        seconds: runs a tile of that many cells; None if it does not fit into memory.
        limit: largest size to try.
        gain: share of the time per cell that a doubling has to save to be kept.

    Returns:
        The size; 0 when not even one cell fits.
    """
    best, best_time, size = 0, float("inf"), 1
    while True:
        taken = seconds(size)
        if taken is None or taken / size > (1 - gain) * best_time:
            return best
        best, best_time = size, taken / size
        if size == limit:
            return best
        size = min(2 * size, limit)


def shrink_tile(seconds: Callable[[int], float | None], limit: int) -> int:
    """Cells of the largest tile that fits of ``limit``, half of it, a quarter and so on; 0 when one cell does not."""
    size = limit
    while size and seconds(size) is None:
        size //= 2
    return size
