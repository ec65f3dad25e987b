"""GAP: how many of the ready groups the Trainer takes at once.

A round of tiles is full with ranks × cells of a tile. One group alone fills it less the more ranks there are, and each
round costs a fixed part (weights are gathered) besides its cells. So the Trainer takes the ready groups that fill whole
rounds; while they do not fill one, it takes all of them, or waits for more if training them together ends sooner.

Invariants:
- only the number is decided: groups stay in their order, and a taken number lies between 1 and what is ready;
- with nothing to wait for, everything that is ready is taken;
- it waits only if, by the profile, the groups at hand and the awaited ones are trained sooner that way, and never
  longer than it would take to train what is ready.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

_SAME = 1e-9
"""Ends that differ by less, as a fraction, are the same."""

MOST_AWAITED = 64
"""Arrivals looked at; the cost of a decision grows with their square."""


@dataclass(frozen=True, slots=True)
class Take:
    """The answer.

    Attributes:
        count: ready groups to train now; 0 to wait.
        wait_s: how long to wait for the next group before everything ready is taken, seconds.
    """

    count: int
    wait_s: float = 0.0


def groups_of_a_round(samples_per_group: int, transitions: int, ranks: int, max_cells: int, tsp: bool) -> int:
    """Most groups that one round of tiles holds, at least one. Without TSP a tile holds samples at one transition."""
    return max(1, ranks * max_cells // (samples_per_group * (transitions if tsp else 1)))


def groups_to_train(
    ready: int,
    arrivals: Sequence[float],
    train_s: Callable[[int], float],
    *,
    full: int,
    waited_s: float = 0.0,
) -> Take:
    """How many ready groups to train now, or how long to wait for more; asked when the Trainer has nothing to do.

    What is ready and the first j arrivals, trained at once, are done at ``arrivals[j-1] + train_s(ready + j)``; later
    arrivals follow in lots of their own. Of all ways to cut them into lots the one that ends first is followed as far
    as its first lot; with equal ends the one that starts now.

    Args:
        ready: groups that may be trained now.
        arrivals: predicted times until further groups of the same logical batch become ready, ascending, seconds;
            infinite when nothing is predicted of those that are missing, empty when none is missing.
        train_s: Trainer time of a number of groups trained at once, seconds.
        full: groups of a whole round (:func:`groups_of_a_round`).
        waited_s: how long the Trainer has been waiting with something ready, seconds.

    Raises:
        ValueError: nothing is ready.
    """
    if ready < 1:
        raise ValueError(f"merge: {ready} groups are ready; at least 1 is needed")
    if not arrivals:
        return Take(ready)
    if ready >= full:
        return Take(ready // full * full)
    horizon = train_s(ready) - waited_s
    awaited = [max(0.0, time) for time in arrivals[: min(full - ready, MOST_AWAITED)] if time < horizon]
    first = _first_lot(ready, awaited, train_s)
    if first == 0:
        return Take(ready)
    return Take(0, min(horizon, 2.0 * awaited[first - 1]))


def _first_lot(ready: int, awaited: Sequence[float], train_s: Callable[[int], float]) -> int:
    """How many arrivals the first lot takes besides what is ready, in the plan of lots that ends first."""
    lots = [train_s(count) for count in range(1, ready + len(awaited) + 1)]
    ends, firsts = [lots[ready - 1]], [0]
    for done, time in enumerate(awaited, start=1):
        end, first = time + lots[ready + done - 1], done
        for before in range(done - 1, -1, -1):
            later = max(ends[before], time) + lots[done - before - 1]
            gain = end - later
            if gain > _SAME * end or (gain >= -_SAME * end and firsts[before] < first):
                end, first = later, firsts[before]
        ends.append(end)
        firsts.append(first)
    return firsts[-1]
