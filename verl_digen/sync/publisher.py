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
from verl.single_controller.ray import RayWorkerGroup
from verl.utils.ray_utils import auto_await

logger = logging.getLogger(__name__)
logger.setLevel(os.getenv("VERL_LOGGING_LEVEL", "WARN"))


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
        actor_wg: the training worker group.
        replicas: all replicas.
        colocated: replicas live in the training processes; weights are copied there.
        timeout_s: deadline of a publish.
    """

    def __init__(
        self,
        config,
        actor_wg: RayWorkerGroup,
        replicas: list[Replica],
        *,
        colocated: bool,
        timeout_s: float,
    ):
        super().__init__(config, actor_wg, replicas)
        self.colocated = colocated
        self.timeout_s = timeout_s
        self.version: int | None = None
        self.checksum: int | None = None
        self._averaged = False
        self._connected: list[Any] = []

    def connect(self) -> None:
        """(Re)build the channel for the replicas as they are now."""
        workers = [replica.workers[0] for replica in self.replicas]
        actors = self.actor_wg.workers
        calls = [w.execute_checkpoint_engine.remote("close") for w in actors + workers]
        self._get(calls, "closing the weight channel")
        where = self._get([actors[0].execute_checkpoint_engine.remote("prepare")], "opening the weight channel")
        actor_kwargs, rollout_kwargs = self.backend_cls.build_topology(len(actors), len(workers), where)
        calls = [
            worker.execute_checkpoint_engine.remote("init_process_group", **{k: v[i] for k, v in kwargs.items()})
            for group, kwargs in ((actors, actor_kwargs), (workers, rollout_kwargs))
            for i, worker in enumerate(group)
        ]
        self._get(calls, f"connecting {len(workers)} replicas to the weight channel")
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
        sends = [w.publish_weights.remote(global_steps, averaged) for w in self.actor_wg.workers]
        if self.colocated:
            results = self._get(sends, f"publishing version {global_steps} in place")
            acks = [result["ack"] for result in results]
        else:
            takes = [w.update_weights.remote(global_steps) for w in workers]
            results = self._get(sends + takes, f"publishing version {global_steps} to {len(workers)} replicas")
            acks = results[len(sends) :]
        sent = results[0]
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
        self._get([self.actor_wg.workers[0].execute_checkpoint_engine.remote("close")], "closing the weight channel")
        self._connected = []

    def republish(self) -> None:
        """Give the current version again, to replicas that were started anew."""
        self.update_weights(self.version, averaged=self._averaged)

    def _get(self, refs: list, doing: str) -> list:
        try:
            return ray.get(refs, timeout=self.timeout_s)
        except ray.exceptions.GetTimeoutError as error:
            raise TimeoutError(
                f"{doing} took longer than trainer.v1.digen.failure.sync_timeout_s={self.timeout_s:g} s"
            ) from error
