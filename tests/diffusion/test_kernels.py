"""Transition kernels against scalar references written from the formulas, and what must hold to the bit.

Not covered here: devices other than CPU.
"""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from verl_digen.diffusion.kernels import (
    KINDS,
    STOCHASTIC_KINDS,
    check_schedule,
    kl_to_reference,
    row_mean,
    transition,
    velocity_to_reference,
)

ETAS = {"sde": 0.7, "dance": 0.3, "cps": 0.8, "ode": 0.0}


def reference(kind, x, v, sigma, sigma_next, eta, noise=None, x_next=None):
    """One row as lists of floats -> (x', mean, std, log-prob), element by element."""
    delta = sigma - sigma_next
    out, means, terms = [], [], []
    if kind in ("sde", "dance"):
        root = sigma_next if sigma >= 1 else sigma
        s = eta * math.sqrt(sigma / (1 - root)) if kind == "sde" else eta
        std = s * math.sqrt(delta)
    elif kind == "cps":
        s = std = sigma_next * math.sin(eta * math.pi / 2)
    else:
        std = 0.0
    for k in range(len(x)):
        if kind in ("sde", "dance"):
            drift_x = 1 - s * s * delta / (2 * sigma)
            drift_v = (1 + s * s * (1 - sigma) / (2 * sigma)) * delta
            mean = x[k] * drift_x - v[k] * drift_v
        elif kind == "cps":
            x0 = x[k] - sigma * v[k]
            x1 = x[k] + (1 - sigma) * v[k]
            mean = (1 - sigma_next) * x0 + math.sqrt(max(sigma_next**2 - s**2, 0.0)) * x1
        else:
            mean = x[k] - delta * v[k]
        new = mean if kind == "ode" else (mean + std * noise[k] if x_next is None else x_next[k])
        means.append(mean)
        out.append(new)
        if kind == "cps":
            terms.append(-((new - mean) ** 2))
        elif kind != "ode":
            terms.append(-((new - mean) ** 2) / (2 * std**2) - math.log(std) - 0.5 * math.log(2 * math.pi))
    return out, means, std, (math.fsum(terms) / len(terms) if terms else None)


def batch(seed, rows, shape, dtype=torch.float32):
    g = torch.Generator().manual_seed(seed)
    x, v, noise = (torch.randn(rows, *shape, generator=g, dtype=torch.float64).to(dtype) for _ in range(3))
    sigma = (0.05 + 0.94 * torch.rand(rows, generator=g, dtype=torch.float64)).to(dtype)
    sigma[0] = 1.0
    sigma_next = sigma * (0.3 + 0.6 * torch.rand(rows, generator=g, dtype=torch.float64)).to(dtype)
    return x, v, sigma, sigma_next, noise


def fields(t):
    return {"x_next": t.x_next, "mean": t.mean, "std": t.std} | ({} if t.log_prob is None else {"lp": t.log_prob})


@given(
    kind=st.sampled_from(KINDS),
    seed=st.integers(0, 2**20),
    rows=st.integers(1, 5),
    shape=st.sampled_from([(1,), (3,), (2, 3), (1, 2, 5)]),
    eta=st.floats(0.05, 0.99),  # at 1 the reference of cps takes the root of a rounding error
    scored=st.booleans(),
)
def test_matches_the_scalar_reference_in_float64(kind, seed, rows, shape, eta, scored):
    x, v, sigma, sigma_next, noise = batch(seed, rows, shape, torch.float64)
    given_ = {} if kind == "ode" else {"x_next": x - 0.1 * v} if scored else {"noise": noise}
    t = transition(kind, x, v, sigma, sigma_next, eta, dtype=torch.float64, **given_)
    for b in range(rows):
        row = {name: value[b].flatten().tolist() for name, value in given_.items()}
        args = (x[b].flatten().tolist(), v[b].flatten().tolist(), sigma[b].item(), sigma_next[b].item())
        x_next, mean, std, log_prob = reference(kind, *args, eta, **row)
        assert t.x_next[b].flatten().tolist() == pytest.approx(x_next, rel=1e-10, abs=1e-12)
        assert t.mean[b].flatten().tolist() == pytest.approx(mean, rel=1e-10, abs=1e-12)
        assert t.std[b].item() == pytest.approx(std, rel=1e-12)
        if kind != "ode":
            # cancellation near the mean: the square of a residual of 1e-16
            assert t.log_prob[b].item() == pytest.approx(log_prob, rel=1e-9, abs=1e-9)
    assert (t.log_prob is None) == (kind == "ode")


@pytest.mark.parametrize("kind", KINDS)
def test_fp32_is_close_to_the_float64_reference_for_any_input_dtype(kind):
    x, v, sigma, sigma_next, noise = batch(3, 4, (4, 4, 4))
    drawn = {} if kind == "ode" else {"noise": noise}
    wide = transition(kind, x, v.bfloat16(), sigma, sigma_next, ETAS[kind], dtype=torch.float64, **drawn)
    narrow = transition(kind, x, v.bfloat16(), sigma, sigma_next, ETAS[kind], **drawn)
    for name, value in fields(narrow).items():
        assert value.dtype == torch.float32
        torch.testing.assert_close(value.double(), fields(wide)[name], rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("kind", STOCHASTIC_KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_scoring_what_was_drawn_gives_the_same_bits(kind, dtype):
    x, v, sigma, sigma_next, noise = batch(5, 6, (3, 7, 5), dtype)
    drawn = transition(kind, x, v, sigma, sigma_next, ETAS[kind], noise=noise, dtype=dtype)
    scored = transition(kind, x, v, sigma, sigma_next, ETAS[kind], x_next=drawn.x_next, dtype=dtype)
    for name, value in fields(drawn).items():
        assert torch.equal(value, fields(scored)[name]), name
    assert torch.equal(torch.exp(scored.log_prob - drawn.log_prob), torch.ones(6, dtype=dtype))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(5,), (16, 65, 63)])  # large enough for two threads to share a row
def test_a_row_does_not_depend_on_its_batch(kind, shape):
    """Bitwise, in batches of 1, 2, 3 and 9, at any place, strided, with one thread and with two."""
    x, v, sigma, sigma_next, noise = batch(7, 9, shape)

    def run(rows, strided=False):
        args = [value[rows] for value in (x, v, sigma, sigma_next, noise)]
        if strided and len(shape) > 1:
            args[1] = args[1].transpose(1, 2).contiguous().transpose(1, 2)
        drawn = {} if kind == "ode" else {"noise": args[4]}
        return fields(transition(kind, *args[:4], ETAS[kind], **drawn))

    whole = run(list(range(9)))
    threads = torch.get_num_threads()
    try:
        several = [[0], [8], [4, 1], [8, 0, 3], [3, 2, 1, 0, 5, 6, 7, 8, 4]]
        for count, batches in ((1, several), (2, [[row] for row in range(0, 9, 2)])):
            torch.set_num_threads(count)
            for rows in batches:
                for name, value in run(rows, strided=count == 2).items():
                    assert torch.equal(value, whole[name][rows]), (name, rows, count)
    finally:
        torch.set_num_threads(threads)


@given(seed=st.integers(0, 2**20), shape=st.sampled_from([(1,), (2,), (7,), (3, 5), (1023,), (4, 256)]))
def test_row_mean_is_the_mean_and_its_gradient(seed, shape):
    x = torch.randn(3, *shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64, requires_grad=True)
    mean = row_mean(x)
    assert mean.tolist() == pytest.approx([math.fsum(r.flatten().tolist()) / r.numel() for r in x.detach()], abs=1e-14)
    (grad,) = torch.autograd.grad((mean * torch.tensor([1.0, -2.0, 3.0])).sum(), x)
    expected = torch.tensor([1.0, -2.0, 3.0]).double() / math.prod(shape)
    assert torch.allclose(grad.flatten(1), expected[:, None].expand(3, math.prod(shape)))


def test_first_transition_takes_the_second_sigma_under_the_root():
    """At sigma = 1 FlowGRPO's s would be infinite; the schedule's second sigma is sigma_next of that transition."""
    x = torch.zeros(1, 4)
    t = transition("sde", x, x, torch.ones(1), torch.tensor([0.75]), 0.5, noise=x, dtype=torch.float64)
    assert t.std.item() == pytest.approx(0.5 * math.sqrt(1 / 0.25) * math.sqrt(0.25))


def test_dance_is_sde_with_constant_s():
    x, v, sigma, sigma_next, noise = batch(11, 6, (8,), torch.float64)
    sigma[0] = 0.9
    sigma_next[0] = 0.8
    dance = transition("dance", x, v, sigma, sigma_next, 0.3, noise=noise, dtype=torch.float64)
    for b in range(6):
        row = slice(b, b + 1)
        eta = 0.3 / math.sqrt(sigma[b].item() / (1 - sigma[b].item()))
        sde = transition("sde", x[row], v[row], sigma[row], sigma_next[row], eta, noise=noise[row], dtype=torch.float64)
        for name, value in fields(sde).items():
            torch.testing.assert_close(value, fields(dance)[name][row], rtol=1e-12, atol=1e-12)


def test_cps_keeps_the_noise_of_the_next_sigma():
    """From x = (1 - sigma) x0 + sigma x1 with exact v = x1 - x0: the mean keeps (1 - sigma') x0, and the
    noise in it and the noise added make sigma' together."""
    data, noise = torch.zeros(1, 1, dtype=torch.float64), torch.ones(1, 1, dtype=torch.float64)
    sigma, nxt = torch.tensor([0.6]).double(), torch.tensor([0.4]).double()
    for eta in (0.2, 0.9, 1.0):
        t = transition("cps", data * 0.4 + noise * 0.6, noise - data, sigma, nxt, eta, noise=noise, dtype=torch.float64)
        assert t.mean.item() ** 2 + t.std.item() ** 2 == pytest.approx(0.4**2)
        t = transition("cps", noise * 0.4, -noise, sigma, nxt, eta, noise=noise, dtype=torch.float64)
        assert t.mean.item() == pytest.approx(0.6)  # x0 = 1, x1 = 0


@pytest.mark.parametrize("kind", STOCHASTIC_KINDS)
def test_small_eta_tends_to_ode(kind):
    x, v, sigma, sigma_next, noise = batch(13, 3, (6,), torch.float64)
    ode = transition("ode", x, v, sigma, sigma_next, 0.0, dtype=torch.float64)
    t = transition(kind, x, v, sigma, sigma_next, 1e-5, noise=noise, dtype=torch.float64)
    torch.testing.assert_close(t.mean, ode.mean, rtol=0, atol=1e-8)


def test_bf16_storage_moves_the_ratio_and_fp32_storage_does_not():
    """Latents stored in bf16: |r - 1| up to 6e-3 at low sigma, sixty times a clip range of 1e-4. In fp32 exactly 0."""
    sigmas = torch.linspace(1, 0, 51)[:-1]  # 50 steps; the last is not trained
    worst = {}
    for i in range(len(sigmas) - 1):
        g = torch.Generator().manual_seed(i)
        data, noise, eps = (torch.randn(4, 16, 16, 16, generator=g) for _ in range(3))
        x, v = (1 - sigmas[i]) * data + sigmas[i] * noise, noise - data
        args = (sigmas[i].expand(4), sigmas[i + 1].expand(4), 0.7)
        drawn = transition("sde", x, v, *args, noise=eps)
        for name, dtype in (("bf16", torch.bfloat16), ("fp32", torch.float32)):
            again = transition("sde", x.to(dtype), v, *args, x_next=drawn.x_next.to(dtype))
            gap = torch.expm1(again.log_prob - drawn.log_prob).abs().max().item()
            worst.setdefault(name, []).append(gap)
    assert set(worst["fp32"]) == {0.0}
    assert 3e-3 < max(worst["bf16"]) < 9e-3
    assert worst["bf16"].index(max(worst["bf16"])) > 40, "the worst is at low sigma"


@pytest.mark.parametrize("kind", ["sde", "dance"])
def test_expected_log_ratio_is_minus_the_bias(kind):
    """Under the old policy E[lp - lp_old] = -mean(mean - mean_old)^2 / (2 s^2 delta): exact for noise and its mirror"""
    x, v, sigma, sigma_next, noise = batch(17, 5, (32,), torch.float64)
    args = (sigma, sigma_next, ETAS[kind])
    differences = []
    for eps in (noise, -noise):
        old = transition(kind, x, v, *args, noise=eps, dtype=torch.float64)
        new = transition(kind, x, v * 1.01 + 0.02, *args, x_next=old.x_next, dtype=torch.float64)
        differences.append(new.log_prob - old.log_prob)
    bias = kl_to_reference(new.mean, old.mean, old.std)
    assert (bias > 1e-6).all()
    torch.testing.assert_close(sum(differences) / 2, -bias, rtol=1e-8, atol=1e-12)


@pytest.mark.parametrize("kind", STOCHASTIC_KINDS)
def test_gradient_of_the_log_prob_is_that_of_the_score(kind):
    x, v, sigma, sigma_next, noise = batch(19, 3, (2, 3), torch.float64)
    args = (sigma, sigma_next, ETAS[kind])
    drawn = transition(kind, x, v, *args, noise=noise, dtype=torch.float64)
    v.requires_grad_(True)

    def score(velocity):
        return transition(kind, x, velocity, *args, x_next=drawn.x_next, dtype=torch.float64).log_prob

    assert torch.autograd.gradcheck(score, (v,))
    # Drawing under autograd must give the same gradient: x' is a sample, not a function of v.
    again = transition(kind, x, v, *args, noise=noise, dtype=torch.float64)
    assert not again.x_next.requires_grad
    (drawing,) = torch.autograd.grad(again.log_prob.sum(), v)
    (scoring,) = torch.autograd.grad(score(v).sum(), v)
    assert torch.equal(drawing, scoring) and drawing.abs().min() > 0


def test_reference_distances_match_scalar_loops():
    mean, ref = torch.tensor([[1.0, 2.0], [0.5, -1.0]]), torch.tensor([[0.0, 2.5], [0.5, 1.0]])
    kl = kl_to_reference(mean, ref, torch.tensor([0.5, 2.0]))
    assert kl.tolist() == pytest.approx([(1 + 0.25) / 2 / (2 * 0.25), (0 + 4) / 2 / (2 * 4)])
    assert velocity_to_reference(mean.bfloat16(), ref.bfloat16()).tolist() == pytest.approx([0.625, 2.0])
    with pytest.raises(ValueError, match=r"std must be \[2\]"):
        kl_to_reference(mean, ref, torch.ones(3))


X = torch.zeros(2, 3)
S, N = torch.tensor([0.8, 0.6]), torch.tensor([0.4, 0.2])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kind": "flow"}, "unknown transition kind 'flow'; available: sde, dance, cps, ode"),
        ({"eta": 0.0}, "eta > 0"),
        ({"eta": -0.1}, "eta > 0"),
        ({"eta": math.nan}, "eta > 0"),
        ({"kind": "cps", "eta": 1.2}, r"\(0, 1\]"),
        ({"noise": None}, "exactly one"),
        ({"x_next": X}, "exactly one"),
        ({"kind": "ode"}, "neither"),
        ({"kind": "ode", "noise": None, "x_next": X}, "neither"),
        ({"v": torch.zeros(2, 4)}, r"\(2, 3\) and v \(2, 4\)"),
        ({"noise": torch.zeros(1, 3)}, "noise"),
        ({"noise": None, "x_next": torch.zeros(1, 3)}, "x_next"),
        ({"sigma": torch.tensor(0.8)}, r"sigma must be \[2\]"),
        ({"sigma_next": torch.zeros(3)}, r"sigma_next must be \[2\]"),
    ],
)
def test_transition_refuses(change, message):
    args = {"kind": "sde", "x": X, "v": X, "sigma": S, "sigma_next": N, "eta": 0.7, "noise": X} | change
    with pytest.raises(ValueError, match=message):
        transition(**args)


@pytest.mark.parametrize(
    ("args", "kwargs", "message"),
    [
        (("sqrt", [1, 0], 1), {}, "unknown transition kind"),
        (("sde", [1, 0.5, 0], 0.0), {}, "eta > 0"),
        (("sde", [1.0], 0.7), {}, "at least 2 sigmas"),
        (("sde", [1.2, 0.5, 0], 0.7), {}, r"sigma\[0\] = 1.2 is outside"),
        (("ode", [1.0, math.nan, 0], 0.7), {}, r"sigma\[1\] = nan"),
        (("ode", [1.0, -0.1], 0.7), {}, r"sigma\[1\] = -0.1"),
        (("ode", [1.0, 0.5, 0.5, 0.0], 0.0), {}, r"sigma\[1\] = 0.5, sigma\[2\] = 0.5"),
        (("sde", torch.tensor([1, 0.5, 0]), 0.7), {"trained_steps": [1]}, "step 1 of 2 ends at sigma 0"),
        (("dance", [1, 0.5, 0], 0.7), {"sde_steps": [0, 1]}, "step 1 of 2 ends at sigma 0"),
        (("cps", [1, 0.5, 0], 0.7), {"trained_steps": [1]}, "no noise and no gradient"),
        (("cps", [1, 0.5, 0], 0.7), {"sde_steps": [2]}, "step 2 is outside the 2 steps"),
    ],
)
def test_check_schedule_refuses(args, kwargs, message):
    with pytest.raises(ValueError, match=message):
        check_schedule(*args, **kwargs)


def test_check_schedule_accepts_what_is_sound():
    check_schedule("sde", torch.linspace(1, 0, 6), 0.7, sde_steps=range(4), trained_steps=[0, 3])
    check_schedule("cps", [1.0, 0.5, 0.0], 1.0, sde_steps=[0, 1], trained_steps=[0])
    check_schedule("sde", [1.0, 0.5, 0.02], 0.7, trained_steps=[0, 1])  # a schedule that does not end at 0
    check_schedule("ode", [1.0, 0.0], 0.0)
