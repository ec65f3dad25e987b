"""Publishing: one version of the weights from the Trainer to every replica, acknowledged by checksum (I8).

What must hold:
- a publish happens between trajectories: each replica takes it in turn with its fragments, nothing is aborted;
- every replica acknowledges the version with the checksum of what it then holds; it must equal the Trainer's, and the
  number of tensors too (> 0);
- a training step that changed the weights changes the checksum; one that did not is reported by the caller.
"""

from __future__ import annotations

import logging
import os
import time
from typing import Any, Protocol

import ray
from verl.checkpoint_engine.base import CheckpointEngineManager
from verl.utils.ray_utils import auto_await

from verl_digen.config.deadlines import Deadlines
from verl_digen.sync.calls import results

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
        sent: version, checksum, tensors of the Trainer.
        acks: the same with ``replica``, one for each name in ``replicas``.

    Raises:
        PublishError: no tensors, a missing replica, or another version, checksum or count.
    """
    if sent["tensors"] <= 0:
        raise PublishError(f"version {sent['version']}: the Trainer published {sent['tensors']} tensors")
    missing = sorted(set(replicas) - {ack["replica"] for ack in acks})
    if missing:
        raise PublishError(f"version {sent['version']} was not acknowledged by {', '.join(missing)}")
    for ack in acks:
        for key in ("version", "tensors", "checksum"):
            if ack[key] != sent[key]:
                raise PublishError(
                    f"version {sent['version']}: {ack['replica']} holds {key} {ack[key]}, the Trainer sent {sent[key]}"
                )


class WeightPublisher(CheckpointEngineManager):
    """veRL's checkpoint manager with a persistent channel and acknowledgements.

    Args:
        config: ``rollout.checkpoint_engine``.
        ranks: the Trainer.
        replicas: all replicas.
        colocated: replicas live in the training processes; weights are copied there.
        deadlines: of the run.
    """

    def __init__(
        self,
        config,
        ranks: Ranks,
        replicas: list[Replica],
        *,
        colocated: bool,
        deadlines: Deadlines,
    ):
        super().__init__(config, ranks, replicas)
        self.ranks = ranks
        self.colocated = colocated
        self.deadlines = deadlines
        self.version: int | None = None
        self.checksum: int | None = None
        self._averaged = False
        self._connected: list[Any] = []

    def connect(self) -> None:
        """(Re)build the channel for the replicas as they are now."""
        workers = [replica.workers[0] for replica in self.replicas]
        closing = [self.ranks.first("execute_checkpoint_engine", "close")]
        closing += [w.execute_checkpoint_engine.remote("close") for w in workers]
        results(closing, "closing the weight channel", self.deadlines.connect)
        opening = [self.ranks.first("execute_checkpoint_engine", "prepare")]
        (where,) = results(opening, "opening the weight channel", self.deadlines.connect)
        place = {"world_size": 1 + len(workers), "master": where}
        calls = [self.ranks.first("execute_checkpoint_engine", "init_process_group", rank=0, **place)]
        calls += [
            worker.execute_checkpoint_engine.remote("init_process_group", rank=rank, **place)
            for rank, worker in enumerate(workers, start=1)
        ]
        results(calls, f"connecting {len(workers)} replicas to the weight channel", self.deadlines.connect)
        self._connected = workers

    @auto_await
    async def update_weights(self, global_steps: int | None = None, averaged: bool = False) -> dict[str, float]:
        """Publish version ``global_steps`` and wait until every replica holds it.

        Args:
            averaged: publish the EMA weights (for validation).

        Returns:
            ``sync/seconds``, ``sync/bytes`` and ``sync/changed`` (0 or 1: whether the checksum differs from the one
            before).

        Raises:
            PublishError: see :func:`check_acknowledgements`.
            TimeoutError: not done within the deadline.
        """
        started = time.perf_counter()
        workers = [replica.workers[0] for replica in self.replicas]
        if not self.colocated and workers != self._connected:
            self.connect()
        sends = self.ranks.call("publish_weights", global_steps, averaged)
        if self.colocated:
            answers = results(sends, f"publishing version {global_steps} in place", self.deadlines.publish)
            acks = [answer["ack"] for answer in answers]
        else:
            takes = [w.update_weights.remote(global_steps) for w in workers]
            doing = f"publishing version {global_steps} to {len(workers)} replicas"
            answers = results(sends + takes, doing, self.deadlines.publish)
            acks = answers[len(sends) :]
        sent = answers[0]
        check_acknowledgements(sent, acks, [replica.name for replica in self.replicas])
        changed = sent["checksum"] != self.checksum
        self.version, self.checksum, self._averaged = global_steps, sent["checksum"], averaged
        return {
            "sync/seconds": time.perf_counter() - started,
            "sync/bytes": float(sent.get("sync/bytes", 0)),
            "sync/changed": float(changed),
        }

    def disconnect(self) -> None:
        """Close the Trainer's end after a failed publish, so that replicas which still receive get an error at once."""
        closing = [self.ranks.first("execute_checkpoint_engine", "close")]
        results(closing, "closing the weight channel", self.deadlines.connect)
        self._connected = []

    def republish(self) -> None:
        """Give the current version again, to replicas that were started anew."""
        self.update_weights(self.version, averaged=self._averaged)
