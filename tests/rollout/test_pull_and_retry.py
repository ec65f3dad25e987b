"""The rollout manager with replicas and reward workers that answer from a script: pull order, retries, refusals."""

from __future__ import annotations

import asyncio
import collections
from types import SimpleNamespace

import numpy as np
import pytest
import ray

from verl_digen.config.digen import DigenConfig, FailureConfig, GapConfig
from verl_digen.rollout.manager import DiffusionRolloutManager, RolloutError, RolloutPool
from verl_digen.rollout.requests import FragmentReport, PromptGroup

EFFECTIVE = {"num_steps": 4}


class FakeWorker:
    """Answers ``generate.options(num_returns=2).remote(fragment)`` with two awaitables."""

    def __init__(self, replica, seconds=0.0, behave=None):
        self.replica, self.seconds, self.behave = replica, seconds, behave or (lambda fragment: None)
        self.fragments = []
        self._busy = asyncio.Lock()
        self.generate = SimpleNamespace(options=lambda num_returns: SimpleNamespace(remote=self._generate))

    def _generate(self, fragment):
        pixels = asyncio.get_running_loop().create_future()
        pixels.set_result(fragment.samples)
        return self._report(fragment), pixels

    async def _report(self, fragment):
        async with self._busy:  # one call at a time, as the actor
            await asyncio.sleep(self.seconds)
            changes = self.behave(fragment) or {}
            self.fragments.append(fragment)
            values = {
                "fragment_id": fragment.fragment_id,
                "replica": self.replica.name,
                "version": fragment.version,
                "samples": fragment.samples,
                "noise_hashes": tuple(f"{u}/{j}" for u, j in fragment.samples),
                "transitions": (3,) * len(fragment.samples),
                "effective": dict(EFFECTIVE),
                "started": 0.0,
                "ended": 1.0,
                "phases": {},
                "peak_memory_bytes": 0,
            }
            return FragmentReport(**(values | changes))


class FakeReward:
    def __init__(self, behave=None):
        self.behave = behave or (lambda samples: None)
        self.compute_score_batch = SimpleNamespace(remote=self._score)

    async def _score(self, pixels):
        samples = await pixels
        special = self.behave(samples)
        if special is not None:
            return special
        return [{"reward_score": float(j), "reward_extra_info": {"acc": 1.0}} for _, j in samples]


def groups(count=3, n=4):
    return [
        PromptGroup(uid=f"g{i}", n=n, prompt=f"p{i}", negative_prompt="", ground_truth="0", data_source="d")
        for i in range(count)
    ]


@pytest.fixture
def build():
    managers = []

    def make(*, replicas=1, seconds=(), behave=(), reward=None, fragment_size=2, restart=True, **failure):
        handles, restarts = [], []
        for rank in range(replicas):
            replica = SimpleNamespace(name=f"replica{rank}", workers=[])
            replica.workers.append(
                FakeWorker(
                    replica,
                    seconds[rank] if rank < len(seconds) else 0.0,
                    behave[rank] if rank < len(behave) else None,
                )
            )
            handles.append(replica)

        def respawn(replica):
            restarts.append(replica.name)
            replica.workers = [FakeWorker(replica)]

        digen = DigenConfig(
            gap=GapConfig(enable=True, fragment_size=fragment_size),
            failure=FailureConfig(**{"generate_timeout_s": 5.0, "reward_timeout_s": 5.0} | failure),
        )
        reward_restarts = []

        def respawn_reward(index):
            reward_restarts.append(index)
            return FakeReward()

        pool = RolloutPool(
            replicas=handles,
            restart=respawn if restart else None,
            expected={"train": EFFECTIVE, "validation": EFFECTIVE},
            reward_restart=respawn_reward,
        )
        manager = DiffusionRolloutManager(digen, pool, [reward or FakeReward()], 4)
        managers.append(manager)
        return SimpleNamespace(manager=manager, replicas=handles, restarts=restarts, reward_restarts=reward_restarts)

    yield make
    for manager in managers:
        manager.close()


def collect(manager, wanted, version=0):
    manager.generate_sequences(wanted, version=version, training_step=1)
    return [manager.next_group(10.0) for _ in wanted]


def test_every_sample_comes_once_and_groups_are_whole(build):
    setup = build(replicas=2)
    results = collect(setup.manager, groups())
    assert {r.group.uid for r in results} == {"g0", "g1", "g2"}
    for result in results:
        assert [s.j for s in result.samples] == [0, 1, 2, 3]
        assert [s.reward for s in result.samples] == [0.0, 1.0, 2.0, 3.0]
        assert result.version == 0
    generated = [s for replica in setup.replicas for f in replica.workers[0].fragments for s in f.samples]
    assert sorted(generated) == sorted(s for g in groups() for s in g.samples)


def test_a_slow_replica_takes_less(build):
    setup = build(replicas=2, seconds=(0.01, 0.1), fragment_size=1)
    collect(setup.manager, groups(6))
    fast, slow = (len(replica.workers[0].fragments) for replica in setup.replicas)
    assert fast + slow == 24 and fast > 2 * slow


def failing_first(times, error):
    """Raise ``error`` the first ``times`` calls."""
    calls = collections.Counter()

    def behave(fragment):
        calls["n"] += 1
        if calls["n"] <= times:
            raise error

    return behave


def test_an_exception_is_retried_without_a_restart(build):
    setup = build(behave=(failing_first(2, RuntimeError("flaky")),))
    assert len(collect(setup.manager, groups())) == 3
    assert setup.restarts == []


def test_a_death_restarts_the_replica_once_although_two_fragments_were_there(build):
    setup = build(behave=(failing_first(100, ray.exceptions.RayActorError()),))
    assert len(collect(setup.manager, groups())) == 3
    assert setup.restarts == ["replica0"]


def test_a_hang_restarts_the_replica(build):
    setup = build(seconds=(60.0,), generate_timeout_s=0.2)
    assert len(collect(setup.manager, groups())) == 3
    assert setup.restarts == ["replica0"]


def test_colocated_deaths_end_the_step(build):
    setup = build(behave=(failing_first(100, ray.exceptions.RayActorError()),), restart=False)
    with pytest.raises(RolloutError, match=r"replica0"):
        collect(setup.manager, groups())


def test_when_the_retries_are_used_up_sample_place_and_cause_are_named(build):
    setup = build(behave=(failing_first(100, RuntimeError("no memory")),), max_retries=1)
    with pytest.raises(RolloutError) as caught:
        collect(setup.manager, groups())
    for part in ("(g0, 0)", "replica0", "no memory", "max_retries=1", "failed 2 times"):
        assert part in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"version": 7}, "generated under version 7 instead of 0"),
        ({"effective": {"num_steps": 9}}, "num_steps: 4 -> 9"),
        ({"noise_hashes": ("same", "same")}, "share their initial noise"),
    ],
)
def test_what_is_not_as_asked_is_discarded_and_generated_again(build, changes, expected):
    calls = collections.Counter()

    def once(fragment):
        calls["n"] += 1
        return changes if calls["n"] == 1 else None

    assert len(collect(build(behave=(once,)).manager, groups())) == 3

    with pytest.raises(RolloutError, match=expected):
        collect(build(behave=(lambda fragment: changes,)).manager, groups())


@pytest.mark.parametrize(
    ("scores", "expected"),
    [
        ([{"reward_score": float("nan")}, {"reward_score": 0.0}], "must be a finite number"),
        ([{"reward_score": None}, {"reward_score": 0.0}], "must be a finite number"),
        ([{"reward_score": 0.0}], "1 rewards came back for 2 samples"),
    ],
)
def test_a_reward_that_is_no_number_is_never_a_value(build, scores, expected):
    setup = build(reward=FakeReward(lambda samples: scores))
    with pytest.raises(RolloutError, match=expected):
        collect(setup.manager, groups())


def test_a_reward_that_raises_is_retried_and_then_named(build):
    def raises(samples):
        raise RuntimeError("the judge is out")

    setup = build(reward=FakeReward(raises), max_retries=1)
    with pytest.raises(RolloutError, match="the judge is out") as caught:
        collect(setup.manager, groups())
    assert "(g0, 0)" in str(caught.value) and "max_retries=1" in str(caught.value)


def test_a_dead_reward_worker_is_replaced(build):
    def dies(samples):
        raise ray.exceptions.RayActorError()

    setup = build(reward=FakeReward(dies))
    assert len(collect(setup.manager, groups())) == 3
    assert setup.reward_restarts and set(setup.reward_restarts) == {0}


def test_a_wait_says_what_it_waits_for(build):
    setup = build(seconds=(5.0,), generate_timeout_s=60.0)
    setup.manager.generate_sequences(groups(1), version=0, training_step=1)
    with pytest.raises(TimeoutError, match=r"4 samples of 1 groups: g0 \(4 of 4\)"):
        setup.manager.next_group(0.2)


def test_pixels_of_asked_samples_reach_the_driver(build):
    setup = build()

    class Pixels:
        batch = {"pixels": [SimpleNamespace(numpy=lambda: np.zeros(1)), SimpleNamespace(numpy=lambda: np.ones(1))]}

    worker = setup.replicas[0].workers[0]

    def generate(fragment):
        pixels = asyncio.get_running_loop().create_future()
        pixels.set_result(Pixels())
        return worker._report(fragment), pixels

    worker.generate = SimpleNamespace(options=lambda num_returns: SimpleNamespace(remote=generate))
    scores = [{"reward_score": 0.0}, {"reward_score": 1.0}]
    setup.manager.reward_workers = [
        SimpleNamespace(compute_score_batch=SimpleNamespace(remote=lambda p: _later(scores)))
    ]
    setup.manager.generate_sequences(groups(1, n=2), version=0, training_step=1, keep_pixels={("g0", 1)})
    setup.manager.next_group(10.0)
    assert list(setup.manager.pixels) == [("g0", 1)] and setup.manager.pixels[("g0", 1)][0] == 1.0


async def _later(value):
    return value
