"""``verl-digen plan``: search pool split, fragment and tile size, policy and TCSS ratio for a workload."""

from __future__ import annotations

import argparse
import json
import sys

from verl_digen.cli.simulate import add_workload_arguments, load_case, load_testbed
from verl_digen.planner.candidates import Search
from verl_digen.planner.catalog import Case
from verl_digen.planner.overrides import overrides_of
from verl_digen.planner.plan import Choice, plan
from verl_digen.planner.shared import plan_shared


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_workload_arguments(parser)
    parser.add_argument("--policies", default="none,greedy,bts,steps", help="TAG policies to compare")
    parser.add_argument("--stale-ratios", default="0,0.5", help="TCSS ratios to compare (default: 0,0.5)")
    parser.add_argument("--widths", default="1,2,4,8", help="devices of a replica to consider")
    parser.add_argument("--shortlist", type=int, default=20, help="candidates simulated per policy and ratio")
    parser.add_argument("--steps", type=int, default=12, help="simulated steps of the winners (default: 12)")
    parser.add_argument("--devices-per-node", type=int, default=8, help="for the printed overrides (default: 8)")


def row_of(case: Case, choice: Choice) -> dict:
    """The JSON row of a choice."""
    candidate, result = choice.candidate, choice.simulation
    schedule = candidate.schedule
    features = ["tsp"] if schedule.tsp else []
    if not schedule.barrier:
        features.insert(0, "gap")
    if schedule.policy != "none":
        features.append("tag")
    if schedule.max_stale_ratio:
        features.append("tcss")
    return {
        "workload": case.workload.name,
        "placement": candidate.placement,
        "mode": "+".join(features) or "one-shot",
        "policy": schedule.policy,
        "makespan_s": result.makespan_s,
        "bound_s": result.bound.seconds,
        "utilisation": result.utilisation,
        "distance": result.distance,
        "generator": dict(candidate.generator),
        "trainer": {candidate.trainer_group: candidate.pools.trainer.devices},
        "replica_devices": candidate.width,
        "rollout_batch": schedule.rollout_batch,
        "fragment_samples": schedule.fragment_size,
        "tile_cells": schedule.max_cells,
        "max_stale_ratio": schedule.max_stale_ratio,
        "source": "simulated",
    }


def print_rows(rows: list[dict], title: str) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"{title} (simulated)")
    left = ("placement", "policy", "Generator", "Trainer")
    for heading in (*left, "ratio", "width", "batch", "fragment", "cells", "step, s", "bound, s", "distance"):
        table.add_column(heading, justify="left" if heading in left else "right")
    for row in rows:
        table.add_row(
            row["placement"],
            row["policy"],
            " + ".join(f"{count} {name}" for name, count in row["generator"].items() if count),
            " + ".join(f"{count} {name}" for name, count in row["trainer"].items()),
            f"{row['max_stale_ratio']:g}",
            str(row["replica_devices"]),
            str(row["rollout_batch"]),
            str(row["fragment_samples"]),
            str(row["tile_cells"]),
            f"{row['makespan_s']:.1f}",
            f"{row['bound_s']:.1f}",
            f"{row['distance']:.1%}",
        )
    Console(width=None if sys.stdout.isatty() else 140).print(table)


def _advice(choices: list[Choice], devices_per_node: int) -> list[str]:
    """Which placement wins, and the fastest choice that a live run can do as overrides for ``main_ppo``."""
    split = next(choice for choice in choices if choice.candidate.placement == "disaggregated")
    lines = [
        f"{choice.candidate.placement} is faster than every split: {choice.simulation.makespan_s:.1f} s against "
        f"{split.simulation.makespan_s:.1f} s"
        for choice in choices[: choices.index(split)]
    ]
    why = []
    for choice in choices:
        try:
            options = overrides_of(choice, devices_per_node=devices_per_node)
        except ValueError as error:
            why.append(str(error))
            continue
        return [*lines, f"fastest that a live run can do ({choice.simulation.makespan_s:.1f} s):", *options]
    return [*lines, *dict.fromkeys(why)]


def run(args: argparse.Namespace) -> int:
    try:
        return _run(args)
    except ValueError as error:
        print(f"verl-digen {args.command}: {error}", file=sys.stderr)
        return 2


def _run(args: argparse.Namespace) -> int:
    testbed = load_testbed(args.testbed, args.testbeds)
    search = Search(
        policies=tuple(args.policies.split(",")),
        stale_ratios=tuple(float(ratio) for ratio in args.stale_ratios.split(",")),
        widths=tuple(int(width) for width in args.widths.split(",")),
        shortlist=args.shortlist,
        final_steps=args.steps,
        recompute_old_log_probs=args.recompute_old_log_probs,
    )
    everything = []
    for name in args.workloads or ["hunyuanvideo-13b"]:
        case = load_case(name, args.denoise_steps, args.trained_fraction)
        found = plan(case, testbed, search)
        choices = [*found.choices, *plan_shared(case, testbed, found.choices, search)]
        choices.sort(key=lambda choice: choice.simulation.makespan_s)
        rows = [row_of(case, choice) for choice in choices]
        everything += rows
        if not args.json:
            print_rows(rows, f"{case.workload.name} on {testbed.name}, {testbed.devices} devices")
            print(
                f"{found.considered} candidates, {found.rejected_for_memory} placements rejected for memory, "
                f"{found.simulated} simulated, {found.seconds:.1f} s"
            )
            print("\n".join(_advice(choices, args.devices_per_node)))
    if args.json:
        print(json.dumps(everything))
    return 0
