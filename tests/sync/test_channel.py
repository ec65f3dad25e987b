"""The weight channel: real broadcasts over sockets, and who takes which rank (I8)."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor

import pytest
import ray
import torch

from verl_digen.sync.channel import DigenCheckpointEngine
from verl_digen.sync.checksum import tensors_checksum

BUCKET = 1024


def weights() -> list[tuple[str, torch.Tensor]]:
    """Sizes below, at and far above a bucket, odd ones, several dtypes, a scalar."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape, dtype=torch.float32):
        return torch.randn(shape, generator=generator).to(dtype)

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


@pytest.fixture
def master(monkeypatch):
    """The sending end, on the loopback, with its process group still to be made."""
    monkeypatch.setattr(ray.util, "get_node_ip_address", lambda: "127.0.0.1")
    engine = DigenCheckpointEngine(BUCKET, is_master=True, timeout_s=240)
    yield engine, engine.prepare()
    engine.close()


def connected(master: DigenCheckpointEngine, where: dict, world: int) -> list[DigenCheckpointEngine]:
    """All ends of a channel, each with a process group and sockets of its own."""
    ends = [master, *(DigenCheckpointEngine(BUCKET, timeout_s=240) for _ in range(world - 1))]
    with ThreadPoolExecutor(world) as threads:
        list(threads.map(lambda end: end[1].init_process_group(end[0], world, where), enumerate(ends)))
    return ends


def receive(end: DigenCheckpointEngine, *versions: int) -> list:
    """What arrives for each version, or the error that ended it."""

    async def all_of(version: int) -> list:
        return described([pair async for pair in end.receive_weights(version)])

    received = []
    for version in versions:
        try:
            received.append(asyncio.run(all_of(version)))
        except (RuntimeError, ValueError) as error:
            return [*received, error]
    return received


def send(end: DigenCheckpointEngine, *versions: tuple[int, list]) -> list:
    return [asyncio.run(end.send_weights(iter(named), version)) for version, named in versions]


def test_every_tensor_arrives_bit_for_bit_at_two_replicas(master):
    """One connection carries several versions; the peer that was told another version refuses what arrives."""
    first, second = weights(), [(n, t + 1) for n, t in weights()][-1:]
    ends = connected(*master, 3)
    with ThreadPoolExecutor(2) as threads:
        received = [threads.submit(receive, ends[1], 4, 5, 6), threads.submit(receive, ends[2], 4, 5, 99)]
        sent = send(ends[0], (4, first), (5, second), (6, []))  # a header alone: the end that refuses it hangs up
        received = [future.result() for future in received]
    both = [described(first), described(second)]
    assert received[0] == [*both, []]
    assert received[1][:2] == both
    assert str(received[1][2]) == "version 6 arrived on the channel, 99 was announced"
    assert sent[0]["sync/bytes"] == sum(t.nbytes for _, t in first) and sent[0]["sync/buckets"] > 3


@pytest.mark.parametrize("lost", [1, 2, 3, 4])
def test_ends_that_wait_for_a_lost_one_get_an_error_before_their_deadline(master, lost):
    """A broadcast goes down a tree: an end may wait for one that is alive and has failed itself."""
    ends = connected(*master, 5)
    others = [end for rank, end in enumerate(ends[1:], start=1) if rank != lost]
    with ThreadPoolExecutor(len(others)) as threads:
        received = [threads.submit(receive, end, 1) for end in others]
        ends[lost].close()
        with pytest.raises(RuntimeError):
            send(ends[0], (1, weights()))
        failed = [future.result(timeout=30) for future in received]  # the deadline is 240 s
    assert all(isinstance(f[-1], RuntimeError) for f in failed)
    assert all(end.group is None for end in ends)


def test_an_end_whose_consumer_stops_leaves_the_channel(master):
    ends = connected(*master, 2)

    async def refuse() -> None:
        async for name, _ in ends[1].receive_weights(1):
            raise KeyError(name)

    with ThreadPoolExecutor(1) as threads:
        sending = threads.submit(send, ends[0], (1, weights() * 3))
        with pytest.raises(KeyError, match="scalar"):
            asyncio.run(refuse())
        with pytest.raises(RuntimeError):
            sending.result(timeout=30)
    assert ends[1].group is None


def test_topology_gives_rank_0_to_the_trainers_first_rank_and_none_to_its_others():
    where = {"host": "h", "port": 1}
    actor, rollout = DigenCheckpointEngine.build_topology(3, 2, [where, {}, {}])
    assert actor == {"rank": [0, -1, -1], "world_size": [3] * 3, "master": [where] * 3}
    assert rollout == {"rank": [1, 2], "world_size": [3] * 2, "master": [where] * 2}


def test_an_end_that_stays_out_joins_nothing_and_cannot_send():
    engine = DigenCheckpointEngine(BUCKET)
    assert engine.prepare() == {}
    engine.init_process_group(-1, 3, {})
    with pytest.raises(RuntimeError, match="not connected"):
        asyncio.run(engine.send_weights(iter(weights()), 1))


def test_a_bucket_that_holds_nothing_is_refused():
    with pytest.raises(ValueError, match="update_weights_bucket_megabytes gives 0 bytes"):
        DigenCheckpointEngine(0)
