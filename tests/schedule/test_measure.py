"""Measured costs become the profile that decisions read."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_digen.schedule.measure import MAX_LOADS, LoadCost, Measured
from verl_digen.schedule.profile import Profile, RunningEstimate

ROOT = Path(__file__).resolve().parents[2]

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


def test_the_profile_holds_what_was_measured():
    assert not Measured().known
    run = measured()
    assert run.known
    profile = run.profile()
    assert (profile.denoise_fixed_s, profile.denoise_s) == pytest.approx((0.1, 0.2))
    assert profile.train_cell_s == pytest.approx(0.4)
    assert profile.tile_fixed_s == pytest.approx(0.3 + 0.5 / 5)  # rows are fetched once per fragment of 5 tiles
    assert (profile.encode_s, profile.decode_s, profile.score_s) == (1.0, 2.0, 3.0)
    assert (profile.commit_s, profile.publish_s, profile.publish_block_s) == (4.0, 6.0, 6.0)
    with pytest.raises(ValueError, match="unknown duration 'denoise'; known: encode"):
        run.observe("denoise", 1.0)


@given(values=st.lists(st.floats(0.9, 1.1), min_size=5, max_size=40))
@settings(max_examples=60, deadline=None)
def test_estimate_follows_the_mean_and_variance(values):
    estimate = RunningEstimate(window=1000)
    for value in values:
        estimate.observe(value)
    mean = sum(values) / len(values)
    assert estimate.value == pytest.approx(mean)
    assert estimate.variance == pytest.approx(sum((v - mean) ** 2 for v in values) / len(values), abs=1e-9)


def test_estimate_cold_start_outliers_and_level_change():
    cold = RunningEstimate(prior=7.0)
    assert cold.value == 7.0
    cold.observe(1.0)
    assert cold.value == 1.0  # one measurement outweighs the prior
    estimate = RunningEstimate(window=8)
    for _ in range(10):
        estimate.observe(1.0)
    estimate.observe(100.0)
    assert estimate.value < 1.2 and estimate.outliers == 1
    for _ in range(3):
        estimate.observe(5.0)
    assert estimate.value == pytest.approx(5.0)  # three in a row on one side are a new level
    with pytest.raises(ValueError, match="nothing measured"):
        _ = RunningEstimate().value
    with pytest.raises(ValueError, match="nan"):
        estimate.observe(math.nan)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"denoise_s": 0.0}, "denoise_s=0.0"),
        ({"score_s": -1.0}, "score_s=-1.0"),
        ({"publish_block_s": 2.0}, "publish_block_s=2.0"),
    ],
)
def test_profile_refuses_impossible_costs(change, message):
    with pytest.raises(ValueError, match=message):
        Profile(**{"denoise_s": 1.0, "train_cell_s": 1.0, **change})


def test_the_package_needs_only_the_standard_library():
    code = (
        "import sys, pkgutil, importlib, verl_digen.schedule as s\n"
        "[importlib.import_module(m.name) for m in pkgutil.iter_modules(s.__path__, s.__name__ + '.')]\n"
        "bad = {'torch', 'ray', 'verl', 'numpy', 'matplotlib', 'yaml'} & set(sys.modules)\n"
        "sys.exit(f'imports {bad}' if bad else 0)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)
