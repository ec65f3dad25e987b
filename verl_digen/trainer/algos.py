"""The group advantage and the FlowGRPO loss under veRL's own signatures, for veRL's registries.

Thin adapters over ``verl_digen.diffusion``: veRL hands over tensors [B, K] where a "token" is a recorded
transition (B samples, K transitions) and ``response_mask`` tells which transitions are trained. verl_digen's own
trainer calls the functions of ``diffusion`` itself; these adapters make ``algorithm.adv_estimator=digen_group``
and ``actor.policy_loss.loss_mode=flow_grpo`` valid names wherever veRL looks them up.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from verl_digen.diffusion.advantages import group_advantages
from verl_digen.diffusion.losses import FlowGRPOConfig, get_loss, summarise_metrics

__all__ = ["digen_group_advantage", "flow_grpo_loss"]


def digen_group_advantage(
    token_level_rewards: Tensor, response_mask: Tensor, config: Any = None, index: Any = None, **_: Any
) -> tuple[Tensor, Tensor]:
    """Advantage of a sample in its prompt group, the same for all its trained transitions.

    Args:
        token_level_rewards: [B, K]; a sample's reward is the sum over its row, as in veRL's own estimators.
        response_mask: [B, K], 1 where the transition is trained.
        config: veRL's algorithm section; ``norm_adv_by_std_in_grpo`` false leaves the std out.
        index: B group ids (``uid``).

    Returns:
        advantages and returns, both [B, K], the same tensor of values, as for every outcome reward in veRL.

    Raises:
        ValueError: no ``index``; whatever ``group_advantages`` refuses (a reward that is not finite, wrong lengths).
    """
    if index is None:
        raise ValueError("adv_estimator 'digen_group' needs the group ids ('uid' in the batch); there are none")
    by_std = True if config is None else config.get("norm_adv_by_std_in_grpo", True)
    rewards = token_level_rewards.sum(dim=-1)
    advantages, _metrics = group_advantages(rewards, [str(uid) for uid in index], norm="group" if by_std else "none")
    advantages_bk = advantages[:, None] * response_mask.to(advantages.dtype)
    return advantages_bk, advantages_bk.clone()


def flow_grpo_loss(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "token-mean",
    config: Any = None,
    rollout_is_weights: Tensor | None = None,
) -> tuple[Tensor, dict[str, float]]:
    """``flow_grpo`` on [B, K] tensors, aggregated the way veRL aggregates (``agg_loss``).

    Clip ranges come from the actor section: ``clip_ratio_low``, ``clip_ratio_high`` (or ``clip_ratio`` where they
    are absent). Its default of 0.2 is made for tokens: log-probs here are means over latent elements, use 1e-5...1e-3.

    Args:
        old_log_prob, log_prob, advantages: [B, K].
        response_mask: [B, K], 1 where the transition is trained.
        loss_agg_mode: as in veRL.
        config: veRL's actor config.
        rollout_is_weights: [B, K] factors of each cell's loss, or None.

    Returns:
        scalar loss and metrics (floats).

    Raises:
        ValueError: no config; a mask without a trained cell; ranges that ``FlowGRPOConfig`` refuses.
    """
    from verl.trainer.ppo.core_algos import agg_loss

    if config is None:
        raise ValueError("policy loss 'flow_grpo' needs the actor config for its clip range")
    clip_low = config.clip_ratio if config.clip_ratio_low is None else config.clip_ratio_low
    clip_high = config.clip_ratio if config.clip_ratio_high is None else config.clip_ratio_high
    mask = response_mask.bool()
    if not mask.any():
        raise ValueError(f"policy loss 'flow_grpo' got {tuple(mask.shape)} cells of which none is trained")
    cells = {"log_prob": log_prob[mask], "log_prob_old": old_log_prob[mask], "advantage": advantages[mask]}
    cell_loss, sums = get_loss("flow_grpo").cell_loss(cells, FlowGRPOConfig(clip_low=clip_low, clip_high=clip_high))

    loss_bk = torch.zeros_like(log_prob).masked_scatter(mask, cell_loss)
    if rollout_is_weights is not None:
        loss_bk = loss_bk * rollout_is_weights
    loss = agg_loss(loss_mat=loss_bk, loss_mask=mask, loss_agg_mode=loss_agg_mode, **config.global_batch_info)
    metrics = summarise_metrics({"count": mask.sum(), **sums})
    return loss, {f"actor/{name}": value for name, value in metrics.items()}
