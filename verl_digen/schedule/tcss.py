"""TCSS: the ledger that says which group may start under which version.

Invariants, refused with :class:`StalenessError` wherever they would break (contract I4 and I5):
- the groups of step k carry version k, or version k−1 when TCSS is on; nothing else;
- a step has at most ⌊ρ·P⌋ groups of version k−1;
- a group has one version from its first sample to its last; a restart gives it a new one as a whole;
- versions are counted by publishes, one per step, in order;
- a group is trained once, in its own step, before that step's publish.

The *version* is the number of publishes, so step k is on-policy under version k.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from verl_digen.schedule.work import Uid


class StalenessError(RuntimeError):
    """A group would start, or be trained, under a version that the bound does not allow."""


@dataclass(slots=True)
class _Entry:
    step: int
    version: int
    consumed: bool = False


class StaleLedger:
    """Counts versions of groups; one instance per run.

    Args:
        groups_per_step: P.
        max_stale_ratio: ρ, 0 (off, strictly on-policy) to 1.
        published: versions published so far; the steps before that one are over.
    """

    def __init__(self, groups_per_step: int, max_stale_ratio: float = 0.0, published: int = 0) -> None:
        if groups_per_step < 1:
            raise ValueError(f"ledger: groups_per_step={groups_per_step} must be at least 1")
        if not 0.0 <= max_stale_ratio <= 1.0:
            raise ValueError(f"ledger: max_stale_ratio={max_stale_ratio} must lie between 0 and 1")
        self.groups_per_step = groups_per_step
        self.max_stale_ratio = max_stale_ratio
        self.published = published
        self._groups: dict[Uid, _Entry] = {}
        self._stale: dict[int, int] = {}
        self._closed: set[int] = set()

    @property
    def stale_limit(self) -> int:
        """⌊ρ·P⌋, with a guard against the rounding of ρ."""
        return math.floor(self.max_stale_ratio * self.groups_per_step + 1e-9)

    def stale_left(self, step: int) -> int:
        """Groups of ``step`` that may still start one version behind."""
        return self.stale_limit - self._stale.get(step, 0)

    def may_start(self, step: int, version: int, groups: int = 1) -> bool:
        """Whether ``groups`` groups of ``step`` may start under ``version`` now.

        Stale groups are allowed only once every group of the step before is claimed
        (:meth:`all_claimed`), so that a step is never slowed down by the next one.
        """
        if step < self.published:
            return False
        if version == step:
            return True
        return version == step - 1 and step - 1 in self._closed and self.stale_left(step) >= groups

    def start(self, uid: Uid, step: int, version: int) -> None:
        """Record that denoising of a group begins.

        Raises:
            StalenessError: the group is known already, or :meth:`may_start` says no.
        """
        if uid in self._groups:
            raise StalenessError(f"group {uid!r} started twice (first under version {self._groups[uid].version})")
        if not self.may_start(step, version):
            raise StalenessError(
                f"group {uid!r} of step {step} may not start under version {version}: published {self.published}, "
                f"stale groups {self._stale.get(step, 0)} of {self.stale_limit}, "
                f"step {step - 1} {'is' if step - 1 in self._closed else 'is not'} fully claimed"
            )
        self._groups[uid] = _Entry(step, version)
        if version < step:
            self._stale[step] = self._stale.get(step, 0) + 1

    def restart(self, uid: Uid) -> None:
        """Forget a group that was given up before it was trained; it may start again under another version."""
        entry = self._entry(uid)
        if entry.consumed:
            raise StalenessError(f"group {uid!r} was trained in step {entry.step} and cannot restart")
        del self._groups[uid]
        if entry.version < entry.step:
            self._stale[entry.step] -= 1

    def all_claimed(self, step: int) -> None:
        """Note that the last fragment of ``step`` was claimed."""
        self._closed.add(step)

    def reopen(self, step: int) -> None:
        """Note that work of ``step`` came back (a failed replica); no further stale group until it is claimed again."""
        self._closed.discard(step)

    def consume(self, uid: Uid, step: int, version: int) -> int:
        """Check a group when it is trained, against the version its samples carry; returns its staleness, 0 or 1.

        Raises:
            StalenessError: unknown group, wrong step, mixed versions, trained before, or staler than allowed.
        """
        entry = self._entry(uid)
        if entry.consumed:
            raise StalenessError(f"group {uid!r} would be trained twice in step {step}")
        if entry.step != step or entry.version != version:
            raise StalenessError(
                f"group {uid!r} started for step {entry.step} under version {entry.version}, "
                f"but is trained in step {step} with samples of version {version}"
            )
        if step != self.published:
            raise StalenessError(
                f"group {uid!r} of step {step} would be trained while {self.published} versions are published"
            )
        entry.consumed = True
        return step - version

    def publish(self, version: int) -> None:
        """Note a publish and drop what belongs to finished steps.

        Raises:
            StalenessError: not the next version, or a group of the finished step was started but never trained.
        """
        if version != self.published + 1:
            raise StalenessError(f"publish of version {version} after version {self.published}")
        finished = version - 1
        missing = [uid for uid, entry in self._groups.items() if entry.step == finished and not entry.consumed]
        if missing:
            raise StalenessError(f"step {finished} is published but {len(missing)} of its groups were never trained")
        self.published = version
        self._groups = {uid: entry for uid, entry in self._groups.items() if entry.step >= version}
        self._stale = {step: count for step, count in self._stale.items() if step >= version}
        self._closed = {step for step in self._closed if step >= version}

    def stale_groups(self, step: int) -> int:
        """Groups of ``step`` started one version behind."""
        return self._stale.get(step, 0)

    def _entry(self, uid: Uid) -> _Entry:
        entry = self._groups.get(uid)
        if entry is None:
            raise StalenessError(f"group {uid!r} was never started, or its step is over")
        return entry
