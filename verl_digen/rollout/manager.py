"""The rollout manager: what ``main_ppo`` builds as agent-loop manager, and the trainer feeds with prompt groups.

Invariants
- Replicas pull: each takes the next fragment when it has room, so a slow one simply takes less.
- A fragment's samples count once: an attempt that failed, or whose version changed, is thrown away whole and
  generated again, with the same bits (I1, I4).
- A group is handed on only when all its samples are generated and scored under one version (I4, I7).
- Nothing waits without a deadline; after ``max_retries`` the step fails with the sample, the place and the cause (I7).

All work runs on one event loop in a thread of the driver; the trainer waits on :meth:`next_group`.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import ray

from verl_digen.config.deadlines import QUEUE_DEPTH
from verl_digen.config.digen import DigenConfig, parse_digen
from verl_digen.diffusion.noise import check_distinct
from verl_digen.rollout.replica import DiffusersReplica
from verl_digen.rollout.requests import Fragment, FragmentReport, PromptGroup, SampleResult
from verl_digen.schedule.assemble import GroupAssembler, Outcome
from verl_digen.schedule.gap import plan_fragments

logger = logging.getLogger(__name__)
logger.setLevel(os.getenv("VERL_LOGGING_LEVEL", "WARN"))


class RolloutError(RuntimeError):
    """Samples could not be generated or scored; the message names them, the place and the cause."""


@dataclass
class GroupResult:
    """A complete group: all samples generated and scored under one version.

    Attributes:
        completed, taken: seconds since the epoch at which its last sample was scored, and at which the trainer took it.
    """

    group: PromptGroup
    samples: list[SampleResult]
    version: int
    completed: float
    taken: float = 0.0


@dataclass(frozen=True)
class Scoring:
    """A fragment at a reward worker; seconds since the epoch."""

    fragment_id: int
    worker: int
    samples: int
    started: float
    ended: float


@dataclass
class Activity:
    """What replicas and reward workers did for training samples since the last report."""

    reports: list[FragmentReport] = field(default_factory=list)
    scorings: list[Scoring] = field(default_factory=list)


@dataclass
class RolloutPool:
    """What the manager needs of the trainer.

    Attributes:
        replicas: veRL replica handles.
        restart: start a dead replica again and give it the current weights; None when it cannot be (colocated).
        expected: effective sampling parameters that every replica must report, by ``train`` and ``validation``.
        reward_restart: start a dead reward worker again and return its handle.
    """

    replicas: list[DiffusersReplica]
    restart: Callable[[DiffusersReplica], None] | None
    expected: dict[str, dict[str, Any]]
    reward_restart: Callable[[int], Any]


@dataclass
class _Attempt:
    fragment: Fragment
    failures: list[str] = field(default_factory=list)


class DiffusionRolloutManager:
    """See the module's docstring. Build it with :meth:`create`."""

    @classmethod
    def create(cls, config, llm_client: RolloutPool, teacher_client=None, reward_loop_worker_handles=None):
        """What ``main_ppo`` calls; ``llm_client`` is what the trainer's ``get_llm_client`` returns."""
        if teacher_client is not None:
            raise ValueError("distillation teachers are not read by diffusion runs; set distillation.enabled=false")
        group_size = config.actor_rollout_ref.rollout.n
        return cls(parse_digen(config.trainer.v1.digen), llm_client, reward_loop_worker_handles, group_size)

    def __init__(self, digen: DigenConfig, pool: RolloutPool, reward_workers: list, group_size: int):
        self.digen, self.pool, self.group_size = digen, pool, group_size
        self.reward_workers = list(reward_workers)
        self._pending: deque[_Attempt] = deque()
        self._groups: dict[str, PromptGroup] = {}
        self._results: dict[str, dict[int, SampleResult]] = {}
        self._assembler = GroupAssembler()
        self._done: queue.Queue[GroupResult | BaseException] = queue.Queue()
        self._ids = itertools.count(1)
        self._reward_turn = itertools.count()
        self._activity = Activity()
        self._keep_pixels: set[tuple[str, int]] = set()
        self.pixels: dict[tuple[str, int], Any] = {}
        self._loop = asyncio.new_event_loop()
        self._work = asyncio.Condition()
        self._restarting = {replica.name: asyncio.Lock() for replica in pool.replicas}
        self._reward_restarting = [asyncio.Lock() for _ in self.reward_workers]
        self._outstanding = dict.fromkeys(self._restarting, 0)
        self._thread = threading.Thread(target=self._run_loop, name="digen-rollout", daemon=True)
        self._thread.start()
        for replica in pool.replicas:
            for _ in range(QUEUE_DEPTH):
                asyncio.run_coroutine_threadsafe(self._guard(self._serve(replica)), self._loop)

    def _run_loop(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()

    # ---- called by the trainer -----------------------------------------------------------------------------

    def generate_sequences(
        self,
        groups: list[PromptGroup],
        *,
        version: int,
        training_step: int,
        keep_pixels: set[tuple[str, int]] = frozenset(),
    ) -> None:
        """Queue prompt groups; returns at once.

        Args:
            version: version that every sample must be generated under.
            training_step: 1-based.
            keep_pixels: samples whose pixels the driver wants (grids); they appear in :attr:`pixels`.
        """
        by_uid = {group.uid: group for group in groups}
        attempts = [
            _Attempt(
                Fragment(
                    fragment_id=next(self._ids),
                    groups={uid: by_uid[uid] for uid, _ in chunk},
                    samples=chunk,
                    version=version,
                    training_step=training_step,
                )
            )
            for chunk in self._cut(groups)
        ]
        queued = asyncio.run_coroutine_threadsafe(self._enqueue(by_uid, attempts, set(keep_pixels)), self._loop)
        queued.result(timeout=self.digen.failure.generate_timeout_s)

    def next_group(self, timeout_s: float) -> GroupResult:
        """The next complete group, in the order of completion.

        Raises:
            RolloutError: a sample failed for good.
            TimeoutError: nothing was completed in time; says what is being waited for.
        """
        try:
            item = self._done.get(timeout=timeout_s)
        except queue.Empty:
            raise TimeoutError(
                f"no prompt group was completed for {timeout_s:g} s; waiting for {self.waiting_for()}"
            ) from None
        if isinstance(item, BaseException):
            raise item
        item.taken = time.time()
        return item

    @property
    def in_flight(self) -> int:
        """Fragments that replicas have at this moment."""
        return sum(self._outstanding.values())

    def close(self) -> None:
        """Stop pulling and end the thread; fragments in flight are left to their replicas."""

        async def cancel() -> None:
            # again and again: a cancellation that meets a result in asyncio.wait_for is lost
            while tasks := asyncio.all_tasks() - {asyncio.current_task()}:
                for task in tasks:
                    task.cancel()
                await asyncio.wait(tasks, timeout=0.5)

        asyncio.run_coroutine_threadsafe(cancel(), self._loop).result(timeout=30)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=30)

    def waiting_for(self) -> str:
        """Samples that are not there yet, in words."""
        missing = {u: g.n - len(self._results.get(u, {})) for u, g in self._groups.items()}
        missing = {u: n for u, n in missing.items() if n}
        sample = ", ".join(f"{u} ({n} of {self._groups[u].n})" for u, n in list(missing.items())[:4])
        return (
            f"{sum(missing.values())} samples of {len(missing)} groups: {sample}; {len(self._pending)} fragments queued"
        )

    def take_activity(self) -> Activity:
        """What was done since the last call, without validation."""
        activity, self._activity = self._activity, Activity()
        return activity

    # ---- on the event loop ---------------------------------------------------------------------------------

    def _cut(self, groups: list[PromptGroup]) -> list[tuple[tuple[str, int], ...]]:
        """Samples of each fragment: whole groups or parts of one with GAP, else equal pieces of the step."""
        if self.digen.gap.enable:
            size = self.digen.gap.fragment_size or self.group_size
            return [fragment.samples for fragment in plan_fragments([g.uid for g in groups], groups[0].n, size)]
        samples = [sample for group in groups for sample in group.samples]
        size = self.digen.sampling.batch_size or math.ceil(len(samples) / len(self.pool.replicas))
        return [tuple(samples[start : start + size]) for start in range(0, len(samples), size)]

    async def _enqueue(self, groups: dict[str, PromptGroup], attempts: list[_Attempt], keep: set) -> None:
        async with self._work:
            if not self._groups or set(groups) & set(self._groups):
                # nothing is expected any more, or a step that was broken off begins anew
                self._assembler = GroupAssembler()
                self._groups, self._results = {}, {}
                self._pending.clear()
            n = next(iter(groups.values())).n
            self._assembler.add_step(plan_fragments(list(groups), n, n))
            self._groups |= groups
            self._keep_pixels = keep
            self._pending.extend(attempts)
            self._work.notify_all()

    async def _guard(self, coroutine) -> None:
        """A fault of the manager itself ends the step instead of a silent wait."""
        try:
            await coroutine
        except asyncio.CancelledError:
            raise
        except BaseException as error:  # noqa: BLE001 - handed to the trainer, which raises it
            self._done.put(error)

    async def _serve(self, replica: DiffusersReplica) -> None:
        """One of the replica's places: pull, generate, hand on, for ever."""
        while True:
            async with self._work:
                await self._work.wait_for(lambda: self._may_pull(replica.name))
                attempt = self._pending.popleft()
                self._outstanding[replica.name] += 1
                self._work.notify_all()  # who may pull depends on what the others have
            worker = replica.workers[0]
            # a fragment that waits in the replica's queue has the time of the one before it as well
            timeout_s = self.digen.failure.generate_timeout_s * self._outstanding[replica.name]
            try:
                report_ref, pixels_ref = worker.generate.options(num_returns=2).remote(attempt.fragment)
                report = await asyncio.wait_for(_value(report_ref), timeout_s)
                self._check_report(attempt.fragment, report)
            except Exception as error:  # noqa: BLE001 - counted, and raised when the retries are used up
                await self._done_with(replica.name)
                await self._failed(replica, worker, attempt, error)
                continue
            await self._done_with(replica.name)
            if not attempt.fragment.validate:
                self._activity.reports.append(report)
            asyncio.ensure_future(self._guard(self._score(attempt, report, pixels_ref)))

    def _may_pull(self, name: str) -> bool:
        """A replica that has nothing pulls what there is. One that is busy takes a fragment ahead only while no other
        has less and enough are left for all, so that the last fragments go to whoever is free first."""
        if not self._pending or self._restarting[name].locked():
            return False
        own = self._outstanding[name]
        living = [count for other, count in self._outstanding.items() if not self._restarting[other].locked()]
        return own == 0 or (own <= min(living) and len(self._pending) >= len(living))

    async def _done_with(self, name: str) -> None:
        async with self._work:
            self._outstanding[name] -= 1
            self._work.notify_all()

    async def _failed(self, replica: DiffusersReplica, worker, attempt: _Attempt, error: Exception) -> None:
        """Put the fragment back, restart the replica if it is gone or stuck, or end the step."""
        fragment = attempt.fragment
        gone = isinstance(error, ray.exceptions.RayActorError | asyncio.TimeoutError)
        what = "timed out" if isinstance(error, asyncio.TimeoutError) else f"{type(error).__name__}: {_short(error)}"
        attempt.failures.append(f"{replica.name}: {what}")
        names = ", ".join(f"({u}, {j})" for u, j in fragment.samples[:4])
        logger.warning("fragment %s [%s ...] failed: %s", fragment.fragment_id, names, attempt.failures[-1])
        if fragment.attempt >= self.digen.failure.max_retries or (gone and self.pool.restart is None):
            self._done.put(
                RolloutError(
                    f"fragment {fragment.fragment_id} with samples {names}{' ...' if len(fragment.samples) > 4 else ''}"
                    f" failed {len(attempt.failures)} times (trainer.v1.digen.failure.max_retries="
                    f"{self.digen.failure.max_retries}): {'; '.join(attempt.failures)}"
                )
            )
            return
        if gone:
            async with self._restarting[replica.name]:
                if replica.workers[0] is worker:  # else the replica's other place has seen to it
                    await self._loop.run_in_executor(None, self.pool.restart, replica)
        again = Fragment(**{**fragment.__dict__, "attempt": fragment.attempt + 1})
        async with self._work:
            self._pending.appendleft(_Attempt(again, attempt.failures))
            self._work.notify_all()

    def _check_report(self, fragment: Fragment, report: FragmentReport) -> None:
        if report.version != fragment.version:
            raise RolloutError(f"generated under version {report.version} instead of {fragment.version}")
        expected = self.pool.expected["validation" if fragment.validate else "train"]
        differing = {k: (v, report.effective.get(k)) for k, v in expected.items() if report.effective.get(k) != v}
        if differing:
            raise RolloutError(
                "the replica used other sampling parameters than asked (asked, used): "
                + "; ".join(f"{k}: {a} -> {b}" for k, (a, b) in differing.items())
            )
        check_distinct(report.noise_hashes, report.samples, self.digen.sampling.same_noise and not fragment.validate)

    async def _score(self, attempt: _Attempt, report: FragmentReport, pixels_ref) -> None:
        """Score a fragment on a reward worker; pixels go there from the replica, not through the driver."""
        index = next(self._reward_turn) % len(self.reward_workers)
        failures: list[str] = []
        while True:
            worker = self.reward_workers[index]
            started = time.time()
            try:
                scores = await asyncio.wait_for(
                    _value(worker.compute_score_batch.remote(pixels_ref)), self.digen.failure.reward_timeout_s
                )
                break
            except Exception as error:  # noqa: BLE001 - counted, and raised when the retries are used up
                gone = isinstance(error, ray.exceptions.RayActorError | asyncio.TimeoutError)
                what = "timed out" if isinstance(error, asyncio.TimeoutError) else _short(error)
                failures.append(f"reward worker {index}: {what}")
                logger.warning("scoring fragment %s failed: %s", report.fragment_id, failures[-1])
                if len(failures) > self.digen.failure.max_retries:
                    names = ", ".join(f"({u}, {j})" for u, j in report.samples[:4])
                    self._done.put(
                        RolloutError(
                            f"scoring samples {names} of fragment {report.fragment_id} failed {len(failures)} times "
                            f"(trainer.v1.digen.failure.max_retries={self.digen.failure.max_retries}): "
                            + "; ".join(failures)
                        )
                    )
                    return
                if gone:
                    async with self._reward_restarting[index]:
                        if self.reward_workers[index] is worker:  # else another fragment has seen to it
                            restart = self._loop.run_in_executor(None, self.pool.reward_restart, index)
                            self.reward_workers[index] = await restart
        if not attempt.fragment.validate:
            self._activity.scorings.append(
                Scoring(report.fragment_id, index, len(report.samples), started, time.time())
            )
        await self._keep(report, pixels_ref)
        self._assemble(attempt.fragment, report, scores)

    async def _keep(self, report: FragmentReport, pixels_ref) -> None:
        wanted = [(i, s) for i, s in enumerate(report.samples) if s in self._keep_pixels]
        if wanted:
            data = await _value(pixels_ref)
            for i, sample in wanted:
                self.pixels[sample] = data.batch["pixels"][i].numpy()

    def _assemble(self, fragment: Fragment, report: FragmentReport, scores: list[dict]) -> None:
        if len(scores) != len(report.samples):
            raise RolloutError(f"{len(scores)} rewards came back for {len(report.samples)} samples")
        for i, ((uid, j), score) in enumerate(zip(report.samples, scores, strict=True)):
            reward = score["reward_score"]
            if not isinstance(reward, int | float) or not math.isfinite(reward):
                raise RolloutError(f"reward of sample ({uid}, {j}) is {reward!r}; a reward must be a finite number")
            outcome, _ = self._assembler.scored(uid, j, report.version, reward=float(reward))
            if outcome not in (Outcome.ACCEPTED, Outcome.COMPLETE):
                logger.warning("sample (%s, %s) of fragment %s is %s", uid, j, report.fragment_id, outcome.value)
                continue
            self._results.setdefault(uid, {})[j] = SampleResult(
                uid=uid,
                j=j,
                reward=float(reward),
                extra=dict(score.get("reward_extra_info", {})),
                version=report.version,
                replica=report.replica,
                transitions=report.transitions[i],
                noise_hash=report.noise_hashes[i],
            )
            if outcome is Outcome.COMPLETE:
                self._hand_on(uid, fragment.validate)

    def _hand_on(self, uid: str, validate: bool) -> None:
        """Give a complete group to the trainer."""
        group, got = self._groups.pop(uid), self._results.pop(uid)
        hashes, samples = zip(*[(s.noise_hash, (uid, j)) for j, s in got.items()], strict=True)
        check_distinct(list(hashes), list(samples), self.digen.sampling.same_noise and not validate)
        results = [got[j] for j in range(group.n)]
        self._done.put(GroupResult(group, results, results[0].version, time.time()))


async def _value(ref) -> Any:
    """Await a Ray object reference (``asyncio.wait_for`` wants a coroutine)."""
    return await ref


def _short(error: Exception) -> str:
    """The last informative line of a Ray error."""
    cause = getattr(error, "cause", None) or error
    lines = [line for line in str(cause).splitlines() if line.strip()]
    return lines[-1].strip() if lines else type(cause).__name__
