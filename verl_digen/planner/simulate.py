"""The discrete-event simulator: a workload on pools, under a profile and a schedule.

Every figure it gives is simulated. The decision functions it drives are those of a live run.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

from verl_digen.planner.bound import Bound, Loads, lower_bound
from verl_digen.planner.disturbance import Disturbance
from verl_digen.planner.trainerloop import Run
from verl_digen.schedule.profile import Profile
from verl_digen.schedule.trace import Trace
from verl_digen.schedule.work import Pools, Schedule, Workload

MODES = (
    "colocated",
    "one-batch-ahead",
    "one-shot",
    "gap",
    "gap+tsp",
    "gap+tsp+tag",
    "gap+tsp+tag+tcss",
)
"""The ladder; ``one-batch-ahead`` is the asynchronous baseline: whole batches, all of them one version stale."""


@dataclass(frozen=True, slots=True)
class Simulation:
    """The outcome of a simulated run.

    Attributes:
        step_s: time of each step, from one publish (arrived at the replicas) to the next.
        bound: lower bound of the mean step.
        utilisation: mean share of time all devices worked.
        device_utilisation: the same for each replica and for ``trainer``.
        bubbles_s: device-seconds without work per step, by cause.
        samples_trained: over the run.
        samples_discarded: denoised or scored for nothing (failures, late results).
        stale_groups: groups per step that were one version old.
        predictions: pairs (predicted, real) of the moment a logical batch was trained, for policies that predict.
        decisions, decision_s: bubbles decided and the mean real time of a decision.
        events, events_per_s: events of the simulation and how fast this machine played them.
        trace: spans and bubbles when asked for.
    """

    step_s: tuple[float, ...]
    bound: Bound
    utilisation: float
    device_utilisation: dict[str, float]
    bubbles_s: dict[str, float]
    samples_trained: int
    samples_discarded: int
    stale_groups: tuple[int, ...]
    predictions: tuple[tuple[float, float], ...]
    decisions: int
    decision_s: float
    events: int
    events_per_s: float
    trace: Trace | None

    @property
    def makespan_s(self) -> float:
        """Mean time of a step over the whole run, start-up included."""
        return sum(self.step_s) / len(self.step_s)

    @property
    def distance(self) -> float:
        """How far the mean step lies above the bound, as a fraction of the bound."""
        return self.makespan_s / self.bound.seconds - 1.0


def simulate(
    workload: Workload,
    pools: Pools,
    profile: Profile,
    schedule: Schedule,
    *,
    steps: int = 8,
    disturbance: Disturbance | None = None,
    trace: bool = False,
) -> Simulation:
    """Play ``steps`` steps.

    Raises:
        ValueError: inputs that disagree.
        RuntimeError: the schedule stalls; the message says what is waited for.
    """
    if steps < 1:
        raise ValueError(f"simulate: steps={steps} must be at least 1")
    disturbance = disturbance or Disturbance()
    if pools.colocated and (schedule.policy != "none" or schedule.max_stale_ratio or not schedule.barrier):
        raise ValueError(
            f"simulate: colocated placement takes turns, so policy={schedule.policy!r} must be 'none', "
            f"max_stale_ratio={schedule.max_stale_ratio} must be 0 and barrier={schedule.barrier} must be true"
        )
    record = None
    if trace:
        rows = {replica.name: replica.devices for replica in pools.replicas}
        if len(rows) != len(pools.replicas):
            raise ValueError("simulate: replicas need distinct names for a trace")
        record = Trace("simulated", {**rows, "trainer": pools.trainer.devices})
    run = Run(workload, pools, profile, schedule, steps, disturbance, record)
    begin = time.perf_counter()
    run.play()
    took = time.perf_counter() - begin
    return _summary(run, took)


def _summary(run: Run, took: float) -> Simulation:
    end, steps = run.now, run.steps
    pools, trainer = run.pools, run.pools.trainer
    use = {replica.name: busy / end for replica, busy in zip(pools.replicas, run.busy_s, strict=True)}
    use["trainer"] = (run.trainer_busy_s + run.help_busy_s) / end
    worked = sum(replica.devices * busy for replica, busy in zip(pools.replicas, run.busy_s, strict=True))
    worked += trainer.devices * (run.trainer_busy_s + run.help_busy_s)
    ends = (0.0, *run.step_ends)
    return Simulation(
        step_s=tuple(later - earlier for earlier, later in zip(ends, ends[1:], strict=False)),
        bound=lower_bound(run.workload, pools, run.profile, run.schedule, _loads(run)),
        utilisation=worked / (pools.devices * end),
        device_utilisation=use,
        bubbles_s={cause: seconds / steps for cause, seconds in sorted(run.bubbles.items())},
        samples_trained=run.trained,
        samples_discarded=run.discarded,
        stale_groups=tuple(run.stale_groups),
        predictions=tuple(run.predictions),
        decisions=run.decisions,
        decision_s=run.decision_s / run.decisions if run.decisions else 0.0,
        events=run.events,
        events_per_s=run.events / took if took > 0 else 0.0,
        trace=run.trace,
    )


def _loads(run: Run) -> Loads:
    if not run.disturbance.varies:
        return Loads()
    groups, n = run.workload.groups, run.workload.samples_per_group
    factors = [run.disturbance.factor(uid, j) for uid in range(run.steps * groups) for j in range(n)]
    return Loads(sum(factors) / len(factors), min(factors), max(factors))


def schedule_for(mode: str, schedule: Schedule, policy: str | None = None) -> Schedule:
    """The schedule of a rung of the ladder, from a full one.

    Args:
        mode: one of :data:`MODES`.
        policy: TAG policy of the rungs that have one; the schedule's own where not given.
    """
    if mode not in MODES:
        raise ValueError(f"unknown mode {mode!r}; known: {', '.join(MODES)}")
    tag = policy or schedule.policy
    bare = replace(schedule, tsp=False, policy="none", max_stale_ratio=0.0, barrier=False)
    if mode in ("colocated", "one-shot"):
        return replace(bare, fragment_size=None, barrier=True)
    if mode == "one-batch-ahead":
        return replace(bare, fragment_size=None, barrier=True, max_stale_ratio=1.0)
    if mode == "gap":
        return bare
    if mode == "gap+tsp":
        return replace(bare, tsp=True)
    if mode == "gap+tsp+tag":
        return replace(bare, tsp=True, policy=tag)
    return replace(bare, tsp=True, policy=tag, max_stale_ratio=schedule.max_stale_ratio)
