"""What is logged of a step."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np

from verl_digen.config.plan import RunPlan
from verl_digen.rollout.requests import Activity, SampleResult
from verl_digen.trainer.step import StepOutcome


def step_metrics(
    outcome: StepOutcome,
    plan: RunPlan,
    activity: Activity,
    timing_raw: dict[str, float],
    *,
    step: int,
    epoch: int,
) -> dict[str, float]:
    """Metrics of one training step by name.

    Names: ``reward/*`` and ``advantage/*`` of the samples, ``actor/*`` of the commits (mean over logical batches, the
    largest for ``*_max*``), ``timing_s/*``, ``perf/*`` (throughput, utilisation of each pool, peak memory),
    ``staleness/*`` (versions between generating and training).

    Args:
        activity: of replicas and reward workers in this step.
    """
    out: dict[str, float] = {"training/global_step": step, "training/epoch": epoch}
    out |= _rewards(outcome)
    out |= {f"advantage/{k}": v for k, v in outcome.advantage_metrics.items() if not k.startswith("reward")}
    merged = merge_commits(outcome.commits)
    out |= {f"actor/{k}": v for k, v in merged.items() if k not in ("commit_started", "commit_ended")}
    out |= {f"timing_s/{k}": v for k, v in timing_raw.items()}
    out |= _performance(outcome, plan, activity, timing_raw)
    lags = [group.staleness for group in outcome.groups]
    out |= {
        "staleness/max": max(lags),
        "staleness/stale_groups": sum(lag > 0 for lag in lags),
        "staleness/stale_ratio": float(np.mean([lag > 0 for lag in lags])),
    }
    return out


def _rewards(outcome: StepOutcome) -> dict[str, float]:
    rewards = np.array([s.reward for s in outcome.samples])
    by_group = [np.std([s.reward for s in group.samples], ddof=1) for group in outcome.groups]
    out = {
        "reward/mean": rewards.mean(),
        "reward/std": rewards.std(ddof=1),
        "reward/min": rewards.min(),
        "reward/max": rewards.max(),
        "reward/group_std_mean": float(np.mean(by_group)),
        "reward/zero_std_ratio": float(np.mean([_all_equal(group.samples) for group in outcome.groups])),
    }
    extras: dict[str, list[float]] = defaultdict(list)
    for sample in outcome.samples:
        for name, value in numbers(sample.extra).items():
            extras[name].append(value)
    return {k: float(v) for k, v in out.items()} | {
        f"reward/extra/{name}": float(np.mean(values)) for name, values in extras.items()
    }


def _all_equal(samples: Sequence[SampleResult]) -> bool:
    """Not by their std: the rounded mean of equal numbers may differ from them."""
    return len({sample.reward for sample in samples}) == 1


def numbers(extra: dict[str, Any]) -> dict[str, float]:
    """The numbers among what rewards reported beside the score of a sample."""
    return {name: float(value) for name, value in extra.items() if isinstance(value, bool | int | float)}


def merge_commits(commits: Sequence[dict[str, float]]) -> dict[str, float]:
    """Means over the logical batches of a step; maxima of what is a maximum; the last learning rate."""
    merged = {}
    for name in dict.fromkeys(name for commit in commits for name in commit):
        values = [commit[name] for commit in commits if name in commit]
        if name == "lr":
            merged[name] = values[-1]
        elif "max" in name or name.startswith("peak"):
            merged[name] = max(values)
        elif name == "commit_s" or name.endswith("cells"):
            merged[name] = sum(values)
        else:
            merged[name] = sum(values) / len(values)
    return merged


def _performance(outcome, plan: RunPlan, activity: Activity, timing_raw) -> dict[str, float]:
    seconds = timing_raw["step"]
    training = activity.reports
    generating = sum(r.ended - r.started for r in training)
    fetch, tiles = (sum(done[name] for done in outcome.accumulated) for name in ("fetch", "tiles"))
    committing = sum(commit["commit_s"] for commit in outcome.commits) * plan.trainer_ranks
    devices = plan.trainer_ranks + (plan.replicas if plan.digen.placement == "disaggregated" else 0)
    out = {
        "perf/samples_per_s": plan.samples / seconds,
        "perf/samples_per_s_per_device": plan.samples / seconds / devices,
        "perf/utilisation_generator": generating / (plan.replicas * seconds),
        "perf/utilisation_trainer": (fetch + tiles + committing) / (plan.trainer_ranks * seconds),
        "perf/reward_worker_s": sum(scoring.ended - scoring.started for scoring in activity.scorings),
        "timing_s/fetch": fetch / plan.trainer_ranks,
        "timing_s/tiles": tiles / plan.trainer_ranks,
        "timing_s/driver_waits_for_trainer": outcome.waited,
        "actor/repeated_batches": float(outcome.repeated),
        **_lots(outcome, plan),
    }
    for phase in ("encode", "denoise", "decode", "store"):
        out[f"timing_s/{phase}"] = sum(r.phases[phase] for r in training) / plan.replicas
    if training:
        out["perf/peak_memory_generator_gb"] = max(r.peak_memory_bytes for r in training) / 2**30
    out["perf/peak_memory_trainer_gb"] = max(commit["peak_memory_gb"] for commit in outcome.commits)
    return out


def _lots(outcome: StepOutcome, plan: RunPlan) -> dict[str, float]:
    """How many groups were trained at once, and the share of cells where every rank waits for the fullest one."""
    ranks = plan.trainer_ranks
    lots = [outcome.accumulated[at : at + ranks] for at in range(0, len(outcome.accumulated), ranks)]
    cells = [[sum(tile[2] for tile in done["tile_times"]) for done in lot] for lot in lots]
    done, room = sum(map(sum, cells)), ranks * sum(map(max, cells))
    return {"perf/groups_at_once": done / (plan.n * plan.transitions) / len(lots), "perf/useful_cells": done / room}
