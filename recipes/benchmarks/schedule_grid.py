"""Figures of the scheduling library: distance to the bound over the paper's grid, ladders, speed.

``python recipes/benchmarks/schedule_grid.py [grid] [ladder] [tiles] [speed] [--quick] [--json FILE]`` prints tables.
Everything except the section ``speed`` is simulated.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import time
from pathlib import Path

import yaml

from verl_digen.planner.candidates import Search
from verl_digen.planner.catalog import Case, Testbed, read_case, read_testbed
from verl_digen.planner.disturbance import Disturbance
from verl_digen.planner.plan import plan
from verl_digen.planner.shared import plan_colocated
from verl_digen.planner.simulate import simulate
from verl_digen.planner.trainerloop import Run
from verl_digen.schedule.bts import search
from verl_digen.schedule.merge import Take
from verl_digen.schedule.pipeline import BubbleCosts, start_state
from verl_digen.schedule.tsp import tile_rounds
from verl_digen.schedule.work import Pools, Replica, Schedule, TrainerPool, Workload

WORKLOADS = Path(__file__).resolve().parents[1] / "workloads"
TESTBEDS = WORKLOADS.parent / "testbeds" / "devices.yaml"
MODELS = ("hunyuanvideo-13b", "wan2.1-14b", "flux.1-12b", "qwen-image-20b")
BEDS = ("A", "B", "C", "A+C")
POLICIES = ("none", "fixed", "greedy", "bts", "steps")
RATIOS = (0.0, 0.5, 1.0)
STEPS = 64
PAPER = {"hunyuanvideo-13b": (1.52, 1.84, 2.14, 3.05, 3.34), "wan2.1-14b": (1.58, 1.70, 2.10, 2.79, 2.85)}


def case_of(model: str) -> Case:
    return read_case(yaml.safe_load((WORKLOADS / f"{model}.yaml").read_text(encoding="utf-8")), model)


def testbeds() -> dict[str, Testbed]:
    beds = yaml.safe_load(TESTBEDS.read_text(encoding="utf-8"))
    return {name: read_testbed({"name": name, **bed}) for name, bed in beds.items()}


def grid(quick: bool) -> list[dict]:
    """Every cell of the grid, every policy and ratio at the planner's choice, and the two baselines."""
    rows = []
    beds = testbeds()
    for steps, share in itertools.product((30,) if quick else (30, 20, 40), (0.4, 0.6)):
        for model, bed in itertools.product(MODELS, BEDS):
            print(f"{model} {bed} {steps} steps, {share:g} trained", file=sys.stderr, flush=True)
            case, where = case_of(model).resized(steps, share), beds[bed]
            cell = {"workload": model, "testbed": bed, "denoise_steps": steps, "trained_fraction": share}
            plain = plan_colocated(case, where).simulation.makespan_s
            again = plan_colocated(case, where, Search(recompute_old_log_probs=True)).simulation.makespan_s
            ahead = Search(policies=("none",), stale_ratios=(1.0,), gap=False, tsp=False, final_steps=STEPS)
            behind = plan(case, where, ahead).best.simulation.makespan_s
            found = plan(case, where, Search(policies=POLICIES, stale_ratios=RATIOS, final_steps=STEPS))
            for choice in found.choices:
                result = choice.simulation
                rows.append(
                    {
                        **cell,
                        "policy": choice.candidate.schedule.policy,
                        "max_stale_ratio": choice.candidate.schedule.max_stale_ratio,
                        "makespan_s": result.makespan_s,
                        "bound_s": result.bound.seconds,
                        "distance": result.distance,
                        "utilisation": result.utilisation,
                        "over_colocated": plain / result.makespan_s,
                        "over_colocated_recomputing": again / result.makespan_s,
                        "over_one_batch_ahead": behind / result.makespan_s,
                        "planning_s": found.seconds,
                        "source": "simulated",
                    }
                )
    return rows


def print_grid(rows: list[dict]) -> None:
    cells = {(r["workload"], r["testbed"], r["denoise_steps"], r["trained_fraction"]) for r in rows}
    print(f"\n{len(cells)} cells, {STEPS} steps each, start-up included (simulated)\n")
    print(
        "| policy | TCSS ratio | distance median | worst | utilisation median | over colocated, median (range) "
        "| over colocated with recomputation | over one batch ahead |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for policy, ratio in itertools.product(POLICIES, RATIOS):
        some = [r for r in rows if r["policy"] == policy and r["max_stale_ratio"] == ratio]
        far = [r["distance"] for r in some]
        spans = [
            f"{statistics.median(values):.2f} ({min(values):.2f}–{max(values):.2f})"
            for values in (
                [r[key] for r in some]
                for key in ("over_colocated", "over_colocated_recomputing", "over_one_batch_ahead")
            )
        ]
        used = statistics.median(r["utilisation"] for r in some)
        print(
            f"| {policy} | {ratio:g} | {statistics.median(far):.1%} | {max(far):.1%} | {used:.0%} | "
            + " | ".join(spans)
            + " |"
        )
    planning = [r["planning_s"] for r in rows]
    print(f"\nplanning a cell ({len(POLICIES) * len(RATIOS)} plans): median {statistics.median(planning):.1f} s")


def ladder(quick: bool) -> list[dict]:
    """Rungs at an even split and at the planner's split; each rung has the fragment and tile that suit it."""
    rows = []
    bed = testbeds()["A"]
    final = 16 if quick else STEPS
    for model in MODELS:
        case = case_of(model).resized(30, 0.6)
        base = {"workload": model, "source": "simulated"}
        for again in (False, True):
            best = plan_colocated(case, bed, Search(recompute_old_log_probs=again)).simulation.makespan_s
            rows.append(
                {**base, "split": "all", "rung": f"colocated{', recomputing' if again else ''}", "step_s": best}
            )
        rungs = {
            "one batch ahead": {"gap": False, "tsp": False, "stale_ratios": (1.0,), "policies": ("none",)},
            "disaggregated": {"gap": False, "tsp": False, "policies": ("none",)},
            "+GAP": {"tsp": False, "policies": ("none",)},
            "+TSP": {"policies": ("none",)},
            "+TAG (bts)": {"policies": ("none", "bts")},
            "+TAG (steps)": {"policies": ("none", "bts", "steps")},
            "+TCSS (steps, 0.5)": {"policies": ("none", "bts", "steps"), "stale_ratios": (0.0, 0.5)},
            "+TCSS (steps, 1.0)": {"policies": ("none", "bts", "steps"), "stale_ratios": (0.0, 0.5, 1.0)},
        }
        for split, generator in (("8 + 24", 8), ("16 + 16", 16), ("planner", None)):
            for rung, options in rungs.items():
                found = plan(case, bed, Search(generator=generator, final_steps=final, **options)).best
                devices = dict(found.candidate.generator)["A"]
                rows.append(
                    {**base, "split": split, "rung": rung, "step_s": found.simulation.makespan_s, "generator": devices}
                )
    return rows


def print_ladder(rows: list[dict]) -> None:
    for model in MODELS:
        mine = [r for r in rows if r["workload"] == model]
        print(f"\n{model}, testbed A, 30 steps, 60 % trained: seconds per step (simulated)\n")
        print("| rung | 8 + 24 | 16 + 16 | planner's split |\n|---|---|---|---|")
        for rung in dict.fromkeys(r["rung"] for r in mine):
            cells = {r["split"]: r for r in mine if r["rung"] == rung}
            if "all" in cells:
                print(f"| {rung} (32) | {cells['all']['step_s']:.0f} | | |")
            else:
                free = cells["planner"]
                text = f"{free['step_s']:.0f} ({free['generator']} + {32 - free['generator']})"
                print(f"| {rung} | {cells['8 + 24']['step_s']:.0f} | {cells['16 + 16']['step_s']:.0f} | {text} |")
        if model in PAPER:
            steps = [f"{b / a:.2f}" for a, b in itertools.pairwise(PAPER[model])]
            print(f"\nThe paper's ratios from rung to rung (GAP, TSP, TAG, TCSS): {', '.join(steps)}")


class _Counted(Run):
    """A simulated run that notes how full the tiles were; ``most`` groups at once where given."""

    most: int | None = None

    def __init__(self, *args) -> None:
        super().__init__(*args)
        self.lots = self.done = self.room = self.space = 0

    def lot(self) -> Take:
        take = super().lot() if self.most is None else Take(self.most)
        if take.count:
            samples, ranks, cells = take.count * self._unit, self.pools.trainer.ranks, self.schedule.max_cells
            rounds, fullest = tile_rounds(samples, self.workload.trained_transitions, ranks, cells, self.schedule.tsp)
            self.lots += 1
            self.done += samples * self.workload.trained_transitions
            self.room += ranks * fullest
            self.space += rounds
        return take


class _OneByOne(_Counted):
    most = 1


def tiles() -> list[dict]:
    """Groups trained one by one and as :func:`groups_to_train` says, for more and more ranks."""
    rows, case, group = [], case_of("flux.1-12b"), testbeds()["large"].groups[0]
    for trained, tsp, ranks in itertools.product((3, 9), (False, True), (16, 32, 64, 128, 256, 512)):
        work = Workload(name="w", groups=64, samples_per_group=24, denoise_steps=10, trained_transitions=trained)
        replicas = tuple(Replica(name=f"r{index}", speed=group.speed) for index in range(ranks))
        pools = Pools(replicas=replicas, trainer=TrainerPool(ranks=ranks, speed=group.speed))
        schedule = Schedule(fragment_size=24, max_cells=8, tsp=tsp)
        for kind in (_OneByOne, _Counted):
            run = kind(work, pools, case.profile(group, ranks), schedule, 4, Disturbance(), None)
            run.play()
            rows.append(
                {
                    "ranks": ranks,
                    "trained_transitions": trained,
                    "tsp": tsp,
                    "merged": kind is _Counted,
                    "useful_cells": run.done / run.room,
                    "cells_per_tile": run.done / run.space / ranks,
                    "groups_per_lot": 64 * 4 / run.lots,
                    "step_s": run.step_ends[-1] / 4,
                    "source": "simulated",
                }
            )
    return rows


def print_tiles(rows: list[dict]) -> None:
    print("\nUseful cells, cells of a mean tile (of 8), groups at once, seconds per step; before → after (simulated)\n")
    print(
        "| K | TSP | ranks | useful cells | cells per tile | groups at once | step, s |\n|---|---|---|---|---|---|---|"
    )
    for before, after in zip(rows[::2], rows[1::2], strict=True):
        print(
            f"| {before['trained_transitions']} | {'on' if before['tsp'] else 'off'} | {before['ranks']} "
            f"| {before['useful_cells']:.0%} → {after['useful_cells']:.0%} "
            f"| {before['cells_per_tile']:.1f} → {after['cells_per_tile']:.1f} "
            f"| 1 → {after['groups_per_lot']:.1f} | {before['step_s']:.1f} → {after['step_s']:.1f} |"
        )


def speed() -> dict:
    """CPU time of this machine: BTS decisions, simulated events, planning for 512 devices."""
    times, cases = [], 400
    golden = (0.618034, 0.414214, 0.732051, 0.236068)
    for index in range(1, cases + 1):
        g, t, h, s = ((index * share) % 1 for share in golden)
        costs = BubbleCosts(lanes_s=(0.3 + 3.7 * g,), train_s=0.3 + 3.7 * t, helper_s=0.3 + 5.7 * h, switch_s=3 * s)
        begin = time.process_time()
        search(start_state(64, costs), costs)
        times.append(1e3 * (time.process_time() - begin))
    times.sort()
    work = Workload(name="speed", groups=128, samples_per_group=16, denoise_steps=30, trained_transitions=18)
    pools = Pools(
        replicas=tuple(Replica(name=f"r{index}") for index in range(256)),
        trainer=TrainerPool(ranks=256),
        reward_slots=64,
    )
    profile = case_of("flux.1-12b").costs
    rates = {}
    for policy in ("none", "bts", "steps"):
        schedule = Schedule(fragment_size=64, max_cells=8, tsp=True, policy=policy, max_stale_ratio=0.5)
        begin = time.process_time()
        events = simulate(work, pools, profile, schedule, steps=8).events
        rates[policy] = round(events / (time.process_time() - begin))
    large = case_of("flux.1-12b")
    wide = read_case(
        {
            **yaml.safe_load((WORKLOADS / "flux.1-12b.yaml").read_text(encoding="utf-8")),
            "workload": {
                "name": "flux.1-12b, 512 samples",
                "groups": 64,
                "samples_per_group": 8,
                "denoise_steps": 30,
                "trained_transitions": 18,
            },
        }
    )
    begin = time.process_time()
    few = plan(large, testbeds()["large"], Search(policies=("none", "bts", "steps"), stale_ratios=(0.0, 0.5)))
    middle = time.process_time()
    many = plan(wide, testbeds()["large"], Search(policies=("none", "bts", "steps"), stale_ratios=(0.0, 0.5)))
    return {
        "bts_median_ms": times[cases // 2],
        "bts_p99_ms": times[int(cases * 0.99)],
        "bts_worst_ms": times[-1],
        "events_per_cpu_s": rates,
        "plan_512_devices_32_samples_s": middle - begin,
        "plan_512_devices_512_samples_s": time.process_time() - middle,
        "candidates_512": [few.considered, many.considered],
        "source": "measured, CPU time",
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("sections", nargs="*", default=["grid", "ladder", "tiles", "speed"])
    parser.add_argument("--quick", action="store_true", help="30 sampling steps only, shorter runs")
    parser.add_argument("--json", help="also write all rows to this file")
    args = parser.parse_args()
    out: dict = {}
    if "grid" in args.sections:
        out["grid"] = grid(args.quick)
        print_grid(out["grid"])
    if "ladder" in args.sections:
        out["ladder"] = ladder(args.quick)
        print_ladder(out["ladder"])
    if "tiles" in args.sections:
        out["tiles"] = tiles()
        print_tiles(out["tiles"])
    if "speed" in args.sections:
        out["speed"] = speed()
        print("\n" + json.dumps(out["speed"], indent=1))
    if args.json:
        Path(args.json).write_text(json.dumps(out, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
