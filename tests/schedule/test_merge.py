"""How many ready groups are trained at once, and when the missing ones will be there."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_digen.schedule.forecast import Pending, group_arrivals
from verl_digen.schedule.merge import groups_of_a_round, groups_to_train
from verl_digen.schedule.profile import Profile
from verl_digen.schedule.work import TrainerPool

quick = settings(deadline=None, max_examples=150)


@st.composite
def costs(draw):
    """Time of a number of groups trained at once, as the profile gives it; whole numbers of seconds."""
    samples, transitions = draw(st.integers(1, 6)), draw(st.integers(1, 4))
    trainer = TrainerPool(ranks=draw(st.integers(1, 16)))
    cells, tsp = draw(st.integers(1, 9)), draw(st.booleans())
    profile = Profile(denoise_s=1, train_cell_s=draw(st.integers(1, 4)), tile_fixed_s=draw(st.integers(0, 8)))
    full = groups_of_a_round(samples, transitions, trainer.ranks, cells, tsp)
    return lambda count: profile.train_s(samples * count, transitions, trainer, max_cells=cells, tsp=tsp), full


def best_end(ready, arrivals, train_s, first) -> float:
    """The earliest end of all plans that train what is ready in their first lot, with ``first`` arrivals."""
    rest = len(arrivals) - first
    ends = []
    for cuts in itertools.product([False, True], repeat=max(0, rest - 1)):
        edges = [first, *(first + i + 1 for i, cut in enumerate(cuts) if cut), *([len(arrivals)] if rest else [])]
        now = (arrivals[first - 1] if first else 0.0) + train_s(ready + first)
        for start, stop in zip(edges, edges[1:], strict=False):
            now = max(now, arrivals[stop - 1]) + train_s(stop - start)
        ends.append(now)
    return min(ends)


@quick
@given(costs=costs(), ready=st.integers(1, 5), gaps=st.lists(st.integers(0, 6), max_size=6), waited=st.integers(0, 3))
def test_it_waits_when_every_plan_that_starts_now_ends_later_and_only_then(costs, ready, gaps, waited):
    train_s, full = costs
    arrivals = [float(time) for time in itertools.accumulate(gaps)]
    take = groups_to_train(ready, arrivals, train_s, full=full, waited_s=waited)
    assert 0 <= take.count <= ready
    if not arrivals:
        assert take.count == ready
        return
    if ready >= full:
        assert take.count % full == 0 and ready - take.count < full
        return
    horizon = train_s(ready) - waited
    awaited = [time for time in arrivals if time < horizon][: full - ready]
    plans = [best_end(ready, awaited, train_s, first) for first in range(len(awaited) + 1)]
    if plans[0] <= min(plans):
        assert take.count == ready
    else:
        assert take.count == 0 and 0 <= take.wait_s <= horizon


@quick
@given(
    ready=st.integers(1, 20),
    gaps=st.lists(st.floats(0, 5), min_size=1, max_size=20),
    cell=st.floats(0.1, 9),
    full=st.integers(1, 30),
)
def test_a_trainer_that_gains_nothing_by_larger_lots_never_idles(ready, gaps, cell, full):
    take = groups_to_train(ready, list(itertools.accumulate(gaps)), lambda count: 64 * cell * count, full=full)
    assert take.count == (ready if ready < full else ready // full * full)


def test_what_is_too_far_away_is_not_awaited_and_a_wait_ends():
    def train_s(count):
        return 10.0  # of any number

    assert groups_to_train(1, [10.0], train_s, full=9).count == 1
    assert groups_to_train(1, [math.inf], train_s, full=9).count == 1
    assert groups_to_train(1, [9.0], train_s, full=9) == groups_to_train(1, [9.0, 30.0], train_s, full=9)
    assert groups_to_train(1, [9.0], train_s, full=9).wait_s == 10.0  # never longer than training takes
    assert groups_to_train(1, [2.0], train_s, full=9).wait_s == 4.0
    assert groups_to_train(1, [2.0], train_s, full=9, waited_s=8.0).count == 1
    assert groups_to_train(1, [0.0], train_s, full=9).wait_s == 0.0  # overdue: looked for once
    with pytest.raises(ValueError, match="0 groups are ready"):
        groups_to_train(0, [], train_s, full=1)


@given(samples=st.integers(1, 30), transitions=st.integers(1, 12), ranks=st.integers(1, 512), cells=st.integers(1, 64))
@settings(deadline=None, max_examples=60)
def test_a_round_holds_its_groups_and_not_one_more(samples, transitions, ranks, cells):
    for tsp, width in ((True, transitions), (False, 1)):
        count = groups_of_a_round(samples, transitions, ranks, cells, tsp)
        assert count == 1 or count * samples * width <= ranks * cells
        assert (count + 1) * samples * width > ranks * cells


# ---- forecast --------------------------------------------------------------------------------------------------


def forecast(missing, **given):
    options = {"generating": [], "scoring": [], "waiting": [], "lanes": [], "score_s": 0.0, "horizon_s": math.inf}
    return group_arrivals(missing, **(options | given), generate_s=lambda load: 10.0 * load)


def test_a_group_is_ready_when_its_last_sample_is_scored():
    generating = [Pending(3.0, [("a", 0)]), Pending(5.0, [("a", 1)]), Pending(-1.0, [("b", 0)])]
    assert forecast({"a": 2, "b": 1}, generating=generating, score_s=1.0) == [1.0, 6.0]
    assert forecast({"a": 2}, generating=generating, scoring=[Pending(9.0, [("c", 0)])]) == [5.0]
    assert forecast({"a": 3, "b": 1}, generating=generating) == [0.0]  # a sample of a is with nobody
    assert forecast({"a": 1}, scoring=[Pending(2.0, [("a", 0)])], score_s=4.0) == [2.0]


def test_waiting_fragments_go_to_whoever_is_free_first_as_far_as_the_horizon():
    waiting = [[("a", 0)], [("a", 1)], [("b", 0), ("b", 1)]]
    lanes = [(0.0, 1.0), (1.0, 2.0)]  # a/0 until 10, a/1 until 6 on the faster one, b from 6 until 16
    assert forecast({"a": 2, "b": 2}, waiting=waiting, lanes=lanes) == [10.0, 16.0]
    assert forecast({"a": 2, "b": 2}, waiting=waiting, lanes=lanes, horizon_s=12.0) == [10.0]

    def endless():
        yield [("a", 0)]
        while True:
            yield [("b", 0)]

    assert forecast({"a": 1, "b": 99}, waiting=endless(), lanes=lanes, horizon_s=15.0) == [10.0]
    assert forecast({"a": 1}, waiting=endless()) == []  # no replica lives
