"""CPU time and memory of the driver at the size of a large cluster, without processes.

``python recipes/benchmarks/driver_load.py [--replicas 512] [--ranks 512] [--groups 1024] [--samples 4] [--steps 200]``

Real: manager, claim queue, ledger, assembler, dispatch, scoring, the training step with its advantages, the calls to
the Trainer's ranks, and the accounting of a step (timeline, bubbles, costs, metrics). Emulated: replicas, reward
workers and ranks, which answer at once and compute nothing, and Ray's object store, which hands values through. So the
figures are what the driver's own work costs; what Ray needs for a call comes on top: the calls of a step are counted.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from dataclasses import dataclass, field
from types import SimpleNamespace
from unittest import mock

import psutil
import ray

from verl_digen.config.digen import DigenConfig, GapConfig, TcssConfig, TspConfig
from verl_digen.config.plan import RunPlan
from verl_digen.engine.tilesize import TileSize
from verl_digen.rollout.manager import DiffusionRolloutManager, RolloutPool
from verl_digen.rollout.requests import FragmentReport, PromptGroup
from verl_digen.schedule.measure import Measured
from verl_digen.schedule.tcss import StaleLedger
from verl_digen.trainer.metrics import step_metrics
from verl_digen.trainer.step import TrainingStep
from verl_digen.trainer.timeline import StepTimes, bubble_metrics, learn, step_trace
from verl_digen.trainer.workgroup import TrainerGroup

TRANSITIONS = 3
PHASES = {"encode": 1e-4, "denoise": 1e-3, "decode": 1e-4, "store": 1e-4}


@dataclass
class Calls:
    """Calls that the driver made, by kind, since the last look."""

    generate: int = 0
    score: int = 0
    rank: int = 0

    def take(self) -> dict[str, int]:
        taken = dict(self.__dict__)
        self.__init__()
        return taken


class Replica:
    """Generates nothing, at once."""

    def __init__(self, name: str, calls: Calls):
        self.name, self.calls, self.workers = name, calls, [self]
        self.generate = SimpleNamespace(options=lambda num_returns: SimpleNamespace(remote=self._remote))

    def _remote(self, fragment):
        self.calls.generate += 1
        pixels = asyncio.get_running_loop().create_future()
        pixels.set_result(fragment.samples)
        return self._report(fragment), pixels

    async def _report(self, fragment) -> FragmentReport:
        await asyncio.sleep(0)
        now = time.time()
        return FragmentReport(
            fragment_id=fragment.fragment_id,
            replica=self.name,
            version=fragment.version,
            samples=fragment.samples,
            noise_hashes=tuple(f"{uid}/{j}" for uid, j in fragment.samples),
            transitions=(TRANSITIONS,) * len(fragment.samples),
            effective={},
            started=now - 1e-3,
            ended=now,
            phases=PHASES,
            peak_memory_bytes=0,
        )


class Judge:
    """A reward worker that gives sample j the reward j."""

    def __init__(self, calls: Calls):
        self.calls = calls
        self.compute_score_batch = SimpleNamespace(remote=self._score)

    async def _score(self, pixels) -> list[dict]:
        self.calls.score += 1
        return [{"reward_score": float(j)} for _, j in await pixels]


class Rank:
    """A rank of the Trainer that is always busy: one tile per fragment, from the end of the last one until now."""

    def __init__(self, rank: int, calls: Calls):
        def method(answer):
            def remote(*args, **options):
                calls.rank += 1
                return answer()

            return SimpleNamespace(remote=remote)

        self.busy_until = 0.0
        # what the others answer differs by times that the driver only adds up
        other = self._accumulated(rank)
        self.begin = method(self._begin)
        self.accumulate = method((lambda: self._accumulated(0)) if rank == 0 else (lambda: other))
        self.commit = method(_committed)

    def _begin(self) -> None:
        self.busy_until = time.time()

    def _accumulated(self, rank: int) -> dict:
        started, self.busy_until = self.busy_until, time.time()
        return {
            "fetch": 0.0,
            "tiles": self.busy_until - started,
            "started": started,
            "fetched": started,
            "ended": self.busy_until,
            "rank": rank,
            "rounds": 1,
            "too_large": 0,
            "tile_times": [(started, self.busy_until, 12)],
        }


def _committed() -> dict:
    now = time.time()
    times = {"commit_s": 1e-3, "commit_started": now - 1e-3, "commit_ended": now}
    return times | {"grad_norm": 1.0, "lr": 1e-3, "peak_memory_gb": 1.0}


@dataclass
class Load:
    """Sizes of the emulated cluster and of a step."""

    replicas: int = 512
    ranks: int = 512
    groups: int = 1024
    samples: int = 4
    fragment: int | None = None
    reward_workers: int = 64
    stale: float = 0.0
    calls: Calls = field(default_factory=Calls)

    def plan(self) -> RunPlan:
        digen = DigenConfig(
            placement="disaggregated",
            gap=GapConfig(enable=True, fragment_size=self.fragment),
            tsp=TspConfig(enable=True),
            tcss=TcssConfig(enable=True, max_stale_ratio=self.stale) if self.stale else TcssConfig(),
        )
        return RunPlan(
            digen=digen,
            prompts=self.groups,
            n=self.samples,
            logical_batches=1,
            prompts_per_batch=self.groups,
            epochs=1,
            transitions=TRANSITIONS,
            trainer_ranks=self.ranks,
            replicas=self.replicas,
            fragment_size=self.fragment or self.samples,
            one_shot=False,
            loss="flow_grpo",
            clip_low=1e-3,
            clip_high=1e-3,
            kl_beta=0.0,
            lora_rank=0,
            seed=0,
            transformer_parameters=1,
            transformer_bytes=4,
        )

    def groups_of_step(self, step: int) -> list[PromptGroup]:
        return [
            PromptGroup(
                uid=f"{step}-{i}", n=self.samples, prompt="p", negative_prompt="", ground_truth="", data_source="d"
            )
            for i in range(self.groups)
        ]


def run(load: Load, steps: int):
    """Play ``steps`` steps.

    Yields:
        of each step: ``cpu_s`` of the whole process, ``rss_mib``, ``tasks`` and ``steps_known`` left in the manager,
        and the calls that were made: ``generate``, ``score``, ``rank``.
    """
    plan, process, measured = load.plan(), psutil.Process(), Measured()
    pool = RolloutPool(
        replicas=[Replica(f"replica{i}", load.calls) for i in range(load.replicas)],
        replace=None,
        expected={"train": {}, "validation": {}},
        reward_restart=None,
        ledger=StaleLedger(load.groups, plan.max_stale_ratio),
    )
    judges = [Judge(load.calls) for _ in range(load.reward_workers)]
    with mock.patch.object(ray, "put", lambda value: value), mock.patch.object(ray, "get", _values):
        ranks = _Ranks([Rank(i, load.calls) for i in range(load.ranks)])
        manager = DiffusionRolloutManager(plan.digen, pool, judges, load.samples)
        try:
            for step in range(steps):
                groups = load.groups_of_step(step)
                ahead = load.groups_of_step(step + 1) if load.stale and step + 1 < steps else []
                started = time.process_time()
                _play(plan, ranks, manager, measured, step, groups, ahead)
                yield {
                    "cpu_s": time.process_time() - started,
                    "rss_mib": process.memory_info().rss / 2**20,
                    "tasks": len(manager._tasks),
                    "steps_known": len(manager._training.steps),
                    **load.calls.take(),
                }
        finally:
            manager.close()


class _Ranks(TrainerGroup):
    """Its references are values: every call is answered when it is made."""

    def when_done(self, refs, then):
        then()


def _values(refs, timeout=None):
    return list(refs)


def _play(plan: RunPlan, ranks: TrainerGroup, manager, measured: Measured, step: int, groups, ahead) -> None:
    """A step as ``trainer/trainer.py`` runs it, without Ray's part."""
    times, timing = StepTimes(started=time.time()), {}
    runner = TrainingStep(plan, ranks, manager, TileSize("unused", "load", plan.largest_tile), measured)
    outcome = runner.run(groups, version=step, training_step=step + 1, timing_raw=timing, ahead=ahead)
    with manager.publishing(step + 1):
        times.publishes.append((time.time(), time.time()))
    times.ended = time.time()
    timing |= {"step": times.ended - times.started}
    activity = manager.take_activity()
    trace = step_trace(plan, outcome, activity, times)
    learn(measured, plan, outcome, activity, times)
    step_metrics(outcome, plan, activity, timing, step=step + 1, epoch=0)
    bubble_metrics(trace)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    defaults = Load()
    for name in ("replicas", "ranks", "groups", "samples", "reward_workers"):
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=getattr(defaults, name))
    parser.add_argument("--fragment", type=int, help="samples per fragment; default: a group")
    parser.add_argument("--stale", type=float, default=0.0, help="max_stale_ratio of TCSS")
    parser.add_argument("--steps", type=int, default=200)
    options = vars(parser.parse_args())
    steps, load = options.pop("steps"), Load(**options)
    rows = []
    for row in run(load, steps):
        rows.append(row)
        if len(rows) in (1, 2, 5) or len(rows) % 20 == 0:
            print(
                f"step {len(rows):4d}  " + "  ".join(f"{name} {value:.4g}" for name, value in row.items()), flush=True
            )
    cpu = sorted(row["cpu_s"] for row in rows[1:] or rows)
    early = rows[min(len(rows) - 1, 9)]["rss_mib"]
    print(
        f"{load.replicas} replicas + {load.ranks} ranks, {load.groups * load.samples} samples: driver CPU per step "
        f"median {cpu[len(cpu) // 2]:.2f} s, largest {cpu[-1]:.2f} s; memory {early:.0f} MiB after step "
        f"{min(len(rows), 10)}, {rows[-1]['rss_mib']:.0f} MiB after step {len(rows)}"
    )


if __name__ == "__main__":
    main()
