"""The adapters that put the group advantage and the FlowGRPO loss into veRL's registries.

Formulas are written out here; the functions of ``diffusion`` themselves are tested in tests/diffusion.
"""

from __future__ import annotations

import inspect
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from verl.trainer.ppo import core_algos

from verl_digen.trainer.algos import digen_group_advantage, flow_grpo_loss

UIDS = np.array(["a", "a", "b", "a", "b", "a"], dtype=object)
REWARDS = torch.tensor([0.0, 1.0, 5.0, 2.0, 5.0, 3.0])


def token_level(rewards: torch.Tensor, transitions: int) -> torch.Tensor:
    """veRL puts an outcome reward on the last token."""
    out = torch.zeros(len(rewards), transitions)
    out[:, -1] = rewards
    return out


def actor(low: float | None, high: float | None, **info) -> SimpleNamespace:
    return SimpleNamespace(clip_ratio=0.1, clip_ratio_low=low, clip_ratio_high=high, global_batch_info=info)


def test_signatures_take_what_veRL_passes():
    theirs = inspect.signature(core_algos.compute_policy_loss_vanilla).parameters
    assert list(inspect.signature(flow_grpo_loss).parameters) == list(theirs)
    assert core_algos.get_adv_estimator_fn("digen_group") is digen_group_advantage
    assert core_algos.get_policy_loss_fn("flow_grpo") is flow_grpo_loss


def test_advantage_is_the_groups_and_the_same_for_all_trained_transitions():
    mask = torch.ones(6, 4)
    mask[0, :2] = 0
    config = {"norm_adv_by_std_in_grpo": True}
    advantages, returns = digen_group_advantage(
        token_level_rewards=token_level(REWARDS, 4), response_mask=mask, config=config, index=UIDS
    )
    group = torch.tensor([0.0, 1.0, 2.0, 3.0], dtype=torch.float64)
    expected = ((group - group.mean()) / (group.std() + 1e-4)).float()
    per_sample = torch.tensor([expected[0], expected[1], 0.0, expected[2], 0.0, expected[3]])
    torch.testing.assert_close(advantages, per_sample[:, None] * mask)
    assert torch.equal(advantages, returns) and advantages.data_ptr() != returns.data_ptr()
    assert advantages.abs().max() == pytest.approx(1.162, abs=1e-3)


def test_advantage_without_std():
    advantages, _ = digen_group_advantage(
        token_level(REWARDS, 2), torch.ones(6, 2), config={"norm_adv_by_std_in_grpo": False}, index=UIDS
    )
    torch.testing.assert_close(advantages[:, 0], torch.tensor([-1.5, -0.5, 0.0, 0.5, 0.0, 1.5]))


def test_advantage_refuses_what_it_cannot_group():
    with pytest.raises(ValueError, match="uid"):
        digen_group_advantage(token_level(REWARDS, 2), torch.ones(6, 2))
    with pytest.raises(ValueError, match="nan"):
        digen_group_advantage(token_level(REWARDS * float("nan"), 2), torch.ones(6, 2), index=UIDS)


@pytest.fixture
def cells():
    generator = torch.Generator().manual_seed(0)
    old = torch.randn(3, 4, generator=generator, dtype=torch.float64)
    new = (old + 1e-3 * torch.randn(3, 4, generator=generator, dtype=torch.float64)).requires_grad_()
    advantages = torch.randn(3, 1, generator=generator, dtype=torch.float64).expand(3, 4).clone()
    mask = torch.tensor([[1, 1, 1, 1], [0, 1, 1, 0], [1, 0, 0, 1]])
    return old, new, advantages, mask


def reference(old, new, advantages, mask, low, high):
    ratio = torch.exp(new - old)
    loss = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(1 - low, 1 + high))
    return (loss * mask).sum() / mask.sum()


def test_loss_and_gradient_are_flow_grpos_over_the_trained_cells(cells):
    old, new, advantages, mask = cells
    loss, metrics = flow_grpo_loss(old, new, advantages, mask, "token-mean", actor(5e-4, 1e-3))
    expected = reference(old, new, advantages, mask, 5e-4, 1e-3)
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0)
    (gradient,) = torch.autograd.grad(loss, new)
    (expected_gradient,) = torch.autograd.grad(expected, new)
    torch.testing.assert_close(gradient, expected_gradient, rtol=1e-12, atol=0)
    assert torch.equal(gradient[mask == 0], torch.zeros(4, dtype=torch.float64))
    outside = ((torch.exp(new - old) > 1 + 1e-3) & (mask == 1)).double().sum() / mask.sum()
    assert metrics["actor/clip_high"] == pytest.approx(float(outside))
    assert all(type(value) is float for value in metrics.values()) and metrics["actor/cells"] == 8


def test_clip_ratio_is_the_default_of_both_ranges(cells):
    old, new, advantages, mask = cells
    loss, _ = flow_grpo_loss(old, new, advantages, mask, "token-mean", actor(None, None))
    torch.testing.assert_close(loss, reference(old, new, advantages, mask, 0.1, 0.1), rtol=1e-12, atol=0)


def test_aggregation_is_veRLs_over_the_global_batch(cells):
    old, new, advantages, mask = cells
    local, _ = flow_grpo_loss(old, new, advantages, mask, "token-mean", actor(1e-4, 1e-4))
    shared = actor(1e-4, 1e-4, dp_size=2, batch_num_tokens=32)
    loss, _ = flow_grpo_loss(old, new, advantages, mask, "token-mean", shared)
    torch.testing.assert_close(loss, local * 8 / 32 * 2, rtol=1e-12, atol=0)
    weights = torch.full_like(old, 0.5)
    halved, _ = flow_grpo_loss(old, new, advantages, mask, "token-mean", actor(1e-4, 1e-4), weights)
    torch.testing.assert_close(halved, 0.5 * local, rtol=1e-12, atol=0)


def test_loss_refuses_no_config_and_no_cells(cells):
    old, new, advantages, mask = cells
    with pytest.raises(ValueError, match="actor config"):
        flow_grpo_loss(old, new, advantages, mask)
    with pytest.raises(ValueError, match="none is trained"):
        flow_grpo_loss(old, new, advantages, 0 * mask, "token-mean", actor(1e-4, 1e-4))
