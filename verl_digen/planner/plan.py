"""The planner: which split, replica width, rollout batch, tile, policy and TCSS ratio is fastest.

Candidates are enumerated, those that do not fit into memory are dropped, the rest is ranked by a closed
formula, and the best of the ranking are simulated. The best of those are varied (split, width, rollout batch, tile)
until no variation is faster, and at the end every policy and ratio also tries what won for the others.
What the planner reports as makespan is simulated.

The search for one policy and ratio does not depend on which others are asked for, and what won for others is only
taken over when it is faster. So a plan with more policies or ratios to choose from is never slower.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from verl_digen.planner.bound import lower_bound
from verl_digen.planner.candidates import Candidate, Search, Space, estimate
from verl_digen.planner.catalog import Case, Testbed
from verl_digen.planner.simulate import Simulation, simulate

TRIAL_SAMPLES = 2048
"""Samples after which the trial of a candidate ends early (it has at least three steps)."""

VARIATION_SAMPLES = 16384
"""Simulated samples of all variations of one policy and ratio: with large steps fewer variations are tried."""

CLOSE = 1.02
"""A candidate whose trial is slower than the best by more than this factor is not simulated for longer."""

STARTS = 3
"""Candidates with different splits whose variations are tried."""


@dataclass(frozen=True, slots=True)
class Choice:
    """The best candidate for one policy and ratio, simulated."""

    candidate: Candidate
    simulation: Simulation


@dataclass(frozen=True, slots=True)
class Plan:
    """Choices from fastest to slowest, with what the search did."""

    choices: tuple[Choice, ...]
    considered: int
    rejected_for_memory: int
    simulated: int
    seconds: float

    @property
    def best(self) -> Choice:
        return self.choices[0]


def plan(case: Case, testbed: Testbed, search: Search | None = None) -> Plan:
    """Search the space of a testbed.

    Raises:
        ValueError: nothing fits into memory; the message has the last numbers that did not.
    """
    search = search or Search()
    begin = time.perf_counter()
    space = Space(case, testbed, search)
    bare: list[Candidate] = []
    for pools, profile, used, group, width, batch in space.placements():
        for schedule in space.schedules(group, pools.trainer.ranks, batch):
            bare.append(Candidate(pools, profile, schedule, used, group.name, width))
    if not bare:
        raise ValueError(
            f"planner: none of {space.considered} placements of {case.workload.name} on {testbed.name} "
            f"({testbed.devices} devices) fits into memory; last: {space.why}"
        )
    steps = min(search.trial_steps, max(3, TRIAL_SAMPLES // case.workload.samples))
    rejected, judge = space.rejected, _Judge(case, search, steps)
    rows: list[Choice] = []
    for ratio in sorted(search.stale_ratios):
        alone = _ranking(case, bare, "none", ratio)
        helped = _ranking(case, bare, "steps", ratio) if set(search.policies) != {"none"} else alone
        for policy in search.policies:
            rankings = (alone if policy == "none" else helped, alone)
            rows.append(_best(space, judge, _shortlist(rankings, policy, ratio, search.shortlist)))
    choices = [_take_over(judge, row, rows) for row in rows]
    choices.sort(key=lambda choice: choice.simulation.makespan_s)
    return Plan(tuple(choices), len(bare), rejected, judge.simulated, time.perf_counter() - begin)


def _ranking(case: Case, bare: list[Candidate], policy: str, ratio: float) -> list[tuple[float, Candidate]]:
    """All candidates by estimate, which only asks whether there is a helper at all."""
    ranked = []
    for order, candidate in enumerate(bare):
        schedule = replace(candidate.schedule, policy=policy, max_stale_ratio=ratio)
        ranked.append((estimate(case, candidate.pools, candidate.profile, schedule), order, candidate))
    ranked.sort(key=lambda entry: entry[:2])
    return [(guess, candidate) for guess, _, candidate in ranked]


def _shortlist(
    rankings: Sequence[list[tuple[float, Candidate]]], policy: str, ratio: float, most: int
) -> list[Candidate]:
    """The best candidates by estimate, at most three tile sizes per placement so that they differ.

    A helper makes the formula optimistic about unbalanced splits, so half of the list is what would be best
    without one.
    """
    chosen: list[Candidate] = []
    for ranked, quota in zip(rankings, (most - most // 2, most), strict=True):
        seen: dict[tuple, set[int]] = {}
        for guess, candidate in ranked:
            if len(chosen) >= quota:
                break
            place = (candidate.generator, candidate.trainer_group, candidate.width, candidate.schedule.rollout_batch)
            sizes = seen.setdefault(place, set())
            size = candidate.schedule.max_cells
            if size not in sizes and len(sizes) < 3:
                sizes.add(size)
                schedule = replace(candidate.schedule, policy=policy, max_stale_ratio=ratio)
                chosen.append(replace(candidate, schedule=schedule, estimate_s=guess))
    return chosen


@dataclass(slots=True)
class _Judge:
    """Simulates candidates, each only once."""

    case: Case
    search: Search
    steps: int
    simulated: int = 0
    trials: dict[tuple, float] = field(default_factory=dict)
    finals: dict[tuple, Simulation] = field(default_factory=dict)

    def trial(self, candidate: Candidate) -> float:
        """Seconds of a step in a short simulation, without its start-up."""
        key = candidate.key
        if key not in self.trials:
            self.trials[key] = _steady(play(self.case, candidate, self.steps))
            self.simulated += 1
        return self.trials[key]

    def final(self, candidate: Candidate) -> Choice:
        key = candidate.key
        if key not in self.finals:
            self.finals[key] = play(self.case, candidate, self.search.final_steps)
            self.simulated += 1
        return Choice(candidate, self.finals[key])

    def hopeless(self, candidate: Candidate, seconds: float) -> bool:
        """Whether its lower bound already says that it is slower."""
        bound = lower_bound(self.case.workload, candidate.pools, candidate.profile, candidate.schedule)
        return bound.seconds >= 1.01 * seconds


def _best(space: Space, judge: _Judge, candidates: list[Candidate]) -> Choice:
    """Try the shortlist, then variations of the best of it; the fastest finalist wins.

    Of candidates with exactly the same trial, which differ in something that has no effect, one is a finalist.
    """
    tried: dict[tuple, tuple[float, Candidate]] = {}
    fastest = math.inf
    for candidate in candidates:
        if candidate.key not in tried and not judge.hopeless(candidate, fastest):
            tried[candidate.key] = judge.trial(candidate), candidate
            fastest = min(fastest, tried[candidate.key][0])
    starts: dict[tuple, tuple[float, Candidate]] = {}
    for entry in sorted(tried.values(), key=lambda entry: entry[0]):
        starts.setdefault((entry[1].generator, entry[1].trainer_group), entry)
    left = min(space.search.variations, VARIATION_SAMPLES // (judge.steps * space.case.workload.samples))
    for start in list(starts.values())[:STARTS]:
        left = _climb(space, judge, start, tried, left)
    fastest = min(seconds for seconds, _ in tried.values())
    unlike = {seconds: candidate for seconds, candidate in reversed(tried.values()) if seconds <= CLOSE * fastest}
    last = [unlike[seconds] for seconds in sorted(unlike)[: space.search.finalists]]
    return min((judge.final(candidate) for candidate in last), key=lambda choice: choice.simulation.makespan_s)


def _climb(
    space: Space, judge: _Judge, start: tuple[float, Candidate], tried: dict[tuple, tuple[float, Candidate]], left: int
) -> int:
    """Go to the first faster variation until there is none or no trial is left; returns the trials left."""
    seconds, here = start
    moved = True
    while moved:
        moved = False
        for other in space.variations(here):
            if other.key not in tried:
                if judge.hopeless(other, seconds):
                    continue
                if left == 0:
                    return 0
                tried[other.key] = judge.trial(other), other
                left -= 1
            if tried[other.key][0] < seconds * (1 - 1e-6):
                seconds, here = tried[other.key]
                moved = True
                break
    return left


def _take_over(judge: _Judge, row: Choice, rows: Sequence[Choice]) -> Choice:
    """The best of what won for a policy and ratio and of what won for the others, run with this policy and ratio."""
    mine = row.candidate.schedule
    best, seconds = row, judge.trial(row.candidate)
    for other in rows:
        schedule = replace(other.candidate.schedule, policy=mine.policy, max_stale_ratio=mine.max_stale_ratio)
        candidate = replace(other.candidate, schedule=schedule)
        if judge.hopeless(candidate, seconds) or judge.trial(candidate) > CLOSE * seconds:
            continue
        best = min(best, judge.final(candidate), key=lambda choice: choice.simulation.makespan_s)
    return best


def _steady(result: Simulation) -> float:
    """Mean step without the first quarter: a short trial would otherwise be judged by its start-up."""
    later = result.step_s[len(result.step_s) // 4 :]
    return sum(later) / len(later)


def play(case: Case, candidate: Candidate, steps: int) -> Simulation:
    return simulate(case.workload, candidate.pools, candidate.profile, candidate.schedule, steps=steps)
