"""GAP: fragment plans, the claim queue, group assembly (contract I4; invariants of the modules)."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_digen.schedule.assemble import GroupAssembler, Outcome, StepFailed
from verl_digen.schedule.gap import ClaimQueue, plan_fragments, pull_size, share_by_speed
from verl_digen.schedule.tcss import StaleLedger
from verl_digen.schedule.work import Claim, Replica


@given(batches=st.integers(1, 3), per_batch=st.integers(1, 5), n=st.integers(1, 7), size=st.none() | st.integers(1, 40))
@settings(max_examples=150, deadline=None)
def test_every_sample_is_in_one_fragment_and_no_fragment_crosses_a_logical_batch(batches, per_batch, n, size):
    uids = [f"g{index}" for index in range(batches * per_batch)]
    plan = plan_fragments(uids, n, size, step=3, logical_batches=batches)
    keys = [key for fragment in plan for key in fragment.samples]
    assert keys == [(uid, j) for uid in uids for j in range(n)]  # uid-major, nothing twice, nothing lost
    for fragment in plan:
        assert {uids.index(uid) // per_batch for uid in fragment.uids} == {fragment.logical_batch}
        if size is not None:
            assert len(fragment.samples) <= max(size, 1)
        if size is not None and size >= n:
            assert len(fragment.samples) % n == 0  # whole groups
    if size is None:
        assert len(plan) == batches


def test_fragment_plan_refuses_bad_input_with_the_numbers():
    with pytest.raises(ValueError, match="5 groups do not divide into 2"):
        plan_fragments(range(5), 2, 2, logical_batches=2)
    with pytest.raises(ValueError, match="repeated"):
        plan_fragments(["a", "a"], 2, 2)
    with pytest.raises(ValueError, match="fragment_size=0"):
        plan_fragments(["a"], 2, 0)


def test_parts_of_a_group_differ_by_at_most_one():
    sizes = [len(fragment.samples) for fragment in plan_fragments(["a"], 7, 3)]
    assert sorted(sizes) == [2, 2, 3]


@given(samples=st.integers(0, 60), speeds=st.lists(st.sampled_from([0.5, 1.0, 1.5, 2.0, 3.0]), min_size=1, max_size=6))
@settings(max_examples=80, deadline=None)
def test_share_by_speed_is_optimal(samples, speeds):
    counts = share_by_speed(samples, [Replica(name=str(i), speed=s) for i, s in enumerate(speeds)])
    assert sum(counts) == samples
    end = max((c / s for c, s in zip(counts, speeds, strict=True)), default=0)
    # Any earlier end would leave samples over: at a time just below `end` the replicas hold fewer in total.
    assert samples == 0 or sum(int((end - 1e-9) * s + 1e-12) for s in speeds) < samples


def test_pull_size_shrinks_towards_the_end_and_never_claims_more_than_there_is():
    assert pull_size(100, 1.0, 4.0, 8) == 8
    assert pull_size(8, 1.0, 4.0, 8) == 2
    assert pull_size(8, 0.5, 4.0, 8) == 1  # the slow replica takes less
    assert pull_size(0, 1.0, 4.0, 8) == 0


def queue_of(groups, n, ratio=0.0):
    queue = ClaimQueue(StaleLedger(groups, ratio))
    queue.add_step(0, range(groups), n)
    return queue


def test_replicas_take_the_head_and_the_helper_the_tail():
    queue = queue_of(4, 3)
    assert [(c.uid, c.j) for c in queue.claim(0, 4)] == [(0, 0), (0, 1), (0, 2), (1, 0)]
    assert {c.uid for c in queue.claim(0, 3, tail=True)} == {3}
    assert queue.unclaimed(0) == 5


def test_yielded_work_is_resumed_where_it_stopped_and_first():
    queue = queue_of(2, 2)
    claim = queue.claim(0, 1, tail=True)[0]
    assert queue.give_back(claim, 7)
    again = queue.claim(0, 1, tail=True)[0]
    assert (again.uid, again.j, again.steps_done) == (claim.uid, claim.j, 7)


def test_a_restarted_group_takes_a_new_version_as_a_whole_and_old_claims_are_void():
    queue = queue_of(1, 3, ratio=1.0)
    queue.add_step(1, [10], 3)
    queue.claim(0, 3)
    stale = queue.claim(0, 2)  # two of the three samples of group 10 under version 0
    assert [c.version for c in stale] == [0, 0]
    assert queue.restart(10) == 1
    assert not queue.give_back(stale[0], 4)
    fresh = queue.claim(1, 9)
    assert [(c.version, c.attempt, c.steps_done) for c in fresh] == [(1, 1, 0)] * 3


def test_available_counts_what_a_claim_would_give():
    """Groups another version has begun block the step ahead, for `claim` as well as for `available`."""
    queue = queue_of(2, 3, ratio=1.0)
    queue.add_step(1, [10, 11], 3)
    assert queue.available(0) == 12 and queue.available(0, ahead=False) == 6
    queue.claim(0, 6)
    queue.claim(0, 1)  # one sample of group 10, stale
    assert queue.available(0) == 5  # the rest of group 10 and group 11
    assert queue.available(1) == len(queue.claim(1, 99, ahead=False)) == 3  # group 11 is still free
    assert queue.claim(0, 99, ahead=False) == []
    assert queue.available(0) == len(queue.claim(0, 99)) == 2


def test_orphans_are_the_begun_groups_nobody_can_finish():
    queue = queue_of(2, 2)
    queue.claim(0, 1)
    assert queue.orphans({0}) == []
    assert queue.orphans({1}) == [0]


@given(groups=st.integers(1, 4), n=st.integers(1, 4), draw=st.randoms(use_true_random=False))
@settings(max_examples=60, deadline=None)
def test_queue_never_loses_nor_doubles_a_sample(groups, n, draw):
    queue = queue_of(groups, n)
    held, done = [], []
    for _ in range(100):
        if held and draw.random() < 0.5:
            claim = held.pop(draw.randrange(len(held)))
            if draw.random() < 0.25:
                queue.give_back(claim, draw.randint(0, 5))
            else:
                done.append((claim.uid, claim.j))
        else:
            held += queue.claim(0, draw.randint(1, 3), tail=draw.random() < 0.5)
        assert queue.unclaimed(0) + len(held) + len(done) == groups * n
        if len(done) == groups * n:
            break
    held += queue.claim(0, groups * n)
    assert sorted(done + [(c.uid, c.j) for c in held]) == [(uid, j) for uid in range(groups) for j in range(n)]


def claim(uid, j, version=0, attempt=0):
    return Claim(uid, j, 0, version, attempt)


@given(n=st.integers(1, 4), groups=st.integers(1, 4), size=st.integers(1, 9), seed=st.randoms(use_true_random=False))
@settings(max_examples=80, deadline=None)
def test_any_arrival_order_completes_every_group_and_fragment_once(n, groups, size, seed):
    plan = plan_fragments(range(groups), n, size)
    assembler = GroupAssembler()
    assembler.add_step(plan)
    order = [(uid, j) for uid in range(groups) for j in range(n)] * 2  # each twice: half are duplicates
    seed.shuffle(order)
    outcomes, ready = [], []
    for uid, j in order:
        outcome, fragments = assembler.scored(claim(uid, j))
        outcomes.append(outcome)
        ready += fragments
    assert outcomes.count(Outcome.COMPLETE) == groups
    assert outcomes.count(Outcome.DUPLICATE) == groups * n
    assert sorted(f.index for f in ready) == [f.index for f in plan]
    trained = [entry for fragment in ready for entry in assembler.take(fragment)]
    assert sorted(trained) == [(uid, 0) for uid in range(groups)]  # a group is handed out once, in whichever part
    with pytest.raises(ValueError, match="trained twice"):
        assembler.take(ready[0])
    assembler.drop_step(0)


def test_late_unknown_failed_and_unfinished():
    plan = plan_fragments(["a", "b"], 2, 2)
    assembler = GroupAssembler(max_retries=1)
    assembler.add_step(plan)
    assembler.scored(claim("a", 0))
    assert assembler.failed("a", 0, "reward timed out")
    assembler.restart("a", 1)
    assert not assembler.failed("a", 0, "a late failure of the first attempt")
    assert assembler.scored(claim("a", 1))[0] is Outcome.LATE
    assert assembler.scored(claim("zzz", 0))[0] is Outcome.UNKNOWN
    assert assembler.scored(claim("a", 2, attempt=1))[0] is Outcome.UNKNOWN
    assert assembler.scored(claim("a", 0, attempt=1))[0] is Outcome.ACCEPTED
    with pytest.raises(StepFailed, match="group 'a' of step 0 failed 2 times.*reward timed out again"):
        assembler.failed("a", 1, "reward timed out again")
    with pytest.raises(ValueError, match="not complete"):
        assembler.take(plan[0])
    with pytest.raises(ValueError, match="2 untrained fragments"):
        assembler.drop_step(0)


def test_a_group_never_mixes_versions_and_a_reward_is_never_silently_zero():
    assembler = GroupAssembler()
    assembler.add_step(plan_fragments(["a"], 2, 2))
    assembler.scored(claim("a", 0, version=0))
    with pytest.raises(ValueError, match="carries version 1, its group version 0"):
        assembler.scored(claim("a", 1, version=1))
    with pytest.raises(ValueError, match="nan"):
        assembler.scored(claim("a", 1), float("nan"))
