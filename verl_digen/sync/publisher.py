"""Publishing: one version of the weights to many replicas, acknowledged by checksum (I8).

What must hold:
- A publish happens between trajectories: each replica takes it in turn with its fragments, nothing is aborted.
- Every replica acknowledges the version with the checksum of what it then holds; it must equal the source's, and the
  number of tensors too (> 0).
- When a call of a transfer fails or is late, every end of it is aborted, from threads that do not wait in it; a process
  that does not answer even that is not waited for.
- A training step that changed the weights changes the checksum; one that did not is reported by the caller.

The source of a publish is the Trainer's first rank, and the channel to the replicas is kept while these are the same.
A replica that starts later gets the weights from one that holds them, through a channel of their own.
"""

from __future__ import annotations

import itertools
import logging
import os
import time
from collections.abc import Callable
from typing import Any, Protocol

import ray

from verl_digen.config.deadlines import Deadline, Deadlines
from verl_digen.sync.calls import results
from verl_digen.sync.channel import open_store
from verl_digen.sync.ends import Place

logger = logging.getLogger(__name__)
logger.setLevel(os.getenv("VERL_LOGGING_LEVEL", "WARN"))


class Ranks(Protocol):
    """What a publish needs of the Trainer; see :class:`verl_digen.trainer.workgroup.TrainerGroup`."""

    def call(self, method: str, *args, **kwargs) -> list[ray.ObjectRef]: ...

    def first(self, method: str, *args, **kwargs) -> ray.ObjectRef: ...


class Replica(Protocol):
    """What a publish needs of a replica: its name and the process (one) that holds its weights."""

    name: str
    workers: list


class PublishError(RuntimeError):
    """A replica did not take the version that was published; the message names it and the numbers that differ."""


def check_acknowledgements(sent: dict[str, Any], acks: list[dict[str, Any]], replicas: list[str]) -> None:
    """Refuse a publish that did not arrive everywhere.

    Args:
        sent: version, checksum, tensors of the source.
        acks: the same with ``replica``, one for each name in ``replicas``.

    Raises:
        PublishError: no tensors, a missing replica, or another version, checksum or count.
    """
    if sent["tensors"] <= 0:
        raise PublishError(f"version {sent['version']}: {sent['tensors']} tensors were published")
    missing = sorted(set(replicas) - {ack["replica"] for ack in acks})
    if missing:
        raise PublishError(f"version {sent['version']} was not acknowledged by {', '.join(missing)}")
    for ack in acks:
        for key in ("version", "tensors", "checksum"):
            if ack[key] != sent[key]:
                raise PublishError(
                    f"version {sent['version']}: {ack['replica']} holds {key} {ack[key]}, {sent[key]} was sent"
                )


class WeightPublisher:
    """Transfers of weights, and which version they carry. Not safe for threads: its owner lets one in at a time.

    Args:
        ranks: the Trainer.
        colocated: replicas live in the training processes; weights are copied there.
        deadlines: of the run.
    """

    def __init__(self, ranks: Ranks, *, colocated: bool, deadlines: Deadlines):
        self.ranks, self.colocated, self.deadlines = ranks, colocated, deadlines
        self.version: int | None = None
        self.checksum: int | None = None
        self._averaged = False
        self._members: list[Any] = []
        self._channel = ""
        self._numbers = itertools.count(1)
        self._store, self._where = (None, {}) if colocated else open_store()

    def publish(self, version: int, replicas: list[Replica], averaged: bool = False) -> dict[str, float]:
        """The Trainer's weights to ``replicas`` as ``version``; returns when all hold them.

        Args:
            averaged: the EMA weights (for validation).

        Returns:
            ``sync/seconds``, ``sync/bytes`` and ``sync/changed`` (0 or 1: whether the checksum differs from the one
            before).

        Raises:
            PublishError: see :func:`check_acknowledgements`.
            TimeoutError: not done within the deadline.
            ray.exceptions.RayError: an end failed or is gone.
        """
        started = time.perf_counter()
        if self.colocated:
            refs = self.ranks.call("publish_weights", version, averaged)
            answers = results(refs, f"publishing version {version} in place", self.deadlines.publish)
            sent, acks = answers[0], [answer["ack"] for answer in answers]
        else:
            members = [replica.workers[0] for replica in replicas]
            if members != self._members:
                self._members, self._channel = members, f"publish-{next(self._numbers)}"
            try:
                sent, acks = self._transfer(version, self._trainer(version, averaged), replicas, self._channel)
            except BaseException:
                self._members = []  # the ends have left this channel
                raise
        check_acknowledgements(sent, acks, [replica.name for replica in replicas])
        changed = sent["checksum"] != self.checksum
        self.version, self.checksum, self._averaged = version, sent["checksum"], averaged
        return {
            "sync/seconds": time.perf_counter() - started,
            "sync/bytes": float(sent.get("sync/bytes", 0)),
            "sync/changed": float(changed),
        }

    def bring(self, targets: list[Replica], source: Replica | None) -> None:
        """The current version to replicas that lack it, from one that holds it, or from the Trainer if none does.

        Raises:
            As :meth:`publish`; also PublishError when the source holds other weights than were published.
        """
        version = self.version
        send = self._trainer(version, self._averaged) if source is None else self._replica(version, source)
        sent, acks = self._transfer(version, send, targets, f"bring-{next(self._numbers)}", source=source, keep=False)
        check_acknowledgements(sent, acks, [replica.name for replica in targets])
        if sent["checksum"] != self.checksum:
            who = "the Trainer" if source is None else source.name
            raise PublishError(f"version {version}: {who} sent checksum {sent['checksum']}, not {self.checksum}")

    # ---- one transfer --------------------------------------------------------------------------------------

    def _trainer(self, version: int, averaged: bool) -> Callable[[Place], list]:
        return lambda place: self.ranks.call("publish_weights", version, averaged, place)

    @staticmethod
    def _replica(version: int, source: Replica) -> Callable[[Place], list]:
        return lambda place: [source.workers[0].send_weights.remote(version, place)]

    def _transfer(
        self,
        version: int,
        send: Callable[[Place], list],
        targets: list[Replica],
        channel: str,
        source: Replica | None = None,
        keep: bool = True,
    ) -> tuple[dict, list[dict]]:
        """Submit both sides of a transfer and wait; returns what the source sent and the acknowledgements."""

        def place(rank: int) -> Place:
            master = {**self._where, "name": channel}
            return Place(master=master, rank=rank, world=1 + len(targets), keep=keep)

        workers = [target.workers[0] for target in targets]
        sends = send(place(0))
        takes = [worker.update_weights.remote(version, place(rank)) for rank, worker in enumerate(workers, start=1)]
        try:
            answers = self._answers(sends + takes, f"version {version} to {len(targets)} replicas")
        except BaseException:
            self._abort(workers if source is None else [source.workers[0], *workers], trainer=source is None)
            # so that their next calls do not wait behind these; who does not end is found dead by its ping
            ray.wait(sends + takes, num_returns=len(sends + takes), timeout=self.deadlines.ping.seconds)
            raise
        return answers[0], answers[len(sends) :]

    def _answers(self, refs: list, doing: str) -> list:
        """The answers, or the first error as soon as there is one."""
        deadline: Deadline = self.deadlines.publish
        end, pending = time.monotonic() + deadline.seconds, refs
        while pending:
            ready, pending = ray.wait(pending, num_returns=len(pending), timeout=1.0)
            ray.get(ready)
            if pending and time.monotonic() > end:
                raise TimeoutError(f"publishing {doing} took longer than {deadline}")
        return ray.get(refs)

    def _abort(self, workers: list, *, trainer: bool) -> None:
        """End the transfer on all its ends."""
        calls = [worker.abort_transfers.remote() for worker in workers]
        calls += [self.ranks.first("abort_transfers")] if trainer else []
        _, late = ray.wait(calls, num_returns=len(calls), timeout=self.deadlines.ping.seconds)
        if late:
            logger.warning("%d of %d ends of the weight channel do not answer", len(late), len(calls))
