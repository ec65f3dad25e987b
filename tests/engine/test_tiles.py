"""Tiles: every cell exactly once (I3)."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_digen.engine.tiles import SampleRow, cells_of_rank, gather_tile

quick = settings(deadline=None, max_examples=100)


@quick
@given(
    samples=st.integers(1, 12),
    transitions=st.integers(1, 6),
    ranks=st.integers(1, 4),
    max_cells=st.integers(1, 20),
    tsp=st.booleans(),
)
def test_every_cell_on_exactly_one_rank_in_as_many_rounds(samples, transitions, ranks, max_cells, tsp):
    shares = [
        cells_of_rank(samples, transitions, rank=rank, ranks=ranks, max_cells=max_cells, tsp=tsp)
        for rank in range(ranks)
    ]
    cells = Counter(cell for share in shares for tile in share for cell in tile)
    assert cells == Counter((s, k) for s in range(samples) for k in range(transitions))
    assert len({len(share) for share in shares}) == 1  # or the collectives of a tile would not meet
    largest = max(len(tile) for share in shares for tile in share)
    assert largest <= max_cells
    if not tsp:
        assert all(len({k for _, k in tile}) <= 1 for share in shares for tile in share)


def row(j: int, starts=(0, 2)) -> SampleRow:
    return SampleRow(
        uid="a",
        j=j,
        latents=torch.arange(4.0)[:, None] + 10 * j,
        sigmas=torch.tensor([1.0, 0.75, 0.5, 0.25]),
        starts=starts,
        log_probs=torch.tensor([-1.0, -2.0]) - j,
        advantage=float(j),
        cond={"embeds": torch.full((2,), float(j))},
    )


def test_a_tile_takes_states_sigmas_and_scalars_of_its_cells():
    cells = [(1, 0), (0, 1), (1, 1)]
    tile = gather_tile([row(0), row(1)], cells, device="cpu", dtype=torch.float64)
    assert tile.x.flatten().tolist() == [10, 2, 12] and tile.x_next.flatten().tolist() == [11, 3, 13]
    assert tile.sigma.tolist() == [1.0, 0.5, 0.5] and tile.sigma_next.tolist() == [0.75, 0.25, 0.25]
    assert tile.log_prob_rollout.tolist() == [-2, -2, -3] and tile.transition.tolist() == [0, 1, 1]
    assert tile.advantage.tolist() == [1, 0, 1]
    assert tile.cond["embeds"][:, 0].tolist() == [1, 0, 1] and tile.negative is None
    assert {t.dtype for t in (tile.x, tile.sigma, tile.log_prob_rollout, tile.advantage)} == {torch.float64}


def test_the_prompt_tensors_of_a_tile_are_laid_out_as_in_the_rollout():
    """A broadcast batch goes another way through a matrix product, which rounds otherwise in bf16 (I11)."""
    shared = {"embeds": torch.ones(2)}
    rows = [replace(row(j), cond=shared) for j in range(2)]
    tile = gather_tile(rows, [(0, 0), (1, 0), (1, 1)], device="cpu", dtype=torch.float64)
    assert tile.cond["embeds"].shape == (3, 2) and tile.cond["embeds"].is_contiguous()
