"""The Trainer's side of the simulated run: train, commit, publish."""

from __future__ import annotations

import heapq

from verl_digen.planner.helperloop import HelperLoop
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
            self.leave_helping(self.train_next)
        else:
            self.bubble()

    def train_next(self) -> None:
        """Train the first ready fragment, together with others of its logical batch that are ready too."""
        together: list[Fragment] = []
        while len(together) < self.schedule.merge and self._ready and self._ready[0][:2] == (self.step, self.batch):
            fragment = heapq.heappop(self._ready)[3]
            for uid, version in self.assembler.take(fragment):
                self.ledger.consume(uid, fragment.step, version)
            together.append(fragment)
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
