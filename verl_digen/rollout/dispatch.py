"""Replicas pull: each takes the next fragment when it has room, so a slow one simply takes less.

Invariants
- A replica is asked for a fragment only under the version that it holds when the call reaches it (I4). Calls of a
  replica are handled in the order they are made, so a publish that is submitted after a fragment changes nothing in it.
- Before a publish is submitted, all fragments of groups that were begun are with a replica; until it has ended, nobody
  begins another one.
- An attempt that failed is thrown away whole and generated again, by whoever is free (I7).

Everything here runs on the manager's event loop. A replica that becomes free costs one claim, however many there are.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

import ray

from verl_digen.config.deadlines import QUEUE_DEPTH
from verl_digen.rollout.book import GroupBook, Order
from verl_digen.rollout.requests import FragmentReport, RolloutError, named
from verl_digen.schedule.forecast import Pending

logger = logging.getLogger(__name__)
logger.setLevel(os.getenv("VERL_LOGGING_LEVEL", "WARN"))


class Replica(Protocol):
    """What dispatching needs of a replica: its name and the process (one) that generates."""

    name: str
    workers: list


class Seat:
    """A replica as the dispatcher sees it.

    Attributes:
        version: of the weights that the next fragment submitted to it will find.
        outstanding: fragments that it has.
        orders: those fragments, in the order in which it will generate them.
        since: when it began the first of them (monotonic clock).
        serving: it may be given fragments.
    """

    def __init__(self, replica: Replica, version: int) -> None:
        self.replica = replica
        self.version = version
        self.outstanding = 0
        self.orders: list[Order] = []
        self.since = 0.0
        self.serving = True


class Dispatcher:
    """Gives planned fragments to replicas and their reports to ``delivered``.

    Args:
        replicas: all of them.
        version: that they hold.
        replace: replaces a dead or stuck process of a replica, and returns when it holds weights again; None when that
            is impossible.
        delivered: takes (book, order, report, reference of the pixels).
        check: raises when a report is not what was asked for.
        failed: takes the error that ends the step.
        max_retries, timeout_s: of a fragment.
        spawn: runs a coroutine beside this one.
    """

    def __init__(
        self,
        replicas: list[Replica],
        *,
        version: int,
        replace: Callable[[Replica, Any], Awaitable[None]] | None,
        delivered: Callable[[GroupBook, Order, FragmentReport, Any], None],
        check: Callable[[Order, FragmentReport], None],
        failed: Callable[[BaseException], None],
        max_retries: int,
        timeout_s: float,
        spawn: Callable[[Any], None],
    ) -> None:
        self.seats = [Seat(replica, version) for replica in replicas]
        self.books: list[GroupBook] = []
        self.max_retries, self.timeout_s = max_retries, timeout_s
        self._replace, self._delivered, self._check = replace, delivered, check
        self._fail, self._spawn = failed, spawn
        self._publishing = False
        self._with = Counter((version, 0) for _ in replicas)  # serving replicas by (version, outstanding)

    @property
    def outstanding(self) -> int:
        """Fragments that replicas have at this moment."""
        return sum(seat.outstanding for seat in self.seats)

    # ---- pulling -------------------------------------------------------------------------------------------

    def fill(self) -> None:
        """Let every replica pull what it may: those that have least first."""
        for room in range(QUEUE_DEPTH):
            for seat in self.seats:
                if seat.outstanding == room:
                    self._pull(seat)

    def _pull(self, seat: Seat) -> None:
        """Give a replica one fragment, if it may have one and there is one."""
        if not seat.serving or self._publishing or seat.outstanding >= QUEUE_DEPTH:
            return
        for book in self.books:
            if seat.outstanding and not self._may_take_ahead(seat, book):
                continue
            order = book.claim(seat.version)
            if order is not None:
                self._start(seat, book, order)
                return

    def _may_take_ahead(self, seat: Seat, book: GroupBook) -> bool:
        """A busy replica takes a fragment ahead only while no other of its version has less and enough are left for
        all, so that the last fragments go to whoever is free first."""
        version = seat.version
        if any(self._with[version, less] for less in range(seat.outstanding)):
            return False
        serving = sum(count for (held, _), count in self._with.items() if held == version)
        return book.queue.available(version) >= serving

    def at_work(self, generate_s: Callable[[int], float]) -> tuple[list[Pending], list[tuple[float, float]]]:
        """What replicas have, with the seconds it will take, and (seconds until it is free, speed) of all that serve.

        Args:
            generate_s: time of a fragment of some samples, seconds.
        """
        now, pending, lanes = time.monotonic(), [], []
        for seat in self.seats:
            left = min(0.0, seat.since - now)
            for order in seat.orders:
                left = max(0.0, left + generate_s(len(order.fragment.samples)))
                pending.append(Pending(left, order.fragment.samples))
            if seat.serving:
                lanes.append((max(0.0, left), 1.0))
        return pending, lanes

    def _start(self, seat: Seat, book: GroupBook, order: Order) -> None:
        if not seat.orders:
            seat.since = time.monotonic()
        seat.orders.append(order)
        self._count(seat, outstanding=seat.outstanding + 1)
        worker = seat.replica.workers[0]
        call = worker.generate.options(num_returns=2).remote(order.fragment)
        # a fragment that waits in the replica's queue has the time of those before it as well
        self._spawn(self._generate(seat, book, order, worker, call, self.timeout_s * seat.outstanding))

    async def _generate(self, seat: Seat, book: GroupBook, order: Order, worker, call, timeout_s: float) -> None:
        report_ref, pixels_ref = call
        try:
            report = await asyncio.wait_for(value_of(report_ref), timeout_s)
            self._check(order, report)
        except Exception as error:  # noqa: BLE001 - counted, and raised when the retries are used up
            self._ended(seat, order)
            await self._failed(seat, worker, book, order, error)
            return
        self._ended(seat, order)
        self._delivered(book, order, report, pixels_ref)
        for _ in range(QUEUE_DEPTH):
            self._pull(seat)

    def _ended(self, seat: Seat, order: Order) -> None:
        seat.orders.remove(order)
        seat.since = time.monotonic()
        self._count(seat, outstanding=seat.outstanding - 1)

    def _count(self, seat: Seat, **changes) -> None:
        """Change a seat and keep the counts."""
        if seat.serving:
            self._with[seat.version, seat.outstanding] -= 1
        for name, value in changes.items():
            setattr(seat, name, value)
        if seat.serving:
            self._with[seat.version, seat.outstanding] += 1

    # ---- publishing ----------------------------------------------------------------------------------------

    def before_publish(self) -> None:
        """Until :meth:`after_publish` nobody begins a fragment; those of begun groups are handed out now (I4)."""
        self._publishing = True
        for version in {seat.version for seat in self.seats}:
            seats = [seat for seat in self.seats if seat.serving and seat.version == version]
            for book in self.books:
                while seats and (order := book.claim(version, start_groups=False)) is not None:
                    self._start(min(seats, key=lambda seat: seat.outstanding), book, order)

    def after_publish(self, version: int) -> None:
        """Every replica holds ``version``, or will before it handles the next call."""
        for seat in self.seats:
            self._count(seat, version=version)
        self._with = +self._with  # versions that nobody holds any more
        self._publishing = False
        self._restart_orphans()
        self.fill()

    def _restart_orphans(self) -> None:
        held = {seat.version for seat in self.seats}
        for book in self.books:
            book.restart_orphans(held)

    # ---- failures ------------------------------------------------------------------------------------------

    async def _failed(self, seat: Seat, worker, book: GroupBook, order: Order, error: Exception) -> None:
        """Have the fragment generated again, replace the replica if it is gone or stuck, or end the step."""
        gone = isinstance(error, ray.exceptions.RayActorError | asyncio.TimeoutError)
        what = "timed out" if isinstance(error, asyncio.TimeoutError) else f"{type(error).__name__}: {short(error)}"
        if gone and self._replace is None:
            self.again(book, order, f"{seat.replica.name}: {what}", final=True)
            return
        if gone and seat.serving and seat.replica.workers[0] is worker:  # else another fragment of it has seen to that
            self._count(seat, serving=False)
            self._spawn(self._replaced(seat, worker))  # which may take long: the others have its fragment meanwhile
        self.again(book, order, f"{seat.replica.name}: {what}")

    def again(self, book: GroupBook, order: Order, what: str, *, final: bool = False) -> None:
        """Have a fragment generated again, or end the step when its attempts are used up (or this one is ``final``)."""
        fragment, failures = order.fragment, book.failed(order, what)
        logger.warning("fragment %s [%s] failed: %s", fragment.fragment_id, named(fragment.samples), what)
        if final or len(failures) > self.max_retries:
            self._fail(
                RolloutError(
                    f"fragment {fragment.fragment_id} with samples {named(fragment.samples)} failed {len(failures)} "
                    f"times (trainer.v1.digen.failure.max_retries={self.max_retries}): {'; '.join(failures)}"
                )
            )
            return
        book.queue.give_back(order.claim)
        self._restart_orphans()
        self.fill()

    async def _replaced(self, seat: Seat, worker) -> None:
        """Let the seat serve again when its replica has another process than ``worker``."""
        await self._replace(seat.replica, worker)
        self._count(seat, serving=True)
        self.fill()


async def value_of(ref) -> Any:
    """Await a Ray object reference (``asyncio.wait_for`` wants a coroutine)."""
    return await ref


def short(error: Exception) -> str:
    """The last informative line of a Ray error."""
    cause = getattr(error, "cause", None) or error
    lines = [line for line in str(cause).splitlines() if line.strip()]
    return lines[-1].strip() if lines else type(cause).__name__
