"""GAP: fragments along the generation axis, and the order in which replicas and helper pull them.

Invariants:
- every sample of a step is in exactly one fragment; a fragment never crosses a logical batch;
- a sample is with one holder at a time: unclaimed, claimed, or delivered;
- all claims of a group carry one version and one attempt (I4).

How scored samples become groups and ready fragments is in ``assemble``.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence

from verl_digen.schedule.tcss import StaleLedger
from verl_digen.schedule.work import Claim, Fragment, Replica, SampleKey, Uid, Workload


def plan_fragments(
    uids: Sequence[Uid], samples_per_group: int, fragment_size: int | None, *, step: int = 0, logical_batches: int = 1
) -> tuple[Fragment, ...]:
    """Cut a step into fragments, groups one after another (uid-major).

    A size below ``samples_per_group`` cuts each group into parts whose lengths differ by at most one; a
    larger size takes as many whole groups as fit, the last fragment of a logical batch may be smaller.
    ``None`` is the one-shot path: one fragment per logical batch.

    Args:
        uids: groups of the step in order.
        fragment_size: samples per fragment.
        logical_batches: the groups are split into this many runs of equal length.

    Raises:
        ValueError: repeated uids, sizes below one, or groups that do not divide into logical batches.
    """
    if len(set(uids)) != len(uids):
        raise ValueError(f"fragment plan: {len(uids)} uids of which {len(uids) - len(set(uids))} are repeated")
    if samples_per_group < 1 or (fragment_size is not None and fragment_size < 1):
        raise ValueError(f"fragment plan: samples_per_group={samples_per_group}, fragment_size={fragment_size}")
    if not uids or logical_batches < 1 or len(uids) % logical_batches:
        raise ValueError(f"fragment plan: {len(uids)} groups do not divide into {logical_batches} logical batches")
    per_batch = len(uids) // logical_batches
    size = per_batch * samples_per_group if fragment_size is None else fragment_size
    fragments: list[Fragment] = []
    for batch in range(logical_batches):
        members = uids[batch * per_batch : (batch + 1) * per_batch]
        for keys in _cut(members, samples_per_group, size):
            fragments.append(Fragment(len(fragments), step, batch, keys))
    return tuple(fragments)


def _cut(uids: Sequence[Uid], n: int, size: int) -> list[tuple[SampleKey, ...]]:
    if size >= n:
        whole = size // n
        return [
            tuple((uid, j) for uid in uids[first : first + whole] for j in range(n))
            for first in range(0, len(uids), whole)
        ]
    parts = -(-n // size)
    edges = [part * n // parts for part in range(parts + 1)]
    return [tuple((uid, j) for j in range(edges[part], edges[part + 1])) for uid in uids for part in range(parts)]


def plan_step(workload: Workload, step: int, fragment_size: int | None) -> tuple[Fragment, ...]:
    """Fragments of a step whose uids are consecutive integers; what simulator and planner use."""
    first = step * workload.groups
    return plan_fragments(
        range(first, first + workload.groups),
        workload.samples_per_group,
        fragment_size,
        step=step,
        logical_batches=workload.logical_batches,
    )


def pull_size(unclaimed: int, speed: float, pool_speed: float, batch: int) -> int:
    """How many samples a replica should pull at once.

    A full batch while there is plenty; near the end no more than the replica's share by speed, so that
    the last samples spread over all replicas and a slow one takes less.

    Args:
        unclaimed: samples that may be claimed now.
        speed, pool_speed: of this replica and of all replicas together.
        batch: largest batch of a replica.
    """
    share = math.ceil(unclaimed * speed / pool_speed)
    return max(1, min(batch, share, unclaimed)) if unclaimed else 0


def share_by_speed(samples: int, replicas: Sequence[Replica]) -> tuple[int, ...]:
    """Split samples over unlike replicas so that the slowest finishes as early as whole samples allow.

    The forecast of what pulling will do; used for planning, memory and for engines that cannot pull.
    """
    counts = [0] * len(replicas)
    for _ in range(samples):
        winner = min(range(len(replicas)), key=lambda i: ((counts[i] + 1) / replicas[i].speed, i))
        counts[winner] += 1
    return tuple(counts)


class _Group:
    __slots__ = ("uid", "step", "order", "size", "version", "attempt", "waiting")

    def __init__(self, uid: Uid, step: int, order: int, size: int) -> None:
        self.uid = uid
        self.step = step
        self.order = order
        self.size = size
        self.version = -1
        self.attempt = 0
        self.waiting: list[tuple[int, int]] = [(j, 0) for j in range(size - 1, -1, -1)]


class ClaimQueue:
    """What replicas and the helper pull from.

    Replicas pull from the head, groups in order, so that groups finish early; the helper may pull from the
    tail, where its partial work is needed last. The ledger decides which group may start under which version.
    """

    def __init__(self, ledger: StaleLedger) -> None:
        self.ledger = ledger
        self._steps: dict[int, deque[_Group]] = {}
        self._left: dict[int, int] = {}
        self._begun: dict[int, int] = {}
        self._groups: dict[Uid, _Group] = {}
        self._size = 0

    def add_step(self, step: int, uids: Sequence[Uid], samples_per_group: int) -> None:
        """Queue the groups of a step. ``ValueError`` when a uid is queued already."""
        known = [uid for uid in uids if uid in self._groups]
        if known or step in self._steps:
            raise ValueError(f"claim queue: step {step} or its groups {known[:3]} are queued already")
        groups = [_Group(uid, step, order, samples_per_group) for order, uid in enumerate(uids)]
        self._steps[step] = deque(groups)
        self._groups.update((group.uid, group) for group in groups)
        self._left[step] = len(uids) * samples_per_group
        self._begun[step] = 0
        self._size = samples_per_group

    def drop_step(self, step: int) -> None:
        """Forget a finished step. ``ValueError`` while samples of it are unclaimed."""
        if self._left[step]:
            raise ValueError(f"claim queue: step {step} is dropped with {self._left[step]} unclaimed samples")
        del self._steps[step], self._left[step], self._begun[step]
        self._groups = {uid: group for uid, group in self._groups.items() if group.step != step}

    def unclaimed(self, step: int) -> int:
        """Samples of ``step`` nobody has claimed, partial ones included; 0 for a step that is not queued."""
        return self._left.get(step, 0)

    def available(self, version: int, *, ahead: bool = True) -> int:
        """Samples that holders of ``version`` may claim by now: of its own step and, ``ahead``, the stale allowance.

        The step ahead opens only when nothing of the own step waits for holders of another version.
        """
        left = self._left.get(version, 0)
        own = sum(len(g.waiting) for g in self._steps.get(version, ()) if g.version in (-1, version))
        later = self._left.get(version + 1, 0)
        if not (ahead and later and own == left):
            return own
        started = sum(len(g.waiting) for g in self._steps[version + 1] if g.version == version)
        return own + min(later, started + self.ledger.stale_left(version + 1) * self._size)

    def claim(
        self, version: int, limit: int, *, tail: bool = False, start_groups: bool = True, ahead: bool = True
    ) -> list[Claim]:
        """Take up to ``limit`` samples for a holder of ``version``; an empty list when nothing fits.

        Args:
            tail: take groups of step ``version`` from the end (helper); stale groups always come from the front.
            start_groups: whether groups that nobody has begun may be started.
            ahead: whether groups of the step after ``version`` may be taken.
        """
        claims: list[Claim] = []
        for step, groups in self._steps.items():
            if step > version and not ahead:
                break
            backwards = tail and step == version
            before = len(claims)
            while groups and len(claims) < limit:
                index = len(groups) - 1 if backwards else 0
                if not self._usable(groups[index], version, start_groups):
                    if not self._begun[step] and groups[index].version < 0:
                        break
                    found = self._search(groups, version, start_groups, backwards)
                    if found is None:
                        break
                    index = found
                group = groups[index]
                begun = group.version >= 0
                self._take(group, version, limit, claims)
                if not group.waiting:
                    del groups[index]
                    if begun:
                        self._begun[step] -= 1
                elif not begun:
                    self._begun[step] += 1
            self._left[step] -= len(claims) - before
            if not groups and len(claims) > before:
                self.ledger.all_claimed(step)
            if len(claims) >= limit:
                break
        return claims

    def _usable(self, group: _Group, version: int, start_groups: bool) -> bool:
        if group.version >= 0:
            return group.version == version
        return start_groups and self.ledger.may_start(group.step, version)

    def _search(self, groups: deque[_Group], version: int, start_groups: bool, backwards: bool) -> int | None:
        order = range(len(groups) - 1, -1, -1) if backwards else range(len(groups))
        for index in order:
            if self._usable(groups[index], version, start_groups):
                return index
        return None

    def _take(self, group: _Group, version: int, limit: int, claims: list[Claim]) -> None:
        if group.version < 0:
            self.ledger.start(group.uid, group.step, version)
            group.version = version
        waiting = group.waiting
        while waiting and len(claims) < limit:
            j, done = waiting.pop()
            claims.append(Claim(group.uid, j, group.step, version, group.attempt, done))

    def give_back(self, claim: Claim, steps_done: int) -> bool:
        """Return a claim that was not finished, with the denoising steps now behind it (0 = start over).

        Whoever takes it next must hold the version of the claim. Returns ``False`` for a claim of an older
        attempt, which is simply dropped.
        """
        group = self._groups.get(claim.uid)
        if group is None or group.attempt != claim.attempt:
            return False
        if not group.waiting:
            self._insert(group)
            self._begun[group.step] += 1
        group.waiting.append((claim.j, steps_done))
        self._left[group.step] += 1
        return True

    def restart(self, uid: Uid) -> int:
        """Start a group over as a whole, under any allowed version; returns its new attempt number."""
        group = self._groups[uid]
        if group.version >= 0:
            self.ledger.restart(uid)
        if not group.waiting:
            self._insert(group)
        elif group.version >= 0:
            self._begun[group.step] -= 1
        self._left[group.step] += group.size - len(group.waiting)
        group.version = -1
        group.attempt += 1
        group.waiting = [(j, 0) for j in range(group.size - 1, -1, -1)]
        return group.attempt

    def _insert(self, group: _Group) -> None:
        groups = self._steps[group.step]
        self.ledger.reopen(group.step)
        index = 0
        while index < len(groups) and groups[index].order < group.order:
            index += 1
        groups.insert(index, group)

    def orphans(self, held: set[int]) -> list[Uid]:
        """Begun groups with unclaimed samples whose version nobody holds any more; they must restart."""
        return [
            group.uid
            for groups in self._steps.values()
            for group in groups
            if group.version >= 0 and group.version not in held
        ]

    def groups_waiting(self, step: int) -> list[tuple[Uid, int, int]]:
        """Groups of a step with unclaimed samples: (uid, version or −1, unclaimed samples), in pull order."""
        return [(group.uid, group.version, len(group.waiting)) for group in self._steps.get(step, ())]
