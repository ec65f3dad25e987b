"""The discrete-event run behind :func:`verl_digen.planner.simulate.simulate`.

It moves time and keeps pools busy; every decision is made by the functions a live run calls: the claim
queue, the assembler, the ledger, the TAG policies, the tile arithmetic of the profile. The Trainer's side, which
asks those functions what to do in a bubble, is in ``trainerloop``.
"""

from __future__ import annotations

import heapq

from verl_digen.planner.disturbance import Disturbance
from verl_digen.schedule.assemble import GroupAssembler, Outcome
from verl_digen.schedule.gap import ClaimQueue, plan_step
from verl_digen.schedule.profile import Profile
from verl_digen.schedule.tcss import StaleLedger
from verl_digen.schedule.trace import Trace
from verl_digen.schedule.work import Claim, Fragment, Pools, SampleKey, Schedule, Workload


class GeneratorLoop:
    """Clock, Generator and reward pool; the Trainer's side is added by a subclass."""

    def __init__(
        self,
        workload: Workload,
        pools: Pools,
        profile: Profile,
        schedule: Schedule,
        steps: int,
        disturbance: Disturbance,
        trace: Trace | None,
    ) -> None:
        self.workload, self.pools, self.profile, self.schedule = workload, pools, profile, schedule
        self.steps = steps
        self.disturbance = disturbance
        self.trace = trace
        self.now = 0.0
        self.events = 0
        self._heap: list[tuple] = []
        self._order = 0

        self.ledger = StaleLedger(workload.groups, schedule.max_stale_ratio)
        self.queue = ClaimQueue(self.ledger)
        self.assembler = GroupAssembler()
        self.fragments: dict[int, tuple[Fragment, ...]] = {}
        self.newest = 0
        self._ahead = 1 if self.ledger.stale_limit else 0

        count = len(pools.replicas)
        self.version = [0] * count
        self.alive = [True] * count
        self.running: list[tuple[float, Claim] | None] = [None] * count
        self.epoch = [0] * count
        self.busy_s = [0.0] * count
        self.idle_since = [0.0] * count
        self.idle_cause: list[str | None] = [None] * count
        self.idle: set[int] = set()
        self._last_uid: list[int | None] = [None] * count
        self._speed = [replica.speed for replica in pools.replicas]
        self._names = [replica.name for replica in pools.replicas]
        self._devices = [replica.devices for replica in pools.replicas]

        self._factor = disturbance.factor if disturbance.varies else None
        self._slots = [0.0] * pools.reward_slots
        self._being_scored: dict[SampleKey, float] = {}
        self.bubbles: dict[str, float] = {}
        self.publishing = False
        self.finished = False
        self.scored = 0
        self.discarded = 0

    # -- clock ---------------------------------------------------------------------------------------------

    def at(self, time: float, handler, *payload) -> None:
        """Call ``handler(*payload)`` at a moment; ties in the order of this call."""
        self._order += 1
        heapq.heappush(self._heap, (time, self._order, handler, payload))

    def play(self) -> None:
        """Run to the last publish. ``RuntimeError`` when the schedule stalls before it."""
        for failure in self.disturbance.failures:
            if failure.replica >= len(self.alive):
                raise ValueError(f"failure of replica {failure.replica}, but there are {len(self.alive)} replicas")
            self.at(failure.at_s, self.fail, failure.replica, failure.down_s)
        for step in range(min(self.steps, 1 + self._ahead)):
            self.add_step(step)
        for replica in range(len(self.alive)):
            self.pull(replica)
        self.trainer_free()
        heap, pop = self._heap, heapq.heappop
        while heap and not self.finished:
            self.now, _, handler, payload = pop(heap)
            self.events += 1
            handler(*payload)
        if not self.finished:
            raise RuntimeError(f"the schedule stalled at {self.now} s: {self.waiting_for()}")

    def add_step(self, step: int) -> None:
        self.fragments[step] = plan_step(self.workload, step, self.schedule.fragment_size)
        self.queue.add_step(step, plan_step(self.workload, step, self.schedule.rollout_batch))
        self.assembler.add_step(self.fragments[step])

    # -- Generator -----------------------------------------------------------------------------------------

    def pull(self, replica: int) -> None:
        """An idle replica takes work: first what its version still owes, then the newest version's."""
        version, newest = self.version[replica], self.newest
        claim = self.queue.claim(version, start_groups=version == newest)
        if claim is None and version != newest:
            version = self.version[replica] = newest
            claim = self.queue.claim(version)
        if claim is None:
            self.rest(replica)
            return
        now = self.now
        if self.idle_cause[replica] is not None:
            self.close_bubble(replica)
        self.idle.discard(replica)
        duration = self.generation_s(replica, claim)
        self.running[replica] = (now + duration, claim)
        self.at(now + duration, self.generated, replica, self.epoch[replica], now, claim)

    def generation_s(self, replica: int, claim: Claim) -> float:
        """Time of a replica for a fragment, which may come with steps behind it."""
        profile, steps, factor = self.profile, self.workload.denoise_steps, self._factor
        left = steps - claim.steps_done
        total = 0.0
        encodes = 0
        last = self._last_uid[replica]
        for uid, j in claim.fragment.samples:
            total += factor(uid, j) if factor else 1.0
            if uid != last:
                last = uid
                encodes += 1
        self._last_uid[replica] = last
        seconds = profile.denoise_fixed_s * left + (profile.denoise_s * left + profile.decode_s) * total
        return (seconds + encodes * profile.encode_s) / self._speed[replica]

    def generated(self, replica: int, epoch: int, start: float, claim: Claim) -> None:
        if epoch != self.epoch[replica]:
            return
        self.running[replica] = None
        self.busy_s[replica] += self.now - start
        if self.trace is not None:
            self.trace.work(self._names[replica], "generate", start, self.now, _label(claim))
        self.score(claim)
        self.pull(replica)

    def rest(self, replica: int) -> None:
        """Nothing to pull: note since when and why."""
        self.idle.add(replica)
        cause = self.generator_cause()
        if self.idle_cause[replica] != cause:
            self.close_bubble(replica)
            self.idle_cause[replica] = cause
        self.offer_help(replica)

    def generator_cause(self) -> str:
        if self.pools.colocated:
            return "generator: wait for slower replicas"
        if self.publishing:
            return "generator: wait for publish"
        if self.ledger.stale_limit and self.newest + 1 < self.steps:
            return "generator: stale limit"
        return "generator: wait for training"

    def close_bubble(self, replica: int) -> None:
        cause = self.idle_cause[replica]
        if cause is not None and self.now > self.idle_since[replica]:
            seconds = (self.now - self.idle_since[replica]) * self._devices[replica]
            self.bubbles[cause] = self.bubbles.get(cause, 0.0) + seconds
            if self.trace is not None:
                self.trace.bubble(self._names[replica], cause, self.idle_since[replica], self.now)
        self.idle_since[replica] = self.now
        self.idle_cause[replica] = None

    def wake(self) -> None:
        """Let every idle replica try again, fastest first."""
        if self.idle:
            for replica in sorted(self.idle, key=lambda r: (-self._speed[r], r)):
                if self.alive[replica]:
                    self.pull(replica)

    # -- failures ------------------------------------------------------------------------------------------

    def fail(self, replica: int, down_s: float) -> None:
        """A replica loses what it is doing; its samples go back, and groups nobody can finish start over."""
        if not self.alive[replica]:
            return
        self.close_bubble(replica)
        self.idle.discard(replica)
        self.alive[replica] = False
        self.epoch[replica] += 1
        self._last_uid[replica] = None
        if self.trace is not None:
            self.trace.work(self._names[replica], "down", self.now, self.now + down_s)
        running, self.running[replica] = self.running[replica], None
        self.at(self.now + down_s, self.recover, replica, down_s)
        if running:
            self.discarded += len(running[1].fragment.samples)
            self.queue.give_back(running[1])
        self.restart_orphans()
        self.wake()

    def recover(self, replica: int, down_s: float) -> None:
        self.alive[replica] = True
        self.version[replica] = self.newest
        cause = "generator: replica down"
        self.bubbles[cause] = self.bubbles.get(cause, 0.0) + down_s * self._devices[replica]
        self.idle_since[replica] = self.now
        self.restart_orphans()
        self.pull(replica)

    def restart_orphans(self) -> None:
        """Groups that were begun under a version that nobody holds any more start over."""
        held = {version for version, alive in zip(self.version, self.alive, strict=True) if alive}
        held.add(self.ledger.published)
        for uid, attempt in self.queue.restart_orphans(held).items():
            self.assembler.restart(uid, attempt)

    # -- reward --------------------------------------------------------------------------------------------

    def score(self, claim: Claim) -> None:
        """Send the samples of a finished fragment to the reward pool; servers take them in the order they come."""
        self.queue.finished(claim)
        latency = self.profile.score_s
        for uid, j in claim.fragment.samples:
            begin = self.now
            if self._slots:
                begin = max(self.now, self._slots[0])
                heapq.heapreplace(self._slots, begin + latency)
            if self.trace is not None and latency:
                self.trace.work("reward", "score", begin, begin + latency, f"{uid}/{j}")
            if begin + latency > self.now:
                self._being_scored[uid, j] = begin + latency
                self.at(begin + latency, self.arrived, claim, uid, j)
            else:
                self.arrived(claim, uid, j)

    def arrived(self, claim: Claim, uid: int, j: int) -> None:
        self._being_scored.pop((uid, j), None)
        outcome, ready = self.assembler.scored(uid, j, claim.version, claim.attempt)
        if outcome is Outcome.COMPLETE or outcome is Outcome.ACCEPTED:
            self.scored += 1
        else:
            self.discarded += 1
        if ready:
            self.fragments_ready(ready)

    # -- the Trainer's side --------------------------------------------------------------------------------

    def trainer_free(self) -> None:
        raise NotImplementedError

    def fragments_ready(self, fragments: tuple[Fragment, ...]) -> None:
        raise NotImplementedError

    def offer_help(self, replica: int) -> None:
        raise NotImplementedError

    def waiting_for(self) -> str:
        raise NotImplementedError


def _label(claim: Claim) -> str:
    samples = claim.fragment.samples
    more = f" +{len(samples) - 1}" if len(samples) > 1 else ""
    return f"{samples[0][0]}/{samples[0][1]}{more} v{claim.version} step {claim.step}"
