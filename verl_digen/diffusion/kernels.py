"""Transition kernels: one function draws ``x'`` while sampling and scores it while training.

Conventions: sigma runs 1 (noise) -> 0 (data); ``v`` is the model's velocity, noise - data; ``delta = sigma - sigma' >
0``. ``D`` is the number of latent elements of one row; a log-prob is the **mean** over those ``D`` elements, as in
every public implementation, so ratios stay close to 1 and clip ranges are 1e-5...1e-3. They do not carry over between
kinds: ``cps`` drops the factor ``1 / (2 s^2)`` and the constants.

Sources: ``sde`` FlowGRPO arXiv 2505.05470, ``dance`` DanceGRPO arXiv 2505.07818, ``cps`` Flow-CPS arXiv 2509.05952.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

KINDS = ("sde", "dance", "cps", "ode")
STOCHASTIC_KINDS = ("sde", "dance", "cps")

_HALF_LOG_2PI = 0.5 * math.log(2.0 * math.pi)


@dataclass(frozen=True)
class Transition:
    """One denoising transition of B rows, all of it in the arithmetic dtype.

    Attributes:
        x_next: [B, ...], the drawn or the given next latent; never carries a gradient for stochastic kinds.
        mean: [B, ...], mean of the transition; carries the gradient of ``v``.
        std: [B], standard deviation of one element: s*sqrt(delta) for ``sde`` and ``dance``, s for ``cps``, 0 for
        ``ode``. log_prob: [B], mean over the latent elements; None for ``ode``.
    """

    x_next: Tensor
    mean: Tensor
    std: Tensor
    log_prob: Tensor | None


class _RowMean(torch.autograd.Function):
    """Mean over all but the first dimension by halving.

    ``Tensor.mean`` splits its work by batch size, thread count and device, so the last bit of a row depends on the rows
    beside it. Halving uses element-wise additions only: the same bits for a row in any batch, on any device.
    """

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        ctx.shape = x.shape
        acc = x.flatten(1)
        count = acc.shape[1]
        while acc.shape[1] > 1:
            half, odd = divmod(acc.shape[1], 2)
            total = acc[:, :half] + acc[:, half : 2 * half]
            acc = torch.cat([total, acc[:, 2 * half :]], dim=1) if odd else total
        return acc[:, 0] / count

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        count = math.prod(ctx.shape[1:])
        return _per_row(grad / count, ctx.shape).expand(ctx.shape)


def row_mean(x: Tensor) -> Tensor:
    """Mean of each row. x: [B, ...] with at least one element per row -> [B]; bits independent of the batch."""
    if x.dim() < 2 or x.shape[1:].numel() == 0:
        raise ValueError(f"row_mean needs [B, ...] with at least one element per row, got shape {tuple(x.shape)}")
    return _RowMean.apply(x)


def transition(
    kind: str,
    x: Tensor,
    v: Tensor,
    sigma: Tensor,
    sigma_next: Tensor,
    eta: float,
    *,
    noise: Tensor | None = None,
    x_next: Tensor | None = None,
    dtype: torch.dtype = torch.float32,
) -> Transition:
    """Move rows from sigma to sigma_next: draw the next latent from ``noise``, or score a given ``x_next``.

    Every row is a cell of its own: sigmas may differ from row to row, and no row's result depends on the others, to the
    bit. Scoring the ``x_next`` that was drawn with the same inputs gives the same log-prob to the bit, because drawing
    scores what it has drawn.

    Where sigma is 1, FlowGRPO's s = eta*sqrt(sigma / (1 - sigma)) is infinite and the schedule's second sigma stands in
    for sigma under the root. The second sigma *is* ``sigma_next`` of the first transition, so the kernel needs no
    schedule.

    Values of the sigmas are not looked at here (that would wait for the device); call ``check_schedule`` once before.

    Args:
        kind: one of ``KINDS``.
        x, v: [B, ...], latent and velocity, any floating dtype.
        sigma, sigma_next: [B], on the device of x.
        eta: noise level; > 0 for stochastic kinds, at most 1 for ``cps``; not used by ``ode``.
        noise: [B, ...] standard normal; draws x' = mean + std * noise.
        x_next: [B, ...] a latent to score. Exactly one of noise and x_next for stochastic kinds, neither for ``ode``.
        dtype: arithmetic dtype.

    Raises:
        ValueError: unknown kind, a bad eta, the wrong choice of noise and x_next, shapes that disagree.
    """
    _check_kind_and_eta(kind, eta)
    _check_inputs(kind, x, v, sigma, sigma_next, noise, x_next)
    x, v = x.to(dtype), v.to(dtype)
    # cells broadcast over the latent dimensions
    sig, nxt = _per_row(sigma.to(dtype), x.shape), _per_row(sigma_next.to(dtype), x.shape)
    if kind == "ode":
        mean = x - (sig - nxt) * v
        return Transition(mean, mean, torch.zeros_like(sigma, dtype=dtype), None)

    mean, std = _cps_moments(x, v, sig, nxt, eta) if kind == "cps" else _sde_moments(kind, x, v, sig, nxt, eta)
    # Detached: the policy gradient is that of the score of a fixed x', never of the draw.
    drawn = (mean + std * noise.to(dtype) if x_next is None else x_next.to(dtype)).detach()
    std = std.reshape(-1)
    square = row_mean((drawn - mean) ** 2)
    log_prob = -square if kind == "cps" else -square / (2 * std**2) - torch.log(std) - _HALF_LOG_2PI
    return Transition(drawn, mean, std, log_prob)


def _sde_moments(kind: str, x: Tensor, v: Tensor, sig: Tensor, nxt: Tensor, eta: float) -> tuple[Tensor, Tensor]:
    """Mean [B, ...] and std [B, 1, ...] of ``sde`` and ``dance``."""
    delta = sig - nxt
    if kind == "dance":
        s = torch.full_like(sig, eta)
    else:
        s = eta * torch.sqrt(sig / (1 - torch.where(sig >= 1, nxt, sig)))
    half = s**2 * delta / (2 * sig)
    mean = x * (1 - half) - v * (delta + half * (1 - sig))
    return mean, s * torch.sqrt(delta)


def _cps_moments(x: Tensor, v: Tensor, sig: Tensor, nxt: Tensor, eta: float) -> tuple[Tensor, Tensor]:
    """Mean [B, ...] and std [B, 1, ...] of ``cps``; the noise it adds keeps the total noise at sigma'."""
    # sqrt(sigma'^2 - s^2) = sigma' cos(eta pi / 2): no root of a rounded negative number at eta = 1.
    angle = 0.5 * math.pi * eta
    data, noise = x - sig * v, x + (1 - sig) * v
    return (1 - nxt) * data + nxt * math.cos(angle) * noise, nxt * math.sin(angle)


def kl_to_reference(mean: Tensor, mean_ref: Tensor, std: Tensor) -> Tensor:
    """KL of two transitions with the same std, per cell and per latent element (FlowGRPO, arXiv 2505.05470).

    mean((mean - mean_ref)^2) / (2 std^2) with std = s*sqrt(delta), so delta is in it.

    Args:
        mean, mean_ref: [B, ...] transition means of policy and reference.
        std: [B] as in ``Transition.std``; > 0 (``check_schedule`` refuses a trained transition without noise).

    Returns:
        [B], in the dtype of mean.
    """
    _check_same("mean", mean, "mean_ref", mean_ref)
    _check_cells("std", std, mean)
    return row_mean((mean - mean_ref) ** 2) / (2 * std**2)


def noise_scale(kind: str, std: Tensor, sigma: Tensor, sigma_next: Tensor) -> Tensor:
    """The kernel's s out of the std of its transitions: std / sqrt(delta) for ``sde`` and ``dance``, std for ``cps``.

    All [B].
    """
    return std if kind == "cps" else std / (sigma - sigma_next).to(std.dtype).sqrt()


def velocity_to_reference(v: Tensor, v_ref: Tensor, *, dtype: torch.dtype = torch.float32) -> Tensor:
    """``kl_to_reference`` without the kernel's weights: mean((v - v_ref)^2). v, v_ref: [B, ...] -> [B]."""
    _check_same("v", v, "v_ref", v_ref)
    return row_mean((v.to(dtype) - v_ref.to(dtype)) ** 2)


def check_schedule(
    kind: str,
    sigmas: Tensor | Sequence[float],
    eta: float,
    *,
    sde_steps: Iterable[int] = (),
    trained_steps: Iterable[int] = (),
) -> None:
    """Refuse, before anything runs, a schedule on which the kernel would give infinities or train nothing.

    Args:
        kind: kind of the stochastic transitions, or ``ode``.
        sigmas: [T + 1], strictly decreasing, inside [0, 1].
        eta: noise level.
        sde_steps, trained_steps: indices of transitions that are drawn with noise, and of those that are trained.

    Raises:
        ValueError: with the numbers that are wrong.
    """
    _check_kind_and_eta(kind, eta)
    values = [float(s) for s in (sigmas.tolist() if isinstance(sigmas, Tensor) else sigmas)]
    if len(values) < 2:
        raise ValueError(f"a schedule needs at least 2 sigmas (1 step), got {len(values)}")
    for i, s in enumerate(values):
        if not 0.0 <= s <= 1.0:  # also catches nan
            raise ValueError(f"sigma[{i}] = {s} is outside [0, 1]")
    for i, (s, nxt) in enumerate(zip(values, values[1:], strict=False)):
        if nxt >= s:
            raise ValueError(f"sigmas must fall strictly: sigma[{i}] = {s}, sigma[{i + 1}] = {nxt}")
    drawn, trained = set(sde_steps), set(trained_steps)
    steps = len(values) - 1
    for i in sorted(drawn | trained):
        if not 0 <= i < steps:
            raise ValueError(f"step {i} is outside the {steps} steps 0...{steps - 1} of the schedule")
        if values[i + 1] > 0.0:
            continue
        if kind in ("sde", "dance"):
            raise ValueError(f"{kind}: step {i} of {steps} ends at sigma 0; it is never drawn with noise or trained")
        if i in trained:
            raise ValueError(f"{kind}: step {i} of {steps} ends at sigma 0, where it has no noise and no gradient")


def check_kind(kind: str) -> None:
    """Raise ValueError for a kind that is not in ``KINDS``."""
    if kind not in KINDS:
        raise ValueError(f"unknown transition kind {kind!r}; available: {', '.join(KINDS)}")


def _check_kind_and_eta(kind: str, eta: float) -> None:
    check_kind(kind)
    if kind == "ode":
        return
    if not (math.isfinite(eta) and eta > 0):
        raise ValueError(f"{kind} needs a noise level eta > 0 for its log-probs, got {eta}; use kind 'ode' for none")
    if kind == "cps" and eta > 1:
        raise ValueError(f"cps needs eta in (0, 1] (the noise is sigma' sin(eta pi/2)), got {eta}")


def _check_inputs(kind, x, v, sigma, sigma_next, noise, x_next) -> None:
    if kind == "ode" and (noise is not None or x_next is not None):
        raise ValueError("ode draws nothing and has no log-prob: pass neither noise nor x_next")
    if kind != "ode" and (noise is None) == (x_next is None):
        raise ValueError(f"{kind} needs exactly one of noise (to draw) and x_next (to score)")
    _check_same("x", x, "v", v)
    _check_cells("sigma", sigma, x)
    _check_cells("sigma_next", sigma_next, x)
    if noise is not None:
        _check_same("x", x, "noise", noise)
    if x_next is not None:
        _check_same("x", x, "x_next", x_next)


def _check_same(name: str, a: Tensor, other: str, b: Tensor) -> None:
    if a.shape != b.shape:
        raise ValueError(f"{name} {tuple(a.shape)} and {other} {tuple(b.shape)} must have the same shape")


def _check_cells(name: str, cells: Tensor, rows: Tensor) -> None:
    if cells.shape != rows.shape[:1]:
        raise ValueError(
            f"{name} must be [{rows.shape[0]}] (one per row of {tuple(rows.shape)}), got {tuple(cells.shape)}"
        )


def _per_row(cells: Tensor, shape: torch.Size) -> Tensor:
    """[B] -> [B, 1, ...] with as many dimensions as shape."""
    return cells.reshape(-1, *([1] * (len(shape) - 1)))
