"""Losses: value and gradient against scalar float64 references, fragments against the whole, metrics that add up."""

import math
import random
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from verl_digen.diffusion import losses
from verl_digen.diffusion.kernels import noise_scale, transition
from verl_digen.diffusion.losses import (
    KL_FORMS,
    FlowGRPOConfig,
    compute_loss,
    get_loss,
    log_prob_gap,
    merge_metrics,
    register_loss,
    summarise_metrics,
)

CFG = FlowGRPOConfig(clip_low=1e-3, clip_high=2e-3, adv_max=1.5)


def random_cells(seed, count, dtype=torch.float64):
    """Ratios on both sides of the clip range, advantages on both sides of the clamp."""
    g = torch.Generator().manual_seed(seed)
    old = torch.randn(count, generator=g, dtype=torch.float64)
    return {
        "log_prob": (old + 3e-3 * torch.randn(count, generator=g, dtype=torch.float64)).to(dtype),
        "log_prob_old": old.to(dtype),
        "advantage": 1.5 * torch.randn(count, generator=g, dtype=torch.float64).to(dtype),
    }


def reference_cell(log_prob, old, advantage, cfg):
    """Loss of one cell and its derivative with respect to log_prob."""
    a = min(max(advantage, -cfg.adv_max), cfg.adv_max)
    r = math.exp(log_prob - old)
    clipped = min(max(r, 1 - cfg.clip_low), 1 + cfg.clip_high)
    pays = -a * r >= -a * clipped  # inside the range both are the same
    return max(-a * r, -a * clipped), (-a * r if pays else 0.0)


@given(st.integers(0, 2**20), st.integers(1, 12), st.integers(0, 5))
def test_flow_grpo_matches_the_scalar_reference_and_its_gradient(seed, count, more):
    cells = random_cells(seed, count)
    cells["log_prob"].requires_grad_(True)
    loss, _ = compute_loss("flow_grpo", cells, CFG, planned_cells=count + more)
    (grad,) = torch.autograd.grad(loss, cells["log_prob"])
    rows = zip(*(cells[k].tolist() for k in ("log_prob", "log_prob_old", "advantage")), strict=True)
    values = [reference_cell(*row, CFG) for row in rows]
    assert loss.item() == pytest.approx(sum(v for v, _ in values) / (count + more), rel=1e-12, abs=1e-15)
    assert grad.tolist() == pytest.approx([d / (count + more) for _, d in values], rel=1e-12, abs=1e-15)


def policy(weight, x):
    """A velocity with a parameter, so that losses can be differentiated through the kernel."""
    return torch.tanh(x @ weight)


def tile(seed, count, dim=6):
    g = torch.Generator().manual_seed(seed)
    x, noise = (torch.randn(count, dim, generator=g, dtype=torch.float64) for _ in range(2))
    sigma = 0.2 + 0.8 * torch.rand(count, generator=g, dtype=torch.float64)
    weight = 0.3 * torch.randn(dim, dim, generator=g, dtype=torch.float64)
    reference = weight + 0.05 * torch.randn(dim, dim, generator=g, dtype=torch.float64)
    old = weight + 0.02 * torch.randn(dim, dim, generator=g, dtype=torch.float64)
    args = (sigma, sigma * 0.6, 0.7)
    sampled = transition("sde", x, policy(old, x), *args, noise=noise, dtype=torch.float64)
    ref = transition("sde", x, policy(reference, x), *args, x_next=sampled.x_next, dtype=torch.float64)
    fixed = {
        "x": x,
        "x_next": sampled.x_next,
        "args": args,
        "advantage": 2 * torch.randn(count, generator=g, dtype=torch.float64),
        "log_prob_old": sampled.log_prob,
        "mean_ref": ref.mean,
        "v_ref": policy(reference, x),
    }
    return weight, fixed


def cells_of(weight, fixed, rows=slice(None)):
    v = policy(weight, fixed["x"][rows])
    sigma, sigma_next, eta = fixed["args"]
    t = transition(
        "sde",
        fixed["x"][rows],
        v,
        sigma[rows],
        sigma_next[rows],
        eta,
        x_next=fixed["x_next"][rows],
        dtype=torch.float64,
    )
    named = {k: fixed[k][rows] for k in ("advantage", "log_prob_old", "mean_ref", "v_ref")}
    s = noise_scale("sde", t.std, sigma[rows], sigma_next[rows])
    return {"log_prob": t.log_prob, "mean": t.mean, "std": t.std, "s": s, "v": v} | named


@pytest.mark.parametrize("kl_form", KL_FORMS)
@pytest.mark.parametrize("kl_beta", [0.0, 0.3])
def test_gradient_through_kernel_and_kl_matches_finite_differences(kl_beta, kl_form):
    # wide clip range: finite differences do not like the corner
    cfg = FlowGRPOConfig(clip_low=0.5, clip_high=0.5, adv_max=1.0, kl_beta=kl_beta, kl_form=kl_form)
    weight, fixed = tile(0, 5)
    weight.requires_grad_(True)
    assert torch.autograd.gradcheck(
        lambda w: compute_loss("flow_grpo", cells_of(w, fixed), cfg, planned_cells=9)[0], (weight,)
    )


@given(st.integers(0, 2**20), st.integers(2, 14), st.randoms(use_true_random=False), st.booleans())
def test_uneven_fragments_in_any_order_give_the_full_gradient(seed, count, rng: random.Random, anchored):
    cfg = FlowGRPOConfig(clip_low=1e-2, clip_high=1e-2, kl_beta=0.1)
    weight, fixed = tile(seed, count)
    cuts = sorted(rng.sample(range(1, count), rng.randint(1, count - 1)))
    order = list(range(count))
    rng.shuffle(order)
    fragments = [order[a:b] for a, b in zip([0, *cuts], [*cuts, count], strict=True)]

    def gradient(parts):
        w = weight.clone().requires_grad_(True)
        sums = []
        for rows in parts:
            cells = cells_of(w, fixed, rows)
            if anchored:
                cells["log_prob_old"] = None
            loss, metrics = compute_loss("flow_grpo", cells, cfg, planned_cells=count)
            loss.backward()
            sums.append(metrics)
        return w.grad, summarise_metrics(merge_metrics(sums))

    whole, whole_metrics = gradient([list(range(count))])
    pieces, piece_metrics = gradient(fragments)
    torch.testing.assert_close(pieces, whole, rtol=1e-10, atol=1e-13)
    assert piece_metrics == pytest.approx(whole_metrics, rel=1e-9, abs=1e-12)


def test_anchor_is_the_current_forward_and_the_ratio_exactly_1():
    cells = random_cells(3, 7, torch.float32)
    lp = cells["log_prob"].requires_grad_(True)
    for cell in ({"log_prob_old": None}, {}):
        cell |= {"log_prob": lp, "advantage": cells["advantage"]}
        loss, metrics = compute_loss("flow_grpo", cell, FlowGRPOConfig(), planned_cells=7)
        summary = summarise_metrics(metrics)
        assert summary["ratio_mean"] == 1.0 and summary["ratio_max_dev"] == 0.0 and summary["ratio_std"] == 0.0
        assert loss.item() == pytest.approx(-cells["advantage"].clamp(-5, 5).mean().item(), rel=1e-6)
        (grad,) = torch.autograd.grad(loss, lp)
        torch.testing.assert_close(grad, -cells["advantage"].clamp(-5, 5) / 7)


def test_only_the_policy_gets_a_gradient():
    weight, fixed = tile(1, 4)
    for key in ("advantage", "log_prob_old", "mean_ref"):
        fixed[key] = fixed[key].clone().requires_grad_(True)
    weight.requires_grad_(True)
    loss, metrics = compute_loss(
        "flow_grpo", cells_of(weight, fixed), FlowGRPOConfig(clip_low=0.5, clip_high=0.5, kl_beta=1.0), planned_cells=4
    )
    loss.backward()
    assert weight.grad.abs().sum() > 0
    assert all(fixed[key].grad is None for key in ("advantage", "log_prob_old", "mean_ref"))
    assert not any(value.requires_grad for value in metrics.values())


def test_kl_term_value():
    weight, fixed = tile(2, 3)
    cells = cells_of(weight, fixed)
    sigma, sigma_next, _ = fixed["args"]
    expected = dict.fromkeys(KL_FORMS, 0.0)
    for c in range(3):
        square = sum(
            (m - r) ** 2 for m, r in zip(cells["mean"][c].tolist(), cells["mean_ref"][c].tolist(), strict=True)
        )
        transition_kl = square / 6 / (2 * cells["std"][c].item() ** 2)
        expected["transition"] += transition_kl
        # FlowGRPO's code divides by 2 s^2, without the delta that is in std^2 = s^2 delta
        expected["transition_without_delta"] += transition_kl * (sigma[c] - sigma_next[c]).item()
        square = sum((m - r) ** 2 for m, r in zip(cells["v"][c].tolist(), cells["v_ref"][c].tolist(), strict=True))
        expected["velocity"] += square / 6
    without, _ = compute_loss("flow_grpo", cells, FlowGRPOConfig(), planned_cells=10)
    for form, total in expected.items():
        loss, sums = compute_loss("flow_grpo", cells, FlowGRPOConfig(kl_beta=0.5, kl_form=form), planned_cells=10)
        assert (loss - without).item() == pytest.approx(0.5 * total / 10, rel=1e-9)
        assert summarise_metrics(sums)["kl"] == pytest.approx(total / 3, rel=1e-9)


def test_metrics_match_scalar_formulas():
    cells = random_cells(5, 40)
    _, sums = compute_loss("flow_grpo", cells, CFG, planned_cells=40)
    ratios = [math.exp(a - b) for a, b in zip(cells["log_prob"].tolist(), cells["log_prob_old"].tolist(), strict=True)]
    mean = sum(ratios) / 40
    got = summarise_metrics(sums)
    assert got["ratio_mean"] == pytest.approx(mean, rel=1e-12)
    assert got["ratio_std"] == pytest.approx(math.sqrt(sum((r - mean) ** 2 for r in ratios) / 40), rel=1e-8)
    assert got["ratio_max_dev"] == pytest.approx(max(abs(r - 1) for r in ratios), rel=1e-10)
    assert got["clip_high"] == sum(r > 1 + CFG.clip_high for r in ratios) / 40 > 0
    assert got["clip_low"] == sum(r < 1 - CFG.clip_low for r in ratios) / 40 > 0
    assert got["clip_high"] != got["clip_low"]
    assert got["approx_kl"] == pytest.approx(sum(math.log(r) ** 2 for r in ratios) / 80, rel=1e-8)
    assert got["loss"] == got["policy_loss"] and got["cells"] == 40


def test_ratio_std_survives_fp32():
    """Ratios of 1 +- 1e-5: a variance from fp32 sums of r^2 would be 0 or nonsense."""
    old = torch.zeros(2000)
    lp = 1e-5 * torch.randn(2000, generator=torch.Generator().manual_seed(0))
    _, sums = compute_loss(
        "flow_grpo",
        {"log_prob": lp, "log_prob_old": old, "advantage": torch.ones(2000)},
        FlowGRPOConfig(),
        planned_cells=2000,
    )
    assert summarise_metrics(sums)["ratio_std"] == pytest.approx(1e-5, rel=0.05)


def test_log_prob_gap_by_transition():
    step = torch.tensor([0, 2, 2, 0])
    lp, rollout = torch.tensor([1.0, 2.0, 3.0, 4.0]), torch.tensor([1.5, 2.0, 2.0, 4.25])
    parts = [log_prob_gap(lp[rows], rollout[rows], step[rows], 3) for rows in ([0], [1, 2, 3])]
    merged = merge_metrics(parts)
    assert merged["log_prob_gap_sum"].tolist() == [0.75, 0.0, 1.0]
    assert merged["log_prob_gap_max"].tolist() == [0.5, 0.0, 1.0]
    assert merged["log_prob_gap_count"].tolist() == [2, 0, 2]


def test_merging_refuses_what_would_not_add_up():
    with pytest.raises(ValueError, match="kl_sum"):
        merge_metrics([{"count": torch.ones(())}, {"count": torch.ones(()), "kl_sum": torch.ones(())}])
    with pytest.raises(ValueError, match="no metrics"):
        merge_metrics([])


def test_registry(monkeypatch):
    monkeypatch.setattr(losses, "_LOSSES", dict(losses._LOSSES))

    @register_loss("twice", requires=("x0",))
    def twice(cells, cfg):
        return cells["x0"] * cfg.factor, {}

    assert get_loss("twice").requires == ("x0",)
    cfg = SimpleNamespace(factor=2.0, kl_beta=0.0)
    loss, sums = compute_loss("twice", {"x0": torch.tensor([1.0, 2.0])}, cfg, planned_cells=4)
    assert loss.item() == 1.5 and summarise_metrics(sums) == {"cells": 2, "loss": 3.0, "policy_loss": 3.0}
    with pytest.raises(ValueError, match="loss 'twice' needs 'x0' in its cells; present: \\['advantage'\\]"):
        compute_loss("twice", {"advantage": torch.ones(1), "x0": None}, cfg, planned_cells=1)
    with pytest.raises(ValueError, match="'twice' is registered already"):
        register_loss("twice")(twice)
    with pytest.raises(ValueError, match="unknown loss 'thrice'; available: flow_grpo, twice"):
        get_loss("thrice")


@pytest.mark.parametrize("missing", ["log_prob", "advantage", "mean", "mean_ref", "std"])
def test_a_missing_key_is_named(missing):
    weight, fixed = tile(0, 2)
    cells = cells_of(weight, fixed)
    del cells[missing]
    with pytest.raises(ValueError, match=f"'flow_grpo' needs '{missing}'"):
        compute_loss("flow_grpo", cells, FlowGRPOConfig(kl_beta=0.1), planned_cells=2)
    if missing not in ("log_prob", "advantage"):
        compute_loss("flow_grpo", cells, FlowGRPOConfig(), planned_cells=2)


def test_sizes_that_disagree_are_refused():
    cells = random_cells(0, 4)
    for planned in (3, 0):
        with pytest.raises(ValueError, match=f"4 cells in a logical batch planned for {planned}"):
            compute_loss("flow_grpo", cells, CFG, planned_cells=planned)
    cells["advantage"] = cells["advantage"][:3]
    with pytest.raises(ValueError, match="'advantage': 3"):
        compute_loss("flow_grpo", cells, CFG, planned_cells=4)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"clip_low": 0.0}, "clip_low"),
        ({"clip_low": 1.0}, "clip_low"),
        ({"clip_high": -1.0}, "clip_high"),
        ({"clip_high": math.nan}, "clip_high"),
        ({"adv_max": 0.0}, "adv_max"),
        ({"kl_beta": -1.0}, "kl_beta"),
        ({"kl_form": "both"}, "available: transition, transition_without_delta, velocity"),
    ],
)
def test_config_refuses(options, message):
    with pytest.raises(ValueError, match=message):
        FlowGRPOConfig(**options)
