"""EMULATED devices under the real control plane: measured step times beside the simulator's prediction.

The model only takes times (:mod:`verl_digen.models.emulated`); actors, transfers, collectives, rewards and the trainer
are real. Times come from a workload file, divided by a scale, so that hours fit into minutes.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import yaml

from verl_digen.bench.digits import MODES, measure_mode
from verl_digen.bench.digits import Plan as DigitsPlan
from verl_digen.bench.predict import COSTS, FOLDER, predict, read_measured
from verl_digen.bench.workload import compose_recipe
from verl_digen.config.paths import override
from verl_digen.config.plan import resolve_plan
from verl_digen.planner.catalog import Case, read_case
from verl_digen.schedule.profile import Profile

TIMES = ("denoise_s", "denoise_fixed_s", "decode_s", "train_cell_s", "tile_fixed_s")


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What is emulated.

    Attributes:
        workloads: names of files in ``recipes/workloads``.
        devices: (Generator devices, Trainer devices) of each placement.
        modes: disaggregated modes of ``bench digits``.
        cells: tile size of the modes with TSP; several give several rows.
        scale: emulated seconds are divided by it.
        groups: prompt groups per step instead of the file's; must divide into its logical batches.
        overrides: of the recipe, for all runs.
    """

    workloads: tuple[str, ...]
    devices: tuple[tuple[int, int], ...]
    modes: tuple[str, ...]
    recipes: Path
    out: Path
    cells: tuple[int, ...] = (8,)
    scale: float = 100.0
    groups: int | None = None
    steps: int = 2
    warmup: int = 1
    overrides: tuple[str, ...] = ()
    timeout_s: float = 3600.0

    def __post_init__(self):
        allowed = [mode for mode in MODES if mode not in ("floor", "colocated", "disaggregated")]
        unknown = [mode for mode in self.modes if mode not in allowed]
        if unknown or not self.modes:
            raise ValueError(f"unknown mode {', '.join(unknown) or '(none)'}; available: {', '.join(allowed)}")
        if not self.scale > 0 or min(self.steps, *self.cells) < 1 or self.warmup < 0:
            raise ValueError(f"scale={self.scale}, steps={self.steps}, cells={self.cells}, warmup={self.warmup}")
        for generator, trainer in self.devices:
            if generator < 1 or trainer < 1:
                raise ValueError(f"devices {generator}+{trainer}: both pools need at least one")


def scaled(case: Case, scale: float, groups: int | None) -> Case:
    """The case with all times divided by ``scale``; publishing and committing are real, so their times are left out."""
    costs = {name: getattr(case.costs, name) / scale for name in (*TIMES, "score_s")}
    workload = case.workload if groups is None else replace(case.workload, groups=groups)
    return replace(case, costs=Profile(**costs), workload=workload)


def overrides_of(case: Case, data: Path, generator: int, trainer: int, cells: int | None) -> tuple[str, ...]:
    """Overrides of the digits recipe that make it this workload on emulated devices."""
    work, digen = case.workload, "trainer.v1.digen"
    selection = ()
    if work.trained_transitions < work.denoise_steps - 1:
        selection = (
            f"{digen}.sampling.selection.kind=window",
            f"{digen}.sampling.selection.window_size={work.trained_transitions}",
        )
    return (
        override("actor_rollout_ref.model.path", data / "model"),
        override("data.train_files", data / "prompts.parquet"),
        override("data.val_files", data / "prompts.parquet"),
        f"data.train_batch_size={work.groups}",
        f"actor_rollout_ref.actor.ppo_mini_batch_size={work.groups // work.logical_batches}",
        "actor_rollout_ref.actor.use_kl_loss=false",  # a workload has no reference forward
        f"actor_rollout_ref.rollout.n={work.samples_per_group}",
        f"actor_rollout_ref.rollout.n_gpus_per_node={generator}",
        f"trainer.n_gpus_per_node={trainer}",
        f"{digen}.sampling.num_steps={work.denoise_steps}",
        *selection,
        *((f"{digen}.tsp.max_cells={cells}",) if cells else ()),
        f"~{digen}.rewards.digit_classifier",
        f"+{digen}.rewards.emulated={{weight: 1.0, kwargs: {{latency_s: {case.costs.score_s}}}}}",
        f"{digen}.threads.trainer=1",
        f"{digen}.threads.rollout=1",
        f"ray_kwargs.ray_init.num_gpus={generator + trainer}",
        f"ray_kwargs.ray_init.num_cpus={2 * (generator + trainer) + 8}",
    )


def write_data(case: Case, folder: Path) -> Path:
    """Model folder and prompts of an emulated workload."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    from verl_digen.models.emulated import EmulatedCosts, write_emulated_model

    write_emulated_model(folder / "model", EmulatedCosts(**{name: getattr(case.costs, name) for name in TIMES}))
    rows = [
        {
            "prompt": f"emulated prompt {index}",
            "data_source": "emulated",
            "reward_model": {"style": "rule", "ground_truth": ""},
            "extra_info": {"index": index},
        }
        for index in range(case.workload.groups)
    ]
    pq.write_table(pa.Table.from_pylist(rows), folder / "prompts.parquet")
    return folder


def run_emulated(plan: Plan, say: Callable[[str], None] = lambda _: None) -> list[dict]:
    """Run every workload on every placement in every mode; one row each.

    ``predicted_s`` is simulated from the workload's own times; ``predicted_from_measured_s`` from the costs that the
    run measured, in which the real commits, publishes, transfers and collectives are.

    Raises:
        ValueError: a workload that cannot be read or does not fit a placement.
        RunFailed: a run failed; nothing of it is left running.
    """
    rows = []
    for workload in plan.workloads:
        file = plan.recipes / "workloads" / f"{workload}.yaml"
        if not file.is_file():
            known = sorted(path.stem for path in file.parent.glob("*.yaml"))
            raise ValueError(f"no workload file {file}; there are {', '.join(known)}")
        case = scaled(read_case(yaml.safe_load(file.read_text(encoding="utf-8"))), plan.scale, plan.groups)
        data = (plan.out / workload).resolve()
        data.mkdir(parents=True, exist_ok=True)
        write_data(case, data)
        for generator, trainer in plan.devices:
            for mode in plan.modes:
                for cells in plan.cells if "tsp" in mode else (None,):
                    row = _one(plan, case, data, workload, generator, trainer, mode, cells)
                    say(
                        f"{workload} {generator}+{trainer} {mode}{f' {cells} cells' if cells else ''}: "
                        f"{row['step_s']:.2f} s, predicted {row['predicted_s']:.2f} s"
                    )
                    rows.append(row)
    return rows


def _one(
    plan: Plan, case: Case, data: Path, workload: str, generator: int, trainer: int, mode: str, cells: int | None
) -> dict:
    overrides = (*overrides_of(case, data, generator, trainer, cells), *plan.overrides)
    config = compose_recipe(plan.recipes, [*MODES[mode], *overrides])
    resolved = resolve_plan(config)
    name = f"{workload}-{generator}+{trainer}-{mode}{f'-{cells}' if cells else ''}"
    folder = plan.out.resolve() / name
    folder.mkdir(parents=True, exist_ok=True)
    run = DigitsPlan(
        modes=(mode,),
        recipes=plan.recipes,
        out=plan.out,
        steps=plan.steps,
        warmup=plan.warmup,
        timeout_s=plan.timeout_s,
    )
    measured = measure_mode(mode, folder, run, overrides)
    result = predict(resolved, case.costs, workload)
    own = predict(resolved, read_measured([folder / FOLDER / COSTS]).profile(), workload)
    step_s = statistics.median(measured.step_s)
    fragments = -(-resolved.samples // resolved.fragment_size)
    return {
        "workload": workload,
        "devices": f"{generator}+{trainer}",
        "mode": mode,
        "max_cells": cells,
        "step_s": step_s,
        "predicted_s": result.makespan_s,
        "bound_s": result.bound.seconds,
        "deviation": step_s / result.makespan_s - 1,
        "predicted_from_measured_s": own.makespan_s,
        "deviation_from_measured": step_s / own.makespan_s - 1,
        "fragments": fragments,
        "overhead_per_fragment_s": (step_s - result.makespan_s) / fragments,
        "steps_s": measured.step_s,
        "start_to_first_step_s": measured.start_s,
        "scale": plan.scale,
        "source": "emulated",
    }
