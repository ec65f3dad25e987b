"""TAG and BTS in the fragment-level model: exactness, dominance, the published examples."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_digen.schedule import tag
from verl_digen.schedule.bts import bts, greedy, never, rest_bound, search
from verl_digen.schedule.pipeline import BubbleCosts, BubbleState, finish_time, start_state
from verl_digen.schedule.profile import Profile
from verl_digen.schedule.work import Action, Decision, Pools, Replica, TrainerPool, Workload


def brute(costs, now, unclaimed, lanes, arrivals):
    """Shortest time by trying every choice at every bubble; written apart from the library, event by event."""
    lanes, arrivals = list(lanes), sorted(arrivals)
    while True:
        moved = True
        while moved:
            moved = False
            for index, free in enumerate(lanes):
                if unclaimed and free <= now and free == min(lanes):
                    unclaimed -= 1
                    lanes[index] = free + costs.lanes_s[index]
                    arrivals = sorted([*arrivals, lanes[index] + costs.score_s])
                    moved = True
                    break
        if arrivals and arrivals[0] <= now:
            arrivals, now = arrivals[1:], now + costs.train_s
        elif not unclaimed and not arrivals:
            return now
        elif not unclaimed:
            now = arrivals[0]
        else:
            break
    best = brute(costs, arrivals[0], unclaimed, lanes, arrivals)
    for count in range(1, unclaimed + 1):
        end, made, extra = now + costs.switch_s, 0, []
        while made < count:
            round_size = min(costs.helper_round, count - made)
            end += costs.helper_s
            made += round_size
            extra += [end + costs.score_s] * round_size
        best = min(best, brute(costs, end, unclaimed - count, lanes, arrivals + extra))
    return best


# Quarters are exact in binary, so ties are real ties and both sides may be compared closely.
quarters = st.integers(1, 16).map(lambda value: value / 4)
some_costs = st.builds(
    BubbleCosts,
    lanes_s=st.lists(quarters, min_size=1, max_size=3).map(tuple),
    train_s=quarters,
    helper_s=quarters,
    helper_round=st.integers(1, 2),
    switch_s=st.sampled_from([0.0, 0.0, 0.5, 2.75]),
    score_s=st.sampled_from([0.0, 0.0, 1.25]),
    steps=st.sampled_from([1, 2, 5, 20]),
)


@given(costs=some_costs, fragments=st.integers(1, 6))
@settings(max_examples=150, deadline=None)
def test_bts_equals_brute_force(costs, fragments):
    state = start_state(fragments, costs)
    exact = brute(costs, 0.0, state.unclaimed, state.lanes, state.arrivals)
    predicted, _, _ = search(state, costs)
    assert predicted == pytest.approx(exact, abs=1e-9)
    # Carrying out only the first decision of each plan keeps the prediction.
    assert finish_time(state, costs, bts) == pytest.approx(exact, abs=1e-9)


@given(costs=some_costs, fragments=st.integers(1, 24))
@settings(max_examples=80, deadline=None)
def test_bts_is_never_worse_than_none_and_greedy_and_never_below_its_bound(costs, fragments):
    state = start_state(fragments, costs)
    predicted, _, _ = search(state, costs, effort=2000)
    assert predicted <= finish_time(state, costs, never) + 1e-9
    assert predicted <= finish_time(state, costs, greedy) + 1e-9
    assert predicted >= rest_bound(state, costs) - 1e-9
    short, _, _ = search(state, costs, depth=1)
    assert predicted - 1e-9 <= short <= min(finish_time(state, costs, never), finish_time(state, costs, greedy)) + 1e-9


@given(costs=some_costs, fragments=st.integers(1, 10))
@settings(max_examples=80, deadline=None)
def test_steps_is_never_worse_than_bts_when_switching_is_free(costs, fragments):
    free = BubbleCosts(**{name: getattr(costs, name) for name in BubbleCosts.__slots__} | {"switch_s": 0.0})
    state = start_state(fragments, free)
    with_steps = finish_time(state, free, lambda s, c: tag.steps(s, c, effort=None))
    assert with_steps <= finish_time(state, free, lambda s, c: bts(s, c, effort=None)) + 1e-9


def test_steps_is_better_than_bts_where_whole_fragments_are_too_long():
    """A helper four times slower than the pool: no whole fragment pays off, single steps do."""
    costs = BubbleCosts(lanes_s=(3.0,), train_s=1.0, helper_s=12.0, steps=40)
    state = start_state(4, costs)
    assert finish_time(state, costs, bts) == finish_time(state, costs, never) == 13.0
    assert finish_time(state, costs, tag.steps) == pytest.approx(11.4)


@pytest.mark.parametrize(
    ("costs", "none", "eager", "one_at_a_time", "free"),
    [
        (BubbleCosts(lanes_s=(1.0,), train_s=1.0, helper_s=2.0, switch_s=0.5), 17.0, 18.5, 17.0, 17.0),
        (BubbleCosts(lanes_s=(3.0,), train_s=1.0, helper_s=3.0, switch_s=4.0), 49.0, 44.0, 40.0, 35.0),
    ],
)
def test_published_examples(costs, none, eager, one_at_a_time, free):
    """16 fragments. Greedy can lose; BTS inserting one fragment per bubble gives 40, any number 35."""
    state = start_state(16, costs)
    assert finish_time(state, costs, never) == none
    assert finish_time(state, costs, greedy) == eager
    assert search(state, costs, max_block=1)[0] == one_at_a_time
    assert search(state, costs)[0] == free


@given(g=quarters, t=quarters, fragments=st.integers(1, 40))
@settings(max_examples=80, deadline=None)
def test_pipeline_formula(g, t, fragments):
    """Ideal two-stage pipeline of M equal fragments: max(G, R) + min(G, R) / M."""
    costs = BubbleCosts(lanes_s=(g,), train_s=t, helper_s=1.0)
    total_g, total_t = fragments * g, fragments * t
    expected = max(total_g, total_t) + min(total_g, total_t) / fragments
    assert finish_time(start_state(fragments, costs), costs, never) == pytest.approx(expected)


def test_policies_by_name():
    costs = BubbleCosts(lanes_s=(3.0,), train_s=1.0, helper_s=3.0)
    state = start_state(8, costs)
    assert set(tag.policies()) >= {"none", "fixed", "greedy", "bts", "steps"}
    assert tag.decide("none", state, costs).action is Action.SKIP
    assert tag.decide("fixed", state, costs, k=0).action is Action.SKIP
    assert tag.decide("fixed", state, costs, k=3).fragments == 3
    assert tag.decide("fixed", state, costs, k=99).fragments == 7  # what is left
    assert tag.decide("greedy", state, costs).fragments == 1
    assert tag.decide("steps", state, costs).yield_when_ready
    assert tag.decide("greedy", BubbleState(0, (1.0,), (1.0,)), costs).action is Action.SKIP
    with pytest.raises(ValueError, match="unknown TAG policy 'eager'; available: none"):
        tag.decide("eager", state, costs)
    with pytest.raises(ValueError, match="registered already"):
        tag.register_policy("bts")(bts)
    with pytest.raises(ValueError, match="k=-1"):
        tag.decide("fixed", state, costs, k=-1)
    with pytest.raises(ValueError, match="depth=0"):
        search(state, costs, depth=0)
    with pytest.raises(ValueError, match="fragments=0"):
        Decision(Action.GENERATE)


def test_yielded_work_is_resumed_or_left_to_replicas():
    costs = BubbleCosts(lanes_s=(4.0,), train_s=1.0, helper_s=4.0, steps=10)
    near_the_end = BubbleState(0, (0.0,), (), partial=1, partial_steps=5)
    decision = tag.steps(near_the_end, costs)
    assert decision.predicted_s == pytest.approx(0.5 * 4.0 + 1.0)  # half a fragment and its training
    slow = BubbleCosts(lanes_s=(1.0,), train_s=1.0, helper_s=8.0, steps=10)
    decision = tag.steps(near_the_end, slow)
    assert decision.action is Action.SKIP and decision.hand_over  # the idle pool is eight times faster


def test_hand_over_only_when_the_replica_is_earlier():
    assert tag.worth_handing_over(10, helper_step_s=1.0, replica_step_s=0.5)
    assert not tag.worth_handing_over(10, helper_step_s=1.0, replica_step_s=1.0)
    assert not tag.worth_handing_over(2, helper_step_s=1.0, replica_step_s=0.5, wait_s=1.5)


def test_costs_and_state_of_a_bubble():
    """Four replicas (one half as fast), groups of two samples: two lanes, helper rounds of two groups on four ranks."""
    work = Workload(name="w", groups=8, samples_per_group=2, denoise_steps=10, trained_transitions=5)
    replicas = tuple(Replica(name=str(i), speed=s) for i, s in enumerate((1.0, 1.0, 1.0, 0.5)))
    pools = Pools(replicas=replicas, trainer=TrainerPool(ranks=4, speed=2.0), reward_slots=1)
    profile = Profile(
        denoise_s=1.0, train_cell_s=1.0, helper_denoise_s=2.0, score_s=3.0, helper_in_s=0.5, helper_out_s=0.25
    )
    costs = tag.bubble_costs(work, pools, profile, fragment_samples=2, train_s=7.0)
    assert costs.lanes_s == pytest.approx((2 * 2 / 0.35,) * 2)  # 3.5 replicas make 0.35 samples/s
    assert costs.helper_s == pytest.approx(10.0) and costs.helper_round == 2
    assert costs.switch_s == pytest.approx(0.75) and costs.score_s == pytest.approx(6.0) and costs.steps == 10
    state = tag.bubble_state(
        costs, fragment_samples=2, unclaimed_samples=6, begun=[4.0, 1.0], partial_samples=3, partial_steps=4
    )
    assert state.unclaimed == 3 and state.lanes == (1.0, 4.0) and state.arrivals == (7.0, 10.0)
    assert state.partial == 2 and state.partial_steps == 4
    idle = tag.bubble_state(costs, fragment_samples=2, unclaimed_samples=6, begun=[])
    assert idle.unclaimed == 1 and min(idle.lanes) > 0  # free lanes have pulled already


def test_stale_work_is_begun_only_when_a_round_ends_before_the_commit():
    """A round of 6 s; the running step has fragments arriving after 4 and 10 s, each trained in 3 s: 7 s are free."""
    costs = BubbleCosts(lanes_s=(2.0,), train_s=3.0, helper_s=6.0)
    assert tag.may_work_ahead(costs, [4.0, 10.0])
    assert not tag.may_work_ahead(costs, [4.0, 8.0])
    assert not tag.may_work_ahead(costs, [])
