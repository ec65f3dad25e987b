"""The replicas: which of them live, which version each holds, and the one place that replaces dead ones.

What must hold:
- Dead replicas are collected first (everyone is asked), then started together, then they get the weights together: one
  channel, one transfer, from a living replica of the same version.
- A replica whose node is gone is absent, not an error: the others go on, and it is started again when its placement
  group has found a place. Only when none is left and none comes back in time is that an error.
- A publish asks first who lives, so that a replica which died idle costs its replacement and no step.
- One thread at a time changes processes or weights; a publish and a replacement never meet.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import os
import threading
import time
from collections.abc import Callable
from typing import Any, Protocol

import ray

from verl_digen.config.deadlines import Deadlines
from verl_digen.sync.publisher import PublishError, Replica, WeightPublisher

logger = logging.getLogger(__name__)
logger.setLevel(os.getenv("VERL_LOGGING_LEVEL", "WARN"))

# How often absent replicas are looked for.
_REVISIT_S = 5.0


class Processes(Protocol):
    """Starts processes of replicas."""

    def placed(self, replica: Replica) -> bool:
        """Whether the replica's place is on a node that is there."""

    def start(self, replica: Replica) -> ray.ObjectRef:
        """End the replica's process, start a new one, and return the reference of its loading the model."""


class Fleet:
    """See the module's docstring.

    Args:
        replicas: veRL's handles; ``workers[0]`` of each is its process.
        publisher: moves the weights.
        processes: starts new ones; None when replicas cannot be replaced (colocated).
        deadlines: of the run.
        max_retries: of replacing and of publishing.
    """

    def __init__(
        self,
        replicas: list[Replica],
        publisher: WeightPublisher,
        *,
        processes: Processes | None,
        deadlines: Deadlines,
        max_retries: int,
    ):
        self.replicas, self.publisher, self.processes = replicas, publisher, processes
        self.deadlines, self.max_retries = deadlines, max_retries
        self._versions: dict[str, int | None] = {replica.name: None for replica in replicas}
        self._absent: dict[str, float] = {}  # name -> since when, seconds of time.monotonic
        self._busy = threading.RLock()  # held while processes or weights change
        self._book = threading.Lock()  # of the two below; never held for long
        self._condemned: set[Any] = set()  # processes that answer and are stuck
        self._waiting: dict[str, list[concurrent.futures.Future]] = {}
        self._wake = threading.Event()
        if processes is not None:
            threading.Thread(target=self._maintain, name="digen-fleet", daemon=True).start()

    # ---- what others ask -----------------------------------------------------------------------------------

    @property
    def version(self) -> int | None:
        """The version published last."""
        return self.publisher.version

    def version_of(self, replica: Replica) -> int | None:
        """The version that a replica holds; None: it has no process, or no whole weights."""
        return self._versions[replica.name]

    def publish(self, version: int, averaged: bool = False) -> dict[str, float]:
        """The Trainer's weights to all replicas; dead ones are replaced first, a bounded number of times.

        Returns:
            see :meth:`WeightPublisher.publish`.

        Raises:
            PublishError: weights did not arrive, or no replica is left.
            TimeoutError, ray.exceptions.RayError: it failed although all replicas live, or again and again.
        """
        if self.processes is None:
            return self._publish(version, averaged, self.replicas)

        def attempt() -> dict[str, float]:
            self._collect()
            end = time.monotonic() + self.deadlines.replace.seconds
            while not self._present():
                if time.monotonic() > end:
                    raise PublishError(f"version {version} cannot be published: {self._nobody()}")
                time.sleep(_REVISIT_S)
                self._collect()
            return self._publish(version, averaged, self._present())

        with self._busy:
            metrics = self._repeatedly(attempt, f"publishing version {version}")
        self._tell()
        return metrics

    async def replace(self, replica: Replica, worker: Any) -> None:
        """Replace ``worker``, the process of ``replica`` that is dead or stuck; returns when the replica serves again.

        Raises:
            PublishError: no replica is left, and none came back in time.
            TimeoutError, ray.exceptions.RayError: the new process could not be started, again and again.
        """
        future: concurrent.futures.Future = concurrent.futures.Future()
        with self._book:
            self._condemned.add(worker)
            self._waiting.setdefault(replica.name, []).append(future)
        self._wake.set()
        await asyncio.wrap_future(future)

    # ---- the one maintenance task --------------------------------------------------------------------------

    def _maintain(self) -> None:
        while True:
            self._wake.wait(_REVISIT_S)
            self._wake.clear()
            if not self._waiting and not any(
                r.name in self._absent and self.processes.placed(r) for r in self.replicas
            ):
                continue
            try:
                with self._busy:
                    self._repeatedly(self._restore, "replacing replicas")
            except Exception as error:  # noqa: BLE001 - handed to those who wait for a replica
                self._tell(error)
            else:
                self._tell()

    def _restore(self) -> None:
        """Every replica that has a place gets a process, and the current version."""
        self._collect()
        lacking = [replica for replica in self._present() if self._versions[replica.name] != self.version]
        if lacking:
            source = next((r for r in self._present() if self._versions[r.name] == self.version), None)
            self.publisher.bring(lacking, source)
            self._versions |= {replica.name: self.version for replica in lacking}
        if not self._present():
            since = max(self._absent.values())
            if time.monotonic() - since > self.deadlines.replace.seconds:
                raise PublishError(self._nobody())

    def _repeatedly(self, work: Callable[[], Any], doing: str) -> Any:
        """``work``, again when a process was lost in it, a bounded number of times."""
        for attempt in range(self.max_retries + 1):
            try:
                return work()
            except (ray.exceptions.RayError, TimeoutError) as error:
                if attempt == self.max_retries or not self._dead():
                    raise
                logger.warning("%s failed: %s", doing, error)

    def _tell(self, error: Exception | None = None) -> None:
        """Let go those who wait for a replica that serves, or all of them with the error."""
        served = {r.name for r in self._present() if self._versions[r.name] == self.version}
        with self._book:
            for name in [name for name in self._waiting if error is not None or name in served]:
                for future in self._waiting.pop(name):
                    future.set_result(None) if error is None else future.set_exception(error)

    # ---- processes -----------------------------------------------------------------------------------------

    def _present(self) -> list[Replica]:
        return [replica for replica in self.replicas if replica.name not in self._absent]

    def _publish(self, version: int, averaged: bool, members: list[Replica]) -> dict[str, float]:
        metrics = self.publisher.publish(version, members, averaged)
        self._versions |= {replica.name: version for replica in members}
        return metrics

    def _collect(self) -> None:
        """All that are dead get new processes at the same time."""
        starting = {}
        for replica in self._dead():
            with self._book:
                self._condemned.discard(replica.workers[0])
            self._versions[replica.name] = None
            if self.processes.placed(replica):
                logger.warning("restarting %s", replica.name)
                self._absent.pop(replica.name, None)
                starting[self.processes.start(replica)] = replica
            else:
                self._lose(replica)
        end = time.monotonic() + self.deadlines.load.seconds
        while starting:
            ready, _ = ray.wait(list(starting), num_returns=len(starting), timeout=1.0)
            for ref in ready:
                replica = starting.pop(ref)
                try:
                    ray.get(ref)
                except ray.exceptions.RayActorError:
                    if self.processes.placed(replica):
                        raise
                    self._lose(replica)
            for ref, replica in list(starting.items()):
                if not self.processes.placed(replica):
                    del starting[ref]
                    self._lose(replica)
            if starting and time.monotonic() > end:
                names = ", ".join(replica.name for replica in starting.values())
                raise TimeoutError(f"loading the model in {names} took longer than {self.deadlines.load}")

    def _lose(self, replica: Replica) -> None:
        """Its node is gone."""
        if replica.name not in self._absent:
            logger.warning("%s has no node any more; the others go on until it comes back", replica.name)
            self._absent[replica.name] = time.monotonic()

    def _dead(self) -> list[Replica]:
        """Replicas that have no process that answers, or a stuck one; of the absent ones those whose node is back."""
        with self._book:
            condemned = set(self._condemned)
        dead = [r for r in self.replicas if r.name in self._absent and self.processes.placed(r)]
        asked = {}
        for replica in self._present():
            if replica.workers[0] in condemned:
                dead.append(replica)
            else:
                asked[replica.workers[0].ping.remote()] = replica
        ready, late = ray.wait(list(asked), num_returns=len(asked), timeout=self.deadlines.ping.seconds)
        dead += [asked[ref] for ref in late]
        for ref in ready:
            try:
                self._versions[asked[ref].name] = ray.get(ref)["version"]
            except ray.exceptions.RayActorError:
                dead.append(asked[ref])
        return dead

    def _nobody(self) -> str:
        return (
            f"{', '.join(self._absent)}: no node has a place for them, and none came back within "
            f"{self.deadlines.replace}; see `ray status`"
        )
