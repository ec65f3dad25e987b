"""Doubles: a transport that behaves like nccl, and actors whose processes can die or freeze, in one test process.

The channel's own code runs for real: stores, headers, buckets, copies, aborts.
"""

from __future__ import annotations

import threading
import time
import uuid
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import replace
from types import SimpleNamespace

import ray
import torch

from verl_digen.config.deadlines import Deadline, Deadlines
from verl_digen.config.digen import FailureConfig
from verl_digen.sync.checksum import tensors_checksum
from verl_digen.sync.ends import WeightEnd

BUCKET = 1024


def deadlines(**seconds: float) -> Deadlines:
    """Long ones, but for those that a test wants to run out."""
    table = Deadlines.of(FailureConfig(generate_timeout_s=120, sync_timeout_s=240))
    return replace(table, **{name: Deadline(value, f"{name} of the test") for name, value in seconds.items()})


def weights(shift: float = 0.0) -> list[tuple[str, torch.Tensor]]:
    """Sizes below, at and far above a bucket, odd ones, several dtypes, a scalar."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape, dtype=torch.float32):
        return (torch.randn(shape, generator=generator) + shift).to(dtype)

    return [
        ("scalar", draw().double()),
        ("odd.bf16", draw(7, 3, dtype=torch.bfloat16)),
        ("odd.bytes", torch.arange(13, dtype=torch.uint8)),
        ("double after odd", draw(5, dtype=torch.float64)),
        ("a whole bucket", draw(BUCKET // 4)),
        ("larger than a bucket", draw(33, 41)),
        ("larger, bf16, odd", draw(1201, dtype=torch.bfloat16)),
        ("last", draw(2, 2)),
    ]


def described(named) -> list:
    return [[n, list(t.shape), str(t.dtype), str(tensors_checksum([(n, t)]))] for n, t in named]


# ---- a transport like nccl -------------------------------------------------------------------------------------


class StuckGroup:
    """An operation is complete when every end has joined it, and an end that is gone is not noticed: only ``abort``
    completes it then, with whatever lies in the buffer."""

    hubs: dict[str, dict[int, dict[int, torch.Tensor]]] = {}
    opened = 0

    def __init__(self, store, rank: int, world: int):
        if rank == 0:
            store.set("hub", uuid.uuid4().hex)
        self.operations = self.hubs.setdefault(store.get("hub").decode(), {})
        self.lock = threading.Lock()
        self.rank, self.world, self.number, self.aborted = rank, world, 0, False
        StuckGroup.opened += 1

    def broadcast(self, tensor: torch.Tensor):
        joined = self.operations.setdefault(self.number, {})
        joined[self.rank] = tensor.clone() if self.rank == 0 else tensor  # the source may use its buffer again
        self.number += 1
        return StuckWork(self, joined)

    def abort(self) -> None:
        self.aborted = True

    def close(self) -> None:
        pass


class StuckWork:
    def __init__(self, group: StuckGroup, joined: dict[int, torch.Tensor]):
        self.group, self.joined, self.copied = group, joined, False

    def is_completed(self) -> bool:
        if self.group.aborted:
            return True
        if len(self.joined) < self.group.world:
            return False
        if not self.copied:
            self.joined[self.group.rank].copy_(self.joined[0])
            self.copied = True
        return True

    def wait(self) -> None:
        assert self.is_completed(), "nccl's wait would never return"


def open_stuck_group(device, store, rank, world, timeout, address) -> StuckGroup:
    return StuckGroup(store, rank, world)


# ---- actors ----------------------------------------------------------------------------------------------------


class Process:
    """An actor: calls run one by one in a thread; ``ping`` and ``abort_transfers`` in one, ``send_weights`` in another.

    ``kill`` and ``freeze`` do to it what the signals do to a process.
    """

    def __init__(self, body: WeightEnd, gloo: bool):
        self.body, self.gloo = body, gloo
        self.dead = self.frozen = False
        self.calls: list[str] = []
        self.pending: set[Future] = set()
        self.threads = {name: ThreadPoolExecutor(1) for name in ("main", "control", "send")}
        self.thread_of = {"ping": "control", "abort_transfers": "control", "send_weights": "send"}

    def __getattr__(self, method: str):
        return SimpleNamespace(remote=lambda *args, **kwargs: self._submit(method, args, kwargs))

    def _submit(self, method, args, kwargs) -> Future:
        answer: Future = Future()
        self.calls.append(method)
        if self.dead:
            answer.set_exception(ray.exceptions.RayActorError())
            return answer
        self.pending.add(answer)
        self.threads[self.thread_of.get(method, "main")].submit(self._run, answer, method, args, kwargs)
        return answer

    def _run(self, answer: Future, method, args, kwargs) -> None:
        while self.frozen and not self.dead:
            time.sleep(0.005)
        try:
            value, error = getattr(self.body, method)(*args, **kwargs), None
        except Exception as raised:  # noqa: BLE001 - goes to the caller, as Ray's does
            value, error = None, ray.exceptions.RayTaskError(method, "", raised)
        while self.frozen and not self.dead:
            time.sleep(0.005)
        if answer in self.pending:
            self.pending.discard(answer)
            answer.set_exception(error) if error is not None else answer.set_result(value)

    def kill(self) -> None:
        self.dead = True
        lost, self.pending = self.pending, set()
        for answer in lost:
            answer.set_exception(ray.exceptions.RayActorError())
        if self.gloo:  # the kernel closes the sockets of a process
            for end in list(self.body._ends.values()):
                end.abort()


class ReplicaBody(WeightEnd):
    """Holds weights; ``hold`` is called before it takes any."""

    def __init__(self, name: str, table: Deadlines, hold=lambda: None):
        self.init_end(BUCKET, table)
        self.name, self.hold = name, hold
        self.sampler = SimpleNamespace(version=None)
        self.weights: dict[str, torch.Tensor] = {}

    def init_model(self, name: str) -> dict:
        return {}

    def update_weights(self, version, place) -> dict:
        self.hold()
        self.sampler.version = None
        for name, tensor in self.receive(version, place):
            self.weights[name] = tensor.clone()
        self.sampler.version = version
        checksum = tensors_checksum(self.weights.items())
        return {"replica": self.name, "version": version, "checksum": checksum, "tensors": len(self.weights)}

    def send_weights(self, version, place) -> dict:
        assert self.sampler.version == version
        return self.send(iter(self.weights.items()), version, place)


class RankBody(WeightEnd):
    """Rank 0 of the Trainer; version k of its weights is ``weights(k)``."""

    def __init__(self, table: Deadlines):
        self.init_end(BUCKET, table)
        self.shift = None

    def publish_weights(self, version, averaged, place) -> dict:
        shift = version if self.shift is None else self.shift
        return self.send(iter(weights(shift + 0.5 * averaged)), version, place)


def ray_of_futures(monkeypatch) -> None:
    """``ray.wait``, ``ray.get``, ``ray.put`` and ``ray.kill`` for :class:`Process`."""

    def ray_wait(refs, num_returns=1, timeout=None):
        if num_returns:
            wait(refs, timeout)
        ready = [ref for ref in refs if ref.done()]
        return ready, [ref for ref in refs if not ref.done()]

    def ray_get(refs, timeout=None):
        if isinstance(refs, Future):
            return refs.result(timeout)
        return [ref.result(timeout) for ref in refs]

    monkeypatch.setattr(ray, "wait", ray_wait)
    monkeypatch.setattr(ray, "get", ray_get)
    monkeypatch.setattr(ray, "put", lambda value: value)
    monkeypatch.setattr(ray, "kill", lambda process: process.kill())
