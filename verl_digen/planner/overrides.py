"""A choice of the planner as options of ``main_ppo``."""

from __future__ import annotations

import math

from verl_digen.planner.plan import Choice

PREFIX = "trainer.v1.digen"
ROLLOUT = "actor_rollout_ref.rollout"


def overrides_of(choice: Choice, *, devices_per_node: int) -> list[str]:
    """What to put behind ``main_ppo`` and a recipe to run a choice.

    Args:
        devices_per_node: pools of more devices become nodes of equal parts.

    Raises:
        ValueError: a live run cannot do it; says what to ask the planner instead.
    """
    candidate, schedule = choice.candidate, choice.candidate.schedule
    if candidate.placement in ("zero-copy", "lending"):
        raise ValueError(f"the placement {candidate.placement!r} is simulated only")
    if schedule.policy != "none":
        raise ValueError(f"the TAG policy {schedule.policy!r} is simulated only; plan with --policies none")
    if candidate.width != 1:
        raise ValueError(f"a live replica has one device, the choice gives it {candidate.width}; plan with --widths 1")
    colocated = candidate.placement == "colocated"
    options = [f"{PREFIX}.placement={'colocated' if colocated else 'disaggregated'}"]
    options += _pool("trainer", candidate.pools.trainer.devices, devices_per_node)
    if colocated:
        options += [f"{ROLLOUT}.nnodes=0", f"{PREFIX}.sampling.batch_size={schedule.rollout_batch}"]
    else:
        options += _pool(ROLLOUT, sum(replica.devices for replica in candidate.pools.replicas), devices_per_node)
    options += [f"{PREFIX}.gap.enable={_yes(not schedule.barrier)}"]
    if not schedule.barrier:
        options += [f"{PREFIX}.gap.fragment_size={schedule.rollout_batch}"]
    options += [f"{PREFIX}.tsp.enable={_yes(schedule.tsp)}", f"{PREFIX}.tsp.max_cells={schedule.max_cells}"]
    options += [f"{PREFIX}.tcss.enable={_yes(schedule.max_stale_ratio > 0)}"]
    if schedule.max_stale_ratio:
        options += [f"{PREFIX}.tcss.max_stale_ratio={schedule.max_stale_ratio:g}"]
    return options


def _pool(name: str, devices: int, per_node: int) -> list[str]:
    each = devices if devices <= per_node else math.gcd(devices, per_node)
    return [f"{name}.nnodes={devices // each}", f"{name}.n_gpus_per_node={each}"]


def _yes(value: bool) -> str:
    return str(value).lower()
