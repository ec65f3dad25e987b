"""The simulator: nothing lost, bounds, staleness, determinism, failures, and the published calibrations."""

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st

from verl_digen.planner.candidates import Search
from verl_digen.planner.catalog import read_case, read_testbed
from verl_digen.planner.disturbance import Disturbance, Failure
from verl_digen.planner.shared import plan_colocated
from verl_digen.planner.simulate import MODES, schedule_for, simulate
from verl_digen.planner.timeline import draw_timeline
from verl_digen.planner.trainerloop import Run
from verl_digen.schedule.profile import Profile
from verl_digen.schedule.trace import bubbles_by_cause, chrome_trace, utilisation, write_chrome_trace
from verl_digen.schedule.work import Pools, Replica, Schedule, TrainerPool, Workload

WORKLOADS = Path(__file__).resolve().parents[2] / "recipes" / "workloads"


def pools_of(replicas, ranks, **options):
    return Pools(
        replicas=tuple(Replica(name=f"r{index}", speed=speed) for index, speed in enumerate(replicas)),
        trainer=TrainerPool(ranks=ranks),
        **options,
    )


def random_setting(seed):
    """A whole setting from a seed: sizes, unlike replicas, costs, schedule, disturbances."""
    draw = random.Random(seed)

    def maybe(most):
        return draw.choice([0.0, draw.uniform(0, most)])

    batches, steps = draw.choice([1, 1, 2]), draw.randint(1, 16)
    work = Workload(
        name="random",
        groups=batches * draw.randint(1, 4),
        samples_per_group=draw.randint(1, 5),
        denoise_steps=steps,
        trained_transitions=draw.randint(1, steps),
        logical_batches=batches,
    )
    speeds = [draw.choice([1.0, 1.0, 0.5, 1.7]) for _ in range(draw.randint(1, 5))]
    pools = pools_of(speeds, draw.randint(1, 5), reward_slots=draw.choice([0, 0, 1, 3]))
    publish = maybe(3)
    profile = Profile(
        denoise_s=draw.uniform(0.1, 2),
        denoise_fixed_s=maybe(1),
        train_cell_s=draw.uniform(0.1, 3),
        tile_fixed_s=maybe(1),
        logprob_cell_s=maybe(1),
        encode_s=maybe(1),
        decode_s=maybe(1),
        score_s=maybe(3),
        commit_s=maybe(3),
        publish_s=publish,
        publish_block_s=draw.choice([0.0, publish]),
        helper_denoise_s=maybe(2),
        helper_fixed_s=maybe(0.5),
        helper_in_s=maybe(3),
        helper_out_s=maybe(2),
    )
    tsp = draw.random() < 0.7
    schedule = Schedule(
        fragment_size=draw.choice([None, draw.randint(1, 3 * work.samples_per_group)]),
        max_cells=draw.randint(1, 12),
        tsp=tsp,
        policy=draw.choice(["none", "fixed", "greedy", "bts", "steps", "steps"]),
        fixed_k=draw.randint(0, 3),
        max_stale_ratio=draw.choice([0, 0, 0.3, 0.6, 1]),
        rollout_batch=draw.choice([1, 1, 2, 4]),
        barrier=draw.random() < 0.15,
        recompute_old_log_probs=draw.random() < 0.3,
    )
    failures = [
        Failure(draw.randrange(len(speeds)), draw.uniform(0, 60), draw.uniform(0, 20))
        for _ in range(draw.choice([0, 0, 1, 2]))
    ]
    rough = Disturbance(
        seed=seed,
        jitter=draw.choice([0, 0, 0.3]),
        straggler_share=draw.choice([0, 0.1]),
        straggler_factor=2.5,
        failures=tuple(failures),
    )
    return work, pools, profile, schedule, rough, draw.randint(1, 4)


@example(seed=8)  # stale work held by the helper at a commit must not go on with the next version
@example(seed=141)  # the last holder of a version fails: its groups must start over
@given(seed=st.integers(0, 10**9))
@settings(max_examples=120, deadline=None)
def test_any_setting_trains_everything_once_within_the_staleness_bound_and_above_the_lower_bound(seed):
    work, pools, profile, schedule, rough, steps = random_setting(seed)
    result = simulate(work, pools, profile, schedule, steps=steps, disturbance=rough, trace=True)
    assert result.samples_trained == steps * work.samples
    assert len(result.step_s) == steps
    assert result.makespan_s >= result.bound.seconds * (1 - 1e-9)
    assert max(result.stale_groups) <= schedule.max_stale_ratio * work.groups + 1e-9
    if not rough.failures:
        assert result.samples_discarded == 0
    assert 0 < result.utilisation <= 1 + 1e-9
    for row in result.device_utilisation.values():
        assert row <= 1 + 1e-9
    spans = {}
    for span in result.trace.spans:
        if span.row in result.trace.devices:
            spans.setdefault(span.row, []).append((span.start_s, span.end_s))
    for row in spans.values():  # a device does one thing at a time
        row.sort()
        assert all(later[0] >= earlier[1] - 1e-6 for earlier, later in zip(row, row[1:], strict=False))


class Witness(Run):
    """Notes the version of every sample that arrives, as a check that does not trust the ledger."""

    def __init__(self, *args):
        super().__init__(*args)
        self.versions = {}

    def arrived(self, claim, uid, j):
        self.versions.setdefault((uid, claim.attempt), []).append((claim.step, claim.version))
        super().arrived(claim, uid, j)


@given(seed=st.integers(0, 10**9))
@settings(max_examples=60, deadline=None)
def test_groups_have_one_version_and_it_is_never_two_behind(seed):
    work, pools, profile, schedule, rough, steps = random_setting(seed)
    run = Witness(work, pools, profile, schedule, steps, rough, None)
    run.play()
    for seen in run.versions.values():
        assert len(set(seen)) == 1
        step, version = seen[0]
        assert version in ((step,) if schedule.max_stale_ratio == 0 else (step, step - 1))


@given(groups=st.integers(1, 12), n=st.integers(1, 4), denoise=st.floats(0.1, 3), cell=st.floats(0.1, 3))
@settings(max_examples=60, deadline=None)
def test_makespan_of_an_ideal_pipeline(groups, n, denoise, cell):
    """One replica, one rank, M equal fragments, no other cost: max(G, R) + min(G, R) / M."""
    work = Workload(name="w", groups=groups, samples_per_group=n, denoise_steps=5, trained_transitions=3)
    profile = Profile(denoise_s=denoise, train_cell_s=cell)
    result = simulate(work, pools_of([1.0], 1), profile, Schedule(fragment_size=n, max_cells=2, tsp=True), steps=3)
    generation, training = work.samples * 5 * denoise, work.samples * 3 * cell
    expected = max(generation, training) + min(generation, training) / groups
    assert result.step_s == pytest.approx([expected] * 3)


def test_one_shot_is_the_sum_of_the_phases_and_colocated_adds_its_switches():
    work = Workload(name="w", groups=4, samples_per_group=2, denoise_steps=10, trained_transitions=4)
    profile = Profile(
        denoise_s=1.0,
        train_cell_s=2.0,
        score_s=0.5,
        commit_s=1.0,
        publish_s=3.0,
        phase_switch_s=6.0,
        logprob_cell_s=0.5,
        tile_fixed_s=0.25,
    )
    schedule = Schedule(barrier=True, max_cells=8)
    apart = simulate(work, pools_of([1.0] * 4, 4), profile, schedule, steps=3)
    train = 2 * 4 * 2.0 + 4 * 0.25  # two samples per rank, four transitions, one tile each
    assert apart.makespan_s == pytest.approx(2 * 10.0 + 0.5 + train + 1.0 + 3.0)
    recompute = replace(schedule, recompute_old_log_probs=True)
    longer = simulate(work, pools_of([1.0] * 4, 4), profile, recompute, steps=3)
    assert longer.makespan_s == pytest.approx(apart.makespan_s + 2 * 4 * 0.5)
    together = simulate(work, pools_of([1.0] * 4, 4, colocated=True), profile, schedule, steps=3)
    assert together.makespan_s == pytest.approx(apart.makespan_s + 2 * 6.0)


def test_tcss_hides_the_tail_and_tends_to_the_longer_stage():
    """Balanced pools: on-policy pays both stages' ends, with ρ = 1 a step costs max(G, R)."""
    work = Workload(name="w", groups=4, samples_per_group=2, denoise_steps=10, trained_transitions=5)
    profile = Profile(denoise_s=1.0, train_cell_s=2.0)
    pools, schedule = pools_of([1.0], 1), Schedule(fragment_size=2, tsp=True, max_cells=4)
    off = simulate(work, pools, profile, schedule, steps=12)
    on = simulate(work, pools, profile, replace(schedule, max_stale_ratio=1.0), steps=12)
    assert set(off.stale_groups) == {0}
    assert max(on.stale_groups) > 0
    assert off.step_s[-1] == pytest.approx(100.0)
    assert on.step_s[-1] == pytest.approx(80.0)


@pytest.mark.parametrize("policy", ["none", "fixed", "greedy", "bts", "steps"])
def test_same_seed_same_run_other_seed_other_run(policy):
    work = Workload(name="w", groups=4, samples_per_group=3, denoise_steps=10, trained_transitions=5)
    profile = Profile(denoise_s=1.0, train_cell_s=1.0, score_s=0.5, publish_s=1.0)
    schedule = Schedule(fragment_size=3, tsp=True, max_cells=3, policy=policy, max_stale_ratio=0.5)

    def spans(seed):
        rough = Disturbance(seed=seed, jitter=0.2, straggler_share=0.1, straggler_factor=3.0)
        run = simulate(work, pools_of([1.0, 0.7], 2), profile, schedule, steps=3, disturbance=rough, trace=True)
        return run.trace.spans

    assert spans(1) == spans(1)
    assert spans(1) != spans(2)


def test_jitter_has_mean_one_and_belongs_to_the_sample():
    rough = Disturbance(seed=5, jitter=0.4)
    factors = [rough.factor(uid, j) for uid in range(400) for j in range(10)]
    assert sum(factors) / len(factors) == pytest.approx(1.0, abs=0.03)
    assert rough.factor(3, 1) == Disturbance(seed=5, jitter=0.4).factor(3, 1) != rough.factor(1, 3)
    late = Disturbance(seed=5, straggler_share=0.25, straggler_factor=4.0)
    share = sum(late.factor(uid, j) == 4.0 for uid in range(400) for j in range(10)) / 4000
    assert share == pytest.approx(0.25, abs=0.03)


def test_a_failed_replica_costs_time_but_no_sample():
    work = Workload(name="w", groups=3, samples_per_group=4, denoise_steps=10, trained_transitions=2)
    profile = Profile(denoise_s=1.0, train_cell_s=0.1)
    schedule = Schedule(fragment_size=4, tsp=True, max_cells=4)
    whole = simulate(work, pools_of([1.0] * 3, 1), profile, schedule, steps=2)
    rough = Disturbance(failures=(Failure(1, 15.0, 30.0),))
    broken = simulate(work, pools_of([1.0] * 3, 1), profile, schedule, steps=2, disturbance=rough)
    assert broken.samples_trained == whole.samples_trained
    assert broken.samples_discarded == 1
    assert broken.step_s[0] > whole.step_s[0]
    assert broken.bubbles_s["generator: replica down"] == pytest.approx(30.0 / 2)
    with pytest.raises(ValueError, match="failure of replica 7, but there are 3"):
        simulate(
            work, pools_of([1.0] * 3, 1), profile, schedule, disturbance=Disturbance(failures=(Failure(7, 1.0, 1.0),))
        )


def test_a_narrow_reward_pool_becomes_the_bottleneck():
    work = Workload(name="w", groups=4, samples_per_group=4, denoise_steps=10, trained_transitions=2)
    profile = Profile(denoise_s=0.1, train_cell_s=0.1, score_s=5.0)
    schedule = Schedule(fragment_size=4, tsp=True, max_cells=4)
    wide = simulate(work, pools_of([1.0] * 4, 2), profile, schedule, steps=1)
    narrow = simulate(work, pools_of([1.0] * 4, 2, reward_slots=1), profile, schedule, steps=1)
    assert wide.makespan_s < 12.0
    assert narrow.makespan_s >= 16 * 5.0


def test_helper_prediction_is_met_when_the_profile_is_exact():
    work = Workload(name="w", groups=6, samples_per_group=1, denoise_steps=10, trained_transitions=5)
    profile = Profile(denoise_s=1.0, train_cell_s=1.0, helper_denoise_s=1.5)
    schedule = Schedule(fragment_size=1, tsp=True, max_cells=5, policy="bts")
    result = simulate(work, pools_of([1.0], 1), profile, schedule, steps=3)
    assert len(result.predictions) == 3
    for predicted, real in result.predictions:
        assert predicted == pytest.approx(real)


@pytest.mark.parametrize("seed", range(12))
def test_policies_keep_their_order_in_the_simulator(seed):
    """One replica, groups of one sample: the model of the decisions is exact, so bts ≤ none, greedy and steps ≤ bts."""
    draw = random.Random(seed)
    steps = draw.randint(4, 30)
    work = Workload(
        name="w",
        groups=draw.randint(2, 14),
        samples_per_group=1,
        denoise_steps=steps,
        trained_transitions=draw.randint(1, steps),
    )
    profile = Profile(denoise_s=1.0, train_cell_s=draw.uniform(0.2, 3.0), helper_denoise_s=draw.uniform(0.5, 4.0))
    times = {}
    for policy in ("none", "greedy", "bts", "steps"):
        schedule = Schedule(fragment_size=1, tsp=True, max_cells=steps, policy=policy)
        times[policy] = simulate(work, pools_of([1.0], 1), profile, schedule, steps=1).makespan_s
    assert times["bts"] <= min(times["none"], times["greedy"]) + 1e-6
    assert times["steps"] <= times["bts"] + 1e-6


def test_helping_ahead_does_not_lock_groups_to_the_version_before():
    """The helper once took six of eight groups just before a commit; replicas then had to finish them alone."""
    work = Workload(name="w", groups=8, samples_per_group=4, denoise_steps=30, trained_transitions=12)
    profile = Profile(denoise_s=5.0, train_cell_s=20.0, helper_denoise_s=5.5, score_s=4.0, commit_s=1.5, publish_s=1.6)
    schedule = Schedule(fragment_size=4, tsp=True, max_cells=2, policy="steps", max_stale_ratio=1.0)
    for speed in (1.3, 1.7, 1.9, 2.0):
        result = simulate(work, pools_of([speed] * 4, 24), profile, schedule, steps=60)
        assert sum(result.step_s[30:]) / 30 < 1.2 * result.bound.seconds


def case(name):
    return read_case(yaml.safe_load((WORKLOADS / f"{name}.yaml").read_text(encoding="utf-8")), name)


@pytest.mark.parametrize(
    ("name", "recompute", "seconds"),
    [("wan2.2-5b", True, 2153), ("hunyuanvideo-1.5", False, 914), ("flux.2-klein-9b", False, 367)],
)
def test_public_step_times_are_reproduced_by_the_colocated_mode(name, recompute, seconds):
    """The phases were fitted to the totals; what is tested is that the simulator puts them together right."""
    bed = read_testbed({"name": "gpu8", "groups": [{"name": "gpu", "count": 8}]})
    search = Search(widths=(1,), rollout_batches=(1,), recompute_old_log_probs=recompute)
    assert plan_colocated(case(name), bed, search).simulation.makespan_s == pytest.approx(seconds, rel=0.002)


def test_public_lending_at_the_step_boundary():
    """Wan2.2-5B on 2 + 1 GPUs: 378 s without, 308 s with lending (9.1 s in, 3.3 s out)."""
    wan = case("wan2.2-5b-3gpu")
    apart = Schedule(fragment_size=8, barrier=True, max_cells=8)
    pools = pools_of([1.0, 1.0], 1)
    assert simulate(wan.workload, pools, wan.costs, apart).makespan_s == pytest.approx(378, rel=0.002)
    lent = replace(apart, policy="greedy")
    assert simulate(wan.workload, pools, wan.costs, lent).makespan_s == pytest.approx(308, rel=0.002)


def test_modes_of_the_ladder():
    full = Schedule(fragment_size=4, max_cells=4, tsp=True, policy="steps", max_stale_ratio=0.5)
    rungs = {mode: schedule_for(mode, full) for mode in MODES}
    assert rungs["colocated"] == rungs["one-shot"] and rungs["one-shot"].barrier
    assert rungs["one-batch-ahead"].max_stale_ratio == 1.0 and rungs["one-batch-ahead"].fragment_size is None
    assert not rungs["gap"].tsp and rungs["gap"].policy == "none"
    assert rungs["gap+tsp+tag"] == replace(full, max_stale_ratio=0.0)
    assert rungs["gap+tsp+tag+tcss"] == full
    assert schedule_for("gap+tsp+tag", full, "bts").policy == "bts"
    with pytest.raises(ValueError, match="unknown mode 'magic'"):
        schedule_for("magic", full)
    work = Workload(name="w", groups=1, samples_per_group=1, denoise_steps=1, trained_transitions=1)
    with pytest.raises(ValueError, match="policy='steps' must be 'none'"):
        simulate(work, pools_of([1.0], 1, colocated=True), Profile(denoise_s=1, train_cell_s=1), full)


def test_trace_and_picture(tmp_path):
    work = Workload(name="w", groups=4, samples_per_group=2, denoise_steps=10, trained_transitions=5)
    profile = Profile(denoise_s=1.0, train_cell_s=2.0, score_s=1.0, commit_s=1.0, publish_s=2.0)
    schedule = Schedule(fragment_size=2, tsp=True, max_cells=4, policy="bts")
    result = simulate(work, pools_of([1.0, 1.0], 2), profile, schedule, steps=2, trace=True)
    trace = result.trace
    assert utilisation(trace, sum(result.step_s)) == pytest.approx(result.device_utilisation)
    per_step = {cause: seconds / 2 for cause, seconds in bubbles_by_cause(trace.bubbles, trace.devices).items()}
    assert per_step == pytest.approx(result.bubbles_s)
    events = chrome_trace(trace)["traceEvents"]
    names = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    trained = [event for event in events if event["ph"] == "X" and names[event["tid"]] == "trainer"]
    assert {"train", "commit"} <= {event["name"] for event in trained}
    assert sum(event["dur"] for event in events if event["name"] == "commit") == pytest.approx(2e6)
    write_chrome_trace(trace, tmp_path / "trace.json")
    assert json.loads((tmp_path / "trace.json").read_text())["otherData"]["source"] == "simulated"
    pytest.importorskip("matplotlib")
    draw_timeline([("gap", trace)], tmp_path / "picture.png")
    draw_timeline([("gap", trace)], tmp_path / "picture.svg")
    assert (tmp_path / "picture.png").stat().st_size > 2000
    assert (tmp_path / "picture.svg").read_text().count("<path") > 20
    with pytest.raises(ValueError, match="no traces"):
        draw_timeline([], tmp_path / "none.png")
    with pytest.raises(ValueError, match="ends at 1.0 before it starts at 2.0"):
        trace.work("r0", "generate", 2.0, 1.0)


@pytest.mark.parametrize("ratio", [0.0, 0.5])
def test_bubbles_and_work_fill_the_time_of_every_device(ratio):
    """Without switches and blocking, each device-second is work or a bubble with a cause."""
    work = Workload(name="w", groups=4, samples_per_group=3, denoise_steps=7, trained_transitions=4)
    profile = Profile(denoise_s=1.0, train_cell_s=2.0, score_s=1.0, commit_s=1.0, publish_s=2.0)
    pools = pools_of([1.0, 1.0, 0.5], 3)
    schedule = Schedule(fragment_size=3, tsp=True, max_cells=4, max_stale_ratio=ratio)
    run = simulate(work, pools, profile, schedule, steps=4, trace=True)
    total = pools.devices * sum(run.step_s) / 4
    assert run.utilisation * total + sum(run.bubbles_s.values()) == pytest.approx(total)
