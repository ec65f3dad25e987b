"""Losses per cell (one sample at one transition) and the diagnostics that let one judge a run.

A loss is a sum over cells divided by the **planned** number of cells of the whole logical batch, known before the first
fragment. Fragments of any size in any order therefore add up to the full-batch gradient; the mean over a fragment would
not. Metrics are sums, maxima and counts for the same reason: ``merge_metrics`` adds those of tiles and ranks,
``summarise_metrics`` makes the means at the very end.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from verl_digen.diffusion.kernels import kl_to_reference, velocity_to_reference

Cells = Mapping[str, Tensor | None]
Metrics = dict[str, Tensor]
CellLoss = Callable[[Cells, Any], tuple[Tensor, Metrics]]

KL_FORMS = ("transition", "transition_without_delta", "velocity")
_KL_KEYS = {
    "transition": ("mean", "mean_ref", "std"),
    "transition_without_delta": ("mean", "mean_ref", "s"),
    "velocity": ("v", "v_ref"),
}


@dataclass(frozen=True)
class Loss:
    """A registered loss: its name, the cell keys it cannot do without, and (cells, cfg) -> (loss [C], metrics)."""

    name: str
    requires: tuple[str, ...]
    cell_loss: CellLoss


_LOSSES: dict[str, Loss] = {}


def register_loss(name: str, *, requires: Iterable[str] = ()) -> Callable[[CellLoss], CellLoss]:
    """Decorator that makes a cell loss known by name.

    Args:
        name: as in the configuration.
        requires: keys of cells that must be there; a missing one is an error before the loss is called.

    Raises:
        ValueError: the name is taken.
    """

    def register(cell_loss: CellLoss) -> CellLoss:
        if name in _LOSSES:
            raise ValueError(f"loss {name!r} is registered already, by {_LOSSES[name].cell_loss.__module__}")
        _LOSSES[name] = Loss(name, tuple(requires), cell_loss)
        return cell_loss

    return register


def get_loss(name: str) -> Loss:
    """The loss of that name. Raises ValueError listing those available."""
    if name not in _LOSSES:
        raise ValueError(f"unknown loss {name!r}; available: {', '.join(sorted(_LOSSES))}")
    return _LOSSES[name]


def compute_loss(name: str, cells: Cells, cfg: Any, *, planned_cells: int) -> tuple[Tensor, Metrics]:
    """Loss and metrics of C cells.

    Under data parallelism that averages gradients, multiply the loss by the number of ranks: ``planned_cells`` counts
    the cells of all ranks.

    Args:
        name: a registered loss.
        cells: key -> [C] or [C, ...]; None counts as absent. The loss says what it requires; with ``cfg.kl_beta`` > 0
            also ``mean``, ``mean_ref`` [C, ...] and ``std`` [C] (form ``transition``) or ``s`` [C]
            (``transition_without_delta``), or ``v`` and ``v_ref`` (``velocity``).
            ``importance`` [C], where it is there, multiplies the policy loss of each cell.
        cfg: attributes of ``FlowGRPOConfig`` (or what the loss reads), and ``kl_beta``, ``kl_form``.
        planned_cells: cells of the whole logical batch, not of this call.

    Returns:
        loss: scalar, sum over the cells / planned_cells; and metrics, detached: ``*_sum`` and ``*_max`` over the cells
        and ``count``. No value is read on the host.

    Raises:
        ValueError: unknown loss, a missing key (named), lengths that disagree, planned_cells < the cells given.
    """
    loss = get_loss(name)
    needed = loss.requires + (_KL_KEYS[cfg.kl_form] if cfg.kl_beta > 0 else ())
    for key in needed:
        if cells.get(key) is None:
            present = sorted(k for k, value in cells.items() if value is not None)
            raise ValueError(f"loss {name!r} needs {key!r} in its cells; present: {present}")
    lengths = {key: len(value) for key, value in cells.items() if value is not None}
    if len(set(lengths.values())) != 1:
        raise ValueError(f"cells must all have the same length, got {lengths}")
    count = next(iter(lengths.values()))
    if not 1 <= count <= planned_cells:
        raise ValueError(f"{count} cells in a logical batch planned for {planned_cells}")

    per_cell, metrics = loss.cell_loss(cells, cfg)
    if cells.get("importance") is not None:
        per_cell = per_cell * cells["importance"].detach()
        metrics["importance_sum"] = cells["importance"].detach().double().sum()
    metrics["policy_loss_sum"] = per_cell.detach().double().sum()
    if cfg.kl_beta > 0:
        kl = _kl(cells, cfg.kl_form)
        per_cell = per_cell + cfg.kl_beta * kl
        metrics["kl_sum"] = kl.detach().double().sum()
    metrics["loss_sum"] = per_cell.detach().double().sum()
    metrics["count"] = torch.full_like(metrics["loss_sum"], count)
    return per_cell.sum() / planned_cells, metrics


def _kl(cells: Cells, form: str) -> Tensor:
    if form == "velocity":
        return velocity_to_reference(cells["v"], cells["v_ref"].detach(), dtype=_float_dtype(cells["v"]))
    return kl_to_reference(cells["mean"], cells["mean_ref"].detach(), cells[_KL_KEYS[form][-1]])


def _float_dtype(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


@dataclass(frozen=True, kw_only=True)
class FlowGRPOConfig:
    """Options of ``flow_grpo``.

    Attributes:
        clip_low, clip_high: the ratio is clipped to [1 - clip_low, 1 + clip_high]. A log-prob is a mean over the latent
            elements, so these are small (1e-5...1e-3), and they do not carry over between transition kinds.
        adv_max: advantages are clamped to +-adv_max.
        kl_beta: weight of the KL to the reference; 0 leaves it out.
        kl_form: ``transition``: mean((mean - mean_ref)^2) / (2 std^2), the KL of the transitions;
            ``transition_without_delta``: the same over 2 s^2, as FlowGRPO's code has it, 1/delta times weaker with
            ``sde`` and ``dance``; ``velocity``: mean((v - v_ref)^2).
    """

    clip_low: float = 1e-4
    clip_high: float = 1e-4
    adv_max: float = 5.0
    kl_beta: float = 0.0
    kl_form: str = "transition"

    def __post_init__(self) -> None:
        if not (0 < self.clip_low < 1 and 0 < self.clip_high < math.inf):
            raise ValueError(f"need 0 < clip_low < 1 and clip_high > 0, got {self.clip_low}, {self.clip_high}")
        if not 0 < self.adv_max < math.inf:
            raise ValueError(f"adv_max must be > 0, got {self.adv_max}")
        if not 0 <= self.kl_beta < math.inf:
            raise ValueError(f"kl_beta must be >= 0, got {self.kl_beta}")
        if self.kl_form not in KL_FORMS:
            raise ValueError(f"unknown kl_form {self.kl_form!r}; available: {', '.join(KL_FORMS)}")


@register_loss("flow_grpo", requires=("log_prob", "advantage"))
def flow_grpo(cells: Cells, cfg: FlowGRPOConfig) -> tuple[Tensor, Metrics]:
    """Clipped policy-gradient loss of FlowGRPO (arXiv 2505.05470): max(-A r, -A clip(r, 1 - low, 1 + high)).

    Cells:
        log_prob: [C] of the policy, with gradient.
        advantage: [C].
        log_prob_old: [C] of the policy that sampled. Absent: the policy itself is that policy (one commit per publish,
            no stale group), and the anchor is the detached log_prob: the ratio is exactly 1, without another forward.
    """
    log_prob = cells["log_prob"]
    old = cells.get("log_prob_old")
    anchor = (log_prob if old is None else old).detach()
    advantage = cells["advantage"].detach().to(log_prob.dtype).clamp(-cfg.adv_max, cfg.adv_max)
    ratio = torch.exp(log_prob - anchor)
    clipped = ratio.clamp(1 - cfg.clip_low, 1 + cfg.clip_high)
    loss = torch.maximum(-advantage * ratio, -advantage * clipped)
    return loss, ratio_metrics(log_prob, anchor, cfg.clip_low, cfg.clip_high)


def stale_cells(
    correction: str, log_prob: Tensor, rollout_log_prob: Tensor, stale: Tensor, weight_cap: float
) -> dict[str, Tensor | None]:
    """What the loss needs of cells of which some were sampled by the version before, at the first commit after it.

    Fresh cells keep the current policy as their anchor (ratio 1). Stale cells, with the policy μ that sampled them:

    - ``clip``: anchor μ, so the ratio π/μ is clipped as in PPO;
    - ``decoupled`` (arXiv 2110.00641): the proximal policy is the current one (ratio 1, never clipped) and the cell is
      weighed by min(π/μ, ``weight_cap``), without gradient.

    Args:
        log_prob, rollout_log_prob: [C].
        stale: [C] bool.

    Returns:
        ``log_prob_old`` and ``importance`` for :func:`compute_loss`.
    """
    now = log_prob.detach()
    if correction == "clip":
        return {"log_prob_old": torch.where(stale, rollout_log_prob.to(now.dtype), now), "importance": None}
    weight = torch.exp(now - rollout_log_prob.to(now.dtype)).clamp(max=weight_cap)
    return {"log_prob_old": None, "importance": torch.where(stale, weight, torch.ones_like(weight))}


def live_cells(advantage: Tensor, log_prob: Tensor, log_prob_old: Tensor | None, cfg: FlowGRPOConfig) -> Tensor:
    """How many of C cells surely have a gradient: an advantage, and a ratio within the clip range. All [C].

    Without ``log_prob_old`` the ratio is 1.
    """
    with torch.no_grad():
        live = advantage != 0
        if log_prob_old is not None:
            inside = torch.expm1(log_prob.double() - log_prob_old.double()).abs() < min(cfg.clip_low, cfg.clip_high)
            live = live & inside
        return live.sum()


def ratio_metrics(log_prob: Tensor, anchor: Tensor, clip_low: float, clip_high: float) -> Metrics:
    """Sums over C cells of what shows whether the policy is where the anchor says. log_prob, anchor: [C].

    In float64 and about 1, because the spread of ratios near 1 would be lost in fp32. ``approx_kl`` is
    (lp - lp_old)^2 / 2, per latent element. Clip fractions count ratios outside the range, whatever the advantage's
    sign.
    """
    with torch.no_grad():
        log_ratio = log_prob.double() - anchor.double()
        deviation = torch.expm1(log_ratio)
        return {
            "ratio_dev_sum": deviation.sum(),
            "ratio_dev_sq_sum": (deviation**2).sum(),
            "ratio_dev_abs_max": deviation.abs().max(),
            "clip_high_sum": (deviation > clip_high).double().sum(),
            "clip_low_sum": (deviation < -clip_low).double().sum(),
            "approx_kl_sum": (0.5 * log_ratio**2).sum(),
        }


def log_prob_gap(log_prob: Tensor, rollout_log_prob: Tensor, step: Tensor, num_steps: int) -> Metrics:
    """|log_prob of the Trainer - log_prob of the rollout| by transition: 0 when both compute the same thing.

    Args:
        log_prob, rollout_log_prob: [C].
        step: [C] integer, transition of each cell in 0...num_steps - 1.

    Returns:
        ``log_prob_gap_sum``, ``log_prob_gap_max``, ``log_prob_gap_count``, each [num_steps], for ``merge_metrics``.
    """
    with torch.no_grad():
        gap = (log_prob.double() - rollout_log_prob.double()).abs()
        zero = gap.new_zeros(num_steps)
        return {
            "log_prob_gap_sum": zero.index_add(0, step, gap),
            "log_prob_gap_max": zero.scatter_reduce(0, step, gap, "amax"),
            "log_prob_gap_count": zero.index_add(0, step, torch.ones_like(gap)),
        }


def merge_metrics(parts: Iterable[Metrics]) -> Metrics:
    """Metrics of several tiles, fragments or ranks as one: the larger of ``*_max``, the sum of everything else.

    Raises:
        ValueError: parts have different keys, or there are none.
    """
    merged: Metrics = {}
    for part in parts:
        if not merged:
            merged = dict(part)
            continue
        if set(part) != set(merged):
            raise ValueError(f"metrics differ: {sorted(set(part) ^ set(merged))} are not in all parts")
        for key, value in part.items():
            merged[key] = torch.maximum(merged[key], value) if key.endswith("_max") else merged[key] + value
    if not merged:
        raise ValueError("no metrics to merge")
    return merged


def summarise_metrics(merged: Metrics) -> dict[str, float]:
    """Means for the log out of merged metrics of ``compute_loss``. Reads the values on the host: once per commit.

    Returns:
        ``loss``, ``policy_loss``, ``kl`` (if used), ``approx_kl``, ``clip_high``, ``clip_low`` (fractions),
        ``ratio_mean``, ``ratio_std`` (population), ``ratio_max_dev`` (largest \\|r - 1\\|), ``cells``; and for other
        ``*_sum`` keys their mean over the cells.
    """
    values = {key: float(value) for key, value in merged.items() if value.dim() == 0}
    count = values.pop("count")
    out = {"cells": count}
    if "ratio_dev_sum" in values:
        mean = values.pop("ratio_dev_sum") / count
        variance = values.pop("ratio_dev_sq_sum") / count - mean**2
        out |= {"ratio_mean": 1 + mean, "ratio_std": math.sqrt(max(variance, 0.0))}
        out["ratio_max_dev"] = values.pop("ratio_dev_abs_max")
    for key, value in values.items():
        out[key.removesuffix("_sum")] = value / count if key.endswith("_sum") else value
    return out
