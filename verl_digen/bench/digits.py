"""The digits recipe in several modes, beside a bare loop that does the same work, on one machine in one run.

What makes the figures comparable
- The floor takes its prompts, sizes, options and threads from the composed recipe with the caller's overrides.
- The floor runs first, last and between the rounds; rounds alternate the order of the modes. Medians are taken, and how
  far the floor itself drifted is reported with them.
- A step's time is veRL's own ``timing_s/step``: generation, rewards, training and publishing. Validation and
  checkpoints are off. The first steps are left out.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from verl_digen.bench.predict import COSTS, FOLDER, predict, read_measured
from verl_digen.bench.processes import Watched, watch
from verl_digen.bench.runlog import STEP_SECONDS, read_log, series
from verl_digen.bench.workload import FloorSpec, compose_recipe, floor_spec, prepare
from verl_digen.config.paths import override
from verl_digen.config.plan import resolve_plan
from verl_digen.schedule.profile import Profile

FLOOR = "floor"
_DISAGGREGATED = ("trainer.v1.digen.placement=disaggregated", "actor_rollout_ref.rollout.nnodes=1")
_GAP = (*_DISAGGREGATED, "trainer.v1.digen.gap.enable=true")

# mode -> overrides of the recipe; the floor is no run of the recipe
MODES: dict[str, tuple[str, ...]] = {
    FLOOR: (),
    "colocated": (),
    "disaggregated": _DISAGGREGATED,
    "one-shot": _DISAGGREGATED,
    "gap": _GAP,
    "gap+tsp": (*_GAP, "trainer.v1.digen.tsp.enable=true"),
}
PHASES = ("gen", "update_actor", "update_weights", "denoise", "tiles", "fetch", "store")


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What is measured.

    Attributes:
        modes: names of ``MODES``.
        steps: measured steps of each run, after ``warmup`` steps that are left out.
        rounds: how often each mode is run.
        overrides: of the recipe, for every mode and the floor.
        recipes: folder of ``digits.yaml``.
        out: where runs leave their logs; made if absent.
        timeout_s: of one run.
    """

    modes: tuple[str, ...]
    recipes: Path
    out: Path
    steps: int = 8
    warmup: int = 2
    rounds: int = 1
    overrides: tuple[str, ...] = ()
    timeout_s: float = 3600.0

    def __post_init__(self):
        check_modes(self.modes)
        for name, least in (("steps", 1), ("warmup", 0), ("rounds", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be at least {least}, got {getattr(self, name)}")
        if not (self.recipes / "digits.yaml").is_file():
            raise ValueError(f"no digits.yaml in {self.recipes}; give the folder of the recipes with --recipes")


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """One run of one mode.

    Attributes:
        step_s: seconds of each measured step.
        wall_step_s: seconds between the log lines of the measured steps, what the loop does between steps included;
            empty for the floor.
        start_s: from the start of the process to the start of the first step.
        memory_mb, processes: by kind of process; see :class:`~verl_digen.bench.processes.Watched`.
        phases: median seconds of veRL's and verl_digen's own timers.
    """

    mode: str
    step_s: list[float]
    start_s: float
    wall_step_s: list[float] = field(default_factory=list)
    memory_mb: dict[str, float] = field(default_factory=dict)
    processes: dict[str, int] = field(default_factory=dict)
    phases: dict[str, float] = field(default_factory=dict)


def check_modes(modes: Sequence[str]) -> None:
    """Refuse modes that there are not, and a list without any or with one twice.

    Raises:
        ValueError: lists the modes there are.
    """
    unknown = [mode for mode in modes if mode not in MODES]
    if unknown or not modes or len(set(modes)) != len(modes):
        wrong = f"unknown mode {', '.join(map(repr, unknown))}" if unknown else f"modes {list(modes)}: each once"
        raise ValueError(f"{wrong}; available: {', '.join(MODES)}")


# ---- measuring ---------------------------------------------------------------------------------------------


def order_of_runs(modes: Sequence[str], rounds: int) -> list[str]:
    """The floor first, last and between the rounds; the other modes forwards and backwards in turn."""
    others = [mode for mode in modes if mode != FLOOR]
    floor = [FLOOR] if FLOOR in modes else []
    order = list(floor)
    for number in range(rounds):
        order += (others if number % 2 == 0 else others[::-1]) + floor
    return order


def run_bench(plan: Plan, say: Callable[[str], None] = lambda _: None) -> dict:
    """Measure all modes; returns :func:`report`. Each measurement is also kept in ``out/measurements.jsonl``.

    Args:
        say: told what is going on.

    Raises:
        ValueError: the recipe with these overrides cannot be run or is not covered by the floor.
        RunFailed: a run failed; nothing of it is left running.
    """
    out = plan.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    data = prepare(out / "data")
    overrides = (override("recipe.digits_dir", data), *plan.overrides)
    config = compose_recipe(plan.recipes, overrides)
    total = plan.warmup + plan.steps
    spec = floor_spec(config, total) if FLOOR in plan.modes else None
    samples = config.data.train_batch_size * config.actor_rollout_ref.rollout.n
    measurements: list[Measurement] = []
    costs: list[Path] = []
    order = order_of_runs(plan.modes, plan.rounds)
    for number, mode in enumerate(order, start=1):
        say(f"run {number}/{len(order)}: {mode}, {plan.warmup} + {plan.steps} steps of {samples} samples")
        folder = out / f"{number:02d}-{mode}"
        folder.mkdir(parents=True, exist_ok=True)
        if mode == FLOOR:
            measured = _measure_floor(spec, folder, plan)
        else:
            measured = measure_mode(mode, folder, plan, overrides)
        measurements.append(measured)
        if mode != FLOOR:
            costs.append(folder / FOLDER / COSTS)
        say(f"  {statistics.median(measured.step_s):.2f} s per step, first step after {measured.start_s:.1f} s")
        with open(out / "measurements.jsonl", "a") as file:
            file.write(json.dumps(asdict(measured)) + "\n")
    found = report(measurements, plan, samples)
    if costs:
        add_predictions(found["rows"], plan, overrides, read_measured(costs).profile())
    return found


def add_predictions(rows: list[dict], plan: Plan, overrides: Sequence[str], profile: Profile) -> None:
    """Add ``predicted_s``, ``bound_s`` and ``deviation`` to the rows of live modes.

    All modes are predicted from one profile, to which all runs of the bench contributed.
    """
    for row in rows:
        if row["mode"] == FLOOR:
            continue
        resolved = resolve_plan(compose_recipe(plan.recipes, [*MODES[row["mode"]], *overrides]))
        result = predict(resolved, profile, row["mode"])
        row["predicted_s"], row["bound_s"] = result.makespan_s, result.bound.seconds
        row["deviation"] = row["step_s"] / result.makespan_s - 1


def _measure_floor(spec: FloorSpec, folder: Path, plan: Plan) -> Measurement:
    (folder / "spec.json").write_text(json.dumps(asdict(spec)))
    seen = watch(
        [sys.executable, "-m", "verl_digen.bench.floor", "spec.json", "result.json"],
        cwd=folder,
        output=folder / "output.log",
        timeout_s=plan.timeout_s,
    )
    result = json.loads((folder / "result.json").read_text())
    return Measurement(
        mode=FLOOR,
        step_s=result["step_s"][plan.warmup :],
        start_s=result["started"][0] - seen.started,
        memory_mb=seen.memory_mb,
        processes=seen.processes,
    )


def run_command(mode: str, folder: Path, plan: Plan, overrides: Sequence[str]) -> list[str]:
    """The command line of a run of ``mode``: the recipe without validation, checkpoints and resuming."""
    return [
        *(sys.executable, "-m", "verl.trainer.main_ppo"),
        *("--config-dir", str(plan.recipes.resolve()), "--config-name", "digits"),
        f"trainer.total_training_steps={plan.warmup + plan.steps}",
        "trainer.val_before_train=false",
        "trainer.test_freq=-1",
        "trainer.save_freq=-1",
        "trainer.resume_mode=disable",
        "trainer.logger=[console,file]",
        override("trainer.default_local_dir", folder),
        f"trainer.v1.digen.trace.every={plan.warmup + plan.steps}",
        *MODES[mode],
        *overrides,
    ]


def measure_mode(mode: str, folder: Path, plan: Plan, overrides: Sequence[str]) -> Measurement:
    """Run the recipe in ``mode`` to its end and read its figures.

    Raises:
        RunFailed: the run failed; nothing of it is left running.
    """
    log = folder / "metrics.jsonl"
    seen = watch(
        run_command(mode, folder, plan, overrides),
        cwd=folder,
        output=folder / "output.log",
        env={"VERL_FILE_LOGGER_PATH": str(log)},
        log=log,
        timeout_s=plan.timeout_s,
    )
    return read_measurement(mode, log, seen, warmup=plan.warmup)


def read_measurement(mode: str, log: Path, seen: Watched, *, warmup: int) -> Measurement:
    """A run's figures from its log and from when its lines appeared.

    Raises:
        RunLogError: no log.
        ValueError: not more steps than the warm-up.
    """
    lines = read_log(log)
    seconds = [value for _, value in series(lines, STEP_SECONDS)]
    if len(seconds) <= warmup or len(seen.arrivals) != len(lines):
        raise ValueError(
            f"{log}: {len(seconds)} steps in {len(lines)} lines ({len(seen.arrivals)} seen), warm-up {warmup}"
        )
    walls = [b - a for a, b in zip(seen.arrivals, seen.arrivals[1:], strict=False)]
    phases = {}
    for phase in PHASES:
        values = [value for _, value in series(lines, f"timing_s/{phase}")][warmup:]
        if values:
            phases[phase] = statistics.median(values)
    return Measurement(
        mode=mode,
        step_s=seconds[warmup:],
        start_s=seen.arrivals[0] - seconds[0] - seen.started,
        wall_step_s=walls[max(warmup - 1, 0) :],
        memory_mb=seen.memory_mb,
        processes=seen.processes,
        phases=phases,
    )


# ---- the report --------------------------------------------------------------------------------------------


def report(measurements: Sequence[Measurement], plan: Plan, samples: int) -> dict:
    """``rows``, one per mode in the order asked for, and what was measured how.

    A row has ``mode``, ``step_s`` (median over rounds of the median step), ``ratio_to_floor`` (None without a floor),
    ``samples_per_s``, and further keys. ``floor_drift`` is (slowest - fastest floor) / median floor.
    """
    floors = [statistics.median(m.step_s) for m in measurements if m.mode == FLOOR]
    floor = statistics.median(floors) if floors else None
    rows = [_row(mode, [m for m in measurements if m.mode == mode], floor, samples) for mode in plan.modes]
    return {
        "rows": rows,
        "floor_step_s": floors,
        "floor_drift": (max(floors) - min(floors)) / floor if floors else None,
        "samples_per_step": samples,
        "steps": plan.steps,
        "warmup": plan.warmup,
        "rounds": plan.rounds,
        "overrides": list(plan.overrides),
        "out": str(plan.out),
    }


def _row(mode: str, runs: Sequence[Measurement], floor: float | None, samples: int) -> dict:
    per_run = [statistics.median(run.step_s) for run in runs]
    step_s = statistics.median(per_run)
    walls = [statistics.median(run.wall_step_s) for run in runs if run.wall_step_s]
    return {
        "mode": mode,
        "step_s": step_s,
        "ratio_to_floor": None if floor is None else step_s / floor,
        "samples_per_s": samples / step_s,
        "step_s_by_run": per_run,
        "wall_step_s": statistics.median(walls) if walls else None,
        "start_to_first_step_s": statistics.median(run.start_s for run in runs),
        "memory_mb": _largest([run.memory_mb for run in runs]),
        "processes": _largest([run.processes for run in runs]),
        "phases_s": {
            name: statistics.median(run.phases[name] for run in runs if name in run.phases)
            for name in PHASES
            if any(name in run.phases for run in runs)
        },
        "rounds": len(runs),
    }


def _largest(tables: Sequence[dict[str, float]]) -> dict[str, float]:
    return {kind: max(table.get(kind, 0) for table in tables) for kind in dict.fromkeys(k for t in tables for k in t)}
