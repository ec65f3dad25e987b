"""The driver's load test at a small size: what it counts, not how long it takes."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "recipes" / "benchmarks" / "driver_load.py"


@pytest.fixture(scope="module")
def load_test():
    spec = importlib.util.spec_from_file_location("driver_load", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules["driver_load"] = module  # its dataclasses look themselves up
    spec.loader.exec_module(module)
    yield module
    del sys.modules["driver_load"]


@pytest.mark.parametrize("stale", [0.0, 0.5])
def test_a_step_makes_the_calls_it_needs_and_leaves_nothing_behind(load_test, stale):
    """8 groups of 4 samples in fragments of 2, on 4 replicas and 3 ranks, four steps."""
    load = load_test.Load(replicas=4, ranks=3, groups=8, samples=4, fragment=2, reward_workers=2, stale=stale)
    rows = list(load_test.run(load, steps=4))
    assert sum(row["generate"] for row in rows) == sum(row["score"] for row in rows) == 4 * 16
    assert all(row["rank"] <= 3 * (8 + 2) for row in rows)  # at most begin, each group, commit, on 3 ranks
    if not stale:
        assert [row["generate"] for row in rows] == [16] * 4
    assert all(row["steps_known"] == (1 if stale and i < 3 else 0) for i, row in enumerate(rows))


def test_what_a_claim_costs_does_not_grow_with_what_waits(load_test):
    """Comparisons of fragments, the queue's own measure of work, per claim: the same for 16 and for 256 groups."""
    from verl_digen.schedule import gap
    from verl_digen.schedule.gap import ClaimQueue, plan_fragments
    from verl_digen.schedule.tcss import StaleLedger

    def work(groups: int) -> float:
        counted, real = [], gap._index
        queue = ClaimQueue(StaleLedger(groups))
        queue.add_step(0, plan_fragments(range(groups), 4, 2))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(gap, "_index", lambda piece: counted.append(piece) or real(piece))
            claims = 0
            while (claim := queue.claim(0)) is not None:
                queue.available(0)
                queue.finished(claim)
                claims += 1
        assert claims == 2 * groups
        return len(counted) / claims

    assert work(256) == pytest.approx(work(16), rel=0.1)
