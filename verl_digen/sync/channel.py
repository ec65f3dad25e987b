"""One end of a weight channel: buckets of packed tensors from a source to one or many targets.

Registered as veRL checkpoint engine ``digen``; gloo on CPU, nccl on CUDA, hccl on NPU (:mod:`verl_digen.sync.groups`).
veRL's own ``nccl`` and ``hccl`` engines are not used: a receiver waits in them without a deadline for a sender that is
gone, nothing ends a collective that has begun, and they need cupy or vLLM for a broadcast that torch has.

What must hold:
- Nobody enters a collective alone. Ends meet in a store on the host first, where waiting has a deadline and can be
  ended; the source begins when all are there. The header of a bucket (names, shapes, version) goes through the store.
- Everything that waits is ended by :meth:`DigenCheckpointEngine.abort`, called from a thread that is not in it. An end
  that stops early leaves the group; whoever coordinates aborts the others.
- A group is built with the first transfer and kept for the next ones. Each end counts the transfers of its channel.
"""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import AsyncGenerator, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import ray
import torch
import torch.distributed as dist
from verl.checkpoint_engine.base import CheckpointEngine, TensorMeta, merge_weight_chunks, split_weight_chunks
from verl.utils.device import get_device_name
from verl.utils.distributed import create_tcp_store

from verl_digen.config.deadlines import Deadline, Deadlines
from verl_digen.config.digen import FailureConfig
from verl_digen.sync import groups

_ALIGN = 16
# How often the store and an operation are asked. In the store from the first to the last of these, ever more slowly:
# hundreds of ends may wait for one that is busy.
_POLL_S = (0.0005, 0.05)
_CONNECT = timedelta(seconds=5.0)


class ChannelAborted(RuntimeError):
    """The transfer was ended from outside, or this end has left the channel."""


def open_store() -> tuple[dist.TCPStore, dict[str, Any]]:
    """A store on this node's address, and where it is (``host``, ``port``)."""
    host = ray.util.get_node_ip_address().strip("[]")
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind((host, 0))
    listener.listen()
    port = listener.getsockname()[1]
    store = create_tcp_store(host, port, listen_socket=listener, is_master=True, wait_for_workers=False)
    return store, {"host": host, "port": port}


class DigenCheckpointEngine(CheckpointEngine):
    """One end of one channel.

    Args:
        bucket_size: bytes of a bucket.
        is_master: whether this end opens a store when it is asked to (:meth:`prepare`).
        deadlines: of the run; None takes those of the default options.
    """

    def __init__(self, bucket_size: int, is_master: bool = False, deadlines: Deadlines | None = None) -> None:
        if bucket_size < _ALIGN:
            raise ValueError(
                f"actor_rollout_ref.rollout.checkpoint_engine.update_weights_bucket_megabytes gives {bucket_size} "
                "bytes; it must be at least 1"
            )
        self.bucket_size = bucket_size
        self.is_master = is_master
        self.deadlines = deadlines or Deadlines.of(FailureConfig())
        self.rank = -1
        self._lock = threading.Lock()  # a group is closed once, by whoever comes first
        self._aborted = threading.Event()
        self._own_store = self._store = self._group = None
        self._transfers = 0

    @property
    def device(self) -> torch.device:
        return torch.device(get_device_name())

    # ---- membership ----------------------------------------------------------------------------------------

    def prepare(self) -> dict[str, Any]:
        """Master: open a store on the node's address and return where it is; others: nothing."""
        if not self.is_master:
            return {}
        self._own_store, where = open_store()
        return {**where, "name": f"channel-{where['port']}"}

    @classmethod
    def build_topology(cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[dict]):
        """Rank 0 is the Trainer's first rank, replicas follow; the Trainer's other ranks take no part (rank -1)."""
        world = 1 + rollout_world_size
        where = metadata[0]
        actor = {
            "rank": [0] + [-1] * (actor_wg_world_size - 1),
            "world_size": [world] * actor_wg_world_size,
            "master": [where] * actor_wg_world_size,
        }
        rollout = {
            "rank": list(range(1, world)),
            "world_size": [world] * rollout_world_size,
            "master": [where] * rollout_world_size,
        }
        return actor, rollout

    def init_process_group(self, rank: int, world_size: int, master: dict[str, Any]) -> None:
        """Take a place in a channel (rank -1: stay out); nothing is connected before the first transfer.

        Args:
            master: ``host`` and ``port`` of the store, ``name`` of the channel.
        """
        self.rank, self.world, self.master = rank, world_size, master

    def finalize(self) -> None:
        """The channel stays open between transfers."""

    def abort(self) -> None:
        """End whatever waits here and leave the channel; safe from any thread, at any time, more than once."""
        self._aborted.set()
        self._leave(lambda group: group.abort())

    def close(self) -> None:
        """Leave the channel when nothing is under way."""
        self._aborted.set()
        self._leave(lambda group: group.close())

    def _leave(self, ending) -> None:
        with self._lock:
            group, self._group = self._group, None
        if group is not None:
            ending(group)

    @contextmanager
    def _transfer(self):
        """Count a transfer; leave the channel when it ends early, by an error or because its consumer stopped."""
        if self.rank < 0 or self._aborted.is_set():
            raise ChannelAborted("this end of the weight channel takes no part in it, or has left it")
        if self._store is None:
            self._store = self._connect()
        self._transfers += 1
        finished = False
        try:
            yield f"{self.master['name']}/{self._transfers}"
            finished = True
        finally:
            if not finished:
                self.abort()

    def _connect(self) -> dist.TCPStore:
        """A connection to the store, in short tries: torch waits for a lost handshake as long as it may wait at all."""
        end = time.monotonic() + self.deadlines.transfer.seconds
        while True:
            try:
                store = dist.TCPStore(
                    self.master["host"], self.master["port"], is_master=False, wait_for_workers=False, timeout=_CONNECT
                )
                break
            except dist.DistNetworkError:
                if self._aborted.is_set() or time.monotonic() > end:
                    raise
        store.set_timeout(timedelta(seconds=self.deadlines.transfer.seconds))
        return store

    def _join(self) -> None:
        """Build the group, when all ends are known to be there."""
        if self._group is not None:
            return
        seconds = self.deadlines.transfer.seconds + 2 * self.deadlines.ping.seconds
        group = groups.open_group(
            self.device.type,
            # the group's threads use the store as well: they get a connection of their own
            dist.PrefixStore(f"{self.master['name']}/group", self._connect()),
            self.rank,
            self.world,
            timedelta(seconds=seconds),
            _own_address(self.master["host"]),
        )
        with self._lock:
            self._group = group
        if self._aborted.is_set():  # meanwhile
            self.abort()

    # ---- waiting -------------------------------------------------------------------------------------------

    def _wait_for(self, key: str, what: str, deadline: Deadline) -> None:
        """Until ``key`` is in the store.

        Raises:
            TimeoutError: it does not come within ``deadline``.
            ChannelAborted: see :meth:`abort`.
        """
        end, pause = time.monotonic() + deadline.seconds, _POLL_S[0]
        while not self._store.check([key]):
            if self._aborted.wait(pause):
                raise ChannelAborted(f"ended while waiting for {what}")
            if time.monotonic() > end:
                raise TimeoutError(f"waiting for {what} took longer than {deadline}")
            pause = min(1.2 * pause, _POLL_S[1])

    def _broadcast(self, tensor: torch.Tensor) -> None:
        """From rank 0 to all; returns when it is done here.

        Raises:
            TimeoutError: it is not done in time.
            ChannelAborted: see :meth:`abort`; what arrived is not whole.
        """
        end = time.monotonic() + self.deadlines.transfer.seconds
        try:
            work = self._group.broadcast(tensor)
            while not work.is_completed() and not self._aborted.wait(_POLL_S[0]):
                if time.monotonic() > end:
                    raise TimeoutError(f"a bucket of the weight channel took longer than {self.deadlines.transfer}")
            if not self._aborted.is_set():
                work.wait()
        except Exception as error:
            if not self._aborted.is_set():
                raise
            raise ChannelAborted("the transfer was ended") from error  # whatever the transport says to that
        if self._aborted.is_set():
            raise ChannelAborted("the transfer was ended")

    # ---- sending and receiving -----------------------------------------------------------------------------

    async def send_weights(
        self, weights: Iterator[tuple[str, torch.Tensor]], global_steps: int | None = None
    ) -> dict[str, int]:
        """Send all tensors as version ``global_steps``; bucket by bucket. Returns bytes and buckets sent.

        Raises:
            TimeoutError: not all ends came in time; nothing was sent.
            ChannelAborted: see :meth:`abort`.
        """
        metas: list[dict] = []
        used, sent, buckets = 0, 0, 0

        with self._transfer() as name:
            for rank in range(1, self.world):
                what = f"end {rank} of {self.world - 1} of the weight channel"
                self._wait_for(f"{name}/ready/{rank}", what, self.deadlines.connect)
            self._forget_before(name)
            self._store.set(f"{name}/go", "")
            self._join()
            buffer = torch.empty(self.bucket_size, dtype=torch.uint8, device=self.device)

            def flush(done: bool) -> None:
                nonlocal metas, used, buckets
                header = {"version": global_steps, "tensors": metas, "bytes": used, "done": done}
                self._store.set(f"{name}/bucket/{buckets}", json.dumps(header))
                if used:
                    self._broadcast(buffer[:used])
                buckets += 1
                metas, used = [], 0

            async for meta, chunk in split_weight_chunks(weights, self.bucket_size):
                if used + meta.chunk_size > self.bucket_size:
                    flush(done=False)
                buffer[used : used + meta.chunk_size] = chunk.to(self.device)
                metas.append(_meta_to_json(meta, used))
                sent += meta.chunk_size
                used += -(-meta.chunk_size // _ALIGN) * _ALIGN
                used = min(used, self.bucket_size)
            flush(done=True)
            self._sent = buckets
        return {"sync/bytes": sent, "sync/buckets": buckets}

    def _forget_before(self, name: str) -> None:
        """Drop the keys of the transfer before this one: all ends have come to this one, so nobody reads them."""
        if self._transfers == 1:
            return
        last = f"{self.master['name']}/{self._transfers - 1}"
        keys = [f"{last}/go", *(f"{last}/bucket/{i}" for i in range(self._sent))]
        for key in keys + [f"{last}/ready/{rank}" for rank in range(1, self.world)]:
            self._store.delete_key(key)

    async def receive_weights(self, global_steps: int | None = None) -> AsyncGenerator[tuple[str, torch.Tensor], None]:
        """Yield (name, tensor) of the version that is being sent, as the buckets arrive.

        A tensor is a view of the bucket: use it before the next one is asked for. Only one that is larger than a
        bucket has memory of its own.

        Raises:
            ValueError: another version arrives than the one announced.
            TimeoutError: the source or another end does not come in time.
            ChannelAborted: see :meth:`abort`.
        """

        async def chunks(name: str):
            buffer = torch.empty(self.bucket_size, dtype=torch.uint8, device=self.device)
            for bucket in range(1 << 62):
                key = f"{name}/bucket/{bucket}"
                self._wait_for(key, f"bucket {bucket} of the weight channel", self.deadlines.transfer)
                header = json.loads(self._store.get(key))
                if header["version"] != global_steps:
                    raise ValueError(
                        f"version {header['version']} arrived on the channel, {global_steps} was announced"
                    )
                if header["bytes"]:
                    self._broadcast(buffer[: header["bytes"]])
                    for entry in header["tensors"]:
                        meta = _meta_from_json(entry)
                        yield meta, buffer[meta.offset : meta.offset + meta.chunk_size]
                if header["done"]:
                    return

        with self._transfer() as name:
            self._store.set(f"{name}/ready/{self.rank}", "")
            self._wait_for(f"{name}/go", "the source of the weight channel", self.deadlines.connect)
            self._join()
            async for named in merge_weight_chunks(chunks(name), self.bucket_size):
                yield named


def _own_address(master: str) -> str:
    """The address of this node that reaches the master: the loopback stays the loopback."""
    return master if master.startswith("127.") else ray.util.get_node_ip_address().strip("[]")


def _meta_to_json(meta: TensorMeta, offset: int) -> dict[str, Any]:
    return {
        "name": meta.name,
        "shape": list(meta.shape),
        "dtype": str(meta.dtype).removeprefix("torch."),
        "chunk_offset": meta.chunk_offset,
        "chunk_size": meta.chunk_size,
        "offset": offset,
    }


def _meta_from_json(entry: dict[str, Any]) -> TensorMeta:
    shape, dtype = torch.Size(entry["shape"]), getattr(torch, entry["dtype"])
    return TensorMeta(**{**entry, "shape": shape, "dtype": dtype})
