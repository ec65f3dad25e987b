"""TAG: what the Trainer does in a bubble.

A policy is a function ``(state, costs) -> Decision``; :func:`decide` finds it by name. Rules that hold
whatever the policy says, enforced by the caller: a ready fragment always goes first; the helper never
commits and never touches accumulated gradients; it generates only with the version the Trainer holds, which with
several logical batches per publish ends at the first commit of a step.

Policies: ``none`` (plain GAP), ``fixed`` (k fragments in every bubble), ``greedy`` (one helper round in every
bubble), ``bts`` (bubble-triggered search), ``steps`` (step-granular: yields between two denoising steps).
Source: arXiv 2606.24369; ``steps`` is this project's extension.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from verl_digen.schedule import bts as _bts
from verl_digen.schedule.pipeline import BubbleCosts, BubbleState, Policy, finish_time
from verl_digen.schedule.profile import Profile
from verl_digen.schedule.work import SKIP, Action, Decision, Pools, Workload

_POLICIES: dict[str, Callable[..., Decision]] = {}


def register_policy(name: str) -> Callable[[Callable[..., Decision]], Callable[..., Decision]]:
    """Decorator: make a policy known under a name. ``ValueError`` when the name is taken."""

    def register(policy: Callable[..., Decision]) -> Callable[..., Decision]:
        if name in _POLICIES:
            raise ValueError(f"TAG policy {name!r} is registered already")
        _POLICIES[name] = policy
        return policy

    return register


def policies() -> tuple[str, ...]:
    """Names of all policies."""
    return tuple(_POLICIES)


def get_policy(name: str) -> Callable[..., Decision]:
    """The policy of a name. ``ValueError`` lists what is available."""
    if name not in _POLICIES:
        raise ValueError(f"unknown TAG policy {name!r}; available: {', '.join(_POLICIES)}")
    return _POLICIES[name]


def decide(name: str, state: BubbleState, costs: BubbleCosts, **options: int | None) -> Decision:
    """Ask a policy; with nothing left to generate the answer is to skip."""
    if state.unclaimed == 0 and state.partial == 0:
        return SKIP
    return get_policy(name)(state, costs, **options)


register_policy("none")(_bts.never)
register_policy("greedy")(_bts.greedy)
register_policy("bts")(_bts.bts)


@register_policy("fixed")
def fixed(state: BubbleState, costs: BubbleCosts, *, k: int = 1) -> Decision:
    """k fragments in every bubble; ``k=0`` is plain GAP."""
    if k < 0:
        raise ValueError(f"TAG policy fixed: k={k} must not be negative")
    count = min(k, state.unclaimed)
    return Decision(Action.GENERATE, count) if count else SKIP


def _stepwise(state: BubbleState, costs: BubbleCosts, hand_over: bool) -> Decision:
    count = state.partial or min(state.unclaimed, costs.helper_round)
    return Decision(Action.GENERATE, count, yield_when_ready=True, hand_over=hand_over)


def stepwise_keep(state: BubbleState, costs: BubbleCosts) -> Decision:
    """Always generate, yield when a fragment is ready, and resume the own partial latents."""
    return _stepwise(state, costs, False)


def stepwise_hand_over(state: BubbleState, costs: BubbleCosts) -> Decision:
    """Always generate, yield when a fragment is ready; idle replicas may finish what was yielded."""
    return _stepwise(state, costs, True)


def leave(state: BubbleState, costs: BubbleCosts) -> Decision:
    """Generate nothing; replicas finish what was yielded."""
    return Decision(Action.SKIP, hand_over=True)


def _after_partial(state: BubbleState, costs: BubbleCosts, **options: int | None) -> float:
    """Predicted rest when a yielded round is finished without giving way and BTS decides from there."""
    if not state.partial:
        return _bts.search(state, costs, **options)[0]
    return finish_time(state, costs, lambda s, c: _bts.bts(s, c, **options))


@register_policy("steps")
def steps(
    state: BubbleState,
    costs: BubbleCosts,
    *,
    depth: int | None = None,
    effort: int | None = _bts.DEFAULT_EFFORT,
) -> Decision:
    """Step-granular helper: the best of BTS, of yielding with and without hand-over, and of leaving.

    Every candidate is a fixed rule, and following the chosen one leads to states in which it is a candidate
    again, so deciding anew at each bubble never makes the prediction worse. With a free switch it is
    therefore never worse than BTS.
    """
    candidates: tuple[Policy, ...] = (stepwise_hand_over, stepwise_keep, leave)
    timed = [(finish_time(state, costs, policy), order) for order, policy in enumerate(candidates)]
    predicted, order = min(timed)
    whole = _after_partial(state, costs, depth=depth, effort=effort)
    if whole < predicted - 1e-9 * max(1.0, predicted):
        decision = _bts.bts(state, costs, depth=depth, effort=effort)
        predicted = whole
    else:
        decision = candidates[order](state, costs)
    return Decision(decision.action, decision.fragments, decision.yield_when_ready, decision.hand_over, predicted)


def worth_handing_over(steps_left: int, helper_step_s: float, replica_step_s: float, wait_s: float = 0.0) -> bool:
    """Whether an idle replica would finish a running helper sample earlier than the helper itself.

    Args:
        steps_left: denoising steps the sample still needs.
        helper_step_s, replica_step_s: one step of it on either side, seconds.
        wait_s: until the helper reaches its next step boundary and the latents have moved, seconds.
    """
    return wait_s + steps_left * replica_step_s < steps_left * helper_step_s


def may_work_ahead(costs: BubbleCosts, own_arrivals: Sequence[float]) -> bool:
    """Whether the helper should begin stale groups before the commit that is due.

    At the commit the Trainer's version changes, and unfinished groups of the old one can be finished by replicas
    only. A whole round therefore has to fit into the time until the last fragment of the running step is ready,
    less what the Trainer needs for the others.

    Args:
        own_arrivals: times until the untrained fragments of the running step become ready, seconds.
    """
    if not own_arrivals:
        return False
    training = costs.train_s * (len(own_arrivals) - 1)
    return max(own_arrivals) - training >= costs.switch_s + costs.helper_s


def bubble_costs(
    workload: Workload,
    pools: Pools,
    profile: Profile,
    *,
    fragment_samples: int,
    train_s: float,
    rollout_batch: int = 1,
) -> BubbleCosts:
    """Costs of one fragment for a placement.

    The replicas become as many equal lanes as fragments fit into one wave of them; unlike replicas enter
    by their summed speed. A helper round gives each of the Trainer's ranks one rollout batch.

    Args:
        fragment_samples: samples that become ready together.
        train_s: Trainer time of a fragment, seconds.
        rollout_batch: samples a replica denoises together.
    """
    per_batch = profile.generate_s(workload.denoise_steps, rollout_batch)
    rate = pools.generator_speed * rollout_batch / per_batch
    lanes = max(1, len(pools.replicas) * rollout_batch // fragment_samples)
    lane = lanes * fragment_samples / rate
    ranks, speed = pools.trainer.ranks, pools.trainer.speed
    batch = min(rollout_batch, fragment_samples)
    pieces = -(-fragment_samples // batch)
    rounds = -(-pieces // ranks)
    one = (workload.denoise_steps * profile.helper_step_s(batch) + profile.encode_s + profile.decode_s * batch) / speed
    score = profile.score_s
    if pools.reward_slots:
        score *= -(-fragment_samples // pools.reward_slots)
    return BubbleCosts(
        lanes_s=(lane,) * lanes,
        train_s=train_s,
        helper_s=rounds * one,
        helper_round=max(1, ranks // pieces),
        switch_s=profile.helper_switch_s,
        score_s=score,
        steps=rounds * workload.denoise_steps,
    )


def bubble_state(
    costs: BubbleCosts,
    *,
    fragment_samples: int,
    unclaimed_samples: int,
    begun: Sequence[float],
    ready_soon: Sequence[float] = (),
    partial_samples: int = 0,
    partial_steps: int = 0,
) -> BubbleState:
    """The state at a bubble, from what a run knows.

    Args:
        unclaimed_samples: samples of groups nobody has begun and that may be begun now.
        begun: predicted times from now until each begun group is generated, seconds.
        ready_soon: times until groups that are generated already will have been scored, seconds.
        partial_samples, partial_steps: samples the helper has yielded, denoising steps they still need.
    """
    unclaimed = math.ceil(unclaimed_samples / fragment_samples)
    waiting = sorted(max(0.0, time) for time in begun)
    lanes = len(costs.lanes_s)
    busy = waiting[:lanes]
    free = tuple(busy) + tuple(
        0.0 if unclaimed == 0 else waiting[0] if waiting else 0.0 for _ in range(lanes - len(busy))
    )
    arrivals = tuple(sorted([time + costs.score_s for time in waiting] + [max(0.0, time) for time in ready_soon]))
    partial = math.ceil(partial_samples / fragment_samples)
    state = BubbleState(unclaimed, free, arrivals, partial, min(max(partial_steps, 1), costs.steps) if partial else 0)
    return settle(state, costs) if unclaimed else state


def settle(state: BubbleState, costs: BubbleCosts) -> BubbleState:
    """Let lanes that are free at this moment pull, so that no decision is made on work about to be taken."""
    lanes, arrivals, unclaimed = list(state.lanes), list(state.arrivals), state.unclaimed
    while unclaimed and min(lanes) <= 0.0:
        lane = lanes.index(min(lanes))
        lanes[lane] = costs.lanes_s[lane]
        arrivals.append(lanes[lane] + costs.score_s)
        unclaimed -= 1
    return BubbleState(unclaimed, tuple(lanes), tuple(sorted(arrivals)), state.partial, state.partial_steps)
