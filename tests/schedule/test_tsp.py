"""TSP: tile plans cover the grid, fit the budget and keep ranks in step."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_digen.schedule.profile import Profile
from verl_digen.schedule.tsp import cells_that_fit, grow_tile, plan_tiles, plan_without_tsp, shrink_tile, tile_rounds
from verl_digen.schedule.work import TrainerPool

sizes = {"samples": st.integers(1, 12), "transitions": st.integers(1, 9), "ranks": st.integers(1, 7)}


@given(**sizes, cells=st.integers(1, 20), order=st.sampled_from(["sample", "transition"]), tsp=st.booleans())
@settings(max_examples=100, deadline=None)
def test_tiles_cover_the_grid_once_fit_and_keep_ranks_in_step(samples, transitions, ranks, cells, order, tsp):
    if tsp:
        plan = plan_tiles(samples, transitions, ranks=ranks, max_cells=cells, order=order)
    else:
        plan = plan_without_tsp(samples, transitions, ranks=ranks, max_cells=cells)
    covered = [cell for tile in plan.tiles for cell in plan.grid(tile)]
    assert sorted(covered) == [(i, k) for i in range(samples) for k in range(transitions)]
    assert all(tile.cells <= cells for tile in plan.tiles)
    per_rank = [plan.of_rank(rank) for rank in range(ranks)]
    assert len({len(tiles) for tiles in per_rank}) == 1  # the same number of collectives everywhere
    rounds, fullest = tile_rounds(samples, transitions, ranks, cells, tsp)
    assert rounds == plan.rounds == len(per_rank[0])
    assert fullest == max(sum(tile.cells for tile in tiles) for tiles in per_rank)
    if tsp:
        loads = [sum(tile.cells for tile in tiles) for tiles in per_rank]
        assert max(loads) - min(loads) <= 1
    else:
        assert all(len({k for _, k in plan.grid(tile)}) <= 1 for tile in plan.tiles)  # one transition per tile


def test_time_of_a_fragment_follows_the_formula():
    """Without TSP K·(compute + comm); with tiles of k transitions K·compute + ⌈K/k⌉·comm (4 samples on 4 ranks)."""
    profile = Profile(denoise_s=1, train_cell_s=3.0, tile_fixed_s=0.5)
    trainer = TrainerPool(ranks=4)
    assert profile.train_s(4, 10, trainer, max_cells=4, tsp=False) == pytest.approx(10 * (3.0 + 0.5))
    assert profile.train_s(4, 10, trainer, max_cells=4, tsp=True) == pytest.approx(10 * 3.0 + 3 * 0.5)
    assert profile.train_s(2, 10, trainer, max_cells=4, tsp=True) == pytest.approx(5 * 3.0 + 2 * 0.5)
    fast = TrainerPool(ranks=4, speed=2.0)
    assert profile.train_s(4, 10, fast, max_cells=4, tsp=True) == pytest.approx((10 * 3.0 + 3 * 0.5) / 2)
    recompute = Profile(denoise_s=1, train_cell_s=3.0, tile_fixed_s=0.5, logprob_cell_s=1.0, logprob_fixed_s=0.2)
    extra = recompute.train_s(4, 10, trainer, max_cells=4, tsp=True, recompute=True)
    assert extra == pytest.approx(10 * 4.0 + 3 * 0.7)


def test_plan_refuses_bad_input():
    with pytest.raises(ValueError, match="max_cells=0"):
        plan_tiles(2, 2, ranks=1, max_cells=0)
    with pytest.raises(ValueError, match="unknown order 'diagonal'"):
        plan_tiles(2, 2, ranks=1, max_cells=1, order="diagonal")


def test_cells_that_fit():
    assert cells_that_fit(10.0, 3.0) == 3
    assert cells_that_fit(-2.0, 3.0) == 0
    with pytest.raises(ValueError, match="gib_per_cell=0"):
        cells_that_fit(1.0, 0.0)


def test_a_tile_grows_until_it_no_longer_helps_or_no_longer_fits():
    assert grow_tile(lambda cells: 1.0 + cells if cells <= 8 else 2.0 * cells, 64) == 8
    assert grow_tile(lambda cells: 1.0 + cells, 6) == 6  # the limit need not be a power of two
    assert grow_tile(lambda cells: 1.0 + cells if cells <= 5 else None, 64) == 4
    assert grow_tile(lambda cells: None, 64) == 0


def test_a_tile_shrinks_until_it_fits():
    tried = []

    def seconds(cells):
        tried.append(cells)
        return 1.0 if cells <= 5 else None

    assert shrink_tile(seconds, 21) == 5 and tried == [21, 10, 5]
    assert shrink_tile(lambda cells: None, 3) == 0
