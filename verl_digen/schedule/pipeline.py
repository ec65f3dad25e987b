"""The fragment-level model of a logical batch that TAG decisions are made on.

The Generator is a set of lanes, each making one fragment at a time; the Trainer trains ready fragments one
after another and may generate in its bubbles. A decision is asked for only when the Trainer has nothing
ready and something is left to generate. :func:`finish_time` plays a policy to the end; it is the model in
which BTS is exact and in which policies are compared.
"""

from __future__ import annotations

import math
from bisect import insort
from collections.abc import Callable
from dataclasses import dataclass

from verl_digen.schedule.work import Action, Decision, require_not_negative, require_positive


@dataclass(frozen=True, slots=True, kw_only=True)
class BubbleCosts:
    """Times of one fragment, in seconds.

    Attributes:
        lanes_s: Generator time of a fragment, one entry per lane (one lane: the whole pool, g).
        train_s: Trainer time, t.
        helper_s: time of one helper round on the Trainer's devices, h.
        helper_round: fragments the helper makes in one round.
        switch_s: switch into and out of generating together, s.
        score_s: from generated to ready.
        steps: denoising steps of a helper round; between two of them the helper may yield.
    """

    lanes_s: tuple[float, ...]
    train_s: float
    helper_s: float
    helper_round: int = 1
    switch_s: float = 0.0
    score_s: float = 0.0
    steps: int = 1

    def __post_init__(self) -> None:
        if not self.lanes_s or min(self.lanes_s) <= 0:
            raise ValueError(f"bubble costs: lanes_s={self.lanes_s} needs at least one entry, all above zero")
        require_positive(self, "train_s", "helper_s", "helper_round", "steps")
        require_not_negative(self, "switch_s", "score_s")

    def block_s(self, fragments: int) -> float:
        """Helper time for whole fragments, without the switch."""
        return math.ceil(fragments / self.helper_round) * self.helper_s


@dataclass(frozen=True, slots=True)
class BubbleState:
    """What a decision may look at; every time is relative to now.

    Attributes:
        unclaimed: fragments nobody has begun.
        lanes: time until each lane of the Generator is free; lanes pull at once when free.
        arrivals: ascending times at which claimed fragments become ready.
        partial: fragments the helper has begun and yielded.
        partial_steps: denoising steps these still need.
    """

    unclaimed: int
    lanes: tuple[float, ...]
    arrivals: tuple[float, ...]
    partial: int = 0
    partial_steps: int = 0

    @property
    def untrained(self) -> int:
        """Fragments the Trainer still has to train."""
        return self.unclaimed + len(self.arrivals) + self.partial


Policy = Callable[[BubbleState, BubbleCosts], Decision]


def start_state(fragments: int, costs: BubbleCosts) -> BubbleState:
    """The first bubble of a batch: every lane has just pulled, the Trainer has nothing."""
    busy = min(fragments, len(costs.lanes_s))
    lanes = tuple(cost if lane < busy else 0.0 for lane, cost in enumerate(costs.lanes_s))
    arrivals = tuple(sorted(cost + costs.score_s for cost in lanes[:busy]))
    return BubbleState(fragments - busy, lanes, arrivals)


class _Run:
    """Plays the model; times are absolute, from the moment of the first state."""

    __slots__ = (
        "costs",
        "now",
        "unclaimed",
        "lanes",
        "arrivals",
        "partial",
        "partial_steps",
        "hand_over",
        "decisions",
    )

    def __init__(self, state: BubbleState, costs: BubbleCosts) -> None:
        self.costs = costs
        self.now = 0.0
        self.unclaimed = state.unclaimed
        self.lanes = list(state.lanes)
        self.arrivals = list(state.arrivals)
        self.partial = state.partial
        self.partial_steps = state.partial_steps
        self.hand_over = False
        self.decisions = 0

    def advance(self, until: float) -> None:
        """Let free lanes pull up to a moment; yielded work goes to a lane once nothing fresh is left."""
        costs, lanes = self.costs, self.lanes
        while self.unclaimed or (self.partial and self.hand_over):
            free = min(lanes)
            if free > until:
                return
            lane = lanes.index(free)
            if self.unclaimed:
                self.unclaimed -= 1
                done = free + costs.lanes_s[lane]
            else:
                self.partial -= 1
                done = max(free, self.now) + costs.lanes_s[lane] * self.partial_steps / costs.steps
            lanes[lane] = done
            insort(self.arrivals, done + costs.score_s)

    def view(self) -> BubbleState:
        now = self.now
        lanes = tuple(max(0.0, free - now) for free in self.lanes)
        arrivals = tuple(time - now for time in self.arrivals)
        return BubbleState(self.unclaimed, lanes, arrivals, self.partial, self.partial_steps)

    def block(self, fragments: int) -> None:
        """Generate whole fragments without giving way; a yielded round is finished first."""
        costs = self.costs
        self.now += costs.switch_s
        if self.partial:
            resumed = min(self.partial, fragments)
            self.partial -= resumed
            fragments -= resumed
            self.now += costs.helper_s * self.partial_steps / costs.steps
            self.deliver(resumed)
        fragments = min(fragments, self.unclaimed)
        self.unclaimed -= fragments
        while fragments:
            made = min(fragments, costs.helper_round)
            self.now += costs.helper_s
            self.deliver(made)
            fragments -= made

    def deliver(self, fragments: int) -> None:
        for _ in range(fragments):
            insort(self.arrivals, self.now + self.costs.score_s)

    def stepwise(self, fragments: int) -> None:
        """Generate one round, giving way at the step boundary after the next arrival."""
        costs = self.costs
        if not self.partial:
            self.partial = min(fragments, costs.helper_round, self.unclaimed)
            self.unclaimed -= self.partial
            self.partial_steps = costs.steps
        step = costs.helper_s / costs.steps
        start = self.now + costs.switch_s
        end = start + self.partial_steps * step
        held, self.partial = self.partial, 0
        self.advance(end)
        first = self.arrivals[0] if self.arrivals else math.inf
        done = max(0, math.ceil((first - start) / step - 1e-9)) if first < end else self.partial_steps
        if done < self.partial_steps:
            self.now = max(first, start + done * step)
            self.partial = held
            self.partial_steps -= done
        else:
            self.now = end
            self.deliver(held)


def finish_time(state: BubbleState, costs: BubbleCosts, policy: Policy) -> float:
    """Time from now until the last fragment is trained when ``policy`` answers every bubble."""
    run = _Run(state, costs)
    while True:
        run.advance(run.now)
        if run.arrivals and run.arrivals[0] <= run.now:
            del run.arrivals[0]
            run.now += costs.train_s
            continue
        if run.unclaimed == 0 and run.partial == 0:
            if not run.arrivals:
                return run.now
            run.now = run.arrivals[0]
            continue
        decision = policy(run.view(), costs)
        run.decisions += 1
        run.hand_over = decision.hand_over
        if decision.action is Action.SKIP:
            if not run.arrivals and not run.hand_over:
                raise ValueError(f"policy skips with {run.partial} yielded fragments and nothing on its way")
            run.advance(run.now)
            run.now = max(run.now, run.arrivals[0])
        elif decision.yield_when_ready:
            run.stepwise(decision.fragments)
        else:
            run.block(decision.fragments)
