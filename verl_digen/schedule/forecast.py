"""When the groups that are being generated will be ready, from what every replica has and the profile.

The forecast plays the pull order: a replica that becomes free takes the next waiting fragment. It looks only as far
ahead as is asked, because decisions need the next few groups and not the whole step.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from verl_digen.schedule.work import SampleKey, Uid


@dataclass(frozen=True, slots=True)
class Pending:
    """Samples that will be generated, or scored, after some seconds."""

    left_s: float
    samples: Sequence[SampleKey]


def group_arrivals(
    missing: Mapping[Uid, int],
    *,
    generating: Iterable[Pending],
    scoring: Iterable[Pending],
    waiting: Iterable[Sequence[SampleKey]],
    lanes: Sequence[tuple[float, float]],
    generate_s: Callable[[int], float],
    score_s: float,
    horizon_s: float,
) -> list[float]:
    """Times until groups become ready, ascending, as far as they lie within the horizon, seconds.

    Args:
        missing: samples that are not scored yet, by group; groups that are not in it do not count.
        generating: what replicas have.
        scoring: what is generated and not scored yet.
        waiting: samples of the fragments that nobody has claimed, in pull order; read only as far as needed.
        lanes: (seconds until it is free, speed) of every replica that pulls.
        generate_s: time of a fragment of some samples on a device of speed 1, seconds.
        score_s: from generated to scored, seconds.
    """
    left = dict(missing)
    last: dict[Uid, float] = {}

    def expect(samples: Sequence[SampleKey], at: float) -> None:
        for uid, _ in samples:
            if uid in left:
                left[uid] -= 1
                last[uid] = max(last.get(uid, 0.0), at)

    for item in scoring:
        expect(item.samples, max(0.0, item.left_s))
    for item in generating:
        expect(item.samples, max(0.0, item.left_s) + score_s)
    free = list(lanes)
    heapq.heapify(free)
    for samples in waiting:
        if not free or free[0][0] + score_s > horizon_s:
            break
        at, speed = free[0]
        at = max(0.0, at) + generate_s(len(samples)) / speed
        heapq.heapreplace(free, (at, speed))
        expect(samples, at + score_s)
    return sorted(at for uid, at in last.items() if left[uid] == 0 and at <= horizon_s)
