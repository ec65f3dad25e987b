"""Calls to the Trainer's ranks: the same order on every rank whoever calls, the payload put once."""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future
from types import SimpleNamespace

import pytest
import ray

from verl_digen.config.deadlines import Deadline
from verl_digen.trainer.workgroup import TrainerGroup


class Rank:
    """Notes its calls; submitting one takes a moment, so that two callers can come between each other."""

    def __init__(self):
        self.calls: list[tuple] = []

    def __getattr__(self, method: str):
        def remote(*args, **kwargs):
            time.sleep(0.001)
            self.calls.append((method, args, kwargs))
            return f"ref of {method}"

        return SimpleNamespace(remote=remote)


@pytest.fixture
def store(monkeypatch) -> list:
    """What was put into the object store; a reference is a string."""
    stored: list = []
    monkeypatch.setattr(ray, "put", lambda value: stored.append(value) or f"stored {len(stored)}")
    return stored


def test_every_rank_sees_the_calls_of_all_threads_in_the_same_order():
    group = TrainerGroup([Rank() for _ in range(4)])

    def work(name: str) -> None:
        for number in range(10):
            group.call(name, number)
            group.first("alone")

    threads = [threading.Thread(target=work, args=(f"caller{i}",)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    orders = [[call for call in rank.calls if call[0] != "alone"] for rank in group.workers]
    assert len(orders[0]) == 30 and all(order == orders[0] for order in orders)
    assert [call[0] for call in group.workers[1].calls].count("alone") == 0


def test_a_payload_is_put_once_and_numbers_are_not(store):
    group = TrainerGroup([Rank() for _ in range(3)])
    fragment = {"samples": (1, 2)}
    group.call("accumulate", fragment, 3, scale=1.0, rule=("a", "b"))
    assert store == [fragment, ("a", "b")]
    assert {(method, args, tuple(kwargs.items())) for r in group.workers for method, args, kwargs in r.calls} == {
        ("accumulate", ("stored 1", 3), (("scale", 1.0), ("rule", "stored 2")))
    }


def test_one_rank_gets_its_payload_directly(store):
    group = TrainerGroup([Rank()])
    group.call("accumulate", {"samples": ()})
    assert store == [] and group.workers[0].calls == [("accumulate", ({"samples": ()},), {})]


def test_what_is_not_done_in_time_is_named(monkeypatch):
    def late(refs, timeout):
        assert timeout == 5
        raise ray.exceptions.GetTimeoutError

    monkeypatch.setattr(ray, "get", late)
    group = TrainerGroup([Rank(), Rank()])
    with pytest.raises(TimeoutError, match=r"opening a transaction on 2 ranks took longer than 5 s .*train_timeout_s"):
        group.get(group.call("begin"), "opening a transaction", Deadline(5, "train_timeout_s"))


def test_the_last_answer_good_or_bad_ends_a_call():
    futures, told = [Future() for _ in range(3)], []
    refs = [SimpleNamespace(future=lambda future=future: future) for future in futures]
    TrainerGroup([]).when_done(refs, lambda: told.append("done"))
    futures[2].set_result(1)
    futures[0].set_exception(RuntimeError("a rank died"))
    assert not told
    futures[1].set_result(2)
    assert told == ["done"]
