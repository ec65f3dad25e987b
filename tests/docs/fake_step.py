"""Names of the metrics of a training step, from the code that makes them, without Ray and without a model."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from verl_digen.diffusion.advantages import group_advantages
from verl_digen.diffusion.losses import FlowGRPOConfig, compute_loss, summarise_metrics

# summed up by the engine's transaction and by the worker around it (engine/transaction.py, trainer/worker.py)
COMMIT_EXTRAS = (
    *("log_prob_gap_mean", "log_prob_gap_max", "grad_norm", "lr", "commit_s", "commit_started", "commit_ended"),
    *("peak_memory_gb", "tile_cells"),
)
SYNC = ("sync/seconds", "sync/bytes", "sync/changed")


def logged_names() -> list[str]:
    from verl_digen.rollout.requests import Activity, Scoring
    from verl_digen.trainer.metrics import step_metrics

    cells = {name: torch.zeros(2, 1) for name in ("mean", "mean_ref")}
    cells |= {name: torch.ones(2) for name in ("log_prob", "advantage", "std")}
    _, metrics = compute_loss("flow_grpo", cells, FlowGRPOConfig(kl_beta=1.0), planned_cells=2)
    commit = summarise_metrics(metrics) | dict.fromkeys(COMMIT_EXTRAS, 0.0)
    samples = [SimpleNamespace(reward=float(j), extra={}, version=0) for j in range(2)]
    outcome = SimpleNamespace(
        samples=samples,
        groups=[SimpleNamespace(samples=samples, staleness=0)],
        commits=[commit],
        accumulated=[{"tiles": 1.0, "fetch": 1.0, "tile_times": [(0.0, 1.0, 2)]}],
        waited=0.5,
        repeated=0,
        advantage_metrics=group_advantages(torch.tensor([0.0, 1.0]), ["a", "a"])[1],
    )
    sizes = {"trainer_ranks": 1, "replicas": 1, "samples": 2, "n": 2, "transitions": 1}
    plan = SimpleNamespace(**sizes, digen=SimpleNamespace(placement="disaggregated"))
    report = SimpleNamespace(
        transitions=(1,),
        started=0.0,
        ended=1.0,
        phases=dict.fromkeys(("encode", "denoise", "decode", "store"), 0.1),
        peak_memory_bytes=1,
    )
    timing = dict.fromkeys(("step", "gen", "update_actor", "update_weights"), 1.0)
    activity = Activity([report], [Scoring(1, 0, 2, 0.0, 0.1)])
    return [*step_metrics(outcome, plan, activity, timing, step=1, epoch=0), *SYNC]
