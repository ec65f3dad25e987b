"""What the simulator says a live run's step takes, from the run's own plan and a profile."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

import yaml

from verl_digen.config.plan import RunPlan
from verl_digen.planner.simulate import Simulation, simulate
from verl_digen.schedule.measure import Measured
from verl_digen.schedule.profile import Profile
from verl_digen.schedule.work import Pools, Replica, Schedule, TrainerPool, Workload

STEPS = 12
FOLDER, COSTS = "traces", "costs.yaml"  # where a run leaves its measured costs, see verl_digen/trainer/tracefiles.py


def workload_of(plan: RunPlan, name: str) -> Workload:
    """The work of a step of ``plan``."""
    return Workload(
        name=name,
        groups=plan.prompts,
        samples_per_group=plan.n,
        denoise_steps=plan.digen.sampling.num_steps,
        trained_transitions=plan.transitions,
        logical_batches=plan.logical_batches,
    )


def pools_of(plan: RunPlan) -> Pools:
    """One device per replica and per rank, all of speed 1; scoring is never a queue."""
    return Pools(
        replicas=tuple(Replica(name=f"replica{rank}") for rank in range(plan.replicas)),
        trainer=TrainerPool(ranks=plan.trainer_ranks),
        colocated=plan.digen.placement == "colocated",
    )


def schedule_of(plan: RunPlan) -> Schedule:
    """How the trainer of ``plan`` runs a step."""
    return Schedule(
        fragment_size=None if plan.one_shot else plan.n,
        max_cells=plan.digen.tsp.max_cells or plan.samples * plan.transitions,
        tsp=plan.digen.tsp.enable,
        rollout_batch=plan.fragment_size,
        barrier=plan.one_shot,
    )


def predict(plan: RunPlan, profile: Profile, name: str) -> Simulation:
    """Simulate some steps of ``plan``."""
    return simulate(workload_of(plan, name), pools_of(plan), profile, schedule_of(plan), steps=STEPS)


def read_measured(files: Iterable[Path]) -> Measured:
    """The costs that several runs measured, put together by load; of a duration that all measured, the mean.

    Args:
        files: ``traces/costs.yaml`` of the runs.

    Raises:
        ValueError: no file, or one without measurements.
    """
    together = Measured()
    states = [_state(file) for file in files]
    if not states:
        raise ValueError("no measured costs to read")
    for state in states:
        for name, cost in (("denoise", together.denoise), ("tile", together.tile)):
            for load, saved in state[name].items():
                cost.observe(int(load), saved["mean"])
        for name, saved in state["durations"].items():
            if saved["count"]:
                together.observe(name, saved["mean"])
    return together


def _state(file: Path) -> Mapping:
    content = yaml.safe_load(file.read_text(encoding="utf-8"))
    if "measured" not in content:
        raise ValueError(f"{file} holds no measurements: a live run with trainer.v1.digen.trace.every writes them")
    return content["measured"]
