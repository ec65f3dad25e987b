"""The timeline of a live step: every phase, and why a pool had no work."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.trainer.test_step import GROUPS, make_plan, result
from verl_digen.bench.predict import read_measured
from verl_digen.planner.catalog import read_case
from verl_digen.rollout.requests import Activity, FragmentReport, Scoring
from verl_digen.schedule.measure import Measured
from verl_digen.trainer.step import StepOutcome
from verl_digen.trainer.timeline import StepTimes, bubble_metrics, learn, step_trace
from verl_digen.trainer.tracefiles import write_step_trace

ZERO = 1000.0


def activity() -> Activity:
    """Two fragments of two groups: generated 0-2 and 2-4, scored 2-3 and 4-5."""
    reports = [
        FragmentReport(
            fragment_id=number,
            replica="replica0",
            version=7,
            samples=((f"g{number}", 0), (f"g{number}", 1)),
            noise_hashes=("a", "b"),
            transitions=(3, 3),
            effective={},
            started=ZERO + 2 * number,
            ended=ZERO + 2 * number + 2,
            phases={"encode": 0.2, "denoise": 1.0, "decode": 0.6, "store": 0.2},
            peak_memory_bytes=1,
        )
        for number in range(2)
    ]
    scorings = [Scoring(n, 0, 2, ZERO + 2 * n + 2, ZERO + 2 * n + 3) for n in range(2)]
    return Activity(reports, scorings)


def outcome() -> StepOutcome:
    """Trained 3-4 (two tiles) and 5-6, committed 6-6.5."""

    def accumulated(rank: int, start: float) -> dict:
        at = ZERO + start
        return {
            "rank": rank,
            "started": at,
            "fetched": at + 0.2,
            "ended": at + 1.0,
            "fetch": 0.2,
            "tiles": 0.8,
            "rounds": 2,
            "tile_times": [(at + 0.2, at + 0.6, 3), (at + 0.6, at + 1.0, 3)],
        }

    groups = [result(GROUPS[0]), result(GROUPS[1])]
    for number, group in enumerate(groups):
        group.completed = ZERO + 2 * number + 3
        group.taken = group.completed
    return StepOutcome(
        groups=groups,
        accumulated=[accumulated(rank, start) for start in (3.0, 5.0) for rank in (0, 1)],
        commits=[{"commit_started": ZERO + 6.0, "commit_ended": ZERO + 6.5, "commit_s": 0.5}],
    )


TIMES = StepTimes(started=ZERO, ended=ZERO + 8.0, publishes=[(ZERO + 6.5, ZERO + 7.5)])


def trace_of(**plan):
    return step_trace(make_plan(**plan), outcome(), activity(), TIMES)


def test_every_phase_is_a_span():
    trace = trace_of(one_shot=False, placement="disaggregated")
    seen = {(span.row, span.name) for span in trace.spans}
    assert seen == {
        ("replica0", "generate"),
        ("replica0", "decode"),
        ("reward", "score"),
        ("driver", "assemble"),
        ("trainer", "fetch"),
        ("trainer", "train"),
        ("trainer", "commit"),
        ("publish", "publish"),
    }
    tiles = [span for span in trace.spans if span.name == "train"]
    assert [(round(t.start_s, 6), round(t.end_s, 6)) for t in tiles] == [(3.2, 3.6), (3.6, 4.0), (5.2, 5.6), (5.6, 6.0)]
    assert trace.devices == {"replica0": 1, "trainer": 2} and trace.source == "measured"


def test_bubbles_say_what_was_waited_for():
    metrics = bubble_metrics(trace_of(one_shot=False, placement="disaggregated"))
    # trainer, 2 devices: 0-3 generation, 4-5 reward, publish 1.0, control 0.5
    assert metrics == {
        "bubble/trainer_wait_for_generation_s": pytest.approx(6.0),
        "bubble/trainer_wait_for_reward_s": pytest.approx(2.0),
        "bubble/trainer_wait_for_publish_s": pytest.approx(2.0),
        "bubble/trainer_wait_for_control_s": pytest.approx(1.0),
        "bubble/generator_wait_for_training_s": pytest.approx(2.5),
        "bubble/generator_wait_for_publish_s": pytest.approx(1.0),
        "bubble/generator_wait_for_control_s": pytest.approx(0.5),
    }


def test_one_shot_waits_at_its_barrier_once_something_is_scored():
    metrics = bubble_metrics(trace_of(one_shot=True, placement="disaggregated"))
    assert metrics["bubble/trainer_wait_for_generation_s"] == pytest.approx(6.0)  # nothing is scored before 3
    late = activity()
    late.scorings[0] = Scoring(0, 0, 2, ZERO + 2.0, ZERO + 2.5)
    trace = step_trace(make_plan(placement="disaggregated"), outcome(), late, TIMES)
    assert bubble_metrics(trace)["bubble/trainer_barrier_s"] == pytest.approx(1.0)


def test_colocated_devices_are_busy_when_they_generate_or_train():
    trace = trace_of(one_shot=False, ranks=1)
    assert trace.devices == {"replica0": 1}
    assert bubble_metrics(trace) == {
        "bubble/trainer_wait_for_reward_s": pytest.approx(1.0),
        "bubble/generator_wait_for_publish_s": pytest.approx(1.0),
        "bubble/trainer_wait_for_control_s": pytest.approx(0.5),
    }


def cause_at(row: str, at: float, spans, one_shot: bool, colocated: bool) -> str | None:
    """Why ``row`` has no work at a moment; None when it has. The rule, without any cleverness."""

    def now(*names, row=None):
        return any(s.name in names and s.start_s <= at < s.end_s and row in (None, s.row) for s in spans)

    if now("generate", row=row) or now("train", "fetch", "commit", row="trainer" if colocated else row):
        return None
    pool = "trainer" if row == "trainer" else "generator"
    if now("publish"):
        return f"{pool}: wait for publish"
    if colocated and now("generate"):
        return "generator: wait for slower replicas"
    if pool == "generator" and not colocated:
        return f"generator: wait for {'training' if now('train', 'commit', 'fetch', 'score') else 'control'}"
    if now("generate"):
        scored = any(s.name == "score" and s.end_s <= at for s in spans)
        return "trainer: barrier" if one_shot and scored else "trainer: wait for generation"
    return f"trainer: wait for {'reward' if now('score') else 'control'}"


@settings(deadline=None, max_examples=150)
@given(
    rollouts=st.lists(
        st.tuples(st.integers(0, 2), st.integers(-2, 20), st.integers(0, 9), st.integers(0, 3)), min_size=2
    ),
    trained=st.lists(st.tuples(st.integers(-2, 20), st.integers(0, 2), st.integers(0, 3)), max_size=6),
    commits=st.lists(st.tuples(st.integers(0, 22), st.integers(0, 2)), max_size=2),
    publishes=st.lists(st.tuples(st.integers(0, 22), st.integers(0, 3)), max_size=2),
    one_shot=st.booleans(),
    placement=st.sampled_from(["colocated", "disaggregated"]),
)
def test_bubbles_are_those_of_every_moment(rollouts, trained, commits, publishes, one_shot, placement):
    """Overlapping, empty and late spans included: the bubbles of each row are what a look at every moment gives."""
    phases = {"encode": 0.0, "denoise": 0.0, "decode": 0.0, "store": 0.0}
    reports = [
        FragmentReport(
            fragment_id=number,
            replica=f"replica{replica}",
            version=7,
            samples=(),
            noise_hashes=(),
            transitions=(),
            effective={},
            started=ZERO + at,
            ended=ZERO + at + took,
            phases=phases,
            peak_memory_bytes=1,
        )
        for number, (replica, at, took, _) in enumerate(rollouts)
    ]
    ends = [(at + took, after) for _, at, took, after in rollouts]
    scorings = [Scoring(0, 0, 2, ZERO + at, ZERO + at + after) for at, after in ends]
    accumulated = [
        {
            "rank": 0,
            "started": ZERO + at,
            "fetched": ZERO + at + f,
            "tile_times": [(ZERO + at + f, ZERO + at + f + t, 3)],
        }
        for at, f, t in trained
    ]
    done = [{"commit_started": ZERO + at, "commit_ended": ZERO + at + took} for at, took in commits]
    times = StepTimes(ZERO, ZERO + 20.0, [(ZERO + at, ZERO + at + took) for at, took in publishes])
    plan = replace(make_plan(one_shot=one_shot, placement=placement), replicas=3)
    trace = step_trace(plan, StepOutcome(accumulated=accumulated, commits=done), Activity(reports, scorings), times)
    found = {(b.row, at): b.name for b in trace.bubbles for at in range(int(b.start_s), int(b.end_s))}
    assert sum(b.end_s - b.start_s for b in trace.bubbles) == len(found)  # none overlap
    colocated = placement == "colocated"
    expected = {
        (row, at): cause
        for row in trace.devices
        for at in range(20)
        if (cause := cause_at(row, at + 0.5, trace.spans, one_shot, colocated)) is not None
    }
    assert found == expected
    joined = [(a, b) for a in trace.bubbles for b in trace.bubbles if a.end_s == b.start_s and a[:2] == b[:2]]
    assert not joined  # one bubble per cause and stretch


def test_files_of_a_step(tmp_path):
    plan = make_plan(one_shot=False, placement="disaggregated")
    measured = Measured()
    learn(measured, plan, outcome(), activity(), TIMES)
    trainer = SimpleNamespace(
        plan=plan,
        measured=measured,
        config=SimpleNamespace(trainer=SimpleNamespace(default_local_dir=str(tmp_path))),
        reward_loop_manager=SimpleNamespace(reward_loop_workers=[None]),
    )
    write_step_trace(trainer, trace_of(one_shot=False, placement="disaggregated"), 3)
    events = json.loads((tmp_path / "traces" / "step_00003.json").read_text())
    assert events["otherData"]["source"] == "measured"
    assert {e["name"] for e in events["traceEvents"]} >= {"train", "trainer: wait for generation"}
    assert (tmp_path / "traces" / "step_00003.png").stat().st_size > 5000
    file = tmp_path / "traces" / "costs.yaml"
    case = read_case(yaml.safe_load(file.read_text()))
    assert case.costs.denoise_s == pytest.approx(1.0 / 10 / 2)  # 10 sampling steps of 2 samples in 1 s
    assert case.costs.decode_s == pytest.approx((0.6 + 0.2) / 2) and case.costs.score_s == 1.0
    assert case.costs.train_cell_s == pytest.approx(0.4 / 3) and case.costs.tile_fixed_s == pytest.approx(0.1)
    assert case.workload.groups == 4 and case.workload.trained_transitions == 3
    assert read_measured([file]).profile().train_cell_s == pytest.approx(case.costs.train_cell_s)
    with pytest.raises(ValueError, match="no measured costs"):
        read_measured([])
