"""One optimizer step over a planned logical batch: begin → accumulate(fragment)* → commit or abort.

What must hold (I3):
- the loss is a sum over cells divided by the planned number of cells, known at begin; fragments in any order and of any
  size therefore give the full-batch gradient;
- commit is refused while cells are missing, and no cell is accumulated twice;
- abort leaves weights, optimizer state, gradients and RNG as they were before begin.

Gradients live in the parameters between begin and commit (with FSDP2 unreduced, beside them); nothing else of the model
changes before the commit.

A rank that runs out of memory in a tile says so in ``too_large`` and does nothing more but the collectives that the
others wait for; the transaction can only be aborted then, and repeated with smaller tiles.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

from verl_digen.diffusion.kernels import noise_scale, transition
from verl_digen.diffusion.losses import (
    FlowGRPOConfig,
    compute_loss,
    live_cells,
    log_prob_gap,
    merge_metrics,
    ratio_metrics,
    stale_cells,
    summarise_metrics,
)
from verl_digen.engine.tiles import SampleRow, Tile, gather_tile
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
        tsp: a tile may span transitions.
        reduce: ``transaction``: gradients are reduced over the ranks once, at the end, and are whole on every
            rank until then; ``tile``: after every tile.
        num_steps: T, for the metrics by transition.
        correction: loss of stale cells, see :func:`~verl_digen.diffusion.losses.stale_cells`.
        weight_cap: largest importance weight of ``decoupled``.
        split_by_staleness: there may be stale cells (TCSS): ratio metrics of fresh and of stale cells, to the policy
            that sampled.
    """

    kind: str
    eta: float
    guidance: Guidance
    loss: str
    loss_config: FlowGRPOConfig
    tsp: bool
    reduce: str
    num_steps: int
    correction: str = "clip"
    weight_cap: float = 2.0
    split_by_staleness: bool = False


class Transaction:
    """The open transaction of one rank.

    Args:
        engine: a :class:`~verl_digen.engine.diffusers_fsdp.DiffusersFSDPEngine`.
        rule: see :class:`StepRule`.
        planned_cells: cells of the whole logical batch, over all ranks.
        on_policy: the weights are those that sampled (anchor = the current forward), except for stale cells; else the
            rollout log-probs anchor.
        clamped: advantages are clamped to ``adv_max``; not when they still await their scale (``commit``).
        yields: the parameters leave the device between fragments: gradients are reduced after each, so that they move
            with them.

    Attributes:
        cells: accumulated on this rank.
        too_large: cells of the tile that did not fit into memory; 0 as long as all did.
    """

    def __init__(
        self,
        engine,
        rule: StepRule,
        *,
        planned_cells: int,
        on_policy: bool,
        clamped: bool = True,
        yields: bool = False,
    ):
        if planned_cells <= 0:
            raise TransactionError(f"a logical batch needs at least one cell, {planned_cells} were planned")
        self.engine = engine
        self.rule = rule
        self.loss_config = rule.loss_config if clamped else replace(rule.loss_config, adv_max=sys.float_info.max)
        self.planned_cells = planned_cells
        self.on_policy = on_policy
        self.yields = yields
        self.cells = 0
        self.too_large = 0
        self._seen: set[tuple[str, int, int]] = set()
        self._metrics: list[dict] = []
        self._gaps: list[dict] = []
        self._ratios: tuple[list[dict], list[dict]] = ([], [])  # of fresh and of stale cells, with TCSS
        self._live = torch.zeros((), dtype=torch.int64, device=engine.device)
        self._unreduced: SampleRow | None = None
        self._rng = torch.get_rng_state()
        self._drop_gradients()
        if rule.reduce == "transaction" and engine.may_stay_whole:
            engine.gather()

    def accumulate(
        self,
        rows: Mapping[int, SampleRow] | Sequence[SampleRow],
        tiles: Sequence[Sequence[tuple[int, int]]],
        *,
        idle_row: SampleRow,
        last: bool = False,
    ) -> list[tuple[float, float, int]]:
        """Forward and backward of this rank's share of a fragment.

        Args:
            rows: samples of which this rank has cells.
            tiles: cells (row, k) of each tile; an empty one is run without effect, so that the number of
                collectives is the same on every rank.
            idle_row: a row to build empty tiles from.
            last: the fragment completes the logical batch: gradients are reduced over the ranks at its end.

        Returns:
            start and end (seconds since the epoch, as the host sees them) and cells of each tile.

        Raises:
            TransactionError: a cell was accumulated before, more cells than planned, or a rank ran out of memory and
                cannot go on even without cells.
        """
        self._count(rows, tiles)
        times = []
        for index, tile in enumerate(tiles):
            ends = index == len(tiles) - 1 and (last or self.yields)
            started = time.time()
            done = self._run_or_idle(rows, tile, idle_row, reduce=ends or self.rule.reduce == "tile")
            times.append((started, time.time(), done))
        return times

    def _count(self, rows, tiles) -> None:
        cells = [(rows[s].uid, rows[s].j, k) for tile in tiles for s, k in tile]
        for cell in cells:
            if cell in self._seen:
                raise TransactionError(
                    f"transition {cell[2]} of sample ({cell[0]}, {cell[1]}) is in the logical batch twice"
                )
            self._seen.add(cell)
        if self.cells + len(cells) > self.planned_cells:
            raise TransactionError(
                f"{self.cells} + {len(cells)} cells exceed the {self.planned_cells} planned at begin"
            )
        self.cells += len(cells)

    def _run_or_idle(self, rows, cells: Sequence[tuple[int, int]], idle_row: SampleRow, reduce: bool) -> int:
        """Run a tile, or only its collectives; returns the cells that were run."""
        engine = self.engine
        engine.begin_tile()
        self._unreduced = idle_row
        done = 0
        if cells and not self.too_large:
            try:
                self._run(rows, cells, reduce, counted=True)
                done = len(cells)
            except torch.OutOfMemoryError:
                self.too_large = len(cells)
            if self.too_large:  # not in the handler: the error's traceback holds the tensors of the tile
                self._recover(reduce)
        if not done and (reduce or not engine.whole):
            try:
                self._run([idle_row], [(0, 0)], reduce, counted=False)
            except torch.OutOfMemoryError as error:
                raise self._cannot_go_on("a tile of 1 cell does not fit either") from error
        if reduce:
            self._unreduced = None
        return done

    def _recover(self, reduce: bool) -> None:
        try:
            self.engine.recover(reduce)
        except RuntimeError as error:
            raise self._cannot_go_on(str(error)) from error

    def _cannot_go_on(self, why: str) -> TransactionError:
        tile = f"a tile of {self.too_large} cells does not fit into memory" if self.too_large else "out of memory"
        return TransactionError(
            f"{tile}, and the rank cannot go on ({why}); lower trainer.v1.digen.tsp.max_cells, reduce the resolution, "
            "shard over more ranks or set actor_rollout_ref.model.enable_gradient_checkpointing=true"
        )

    def _run(self, rows, cells: Sequence[tuple[int, int]], reduce: bool, *, counted: bool) -> None:
        with self.engine.tile(reduce):
            tile = gather_tile(rows, cells, device=self.engine.device, dtype=self.engine.master_dtype)
            self._tile(tile, counted=counted)

    def _tile(self, tile: Tile, *, counted: bool) -> None:
        engine, rule, dtype = self.engine, self.rule, self.engine.master_dtype
        config = self.loss_config

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
            "advantage": tile.advantage,
            "log_prob_old": None if self.on_policy else tile.log_prob_rollout,
            "importance": None,
            "mean": scored.mean,
            "std": scored.std,
            "v": velocity,
        }
        if any(tile.stale) and self.on_policy:
            stale = torch.tensor(tile.stale).to(scored.log_prob.device, non_blocking=True)
            cells |= stale_cells(rule.correction, scored.log_prob, tile.log_prob_rollout, stale, rule.weight_cap)
        if config.kl_beta > 0:
            cells["s"] = noise_scale(rule.kind, scored.std, tile.sigma, tile.sigma_next)
            with torch.no_grad(), engine.reference_policy() as module:
                cells["v_ref"] = predict(module)
                cells["mean_ref"] = score(cells["v_ref"]).mean
        loss, metrics = compute_loss(rule.loss, cells, config, planned_cells=self.planned_cells)
        if not counted:
            loss = loss * 0.0
        # FSDP averages gradients over the ranks; the planned cells are those of all ranks together.
        (loss * dist.get_world_size()).backward()
        if counted:
            self._live += live_cells(tile.advantage, scored.log_prob, cells["log_prob_old"], config)
            self._metrics.append(metrics)
            self._note(tile, scored.log_prob.detach())

    def _note(self, tile: Tile, log_prob: torch.Tensor) -> None:
        """Where policy and rollout stand: both compute the same for fresh cells; a stale cell is a version behind."""
        config, steps = self.loss_config, self.rule.num_steps
        if not any(tile.stale):
            self._gaps.append(log_prob_gap(log_prob, tile.log_prob_rollout, tile.transition, steps))
        for stale, ratios in enumerate(self._ratios if self.rule.split_by_staleness else ()):
            places = [i for i, is_stale in enumerate(tile.stale) if is_stale == bool(stale)]
            if not places:
                continue
            index = torch.tensor(places).to(log_prob.device, non_blocking=True)
            now, then, k = (values[index] for values in (log_prob, tile.log_prob_rollout, tile.transition))
            if not stale and any(tile.stale):
                self._gaps.append(log_prob_gap(now, then, k, steps))
            metrics = ratio_metrics(now, then, config.clip_low, config.clip_high)
            ratios.append(metrics | {"count": torch.full_like(metrics["approx_kl_sum"], len(places))})

    def commit(self, total_cells: int, scale: float = 1.0) -> dict[str, float]:
        """Clip and step once.

        Args:
            total_cells: cells accumulated on all ranks; every rank passes the same number.
            scale: the gradient is multiplied by it first (advantages whose scale was not known before).

        Returns:
            Metrics of the logical batch over all ranks, with the learning rate of this step.

        Raises:
            TransactionError: cells are missing.
            NonFiniteGradientError: the gradient is not finite; the transaction is aborted.
            ZeroGradientError: the gradient is exactly 0 although cells push for one; the transaction is aborted.
        """
        if total_cells != self.planned_cells:
            raise TransactionError(
                f"{total_cells} of {self.planned_cells} planned cells were accumulated; commit refused"
            )
        if self.too_large:
            raise TransactionError(f"a tile of {self.too_large} cells did not fit into memory; commit refused")
        self.engine.shard()
        learning_rate = self.engine.optimizer.param_groups[0]["lr"]
        if scale != 1.0:
            for parameter in self.engine.trainable_parameters():
                if parameter.grad is not None:
                    parameter.grad.mul_(scale)
        live = self._live
        dist.all_reduce(live)
        try:
            grad_norm = self.engine.optimizer_step(int(live))
        except FloatingPointError:
            self.abort()
            raise
        self._drop_gradients()
        self.engine.lr_scheduler_step()
        if self.engine.ema is not None:
            self.engine.ema.update()
        metrics = self._summary()
        for name in ("loss", "policy_loss"):
            metrics[name] *= scale
        return metrics | {"grad_norm": grad_norm, "lr": learning_rate}

    def abort(self) -> None:
        """Drop the gradients and restore the RNG; weights and optimizer state were never touched.

        FSDP2 keeps gradients that were not reduced where only a reduction reaches them; all ranks do it together.
        """
        self.engine.shard()
        if self._unreduced is not None and isinstance(self.engine.module, FSDPModule):
            self.engine.reset()
            self.engine.begin_tile()
            self._run([self._unreduced], [(0, 0)], True, counted=False)
        self._unreduced = None
        self._drop_gradients()
        torch.set_rng_state(self._rng)

    def _drop_gradients(self) -> None:
        for parameter in self.engine.trainable_parameters():
            parameter.grad = None

    def _summary(self) -> dict[str, float]:
        local = [
            {k: v.cpu() for k, v in merge_metrics(parts).items()} if parts else None
            for parts in (self._metrics, self._gaps, *self._ratios)
        ]
        gathered = [None] * dist.get_world_size()
        dist.all_gather_object(gathered, local)
        of_all = ([part for part in parts if part is not None] for parts in zip(*gathered, strict=True))
        of_losses, gaps, *ratios = (merge_metrics(parts) if parts else None for parts in of_all)
        metrics = summarise_metrics(of_losses)
        if gaps is not None:
            count = gaps["log_prob_gap_count"]
            metrics["log_prob_gap_mean"] = float(gaps["log_prob_gap_sum"].sum() / count.sum())
            metrics["log_prob_gap_max"] = float(gaps["log_prob_gap_max"].max())
            for k in range(len(count)):
                if count[k] > 0:
                    metrics[f"log_prob_gap/transition_{k}"] = float(gaps["log_prob_gap_sum"][k] / count[k])
        for name, merged in zip(("fresh", "stale"), ratios, strict=True):
            if merged is not None:
                metrics |= {f"{name}/{key}": value for key, value in summarise_metrics(merged).items()}
        return metrics
