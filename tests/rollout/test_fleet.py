"""Replicas that die, freeze and lose their node, over sockets and over a transport like nccl (I7, I8)."""

from __future__ import annotations

import asyncio
import threading
import time
from concurrent.futures import Future
from types import SimpleNamespace

import pytest
import ray

from tests.sync.conftest import transport  # noqa: F401 - a fixture
from tests.sync.doubles import Process, RankBody, ReplicaBody, deadlines, described, ray_of_futures, weights
from verl_digen.rollout import fleet as fleet_module
from verl_digen.rollout.fleet import Fleet
from verl_digen.sync.publisher import PublishError, WeightPublisher
from verl_digen.trainer.workgroup import TrainerGroup


class Processes:
    """Starts fake processes; nodes of the names in ``gone`` are not there."""

    def __init__(self, body):
        self.body, self.gone, self.started = body, set(), []
        self.load = lambda name: {}

    def placed(self, replica) -> bool:
        return replica.name not in self.gone

    def start(self, replica) -> Future:
        replica.workers[0].kill()
        self.started.append(replica.name)
        replica.workers = [self.body(replica.name)]
        replica.workers[0].body.init_model = self.load
        return replica.workers[0].init_model.remote(replica.name)


@pytest.fixture
def build(transport, monkeypatch):  # noqa: F811 - the fixture
    ray_of_futures(monkeypatch)
    monkeypatch.setattr(fleet_module, "_REVISIT_S", 0.05)

    def make(replicas: int = 4, retries: int = 2, **seconds: float) -> SimpleNamespace:
        table = deadlines(**{"ping": 1.0, "connect": 60.0, "publish": 60.0, "replace": 60.0, "load": 30.0} | seconds)
        gloo = transport == "gloo"

        def process(name: str) -> Process:
            return Process(ReplicaBody(name, table), gloo)

        handles = [SimpleNamespace(name=f"r{i}", workers=[process(f"r{i}")]) for i in range(replicas)]
        rank = Process(RankBody(table), gloo)
        publisher = WeightPublisher(TrainerGroup([rank]), colocated=False, deadlines=table)
        processes = Processes(process)
        fleet = Fleet(handles, publisher, processes=processes, deadlines=table, max_retries=retries)
        return SimpleNamespace(fleet=fleet, replicas=handles, rank=rank, processes=processes)

    return make


def held(replica) -> tuple:
    body = replica.workers[0].body
    return body.sampler.version, described(body.weights.items())


def replaced(setup, *places: int) -> None:
    """As the manager does: all of them at the same time, each waits until it is served again."""

    async def all_of() -> None:
        await asyncio.gather(*(setup.fleet.replace(setup.replicas[i], setup.replicas[i].workers[0]) for i in places))

    asyncio.run(asyncio.wait_for(all_of(), 60))


def test_an_idle_dead_replica_costs_no_step(build):
    """Two died between the steps: started together, and the publish is one transfer to all."""
    setup = build()
    setup.fleet.publish(0)
    setup.replicas[1].workers[0].kill()
    setup.replicas[3].workers[0].kill()
    setup.rank.calls.clear()
    setup.fleet.publish(1)
    assert setup.processes.started == ["r1", "r3"] and setup.rank.calls.count("publish_weights") == 1
    assert [held(replica) for replica in setup.replicas] == [(1, described(weights(1)))] * 4
    assert [setup.fleet.version_of(replica) for replica in setup.replicas] == [1] * 4


@pytest.mark.parametrize("how", ["killed", "stuck", "frozen"])
def test_the_dead_are_collected_and_get_the_weights_together_from_a_living_one(build, how):
    """One is reported; another one is dead and nobody knows yet. The Trainer is not asked."""
    setup = build()
    setup.fleet.publish(3)
    setup.rank.calls.clear()
    if how == "killed":
        setup.replicas[1].workers[0].kill()
    if how == "frozen":
        setup.replicas[1].workers[0].frozen = True
    setup.replicas[2].workers[0].kill()
    replaced(setup, 1)
    assert sorted(setup.processes.started) == ["r1", "r2"]
    assert [held(replica) for replica in setup.replicas] == [(3, described(weights(3)))] * 4
    assert "publish_weights" not in setup.rank.calls
    assert sum(replica.workers[0].calls.count("send_weights") for replica in setup.replicas) == 1


def test_several_reports_of_one_death_replace_it_once(build):
    setup = build(2)
    setup.fleet.publish(0)
    setup.replicas[0].workers[0].kill()
    replaced(setup, 0, 0)
    assert setup.processes.started == ["r0"]


def test_when_all_are_dead_the_trainer_sends(build):
    setup = build(2)
    setup.fleet.publish(4)
    for replica in setup.replicas:
        replica.workers[0].kill()
    replaced(setup, 0, 1)
    assert [held(replica) for replica in setup.replicas] == [(4, described(weights(4)))] * 2


def test_a_source_that_dies_while_it_sends_is_replaced_too(build):
    setup = build(3)
    setup.fleet.publish(0)
    source = setup.replicas[0].workers[0]
    source.body.send = lambda *_: source.kill() or time.sleep(0.1)
    setup.replicas[2].workers[0].kill()
    replaced(setup, 2)
    deadline = time.monotonic() + 30
    while setup.fleet.version_of(setup.replicas[0]) != 0 and time.monotonic() < deadline:
        time.sleep(0.05)
    assert sorted(setup.processes.started)[:2] == ["r0", "r2"]
    assert [held(replica) for replica in setup.replicas] == [(0, described(weights()))] * 3


def test_a_lost_node_is_waited_for_beside_the_run_and_used_again(build):
    """r2 and r3 lose their node: the others are published to; when it is back they get that version."""
    setup = build()
    setup.fleet.publish(0)
    setup.processes.gone = {"r2", "r3"}
    for place in (2, 3):
        setup.replicas[place].workers[0].kill()
    waiting = threading.Thread(target=replaced, args=(setup, 2, 3))
    waiting.start()
    setup.fleet.publish(1)
    setup.fleet.publish(2)
    assert [held(replica)[0] for replica in setup.replicas[:2]] == [2, 2] and waiting.is_alive()
    assert [setup.fleet.version_of(replica) for replica in setup.replicas] == [2, 2, None, None]
    assert setup.processes.started == []
    setup.processes.gone = set()
    waiting.join(30)
    assert sorted(setup.processes.started) == ["r2", "r3"]
    assert [held(replica) for replica in setup.replicas] == [(2, described(weights(2)))] * 4


def test_a_node_that_is_lost_while_its_replica_loads_is_no_error(build):
    setup = build(2)
    setup.fleet.publish(0)

    def load(name):
        setup.processes.gone = {"r1"}
        time.sleep(1.5)

    setup.processes.load = load
    setup.replicas[1].workers[0].kill()
    setup.fleet.publish(1)
    assert [setup.fleet.version_of(replica) for replica in setup.replicas] == [1, None]


def test_when_no_node_is_left_the_error_says_so(build):
    setup = build(2, replace=0.5)
    setup.fleet.publish(0)
    setup.processes.gone = {"r0", "r1"}
    for replica in setup.replicas:
        replica.workers[0].kill()
    with pytest.raises(PublishError, match="version 1 cannot be published: r0, r1: no node has a place for them"):
        setup.fleet.publish(1)
    with pytest.raises(PublishError, match="r0, r1: no node has a place for them, and none came back within 0.5 s"):
        replaced(setup, 0)


def test_a_replica_that_cannot_be_started_ends_those_who_wait(build):
    setup = build(2, retries=1)
    setup.fleet.publish(0)

    def load(name):
        raise OSError("the disk is gone")

    setup.processes.load = load
    setup.replicas[1].workers[0].kill()
    with pytest.raises(ray.exceptions.RayError):
        replaced(setup, 1)


def test_a_fault_of_the_trainer_is_not_repeated(build):
    """All replicas live: what failed is the send, and it is raised at once."""
    setup = build(2)
    setup.fleet.publish(0)
    setup.rank.body.send = None
    setup.rank.calls.clear()
    with pytest.raises(ray.exceptions.RayError):
        setup.fleet.publish(1)
    assert setup.rank.calls.count("publish_weights") == 1
