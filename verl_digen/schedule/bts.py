"""BTS: bubble-triggered search, the smallest predicted makespan of the rest of a logical batch.

At a bubble the Trainer may skip or generate k whole fragments; the search plays each choice to the next
bubble, where it chooses again. It is a best-first search over bubbles:

- a state is (unclaimed, lanes, arrivals) with times relative to the bubble, so equal situations reached at
  different moments meet in one memo entry, and the earlier one wins;
- the priority is the time so far plus a lower bound of the rest, so the first finished entry is optimal;
- the best of the base policies is the incumbent: what cannot beat it is cut, and the answer is never worse;
- ``depth`` bounds the bubbles looked ahead, beyond which the base policies finish the plan, and ``effort``
  bounds the work, beyond which the best plan so far is taken.

Only the first decision of the plan is carried out; the next bubble decides anew.
Source: arXiv 2606.24369 (trainer-assisted generation); the search itself is this project's.
"""

from __future__ import annotations

import heapq
import math

from verl_digen.schedule.pipeline import BubbleCosts, BubbleState, finish_time
from verl_digen.schedule.work import SKIP, Action, Decision

DEFAULT_EFFORT = 6000
"""Fragments a live decision may play through: exact for the batch sizes in use, a few milliseconds at worst."""

_RELATIVE = 1e-9
_JUMP_EFFORT = 4


def rest_bound(state: BubbleState, costs: BubbleCosts) -> float:
    """A time the rest of the batch cannot beat, whatever is decided.

    With H helper fragments the Trainer is busy for s + H·h/round + N·t, and the lanes must make the other
    ones, the last of which still has to be trained: the better of H = 0 and the best H ≥ 1.
    """
    train, waiting = costs.train_s, state.untrained
    if not waiting:
        return 0.0
    lanes = costs.lanes_s
    rate = sum(1.0 / cost for cost in lanes)
    behind = sum(free / cost for free, cost in zip(state.lanes, lanes, strict=True))
    last = max(state.lanes) if state.arrivals else 0.0
    tail = costs.score_s + train
    bound = max(
        (state.arrivals[0] if state.arrivals else min(lanes) + costs.score_s) + waiting * train,
        (state.unclaimed + behind) / rate + tail,
        state.arrivals[-1] + train if state.arrivals else 0.0,
    )
    if not state.unclaimed:
        return bound
    each = costs.helper_s / costs.helper_round
    busy = costs.switch_s + waiting * train
    crossing = ((state.unclaimed + behind) / rate + tail - busy) / (each + 1.0 / rate)
    helped = math.inf
    for count in {max(1, math.floor(crossing)), max(1, math.ceil(crossing))}:
        count = min(count, state.unclaimed)
        made = max(last, (state.unclaimed - count + behind) / rate)
        helped = min(helped, max(busy + count * each, made + tail))
    return min(bound, helped)


def next_bubble(state: BubbleState, costs: BubbleCosts, fragments: int) -> tuple[float, BubbleState]:
    """Carry out one choice (0 = skip) and train what is ready; time passed and the state at the next bubble.

    A state without unclaimed fragments comes back finished: nothing is left to decide, so the remaining
    arrivals are trained as well and the time is that of the end.
    """
    if len(state.lanes) == 1 and costs.score_s == 0 and state.arrivals == state.lanes:
        return _next_bubble_single(state, costs, fragments)
    lanes = list(state.lanes)
    arrivals = list(state.arrivals)
    unclaimed = state.unclaimed - fragments
    train, score, lanes_s = costs.train_s, costs.score_s, costs.lanes_s
    now = 0.0
    if fragments:
        now = costs.switch_s
        left = fragments
        while left:
            made = min(left, costs.helper_round)
            now += costs.helper_s
            arrivals.extend([now + score] * made)
            left -= made
        arrivals.sort()
    else:
        now = arrivals[0]
    while True:
        while unclaimed:
            free = min(lanes)
            if free > now:
                break
            lane = lanes.index(free)
            lanes[lane] = done = free + lanes_s[lane]
            unclaimed -= 1
            arrivals.append(done + score)
            if len(arrivals) > 1 and arrivals[-2] > arrivals[-1]:
                arrivals.sort()
        if arrivals and arrivals[0] <= now:
            del arrivals[0]
            now += train
        elif unclaimed == 0:
            if not arrivals:
                return now, BubbleState(0, (), ())
            now = arrivals[0]
        else:
            rest = tuple([free - now if free > now else 0.0 for free in lanes])
            return now, BubbleState(unclaimed, rest, tuple([time - now for time in arrivals]))


def _next_bubble_single(state: BubbleState, costs: BubbleCosts, fragments: int) -> tuple[float, BubbleState]:
    """:func:`next_bubble` for one busy lane and no scoring time: jumps over whole runs of training."""
    first, pace, train = state.lanes[0], costs.lanes_s[0], costs.train_s
    unclaimed = state.unclaimed - fragments
    begin = costs.switch_s + costs.block_s(fragments) if fragments else first
    now, trained = begin, 0
    while True:
        made = min(unclaimed + 1, math.floor((now - first) / pace + 1e-12) + 1) if now >= first else 0
        if fragments + made == trained:
            break
        trained = fragments + made
        now = begin + trained * train
    if made > unclaimed:
        return now, BubbleState(0, (), ())
    if made == unclaimed:
        return first + made * pace + train, BubbleState(0, (), ())
    left = first + made * pace - now
    return now, BubbleState(unclaimed - made, (left,), (left,))


def _key(state: BubbleState) -> tuple:
    return (
        state.unclaimed,
        tuple([round(time, 9) for time in state.lanes]),
        tuple([round(time, 9) for time in state.arrivals]),
    )


def never(state: BubbleState, costs: BubbleCosts) -> Decision:
    """Plain GAP: the Trainer never generates."""
    return SKIP


def greedy(state: BubbleState, costs: BubbleCosts) -> Decision:
    """One helper round in every bubble that has work left."""
    count = min(state.unclaimed, costs.helper_round)
    return Decision(Action.GENERATE, count) if count else SKIP


def _base(state: BubbleState, costs: BubbleCosts) -> tuple[float, int]:
    """The better base policy from here: its makespan and its first choice."""
    skip = finish_time(state, costs, never)
    eager = finish_time(state, costs, greedy)
    return (skip, 0) if skip <= eager else (eager, min(state.unclaimed, costs.helper_round))


def search(
    state: BubbleState,
    costs: BubbleCosts,
    *,
    depth: int | None = None,
    max_block: int | None = None,
    effort: int | None = None,
) -> tuple[float, int, int]:
    """Best plan from a bubble.

    Args:
        depth: bubbles to look ahead; ``None`` for all of them.
        max_block: fragments that one decision may insert; ``None`` for any number.
        effort: fragments to play through at most, over all branches; ``None`` for an exact search.

    Returns:
        Predicted makespan of the rest, fragments to generate now (0 = skip), states expanded.
    """
    if depth is not None and depth < 1:
        raise ValueError(f"BTS: depth={depth} must be at least 1")
    if max_block is not None and max_block < costs.helper_round:
        raise ValueError(f"BTS: max_block={max_block} is below one helper round of {costs.helper_round} fragments")
    most = state.unclaimed if max_block is None else max_block
    best, choice = _base(state, costs)
    margin = _RELATIVE * max(best, 1.0)
    frontier: list[tuple[float, int, float, BubbleState, int, int]] = [(0.0, 0, 0.0, state, -1, 0)]
    seen = {_key(state): 0.0}
    nodes = order = 0
    left = math.inf if effort is None else effort
    jumps = len(costs.lanes_s) == 1 and costs.score_s == 0
    while frontier:
        bound, _, spent, here, first, level = heapq.heappop(frontier)
        if bound >= best - margin or left <= 0:
            break
        nodes += 1
        for count in range(min(here.unclaimed, most) + 1):
            block = costs.switch_s + costs.block_s(count) if count else 0.0
            if max(bound, spent + block + here.untrained * costs.train_s) >= best - margin or left <= 0:
                break
            left -= _JUMP_EFFORT if jumps else here.untrained
            took, after = next_bubble(here, costs, count)
            total = spent + took
            took_first = count if first < 0 else first
            if after.unclaimed == 0:
                if total < best - margin:
                    best, choice = total, took_first
                continue
            if depth is not None and level + 1 >= depth:
                ending, _ = _base(after, costs)
                if total + ending < best - margin:
                    best, choice = total + ending, took_first
                continue
            reach = total + rest_bound(after, costs)
            if reach >= best - margin:
                continue
            key = _key(after)
            if seen.get(key, math.inf) <= total:
                continue
            seen[key] = total
            order += 1
            heapq.heappush(frontier, (reach, order, total, after, took_first, level + 1))
    return best, choice, nodes


def bts(
    state: BubbleState,
    costs: BubbleCosts,
    *,
    depth: int | None = None,
    max_block: int | None = None,
    effort: int | None = DEFAULT_EFFORT,
) -> Decision:
    """The decision of BTS at a bubble. A yielded round, which BTS itself never leaves, is finished first."""
    if state.partial:
        return Decision(Action.GENERATE, state.partial)
    predicted, count, _ = search(state, costs, depth=depth, max_block=max_block, effort=effort)
    if count == 0:
        return Decision(Action.SKIP, predicted_s=predicted)
    return Decision(Action.GENERATE, count, predicted_s=predicted)
