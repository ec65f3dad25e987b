"""Tiles: every cell exactly once (I3)."""

from __future__ import annotations

from collections import Counter

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_digen.engine.tiles import SampleRow, count_tiles, gather_tile, plan_tiles

quick = settings(deadline=None, max_examples=100)
transition_counts = st.lists(st.integers(0, 6), max_size=12)
limits = st.none() | st.integers(1, 20)


@quick
@given(transitions=transition_counts, max_cells=limits, tsp=st.booleans())
def test_every_cell_exactly_once(transitions, max_cells, tsp):
    tiles = plan_tiles(transitions, max_cells=max_cells, tsp=tsp)
    cells = Counter(cell for tile in tiles for cell in tile)
    assert cells == Counter((s, k) for s, count in enumerate(transitions) for k in range(count))
    assert all(tiles)
    assert max_cells is None or max(map(len, tiles), default=0) <= max_cells
    assert count_tiles(transitions, max_cells=max_cells, tsp=tsp) == len(tiles)


@quick
@given(transitions=transition_counts, max_cells=limits)
def test_without_tsp_a_tile_holds_one_transition(transitions, max_cells):
    tiles = plan_tiles(transitions, max_cells=max_cells, tsp=False)
    assert all(len({k for _, k in tile}) == 1 for tile in tiles)
    if max_cells is None:
        assert len(tiles) == max(transitions, default=0)


@quick
@given(transitions=transition_counts, max_cells=st.integers(1, 20))
def test_with_tsp_tiles_are_as_few_and_as_even_as_can_be(transitions, max_cells):
    sizes = [len(tile) for tile in plan_tiles(transitions, max_cells=max_cells, tsp=True)]
    assert len(sizes) == -(-sum(transitions) // max_cells)
    assert not sizes or max(sizes) - min(sizes) <= 1


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
    tile = gather_tile([row(0), row(1)], cells, device="cpu", dtype=torch.float64, weight=0.5)
    assert tile.x.flatten().tolist() == [10, 2, 12] and tile.x_next.flatten().tolist() == [11, 3, 13]
    assert tile.sigma.tolist() == [1.0, 0.5, 0.5] and tile.sigma_next.tolist() == [0.75, 0.25, 0.25]
    assert tile.log_prob_rollout.tolist() == [-2, -2, -3] and tile.transition.tolist() == [0, 1, 1]
    assert tile.advantage.tolist() == [1, 0, 1] and tile.weight.tolist() == [0.5] * 3
    assert tile.cond["embeds"][:, 0].tolist() == [1, 0, 1] and tile.negative is None
    assert {t.dtype for t in (tile.x, tile.sigma, tile.log_prob_rollout, tile.advantage)} == {torch.float64}
