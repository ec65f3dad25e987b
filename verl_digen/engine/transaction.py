"""One optimizer step over a planned logical batch: begin → accumulate(fragment)* → commit or abort.

What must hold (I3):
- the loss is a sum over cells divided by the planned number of cells, known at begin; fragments in any order and of any
  size therefore give the full-batch gradient;
- commit is refused while cells are missing, and no cell is accumulated twice;
- abort leaves weights, optimizer state, gradients and RNG as they were before begin.

Gradients live in the parameters between begin and commit; nothing else of the model changes before the commit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from verl_digen.diffusion.kernels import transition
from verl_digen.diffusion.losses import FlowGRPOConfig, compute_loss, log_prob_gap, merge_metrics, summarise_metrics
from verl_digen.engine.tiles import SampleRow, Tile, gather_tile, plan_tiles
from verl_digen.models.family import Guidance


class TransactionError(RuntimeError):
    """A call that does not fit the open transaction; the message says what was expected."""


@dataclass(frozen=True, kw_only=True)
class StepRule:
    """How the cells of a run are scored and weighed; the same for every transaction.

    Attributes:
        kind, eta: transition kernel of the trained transitions.
        guidance: as in sampling.
        loss: name in the loss registry.
        loss_config: its options.
        max_cells, tsp: tile size.
        num_steps: T, for the metrics by transition.
    """

    kind: str
    eta: float
    guidance: Guidance
    loss: str
    loss_config: FlowGRPOConfig
    max_cells: int | None
    tsp: bool
    num_steps: int


class Transaction:
    """The open transaction of one rank.

    Args:
        engine: a :class:`~verl_digen.engine.diffusers_fsdp.DiffusersFSDPEngine`.
        rule: see :class:`StepRule`.
        planned_cells: cells of the whole logical batch, over all ranks.
        on_policy: the weights are those that sampled (anchor = the current forward); else the rollout log-probs anchor.
    """

    def __init__(self, engine, rule: StepRule, *, planned_cells: int, on_policy: bool):
        if planned_cells <= 0:
            raise TransactionError(f"a logical batch needs at least one cell, {planned_cells} were planned")
        self.engine = engine
        self.rule = rule
        self.planned_cells = planned_cells
        self.on_policy = on_policy
        self.cells = 0
        self._seen: set[tuple[str, int]] = set()
        self._metrics: list[dict] = []
        self._gaps: list[dict] = []
        self._rng = torch.get_rng_state()
        self.engine.optimizer.zero_grad(set_to_none=True)

    def accumulate(
        self, rows: Sequence[SampleRow], *, num_tiles: int, idle_row: SampleRow | None = None, last: bool = False
    ) -> None:
        """Forward and backward of this rank's share of a fragment.

        Args:
            rows: samples of this rank, maybe none.
            num_tiles: tiles that every rank runs; ranks with fewer run idle tiles of weight 0, so that the number of
                collectives agrees.
            idle_row: a row to build idle tiles from when ``rows`` is empty.
            last: the fragment completes the logical batch: gradients are reduced over the ranks in its last tile.

        Raises:
            TransactionError: a sample was accumulated before, or more cells than planned.
        """
        for row in rows:
            if (row.uid, row.j) in self._seen:
                raise TransactionError(f"sample ({row.uid}, {row.j}) is in the logical batch twice")
            self._seen.add((row.uid, row.j))
        transitions = [len(row.starts) for row in rows]
        if self.cells + sum(transitions) > self.planned_cells:
            raise TransactionError(
                f"{self.cells} + {sum(transitions)} cells exceed the {self.planned_cells} planned at begin"
            )
        tiles = plan_tiles(transitions, max_cells=self.rule.max_cells, tsp=self.rule.tsp)
        idle = num_tiles - len(tiles)
        if idle < 0:
            raise TransactionError(f"{len(tiles)} tiles on this rank, {num_tiles} agreed for all ranks")
        source = rows or [idle_row]
        for index in range(num_tiles):
            real = index < len(tiles)
            cells = tiles[index] if real else [(0, 0)]
            tile = gather_tile(
                rows if real else source,
                cells,
                device=self.engine.device,
                dtype=self.engine.master_dtype,
                weight=1.0 if real else 0.0,
            )
            with self.engine.gradient_sync(last and index == num_tiles - 1):
                self._tile(tile, counted=real)
        self.cells += sum(transitions)

    def _tile(self, tile: Tile, *, counted: bool) -> None:
        engine, rule, dtype = self.engine, self.rule, self.engine.master_dtype
        config = rule.loss_config

        def predict(module):
            return engine.family.predict(module, tile.x, tile.sigma, tile.cond, rule.guidance, negative=tile.negative)

        def score(velocity):
            return transition(
                rule.kind, tile.x, velocity, tile.sigma, tile.sigma_next, rule.eta, x_next=tile.x_next, dtype=dtype
            )

        velocity = predict(engine.module)
        scored = score(velocity)
        cells = {
            "log_prob": scored.log_prob,
            "advantage": tile.advantage * tile.weight,
            "log_prob_old": None if self.on_policy else tile.log_prob_rollout,
            "mean": scored.mean,
            "std": scored.std,
            "v": velocity,
        }
        if config.kl_beta > 0:
            with torch.no_grad(), engine.reference_policy() as module:
                cells["v_ref"] = predict(module)
                cells["mean_ref"] = score(cells["v_ref"]).mean
        loss, metrics = compute_loss(rule.loss, cells, config, planned_cells=self.planned_cells)
        if not counted:
            loss = loss * 0.0
        # FSDP averages gradients over the ranks; the planned cells are those of all ranks together.
        (loss * dist.get_world_size()).backward()
        if counted:
            self._metrics.append(metrics)
            self._gaps.append(log_prob_gap(scored.log_prob, tile.log_prob_rollout, tile.transition, rule.num_steps))

    def commit(self, total_cells: int) -> dict[str, float]:
        """Clip and step once.

        Args:
            total_cells: cells accumulated on all ranks; every rank passes the same number.

        Returns:
            Metrics of the logical batch over all ranks, with the learning rate of this step.

        Raises:
            TransactionError: cells are missing.
            NonFiniteGradientError: the gradient is not finite; the transaction is aborted.
        """
        if total_cells != self.planned_cells:
            raise TransactionError(
                f"{total_cells} of {self.planned_cells} planned cells were accumulated; commit refused"
            )
        learning_rate = self.engine.optimizer.param_groups[0]["lr"]
        try:
            grad_norm = self.engine.optimizer_step()
        except FloatingPointError:
            self.abort()
            raise
        self.engine.optimizer.zero_grad(set_to_none=True)
        self.engine.lr_scheduler_step()
        if self.engine.ema is not None:
            self.engine.ema.update()
        return self._summary() | {"grad_norm": grad_norm, "lr": learning_rate}

    def abort(self) -> None:
        """Drop the gradients and restore the RNG; weights and optimizer state were never touched."""
        self.engine.optimizer.zero_grad(set_to_none=True)
        torch.set_rng_state(self._rng)

    def _summary(self) -> dict[str, float]:
        merged = []
        for parts in (self._metrics, self._gaps):
            local = {k: v.cpu() for k, v in merge_metrics(parts).items()} if parts else None
            gathered = [None] * dist.get_world_size()
            dist.all_gather_object(gathered, local)
            merged.append(merge_metrics(part for part in gathered if part is not None))
        metrics = summarise_metrics(merged[0])
        gap = merged[1]
        count = gap["log_prob_gap_count"]
        metrics["log_prob_gap_mean"] = float(gap["log_prob_gap_sum"].sum() / count.sum())
        metrics["log_prob_gap_max"] = float(gap["log_prob_gap_max"].max())
        for k in range(len(count)):
            if count[k] > 0:
                metrics[f"log_prob_gap/transition_{k}"] = float(gap["log_prob_gap_sum"][k] / count[k])
        return metrics
