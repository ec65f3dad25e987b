"""The prompt groups of a run that are not trained yet: what may be generated, and what has come back of them.

A group waits here from the moment its step is announced until it is handed to the trainer. Which fragment is generated
next, under which version, and when a group is whole is decided by :mod:`verl_digen.schedule`; this class adds the
prompts, the rewards and the checks. It knows neither Ray nor time-outs, and lives on one thread.
"""

from __future__ import annotations

import itertools
import logging
import math
import os
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from verl_digen.diffusion.noise import check_distinct
from verl_digen.rollout.requests import (
    Fragment,
    FragmentReport,
    GroupResult,
    PromptGroup,
    RolloutError,
    SampleResult,
)
from verl_digen.schedule.assemble import GroupAssembler, Outcome
from verl_digen.schedule.gap import ClaimQueue
from verl_digen.schedule.tcss import StaleLedger
from verl_digen.schedule.work import Claim
from verl_digen.schedule.work import Fragment as PlannedFragment

logger = logging.getLogger(__name__)
logger.setLevel(os.getenv("VERL_LOGGING_LEVEL", "WARN"))

_ids = itertools.count(1)


@dataclass(frozen=True)
class Order:
    """A fragment to generate now: the claim, and what the replica is told."""

    claim: Claim
    fragment: Fragment


@dataclass
class _Step:
    training_step: int
    groups: dict[str, PromptGroup]
    ids: list[int]
    failures: dict[int, list[str]] = field(default_factory=dict)
    missing: int = 0


class GroupBook:
    """Groups of training steps, or of one validation.

    Args:
        ledger: says which group may start under which version. Step k is on-policy under version k.
        same_noise: the samples of a group share their initial noise.
    """

    def __init__(self, ledger: StaleLedger, *, same_noise: bool) -> None:
        self.ledger = ledger
        self.queue = ClaimQueue(ledger)
        self.same_noise = same_noise
        self._assembler = GroupAssembler()
        self._steps: dict[int, _Step] = {}
        self._results: dict[str, dict[int, SampleResult]] = {}

    def add_step(
        self, step: int, groups: Sequence[PromptGroup], pieces: Sequence[PlannedFragment], training_step: int
    ) -> None:
        """Announce the groups of a step, cut into fragments. ``ValueError`` when they are announced already."""
        self.queue.add_step(step, pieces)
        self._assembler.add_step(pieces)
        by_uid = {group.uid: group for group in groups}
        self._steps[step] = _Step(training_step, by_uid, [next(_ids) for _ in pieces], missing=len(groups))

    @property
    def steps(self) -> list[int]:
        """Steps that are announced and not over."""
        return list(self._steps)

    def uids(self, step: int) -> list[str]:
        """Groups of an announced step in order; empty for any other."""
        return list(self._steps[step].groups) if step in self._steps else []

    def drop_step(self, step: int) -> None:
        """Forget a step whose groups were all handed on."""
        if self._steps[step].missing:
            raise ValueError(f"step {step} ends, but {self.waiting_for(step)}")
        self.queue.drop_step(step)
        self._assembler.forget_step(step)
        del self._steps[step]

    def claim(self, version: int, *, start_groups: bool = True) -> Order | None:
        """The next fragment that a holder of ``version`` may generate."""
        claim = self.queue.claim(version, start_groups=start_groups)
        if claim is None:
            return None
        step = self._steps[claim.step]
        planned = claim.fragment
        fragment = Fragment(
            fragment_id=step.ids[planned.index],
            groups={uid: step.groups[uid] for uid in planned.uids},
            samples=planned.samples,
            version=version,
            training_step=step.training_step,
            attempt=len(step.failures.get(planned.index, ())),
        )
        return Order(claim, fragment)

    def failed(self, order: Order, what: str) -> list[str]:
        """Note a failed attempt; returns all failures of the fragment. Give it back to have it generated again."""
        step = self._steps.get(order.claim.step)
        if step is None:
            return [what]
        failures = step.failures.setdefault(order.claim.fragment.index, [])
        failures.append(what)
        return failures

    def restart_orphans(self, held: Iterable[int]) -> None:
        """Groups that were begun under a version that no replica holds any more start over as a whole (I4)."""
        for uid, attempt in self.queue.restart_orphans(held).items():
            logger.warning("group %s starts over: no replica holds the version it was begun with", uid)
            self._assembler.restart(uid, attempt)
            self._results.pop(uid, None)

    def take_in(self, order: Order, report: FragmentReport, scores: list[dict[str, Any]]) -> list[GroupResult]:
        """Count the samples of a scored fragment; returns the groups that are complete now.

        Raises:
            RolloutError: a reward is missing or no finite number.
            ValueError: samples of a group share their noise, or were generated under two versions.
        """
        if len(scores) != len(report.samples):
            raise RolloutError(f"{len(scores)} rewards came back for {len(report.samples)} samples")
        complete, claim = [], order.claim
        for i, ((uid, j), score) in enumerate(zip(report.samples, scores, strict=True)):
            reward = score["reward_score"]
            if not isinstance(reward, int | float) or not math.isfinite(reward):
                raise RolloutError(f"reward of sample ({uid}, {j}) is {reward!r}; a reward must be a finite number")
            outcome, _ = self._assembler.scored(uid, j, report.version, claim.attempt, float(reward))
            if outcome not in (Outcome.ACCEPTED, Outcome.COMPLETE):
                logger.warning("sample (%s, %s) of fragment %s is %s", uid, j, report.fragment_id, outcome.value)
                continue
            self._results.setdefault(uid, {})[j] = SampleResult(
                uid=uid,
                j=j,
                reward=float(reward),
                extra=dict(score.get("reward_extra_info", {})),
                version=report.version,
                replica=report.replica,
                transitions=report.transitions[i],
                noise_hash=report.noise_hashes[i],
            )
            if outcome is Outcome.COMPLETE:
                complete.append(self._complete(self._steps[claim.step], uid))
        return complete

    def _complete(self, step: _Step, uid: str) -> GroupResult:
        group, got = step.groups[uid], self._results.pop(uid)
        hashes, samples = zip(*[(s.noise_hash, (uid, j)) for j, s in got.items()], strict=True)
        check_distinct(list(hashes), list(samples), self.same_noise)
        step.missing -= 1
        results = [got[j] for j in range(group.n)]
        return GroupResult(group, results, results[0].version, time.time())

    def missing(self, uids: Iterable[str]) -> dict[str, int]:
        """Samples that are not scored yet, of those of the groups that are incomplete."""
        return self._assembler.missing(uids)

    def waiting_for(self, step: int) -> str:
        """Samples of a step that are not there yet, in words."""
        groups = self._steps[step].groups if step in self._steps else {}
        missing = {
            u: g.n - len(self._results.get(u, {})) for u, g in groups.items() if not self._assembler.is_complete(u)
        }
        first = ", ".join(f"{u} ({n} of {groups[u].n})" for u, n in list(missing.items())[:4])
        return (
            f"{sum(missing.values())} samples of {len(missing)} groups are missing: {first}; "
            f"{self.queue.unclaimed(step)} samples queued"
        )
