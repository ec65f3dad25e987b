"""One training step: prompt groups in, transactions out.

Invariants
- Which groups belong to a logical batch is fixed before any of them is generated; logical batches commit in order.
- A group enters the open transaction only when it is complete and scored; each sample exactly once (I3).
- One-shot waits for the whole step first; with GAP a group is accumulated as soon as it is there. Both pass the same
  cells with the same advantages and the same denominator, so they give the same gradient (I2).
- A failed step leaves no open transaction.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import ray
import torch
from verl.utils.debug import marked_timer

from verl_digen.config.plan import RunPlan
from verl_digen.diffusion.advantages import group_advantages
from verl_digen.engine.tiles import count_tiles
from verl_digen.rollout.manager import DiffusionRolloutManager, GroupResult
from verl_digen.rollout.requests import PromptGroup, SampleResult
from verl_digen.trainer.worker import TrainFragment

Sample = tuple[str, int]


class StepError(RuntimeError):
    """A training step could not be completed."""


@dataclass
class StepOutcome:
    """What a step leaves behind for metrics and dumps."""

    groups: list[GroupResult] = field(default_factory=list)
    advantages: dict[Sample, float] = field(default_factory=dict)
    commits: list[dict[str, float]] = field(default_factory=list)
    advantage_metrics: dict[str, float] = field(default_factory=dict)
    phases: dict[str, float] = field(default_factory=dict)

    @property
    def samples(self) -> list[SampleResult]:
        return [sample for group in self.groups for sample in group.samples]


def split_samples(samples: Sequence[Sample], ranks: int, offset: int = 0) -> tuple[tuple[Sample, ...], ...]:
    """Share samples over ranks in contiguous pieces whose sizes differ by at most one; none twice, none lost.

    Args:
        offset: which rank gets the first of the larger pieces, so that many small fragments balance out.
    """
    base, extra = divmod(len(samples), ranks)
    larger = {(offset + i) % ranks for i in range(extra)}
    shares, start = [], 0
    for rank in range(ranks):
        size = base + (rank in larger)
        shares.append(tuple(samples[start : start + size]))
        start += size
    return tuple(shares)


class TrainingStep:
    """Runs steps of a plan on the training worker group.

    Args:
        plan: sizes and options.
        actor_wg: the training worker group.
        manager: the rollout manager.
    """

    def __init__(self, plan: RunPlan, actor_wg, manager: DiffusionRolloutManager):
        self.plan, self.actor_wg, self.manager = plan, actor_wg, manager
        self._timeout = plan.digen.failure.train_timeout_s

    def run(
        self,
        groups: Sequence[PromptGroup],
        *,
        version: int,
        training_step: int,
        timing_raw: dict[str, float],
        keep_pixels: set[Sample] = frozenset(),
    ) -> StepOutcome:
        """Generate, score and train one step.

        Raises:
            RolloutError, TimeoutError: generation or scoring failed for good.
            StepError: training did not finish in time.
        """
        plan = self.plan
        outcome = StepOutcome()
        size = plan.prompts_per_batch
        batches = [groups[i : i + size] for i in range(0, len(groups), size)]
        self.manager.generate_sequences(
            list(groups), version=version, training_step=training_step, keep_pixels=keep_pixels
        )
        try:
            if plan.one_shot:
                self._one_shot(batches, outcome, timing_raw)
            else:
                self._streaming(batches, outcome, timing_raw)
        except BaseException:
            ray.wait(self.actor_wg.abort(), num_returns=plan.trainer_ranks, timeout=5.0)
            raise
        order = {group.uid: i for i, group in enumerate(groups)}
        outcome.groups.sort(key=lambda result: order[result.group.uid])
        if not plan.one_shot:
            self._advantages(outcome.groups, outcome)  # the metrics of the whole step; the values stay what they are
        return outcome

    # ---- the two orders of work ----------------------------------------------------------------------------

    def _one_shot(self, batches, outcome: StepOutcome, timing_raw) -> None:
        """Everything is generated and scored; then each logical batch is one fragment."""
        results: dict[str, GroupResult] = {}
        with marked_timer("gen", timing_raw):
            for _ in range(sum(len(batch) for batch in batches)):
                result = self._next_group()
                results[result.group.uid] = result
        outcome.groups = list(results.values())
        everything = [results[group.uid] for batch in batches for group in batch]
        advantages = self._advantages(everything, outcome)
        with marked_timer("update_actor", timing_raw):
            for _ in range(self.plan.epochs):
                for batch in batches:
                    self._begin()
                    samples = [sample for group in batch for sample in group.samples]
                    self._get([*self._accumulate(samples, advantages, last=True)], "training a logical batch", outcome)
                    self._commit(outcome)

    def _streaming(self, batches, outcome: StepOutcome, timing_raw) -> None:
        """Groups are accumulated in the order in which they are completed; a later logical batch waits its turn."""
        waiting: dict[str, GroupResult] = {}
        for batch in batches:
            missing = {group.uid for group in batch}
            self._begin()
            refs: list = []
            while missing:
                uid = next((uid for uid in missing if uid in waiting), None)
                if uid is None:
                    with marked_timer("gen", timing_raw):
                        result = self._next_group()
                    waiting[result.group.uid] = result
                    continue
                result = waiting.pop(uid)
                missing.discard(uid)
                outcome.groups.append(result)
                advantages = self._advantages([result], outcome)
                refs += self._accumulate(result.group.samples, advantages, last=not missing, offset=len(outcome.groups))
            with marked_timer("update_actor", timing_raw):
                self._get(refs, "training the fragments of a logical batch", outcome)
                self._commit(outcome)
        for _ in range(1, self.plan.epochs):
            for batch in batches:
                with marked_timer("update_actor", timing_raw):
                    self._begin()
                    samples = [sample for group in batch for sample in group.samples]
                    self._get(self._accumulate(samples, outcome.advantages, last=True), "training an epoch", outcome)
                    self._commit(outcome)

    # ---- pieces --------------------------------------------------------------------------------------------

    def _next_group(self) -> GroupResult:
        failure = self.plan.digen.failure
        # one deadline per attempt for generating and for scoring, and one more for what waits in a replica's queue
        attempts = failure.max_retries + 1
        return self.manager.next_group(2 * attempts * (failure.generate_timeout_s + failure.reward_timeout_s))

    def _advantages(self, results: Sequence[GroupResult], outcome: StepOutcome) -> dict[Sample, float]:
        samples = [s for result in results for s in result.samples]
        dtype = getattr(torch, self.plan.digen.arithmetic)
        values, outcome.advantage_metrics = group_advantages(
            torch.tensor([s.reward for s in samples], dtype=dtype),
            [s.uid for s in samples],
            norm=self.plan.digen.algorithm.norm,
        )
        advantages = {(s.uid, s.j): float(a) for s, a in zip(samples, values.tolist(), strict=True)}
        outcome.advantages |= advantages
        return advantages

    def _begin(self) -> None:
        self._get(self.actor_wg.begin(self.plan.cells_per_batch, self.plan.on_policy), "opening a transaction")

    def _accumulate(self, samples, advantages, *, last: bool, offset: int = 0) -> list:
        plan = self.plan
        shares = split_samples(samples, plan.trainer_ranks, offset)
        tsp = plan.digen.tsp
        tiles = max(
            count_tiles([plan.transitions] * len(share), max_cells=tsp.max_cells, tsp=tsp.enable) for share in shares
        )
        fragment = TrainFragment(
            shares=shares,
            advantages={sample: advantages[sample] for sample in samples},
            num_tiles=tiles,
            last=last,
        )
        return self.actor_wg.accumulate(fragment)

    def _commit(self, outcome: StepOutcome) -> None:
        outcome.commits.append(self._get(self.actor_wg.commit(), "committing a logical batch")[0])

    def _get(self, refs: list, doing: str, outcome: StepOutcome | None = None) -> list[Any]:
        started = time.perf_counter()
        try:
            results = ray.get(refs, timeout=self._timeout)
        except ray.exceptions.GetTimeoutError as error:
            raise StepError(
                f"{doing} was not done within trainer.v1.digen.failure.train_timeout_s={self._timeout:g} s on "
                f"{self.plan.trainer_ranks} ranks"
            ) from error
        if outcome is not None:
            for result in results:
                for name, seconds in result.items():
                    outcome.phases[name] = outcome.phases.get(name, 0.0) + seconds
            outcome.phases["wait"] = outcome.phases.get("wait", 0.0) + time.perf_counter() - started
        return results
