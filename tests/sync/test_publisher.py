"""A publish counts only when every replica acknowledges the very version, tensors and checksum (I8)."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import ray

from verl_digen.config.deadlines import Deadlines
from verl_digen.config.digen import FailureConfig
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
        ({**SENT, "tensors": 0}, [ack("r0", tensors=0), ack("r1", tensors=0)], ["version 3", "published 0 tensors"]),
        (SENT, [ack("r0")], ["version 3", "not acknowledged by r1"]),
        (SENT, [], ["not acknowledged by r0, r1"]),
        (SENT, [ack("r0"), ack("r1", version=2)], ["r1 holds version 2", "sent 3"]),
        (SENT, [ack("r0", version=None), ack("r1")], ["r0 holds version None", "sent 3"]),
        (SENT, [ack("r0"), ack("r1", checksum=78)], ["r1 holds checksum 78", "sent 77"]),
        (SENT, [ack("r0", tensors=4), ack("r1")], ["r0 holds tensors 4", "sent 5"]),
    ],
)
def test_each_failure_is_named(sent, acks, words):
    with pytest.raises(PublishError) as error:
        check_acknowledgements(sent, acks, ["r0", "r1"])
    for word in words:
        assert word in str(error.value)


class Remote:
    """``worker.method.remote(...)`` of a fake worker: notes the call and gives its answer as the reference."""

    def __init__(self, calls: list, name: str, answer):
        self.calls, self.name, self.answer = calls, name, answer

    def remote(self, *args, **kwargs):
        self.calls.append((self.name, args))
        return self.answer(*args) if callable(self.answer) else self.answer


@pytest.fixture
def publisher(monkeypatch):
    """A disaggregated publisher of two replicas, with fake workers; ``publisher.checksum_now`` is the Trainer's."""
    calls: list = []
    state = SimpleNamespace(checksum=11)
    monkeypatch.setattr(ray, "get", lambda refs, timeout=None: list(refs))

    def worker(name, answer):
        return SimpleNamespace(
            execute_checkpoint_engine=Remote(calls, f"{name}.channel", {"host": "h", "port": 1}),
            publish_weights=Remote(calls, f"{name}.publish", answer),
            update_weights=Remote(calls, f"{name}.update", answer),
        )

    def sent(version, averaged):
        return {"version": version, "checksum": state.checksum + averaged, "tensors": 2, "sync/bytes": 8}

    def taken(name):
        # the publish before it in the list of calls tells which weights travel
        return lambda version: {**sent(version, calls[-2 if name == "r0" else -3][1][1]), "replica": name}

    replicas = [SimpleNamespace(name=n, workers=[worker(n, taken(n))]) for n in ("r0", "r1")]
    config = SimpleNamespace(backend="digen", custom_backend_module=None)
    ranks = TrainerGroup([worker("t0", sent)])
    deadlines = Deadlines.of(FailureConfig(generate_timeout_s=10, sync_timeout_s=5))
    publisher = WeightPublisher(config, ranks, replicas, colocated=False, deadlines=deadlines)
    publisher.test = SimpleNamespace(calls=calls, state=state, worker=worker, taken=taken)
    return publisher


def test_changed_tells_whether_the_checksum_moved(publisher):
    first = publisher.update_weights(0)
    assert (
        first["sync/changed"] == 1 and first["sync/bytes"] == 8 and (publisher.version, publisher.checksum) == (0, 11)
    )
    assert publisher.update_weights(1)["sync/changed"] == 0
    publisher.test.state.checksum = 12
    assert publisher.update_weights(2)["sync/changed"] == 1 and (publisher.version, publisher.checksum) == (2, 12)


def test_the_channel_is_built_once_and_again_for_a_new_replica(publisher):
    def connections():
        return sum(name == "t0.channel" and args[0] == "prepare" for name, args in publisher.test.calls)

    publisher.update_weights(0)
    publisher.update_weights(1)
    assert connections() == 1
    replica = publisher.replicas[1]
    replica.workers = [publisher.test.worker("r1", publisher.test.taken("r1"))]
    publisher.test.calls.clear()
    publisher.republish()
    assert connections() == 1 and publisher.version == 1


def test_a_replica_with_other_weights_fails_the_publish_and_keeps_the_old_version(publisher):
    publisher.update_weights(0)
    broken = publisher.replicas[1].workers[0].update_weights
    broken.answer = lambda version: {"replica": "r1", "version": version, "checksum": 1, "tensors": 2}
    with pytest.raises(PublishError, match="r1 holds checksum 1"):
        publisher.update_weights(1)
    assert publisher.version == 0


def test_a_publish_that_hangs_names_what_it_was_doing(publisher, monkeypatch):
    publisher.update_weights(0)

    def hang(refs, timeout=None):
        raise ray.exceptions.GetTimeoutError

    monkeypatch.setattr(ray, "get", hang)
    with pytest.raises(TimeoutError, match=r"publishing version 1 to 2 replicas took longer than 85 s .*2 x gen"):
        publisher.update_weights(1)
