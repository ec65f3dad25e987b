"""Candidates of the planner: placements and schedules that fit into memory, and how they are varied and ranked."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from verl_digen.planner.catalog import Case, DeviceGroup, Testbed
from verl_digen.schedule.merge import groups_of_a_round
from verl_digen.schedule.profile import Profile
from verl_digen.schedule.tsp import cells_that_fit
from verl_digen.schedule.work import Pools, Replica, Schedule, TrainerPool

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
        placement: ``disaggregated``, or one of ``shared``: ``colocated``, ``zero-copy``, ``lending``.
    """

    pools: Pools
    profile: Profile
    schedule: Schedule
    generator: tuple[tuple[str, int], ...]
    trainer_group: str
    width: int
    estimate_s: float = 0.0
    placement: str = "disaggregated"

    @property
    def key(self) -> tuple:
        """What identifies it within one plan."""
        return self.generator, self.trainer_group, self.width, self.schedule


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
class Space:
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
        """Tile sizes that fit: a few cells, or what some groups give a rank. The Trainer takes group by group (as many
        at once as fill its tiles, ``schedule.merge``), or the whole step without GAP."""
        memory, work = self.case.memory, self.case.workload
        free = group.memory_gib * memory.usable - memory.trainer_need(ranks, 0)
        fit = cells_that_fit(free, memory.cell_gib)
        per_batch = work.groups // work.logical_batches
        groups = [size for size in range(1, per_batch + 1) if size == per_batch or size & (size - 1) == 0]
        tiles = {min(fit, -(-count * work.samples_per_group * work.trained_transitions // ranks)) for count in groups}
        tiles = {size for size in (*tiles, 1, 2, 4, 8) if 1 <= size <= fit}
        if not self.search.tsp:
            tiles = {min(fit, work.samples)}
        for cells in sorted(tiles):
            if cells >= 1:
                yield Schedule(
                    fragment_size=work.samples_per_group if self.search.gap else None,
                    max_cells=cells,
                    tsp=self.search.tsp,
                    rollout_batch=batch,
                    barrier=not self.search.gap,
                    recompute_old_log_probs=self.search.recompute_old_log_probs,
                )

    def variations(self, here: Candidate) -> list[Candidate]:
        """Candidates that differ in one respect, the best by estimate first.

        Another split, replica width or rollout batch takes the tile with the best estimate; otherwise the placement
        stays and the tile goes to its next size. Splits that were left out of the enumeration because there are too
        many are reached here.
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
        ]
        return sorted(fitting, key=lambda c: estimate(self.case, c.pools, c.profile, c.schedule))[:1]

    def _other_schedules(self, here: Candidate) -> Iterator[Candidate]:
        group = next(group for group in self.testbed.groups if group.name == here.trainer_group)
        like = here.schedule
        known = list(self.schedules(group, here.pools.trainer.ranks, like.rollout_batch))
        tiles = _next_to([schedule.max_cells for schedule in known], like.max_cells)
        for other in known:
            if other.max_cells in tiles:
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
    full = groups_of_a_round(fragment, work.trained_transitions, pools.trainer.ranks, schedule.max_cells, schedule.tsp)
    merged = min(full, max(1, count // (2 if schedule.max_stale_ratio else 4)))
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
        helper_one = work.denoise_steps * profile.helper_step_s() + profile.decode_s
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
