"""``verl-digen simulate``: run the schedule of a workload in the discrete-event simulator."""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from dataclasses import replace
from pathlib import Path

import yaml

from verl_digen.planner.candidates import Search, replicas_of
from verl_digen.planner.catalog import Case, Testbed, read_case, read_testbed
from verl_digen.planner.disturbance import Disturbance, Failure
from verl_digen.planner.plan import plan
from verl_digen.planner.shared import plan_colocated
from verl_digen.planner.simulate import MODES, Simulation, schedule_for, simulate
from verl_digen.planner.timeline import draw_timeline
from verl_digen.schedule.bts import search
from verl_digen.schedule.pipeline import BubbleCosts, start_state
from verl_digen.schedule.profile import Profile
from verl_digen.schedule.tag import policies
from verl_digen.schedule.trace import write_chrome_trace
from verl_digen.schedule.work import Pools, Schedule, TrainerPool
from verl_digen.shipped import shipped

WORKLOADS = shipped("recipes") / "workloads"
TESTBEDS = shipped("recipes") / "testbeds" / "devices.yaml"


def load_case(name: str, denoise_steps: int | None, trained_fraction: float | None) -> Case:
    """Read a workload by file or by its name in the shipped ``recipes/workloads``."""
    path = Path(name) if name.endswith((".yaml", ".yml")) else WORKLOADS / f"{name}.yaml"
    if not path.is_file():
        known = sorted(found.stem for found in WORKLOADS.glob("*.yaml"))
        raise ValueError(f"no workload file {path}; in {WORKLOADS}: {', '.join(known) or 'nothing'}")
    case = read_case(yaml.safe_load(path.read_text(encoding="utf-8")), str(path))
    return case.resized(denoise_steps, trained_fraction)


def load_testbed(name: str, file: str) -> Testbed:
    """Read a testbed by name."""
    known = yaml.safe_load(Path(file).read_text(encoding="utf-8"))
    if name not in known:
        raise ValueError(f"no testbed {name!r} in {file}; known: {', '.join(known)}")
    return read_testbed({"name": name, **known[name]}, f"{file}: {name}")


def add_workload_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments shared by ``simulate`` and ``plan``."""
    parser.add_argument("workloads", nargs="*", help="workload files, or names of files in recipes/workloads")
    parser.add_argument("--testbed", default="A", help="name in the testbed file (default: A)")
    parser.add_argument("--testbeds", default=str(TESTBEDS), help="testbed file")
    parser.add_argument("--denoise-steps", type=int, help="sampling steps instead of the file's")
    parser.add_argument("--trained-fraction", type=float, help="share of the steps that is trained")
    parser.add_argument("--recompute-old-log-probs", action="store_true", help="an extra forward pass per cell")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_workload_arguments(parser)
    parser.add_argument("--modes", default=",".join(MODES), help="comma-separated rungs of the ladder")
    parser.add_argument("--policies", default="bts,steps", help=f"TAG policies to run ({', '.join(policies())})")
    parser.add_argument("--generator", type=int, help="devices of the Generator; the planner's choice if not given")
    parser.add_argument("--width", type=int, default=1, help="devices of a replica, with --generator")
    parser.add_argument("--fragment-groups", type=int, help="groups per fragment, with --generator (default: 1)")
    parser.add_argument("--max-cells", type=int, help="cells of a tile, with --generator (default: what fits)")
    parser.add_argument("--fixed-k", type=int, default=1, help="fragments per bubble of the policy fixed")
    parser.add_argument("--max-stale-ratio", type=float, default=0.5, help="ratio of TCSS (default: 0.5)")
    parser.add_argument("--steps", type=int, default=8, help="steps to simulate (default: 8)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jitter", type=float, default=0.0, help="log standard deviation of a sample's time")
    parser.add_argument("--stragglers", default="0:1", metavar="SHARE:FACTOR")
    parser.add_argument("--fail", action="append", default=[], metavar="REPLICA:AT_S:DOWN_S", help="a replica fails")
    parser.add_argument("--picture", help="write a timeline of the modes, .png or .svg")
    parser.add_argument("--picture-steps", type=int, default=2, help="steps drawn and traced (default: 2)")
    parser.add_argument("--trace", help="write the Chrome trace of the last mode")
    parser.add_argument("--bubbles", action="store_true", help="print bubbles by cause")
    parser.add_argument("--benchmark", action="store_true", help="measure this machine: events/s, BTS decision time")


def placement(case: Case, testbed: Testbed, args: argparse.Namespace) -> tuple[Pools, Profile, Schedule]:
    """Pools and full schedule from the arguments, or from the planner when no split is given."""
    if args.generator is None:
        tags = tuple(name for name in args.policies.split(",") if name)
        chosen = plan(case, testbed, Search(policies=tags, stale_ratios=(args.max_stale_ratio,))).best.candidate
        schedule = replace(chosen.schedule, fixed_k=args.fixed_k, max_stale_ratio=args.max_stale_ratio)
        return chosen.pools, chosen.profile, schedule
    group, others = testbed.groups[0], testbed.groups[1:]
    ranks = group.count - args.generator
    if not 0 < args.width <= args.generator or args.generator % args.width or ranks < 1:
        raise ValueError(
            f"--generator {args.generator} must be a multiple of --width {args.width} and leave a device of the "
            f"{group.count} of group {group.name} to the Trainer"
        )
    parts = [(group, args.generator), *((other, other.count) for other in others)]
    pools = Pools(
        replicas=replicas_of(testbed, parts, args.width),
        trainer=TrainerPool(ranks=ranks, speed=group.speed),
        reward_slots=case.reward_slots,
    )
    fit = (group.memory_gib * case.memory.usable - case.memory.trainer_need(ranks, 0)) / case.memory.cell_gib
    if args.max_cells is None and fit < 1:
        raise ValueError(f"no tile of one cell fits: {fit:.2f} cells on {ranks} ranks of {group.memory_gib} GiB")
    cells = args.max_cells or min(int(fit), case.workload.cells)
    size = (args.fragment_groups or 1) * case.workload.samples_per_group
    schedule = Schedule(
        fragment_size=size, max_cells=cells, tsp=True, fixed_k=args.fixed_k, max_stale_ratio=args.max_stale_ratio
    )
    return pools, case.profile(group, ranks), schedule


def run_mode(
    mode: str,
    policy: str,
    case: Case,
    testbed: Testbed,
    placed: tuple[Pools, Profile, Schedule],
    disturbance: Disturbance,
    args: argparse.Namespace,
    trace: bool,
) -> Simulation:
    """Simulate one rung on the placement."""
    pools, profile, full = placed
    schedule = replace(schedule_for(mode, full, policy), recompute_old_log_probs=args.recompute_old_log_probs)
    if mode == "colocated":
        chosen = plan_colocated(case, testbed, Search(recompute_old_log_probs=args.recompute_old_log_probs)).candidate
        pools, profile, schedule = chosen.pools, chosen.profile, chosen.schedule
        if disturbance.failures:
            raise ValueError(f"--fail names replicas of the Generator; leave out the mode {mode!r}")
    steps = args.picture_steps if trace else args.steps
    return simulate(case.workload, pools, profile, schedule, steps=steps, disturbance=disturbance, trace=trace)


def rungs(args: argparse.Namespace) -> list[tuple[str, str]]:
    """(mode, policy) pairs in ladder order; modes without TAG have the policy ``none``."""
    pairs = []
    for mode in args.modes.split(","):
        if mode not in MODES:
            raise ValueError(f"unknown mode {mode!r}; known: {', '.join(MODES)}")
        pairs += [(mode, policy) for policy in (args.policies.split(",") if "tag" in mode else ["none"])]
    return pairs


def disturbance_of(args: argparse.Namespace) -> Disturbance:
    share, factor = (float(part) for part in args.stragglers.split(":"))
    failures = []
    for text in args.fail:
        replica, at, down = text.split(":")
        failures.append(Failure(int(replica), float(at), float(down)))
    return Disturbance(
        seed=args.seed, jitter=args.jitter, straggler_share=share, straggler_factor=factor, failures=tuple(failures)
    )


def row_of(case: Case, mode: str, policy: str, result: Simulation) -> dict:
    """The JSON row of a simulation."""
    return {
        "workload": case.workload.name,
        "mode": mode,
        "policy": policy,
        "makespan_s": result.makespan_s,
        "bound_s": result.bound.seconds,
        "utilisation": result.utilisation,
        "distance": result.distance,
        "bound_by": result.bound.binding,
        "stale_groups": max(result.stale_groups),
        "bubbles_s": result.bubbles_s,
        "source": "simulated",
    }


def print_rows(rows: list[dict], title: str, bubbles: bool) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"{title} (simulated)")
    for heading in ("workload", "mode", "policy", "step, s", "bound, s", "distance", "utilisation", "x first row"):
        table.add_column(heading, justify="left" if heading in ("workload", "mode", "policy") else "right")
    first = rows[0]["makespan_s"]
    for row in rows:
        table.add_row(
            row["workload"],
            row["mode"],
            row["policy"],
            f"{row['makespan_s']:.1f}",
            f"{row['bound_s']:.1f}",
            f"{row['distance']:.1%}",
            f"{row['utilisation']:.0%}",
            f"{first / row['makespan_s']:.2f}",
        )
    console = Console(width=None if sys.stdout.isatty() else 140)
    console.print(table)
    if bubbles:
        for row in rows:
            causes = ", ".join(f"{cause} {seconds:.0f}" for cause, seconds in row["bubbles_s"].items())
            console.print(f"{row['workload']} {row['mode']} {row['policy']}, device-seconds per step: {causes}")


def benchmark(case: Case, testbed: Testbed, args: argparse.Namespace) -> dict:
    """Speed of this machine, in CPU time of this process: events per second, BTS at 64 fragments."""
    pools, profile, schedule = placement(case, testbed, args)
    schedule = replace(schedule, policy="none")
    begin = time.process_time()
    events = simulate(case.workload, pools, profile, schedule, steps=max(args.steps, 64)).events
    rate = events / (time.process_time() - begin)
    times = []
    for index in range(200):
        spread = [0.3 + 3.7 * math.modf((index + 1) * share)[0] for share in (0.618, 0.414, 0.732, 0.236)]
        costs = BubbleCosts(lanes_s=(spread[0],), train_s=spread[1], helper_s=spread[2], switch_s=spread[3] - 0.3)
        begin = time.process_time()
        search(start_state(64, costs), costs)
        times.append(1e3 * (time.process_time() - begin))
    times.sort()
    return {
        "events": events,
        "events_per_cpu_s": rate,
        "bts_fragments": 64,
        "bts_median_ms": times[len(times) // 2],
        "bts_p99_ms": times[int(len(times) * 0.99)],
        "source": "measured on this machine, CPU time",
    }


def run(args: argparse.Namespace) -> int:
    try:
        return _run(args)
    except ValueError as error:
        print(f"verl-digen {args.command}: {error}", file=sys.stderr)
        return 2


def _run(args: argparse.Namespace) -> int:
    testbed = load_testbed(args.testbed, args.testbeds)
    names = args.workloads or ["hunyuanvideo-13b"]
    if (args.picture or args.trace or args.benchmark) and len(names) > 1:
        raise ValueError(f"--picture, --trace and --benchmark take one workload, got {len(names)}: {', '.join(names)}")
    rows, traces, last = [], [], None
    disturbance = disturbance_of(args)
    for name in names:
        case = load_case(name, args.denoise_steps, args.trained_fraction)
        if args.benchmark:
            print(json.dumps(benchmark(case, testbed, args), indent=1))
            return 0
        placed = placement(case, testbed, args)
        for mode, policy in rungs(args):
            result = run_mode(mode, policy, case, testbed, placed, disturbance, args, False)
            rows.append(row_of(case, mode, policy, result))
            if args.picture or args.trace:
                last = run_mode(mode, policy, case, testbed, placed, disturbance, args, True).trace
                traces.append((mode if policy == "none" else f"{mode}, {policy}", last))
    if args.picture:
        draw_timeline(traces, args.picture)
    if args.trace:
        write_chrome_trace(last, args.trace)
    if args.json:
        print(json.dumps(rows))
    else:
        print_rows(rows, f"testbed {testbed.name}, {args.steps} steps", args.bubbles)
    return 0
