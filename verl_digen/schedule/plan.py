"""The planner: which split, replica width, fragment, tile, policy and TCSS ratio is fastest.

Candidates are enumerated, those that do not fit into memory are dropped, the rest is ranked by a closed
formula, and the best of the ranking are simulated. The best of those are varied (split, width, rollout batch,
fragment, merge, tile) until no variation is faster, and at the end every policy and ratio also tries what won
for the others. What the planner reports as makespan is simulated.

The search for one policy and ratio does not depend on which others are asked for, and what won for others is only
taken over when it is faster. So a plan with more policies or ratios to choose from is never slower.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from verl_digen.schedule.bound import lower_bound
from verl_digen.schedule.catalog import Case, DeviceGroup, Testbed
from verl_digen.schedule.profile import Profile
from verl_digen.schedule.simulate import Simulation, simulate
from verl_digen.schedule.tsp import cells_that_fit
from verl_digen.schedule.work import Pools, Replica, Schedule, TrainerPool

TRIAL_SAMPLES = 2048
"""Samples after which the trial of a candidate ends early (it has at least three steps)."""

VARIATION_SAMPLES = 16384
"""Simulated samples of all variations of one policy and ratio: with large steps fewer variations are tried."""

CLOSE = 1.02
"""A candidate whose trial is slower than the best by more than this factor is not simulated for longer."""

STARTS = 3
"""Candidates with different splits whose variations are tried."""

MOVES = (-4, -2, -1, 1, 2, 4)
"""Replicas by which a variation changes the Generator."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Search:
    """What the planner may choose from.

    Attributes:
        policies: TAG policies to compare.
        stale_ratios: TCSS ratios to compare; 0 is on-policy.
        widths: devices of a replica.
        rollout_batches: samples a replica denoises together.
        tsp: whether tiles may span transitions.
        gap: whether a logical batch may be cut into fragments.
        generator: devices the Generator takes from the Trainer's group; ``None`` leaves the split open.
        splits: at most this many Generator sizes per group of devices.
        shortlist: candidates simulated for each policy and ratio.
        variations: variations of the best candidates simulated for each policy and ratio; 0 for none.
        finalists: best candidates of each policy and ratio that are simulated for ``final_steps``.
        trial_steps, final_steps: simulated steps of a candidate (fewer when a step is large) and of a finalist.
        recompute_old_log_probs: passed on to the schedules.
    """

    policies: tuple[str, ...] = ("none", "greedy", "bts", "steps")
    stale_ratios: tuple[float, ...] = (0.0,)
    widths: tuple[int, ...] = (1, 2, 4, 8)
    rollout_batches: tuple[int, ...] = (1, 2, 4)
    tsp: bool = True
    gap: bool = True
    generator: int | None = None
    splits: int = 32
    shortlist: int = 20
    variations: int = 30
    finalists: int = 4
    trial_steps: int = 10
    final_steps: int = 12
    recompute_old_log_probs: bool = False

    def __post_init__(self) -> None:
        for name in ("policies", "stale_ratios", "widths", "rollout_batches"):
            if not getattr(self, name):
                raise ValueError(f"planner: {name} is empty")
        sizes = (self.splits, self.shortlist, self.finalists, self.trial_steps, self.final_steps)
        if min(sizes) < 1:
            raise ValueError(
                f"planner: splits, shortlist, finalists, trial_steps, final_steps = {sizes} must all be at least 1"
            )
        if self.variations < 0:
            raise ValueError(f"planner: variations={self.variations} must not be negative")


@dataclass(frozen=True, slots=True)
class Candidate:
    """A placement and a schedule.

    Attributes:
        generator: devices of the Generator by group name.
        trainer_group: group of the Trainer's devices.
        estimate_s: closed-form time of a step, used for ranking only.
    """

    pools: Pools
    profile: Profile
    schedule: Schedule
    generator: tuple[tuple[str, int], ...]
    trainer_group: str
    width: int
    estimate_s: float = 0.0

    @property
    def key(self) -> tuple:
        """What identifies it within one plan."""
        return self.generator, self.trainer_group, self.width, self.schedule


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


def _thin(values: Sequence[int], most: int) -> list[int]:
    """At most ``most`` of some ascending values, evenly spaced, ends included."""
    if len(values) <= most:
        return list(values)
    picked = {round(index * (len(values) - 1) / (most - 1)) for index in range(most)} if most > 1 else {0}
    return [values[index] for index in sorted(picked)]


def replicas_of(testbed: Testbed, parts: Sequence[tuple[DeviceGroup, int]], width: int) -> tuple[Replica, ...]:
    """Replicas of ``width`` devices made of some devices of each group; a remainder is left unused."""
    return tuple(
        Replica(name=f"{part.name}-{index}", speed=testbed.replica_speed(part, width), devices=width)
        for part, devices in parts
        for index in range(devices // width)
    )


@dataclass(slots=True)
class _Space:
    """Enumerates placements and schedules that fit into memory."""

    case: Case
    testbed: Testbed
    search: Search
    considered: int = 0
    rejected: int = 0
    why: str = ""

    def placements(self) -> Iterator[tuple[Pools, Profile, tuple[tuple[str, int], ...], DeviceGroup, int, int]]:
        """Pools with their profile, the Trainer's group, replica width and rollout batch."""
        for group in self.testbed.groups:
            others = [other for other in self.testbed.groups if other is not group]
            for width in self.search.widths:
                for batch in self.search.rollout_batches:
                    lent = self._sizes(group, width, bool(others))
                    for generator in lent:
                        made = self._place(group, others, generator, width, batch)
                        if made is not None:
                            yield made

    def _sizes(self, group: DeviceGroup, width: int, others: bool) -> list[int]:
        sizes = range(0 if others else width, group.count, width)
        if self.search.generator is not None:
            return [self.search.generator] if self.search.generator in sizes else []
        return _thin(list(sizes), self.search.splits)

    def _place(self, group: DeviceGroup, others: list[DeviceGroup], generator: int, width: int, batch: int):
        parts = [(other, other.count) for other in others] + ([(group, generator)] if generator else [])
        self.considered += 1
        for part, _ in parts:
            need, have = self.case.memory.rollout_need(width, batch), part.memory_gib * self.case.memory.usable
            if need > have:
                return self._reject(f"a replica of {width} x {part.name} needs {need:.1f} of {have:.1f} GiB per device")
        ranks = group.count - generator
        need, have = self.case.memory.trainer_need(ranks, 1), group.memory_gib * self.case.memory.usable
        if need > have:
            return self._reject(f"a Trainer of {ranks} x {group.name} needs {need:.1f} of {have:.1f} GiB per rank")
        replicas = replicas_of(self.testbed, parts, width)
        if not replicas:
            return self._reject(f"no group has {width} devices for a replica")
        if len(replicas) * batch > 2 * self.case.workload.samples:
            return None
        trainer = TrainerPool(ranks=ranks, speed=group.speed)
        pools = Pools(replicas=replicas, trainer=trainer, reward_slots=self.case.reward_slots)
        used = tuple((part.name, devices // width * width) for part, devices in parts)
        return pools, self.case.profile(group, ranks), used, group, width, batch

    def _reject(self, why: str) -> None:
        self.rejected += 1
        self.why = why

    def schedules(self, group: DeviceGroup, ranks: int, batch: int) -> Iterator[Schedule]:
        """Fragment and tile sizes that fit; fragments are whole groups, since a part is never ready alone."""
        memory, work = self.case.memory, self.case.workload
        free = group.memory_gib * memory.usable - memory.trainer_need(ranks, 0)
        fit = cells_that_fit(free, memory.cell_gib)
        per_batch = work.groups // work.logical_batches
        groups = [size for size in range(1, per_batch + 1) if size == per_batch or size & (size - 1) == 0]
        if not self.search.gap:
            groups = [per_batch]
        tiles = {min(fit, -(-count * work.samples_per_group * work.trained_transitions // ranks)) for count in groups}
        tiles = {size for size in (*tiles, 1, 2, 4, 8) if 1 <= size <= fit}
        if not self.search.tsp:
            tiles = {min(fit, work.samples)}
        mergers = (1, per_batch) if self.search.tsp and self.search.gap else (1,)
        for count, cells, merge in itertools.product(groups, sorted(tiles), mergers):
            if merge == 1 or count * 2 <= per_batch:
                yield Schedule(
                    merge=merge,
                    fragment_size=count * work.samples_per_group if self.search.gap else None,
                    max_cells=cells,
                    tsp=self.search.tsp,
                    rollout_batch=batch,
                    barrier=not self.search.gap,
                    recompute_old_log_probs=self.search.recompute_old_log_probs,
                )

    def variations(self, here: Candidate) -> list[Candidate]:
        """Candidates that differ in one respect, the best by estimate first.

        Another split, replica width or rollout batch keeps fragment and merge and takes the tile with the best
        estimate; otherwise the placement stays and one of fragment, merge and tile goes to its next value. Splits
        that were left out of the enumeration because there are too many are reached here.
        """
        near = list(self._other_schedules(here))
        for generator, width, batch in self._other_places(here):
            near += self._moved(here, generator, width, batch)
        near = [replace(c, estimate_s=estimate(self.case, c.pools, c.profile, c.schedule)) for c in near]
        return sorted(near, key=lambda candidate: candidate.estimate_s)

    def _other_places(self, here: Candidate) -> Iterator[tuple[int, int, int]]:
        lent, batch = dict(here.generator).get(here.trainer_group, 0), here.schedule.rollout_batch
        if self.search.generator is None:
            for move in MOVES:
                yield lent + move * here.width, here.width, batch
        for width in _next_to(self.search.widths, here.width):
            keep = lent if self.search.generator is not None else max(1, round(lent / width)) * width if lent else 0
            yield keep, width, batch
        for other in _next_to(self.search.rollout_batches, batch):
            yield lent, here.width, other

    def _moved(self, here: Candidate, generator: int, width: int, batch: int) -> list[Candidate]:
        group = next(group for group in self.testbed.groups if group.name == here.trainer_group)
        others = [other for other in self.testbed.groups if other is not group]
        if generator not in range(0 if others else width, group.count, width):
            return []
        made = self._place(group, others, generator, width, batch)
        if made is None:
            return []
        pools, profile, used, *_ = made
        like = here.schedule
        fitting = [
            Candidate(pools, profile, self._as(like, schedule), used, group.name, width)
            for schedule in self.schedules(group, pools.trainer.ranks, batch)
            if (schedule.fragment_size, schedule.merge) == (like.fragment_size, like.merge)
        ]
        return sorted(fitting, key=lambda c: estimate(self.case, c.pools, c.profile, c.schedule))[:1]

    def _other_schedules(self, here: Candidate) -> Iterator[Candidate]:
        group = next(group for group in self.testbed.groups if group.name == here.trainer_group)
        like = here.schedule
        known = list(self.schedules(group, here.pools.trainer.ranks, like.rollout_batch))
        fragments = _next_to([schedule.fragment_size or 0 for schedule in known], like.fragment_size or 0)
        tiles = _next_to([schedule.max_cells for schedule in known], like.max_cells)
        for other in known:
            differs = (
                other.fragment_size != like.fragment_size,
                other.max_cells != like.max_cells,
                other.merge != like.merge,
            )
            near = (other.fragment_size or 0) in fragments or other.max_cells in tiles or other.merge != like.merge
            if sum(differs) == 1 and near:
                yield replace(here, schedule=self._as(like, other))

    @staticmethod
    def _as(like: Schedule, schedule: Schedule) -> Schedule:
        return replace(schedule, policy=like.policy, max_stale_ratio=like.max_stale_ratio)


def _next_to(values: Sequence[int], value: int) -> list[int]:
    """The next smaller and the next larger of some values."""
    smaller, larger = [v for v in values if v < value], [v for v in values if v > value]
    return ([max(smaller)] if smaller else []) + ([min(larger)] if larger else [])


def estimate(case: Case, pools: Pools, profile: Profile, schedule: Schedule) -> float:
    """Closed-form time of a step, seconds: the bound with whole waves and whole tiles instead of ideal ones."""
    work = case.workload
    fragment = schedule.fragment_size or work.samples // work.logical_batches
    count = math.ceil(work.samples / fragment)
    merged = min(schedule.merge, max(1, count // (2 if schedule.max_stale_ratio else 4)))
    one = profile.train_s(
        fragment * merged,
        work.trained_transitions,
        pools.trainer,
        max_cells=schedule.max_cells,
        tsp=schedule.tsp,
        recompute=schedule.recompute_old_log_probs,
    )
    training = count / merged * one + work.logical_batches * profile.commit_s + profile.publish_block_s
    batch_s = profile.generate_s(work.denoise_steps, schedule.rollout_batch)
    slowest = batch_s / min(replica.speed for replica in pools.replicas)
    rate = pools.generator_speed * schedule.rollout_batch / batch_s
    helper = 0.0
    if schedule.policy != "none":
        helper_one = work.denoise_steps * profile.helper_step_s + profile.decode_s
        helper = pools.trainer.ranks * pools.trainer.speed / helper_one
    stale = math.floor(schedule.max_stale_ratio * work.groups + 1e-9) / work.groups
    lumps = 0.5 * slowest * fragment / work.samples
    steady = max(training, (work.samples + helper * training) / (rate + helper) + lumps)
    tail = profile.score_s + one + profile.commit_s + profile.publish_s
    first = max(fragment / (rate + helper), min(slowest, batch_s))
    wave = 0.5 * slowest * (1.0 - stale)
    fresh = ((1.0 - stale) * work.samples + helper * training) / (rate + helper) + tail + wave
    opening = (1.0 - stale) * (first + profile.score_s) + training + profile.publish_s
    if schedule.barrier:
        return work.samples / rate + wave + tail + training - one
    return max(steady, fresh, opening if stale < 1 else 0.0)


def plan(case: Case, testbed: Testbed, search: Search | None = None) -> Plan:
    """Search the space of a testbed.

    Raises:
        ValueError: nothing fits into memory; the message has the last numbers that did not.
    """
    search = search or Search()
    begin = time.perf_counter()
    space = _Space(case, testbed, search)
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
    """The best candidates by estimate, at most three ways to cut and merge per placement so that they differ.

    A helper makes the formula optimistic about unbalanced splits, so half of the list is what would be best
    without one.
    """
    chosen: list[Candidate] = []
    for ranked, quota in zip(rankings, (most - most // 2, most), strict=True):
        seen: dict[tuple, set[tuple]] = {}
        for guess, candidate in ranked:
            if len(chosen) >= quota:
                break
            place = (candidate.generator, candidate.trainer_group, candidate.width, candidate.schedule.rollout_batch)
            sizes = seen.setdefault(place, set())
            size = (candidate.schedule.fragment_size, candidate.schedule.merge)
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
            self.trials[key] = _steady(_play(self.case, candidate, self.steps))
            self.simulated += 1
        return self.trials[key]

    def final(self, candidate: Candidate) -> Choice:
        key = candidate.key
        if key not in self.finals:
            self.finals[key] = _play(self.case, candidate, self.search.final_steps)
            self.simulated += 1
        return Choice(candidate, self.finals[key])

    def hopeless(self, candidate: Candidate, seconds: float) -> bool:
        """Whether its lower bound already says that it is slower."""
        bound = lower_bound(self.case.workload, candidate.pools, candidate.profile, candidate.schedule)
        return bound.seconds >= 1.01 * seconds


def _best(space: _Space, judge: _Judge, candidates: list[Candidate]) -> Choice:
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
    space: _Space, judge: _Judge, start: tuple[float, Candidate], tried: dict[tuple, tuple[float, Candidate]], left: int
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


def plan_colocated(case: Case, testbed: Testbed, search: Search | None = None) -> Choice:
    """The best colocated placement of all devices: the reference that disaggregation is compared with.

    The group with the slowest network and the slowest device set the pace of training.

    Raises:
        ValueError: no replica width fits into memory.
    """
    search = search or Search()
    memory, ranks = case.memory, testbed.devices
    slowest = min(testbed.groups, key=lambda group: group.bandwidth_gib_s / group.speed)
    smallest = min(group.memory_gib for group in testbed.groups) * memory.usable
    cells = min(cells_that_fit(smallest - memory.trainer_need(ranks, 0), memory.cell_gib), case.workload.samples)
    trainer = TrainerPool(ranks=ranks, speed=min(group.speed for group in testbed.groups))
    profile = case.profile(slowest, ranks)
    found = []
    for width, batch in itertools.product(search.widths, search.rollout_batches):
        whole = all(group.count % width == 0 for group in testbed.groups)
        if cells < 1 or not whole or memory.rollout_need(width, batch) > smallest:
            continue
        replicas = replicas_of(testbed, [(group, group.count) for group in testbed.groups], width)
        pools = Pools(replicas=replicas, trainer=trainer, reward_slots=case.reward_slots, colocated=True)
        schedule = Schedule(
            max_cells=cells,
            rollout_batch=batch,
            barrier=True,
            recompute_old_log_probs=search.recompute_old_log_probs,
        )
        used = tuple((group.name, group.count) for group in testbed.groups)
        candidate = Candidate(pools, profile, schedule, used, slowest.name, width)
        found.append(Choice(candidate, _play(case, candidate, search.trial_steps)))
    if not found:
        raise ValueError(
            f"planner: {case.workload.name} does not fit colocated on {testbed.name}: {cells} cells per tile, "
            f"replica widths {search.widths}, {smallest:.1f} GiB usable per device"
        )
    return min(found, key=lambda choice: choice.simulation.makespan_s)


def _steady(result: Simulation) -> float:
    """Mean step without the first quarter: a short trial would otherwise be judged by its start-up."""
    later = result.step_s[len(result.step_s) // 4 :]
    return sum(later) / len(later)


def _play(case: Case, candidate: Candidate, steps: int) -> Simulation:
    return simulate(case.workload, candidate.pools, candidate.profile, candidate.schedule, steps=steps)
