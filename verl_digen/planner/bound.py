"""A time per step that no schedule on the given pools can beat.

Notation: W Generator work of a step (seconds of a replica of speed 1), S summed speed of the replicas,
R Trainer time, q the helper's rate (Generator work done per second of all its ranks), w publish time.

- generation: W/S without a helper; training: R;
- with a helper the Trainer's spare time also generates: W ≤ S·T + q·(T − R), so T ≥ (W + q·R)/(S + q);
- closing chain: samples that must be generated inside the step leave no time after the last one for less than
  its scoring, the training of its whole group, the commit and (before replicas may go on) the publish;
- opening chain, on-policy: no training before a first group is generated and scored.
With TCSS only the groups above ⌊ρ·P⌋ must be generated inside the step, and the opening chain falls away.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from verl_digen.schedule.profile import Profile
from verl_digen.schedule.work import Pools, Schedule, Workload


@dataclass(frozen=True, slots=True)
class Bound:
    """Lower bounds of the mean time of a step, seconds; :attr:`seconds` is the one that counts."""

    generation_s: float
    training_s: float
    work_s: float
    closing_chain_s: float
    opening_chain_s: float

    @property
    def seconds(self) -> float:
        return max(self.generation_s, self.training_s, self.work_s, self.closing_chain_s, self.opening_chain_s)

    @property
    def binding(self) -> str:
        """Name of the term that is largest."""
        terms = {
            "training": self.training_s,
            "generation": self.generation_s,
            "work": self.work_s,
            "closing chain": self.closing_chain_s,
            "opening chain": self.opening_chain_s,
        }
        return max(terms, key=terms.__getitem__)


@dataclass(frozen=True, slots=True)
class Loads:
    """Duration factors of the samples that were really generated: mean, smallest and largest."""

    mean: float = 1.0
    least: float = 1.0
    most: float = 1.0


def _training(workload: Workload, pools: Pools, profile: Profile, schedule: Schedule, samples: int) -> float:
    """Trainer time of some samples if every tile were full and every rank busy."""
    share = samples * workload.trained_transitions / pools.trainer.ranks
    tiles = share / schedule.max_cells
    seconds = share * profile.train_cell_s + tiles * profile.tile_fixed_s
    if schedule.recompute_old_log_probs:
        seconds += share * profile.logprob_cell_s + tiles * profile.logprob_fixed_s
    return seconds / pools.trainer.speed


def lower_bound(
    workload: Workload, pools: Pools, profile: Profile, schedule: Schedule, loads: Loads | None = None
) -> Bound:
    """The bound of a placement and a schedule; fragment size and the decisions of TAG do not enter.

    Args:
        loads: how long the samples really take relative to the profile.
    """
    loads = loads or Loads()
    steps = workload.denoise_steps
    fixed = profile.denoise_fixed_s / schedule.rollout_batch

    def replica_work(load: float) -> float:
        return steps * (fixed + profile.denoise_s * load) + profile.decode_s * load

    speed = pools.generator_speed
    work = workload.samples * replica_work(loads.mean)
    commits = workload.logical_batches * profile.commit_s
    training = _training(workload, pools, profile, schedule, workload.samples) + commits
    group = _training(workload, pools, profile, schedule, workload.samples_per_group) + profile.commit_s
    if pools.colocated:
        both = work / speed + profile.score_s + training + profile.publish_s + 2 * profile.phase_switch_s
        return Bound(work / speed, training, both, both, both)

    training += profile.publish_block_s
    helping = schedule.policy != "none" and not (schedule.policy == "fixed" and schedule.fixed_k == 0)
    rate = _helper_rate(workload, pools, profile, loads, replica_work) if helping else 0.0
    fastest = max(replica.speed for replica in pools.replicas)
    sample = replica_work(loads.least) / fastest
    if helping:
        sample = min(sample, replica_work(loads.least) * pools.trainer.ranks / rate)
    first_publish = 0.0 if helping else profile.publish_s
    stale = math.floor(schedule.max_stale_ratio * workload.groups + 1e-9)
    fresh = work * (workload.groups - stale) / workload.groups if loads.most == loads.least else 0.0
    if stale == 0:
        fresh = work
    closing = 0.0
    if fresh:
        after = profile.score_s + group
        busy = training + profile.score_s
        closing = (fresh + speed * (after + profile.publish_s) + rate * busy) / (speed + rate)
        if not helping:
            closing = max(closing, first_publish + sample + after)
    opening = 0.0
    if stale == 0:
        first_group = workload.samples_per_group * replica_work(loads.least) / (speed + rate)
        opening = first_publish + max(sample, first_group) + profile.score_s + training - profile.publish_block_s
    joint = (work + rate * training) / (speed + rate)
    return Bound(0.0 if helping else work / speed, training, joint, closing, opening)


def _helper_rate(workload: Workload, pools: Pools, profile: Profile, loads: Loads, replica_work) -> float:
    """Replica work per second that all Trainer ranks can do; the best ratio over the loads is taken."""
    fixed = profile.helper_fixed_s if profile.helper_denoise_s else profile.denoise_fixed_s
    moving = profile.helper_denoise_s or profile.denoise_s

    def ratio(load: float) -> float:
        own = workload.denoise_steps * (fixed + moving * load) + profile.decode_s * load
        return replica_work(load) / own

    return max(ratio(loads.least), ratio(loads.most)) * pools.trainer.ranks * pools.trainer.speed
