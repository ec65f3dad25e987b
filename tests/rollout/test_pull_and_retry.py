"""The rollout manager with replicas and reward workers that answer from a script: pull order, retries, refusals."""

from __future__ import annotations

import asyncio
import collections
import time
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import ray

from verl_digen.config.digen import DigenConfig, FailureConfig, GapConfig, SamplingConfig
from verl_digen.rollout.book import GroupBook, Order
from verl_digen.rollout.manager import DiffusionRolloutManager, RolloutError, RolloutPool
from verl_digen.rollout.requests import VALIDATION, FragmentReport, PromptGroup
from verl_digen.schedule.gap import plan_fragments
from verl_digen.schedule.profile import Profile
from verl_digen.schedule.tcss import StaleLedger

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

    def make(
        *,
        replicas=1,
        seconds=(),
        behave=(),
        reward=None,
        rewards=(),
        fragment_size=2,
        restart=True,
        digen=None,
        **failure,
    ):
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

        async def respawn(replica, worker):
            assert replica.workers[0] is worker
            replica.workers = [FakeWorker(replica)]  # there at once, but no use before its weights are
            await asyncio.sleep(0.05)
            restarts.append(replica.name)
            replica.workers[0].ready = True

        digen = digen or DigenConfig(
            gap=GapConfig(enable=True, fragment_size=fragment_size),
            failure=FailureConfig(**{"generate_timeout_s": 5.0, "reward_timeout_s": 5.0} | failure),
        )
        reward_restarts = []

        def respawn_reward(index):
            reward_restarts.append(index)
            time.sleep(0.05)
            return FakeReward()

        pool = RolloutPool(
            replicas=handles,
            replace=respawn if restart else None,
            expected={"train": EFFECTIVE, "validation": EFFECTIVE},
            reward_restart=respawn_reward,
            ledger=StaleLedger(64),
        )
        manager = DiffusionRolloutManager(digen, pool, list(rewards) or [reward or FakeReward()], 4)
        managers.append(manager)
        return SimpleNamespace(manager=manager, replicas=handles, restarts=restarts, reward_restarts=reward_restarts)

    yield make
    for manager in managers:
        manager.close()


def collect(manager, wanted):
    """A step from its announcement to the publish after it."""
    version = manager.pool.ledger.published
    manager.generate_sequences(wanted, version=version, training_step=version + 1)
    results = [manager.next_group(10.0) for _ in wanted]
    with manager.publishing(version + 1):
        pass
    return results


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


def taken(setup) -> list[int]:
    """Fragments that each replica has generated."""
    return [len(replica.workers[0].fragments) for replica in setup.replicas]


def test_no_replica_takes_a_fragment_ahead_while_another_has_none(build):
    """A fragment per replica, as a step is cut without GAP: one each, not two for the first and none for the last."""
    setup = build(replicas=4, seconds=(0.05,) * 4, digen=DigenConfig())
    collect(setup.manager, groups(4))
    assert taken(setup) == [1, 1, 1, 1]
    collect(setup.manager, groups(4))
    assert taken(setup) == [2, 2, 2, 2]


def test_the_last_fragments_go_to_whoever_is_free_first(build):
    """6 fragments: the slow replica is still at its first when the fast one has done the other 5."""
    setup = build(replicas=2, seconds=(0.3, 0.02), fragment_size=4)
    collect(setup.manager, groups(6))
    assert taken(setup) == [2, 4] or taken(setup) == [1, 5]
    more = build(replicas=2, seconds=(0.3, 0.02), fragment_size=4)
    collect(more.manager, groups(3))
    assert taken(more) == [1, 2]


def test_a_busy_replica_has_its_next_fragment_already(build):
    """While enough are left nobody waits for the driver between two fragments."""
    setup = build(replicas=2, seconds=(0.05, 0.05), fragment_size=4)
    setup.manager.generate_sequences(groups(8), version=0, training_step=1)
    deadline = time.monotonic() + 5.0
    while setup.manager.in_flight < 4 and time.monotonic() < deadline:
        time.sleep(0.001)
    assert setup.manager.in_flight == 4
    for _ in range(8):
        setup.manager.next_group(5.0)


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

    setup = build(replicas=3, reward=FakeReward(dies))
    assert len(collect(setup.manager, groups())) == 3
    assert setup.reward_restarts == [0]  # once, however many fragments it had


class Slow(FakeReward):
    """Takes ``seconds`` for a fragment of the groups in ``late``, else ``quick``; several at a time."""

    def __init__(self, late=(), seconds=60.0, quick=0.0):
        super().__init__()
        self.late, self.seconds, self.quick, self.asked, self.working = late, seconds, quick, [], 0

    async def _score(self, pixels):
        samples = await pixels
        self.asked.append(samples[0][0])
        self.working += 1
        try:
            await asyncio.sleep(self.seconds if samples[0][0] in self.late else self.quick)
        finally:
            self.working -= 1
        return await super()._score(pixels)


def test_fragments_go_to_the_reward_worker_with_the_fewest_samples(build):
    """One worker keeps a fragment for long: the others get all that comes meanwhile."""
    judges = [Slow(late=("g0",), seconds=0.5), Slow(), Slow()]
    setup = build(rewards=judges, fragment_size=4)
    collect(setup.manager, groups(9))
    asked = [len(judge.asked) for judge in judges]
    assert sum(asked) == 9 and asked[0] == 1


def test_a_late_fragment_does_not_take_the_scores_of_others_with_it(build):
    """Two fragments are at the only worker when the first is late: it is started again after the second is scored."""
    judge = Slow(late=("g0",), quick=0.5)
    setup = build(reward=judge, fragment_size=4, seconds=(0.2,), reward_timeout_s=0.6, max_retries=1)
    working, restart = [], setup.manager._scorer._restart
    setup.manager._scorer._restart = lambda index: working.append(judge.working) or restart(index)
    results = collect(setup.manager, groups(2))
    assert {r.group.uid for r in results} == {"g0", "g1"}
    assert setup.reward_restarts == [0] and working == [0]
    assert judge.asked == ["g0", "g1"]  # each once; what was late is scored by the new process


def test_a_wait_says_what_it_waits_for(build):
    setup = build(seconds=(5.0,), generate_timeout_s=60.0)
    setup.manager.generate_sequences(groups(1), version=0, training_step=1)
    with pytest.raises(TimeoutError, match=r"4 samples of 1 groups are missing: g0 \(4 of 4\)"):
        setup.manager.next_group(0.2)


def test_a_waiting_trainer_can_be_woken_and_told_when_to_look_again(build):
    setup = build(seconds=(5.0,), generate_timeout_s=60.0)
    setup.manager.generate_sequences(groups(1), version=0, training_step=1)
    assert setup.manager.group_within(60.0, 0.05) is None  # its time is over
    setup.manager.wake()
    assert setup.manager.group_within(60.0, 60.0) is None  # at once
    setup.manager.wake()
    with pytest.raises(TimeoutError, match="for 0.1 s"):  # who waits for a group alone is not woken
        setup.manager.next_group(0.1)


def test_arrivals_are_forecast_from_what_replicas_have_and_what_waits(build):
    """A fragment of 2 samples takes 20 s by the profile. Three groups of 2 fragments on two replicas."""
    setup = build(replicas=2, seconds=(5.0, 5.0), generate_timeout_s=60.0)
    manager = setup.manager
    manager.generate_sequences(groups(3), version=0, training_step=1)
    profile = Profile(denoise_s=1.0, train_cell_s=1.0, score_s=3.0)  # and DigenConfig's 10 steps
    assert manager.arrivals(["g0", "g1", "g2"], profile, 1000.0) == pytest.approx([23.0, 43.0, 63.0], abs=2.0)
    assert manager.arrivals(["g1"], profile, 1000.0) == pytest.approx([43.0], abs=2.0)
    assert len(manager.arrivals(["g0", "g1", "g2"], profile, 50.0)) == 2


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
    judge = SimpleNamespace(compute_score_batch=SimpleNamespace(remote=lambda p: _later(scores)))
    setup.manager._scorer.judges[0].worker = judge
    setup.manager.generate_sequences(groups(1, n=2), version=0, training_step=1, keep_pixels={("g0", 1)})
    setup.manager.next_group(10.0)
    assert list(setup.manager.pixels) == [("g0", 1)] and setup.manager.pixels[("g0", 1)][0] == 1.0


async def _later(value):
    return value


# ---- fragments and deadlines -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("digen", "sizes"),
    [
        (DigenConfig(), [12, 12]),  # 24 samples over 2 replicas
        (DigenConfig(sampling=SamplingConfig(batch_size=10)), [10, 10, 4]),
        (DigenConfig(gap=GapConfig(enable=True)), [4] * 6),  # rollout.n
        (DigenConfig(preset="digen"), [4] * 6),
        (DigenConfig(gap=GapConfig(enable=True, fragment_size=9)), [8, 8, 8]),  # whole groups of 4
    ],
)
def test_fragments_are_as_large_as_the_plan_says(build, digen, sizes):
    setup = build(replicas=2, digen=digen)
    collect(setup.manager, groups(6))
    fragments = [f for replica in setup.replicas for f in replica.workers[0].fragments]
    assert [len(f.samples) for f in sorted(fragments, key=lambda f: f.fragment_id)] == sizes
    assert all(set(f.groups) == {uid for uid, _ in f.samples} for f in fragments)


def test_a_fragment_that_waits_in_the_replicas_queue_is_not_late(build):
    """Two fragments of 0.3 s are at the replica; the second ends after 0.6 s, though 0.45 s is what one may take."""
    setup = build(seconds=(0.3,), fragment_size=6, generate_timeout_s=0.45)
    assert len(collect(setup.manager, groups())) == 3
    assert setup.restarts == []


def test_a_replica_gets_no_work_while_it_is_being_restarted(build):
    """One fragment kills it; the others wait for the new process, which has no weights before the restart ends."""
    setup = build(behave=(failing_first(1, ray.exceptions.RayActorError()),), fragment_size=12)
    met_unready = []
    original = FakeWorker._generate

    def checked(worker, fragment):
        if worker is not first and not getattr(worker, "ready", False):
            met_unready.append(fragment.fragment_id)
        return original(worker, fragment)

    first = setup.replicas[0].workers[0]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FakeWorker, "_generate", checked)
        setup.manager.generate_sequences(groups(3), version=0, training_step=1)
        time.sleep(0.02)  # the only fragment has failed by now; what is announced now finds a replica under way
        more = [replace(g, uid=f"late{g.uid}", partition=VALIDATION) for g in groups(3)]
        setup.manager.generate_sequences(more, version=0, training_step=1)
        assert len([setup.manager.next_group(10.0) for _ in range(3)]) == 3
    assert setup.restarts == ["replica0"] and met_unready == []


def test_samples_of_one_group_in_two_fragments_do_not_share_noise(build):
    setup = build(behave=(lambda fragment: {"noise_hashes": ("x", "y")},), fragment_size=2)
    with pytest.raises(ValueError, match="share their initial noise"):
        collect(setup.manager, groups(1))


def test_same_noise_is_wanted_inside_a_group_and_checked(build):
    digen = DigenConfig(gap=GapConfig(enable=True, fragment_size=2), sampling=SamplingConfig(same_noise=True))
    shared = build(digen=digen, behave=(lambda f: {"noise_hashes": tuple(u for u, _ in f.samples)},))
    assert len(collect(shared.manager, groups())) == 3
    other = build(digen=digen, behave=(lambda f: {"noise_hashes": (str(f.fragment_id),) * 2},))
    with pytest.raises(ValueError, match="different initial noise"):
        collect(other.manager, groups(1))


def late_report(version: int, samples) -> FragmentReport:
    return FragmentReport(
        fragment_id=1,
        replica="r",
        version=version,
        samples=tuple(samples),
        noise_hashes=tuple(f"hash {j}" for _, j in samples),
        transitions=(3,) * len(samples),
        effective={},
        started=0.0,
        ended=0.0,
        phases={},
        peak_memory_bytes=0,
    )


def book_of(group: PromptGroup) -> tuple[GroupBook, Order]:
    """A book that expects one group in two fragments, and the order of the first half."""
    book = GroupBook(StaleLedger(1), same_noise=False)
    book.add_step(0, [group], plan_fragments([group.uid], group.n, 2), 1)
    return book, book.claim(0)


def test_samples_of_two_versions_never_make_a_group():
    """Reports of versions 5 and 0 for one group, as no replica should give."""
    book, order = book_of(groups(1)[0])
    book.take_in(order, late_report(5, [("g0", 0)]), [{"reward_score": 0.0}])
    with pytest.raises(ValueError, match="carries version 0, its group version 5"):
        book.take_in(order, late_report(0, [("g0", 1)]), [{"reward_score": 0.0}])


def test_a_sample_counts_once_and_unknown_ones_not_at_all():
    book, order = book_of(groups(1)[0])
    complete = []
    for samples, reward in (
        ([("g0", 0)], 1.0),
        ([("g0", 0), ("other", 0)], 9.0),
        ([("g0", j) for j in (1, 2, 3)], 2.0),
    ):
        complete += book.take_in(order, late_report(0, samples), [{"reward_score": reward}] * len(samples))
    (result,) = complete
    assert [s.reward for s in result.samples] == [1.0, 2.0, 2.0, 2.0]
    assert book.waiting_for(0).startswith("0 samples of 0 groups")


def test_with_gap_fragments_keep_to_their_group(build):
    """Groups of 4 in fragments of 3: two of 2 each; without GAP 12 samples are cut by 3 whatever the group."""
    pieces = build(fragment_size=3).manager._cut(groups(2), 0)
    assert [[uid for uid, _ in piece.samples] for piece in pieces] == [["g0"] * 2] * 2 + [["g1"] * 2] * 2
    one_shot = build(digen=DigenConfig(sampling=SamplingConfig(batch_size=3))).manager
    assert [len(piece.samples) for piece in one_shot._cut(groups(2), 0)] == [3, 3, 2]


def test_a_validation_of_any_size_is_cut_as_it_says(build):
    setup = build(digen=DigenConfig())
    many = [replace(g, partition=VALIDATION) for g in groups(5)]  # 20 samples, one replica
    setup.manager.generate_sequences(many, version=0, training_step=1, batch_size=6)
    for _ in many:
        setup.manager.next_group(10.0)
    assert [len(f.samples) for f in setup.replicas[0].workers[0].fragments] == [6, 6, 6, 2]


def test_distillation_teachers_are_refused():
    with pytest.raises(ValueError, match="distillation"):
        DiffusionRolloutManager.create(None, None, teacher_client=object())


def test_pixels_that_are_lost_with_their_node_are_generated_again(build):
    """The judge is not to blame: it is not replaced, and the attempt is the fragment's."""
    lost = failing_first(2, ray.exceptions.ObjectLostError("00" * 28, "owner", "call site"))
    setup = build(replicas=2, reward=FakeReward(lost))
    results = collect(setup.manager, groups())
    assert all([s.j for s in result.samples] == [0, 1, 2, 3] for result in results)
    assert setup.reward_restarts == [] and setup.restarts == []
    assert sum(taken(setup)) == 6 + 2

    always = build(reward=FakeReward(failing_first(100, ray.exceptions.ObjectLostError("00" * 28, "owner", "site"))))
    with pytest.raises(RolloutError, match="replica0: its pixels were lost with its node"):
        collect(always.manager, groups())


def test_a_replica_that_is_away_for_long_keeps_no_fragment(build):
    """Its fragments go to the other one while it is being replaced, which takes until the end of the test."""
    setup = build(replicas=2, behave=(failing_first(100, ray.exceptions.RayActorError()),))
    asked = []

    async def never(replica, worker):
        asked.append(replica.name)
        await asyncio.Event().wait()

    setup.manager._dispatcher._replace = never
    assert len(collect(setup.manager, groups())) == 3
    assert asked == ["replica0"] and taken(setup) == [0, 6]
