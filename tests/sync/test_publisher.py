"""A publish counts only when every replica acknowledges the very version, tensors and checksum (I8); whatever dies or
freezes in it, over sockets and over a transport that behaves like nccl, it ends, and everyone alive goes on."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace

import pytest
import ray

from tests.sync.doubles import Process, RankBody, ReplicaBody, deadlines, described, ray_of_futures, weights
from verl_digen.sync.publisher import PublishError, WeightPublisher, check_acknowledgements
from verl_digen.trainer.workgroup import TrainerGroup

SENT = {"version": 3, "checksum": 77, "tensors": 5}


def ack(replica: str, **changes) -> dict:
    return {**SENT, "replica": replica, **changes}


def test_good_acknowledgements_pass():
    check_acknowledgements(SENT, [ack("r1"), ack("r0")], ["r0", "r1"])


@pytest.mark.parametrize(
    ("sent", "acks", "words"),
    [
        ({**SENT, "tensors": 0}, [ack("r0", tensors=0), ack("r1", tensors=0)], ["version 3: 0 tensors"]),
        (SENT, [ack("r0")], ["version 3", "not acknowledged by r1"]),
        (SENT, [], ["not acknowledged by r0, r1"]),
        (SENT, [ack("r0"), ack("r1", version=2)], ["r1 holds version 2, 3 was sent"]),
        (SENT, [ack("r0", version=None), ack("r1")], ["r0 holds version None, 3 was sent"]),
        (SENT, [ack("r0"), ack("r1", checksum=78)], ["r1 holds checksum 78, 77 was sent"]),
        (SENT, [ack("r0", tensors=4), ack("r1")], ["r0 holds tensors 4, 5 was sent"]),
    ],
)
def test_each_failure_is_named(sent, acks, words):
    with pytest.raises(PublishError) as error:
        check_acknowledgements(sent, acks, ["r0", "r1"])
    for word in words:
        assert word in str(error.value)


@pytest.fixture
def build(transport, monkeypatch):
    """A Trainer of two ranks and replicas that take its weights for real."""
    ray_of_futures(monkeypatch)

    def make(replicas: int = 2, hold=lambda: None, **seconds: float) -> SimpleNamespace:
        table = deadlines(**{"ping": 1.0, "connect": 60.0, "publish": 60.0} | seconds)
        gloo = transport == "gloo"
        rank, other = Process(RankBody(table), gloo), Process(SimpleNamespace(publish_weights=lambda *_: {}), gloo)
        fleet = [
            SimpleNamespace(name=f"r{i}", workers=[Process(ReplicaBody(f"r{i}", table, hold), gloo)])
            for i in range(replicas)
        ]
        publisher = WeightPublisher(TrainerGroup([rank, other]), colocated=False, deadlines=table)
        return SimpleNamespace(publisher=publisher, replicas=fleet, rank=rank, table=table, gloo=gloo)

    return make


def held(replica) -> tuple:
    body = replica.workers[0].body
    return body.sampler.version, described(body.weights.items())


def test_all_replicas_hold_what_was_published(build):
    setup = build(3)
    first = setup.publisher.publish(0, setup.replicas)
    assert first["sync/changed"] == 1 and first["sync/bytes"] == sum(t.nbytes for _, t in weights())
    assert [held(replica) for replica in setup.replicas] == [(0, described(weights()))] * 3
    setup.rank.body.shift = 0
    assert setup.publisher.publish(1, setup.replicas)["sync/changed"] == 0  # the weights did not move
    setup.rank.body.shift = None
    assert setup.publisher.publish(2, setup.replicas)["sync/changed"] == 1
    assert [held(replica) for replica in setup.replicas] == [(2, described(weights(2)))] * 3
    assert setup.publisher.version == 2


def test_the_channel_is_kept_while_its_members_are(build):
    setup = build(2)
    for version in range(3):
        setup.publisher.publish(version, setup.replicas)
    ends = [process.body._ends for process in [setup.rank, *(r.workers[0] for r in setup.replicas)]]
    assert [list(end) for end in ends] == [["publish-1"]] * 3
    assert next(iter(ends[0].values()))._transfers == 3
    setup.publisher.publish(3, setup.replicas[:1])
    assert [list(end) for end in ends] == [["publish-2"]] * 2 + [["publish-1"]]
    setup.publisher.publish(4, setup.replicas)
    assert [list(end) for end in ends] == [["publish-3"]] * 3


def test_a_new_replica_gets_the_version_from_one_that_holds_it_and_not_from_the_trainer(build):
    setup = build(3)
    setup.publisher.publish(5, setup.replicas[:1], averaged=True)
    setup.rank.calls.clear()
    setup.publisher.bring(setup.replicas[1:], setup.replicas[0])
    assert [held(replica) for replica in setup.replicas] == [(5, described(weights(5.5)))] * 3
    assert setup.rank.calls == []
    assert list(setup.replicas[0].workers[0].body._ends) == ["publish-1"]  # only the kept channel is left


def test_the_trainer_sends_when_no_replica_holds_the_version(build):
    setup = build(2)
    setup.publisher.publish(5, setup.replicas[:1], averaged=True)
    setup.publisher.bring(setup.replicas[1:], None)
    assert held(setup.replicas[1]) == (5, described(weights(5.5)))


def test_a_source_with_other_weights_is_refused(build):
    setup = build(2)
    setup.publisher.publish(5, setup.replicas[:1])
    setup.replicas[0].workers[0].body.weights["last"] += 1
    with pytest.raises(PublishError, match="r0 sent checksum"):
        setup.publisher.bring(setup.replicas[1:], setup.replicas[0])


def test_a_replica_that_holds_other_weights_fails_the_publish_and_keeps_the_old_version(build):
    setup = build(2)
    setup.publisher.publish(0, setup.replicas)
    body = setup.replicas[1].workers[0].body
    original = body.update_weights
    body.update_weights = lambda *args: {**original(*args), "checksum": 1}
    with pytest.raises(PublishError, match="r1 holds checksum 1"):
        setup.publisher.publish(1, setup.replicas)
    assert setup.publisher.version == 0


@pytest.mark.parametrize("how", ["killed before", "killed while waiting", "frozen", "raises"])
@pytest.mark.parametrize("victim", ["replica", "source of a replacement"])
def test_what_is_lost_in_a_transfer_ends_it_for_all(build, how, victim):
    """The deadlines of the channel are a minute; everyone alive has left the transfer long before, and answers."""
    gate = threading.Event()
    setup = build(4, hold=lambda: gate.wait(20) if gate_shut else None, publish=2.0 if how == "frozen" else 60.0)
    gate_shut = False
    publisher, replicas = setup.publisher, setup.replicas
    publisher.publish(0, replicas[:2])
    lost = replicas[1].workers[0]
    gate_shut = how == "killed while waiting"
    if how == "killed before":
        lost.kill()
    if how == "frozen":
        lost.frozen = True
    if how == "raises":
        lost.body.receive = lost.body.send = None
    if victim == "replica":
        transfer, left = (lambda: publisher.publish(1, replicas)), [replicas[0], *replicas[2:]]
    else:
        transfer, left = (lambda: publisher.bring(replicas[2:], replicas[1])), replicas[2:]
    if gate_shut:
        threading.Timer(0.3, lambda: (lost.kill(), gate.set())).start()
    started = time.monotonic()
    with pytest.raises((ray.exceptions.RayError, TimeoutError)):
        transfer()
    assert time.monotonic() - started < 40
    assert all(r.workers[0].ping.remote().result(5) for r in left)
    assert all(process.body._ends.keys() <= {"publish-1"} for process in [setup.rank, *(r.workers[0] for r in left)])
    if how == "frozen":
        lost.kill()
    gate_shut = False
    setup.publisher.publish(2, left)  # all of them can be used again at once
    assert [held(replica) for replica in left] == [(2, described(weights(2)))] * len(left)


def test_replicas_that_wait_in_a_transfer_answer_a_ping(build):
    gate = threading.Event()
    setup = build(2, hold=lambda: gate.wait(20))
    publishing = threading.Thread(target=setup.publisher.publish, args=(1, setup.replicas))
    publishing.start()
    try:
        time.sleep(0.2)
        assert all(replica.workers[0].ping.remote().result(2)["version"] is None for replica in setup.replicas)
        assert setup.rank.ping.remote().result(2)["pid"]
    finally:
        gate.set()
        publishing.join()
    assert [replica.workers[0].ping.remote().result(2)["version"] for replica in setup.replicas] == [1, 1]


def test_a_publish_that_hangs_names_what_it_was_doing(build):
    gate = threading.Event()
    setup = build(2, hold=lambda: gate.wait(20), publish=0.5)
    with pytest.raises(TimeoutError, match="publishing version 1 to 2 replicas took longer than 0.5 s .*publish of"):
        setup.publisher.publish(1, setup.replicas)
    gate.set()
