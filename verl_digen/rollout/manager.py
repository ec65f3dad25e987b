"""The rollout manager: what ``main_ppo`` builds as agent-loop manager, and the trainer feeds with prompt groups.

Invariants
- Which groups belong to a step is announced before any of them is generated; they are cut into fragments then, and a
  fragment keeps its shape whatever happens (I1, I9).
- A fragment's samples count once: an attempt that failed, or whose version changed, is thrown away whole and
  generated again (I4).
- A group is handed on only when all its samples are generated and scored under one version (I4, I7).
- Nothing waits without a deadline; after ``max_retries`` the step fails with the sample, the place and the cause (I7).

What is generated next is decided in :mod:`~verl_digen.rollout.book`, who generates it in
:mod:`~verl_digen.rollout.dispatch`, who scores it in :mod:`~verl_digen.rollout.scoring`. All three run on one event
loop in a thread of the driver; the trainer waits on :meth:`next_group`.
"""

from __future__ import annotations

import asyncio
import math
import queue
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import ray

from verl_digen.config.digen import DigenConfig, parse_digen
from verl_digen.diffusion.noise import check_distinct
from verl_digen.rollout.book import GroupBook, Order
from verl_digen.rollout.dispatch import Dispatcher, value_of
from verl_digen.rollout.replica import DiffusersReplica
from verl_digen.rollout.requests import (
    VALIDATION,
    Activity,
    FragmentReport,
    GroupResult,
    PromptGroup,
    RolloutError,
)
from verl_digen.rollout.scoring import Scorer
from verl_digen.schedule.forecast import Pending, group_arrivals
from verl_digen.schedule.gap import plan_fragments
from verl_digen.schedule.profile import Profile
from verl_digen.schedule.tcss import StaleLedger
from verl_digen.schedule.work import Fragment as PlannedFragment


@dataclass
class RolloutPool:
    """What the manager needs of the trainer.

    Attributes:
        replicas: veRL replica handles.
        replace: replaces a process of a replica that is dead or stuck, and returns when the replica serves again; None
            when it cannot be (colocated). See :class:`verl_digen.rollout.fleet.Fleet`.
        expected: effective sampling parameters that every replica must report, by ``train`` and ``validation``.
        reward_restart: start a dead reward worker again and return its handle.
        ledger: how many versions are published, and which groups may be stale.
    """

    replicas: list[DiffusersReplica]
    replace: Callable[[DiffusersReplica, Any], Awaitable[None]] | None
    expected: dict[str, dict[str, Any]]
    reward_restart: Callable[[int], Any]
    ledger: StaleLedger


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
        self.pool, self.reward_workers = pool, list(reward_workers)
        self.pixels: dict[tuple[str, int], Any] = {}
        self._tasks: set[asyncio.Task] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run_loop, name="digen-rollout", daemon=True)
        self._thread.start()
        self.begin(digen, group_size, pool.ledger)

    def _run_loop(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()

    def _call(self, function: Callable, *args, **options) -> Any:
        """Run a function on the event loop and return what it returns."""

        async def call():
            return function(*args, **options)

        return asyncio.run_coroutine_threadsafe(call(), self._loop).result(self.digen.failure.generate_timeout_s)

    # ---- called by the trainer -----------------------------------------------------------------------------

    def begin(self, digen: DigenConfig, group_size: int, ledger: StaleLedger) -> None:
        """Begin a run with nothing announced; the replicas hold the version that the ledger says is published."""
        self.digen, self.group_size, self.pool.ledger = digen, group_size, ledger
        self._done: queue.Queue[tuple[GroupBook, int, GroupResult] | BaseException | None] = queue.Queue()
        self._training = GroupBook(ledger, same_noise=digen.sampling.same_noise)
        self._current: tuple[GroupBook, int] = self._training, ledger.published
        self._early: dict[tuple[GroupBook, int], deque[GroupResult]] = {}
        self._keep_pixels: set[tuple[str, int]] = set()
        self._scoring: dict[int, tuple[Order, float]] = {}
        self._activity = Activity()
        self._call(self._begin)

    def _begin(self) -> None:
        failure = self.digen.failure
        self._scorer = Scorer(self.reward_workers, self.pool.reward_restart, failure, self._spawn)
        self._dispatcher = Dispatcher(
            self.pool.replicas,
            version=self.pool.ledger.published,
            replace=self.pool.replace,
            delivered=self._delivered,
            check=self._check_report,
            failed=self._done.put,
            max_retries=failure.max_retries,
            timeout_s=failure.generate_timeout_s,
            spawn=self._spawn,
        )
        self._dispatcher.books = [self._training]

    def generate_sequences(
        self,
        groups: Sequence[PromptGroup],
        *,
        version: int,
        training_step: int,
        ahead: Sequence[PromptGroup] = (),
        keep_pixels: set[tuple[str, int]] = frozenset(),
        batch_size: int | None = None,
    ) -> None:
        """Announce the prompt groups of a step, or of a validation; returns at once.

        Args:
            version: the newest one. Groups of a validation are all generated under it, those of a training step under
                it or as the ledger allows.
            training_step: 1-based.
            ahead: groups of the next training step, of which the ledger may let some start before the next publish.
            keep_pixels: samples whose pixels the driver wants (grids); they appear in :attr:`pixels`.
            batch_size: samples of a fragment; None takes the options of training.
        """
        self._keep_pixels |= keep_pixels
        if groups[0].partition == VALIDATION:
            ledger = StaleLedger(len(groups), published=version)
            book = GroupBook(ledger, same_noise=False)
            self._call(self._announce, book, version, groups, training_step, batch_size)
        else:
            book = self._training
            steps = [(version, groups, training_step)] + ([(version + 1, ahead, training_step + 1)] if ahead else [])
            for step in steps:
                self._call(self._announce, book, *step, batch_size)
        self._current = book, version

    def next_group(self, timeout_s: float) -> GroupResult:
        """The next complete group of what was announced last, in the order of completion.

        Raises:
            RolloutError: a sample failed for good.
            StalenessError: the group is staler than allowed.
            TimeoutError: nothing was completed in time; says what is being waited for.
        """
        while (result := self.group_within(timeout_s, math.inf)) is None:
            continue  # somebody else was to be woken
        return result

    def group_within(self, timeout_s: float, wait_s: float) -> GroupResult | None:
        """As :meth:`next_group`; None when ``wait_s`` seconds passed before, or :meth:`wake` was called."""
        early, started = self._early.get(self._current), time.monotonic()
        result = early.popleft() if early else None
        while result is None:
            try:
                item = self._done.get(timeout=max(0.0, started + min(timeout_s, wait_s) - time.monotonic()))
            except queue.Empty:
                if wait_s < timeout_s:
                    return None
                raise TimeoutError(
                    f"no prompt group was completed for {timeout_s:g} s; waiting for {self.waiting_for()}"
                ) from None
            if item is None:
                return None
            if isinstance(item, BaseException):
                raise item
            book, step, group = item
            if (book, step) == self._current:
                result = group
            else:
                self._early.setdefault((book, step), deque()).append(group)
        book, step = self._current
        # not through the event loop: the entry of a complete group is written by nobody else
        result.staleness = book.ledger.consume(result.group.uid, step, result.version)
        result.taken = time.time()
        return result

    def wake(self) -> None:
        """Make a thread that is in :meth:`group_within` look at the world again."""
        self._done.put(None)

    def arrivals(self, uids: Iterable[str], profile: Profile, horizon_s: float) -> list[float]:
        """Predicted seconds until further ones of these groups are complete, as far as they lie within the horizon."""
        return self._call(self._arrivals, uids, profile, horizon_s)

    @contextmanager
    def publishing(self, version: int, *, averaged: bool = False):
        """Around a publish: within, no replica begins a fragment; afterwards all hold ``version``.

        Args:
            averaged: averaged weights for a validation; training groups wait for the publish after it.
        """
        self._call(self._dispatcher.before_publish)
        yield
        self._call(self._published, version, averaged)

    @property
    def in_flight(self) -> int:
        """Fragments that replicas have at this moment."""
        return self._dispatcher.outstanding

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
        book, step = self._current
        return self._call(book.waiting_for, step)

    def take_activity(self) -> Activity:
        """What was done since the last call, without validation."""
        activity, self._activity = self._activity, Activity()
        return activity

    # ---- on the event loop ---------------------------------------------------------------------------------

    def _announce(
        self, book: GroupBook, step: int, groups: Sequence[PromptGroup], training_step: int, size: int | None
    ) -> None:
        if (known := book.uids(step)) != [group.uid for group in groups]:
            if known:
                raise ValueError(f"step {step} was announced with groups {known[:3]} ..., not {groups[0].uid!r} ...")
            book.add_step(step, groups, self._cut(groups, step, size), training_step)
        self._dispatcher.books = [self._training] if book is self._training else [book, *self._dispatcher.books[-1:]]
        self._dispatcher.fill()

    def _cut(self, groups: Sequence[PromptGroup], step: int, size: int | None = None) -> Sequence[PlannedFragment]:
        """Fragments of a step: whole groups or parts of one with GAP, else equal pieces of the step."""
        uids, n = [group.uid for group in groups], groups[0].n
        if self.digen.gap.enable:
            return plan_fragments(uids, n, size or self.digen.gap.fragment_size or self.group_size, step=step)
        samples = [sample for group in groups for sample in group.samples]
        size = size or self.digen.sampling.batch_size or math.ceil(len(samples) / len(self.pool.replicas))
        starts = range(0, len(samples), size)
        return [PlannedFragment(i, step, 0, tuple(samples[at : at + size])) for i, at in enumerate(starts)]

    def _published(self, version: int, averaged: bool) -> None:
        ledger = self._training.ledger
        if version != ledger.published:
            ledger.publish(version)
            for step in [step for step in self._training.steps if step < version]:
                self._training.drop_step(step)
        self._dispatcher.books = [] if averaged else [self._training]
        self._dispatcher.after_publish(version)

    def _spawn(self, coroutine) -> None:
        """Run beside; a fault of the manager itself ends the step instead of a silent wait."""

        async def guarded() -> None:
            try:
                await coroutine
            except asyncio.CancelledError:
                raise
            except BaseException as error:  # noqa: BLE001 - handed to the trainer, which raises it
                self._done.put(error)

        task = self._loop.create_task(guarded())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _check_report(self, order: Order, report: FragmentReport) -> None:
        fragment = order.fragment
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

    def _delivered(self, book: GroupBook, order: Order, report: FragmentReport, pixels_ref) -> None:
        self._spawn(self._score(book, order, report, pixels_ref))

    def _arrivals(self, uids: Iterable[str], profile: Profile, horizon_s: float) -> list[float]:
        book, step = self._current
        now, steps = time.monotonic(), self.digen.sampling.num_steps

        def generate_s(load: int) -> float:
            return profile.generate_s(steps, load) + profile.encode_s

        generating, lanes = self._dispatcher.at_work(generate_s)
        scored = [(at + profile.score_s - now, order.fragment.samples) for order, at in self._scoring.values()]
        return group_arrivals(
            book.missing(uids),
            generating=generating,
            scoring=[Pending(*soon) for soon in scored],
            waiting=book.queue.upcoming(step),
            lanes=lanes,
            generate_s=generate_s,
            score_s=profile.score_s,
            horizon_s=horizon_s,
        )

    async def _score(self, book: GroupBook, order: Order, report: FragmentReport, pixels_ref) -> None:
        """Have a fragment scored; pixels go from the replica to the reward worker, not through the driver.

        It counts as generated when it is scored: its pixels are on the replica's node, and are lost with it.
        """
        self._scoring[id(order)] = order, time.monotonic()
        try:
            scores, scoring = await self._scorer.score(report, pixels_ref)
            wanted = [(i, s) for i, s in enumerate(report.samples) if s in self._keep_pixels]
            data = await value_of(pixels_ref) if wanted else None
        except ray.exceptions.ObjectLostError:
            self._dispatcher.again(book, order, f"{report.replica}: its pixels were lost with its node")
            return
        finally:
            del self._scoring[id(order)]
        if not book.queue.finished(order.claim):  # its group starts over
            self._dispatcher.fill()
            return
        if not order.fragment.validate:
            self._activity.reports.append(report)
            self._activity.scorings.append(scoring)
        for i, sample in wanted:
            self._keep_pixels.discard(sample)
            self.pixels[sample] = data.batch["pixels"][i].numpy()
        for group in book.take_in(order, report, scores):
            self._done.put((book, order.claim.step, group))
