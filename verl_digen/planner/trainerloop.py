"""The Trainer's side of the simulated run: train, commit, publish."""

from __future__ import annotations

import heapq
import math

from verl_digen.planner.helperloop import HelperLoop
from verl_digen.schedule.forecast import Pending, group_arrivals
from verl_digen.schedule.gap import plan_step
from verl_digen.schedule.merge import Take, groups_of_a_round, groups_to_train
from verl_digen.schedule.work import Fragment


class Run(HelperLoop):
    """A whole run. The Trainer is in one state at a time: idle, working, or helping."""

    def __init__(self, *args) -> None:
        super().__init__(*args)
        self.step_ends: list[float] = []
        self.stale_groups: list[int] = []
        self.trained = 0
        self.predictions: list[tuple[float, float]] = []
        self.trainer_busy_s = 0.0
        self._left = 0
        self._waiting_since: float | None = None
        self._patience = 0
        self._unit = max(len(fragment.samples) for fragment in plan_step(self.workload, 0, self.schedule.fragment_size))
        lot = self._unit, self.workload.trained_transitions, self.pools.trainer.ranks
        self._full = groups_of_a_round(*lot, self.schedule.max_cells, self.schedule.tsp)

    def waiting_for(self) -> str:
        missing = self._left if self.step < self.steps else 0
        return (
            f"step {self.step}, logical batch {self.batch}: {missing} fragments untrained, "
            f"{self.queue.unclaimed(self.step)} samples unclaimed, {len(self._ready)} fragments ready"
        )

    # -- train, commit, publish ----------------------------------------------------------------------------

    def fragments_ready(self, fragments: tuple[Fragment, ...]) -> None:
        for fragment in fragments:
            heapq.heappush(self._ready, (fragment.step, fragment.logical_batch, fragment.index, fragment))
        if self._free:
            self.trainer_free()
        elif self._helping is not None and self._decision.yield_when_ready and self.trainable():
            self.ask_to_yield()

    def trainable(self) -> bool:
        """Whether the first ready fragment belongs to the running logical batch and no barrier holds it."""
        if not self._ready or self._ready[0][:2] != (self.step, self.batch):
            return False
        if self.schedule.barrier and self.batch == 0 and len(self._ready) < len(self.fragments[self.step]):
            return self._left < self._batch_size()
        return True

    def _batch_size(self) -> int:
        return sum(1 for fragment in self.fragments[self.step] if fragment.logical_batch == self.batch)

    def trainer_free(self) -> None:
        """Choose what comes next: a ready fragment, the commit, or the decision about a bubble."""
        if self.step >= self.steps:
            self.leave_helping(self.idle_trainer)
            return
        if self._left == 0:
            self._left = self._batch_size()
        if self.trainable():
            self.leave_helping(self.train_or_wait)
        else:
            self.bubble()

    # -- lots ----------------------------------------------------------------------------------------------

    def train_or_wait(self) -> None:
        """Train some of the ready fragments, or wait a while for more that share their tiles."""
        take = self.lot()
        if take.count:
            self._waiting_since = None
            self.train(take.count)
            return
        if self._waiting_since is None:
            self._waiting_since = self.now
        self._patience += 1
        self.at(self.now + take.wait_s, self.waited, self._patience)
        self.idle_trainer()

    def waited(self, patience: int) -> None:
        """Nothing came while the Trainer waited with something ready: it takes what there is."""
        if patience == self._patience and self._free and self._waiting_since is not None:
            self._waiting_since = -math.inf
            self.trainer_free()

    def lot(self) -> Take:
        """Ready fragments of the running logical batch to train at once."""
        ready = sum(entry[:2] == (self.step, self.batch) for entry in self._ready)
        waited = 0.0 if self._waiting_since is None else self.now - self._waiting_since
        arrivals: list[float] = []
        if ready < min(self._left, self._full) and waited < math.inf:
            arrivals = self.arrivals(self.train_seconds(ready * self._unit))
        elif ready < self._left:
            arrivals = [math.inf]
        return groups_to_train(
            ready,
            arrivals,
            lambda count: self.train_seconds(count * self._unit),
            full=self._full,
            waited_s=waited,
        )

    def arrivals(self, horizon_s: float) -> list[float]:
        """Predicted times until further fragments of the running logical batch become ready, seconds."""
        n, version = self.workload.samples_per_group, self.ledger.published
        first = self.step * self.workload.groups + self.batch * self.workload.groups // self.workload.logical_batches
        uids = range(first, first + self.workload.groups // self.workload.logical_batches)
        speeds = zip(self.running, self._speed, self.alive, strict=True)
        times = group_arrivals(
            self.assembler.missing(uids),
            generating=[Pending(r[0] - self.now, r[1].fragment.samples) for r in self.running if r is not None],
            scoring=[Pending(at - self.now, (key,)) for key, at in self._being_scored.items()],
            waiting=self.queue.upcoming(version),
            lanes=[(0.0 if run is None else run[0] - self.now, speed) for run, speed, alive in speeds if alive],
            generate_s=lambda load: self.profile.generate_s(self.workload.denoise_steps, load),
            score_s=self.profile.score_s,
            horizon_s=horizon_s,
        )
        groups, parts = max(1, self._unit // n), -(-n // self._unit)
        return [time for time in times[groups - 1 :: groups] for _ in range(parts)]

    def train(self, count: int) -> None:
        """Train the first ready fragments of the running logical batch together."""
        together = [heapq.heappop(self._ready)[3] for _ in range(count)]
        for fragment in together:
            for uid, version in self.assembler.take(fragment):
                self.ledger.consume(uid, fragment.step, version)
        self.occupy()
        if self.pools.colocated and together[0].index == 0:
            for replica in self.idle:
                self.close_bubble(replica)
            self.record("switch", self.now, self.now + self.profile.phase_switch_s)
            self.at(self.now + self.profile.phase_switch_s, self.begin_training, together)
        else:
            self.begin_training(together)

    def begin_training(self, together: list[Fragment]) -> None:
        samples = sum(len(fragment.samples) for fragment in together)
        seconds = self.train_seconds(samples)
        self.trainer_busy_s += seconds
        numbers = ", ".join(str(fragment.index) for fragment in together)
        self.record("train", self.now, self.now + seconds, f"step {self.step} fragment {numbers}")
        self.at(self.now + seconds, self.trained_some, len(together), samples)

    def trained_some(self, fragments: int, samples: int) -> None:
        self.trained += samples
        self._left -= fragments
        if self._left:
            self.trainer_free()
            return
        if self._prediction is not None and not self.schedule.max_stale_ratio:
            self.predictions.append((self._prediction, self.now))
        self._prediction = None
        self.return_held()
        self.trainer_busy_s += self.profile.commit_s
        self.record("commit", self.now, self.now + self.profile.commit_s)
        self.at(self.now + self.profile.commit_s, self.committed)

    def committed(self) -> None:
        self.batch += 1
        if self.batch < self.workload.logical_batches:
            self.trainer_free()
            return
        self.stale_groups.append(self.ledger.stale_groups(self.step))
        self.queue.drop_step(self.step)
        self.assembler.drop_step(self.step)
        del self.fragments[self.step]
        self.step += 1
        self.batch = 0
        self.ledger.publish(self.step)
        upcoming = self.step + self._ahead
        if upcoming < self.steps:
            self.add_step(upcoming)
        self.publishing = True
        after = self.profile.publish_s + (self.profile.phase_switch_s if self.pools.colocated else 0.0)
        if self.trace is not None:
            self.trace.work("publish", "publish", self.now, self.now + self.profile.publish_s, f"v{self.step}")
        self.at(self.now + after, self.published, self.step)
        if not self.pools.colocated:
            self.wake()
        if self.profile.publish_block_s:
            self.record("publish", self.now, self.now + self.profile.publish_block_s)
            self.at(self.now + self.profile.publish_block_s, self.trainer_free)
        else:
            self.trainer_free()

    def published(self, version: int) -> None:
        self.newest = version
        self.publishing = False
        self.step_ends.append(self.now)
        self.finished = len(self.step_ends) == self.steps
        if self.finished:
            for replica in self.idle:
                self.close_bubble(replica)
            self.occupy()
            return
        self.restart_orphans()
        self.wake()
        if self._free:
            self.trainer_free()
