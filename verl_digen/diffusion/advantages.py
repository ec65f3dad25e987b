"""Group-relative advantages, sums of several rewards, and best-of-n selection.

Everything is per prompt group (``uid``). Sums are exactly rounded (``math.fsum`` over float64), so an advantage does
not depend on the order in which samples arrived. A reward that is not finite is an error here, never a value.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

NORMS = ("group", "global", "none")
COMBINE_MODES = ("weighted_sum", "normalised_sum")
ADVANTAGE_EPS = 1e-4
"""Added to the standard deviation that divides an advantage (FlowGRPO's value)."""


def group_advantages(
    rewards: Tensor, uids: Sequence[str], *, norm: str = "group", eps: float = ADVANTAGE_EPS, ddof: int = 1
) -> tuple[Tensor, dict[str, float]]:
    """Advantage of each sample relative to its group (FlowGRPO, arXiv 2505.05470).

    ``group``: (r - group mean) / (group std + eps). ``global``: (r - group mean) / (std of all B rewards + eps).
    ``none``: r - group mean. A group of one, and a group whose rewards are all equal, get exactly 0.

    ``global`` in pieces: accumulate with ``none`` and multiply once by 1 / (reward_std + eps), where reward_std is that
    of the whole logical batch.

    Args:
        rewards: [B].
        uids: B group names.
        norm: one of ``NORMS``.
        eps: added to the std.
        ddof: 1 divides the variance by n - 1 (torch's default), 0 by n.

    Returns:
        advantages [B] in the dtype (fp32 if integer) and on the device of rewards, and metrics: ``reward_mean``,
        ``reward_std`` (of all B rewards with this ddof, 0 for B = 1), ``reward_min``, ``reward_max``,
        ``group_std_mean`` (over groups of two and more), ``zero_std_ratio`` (share of groups that train nothing: all
        equal, or of one), ``num_groups``, ``num_singletons``.

    Raises:
        ValueError: unknown norm, bad ddof or eps, lengths that disagree, no samples, or a reward that is not finite.
    """
    if norm not in NORMS:
        raise ValueError(f"unknown advantage norm {norm!r}; available: {', '.join(NORMS)}")
    if ddof not in (0, 1) or not eps > 0:
        raise ValueError(f"ddof must be 0 or 1 and eps > 0, got ddof {ddof}, eps {eps}")
    values = _finite_values(rewards, uids, "reward")
    groups = _groups(uids)
    batch_mean, batch_std = _mean_std(values, ddof)
    out = [0.0] * len(values)
    stds = []
    flat = 0
    for rows in groups.values():
        members = [values[row] for row in rows]
        mean, std = _mean_std(members, ddof)
        if len(rows) > 1:
            stds.append(std)
        if min(members) == max(members):  # not by std: the rounded mean of equal numbers may differ from them
            flat += 1
            continue
        scale = {"group": std + eps, "global": batch_std + eps, "none": 1.0}[norm]
        for row in rows:
            out[row] = (values[row] - mean) / scale
    metrics = {
        "reward_mean": batch_mean,
        "reward_std": batch_std,
        "reward_min": min(values),
        "reward_max": max(values),
        "group_std_mean": math.fsum(stds) / len(stds) if stds else 0.0,
        "zero_std_ratio": flat / len(groups),
        "num_groups": float(len(groups)),
        "num_singletons": float(sum(len(rows) == 1 for rows in groups.values())),
    }
    return _like(rewards, out), metrics


def combine_rewards(
    named: Mapping[str, Tensor],
    weights: Mapping[str, float],
    mode: str = "weighted_sum",
    uids: Sequence[str] | None = None,
    *,
    eps: float = ADVANTAGE_EPS,
    ddof: int = 1,
) -> Tensor:
    """One number per sample out of several rewards.

    ``weighted_sum``: sum of weight * reward; a reward. ``normalised_sum``: sum of weight * (advantage of that reward in
    its group), so that a reward's scale does not decide (GDPO, arXiv 2601.05242); it has mean 0 in a group already, so
    pass it on to ``group_advantages`` with ``none`` or ``global``.

    Args:
        named: reward name -> [B], all on one device.
        weights: reward name -> weight; exactly the names of ``named``.
        mode: one of ``COMBINE_MODES``.
        uids: B group names.

    Raises:
        ValueError: unknown mode, names or lengths that disagree, a weight or a reward that is not finite.
    """
    if mode not in COMBINE_MODES:
        raise ValueError(f"unknown reward combination {mode!r}; available: {', '.join(COMBINE_MODES)}")
    if not named or set(named) != set(weights):
        raise ValueError(
            f"rewards {sorted(named)} and weights {sorted(weights)} must have the same names, at least one"
        )
    if uids is None:
        raise ValueError("combine_rewards needs the uids of the samples")
    columns = []
    for name in sorted(named):  # sorted: the sum must not depend on the order of a configuration
        if not math.isfinite(weights[name]):
            raise ValueError(f"weight of reward {name!r} is {weights[name]}")
        values = _finite_values(named[name], uids, f"reward {name!r}")
        if mode == "normalised_sum":
            exact = torch.tensor(values, dtype=torch.float64)
            values = group_advantages(exact, uids, eps=eps, ddof=ddof)[0].tolist()
        columns.append([weights[name] * value for value in values])
    return _like(next(iter(named.values())), [math.fsum(row) for row in zip(*columns, strict=True)])


def select_best_of_n(values: Tensor, uids: Sequence[str], k: int) -> Tensor:
    """Keep the k/2 highest and the k/2 lowest samples of each group.

    Ties go by position, so give the samples of a group in the order of j.

    Args:
        values: [B] rewards or advantages.
        uids: B group names.
        k: even, >= 2, at most the size of the smallest group.

    Returns:
        mask [B], bool, on the device of values; exactly k are True in each group.

    Raises:
        ValueError: k is odd, too small, or larger than a group (named); a value that is not finite.
    """
    if k < 2 or k % 2:
        raise ValueError(f"k must be even and >= 2 (half from the top, half from the bottom), got {k}")
    numbers = _finite_values(values, uids, "value")
    keep = [False] * len(numbers)
    for uid, rows in _groups(uids).items():
        if len(rows) < k:
            raise ValueError(f"group {uid!r} has {len(rows)} samples, fewer than k = {k}")
        ranked = sorted(rows, key=lambda row: numbers[row])
        for row in ranked[: k // 2] + ranked[-(k // 2) :]:
            keep[row] = True
    return torch.tensor(keep, dtype=torch.bool, device=values.device)


def _groups(uids: Sequence[str]) -> dict[str, list[int]]:
    """uid -> its positions, in order of appearance."""
    groups: dict[str, list[int]] = {}
    for row, uid in enumerate(uids):
        groups.setdefault(uid, []).append(row)
    return groups


def _finite_values(values: Tensor, uids: Sequence[str], what: str) -> list[float]:
    if values.dim() != 1 or len(values) != len(uids):
        raise ValueError(f"{what}s {tuple(values.shape)} must be [{len(uids)}], one per uid")
    if not len(uids):
        raise ValueError(f"no {what}s given")
    numbers = [float(value) for value in values.detach().tolist()]
    for position, (number, uid) in enumerate(zip(numbers, uids, strict=True)):
        if not math.isfinite(number):
            raise ValueError(f"{what} of group {uid!r} at position {position} of the batch is {number}")
    return numbers


def _mean_std(values: Sequence[float], ddof: int) -> tuple[float, float]:
    mean = math.fsum(values) / len(values)
    if len(values) == 1:
        return mean, 0.0
    return mean, math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (len(values) - ddof))


def _like(template: Tensor, values: Sequence[float]) -> Tensor:
    dtype = template.dtype if template.is_floating_point() else torch.float32
    return torch.tensor(values, dtype=dtype, device=template.device)
