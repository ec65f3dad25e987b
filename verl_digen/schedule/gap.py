"""GAP: fragments along the generation axis, and the order in which replicas and helper pull them.

Invariants:
- every sample of a step is in exactly one fragment; a fragment never crosses a logical batch;
- fragments are cut in advance and claimed whole, so what is denoised together never depends on timing (I1, I9);
- a fragment is with one holder at a time: unclaimed, claimed, or delivered;
- all claims of a group carry one version and one attempt (I4).

How scored samples become groups and ready fragments is in ``assemble``.
"""

from __future__ import annotations

import bisect
import heapq
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice

from verl_digen.schedule.tcss import StaleLedger
from verl_digen.schedule.work import Claim, Fragment, SampleKey, Uid, Workload


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


class _Piece:
    """A planned fragment and where it is."""

    __slots__ = ("fragment", "uids", "held", "steps_done")

    def __init__(self, fragment: Fragment) -> None:
        self.fragment = fragment
        self.uids = fragment.uids
        self.held: Claim | None = None
        self.steps_done = 0

    @property
    def index(self) -> int:
        return self.fragment.index


class _Group:
    __slots__ = ("step", "version", "attempt", "pieces")

    def __init__(self, step: int) -> None:
        self.step = step
        self.version = -1
        self.attempt = 0
        self.pieces: list[_Piece] = []


class _Step:
    """Unclaimed fragments of a step, in pull order: of groups that nobody has begun, and by version of the begun."""

    __slots__ = ("pieces", "fresh", "begun", "left")

    def __init__(self, fragments: Sequence[Fragment]) -> None:
        self.pieces = [_Piece(fragment) for fragment in fragments]
        self.fresh = deque(self.pieces)
        self.begun: dict[int, list[_Piece]] = {}
        self.left = sum(len(fragment.samples) for fragment in fragments)

    def put(self, piece: _Piece, version: int) -> None:
        """Insert in pull order; ``version`` −1 for a piece of groups that nobody has begun."""
        if version >= 0:
            bisect.insort(self.begun.setdefault(version, []), piece, key=_index)
        else:
            bisect.insort(self.fresh, piece, key=_index)

    def next(self, version: int, start: bool, backwards: bool) -> _Piece | None:
        """The first (or last) piece that a holder of ``version`` may take."""
        end = -1 if backwards else 0
        choice = [line[end] for line in (self.begun.get(version), self.fresh if start else None) if line]
        return (max if backwards else min)(choice, key=_index, default=None)

    def take(self, piece: _Piece, version: int) -> None:
        for line in (self.begun.get(version), self.fresh):
            if line and piece in (line[0], line[-1]):
                line.remove(piece) if line[0] is piece else line.pop()
                break
        self.left -= len(piece.fragment.samples)


def _index(piece: _Piece) -> int:
    return piece.index


class ClaimQueue:
    """What replicas and the helper pull planned fragments from.

    Replicas pull from the head, groups in order, so that groups finish early; the helper may pull from the
    tail, where its partial work is needed last. The ledger decides which group may start under which version.
    A claim costs the same however many fragments wait.
    """

    def __init__(self, ledger: StaleLedger) -> None:
        self.ledger = ledger
        self._steps: dict[int, _Step] = {}
        self._groups: dict[Uid, _Group] = {}

    def add_step(self, step: int, fragments: Sequence[Fragment]) -> None:
        """Queue the fragments of a step. ``ValueError`` when the step or one of its groups is queued already."""
        known = {uid for fragment in fragments for uid in fragment.uids if uid in self._groups}
        if known or step in self._steps:
            raise ValueError(f"claim queue: step {step} or its groups {sorted(map(str, known))[:3]} are queued already")
        queued = self._steps[step] = _Step(fragments)
        for piece in queued.pieces:
            for uid in piece.uids:
                self._groups.setdefault(uid, _Group(step)).pieces.append(piece)

    def drop_step(self, step: int) -> None:
        """Forget a finished step. ``ValueError`` while samples of it are unclaimed."""
        if self._steps[step].left:
            raise ValueError(f"claim queue: step {step} is dropped with {self._steps[step].left} unclaimed samples")
        for piece in self._steps.pop(step).pieces:
            for uid in piece.uids:
                self._groups.pop(uid, None)

    def unclaimed(self, step: int) -> int:
        """Samples of ``step`` nobody has claimed, partial ones included; 0 for a step that is not queued."""
        return self._steps[step].left if step in self._steps else 0

    def available(self, version: int, *, ahead: bool = True) -> int:
        """Fragments that holders of ``version`` may claim by now: of its own step and, ``ahead``, the stale allowance.

        The step ahead opens only when nothing of the own step waits for holders of another version.
        """
        return sum(stop for _, stop in self._open(version, ahead))

    def available_samples(self, version: int, *, ahead: bool = True) -> int:
        """Samples of the fragments that :meth:`available` counts."""
        lines = self._open(version, ahead)
        return sum(len(piece.fragment.samples) for line, stop in lines for piece in islice(line, stop))

    def upcoming(self, version: int) -> Iterator[tuple[SampleKey, ...]]:
        """Samples of the fragments of step ``version`` that its holders will claim, in pull order, without claiming."""
        own = self._steps.get(version)
        lines = () if own is None else (own.fresh, own.begun.get(version, ()))
        return (piece.fragment.samples for piece in heapq.merge(*lines, key=_index))

    def _open(self, version: int, ahead: bool) -> list[tuple[Sequence[_Piece], int]]:
        """Lines of waiting fragments, and how many of each a holder of ``version`` may claim."""
        own, later = self._steps.get(version), self._steps.get(version + 1)
        lines: list[tuple[Sequence[_Piece], int]] = []
        if own is not None:
            lines = [(line, len(line)) for line in (own.fresh, own.begun.get(version, ()))]
            ahead = ahead and not any(line for other, line in own.begun.items() if other != version)
        if ahead and later is not None:
            begun = later.begun.get(version, ())
            lines.append((begun, len(begun)))
            if later.fresh:
                uids = later.fresh[0].uids
                startable = self.ledger.stale_left(version + 1) // len(uids) * len(self._groups[uids[0]].pieces)
                lines.append((later.fresh, min(len(later.fresh), startable)))
        return lines

    def claim(self, version: int, *, tail: bool = False, start_groups: bool = True, ahead: bool = True) -> Claim | None:
        """The next fragment for a holder of ``version``; ``None`` when nothing fits.

        Args:
            tail: take fragments of step ``version`` from the end (helper); stale groups always come from the front.
            start_groups: whether groups that nobody has begun may be started.
            ahead: whether groups of the step after ``version`` may be taken.
        """
        for step in (version, version + 1) if ahead else (version,):
            queued = self._steps.get(step)
            if queued is None or not queued.left:
                continue
            backwards = tail and step == version
            first = queued.fresh[-1 if backwards else 0] if queued.fresh and start_groups else None
            start = first is not None and self.ledger.may_start(step, version, len(first.uids))
            piece = queued.next(version, start, backwards)
            if piece is not None:
                return self._hand_out(queued, step, piece, version)
        return None

    def _hand_out(self, queued: _Step, step: int, piece: _Piece, version: int) -> Claim:
        queued.take(piece, version)
        for uid in piece.uids:
            if self._groups[uid].version < 0:
                self.ledger.start(uid, step, version)
                self._groups[uid].version = version
                self._move_siblings(queued, uid, version)
        attempt = self._groups[piece.uids[0]].attempt
        piece.held = Claim(piece.fragment, version, attempt, piece.steps_done)
        if not queued.left:
            self.ledger.all_claimed(step)
        return piece.held

    def _move_siblings(self, queued: _Step, uid: Uid, version: int) -> None:
        """The other fragments of a group that begins; they stand beside the one that was taken, at an end."""
        for end, pop in ((0, queued.fresh.popleft), (-1, queued.fresh.pop)):
            while queued.fresh and uid in queued.fresh[end].uids:
                queued.put(pop(), version)

    def give_back(self, claim: Claim, steps_done: int = 0) -> bool:
        """Return a claim that was not finished, with the denoising steps now behind it (0 = start over).

        Whoever takes it next must hold the version of the claim. Returns ``False`` for a claim of an older
        attempt: its fragment starts over with its group.
        """
        return self._return(claim, steps_done, finished=False)

    def finished(self, claim: Claim) -> bool:
        """Note that a claim was generated. ``False`` for one of an older attempt, whose fragment waits again."""
        return self._return(claim, 0, finished=True)

    def _return(self, claim: Claim, steps_done: int, finished: bool) -> bool:
        queued = self._steps.get(claim.fragment.step)
        piece = queued.pieces[claim.fragment.index] if queued is not None else None
        held = piece.held if piece is not None else None
        if held is None or (held.version, held.attempt) != (claim.version, claim.attempt):
            return False
        piece.held = None
        group = self._groups[piece.uids[0]]
        current = group.attempt == claim.attempt
        if current and finished:
            return True
        piece.steps_done = steps_done if current else 0
        self._wait_again(queued, piece, group.version)
        return current

    def _wait_again(self, queued: _Step, piece: _Piece, version: int) -> None:
        queued.put(piece, version)
        queued.left += len(piece.fragment.samples)
        self.ledger.reopen(piece.fragment.step)

    def restart_orphans(self, held: Iterable[int]) -> dict[Uid, int]:
        """Start over the begun groups with unclaimed samples whose version nobody holds any more.

        Returns:
            the new attempt of each such group; results of older attempts are late.
        """
        held, restarted = set(held), {}
        for queued in self._steps.values():
            for version in [version for version in queued.begun if version not in held]:
                while line := queued.begun[version]:
                    restarted |= self.restart(line[0].uids[0])
        return restarted

    def restart(self, uid: Uid) -> dict[Uid, int]:
        """Start a group over as a whole, with the groups it shares fragments with, under any allowed version.

        A fragment of it that is claimed waits until its holder returns it: two holders never write the same sample.

        Returns:
            the new attempt of each group.
        """
        uids, found = [], [uid]
        while found:
            uids.append(found.pop())
            shared = {other for piece in self._groups[uids[-1]].pieces for other in piece.uids}
            found += sorted(shared - {*uids, *found}, key=str)
        queued = self._steps[self._groups[uid].step]
        pieces = {piece.index: piece for other in uids for piece in self._groups[other].pieces}
        waiting = {piece.index for line in (queued.fresh, *queued.begun.values()) for piece in line}
        for other in uids:
            group = self._groups[other]
            if group.version >= 0:
                self.ledger.restart(other)
            group.version = -1
            group.attempt += 1
        for index, piece in sorted(pieces.items()):
            piece.steps_done = 0
            if index in waiting:
                self._leave_line(queued, piece)
                queued.put(piece, -1)
            elif piece.held is None:
                self._wait_again(queued, piece, -1)
        return {other: self._groups[other].attempt for other in uids}

    def _leave_line(self, queued: _Step, piece: _Piece) -> None:
        for line in (queued.fresh, *queued.begun.values()):
            if piece in line:
                line.remove(piece)

    def groups_waiting(self, step: int) -> list[tuple[Uid, int, int]]:
        """Groups of a step with unclaimed samples: (uid, version or −1, unclaimed samples), in pull order."""
        waiting: dict[Uid, int] = {}
        queued = self._steps.get(step)
        if queued is None:
            return []
        lines = sorted((piece for line in (queued.fresh, *queued.begun.values()) for piece in line), key=_index)
        for piece in lines:
            for uid, _ in piece.fragment.samples:
                waiting[uid] = waiting.get(uid, 0) + 1
        return [(uid, self._groups[uid].version, count) for uid, count in waiting.items()]
