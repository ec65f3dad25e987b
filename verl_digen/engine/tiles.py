"""Tiles: which cells (sample × trained transition) go through one forward and backward together.

A cell carries its own sigma, so a tile may mix samples and transitions freely. With TSP off a rank has whole samples
and a tile holds them at one transition; with TSP on the cells are dealt out evenly, sample by sample.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from verl_digen.models.family import stack_conditions
from verl_digen.schedule.tsp import plan_tiles, plan_without_tsp


@dataclass(frozen=True, kw_only=True)
class SampleRow:
    """What the Trainer needs of one sample.

    Attributes:
        uid: prompt group.
        j: place in the group.
        latents: [R, ...latent] recorded states.
        sigmas: [R] their sigmas, the sampler's own values.
        starts: K positions; transition k goes from state ``starts[k]`` to ``starts[k] + 1``.
        log_probs: [K] rollout log-probs (mean over latent dimensions).
        advantage: scalar.
        cond, negative: prompt tensors without batch dimension; shared by the samples of a group.
    """

    uid: str
    j: int
    latents: torch.Tensor
    sigmas: torch.Tensor
    starts: tuple[int, ...]
    log_probs: torch.Tensor
    advantage: float
    cond: Mapping[str, torch.Tensor]
    negative: Mapping[str, torch.Tensor] | None = None


@dataclass(frozen=True, kw_only=True)
class Tile:
    """One forward and backward: C cells.

    Attributes:
        x, x_next: [C, ...latent]; sigma, sigma_next, log_prob_rollout, advantage, weight: [C].
        transition: [C] position k of the cell in its sample, for metrics by transition.
        cond, negative: tensors [C, ...].
    """

    x: torch.Tensor
    x_next: torch.Tensor
    sigma: torch.Tensor
    sigma_next: torch.Tensor
    log_prob_rollout: torch.Tensor
    advantage: torch.Tensor
    weight: torch.Tensor
    transition: torch.Tensor
    cond: dict[str, torch.Tensor]
    negative: dict[str, torch.Tensor] | None


def cells_of_rank(
    samples: int, transitions: int, *, rank: int, ranks: int, max_cells: int, tsp: bool
) -> tuple[list[list[tuple[int, int]]], int]:
    """What a rank does of a fragment: its tiles as lists of (sample, k), one entry for every round of the plan.

    The plan is :mod:`verl_digen.schedule.tsp`'s. All ranks get the same number of tiles; an empty one is idle.

    Returns:
        the tiles, and the number of cells of the largest tile of all ranks.
    """
    plan = (plan_tiles if tsp else plan_without_tsp)(samples, transitions, ranks=ranks, max_cells=max_cells)
    return [list(plan.grid(tile)) for tile in plan.of_rank(rank)], max(t.stop - t.start for t in plan.tiles)


def gather_tile(
    rows: Mapping[int, SampleRow] | Sequence[SampleRow],
    cells: Sequence[tuple[int, int]],
    *,
    device,
    dtype,
    weight: float = 1.0,
) -> Tile:
    """Stack the tensors of ``cells`` (row, k) on ``device``; ``weight`` 0 makes an idle tile (all collectives, no
    gradient). The prompt tensors of a tile whose cells share a prompt are expanded, not copied."""
    starts = [rows[s].starts[k] for s, k in cells]
    samples = [rows[s] for s, _ in cells]

    def stack(values, kind=dtype):
        return torch.stack(list(values)).to(device=device, dtype=kind, non_blocking=True)

    def scalars(values, kind=dtype):
        return torch.tensor(list(values), dtype=kind).to(device, non_blocking=True)

    def conditioning(pick):
        first = pick(samples[0])
        if first is None:
            return None
        if all(pick(r) is first for r in samples):
            return {
                name: value.to(device, non_blocking=True).expand(len(samples), *value.shape)
                for name, value in first.items()
            }
        batch = stack_conditions([pick(r) for r in samples])
        return {name: value.to(device, non_blocking=True) for name, value in batch.items()}

    return Tile(
        x=stack(r.latents[i] for r, i in zip(samples, starts, strict=True)),
        x_next=stack(r.latents[i + 1] for r, i in zip(samples, starts, strict=True)),
        sigma=stack(r.sigmas[i] for r, i in zip(samples, starts, strict=True)),
        sigma_next=stack(r.sigmas[i + 1] for r, i in zip(samples, starts, strict=True)),
        log_prob_rollout=stack(rows[s].log_probs[k] for s, k in cells),
        advantage=scalars(r.advantage for r in samples),
        weight=scalars([weight] * len(cells)),
        transition=scalars((k for _, k in cells), torch.long),
        cond=conditioning(lambda r: r.cond),
        negative=conditioning(lambda r: r.negative),
    )
