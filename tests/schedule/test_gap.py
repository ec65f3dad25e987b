"""GAP: fragment plans, the claim queue, group assembly (contract I4; invariants of the modules)."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_digen.schedule.assemble import GroupAssembler, Outcome
from verl_digen.schedule.gap import ClaimQueue, plan_fragments
from verl_digen.schedule.tcss import StaleLedger


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


def queue_of(groups, n, size=1, ratio=0.0, steps=1):
    queue = ClaimQueue(StaleLedger(groups, ratio))
    for step in range(steps):
        queue.add_step(step, plan_fragments(range(step * groups, (step + 1) * groups), n, size, step=step))
    return queue


def samples(claims):
    return [key for claim in claims for key in claim.fragment.samples]


def take(queue, version, count=10**6, **options):
    """Up to ``count`` claims, until there are no more."""
    claims = []
    while len(claims) < count and (claim := queue.claim(version, **options)) is not None:
        claims.append(claim)
    return claims


def test_replicas_take_the_head_and_the_helper_the_tail():
    queue = queue_of(4, 3)
    assert samples(take(queue, 0, 4)) == [(0, 0), (0, 1), (0, 2), (1, 0)]
    assert samples(take(queue, 0, 3, tail=True)) == [(3, 2), (3, 1), (3, 0)]
    assert queue.unclaimed(0) == 5
    assert samples(take(queue, 0)) == [(1, 1), (1, 2), (2, 0), (2, 1), (2, 2)]
    assert queue.claim(0) is None


def test_fragments_are_claimed_whole():
    queue = queue_of(3, 4, size=3)
    assert [len(claim.fragment.samples) for claim in take(queue, 0)] == [2] * 6
    whole = queue_of(3, 4, size=8)
    assert [len(claim.fragment.samples) for claim in take(whole, 0)] == [8, 4]


def test_what_is_given_back_is_next_and_keeps_its_steps():
    queue = queue_of(2, 2)
    tail = queue.claim(0, tail=True)
    head = queue.claim(0)
    assert queue.give_back(tail, 7) and queue.give_back(head)
    again = queue.claim(0, tail=True)
    assert again.fragment == tail.fragment and again.steps_done == 7
    assert queue.claim(0).fragment == head.fragment
    assert not queue.give_back(tail.__class__(tail.fragment, 5))  # nobody holds it under that version


def test_a_restarted_group_takes_a_new_version_as_a_whole_and_old_claims_are_void():
    queue = queue_of(1, 3, ratio=1.0, steps=2)
    take(queue, 0, 3)
    stale = take(queue, 0, 2)  # two of the three samples of group 1 under version 0
    assert {claim.version for claim in stale} == {0} and {claim.step for claim in stale} == {1}
    assert queue.finished(stale[0])
    assert queue.restart(1) == {1: 1}
    fresh = take(queue, 1)
    assert samples(fresh) == [(1, 0), (1, 2)]  # the third is still being generated under version 0
    assert not queue.finished(stale[1])
    fresh += take(queue, 1)
    assert sorted(samples(fresh)) == [(1, 0), (1, 1), (1, 2)]
    assert {(claim.version, claim.attempt, claim.steps_done) for claim in fresh} == {(1, 1, 0)}


def test_available_counts_what_a_claim_would_give():
    """Groups another version has begun block the step ahead, for `claim` as well as for `available`."""
    queue = queue_of(2, 3, ratio=1.0, steps=2)
    assert queue.available(0) == queue.available_samples(0) == 12 and queue.available(0, ahead=False) == 6
    take(queue, 0, 6)
    take(queue, 0, 1)  # one sample of group 2, stale
    assert queue.available(0) == 5  # the rest of group 2 and group 3
    assert queue.available(1) == len(take(queue, 1, ahead=False)) == 3  # group 3 is still free
    assert queue.claim(0, ahead=False) is None
    assert queue.available(0) == len(take(queue, 0)) == 2
    whole = queue_of(4, 2, size=4, ratio=0.5, steps=2)
    assert (whole.available(0), whole.available_samples(0)) == (3, 12)  # both of step 0, one of 2 stale groups


@pytest.mark.parametrize(("ratio", "allowed"), [(0.0, 0), (0.25, 0), (0.5, 1), (1.0, 2)])
def test_a_fragment_of_several_groups_starts_only_if_the_bound_leaves_room_for_all(ratio, allowed):
    queue = queue_of(4, 2, size=4, ratio=ratio, steps=2)
    take(queue, 0, 2)
    assert len(take(queue, 0)) == allowed


def test_orphans_are_the_begun_groups_nobody_can_finish():
    queue = queue_of(2, 2, ratio=1.0, steps=2)
    take(queue, 0, 4)
    (stale,) = take(queue, 0, 1)
    assert queue.restart_orphans({0}) == {}
    assert queue.restart_orphans({1}) == {2: 1}
    assert queue.ledger.stale_groups(1) == 0
    queue.give_back(stale)
    assert {claim.version for claim in take(queue, 1)} == {1}


@given(
    groups=st.integers(1, 4),
    n=st.integers(1, 4),
    size=st.integers(1, 9),
    draw=st.randoms(use_true_random=False),
)
@settings(max_examples=60, deadline=None)
def test_queue_never_loses_nor_doubles_a_sample(groups, n, size, draw):
    queue = queue_of(groups, n, size)
    held, done = [], []
    for _ in range(100):
        if held and draw.random() < 0.5:
            claim = held.pop(draw.randrange(len(held)))
            if draw.random() < 0.25:
                queue.give_back(claim, draw.randint(0, 5))
            else:
                assert queue.finished(claim)
                done.append(claim)
        else:
            held += take(queue, 0, 1, tail=draw.random() < 0.5)
        assert queue.unclaimed(0) + len(samples(held)) + len(samples(done)) == groups * n
        if len(samples(done)) == groups * n:
            break
    held += take(queue, 0)
    assert sorted(samples(done + held)) == [(uid, j) for uid in range(groups) for j in range(n)]


@given(
    groups=st.integers(1, 4),
    n=st.integers(1, 4),
    size=st.integers(1, 9),
    ratio=st.sampled_from([0.0, 0.3, 0.5, 1.0]),
    seed=st.integers(0, 10**9),
)
@settings(max_examples=80, deadline=None)
def test_with_deaths_and_publishes_every_group_ends_with_one_version_within_the_bound(groups, n, size, ratio, seed):
    """Two holders that change version whenever they hold nothing, and forget what they do: I4 and I5."""
    draw, steps, queue = random.Random(seed), 4, queue_of(groups, n, size, ratio, steps=4)
    ledger, holders = queue.ledger, [[0, None], [0, None]]
    got, attempts = {}, {}

    def delivered(step):
        return sum(uid // groups == step for uid, _ in got) == groups * n

    for _ in range(4000):
        if ledger.published == steps:
            break
        holder = draw.choice(holders)
        version, claim = holder
        if claim is None:
            holder[1] = queue.claim(version, start_groups=version == ledger.published)
            if holder[1] is None:
                holder[0] = ledger.published
        elif draw.random() < 0.15:
            holder[:] = [ledger.published, None]
            queue.give_back(claim)
        elif draw.random() < 0.5:
            holder[1] = None
            if queue.finished(claim):
                got |= dict.fromkeys(claim.fragment.samples, (claim.version, claim.attempt))
        restarted = queue.restart_orphans({version for version, _ in holders} | {ledger.published})
        attempts |= restarted
        got = {key: value for key, value in got.items() if value[1] == attempts.get(key[0], 0)}
        if delivered(ledger.published):
            step = ledger.published
            for uid in range(step * groups, (step + 1) * groups):
                versions = {got[uid, j][0] for j in range(n)}
                assert len(versions) == 1
                ledger.consume(uid, step, versions.pop())
            assert ledger.stale_groups(step) <= ratio * groups + 1e-9
            ledger.publish(step + 1)
    assert ledger.published == steps


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
        outcome, fragments = assembler.scored(uid, j, 0)
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


def test_late_unknown_and_unfinished():
    plan = plan_fragments(["a", "b"], 2, 2)
    assembler = GroupAssembler()
    assembler.add_step(plan)
    assembler.scored("a", 0, 0)
    assembler.restart("a", 1)
    assert assembler.scored("a", 1, 0)[0] is Outcome.LATE
    assert assembler.scored("zzz", 0, 0)[0] is Outcome.UNKNOWN
    assert assembler.scored("a", 2, 0, attempt=1)[0] is Outcome.UNKNOWN
    assert assembler.scored("a", 0, 0, attempt=1)[0] is Outcome.ACCEPTED
    with pytest.raises(ValueError, match="not complete"):
        assembler.take(plan[0])
    with pytest.raises(ValueError, match="2 untrained fragments"):
        assembler.drop_step(0)


def test_a_group_never_mixes_versions_and_a_reward_is_never_silently_zero():
    assembler = GroupAssembler()
    assembler.add_step(plan_fragments(["a"], 2, 2))
    assembler.scored("a", 0, 0)
    with pytest.raises(ValueError, match="carries version 1, its group version 0"):
        assembler.scored("a", 1, 1)
    with pytest.raises(ValueError, match="nan"):
        assembler.scored("a", 1, 0, reward=float("nan"))
