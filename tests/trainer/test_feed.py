"""Which groups go to the Trainer at once, with a scripted rollout, a scripted Trainer and a clock of its own."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.trainer.test_step import N, make_plan, result
from verl_digen.config.digen import TspConfig
from verl_digen.rollout.requests import PromptGroup
from verl_digen.schedule.measure import Measured
from verl_digen.trainer import feed as feed_module
from verl_digen.trainer.feed import Feed

GROUPS = [
    PromptGroup(uid=f"g{i}", n=N, prompt="p", negative_prompt="", ground_truth="", data_source="d") for i in range(8)
]
ANSWER, NOTHING = "answer", "nothing"


class World:
    """Plays a script: an index completes that group, ``ANSWER`` ends the oldest lot, ``NOTHING`` lets time pass.

    The clock moves by ``tick`` with every event; waiting without an event takes the time that may be waited.
    """

    def __init__(self, script, tick=1.0, arrivals=()):
        self.script, self.tick, self.soon = list(script), tick, list(arrivals)
        self.now = 0.0
        self.calls: list = []
        self.asked: list[float] = []

    def group_within(self, timeout_s, wait_s):
        event = self.script.pop(0)
        self.now += min(wait_s, self.tick) if event is NOTHING else self.tick
        if event is ANSWER and self.calls:
            self.calls.pop(0)()
        return result(GROUPS[event]) if isinstance(event, int) else None

    def wake(self):
        pass

    def when_done(self, refs, then):
        self.calls.append(then)

    def arrivals(self, uids, profile, horizon_s):
        self.asked.append(horizon_s)
        return [time for time in self.soon if time <= horizon_s]


def measured(fixed: float, cell: float, fetch: float = 0.0) -> Measured:
    """A Trainer whose tile takes ``fixed + cell · cells``."""
    run = Measured()
    run.denoise.observe(1, 1.0)
    for cells in (1, 2, 4):
        run.tile.observe(cells, fixed + cell * cells)
    run.observe("fetch", fetch)
    return run


def lots_of(world, monkeypatch, *, costs=None, max_cells=2, ranks=2, groups=GROUPS) -> list[tuple[list[int], bool]]:
    """Lots as numbers of groups. N=2 samples of 3 transitions are 6 cells."""
    plan = make_plan(one_shot=False, ranks=ranks)
    plan = replace(plan, digen=replace(plan.digen, tsp=TspConfig(enable=True, max_cells=max_cells)))
    monkeypatch.setattr(feed_module.time, "monotonic", lambda: world.now)
    feed = Feed(plan, world, world, costs or Measured(), lambda: max_cells)
    found = []
    for lot, last in feed.lots(groups):
        found.append(([int(done.group.uid[1:]) for done in lot], last))
        feed.sent(lot, ["call"])
    return found


def test_what_is_ready_when_the_trainer_becomes_free_is_trained_at_once(monkeypatch):
    world = World([3, 0, 5, ANSWER, 1, 2, ANSWER, 4, 6, ANSWER, 7])
    assert lots_of(world, monkeypatch, max_cells=99) == [
        ([3], False),
        ([0, 5], False),
        ([1, 2], False),
        ([4, 6], False),
        ([7], True),  # the last one does not wait for the Trainer
    ]


def test_whole_rounds_of_tiles_are_sent_ahead_of_the_running_lot_and_no_more(monkeypatch):
    """A round of 2 ranks × 6 cells holds two groups."""
    world = World([0, 1, 2, 3, 4, 5, ANSWER, 6, ANSWER, 7])
    found = lots_of(world, monkeypatch, max_cells=6)
    # 0 at once; 1 and 2 fill a round and go ahead; 3 to 5 wait until there is room; then 3 and 4 are a round
    assert found == [([0], False), ([1, 2], False), ([3, 4], False), ([5, 6], False), ([7], True)]


def test_less_than_a_round_is_sent_just_before_the_running_lot_ends(monkeypatch):
    """A lot of one group takes 4 + 3 cells · 1 s = 7 s, a fetch 2 s: the second goes 5 s after the first."""
    world = World([0, 1, NOTHING, NOTHING, NOTHING, 2, 3], tick=1.5)
    found = lots_of(world, monkeypatch, costs=measured(4.0, 1.0, fetch=2.0), max_cells=99, groups=GROUPS[:4])
    assert found[:2] == [([0], False), ([1], False)]
    assert world.now == pytest.approx(1.5 + 5.0 + 2 * 1.5)  # 1 was sent at 6.5


def test_a_free_trainer_waits_for_groups_that_come_soon_enough(monkeypatch):
    world = World([0, 1, 2, 3, 4, 5, 6, 7], tick=0.25, arrivals=[0.25, 0.5, 0.75])
    found = lots_of(world, monkeypatch, costs=measured(4.0, 0.1), max_cells=12)  # a round holds four groups
    assert found[0] == ([0, 1, 2, 3], False)
    assert len(world.asked) == 1  # one forecast for a lot
    eager = World([0, 1, ANSWER, 2, 3, 4, 5, 6, 7], arrivals=[100.0])
    assert lots_of(eager, monkeypatch, costs=measured(4.0, 0.1), max_cells=12)[0] == ([0], False)


def test_a_group_that_does_not_come_is_not_waited_for_longer_than_said(monkeypatch):
    world = World([0, NOTHING, 1, 2, 3], tick=60.0, arrivals=[0.5])
    found = lots_of(world, monkeypatch, costs=measured(4.0, 0.1), max_cells=24, groups=GROUPS[:4])
    assert found[0] == ([0], False)
    assert len(world.asked) == 1  # the forecast was believed once


@settings(deadline=None, max_examples=80)
@given(
    order=st.permutations(range(8)),
    noise=st.lists(st.tuples(st.integers(0, 8), st.sampled_from([ANSWER, NOTHING])), max_size=20),
    known=st.booleans(),
    cells=st.integers(1, 30),
    soon=st.lists(st.floats(0.0, 5.0), max_size=4),
)
def test_every_group_is_in_one_lot_in_the_order_of_completion(order, noise, known, cells, soon):
    script = list(order)
    for place, event in noise:
        script.insert(place, event)
    last = max(script.index(group) for group in order)
    world = World(script[: last + 1], arrivals=sorted(soon))
    with pytest.MonkeyPatch.context() as patch:
        found = lots_of(world, patch, costs=measured(2.0, 0.5) if known else None, max_cells=cells)
    assert [group for lot, _ in found for group in lot] == list(order)
    assert [last for _, last in found] == [False] * (len(found) - 1) + [True]
