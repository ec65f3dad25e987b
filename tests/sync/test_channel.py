"""The weight channel: a real broadcast to two other processes, and who takes which rank (I8)."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import ray
import torch

from verl_digen.sync.channel import DigenCheckpointEngine
from verl_digen.sync.checksum import tensors_checksum

PEER = Path(__file__).with_name("channel_peer.py")
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


def start(where: dict, rank: int, world: int, *versions: int) -> subprocess.Popen:
    command = [sys.executable, str(PEER), where["host"], str(where["port"]), str(rank), str(world), *map(str, versions)]
    path = os.pathsep.join([str(PEER.parents[2]), os.environ.get("PYTHONPATH", "")])
    env = {**os.environ, "VERL_PLATFORM": "cpu", "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env)


def result(process: subprocess.Popen) -> dict:
    out, _ = process.communicate(timeout=240)
    return json.loads(out.splitlines()[-1])


@pytest.mark.slow
def test_every_tensor_arrives_bit_for_bit_at_two_replicas(master):
    """One connection carries several versions; the peer that was told another version refuses what arrives."""
    engine, where = master
    peers = [start(where, 1, 3, 4, 5, 6), start(where, 2, 3, 4, 5, 99)]
    changed = [(n, t + 1) for n, t in weights()]
    try:
        engine.init_process_group(0, 3, where)
        sent = asyncio.run(engine.send_weights(iter(weights()), 4))
        engine.finalize()  # the channel stays open between publishes
        asyncio.run(engine.send_weights(iter(changed[-1:]), 5))
        asyncio.run(engine.send_weights(iter([]), 6))  # a header alone: the end that refuses it hangs up
        first, second = (result(peer) for peer in peers)
    finally:
        for peer in peers:
            peer.kill()
    both = [described(weights()), described(changed[-1:])]
    assert first == {"received": [*both, []]}
    assert second == {"received": both, "error": "version 6 arrived on the channel, 99 was announced"}
    assert sent["sync/bytes"] == sum(t.nbytes for _, t in weights()) and sent["sync/buckets"] > 3


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
