"""One training step: prompt groups in, transactions out.

Invariants
- Which groups belong to a logical batch is fixed before any of them is generated; logical batches commit in order.
- A group enters the open transaction only when it is complete and scored; each sample exactly once (I3).
- One-shot waits for the whole step first; with GAP a group is accumulated as soon as it is there. Both pass the same
  cells with the same advantages and the same denominator, so they give the same gradient (I2).
- A failed step leaves no open transaction.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import ray
import torch
from verl.utils.debug import marked_timer

from verl_digen.config.plan import RunPlan
from verl_digen.diffusion.advantages import ADVANTAGE_EPS, group_advantages
from verl_digen.engine.tilesize import TileSize
from verl_digen.rollout.manager import DiffusionRolloutManager
from verl_digen.rollout.requests import GroupResult, PromptGroup, SampleResult
from verl_digen.schedule.measure import Measured
from verl_digen.trainer.feed import Feed
from verl_digen.trainer.worker import TrainFragment
from verl_digen.trainer.workgroup import TrainerGroup

logger = logging.getLogger(__name__)
logger.setLevel(os.getenv("VERL_LOGGING_LEVEL", "WARN"))

Sample = tuple[str, int]


@dataclass
class StepOutcome:
    """What a step leaves behind for metrics and dumps.

    Attributes:
        accumulated: what each rank says of each fragment it accumulated.
        repeated: times that a logical batch was accumulated again (``norm: global`` whose clamp became active, or a
            rank that ran out of memory).
        waited: seconds that the driver waited for the Trainer.
    """

    groups: list[GroupResult] = field(default_factory=list)
    advantages: dict[Sample, float] = field(default_factory=dict)
    commits: list[dict[str, float]] = field(default_factory=list)
    advantage_metrics: dict[str, float] = field(default_factory=dict)
    repeated: int = 0
    accumulated: list[dict[str, Any]] = field(default_factory=list)
    waited: float = 0.0

    @property
    def samples(self) -> list[SampleResult]:
        return [sample for group in self.groups for sample in group.samples]


def _stale_samples(groups: Sequence[GroupResult]) -> frozenset[Sample]:
    return frozenset(sample for group in groups if group.staleness for sample in group.group.samples)


class TrainingStep:
    """Runs steps of a plan on the training worker group.

    Args:
        plan: sizes and options.
        ranks: the Trainer.
        manager: the rollout manager.
        tile_size: most cells of a tile; smaller after a rank ran out of memory.
        measured: costs of the run so far.
    """

    def __init__(
        self,
        plan: RunPlan,
        ranks: TrainerGroup,
        manager: DiffusionRolloutManager,
        tile_size: TileSize,
        measured: Measured,
    ):
        self.plan, self.ranks, self.manager = plan, ranks, manager
        self.tile_size, self.measured = tile_size, measured
        self._stale: frozenset[Sample] = frozenset()

    def run(
        self,
        groups: Sequence[PromptGroup],
        *,
        version: int,
        training_step: int,
        timing_raw: dict[str, float],
        ahead: Sequence[PromptGroup] = (),
        keep_pixels: set[Sample] = frozenset(),
    ) -> StepOutcome:
        """Generate, score and train one step.

        Args:
            ahead: groups of the next step, of which some may start under this version (TCSS).

        Raises:
            RolloutError: generation or scoring failed for good.
            TimeoutError: generation, scoring or training did not finish in time.
        """
        plan = self.plan
        outcome = StepOutcome()
        size = plan.prompts_per_batch
        batches = [groups[i : i + size] for i in range(0, len(groups), size)]
        self.manager.generate_sequences(
            list(groups), version=version, training_step=training_step, ahead=ahead, keep_pixels=keep_pixels
        )
        try:
            if plan.one_shot:
                self._one_shot(batches, outcome, timing_raw)
            else:
                self._streaming(batches, outcome, timing_raw)
        except BaseException:
            ray.wait(self.ranks.call("abort"), num_returns=plan.trainer_ranks, timeout=5.0)
            raise
        order = {group.uid: i for i, group in enumerate(groups)}
        outcome.groups.sort(key=lambda result: order[result.group.uid])
        _, outcome.advantage_metrics = self._advantages(outcome.groups, plan.digen.algorithm.norm)  # of the whole step
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
        self._stale = _stale_samples(outcome.groups)
        for batch in batches:
            members = [results[group.uid] for group in batch]
            outcome.advantages |= self._advantages(members, self.plan.digen.algorithm.norm)[0]
        with marked_timer("update_actor", timing_raw):
            for _ in range(self.plan.epochs):
                for batch in batches:
                    self._whole_batch(batch, outcome, "training a logical batch")

    def _streaming(self, batches, outcome: StepOutcome, timing_raw) -> None:
        """Groups are accumulated in the order in which they are completed; a later logical batch waits its turn.

        The standard deviation of ``norm: global`` is known at the end only: until then the advantages are centred
        rewards, and the commit scales their gradient. The loss is linear in that scale unless advantages are clamped;
        a batch that turns out to need the clamp is accumulated once more, whole.
        """
        norm = self.plan.digen.algorithm.norm
        deferred = norm == "global"
        feed = Feed(self.plan, self.ranks, self.manager, self.measured, lambda: self.tile_size.cells)
        for batch in batches:
            members: list[GroupResult] = []
            refs: list = []
            self._begin(clamped=not deferred)
            with marked_timer("gen", timing_raw):
                for lot, last in feed.lots(batch):
                    self._stale |= _stale_samples(lot)
                    advantages, _ = self._advantages(lot, "none" if deferred else norm)
                    outcome.advantages |= advantages
                    samples = [sample for result in lot for sample in result.group.samples]
                    calls = self._accumulate(samples, advantages, last=last, before=len(members) * self.plan.n)
                    feed.sent(lot, calls)
                    members += lot
                    refs += calls
            outcome.groups += members
            with marked_timer("update_actor", timing_raw):
                doing = "training the fragments of a logical batch"
                if not self._fitted(self._get(refs, doing, outcome), outcome):
                    if deferred:
                        outcome.advantages |= self._advantages(members, norm)[0]
                    self._whole_batch(batch, outcome, "training a logical batch again in smaller tiles")
                elif deferred:
                    self._commit_deferred(batch, members, outcome)
                else:
                    self._commit(outcome)
        for _ in range(1, self.plan.epochs):
            for batch in batches:
                with marked_timer("update_actor", timing_raw):
                    self._whole_batch(batch, outcome, "training an epoch")

    # ---- pieces --------------------------------------------------------------------------------------------

    def _whole_batch(self, batch: Sequence[PromptGroup], outcome: StepOutcome, doing: str) -> None:
        """A logical batch as one fragment, with the advantages that are known by now."""
        samples = [sample for group in batch for sample in group.samples]
        while True:
            self._begin()
            done = self._get(self._accumulate(samples, outcome.advantages, last=True), doing, outcome)
            if self._fitted(done, outcome):
                break
        self._commit(outcome)

    def _fitted(self, done: list[dict[str, Any]], outcome: StepOutcome) -> bool:
        """Whether every tile fitted into memory; if not, the transaction is gone and tiles are half as large."""
        too_large = [result["too_large"] for result in done if result["too_large"]]
        if not too_large:
            return True
        self._get(self.ranks.call("abort"), "dropping a logical batch that did not fit into memory")
        self.tile_size.halve(min(too_large))
        outcome.repeated += 1
        logger.warning(
            "out of memory in a tile of %d cells: trying again with %d", min(too_large), self.tile_size.cells
        )
        return False

    def _commit_deferred(self, batch, members: list[GroupResult], outcome: StepOutcome) -> None:
        advantages, metrics = self._advantages(members, "global")
        outcome.advantages |= advantages
        if max(map(abs, advantages.values())) > self.plan.digen.algorithm.adv_max:
            self._get(self.ranks.call("abort"), "dropping a logical batch whose advantages are clamped")
            self._whole_batch(batch, outcome, "training a logical batch whose advantages are clamped")
            outcome.repeated += 1
        else:
            self._commit(outcome, scale=1.0 / (metrics["reward_std"] + ADVANTAGE_EPS))

    def _next_group(self) -> GroupResult:
        return self.manager.next_group(self.plan.deadlines.group.seconds)

    def _advantages(self, results: Sequence[GroupResult], norm: str) -> tuple[dict[Sample, float], dict[str, float]]:
        """Advantages by sample, and statistics of the rewards."""
        samples = [s for result in results for s in result.samples]
        dtype = getattr(torch, self.plan.digen.arithmetic)
        rewards = torch.tensor([s.reward for s in samples], dtype=dtype)
        values, metrics = group_advantages(rewards, [s.uid for s in samples], norm=norm)
        return {(s.uid, s.j): float(a) for s, a in zip(samples, values.tolist(), strict=True)}, metrics

    def _begin(self, clamped: bool = True) -> None:
        plan = self.plan
        refs = self.ranks.call("begin", plan.cells_per_batch, plan.on_policy, clamped)
        self._get(refs, "opening a transaction")

    def _accumulate(self, samples, advantages, *, last: bool, before: int = 0) -> list:
        """Have some samples trained; ``before`` samples of the logical batch were sent already."""
        fragment = TrainFragment(
            samples=tuple(samples),
            transitions=self.plan.transitions,
            advantages={sample: advantages[sample] for sample in samples},
            stale=self._stale.intersection(samples),
            max_cells=self.tile_size.cells,
            rotate=before * (self.plan.transitions if self.plan.digen.tsp.enable else 1) % self.plan.trainer_ranks,
            last=last,
        )
        return self.ranks.call("accumulate", fragment)

    def _commit(self, outcome: StepOutcome, scale: float = 1.0) -> None:
        metrics = self._get(self.ranks.call("commit", scale), "committing a logical batch")[0]
        outcome.commits.append(metrics | {"tile_cells": self.tile_size.cells})

    def _get(self, refs: list, doing: str, outcome: StepOutcome | None = None) -> list[Any]:
        started = time.perf_counter()
        results = self.ranks.get(refs, doing, self.plan.deadlines.train)
        if outcome is not None:
            outcome.accumulated += results
            outcome.waited += time.perf_counter() - started
        return results
