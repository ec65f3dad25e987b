"""``verl-digen bench``: the live modes beside a bare loop, and pictures of a run's log."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from verl_digen.shipped import shipped

DEFAULT_MODES = "floor,colocated,disaggregated"
MUCH_DRIFT = 0.1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    targets = parser.add_subparsers(dest="target", metavar="TARGET", required=True)

    digits = targets.add_parser("digits", help="step time of the digits recipe by mode, as a ratio to a bare loop")
    digits.add_argument("--modes", default=DEFAULT_MODES, help=f"comma-separated (default: {DEFAULT_MODES})")
    digits.add_argument("--steps", type=int, default=8, help="measured steps of each run (default: 8)")
    digits.add_argument("--warmup", type=int, default=2, help="steps before them that are left out (default: 2)")
    digits.add_argument("--rounds", type=int, default=1, help="runs of each mode, in alternating order (default: 1)")
    digits.add_argument("--threads", type=int, help="CPU threads of each process (default: the recipe's)")
    digits.add_argument("--recipes", type=Path, help="folder of digits.yaml (default: the shipped recipes)")
    digits.add_argument("--out", type=Path, help="folder for logs (default: runs/bench-digits-TIME)")
    digits.add_argument("--timeout", type=float, default=3600.0, help="seconds after which a run has failed")
    digits.add_argument("--json", action="store_true", help="write JSON to stdout, progress to stderr")
    digits.add_argument("overrides", nargs="*", metavar="OVERRIDE", help="of the recipe, for all modes and the floor")

    emulated = targets.add_parser(
        "emulated", help="EMULATED devices under the real control plane, beside the simulator's prediction"
    )
    emulated.add_argument("--workloads", default="wan2.2-5b", help="names in recipes/workloads, comma-separated")
    emulated.add_argument("--devices", default="4+4", help="Generator+Trainer devices, comma-separated")
    emulated.add_argument("--modes", default="one-shot,gap,gap+tsp", help="comma-separated")
    emulated.add_argument("--cells", default="8", help="tile sizes of the modes with TSP, comma-separated")
    emulated.add_argument("--scale", type=float, default=100.0, help="times are divided by it (default: 100)")
    emulated.add_argument("--groups", type=int, help="prompt groups per step instead of the workload's")
    emulated.add_argument("--steps", type=int, default=2, help="measured steps of each run (default: 2)")
    emulated.add_argument("--warmup", type=int, default=1, help="steps before them that are left out (default: 1)")
    emulated.add_argument("--recipes", type=Path, help="folder of digits.yaml and workloads/ (default: shipped)")
    emulated.add_argument("--out", type=Path, help="folder for logs (default: runs/bench-emulated-TIME)")
    emulated.add_argument("--timeout", type=float, default=3600.0, help="seconds after which a run has failed")
    emulated.add_argument("--json", action="store_true", help="write JSON to stdout, progress to stderr")
    emulated.add_argument("overrides", nargs="*", metavar="OVERRIDE", help="of the recipe, for all runs")

    curve = targets.add_parser("curve", help="reward and accuracy of a run: in the terminal and as pictures")
    curve.add_argument("--log", type=Path, required=True, help="JSON lines of veRL's file logger")
    curve.add_argument("--run-dir", type=Path, help="trainer.default_local_dir, for the samples before and after")
    curve.add_argument("--out", type=Path, required=True, help="folder for the pictures")

    follow = targets.add_parser("follow", help="print a line per step of a run that is going on")
    follow.add_argument("--log", type=Path, required=True, help="JSON lines of veRL's file logger")
    follow.add_argument("--pid", type=int, required=True, help="stop when this process is gone")


def run(args: argparse.Namespace) -> int:
    """Exit status: 0 done, 1 a run failed, 2 a bad argument."""
    from verl_digen.bench.processes import RunFailed

    try:
        return {"digits": _digits, "emulated": _emulated, "curve": _curve, "follow": _follow}[args.target](args)
    except RunFailed as error:
        print(f"verl-digen bench: {error}", file=sys.stderr)
        return 1
    except ValueError as error:
        print(f"verl-digen bench: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("verl-digen bench: interrupted; the run was ended", file=sys.stderr)
        return 130


def _digits(args: argparse.Namespace) -> int:
    from verl_digen.bench.digits import Plan, run_bench

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # as an exception, so that the run's processes are ended
    overrides = tuple(args.overrides)
    if args.threads is not None:
        overrides += tuple(f"trainer.v1.digen.threads.{pool}={args.threads}" for pool in ("trainer", "rollout"))
    plan = Plan(
        modes=tuple(_items(args.modes)),
        recipes=args.recipes or shipped("recipes"),
        out=args.out or Path("runs") / f"bench-digits-{time.strftime('%Y%m%d-%H%M%S')}",
        steps=args.steps,
        warmup=args.warmup,
        rounds=args.rounds,
        overrides=overrides,
        timeout_s=args.timeout,
    )
    found = run_bench(plan, say=lambda text: print(text, file=sys.stderr, flush=True))
    if args.json:
        print(json.dumps(found))
    else:
        show(found)
    return 0


def _emulated(args: argparse.Namespace) -> int:
    from verl_digen.bench.emulated import Plan, run_emulated

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    plan = Plan(
        workloads=tuple(_items(args.workloads)),
        devices=tuple(_devices(text) for text in _items(args.devices)),
        modes=tuple(_items(args.modes)),
        cells=tuple(int(text) for text in _items(args.cells)),
        scale=args.scale,
        groups=args.groups,
        steps=args.steps,
        warmup=args.warmup,
        recipes=args.recipes or shipped("recipes"),
        out=args.out or Path("runs") / f"bench-emulated-{time.strftime('%Y%m%d-%H%M%S')}",
        overrides=tuple(args.overrides),
        timeout_s=args.timeout,
    )
    rows = run_emulated(plan, say=lambda text: print(text, file=sys.stderr, flush=True))
    if args.json:
        print(json.dumps(rows))
    else:
        show_emulated(rows)
    return 0


def _items(text: str) -> list[str]:
    return [item.strip() for item in text.split(",") if item.strip()]


def _devices(text: str) -> tuple[int, int]:
    generator, plus, trainer = text.partition("+")
    if not plus or not generator.isdigit() or not trainer.isdigit():
        raise ValueError(f"--devices {text}: write Generator+Trainer, for example 4+4")
    return int(generator), int(trainer)


def show_emulated(rows: list[dict[str, Any]]) -> None:
    """Write the rows as a table."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"EMULATED devices, times divided by {rows[0]['scale']:g}", title_justify="left")
    for column in ("workload", "devices", "mode", "cells"):
        table.add_column(column)
    for column in (
        "step s",
        "predicted s",
        "deviation",
        "from measured costs s",
        "deviation",
        "bound s",
        "ms/fragment",
    ):
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(
            row["workload"],
            row["devices"],
            row["mode"],
            str(row["max_cells"] or "-"),
            f"{row['step_s']:.3f}",
            f"{row['predicted_s']:.3f}",
            f"{row['deviation']:+.1%}",
            f"{row['predicted_from_measured_s']:.3f}",
            f"{row['deviation_from_measured']:+.1%}",
            f"{row['bound_s']:.3f}",
            f"{1e3 * row['overhead_per_fragment_s']:.1f}",
        )
    console = Console()
    console = console if console.is_terminal else Console(width=130)
    console.print(table)
    console.print("ms/fragment: (step - predicted) / generated fragments, the cost of the real control plane")


def show(found: dict[str, Any]) -> None:
    """Write the report as tables."""
    from rich.console import Console
    from rich.table import Table

    table = Table(
        title=f"digits: {found['samples_per_step']} samples per step, median of {found['steps']} steps after "
        f"{found['warmup']}, {found['rounds']} round(s)",
        title_justify="left",
    )
    for column in (
        *("mode", "step s", "ratio to floor", "predicted s", "bound s", "samples/s"),
        *("wall step s", "start to 1st step s", "memory MiB"),
    ):
        table.add_column(column, justify="left" if column == "mode" else "right")
    for row in found["rows"]:
        table.add_row(
            row["mode"],
            f"{row['step_s']:.3f}",
            _number(row["ratio_to_floor"]),
            _number(row.get("predicted_s")),
            _number(row.get("bound_s")),
            f"{row['samples_per_s']:.1f}",
            _number(row["wall_step_s"]),
            f"{row['start_to_first_step_s']:.1f}",
            f"{sum(row['memory_mb'].values()):.0f}",
        )
    memory = Table(title="resident memory by kind of process, MiB (number of processes)", title_justify="left")
    memory.add_column("kind")
    for row in found["rows"]:
        memory.add_column(row["mode"], justify="right")
    for kind in sorted({kind for row in found["rows"] for kind in row["memory_mb"]}):
        cells = [(row["memory_mb"].get(kind), row["processes"].get(kind)) for row in found["rows"]]
        memory.add_row(kind, *("-" if size is None else f"{size:.0f} ({count})" for size, count in cells))
    console = Console()
    if not console.is_terminal:
        console = Console(width=120)
    console.print(table, memory)
    if found["floor_step_s"]:
        steps = ", ".join(f"{seconds:.3f}" for seconds in found["floor_step_s"])
        console.print(f"floor, in the order measured: {steps} s per step; drift {found['floor_drift']:.1%}")
        if found["floor_drift"] > MUCH_DRIFT:
            console.print("[bold red]the machine was not quiet: do not rely on these ratios[/bold red]")
    console.print(f"logs: {found['out']}", soft_wrap=True)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _curve(args: argparse.Namespace) -> int:
    from rich.console import Console

    from verl_digen.bench.curves import curve_table, draw_before_after, draw_curve, metrics_table
    from verl_digen.bench.runlog import read_log, summarise

    lines = read_log(args.log)
    summary = summarise(lines)
    Console().print(curve_table(lines))
    if (judged := metrics_table(lines)) is not None:
        Console().print(judged)
    written = [draw_curve(lines, args.out / "curve.png")]
    if args.run_dir is not None:
        titles = (f"before: accuracy {summary.before:.3f}", f"after {summary.steps} steps: {summary.after:.3f}")
        written.append(draw_before_after(args.run_dir, args.out / "before_after.png", titles))
    for file in written:
        print(f"written: {file.resolve()}")
    print(f"training took {summary.train_s:.0f} s (sum of timing_s/step), validation {summary.validate_s:.0f} s")
    print(summary.line())
    return 0


def _follow(args: argparse.Namespace) -> int:
    from verl_digen.bench.curves import step_text
    from verl_digen.bench.runlog import parse_line

    position, last = 0, False
    while True:
        last = not _exists(args.pid)  # asked before reading, so that lines written in the meantime are still read
        if args.log.exists():
            with open(args.log) as file:
                file.seek(position)
                text = file.read()
            whole = text[: text.rfind("\n") + 1]
            position += len(whole.encode())
            for row in whole.splitlines():
                print(step_text(parse_line(row, str(args.log))), flush=True)
        if last:
            return 0
        time.sleep(0.5)


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
