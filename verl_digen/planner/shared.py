"""Placements beside a split: all devices generate and train in turn, or the Trainer lends itself at the end of a step.

- colocated: replicas and Trainer have a copy of the weights each and take turns, with the switch cost of the profile;
- zero-copy: the Trainer's own module generates, so nothing is published and the weights are there once;
- lending: separate pools and whole batches; while the Trainer has nothing to train, it generates (as veRL's trainer
  devices lent to the rollout at the boundary of a step).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import replace

from verl_digen.planner.candidates import Candidate, Search, replicas_of
from verl_digen.planner.catalog import Case, Testbed
from verl_digen.planner.plan import Choice, play
from verl_digen.schedule.profile import Profile
from verl_digen.schedule.tsp import cells_that_fit
from verl_digen.schedule.work import Pools, Schedule, TrainerPool


def plan_colocated(case: Case, testbed: Testbed, search: Search | None = None, *, zero_copy: bool = False) -> Choice:
    """The best colocated placement of all devices.

    The group with the slowest network and the slowest device set the pace of training.

    Args:
        zero_copy: the Trainer's module generates, one rank being one replica.

    Raises:
        ValueError: it does not fit into memory.
    """
    found = _colocated(case, testbed, search or Search(), zero_copy)
    if found is None:
        memory, ranks = case.memory, testbed.devices
        raise ValueError(
            f"planner: {case.workload.name} does not fit {'zero-copy ' if zero_copy else ''}colocated on "
            f"{testbed.name}: a rank takes {memory.trainer_need(ranks, 0):.1f} GiB for weights, gradients, optimizer "
            f"and {memory.cell_gib:g} GiB for a cell, a replica of one device {memory.rollout_need(1, 1):.1f} GiB, but "
            f"{_usable(case, testbed):.1f} GiB are usable per device"
        )
    return found


def _usable(case: Case, testbed: Testbed) -> float:
    """GiB of the smallest device."""
    return min(group.memory_gib for group in testbed.groups) * case.memory.usable


def _colocated(case: Case, testbed: Testbed, search: Search, zero_copy: bool) -> Choice | None:
    """The best replica width and rollout batch; None when none fits into memory."""
    memory, ranks = case.memory, testbed.devices
    slowest = min(testbed.groups, key=lambda group: group.bandwidth_gib_s / group.speed)
    usable, own = _usable(case, testbed), memory.trainer_need(ranks, 0)
    cells = min(cells_that_fit(usable - own, memory.cell_gib), case.workload.samples)
    trainer = TrainerPool(ranks=ranks, speed=min(group.speed for group in testbed.groups))
    profile = case.profile(slowest, ranks)
    used = tuple((group.name, group.count) for group in testbed.groups)
    found = []
    for width, batch in itertools.product((1,) if zero_copy else search.widths, search.rollout_batches):
        need = own + batch * memory.rollout_sample_gib if zero_copy else memory.rollout_need(width, batch)
        whole = all(group.count % width == 0 for group in testbed.groups)
        if cells < 1 or not whole or need > usable:
            continue
        replicas = replicas_of(testbed, [(group, group.count) for group in testbed.groups], width)
        candidate = Candidate(
            Pools(replicas=replicas, trainer=trainer, reward_slots=case.reward_slots, colocated=True),
            own_module(profile) if zero_copy else profile,
            Schedule(
                max_cells=cells,
                rollout_batch=batch,
                barrier=True,
                recompute_old_log_probs=search.recompute_old_log_probs,
            ),
            used,
            slowest.name,
            width,
            placement="zero-copy" if zero_copy else "colocated",
        )
        found.append(Choice(candidate, play(case, candidate, search.trial_steps)))
    return min(found, key=lambda choice: choice.simulation.makespan_s, default=None)


def own_module(profile: Profile) -> Profile:
    """Costs when the training module generates: the helper's, without a publish; switching in and out costs the
    helper's switch."""
    given = profile.helper_denoise_s > 0
    return replace(
        profile,
        denoise_s=profile.helper_denoise_s if given else profile.denoise_s,
        denoise_fixed_s=profile.helper_fixed_s if given else profile.denoise_fixed_s,
        publish_s=0.0,
        publish_block_s=0.0,
        phase_switch_s=profile.helper_switch_s / 2,
    )


def plan_lending(case: Case, choices: Iterable[Choice], search: Search | None = None) -> Choice:
    """The best of the splits of some choices when whole batches are trained and the idle Trainer is lent.

    Its helper always takes a round (``greedy``) at the switch cost of the profile.
    """
    search = search or Search()
    rows = []
    for choice in choices:
        like = choice.candidate.schedule
        schedule = Schedule(
            fragment_size=case.workload.samples_per_group,
            max_cells=like.max_cells,
            tsp=like.tsp,
            policy="greedy",
            rollout_batch=like.rollout_batch,
            barrier=True,
            recompute_old_log_probs=like.recompute_old_log_probs,
        )
        candidate = replace(choice.candidate, schedule=schedule, placement="lending")
        rows.append(Choice(candidate, play(case, candidate, search.trial_steps)))
    return min(rows, key=lambda row: row.simulation.makespan_s)


def plan_shared(case: Case, testbed: Testbed, choices: Iterable[Choice], search: Search | None = None) -> list[Choice]:
    """Rows of this module that fit into memory, fastest first."""
    colocated = (_colocated(case, testbed, search or Search(), zero_copy) for zero_copy in (False, True))
    rows = [plan_lending(case, choices, search), *(row for row in colocated if row is not None)]
    return sorted(rows, key=lambda row: row.simulation.makespan_s)
