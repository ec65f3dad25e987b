"""Which complete groups of a logical batch are handed to the Trainer at once, and when.

Invariants
- Every group of a batch is in exactly one lot; groups stay in the order of completion, and the last lot is marked.
- A Trainer that has nothing to do takes what :func:`~verl_digen.schedule.merge.groups_to_train` says; while it waits, a
  complete group or the end of the time it may wait makes it decide anew.
- One lot is sent ahead of the running one, so that its rows are fetched in time: whole rounds of tiles at once, less
  when the running lot is about to end. No more is sent ahead, because what is ready later may share its tiles.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from verl_digen.config.plan import RunPlan
from verl_digen.rollout.manager import DiffusionRolloutManager
from verl_digen.rollout.requests import GroupResult, PromptGroup
from verl_digen.schedule.measure import Measured
from verl_digen.schedule.merge import Take, groups_of_a_round, groups_to_train
from verl_digen.schedule.work import TrainerPool
from verl_digen.trainer.workgroup import TrainerGroup

LOTS_AT_THE_TRAINER = 2


class Feed:
    """Lots of one step.

    Args:
        plan: sizes and options.
        ranks: the Trainer.
        manager: says what is complete, and when more will be.
        measured: costs of the run so far; with none, everything that is ready is taken.
        tile_cells: most cells of a tile.
    """

    def __init__(
        self,
        plan: RunPlan,
        ranks: TrainerGroup,
        manager: DiffusionRolloutManager,
        measured: Measured,
        tile_cells: Callable[[], int],
    ):
        self.plan, self.ranks, self.manager = plan, ranks, manager
        self.profile = measured.profile() if measured.known else None
        self._fetch_s = measured.value("fetch")
        self._tile_cells = tile_cells
        self._early: dict[str, GroupResult] = {}
        self._answered: deque[float] = deque()
        self._sent = 0
        self._ends = -math.inf
        self._waiting_since: float | None = None
        self._asked: tuple[int, float] | None = None
        self._expected: list[float] = []

    def lots(self, batch: Sequence[PromptGroup]) -> Iterator[tuple[list[GroupResult], bool]]:
        """The lots of a logical batch, and whether it is the last; call :meth:`sent` for each before the next.

        Raises:
            TimeoutError, RolloutError: as the manager's ``next_group``.
        """
        missing = {group.uid for group in batch}
        ready: list[GroupResult] = []
        self._answered, self._sent, self._ends = deque(), 0, -math.inf  # late answers count for the batch before
        while missing or ready:
            found = [uid for uid in self._early if uid in missing]
            ready += [self._early.pop(uid) for uid in found]
            missing.difference_update(found)
            del self._expected[: len(found)]
            take = self._take(len(ready), missing)
            if take.count:
                lot, ready = ready[: take.count], ready[take.count :]
                self._waiting_since = self._asked = None
                yield lot, not missing and not ready
                continue
            result = self.manager.group_within(self.plan.deadlines.group.seconds, take.wait_s)
            if result is not None:
                self._early[result.group.uid] = result

    def sent(self, lot: Sequence[GroupResult], refs: list[Any]) -> None:
        """Note the calls that train a lot."""
        self._sent += 1
        answered, now = self._answered, time.monotonic()
        self._ends = max(now, self._ends) + (self._train_s(len(lot)) if self.profile else 0.0)
        self.ranks.when_done(refs, lambda: (answered.append(time.monotonic()), self.manager.wake()))

    def _take(self, ready: int, missing: set[str]) -> Take:
        """How many of the ready groups to send now; 0 to wait for a group, an answer, or some seconds."""
        if not missing:
            return Take(ready)
        at_work = self._sent - len(self._answered)
        if not ready or at_work >= LOTS_AT_THE_TRAINER:
            return Take(0, math.inf)
        full = groups_of_a_round(
            self.plan.n, self.plan.transitions, self.plan.trainer_ranks, self._tile_cells(), self.plan.digen.tsp.enable
        )
        if at_work:
            return self._ahead(ready, full)
        return self._now(ready, full, missing)

    def _ahead(self, ready: int, full: int) -> Take:
        """A lot is at work: the next one is sent when it fills whole rounds, or just before the running one ends."""
        if ready >= full:
            return Take(ready // full * full)
        if self.profile is None:
            return Take(0, math.inf)
        left = self._ends - self._fetch_s - time.monotonic()
        return Take(0, left) if left > 0 else Take(ready)

    def _now(self, ready: int, full: int, missing: set[str]) -> Take:
        """The Trainer has nothing to do."""
        if self.profile is None:
            return Take(ready)
        now = time.monotonic()
        if self._waiting_since is None:  # the forecast is made once for a lot
            self._waiting_since = now
            soon = self.manager.arrivals(missing, self.profile, self._train_s(ready)) if ready < full else []
            self._expected = [now + seconds for seconds in soon]
        in_vain = self._asked is not None and self._asked[0] == ready and now >= self._asked[1]
        expected = [] if in_vain else self._expected
        arrivals = [time - now for time in expected] or [math.inf]  # of the missing ones nothing is known
        take = groups_to_train(ready, arrivals, self._train_s, full=full, waited_s=now - self._waiting_since)
        self._asked = (ready, now + take.wait_s)
        return take

    def _train_s(self, groups: int) -> float:
        plan = self.plan
        pool = TrainerPool(ranks=plan.trainer_ranks)
        cells, tsp = self._tile_cells(), plan.digen.tsp.enable
        return self.profile.train_s(groups * plan.n, plan.transitions, pool, max_cells=cells, tsp=tsp)
