"""What an actor needs to be an end of weight channels.

An actor class that has it is made with :data:`CONCURRENCY`: ``ping`` and ``abort_transfers`` have a thread of their own
in the actor, so that a process which generates, trains or waits in a collective answers them.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import ray
import torch
from verl.utils.device import get_device_id, get_device_name, get_torch_device

from verl_digen.config.deadlines import Deadlines
from verl_digen.sync.channel import DigenCheckpointEngine
from verl_digen.sync.checksum import tensors_checksum

CONCURRENCY = {"control": 1, "send": 1}
Tensors = Iterator[tuple[str, torch.Tensor]]


@dataclass(frozen=True, kw_only=True)
class Place:
    """An end's place in a channel.

    Attributes:
        master: ``host`` and ``port`` of the store, ``name`` of the channel.
        rank: 0 is the source.
        world: number of ends.
        keep: further transfers follow in this channel; the one that was kept before is left.
    """

    master: dict[str, Any]
    rank: int
    world: int
    keep: bool


class WeightEnd:
    """Mixed into an actor class; call :meth:`init_end` in its constructor."""

    def init_end(self, bucket_bytes: int, deadlines: Deadlines) -> None:
        self._bucket_bytes, self._deadlines = bucket_bytes, deadlines
        self._device_id = None if get_device_name() == "cpu" else get_device_id()
        self._ends: dict[str, DigenCheckpointEngine] = {}
        self._ends_lock = threading.Lock()

    def use_device(self) -> None:
        """Ray calls methods in another thread than the constructor, and the current device belongs to a thread."""
        if self._device_id is not None:
            get_torch_device().set_device(self._device_id)

    @ray.method(concurrency_group="control")
    def ping(self) -> dict[str, Any]:
        """Liveness: process id, and the version of the weights that a replica holds (None: no whole one)."""
        sampler = getattr(self, "sampler", None)
        return {"pid": os.getpid(), "version": None if sampler is None else sampler.version}

    @ray.method(concurrency_group="control")
    def abort_transfers(self) -> None:
        """End every transfer that is under way here, and leave its channel."""
        self.use_device()
        with self._ends_lock:
            ends, self._ends = self._ends, {}
        for end in ends.values():
            end.abort()

    def send(self, tensors: Tensors, version: int, place: Place) -> dict[str, Any]:
        """Send a version as the source of a channel; returns its checksum, the number of tensors and bytes."""
        end, sums = self._end(place), []
        with self._leaving(end, place):
            sent = asyncio.run(end.send_weights(counted(tensors, sums), version))
        return {**sent, **summary(sums, version)}

    def receive(self, version: int, place: Place) -> Tensors:
        """The tensors of a version, bucket by bucket; each is used before the next one is asked for."""
        end = self._end(place)
        with self._leaving(end, place):
            yield from _synchronous(end.receive_weights(version))

    def _end(self, place: Place) -> DigenCheckpointEngine:
        name = place.master["name"]
        with self._ends_lock:
            if place.keep:  # the channel of another membership
                for other in [other for other in self._ends if other != name]:
                    self._ends.pop(other).close()
            if name not in self._ends:
                end = self._ends[name] = DigenCheckpointEngine(self._bucket_bytes, deadlines=self._deadlines)
                end.init_process_group(place.rank, place.world, place.master)
            return self._ends[name]

    @contextmanager
    def _leaving(self, end: DigenCheckpointEngine, place: Place) -> Iterator[None]:
        """Leave a channel that is not kept, or whose transfer failed."""
        finished = False
        try:
            yield
            finished = True
        finally:
            if not (finished and place.keep):
                with self._ends_lock:
                    self._ends.pop(place.master["name"], None)
                end.close() if finished else end.abort()


def counted(tensors: Tensors, sums: list[int]) -> Tensors:
    """``tensors``, with the checksum of each appended to ``sums``."""
    for name, tensor in tensors:
        sums.append(tensors_checksum([(name, tensor)]))
        yield name, tensor


def summary(sums: list[int], version: int) -> dict[str, int]:
    """What a source says of a version that it sent."""
    return {"checksum": sum(sums) % (1 << 64), "tensors": len(sums), "version": version}


def _synchronous(stream: AsyncIterator) -> Iterator:
    """The items of an asynchronous iterator, one by one."""
    loop = asyncio.new_event_loop()
    try:
        while True:
            try:
                item = loop.run_until_complete(anext(stream))
            except StopAsyncIteration:
                return
            yield item
    finally:
        loop.run_until_complete(stream.aclose())
        loop.close()
