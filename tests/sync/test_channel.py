"""The weight channel: real stores and buckets, over sockets and over a transport that behaves like nccl (I8)."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist

from tests.sync.doubles import BUCKET, StuckGroup, deadlines, described, weights
from verl_digen.sync.channel import ChannelAborted, DigenCheckpointEngine


def channel(world: int, **seconds: float) -> list[DigenCheckpointEngine]:
    """All ends of a channel; the first one is the source."""
    ends = [DigenCheckpointEngine(BUCKET, is_master=rank == 0, deadlines=deadlines(**seconds)) for rank in range(world)]
    where = ends[0].prepare()
    for rank, end in enumerate(ends):
        end.init_process_group(rank, world, where)
    return ends


def receive(end: DigenCheckpointEngine, *versions: int) -> list:
    """What arrives for each version, or the error that ended it."""

    async def all_of(version: int) -> list:
        return described([(name, tensor.clone()) async for name, tensor in end.receive_weights(version)])

    received = []
    for version in versions:
        try:
            received.append(asyncio.run(all_of(version)))
        except (RuntimeError, ValueError, TimeoutError) as error:
            return [*received, error]
    return received


def send(end: DigenCheckpointEngine, *versions: tuple[int, list]) -> list:
    return [asyncio.run(end.send_weights(iter(named), version)) for version, named in versions]


def test_every_tensor_arrives_bit_for_bit_at_two_replicas(transport):
    """One connection carries several versions; the end that was told another version refuses what arrives."""
    first, second = weights(), [(n, t + 1) for n, t in weights()][-1:]
    ends = channel(3)
    with ThreadPoolExecutor(2) as threads:
        received = [threads.submit(receive, ends[1], 4, 5, 6), threads.submit(receive, ends[2], 4, 5, 99)]
        sent = send(ends[0], (4, first), (5, second), (6, []))  # a header alone: the end that refuses it hangs up
        received = [future.result() for future in received]
    both = [described(first), described(second)]
    assert received[0] == [*both, []]
    assert received[1][:2] == both
    assert str(received[1][2]) == "version 6 arrived on the channel, 99 was announced"
    assert sent[0]["sync/bytes"] == sum(t.nbytes for _, t in first) and sent[0]["sync/buckets"] > 3


def test_a_tensor_is_used_while_the_next_bucket_is_not_there_yet():
    """The receiver holds one bucket, not the model: what it was given is overwritten by what comes later."""
    ends = channel(2)
    named = [(f"t{i}", torch.full((BUCKET // 4,), float(i))) for i in range(3)]
    kept = []

    async def keep_views() -> None:
        async for _, tensor in ends[1].receive_weights(1):
            kept.append(tensor)

    with ThreadPoolExecutor(1) as threads:
        done = threads.submit(asyncio.run, keep_views())
        send(ends[0], (1, named))
        done.result()
    assert [float(tensor[0]) for tensor in kept] == [2.0, 2.0, 2.0]


@pytest.mark.parametrize("lost", [1, 3])
def test_ends_that_wait_for_a_lost_one_are_ended_from_outside(transport, lost, monkeypatch):
    """One end joins, and is gone without a word in the middle of the transfer; the deadlines are minutes."""
    ends = channel(4)
    original = ends[lost]._broadcast

    def gone(tensor):
        if ends[lost].buckets_taken == 2:
            raise KeyboardInterrupt
        ends[lost].buckets_taken += 1
        original(tensor)

    ends[lost].buckets_taken, ends[lost]._broadcast = 0, gone

    def dies(end) -> None:
        with pytest.raises(KeyboardInterrupt):
            receive(end, 1)

    others = [end for rank, end in enumerate(ends) if rank not in (0, lost)]
    with ThreadPoolExecutor(4) as threads:
        died = threads.submit(dies, ends[lost])
        received = [threads.submit(receive, end, 1) for end in others]
        sending = threads.submit(send, ends[0], (1, weights()))
        died.result(timeout=30)
        if transport != "gloo":
            time.sleep(0.3)
            assert not sending.done()  # nobody notices
        for end in [ends[0], *others]:
            end.abort()
        with pytest.raises((RuntimeError, ChannelAborted)):
            sending.result(timeout=30)
        failed = [future.result(timeout=30) for future in received]
    assert all(isinstance(f[-1], RuntimeError) for f in failed)
    assert all(end._group is None for end in ends)
    for end in ends:  # who has left does not come back by itself
        with pytest.raises(ChannelAborted):
            send(end, (2, []))


def test_an_end_whose_consumer_stops_leaves_the_channel(transport):
    ends = channel(2)

    async def refuse() -> None:
        async for name, _ in ends[1].receive_weights(1):
            raise KeyError(name)

    with ThreadPoolExecutor(1) as threads:
        sending = threads.submit(send, ends[0], (1, weights() * 3))
        with pytest.raises(KeyError, match="scalar"):
            asyncio.run(refuse())
        assert ends[1]._group is None
        ends[0].abort()
        with pytest.raises(RuntimeError):
            sending.result(timeout=30)


def test_an_end_that_is_alone_gives_up_before_it_enters_a_collective(transport):
    """The source waits for both ends, the one that is there for the source's word; both in the store."""
    ends, opened = channel(3, connect=0.3), StuckGroup.opened
    with ThreadPoolExecutor(1) as threads:
        receiving = threads.submit(receive, ends[1], 1)
        with pytest.raises(TimeoutError, match=r"end 2 of 2 of the weight channel took longer than 0.3 s .*connect of"):
            send(ends[0], (1, weights()))
        (error,) = receiving.result(timeout=30)
    assert isinstance(error, TimeoutError) and "waiting for the source of the weight channel" in str(error)
    assert StuckGroup.opened == opened and all(end._group is None for end in ends)


@pytest.mark.parametrize("where", ["source", "target"])
def test_a_wait_in_the_store_is_ended_from_outside(where):
    ends = channel(2)
    end = ends[where == "target"]
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(receive, end, 1) if where == "target" else threads.submit(send, end, (1, []))
        time.sleep(0.1)
        end.abort()
        if where == "target":
            assert isinstance(waiting.result(timeout=10)[0], ChannelAborted)
        else:
            with pytest.raises(ChannelAborted, match="ended while waiting for end 1"):
                waiting.result(timeout=10)


def test_a_bucket_that_does_not_come_is_an_error_in_time(transport):
    """The source stops after the first bucket and says nothing."""
    ends = channel(2, transfer=0.5)

    def stops():
        yield "a", torch.zeros(BUCKET // 4)
        yield "b", torch.zeros(BUCKET // 4)
        time.sleep(1.5)

    with ThreadPoolExecutor(1) as threads:
        receiving = threads.submit(receive, ends[1], 1)
        with contextlib.suppress(RuntimeError, TimeoutError):  # gloo notices that the other end left
            asyncio.run(ends[0].send_weights(stops(), 1))
        (error,) = receiving.result(timeout=30)
    assert "took longer than 0.5 s" in str(error)


def test_reconnecting_leaks_nothing():
    """Neither torch's world nor the process keeps a group, its sockets or its threads."""

    def once() -> None:
        ends = channel(3)
        with ThreadPoolExecutor(2) as threads:
            received = [threads.submit(receive, end, 1) for end in ends[1:]]
            send(ends[0], (1, weights()))
            assert all(future.result() == [described(weights())] for future in received)
        for end in ends:
            end.close()

    def held() -> tuple[int, int]:
        return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))

    once()
    time.sleep(0.5)
    files, tasks = held()
    for _ in range(4):
        once()
    for _ in range(50):  # the threads that leave
        if held()[0] <= files and held()[1] <= tasks:
            break
        time.sleep(0.1)
    assert held()[0] <= files and held()[1] <= tasks
    assert not dist.distributed_c10d._world.pg_map


def test_the_store_does_not_grow_with_the_number_of_transfers():
    ends = channel(2)
    sizes = []
    for version in range(1, 5):
        with ThreadPoolExecutor(1) as threads:
            received = threads.submit(receive, ends[1], version)
            send(ends[0], (version, weights()))
            assert received.result() == [described(weights())]
        sizes.append(ends[0]._store.num_keys())
    assert sizes[1] == sizes[2] == sizes[3]


def test_topology_gives_rank_0_to_the_trainers_first_rank_and_none_to_its_others():
    where = {"host": "h", "port": 1, "name": "n"}
    actor, rollout = DigenCheckpointEngine.build_topology(3, 2, [where, {}, {}])
    assert actor == {"rank": [0, -1, -1], "world_size": [3] * 3, "master": [where] * 3}
    assert rollout == {"rank": [1, 2], "world_size": [3] * 2, "master": [where] * 2}


def test_an_end_that_stays_out_joins_nothing_and_cannot_send():
    engine = DigenCheckpointEngine(BUCKET)
    assert engine.prepare() == {}
    engine.init_process_group(-1, 3, {})
    with pytest.raises(ChannelAborted, match="takes no part"):
        asyncio.run(engine.send_weights(iter(weights()), 1))


def test_a_bucket_that_holds_nothing_is_refused():
    with pytest.raises(ValueError, match="update_weights_bucket_megabytes gives 0 bytes"):
        DigenCheckpointEngine(0)
