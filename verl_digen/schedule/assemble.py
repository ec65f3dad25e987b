"""GAP: scored samples become complete groups and ready fragments.

Invariants:
- a sample counts once; duplicates, late results of an older attempt and unknown samples change nothing;
- all samples of a complete group carry one version and one attempt (I4);
- a group completes once, when its last sample of the current attempt is scored; a fragment is ready once
  all its groups are complete, because advantages need the whole group, and is handed to the Trainer once.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Iterable, Sequence

from verl_digen.schedule.work import Fragment, Uid


class Outcome(enum.Enum):
    """What became of a scored sample."""

    ACCEPTED = "accepted"
    COMPLETE = "complete"
    DUPLICATE = "duplicate"
    LATE = "late"
    UNKNOWN = "unknown"


class _Assembly:
    __slots__ = ("step", "attempt", "version", "have", "size", "complete", "taken", "fragments")

    def __init__(self, step: int, size: int) -> None:
        self.step = step
        self.size = size
        self.attempt = 0
        self.version = -1
        self.have: set[int] = set()
        self.complete = False
        self.taken = False
        self.fragments: list[Fragment] = []


NOTHING: tuple[Fragment, ...] = ()


class GroupAssembler:
    """Collects scored samples in any order until groups and fragments are complete."""

    def __init__(self) -> None:
        self._groups: dict[Uid, _Assembly] = {}
        self._missing: dict[tuple[int, int], int] = {}
        self._given: set[tuple[int, int]] = set()

    def add_step(self, fragments: Sequence[Fragment]) -> None:
        """Expect the samples of a step's fragments. ``ValueError`` when one of them is expected already."""
        sizes: dict[Uid, int] = {}
        for fragment in fragments:
            for uid, _ in fragment.samples:
                sizes[uid] = sizes.get(uid, 0) + 1
        repeated = [uid for uid in sizes if uid in self._groups]
        if repeated:
            raise ValueError(f"assembler: groups {repeated[:3]} are expected already")
        for fragment in fragments:
            uids = fragment.uids
            self._missing[fragment.step, fragment.index] = len(uids)
            for uid in uids:
                if uid not in self._groups:
                    self._groups[uid] = _Assembly(fragment.step, sizes[uid])
                self._groups[uid].fragments.append(fragment)

    def scored(
        self, uid: Uid, j: int, version: int, attempt: int = 0, reward: float = 0.0
    ) -> tuple[Outcome, tuple[Fragment, ...]]:
        """Take one scored sample in; returns what became of it and the fragments it makes ready.

        Duplicates, results of an older attempt and unknown samples change nothing.

        Raises:
            ValueError: the reward is not finite, or a group would mix versions.
        """
        group = self._groups.get(uid)
        if group is None or not 0 <= j < group.size:
            return Outcome.UNKNOWN, NOTHING
        if attempt != group.attempt:
            return Outcome.LATE, NOTHING
        if j in group.have:
            return Outcome.DUPLICATE, NOTHING
        if not math.isfinite(reward):
            raise ValueError(f"sample ({uid!r}, {j}) has reward {reward!r}; report it as failed instead")
        if group.have and group.version != version:
            raise ValueError(f"sample ({uid!r}, {j}) carries version {version}, its group version {group.version}")
        group.version = version
        group.have.add(j)
        if len(group.have) < group.size:
            return Outcome.ACCEPTED, NOTHING
        group.complete = True
        return Outcome.COMPLETE, tuple(f for f in group.fragments if self._one_less(f))

    def _one_less(self, fragment: Fragment) -> bool:
        key = fragment.step, fragment.index
        self._missing[key] -= 1
        return self._missing[key] == 0

    def missing(self, uids: Iterable[Uid]) -> dict[Uid, int]:
        """Samples that are not scored yet, of those of the groups that are incomplete."""
        groups = ((uid, self._groups[uid]) for uid in uids if uid in self._groups)
        return {uid: group.size - len(group.have) for uid, group in groups if not group.complete}

    def restart(self, uid: Uid, attempt: int) -> None:
        """Expect a group anew under the next attempt; what arrived of it before is dropped."""
        group = self._groups[uid]
        if group.complete:
            raise ValueError(f"group {uid!r} is complete and cannot restart")
        if attempt != group.attempt + 1:
            raise ValueError(f"group {uid!r}: attempt {attempt} after attempt {group.attempt}")
        group.attempt = attempt
        group.have.clear()

    def take(self, fragment: Fragment) -> tuple[tuple[Uid, int], ...]:
        """Hand a ready fragment to the Trainer; returns, as (uid, version), its groups not handed out before.

        Raises:
            ValueError: it is not ready, or was handed out before.
        """
        key = fragment.step, fragment.index
        if self._missing.get(key, 1) != 0:
            raise ValueError(f"fragment {fragment.index} of step {fragment.step} is not complete")
        if key in self._given:
            raise ValueError(f"fragment {fragment.index} of step {fragment.step} would be trained twice")
        self._given.add(key)
        first = [uid for uid in fragment.uids if not self._groups[uid].taken]
        for uid in first:
            self._groups[uid].taken = True
        return tuple((uid, self._groups[uid].version) for uid in first)

    def is_complete(self, uid: Uid) -> bool:
        """Whether all samples of a group that is expected are scored."""
        return self._groups[uid].complete

    def drop_step(self, step: int) -> None:
        """Forget a finished step. ``ValueError`` when one of its fragments was never handed out."""
        lost = [index for of, index in self._missing if of == step and (of, index) not in self._given]
        if lost:
            raise ValueError(f"step {step} ends with {len(lost)} untrained fragments, first {lost[0]}")
        self.forget_step(step)

    def forget_step(self, step: int) -> None:
        """Forget a step, whatever was handed out of it; its groups are unknown from now on."""
        for key in [key for key in self._missing if key[0] == step]:
            del self._missing[key]
            self._given.discard(key)
        self._groups = {uid: group for uid, group in self._groups.items() if group.step != step}
