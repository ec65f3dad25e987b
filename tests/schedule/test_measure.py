"""Measured costs become the profile that decisions read."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_digen.schedule.measure import MAX_LOADS, LoadCost, Measured

quick = settings(deadline=None, max_examples=60)
seconds = st.floats(0.001, 10.0)


@quick
@given(fixed=seconds, slope=seconds, loads=st.sets(st.integers(1, 40), min_size=2, max_size=6))
def test_two_loads_tell_the_fixed_part_from_the_growing_one(fixed, slope, loads):
    cost = LoadCost()
    for load in loads:
        cost.observe(load, fixed + slope * load)
    assert cost.parts() == pytest.approx((fixed, slope), rel=1e-6, abs=1e-9)


@quick
@given(points=st.lists(st.tuples(st.integers(1, 40), seconds), min_size=1, max_size=20))
def test_no_part_is_negative_and_the_mean_is_kept(points):
    cost = LoadCost()
    for load, value in points:
        cost.observe(load, value)
    fixed, slope = cost.parts()
    assert fixed >= 0 and slope >= 0
    if len({load for load, _ in points}) == 1:
        assert fixed == pytest.approx(0.0, abs=1e-9)


def test_many_loads_do_not_grow_without_bound_and_bad_ones_are_refused():
    cost = LoadCost()
    for load in range(1, MAX_LOADS + 20):
        cost.observe(load, float(load))
    assert len(cost.state_dict()) == MAX_LOADS
    with pytest.raises(ValueError, match="a load must be at least 1, got 0"):
        cost.observe(0, 1.0)
    with pytest.raises(ValueError, match="nothing was measured"):
        LoadCost().parts()


def measured() -> Measured:
    run = Measured()
    for load in (2, 4):
        run.denoise.observe(load, 0.1 + 0.2 * load)
        run.tile.observe(load, 0.3 + 0.4 * load)
    for name, value in (("encode", 1.0), ("decode", 2.0), ("score", 3.0), ("fetch", 0.5), ("tiles", 5.0)):
        run.observe(name, value)
    run.observe("commit", 4.0)
    run.observe("publish", 6.0)
    return run


def test_the_profile_holds_what_was_measured_and_survives_a_restart():
    again = Measured()
    assert not again.known
    again.load_state_dict(json.loads(json.dumps(measured().state_dict())))
    for run in (measured(), again):
        assert run.known
        profile = run.profile()
        assert (profile.denoise_fixed_s, profile.denoise_s) == pytest.approx((0.1, 0.2))
        assert profile.train_cell_s == pytest.approx(0.4)
        assert profile.tile_fixed_s == pytest.approx(0.3 + 0.5 / 5)  # rows are fetched once per fragment of 5 tiles
        assert (profile.encode_s, profile.decode_s, profile.score_s) == (1.0, 2.0, 3.0)
        assert (profile.commit_s, profile.publish_s, profile.publish_block_s) == (4.0, 6.0, 6.0)
    with pytest.raises(ValueError, match="unknown duration 'denoise'; known: encode"):
        again.observe("denoise", 1.0)
