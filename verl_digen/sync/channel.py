"""The weight channel: a persistent process group between the Trainer's first rank and every replica.

Registered as veRL checkpoint engine ``digen``. gloo on CPU, nccl on CUDA, hccl on NPU. The group is built once and
again only when a replica was replaced; a publish sends buckets of packed tensors, each after a small JSON header.
An end that cannot finish a publish leaves the group, so that the ends which wait for it get an error at once and not
at their deadline. Stores and sockets are bound to the node's own address.
"""

from __future__ import annotations

import json
import socket
from collections.abc import AsyncGenerator, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import ray
import torch
import torch.distributed as dist
from verl.checkpoint_engine.base import CheckpointEngine, TensorMeta, merge_weight_chunks, split_weight_chunks
from verl.utils.device import get_device_name, get_nccl_backend
from verl.utils.distributed import create_tcp_store

_ALIGN = 16


class DigenCheckpointEngine(CheckpointEngine):
    """One end of the channel.

    Args:
        bucket_size: bytes of a bucket.
        is_master: whether this end sends (the Trainer's rank 0).
        timeout_s: deadline of every collective, in seconds.
    """

    def __init__(self, bucket_size: int, is_master: bool = False, timeout_s: float = 900.0) -> None:
        if bucket_size < _ALIGN:
            raise ValueError(
                f"actor_rollout_ref.rollout.checkpoint_engine.update_weights_bucket_megabytes gives {bucket_size} "
                "bytes; it must be at least 1"
            )
        self.bucket_size = bucket_size
        self.is_master = is_master
        self.timeout = timedelta(seconds=timeout_s)
        self.group = None
        self._store = None

    @property
    def device(self) -> torch.device:
        return torch.device("cpu") if get_device_name() == "cpu" else torch.device(get_device_name())

    # ---- membership ----------------------------------------------------------------------------------------

    def prepare(self) -> dict[str, Any]:
        """Master: open a store on the node's address and return where it is; others: nothing."""
        if not self.is_master:
            return {}
        host = ray.util.get_node_ip_address().strip("[]")
        listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, 0))
        listener.listen()
        port = listener.getsockname()[1]
        self._store = create_tcp_store(
            host, port, listen_socket=listener, is_master=True, wait_for_workers=False, timeout=self.timeout
        )
        return {"host": host, "port": port}

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
        """Join the group (rank -1: stay out). All members call it together."""
        if rank < 0:
            return
        if not self.is_master:
            self._store = dist.TCPStore(
                master["host"], master["port"], is_master=False, wait_for_workers=False, timeout=self.timeout
            )
        store = dist.PrefixStore("digen-channel", self._store)
        if self.device.type == "cpu":
            options = dist.ProcessGroupGloo._Options()
            options._devices = [dist.ProcessGroupGloo.create_device(hostname=_own_address(master["host"]))]
            options._timeout = self.timeout
            self.group = dist.ProcessGroupGloo(store, rank, world_size, options)
        else:
            # the group needs a backend of the device; torch's own factory builds it without touching the default group
            self.group, _ = dist.distributed_c10d._new_process_group_helper(
                world_size,
                rank,
                [],
                get_nccl_backend(),
                store,
                group_name=f"digen-channel-{master['port']}",
                timeout=self.timeout,
            )

    def finalize(self) -> None:
        """The channel stays open between publishes."""

    def close(self) -> None:
        """Leave the group; the next :meth:`prepare` and :meth:`init_process_group` make a new one."""
        self.group = None
        self._store = None

    @contextmanager
    def _leaving_unless_finished(self):
        """Leave the group when a publish ends early, by an error or because its consumer stopped."""
        finished = False
        try:
            yield
            finished = True
        finally:
            if not finished:
                self.close()

    # ---- sending and receiving -----------------------------------------------------------------------------

    async def send_weights(
        self, weights: Iterator[tuple[str, torch.Tensor]], global_steps: int | None = None
    ) -> dict[str, int]:
        """Send all tensors as version ``global_steps``; bucket by bucket. Returns bytes and buckets sent."""
        buffer = torch.empty(self.bucket_size, dtype=torch.uint8, device=self.device)
        metas: list[dict] = []
        used, sent, buckets = 0, 0, 0

        def flush(done: bool) -> None:
            nonlocal metas, used, buckets
            self._broadcast_object({"version": global_steps, "tensors": metas, "bytes": used, "done": done})
            if used:
                self._broadcast(buffer[:used])
                buckets += 1
            metas, used = [], 0

        with self._leaving_unless_finished():
            async for meta, chunk in split_weight_chunks(weights, self.bucket_size):
                if used + meta.chunk_size > self.bucket_size:
                    flush(done=False)
                buffer[used : used + meta.chunk_size] = chunk.to(self.device)
                metas.append(_meta_to_json(meta, used))
                sent += meta.chunk_size
                used += -(-meta.chunk_size // _ALIGN) * _ALIGN
                used = min(used, self.bucket_size)
            flush(done=True)
        return {"sync/bytes": sent, "sync/buckets": buckets}

    async def receive_weights(self, global_steps: int | None = None) -> AsyncGenerator[tuple[str, torch.Tensor], None]:
        """Yield (name, tensor) of the version that is being sent.

        Raises:
            ValueError: another version arrives than the one announced.
        """

        async def chunks():
            while True:
                header = self._broadcast_object(None)
                if header["version"] != global_steps:
                    raise ValueError(
                        f"version {header['version']} arrived on the channel, {global_steps} was announced"
                    )
                if header["bytes"]:
                    buffer = torch.empty(header["bytes"], dtype=torch.uint8, device=self.device)
                    self._broadcast(buffer)
                    for entry in header["tensors"]:
                        meta = _meta_from_json(entry)
                        yield meta, buffer[meta.offset : meta.offset + meta.chunk_size]
                if header["done"]:
                    return

        with self._leaving_unless_finished():
            async for name, tensor in merge_weight_chunks(chunks(), self.bucket_size):
                yield name, tensor

    def _broadcast(self, tensor: torch.Tensor) -> None:
        if self.group is None:
            raise RuntimeError("the weight channel is not connected: init_process_group was not called on this end")
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        self.group.broadcast([tensor], options).wait()

    def _broadcast_object(self, value: dict | None) -> dict:
        """A JSON object from the master to all, length first."""
        payload = json.dumps(value).encode() if value is not None else b""
        length = torch.tensor([len(payload)], dtype=torch.int64, device=self.device)
        self._broadcast(length)
        data = torch.zeros(int(length), dtype=torch.uint8, device=self.device)
        if value is not None:
            data.copy_(torch.frombuffer(bytearray(payload), dtype=torch.uint8))
        self._broadcast(data)
        return json.loads(bytes(data.cpu().numpy()))


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
