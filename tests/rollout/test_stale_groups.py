"""TCSS through the real manager, with replicas whose timing is forced: I4 and I5 hold whatever happens.

A replica is a line of calls that it handles in order, as a Ray actor does: fragments and publishes. It stamps a
fragment with the version it holds when its turn comes, and refuses one that asks for another.
"""

from __future__ import annotations

import asyncio
import math
import random
import threading
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
import ray
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_digen.config.digen import DigenConfig, FailureConfig, GapConfig, TcssConfig
from verl_digen.rollout.manager import DiffusionRolloutManager, RolloutPool
from verl_digen.rollout.requests import VALIDATION, FragmentReport, PromptGroup
from verl_digen.schedule.tcss import StaleLedger, StalenessError

P, N = 4, 3


class Line:
    """A replica's process: handles calls one at a time, in the order in which they were made."""

    def __init__(self, name, version, seconds, dies):
        self.name, self.version, self.seconds, self.dies = name, version, seconds, dies
        self.dead, self.refused = False, 0
        self._last = None
        self.generate = SimpleNamespace(options=lambda num_returns: SimpleNamespace(remote=self._generate))

    def _turn(self):
        before, self._last = self._last, asyncio.get_running_loop().create_future()
        return before, self._last

    def _generate(self, fragment):
        pixels = asyncio.get_running_loop().create_future()
        pixels.set_result(fragment.samples)
        return self._report(fragment, *self._turn()), pixels

    async def _report(self, fragment, before, mine):
        if before is not None:
            await before
        await asyncio.sleep(self.seconds())
        self.dead = self.dead or self.dies(fragment)
        mine.set_result(None)
        if self.dead:
            raise ray.exceptions.RayActorError()
        if self.version != fragment.version:
            self.refused += 1
            raise ValueError(f"{self.name} holds version {self.version}, asked for {fragment.version}")
        return FragmentReport(
            fragment_id=fragment.fragment_id,
            replica=self.name,
            version=self.version,
            samples=fragment.samples,
            noise_hashes=tuple(f"{u}/{j}" for u, j in fragment.samples),
            transitions=(2,) * len(fragment.samples),
            effective={},
            started=0.0,
            ended=1.0,
            phases={},
            peak_memory_bytes=0,
        )

    async def update(self, version, seconds=0.0):
        before, mine = self._turn()
        if before is not None:
            await before
        await asyncio.sleep(seconds)
        self.version = version
        mine.set_result(None)


class Judge:
    def __init__(self):
        self.compute_score_batch = SimpleNamespace(remote=self._score)

    async def _score(self, pixels):
        return [{"reward_score": float(j)} for _, j in await pixels]


def step_groups(step, partition="train"):
    return [
        PromptGroup(
            uid=f"{partition}{step}_{i}",
            n=N,
            prompt="p",
            negative_prompt="",
            ground_truth="0",
            data_source="d",
            partition=partition,
        )
        for i in range(P)
    ]


class Driver:
    """The trainer's side: announces, takes groups, publishes; replaces what died with the published version."""

    def __init__(self, ratio, replicas=2, size=1, seconds=None, dies=None, published=0):
        tcss = TcssConfig(enable=True, max_stale_ratio=ratio) if ratio else TcssConfig()
        self.digen = DigenConfig(
            placement="disaggregated",
            gap=GapConfig(enable=True, fragment_size=size),
            tcss=tcss,
            failure=FailureConfig(generate_timeout_s=20.0, reward_timeout_s=20.0, max_retries=20),
        )
        self.seconds, self.dies = seconds or (lambda: 0.0), dies or (lambda fragment: False)
        self.version, self.lock, self.deaths = published, threading.Lock(), 0
        self.replicas = [
            SimpleNamespace(name=f"replica{i}", workers=[self._line(f"replica{i}")]) for i in range(replicas)
        ]
        pool = RolloutPool(
            replicas=self.replicas,
            replace=self._replace,
            expected={"train": {}, "validation": {}},
            reward_restart=lambda index: None,
            ledger=StaleLedger(P, ratio, published=published),
        )
        self.manager = DiffusionRolloutManager(self.digen, pool, [Judge()], N)

    def _line(self, name):
        return Line(name, self.version, self.seconds, self.dies)

    async def _replace(self, replica, worker):
        await asyncio.get_running_loop().run_in_executor(None, self._restart, replica, worker)

    def _restart(self, replica, worker):
        with self.lock:
            assert replica.workers[0] is worker
            self.deaths += 1
            replica.workers = [self._line(replica.name)]

    def announce(self, last):
        step = self.version
        ahead = [] if step + 1 >= last or not self.digen.tcss.enable else step_groups(step + 1)
        self.manager.generate_sequences(step_groups(step), version=step, training_step=step + 1, ahead=ahead)

    def take(self):
        return [self.manager.next_group(20.0) for _ in range(P)]

    def settle(self):
        """Until replicas have nothing that they may do."""
        deadline = time.monotonic() + 20.0
        while self.manager.in_flight:
            assert time.monotonic() < deadline
            time.sleep(0.001)

    def publish(self, seconds=0.0, averaged=False, version=None):
        version = self.version + 1 if version is None else version
        with self.manager.publishing(version, averaged=averaged), self.lock:
            lines = [replica.workers[0] for replica in self.replicas]
            loop = self.manager._loop
            for taken in [asyncio.run_coroutine_threadsafe(line.update(version, seconds), loop) for line in lines]:
                taken.result(20.0)
            self.version = version


@pytest.fixture
def driver():
    made = []

    def make(*args, **options):
        made.append(Driver(*args, **options))
        return made[-1]

    yield make
    for one in made:
        one.manager.close()


def check(step, results, ratio):
    """I4 and I5 of a step; returns its stale groups."""
    assert {r.group.uid for r in results} == {g.uid for g in step_groups(step)}
    for result in results:
        assert [s.j for s in result.samples] == list(range(N))
        assert {s.version for s in result.samples} == {result.version}
        assert result.staleness == step - result.version and result.staleness in (0, 1)
    stale = sum(r.staleness for r in results)
    assert stale <= math.floor(ratio * P + 1e-9)
    return stale


@pytest.mark.parametrize("ratio", [0.0, 0.25, 0.5, 1.0])
@pytest.mark.parametrize("size", [1, N, 2 * N])
def test_while_the_trainer_trains_the_allowance_is_used_up_and_not_more(driver, ratio, size):
    run = driver(ratio, size=size)
    stale = []
    for step in range(4):
        run.announce(last=4)
        results = run.take()
        run.settle()  # the Trainer takes its time
        stale.append(check(step, results, ratio))
        run.publish()
    groups = max(1, size // N)  # a fragment of two groups starts only if both may be stale
    assert stale == [0] + [math.floor(ratio * P) // groups * groups] * 3
    assert run.manager.pool.ledger.published == 4


@given(seed=st.integers(0, 10**9))
@settings(max_examples=25, deadline=None)
def test_deaths_delays_and_unlike_replicas_never_break_the_bound(seed):
    draw = random.Random(seed)
    ratio = draw.choice([0.0, 0.25, 0.5, 1.0])
    pace, share = draw.choice([0.0, 0.001, 0.003]), draw.choice([0.0, 0.05, 0.15])
    run = Driver(
        ratio,
        replicas=draw.randint(1, 3),
        size=draw.choice([1, 2, N, 2 * N]),
        seconds=lambda: pace * draw.choice([0, 1, 4]),
        dies=lambda fragment: draw.random() < share,
    )
    try:
        for step in range(5):
            run.announce(last=5)
            results = run.take()
            if draw.random() < 0.5:
                run.settle()
            check(step, results, ratio)
            run.publish(seconds=draw.choice([0.0, 0.005]))
        if not run.deaths:  # nothing was asked for under a version that the replica did not hold when its turn came
            assert not any(replica.workers[0].refused for replica in run.replicas)
    finally:
        run.manager.close()


def test_a_stale_group_whose_fragment_is_lost_at_the_publish_starts_over_under_the_new_version(driver):
    """Fragments of step 1 die in front of the publish; the version they were begun with is nobody's any more."""
    lost = threading.Event()

    def dies(fragment):
        return fragment.samples[0][0].startswith("train1_") and not lost.is_set() and fragment.version == 0

    run = driver(0.5, dies=dies, seconds=lambda: 0.01)
    run.announce(last=2)
    check(0, run.take(), 0.5)
    run.publish(seconds=0.05)
    lost.set()
    run.announce(last=2)
    assert check(1, run.take(), 0.5) == 0
    assert run.deaths >= 1


def test_a_validation_goes_first_and_loses_nothing(driver):
    """Stale groups are under way and some have arrived: the validation gets its own groups only."""
    run = driver(1.0, seconds=lambda: 0.002)
    run.announce(last=2)
    run.take()
    run.publish()
    run.manager.generate_sequences(step_groups(9, VALIDATION), version=1, training_step=1)
    validated = run.take()
    assert {r.group.uid for r in validated} == {g.uid for g in step_groups(9, VALIDATION)}
    assert {r.version for r in validated} == {1}
    run.announce(last=2)
    check(1, run.take(), 1.0)


def test_averaged_weights_generate_no_training_sample(driver):
    """Between the two publishes around a validation of averaged weights no group of the next step begins."""
    run = driver(0.25, seconds=lambda: 0.01)
    run.announce(last=3)
    run.take()
    run.publish()
    run.publish(averaged=True, version=1)
    waiting = run.manager._training.queue.unclaimed(1)
    run.manager.generate_sequences(step_groups(9, VALIDATION), version=1, training_step=1)
    run.take()
    run.settle()
    assert run.manager._training.queue.unclaimed(1) == waiting > 0
    run.publish(version=1)
    run.announce(last=3)
    check(1, run.take(), 0.25)


def test_a_resumed_run_counts_on(driver):
    run = driver(0.5, published=7)
    for step in (7, 8):
        run.announce(last=9)
        results = run.take()
        run.settle()
        assert check(step, results, 0.5) == (0 if step == 7 else 2)
        run.publish()


def test_a_group_that_is_too_stale_is_refused_when_it_is_taken(driver):
    run = driver(0.5, published=3)
    run.announce(last=5)
    book, step, group = run.manager._done.get(timeout=20.0)
    run.manager._done.put((book, step, replace(group, version=2)))
    with pytest.raises(StalenessError, match="under version 3, but is trained in step 3 with samples of version 2"):
        run.take()
