"""TAG in the simulated run: the Trainer's bubbles and what it generates in them."""

from __future__ import annotations

import math
import time

from verl_digen.planner.eventloop import GeneratorLoop
from verl_digen.schedule.gap import plan_step
from verl_digen.schedule.pipeline import BubbleCosts, BubbleState
from verl_digen.schedule.tag import bubble_costs, bubble_state, decide, may_work_ahead, worth_handing_over
from verl_digen.schedule.work import Action, Claim, Decision, Fragment


class _Round:
    """One lockstep pass of the helper."""

    __slots__ = ("claims", "start", "step_s", "count", "since", "yielding")

    def __init__(self, claims: list[Claim], start: float, step_s: float, count: int, since: float) -> None:
        self.claims = claims
        self.start = start
        self.step_s = step_s
        self.count = count
        self.since = since
        self.yielding = False


def _samples(claims: list[Claim]) -> int:
    return sum(len(claim.fragment.samples) for claim in claims)


def _with_steps(claim: Claim, steps_done: int) -> Claim:
    return Claim(claim.fragment, claim.version, claim.attempt, steps_done)


class HelperLoop(GeneratorLoop):
    """Decides about bubbles and plays helper rounds; training itself is added by a subclass."""

    def __init__(self, *args) -> None:
        super().__init__(*args)
        self.step = 0
        self.batch = 0
        self.decisions = 0
        self.decision_s = 0.0
        self.help_busy_s = 0.0
        self._ready: list[tuple[int, int, int, Fragment]] = []
        self._free = True
        self._idle_since = 0.0
        self._idle_cause: str | None = None
        self._prediction: float | None = None
        self._helping: _Round | None = None
        self._helper_epoch = 0
        self._helper_on = False
        self._held: list[Claim] = []
        self._relieved = False
        self._ahead_allowed = True
        self._block: list[Claim] = []
        self._decision: Decision | None = None
        self._costs: BubbleCosts | None = None
        self._times: dict[int, float] = {}
        sizes = [len(f.samples) for f in plan_step(self.workload, 0, self.schedule.fragment_size)]
        self._per_fragment = max(self.workload.samples_per_group, *sizes)
        self._options = {"k": self.schedule.fixed_k} if self.schedule.policy == "fixed" else {}

    def train_seconds(self, samples: int) -> float:
        if samples not in self._times:
            self._times[samples] = self.profile.train_s(
                samples,
                self.workload.trained_transitions,
                self.pools.trainer,
                max_cells=self.schedule.max_cells,
                tsp=self.schedule.tsp,
                recompute=self.schedule.recompute_old_log_probs,
            )
        return self._times[samples]

    def record(self, name: str, start: float, end: float, detail: str = "") -> None:
        if self.trace is not None:
            self.trace.work("trainer", name, start, end, detail)

    def trainable(self) -> bool:
        raise NotImplementedError

    # -- bubbles -------------------------------------------------------------------------------------------

    def occupy(self) -> None:
        """The Trainer leaves its bubble."""
        self._free = False
        if self._idle_cause is not None:
            seconds = (self.now - self._idle_since) * self.pools.trainer.devices
            if seconds > 0:
                self.bubbles[self._idle_cause] = self.bubbles.get(self._idle_cause, 0.0) + seconds
                if self.trace is not None:
                    self.trace.bubble("trainer", self._idle_cause, self._idle_since, self.now)
            self._idle_cause = None

    def idle_trainer(self) -> None:
        if self.pools.colocated:
            self._free = True
            return
        cause = self.trainer_cause()
        if self._idle_cause != cause:
            self.occupy()
            self._idle_since, self._idle_cause = self.now, cause
        self._free = True

    def trainer_cause(self) -> str:
        if self.publishing:
            return "trainer: wait for publish"
        if self._ready and self.schedule.barrier:
            return "trainer: barrier"
        if self.trainable():
            return "trainer: wait to fill tiles"
        if self.queue.unclaimed(self.step) or any(self.running):
            return "trainer: wait for generation"
        return "trainer: wait for reward"

    def may_help(self) -> bool:
        """Zero-copy helper: the Trainer's weights are a version only before the first commit of a step."""
        return self.schedule.policy != "none" and self.batch == 0

    def bubble(self) -> None:
        if not self.may_help() or self.queue.available(self.ledger.published) == 0 and not self._held:
            self.leave_helping(self.idle_trainer)
            return
        state = self.describe()
        begin = time.perf_counter()
        decision = decide(self.schedule.policy, state, self._costs, **self._options)
        self.decision_s += time.perf_counter() - begin
        self.decisions += 1
        if self._prediction is None and not math.isnan(decision.predicted_s):
            self._prediction = self.now + decision.predicted_s
        self._decision = decision
        if decision.action is Action.SKIP and decision.hand_over and self.idle:
            self.return_held()
        if decision.action is Action.GENERATE and self.take_work(decision):
            self.occupy()
            self.enter_helping()
        else:
            self.leave_helping(self.idle_trainer)

    def describe(self) -> BubbleState:
        """The bubble as the policies see it."""
        per = self._per_fragment
        if self._costs is None:
            self._costs = bubble_costs(
                self.workload,
                self.pools,
                self.profile,
                fragment_samples=per,
                train_s=self.train_seconds(per),
                rollout_batch=self.schedule.rollout_batch,
            )
        begun: dict[int, float] = {}
        for running in self.running:
            if running is not None:
                left = running[0] - self.now
                for uid in running[1].fragment.uids:
                    if left > begun.get(uid, -1.0):
                        begun[uid] = left
        version, groups = self.ledger.published, max(1, per // self.workload.samples_per_group)
        own = sorted(left for uid, left in begun.items() if uid // self.workload.groups == self.step)[
            groups - 1 :: groups
        ]
        own_left = self.queue.available_samples(version, ahead=False)
        self._ahead_allowed = own_left == 0 and may_work_ahead(
            self._costs, [left + self._costs.score_s for left in own]
        )
        unclaimed = self.queue.available_samples(version, ahead=self._ahead_allowed)
        for uid, begun_with, waiting in self.queue.groups_waiting(self.step):
            if begun_with >= 0 and uid in begun:
                unclaimed -= waiting
                begun[uid] += self._costs.lanes_s[0] * waiting / per
        etas = sorted(begun.values())[groups - 1 :: groups]
        partial, ranks = _samples(self._held), self.pools.trainer.ranks
        rounds = [self._held[first : first + ranks] for first in range(0, len(self._held), ranks)]
        left = sum(max(self.workload.denoise_steps - claim.steps_done for claim in claims) for claims in rounds)
        return bubble_state(
            self._costs,
            fragment_samples=per,
            unclaimed_samples=max(0, unclaimed),
            begun=etas,
            partial_samples=partial,
            partial_steps=left,
        )

    # -- helper --------------------------------------------------------------------------------------------

    def take_work(self, decision: Decision) -> bool:
        """Claim what a decision asks for; yielded work of the helper comes first."""
        held = math.ceil(_samples(self._held) / self._per_fragment)
        self._block, self._held = self._held, []
        wanted = max(0, decision.fragments - held) * self._per_fragment
        while wanted > 0:
            claim = self.queue.claim(self.ledger.published, tail=True, ahead=self._ahead_allowed)
            if claim is None:
                break
            self._block.append(claim)
            wanted -= len(claim.fragment.samples)
        return bool(self._block)

    def enter_helping(self) -> None:
        switch = 0.0 if self._helper_on else self.profile.helper_in_s
        self._helper_on = True
        if switch:
            self.record("switch", self.now, self.now + switch)
        self.next_round(self.now + switch)

    def leave_helping(self, then) -> None:
        """Switch the Trainer out of generating, if it was, and go on."""
        if self._helper_on and self.profile.helper_out_s:
            self._helper_on = False
            self.occupy()
            self.record("switch", self.now, self.now + self.profile.helper_out_s)
            self.at(self.now + self.profile.helper_out_s, self.trainer_free)
            return
        self._helper_on = False
        then()

    def next_round(self, start: float) -> None:
        """Start the next round: at most one rollout fragment per rank, until the first of them is finished."""
        profile, factor, steps = self.profile, self._factor, self.workload.denoise_steps
        claims = self._block[: self.pools.trainer.ranks]
        del self._block[: len(claims)]
        assert all(claim.version == self.ledger.published for claim in claims), "the helper holds another version (I4)"
        speed, since = self.pools.trainer.speed, start
        if any(claim.steps_done == 0 for claim in claims):
            start += profile.encode_s / speed
        slowest = max(sum(factor(uid, j) if factor else 1.0 for uid, j in claim.fragment.samples) for claim in claims)
        step_s = profile.helper_step_s(slowest) / speed
        count = min(steps - claim.steps_done for claim in claims)
        end = start + count * step_s + profile.decode_s * slowest / speed
        self._helper_epoch += 1
        self._helping = _Round(claims, start, step_s, count, since)
        self.at(end, self.round_done, self._helper_epoch)
        if self._decision.yield_when_ready and self.trainable():
            self.ask_to_yield()

    def ask_to_yield(self) -> None:
        """Give way at the next step boundary, unless the round ends before it."""
        run = self._helping
        if run.yielding:
            return
        done = max(0, math.ceil((self.now - run.start) / run.step_s - 1e-9))
        if done < run.count:
            run.yielding = True
            self._helper_epoch += 1
            self.at(max(self.now, run.start + done * run.step_s), self.round_yielded, self._helper_epoch, done)

    def round_done(self, epoch: int) -> None:
        if epoch != self._helper_epoch:
            return
        run, steps = self._helping, self.workload.denoise_steps
        self.close_round(run)
        rest = []
        for claim in run.claims:
            done = claim.steps_done + run.count
            if done == steps:
                self.score(claim)
            else:
                rest.append(_with_steps(claim, done))
        self._block = rest + self._block
        if self._block and not (self._decision.yield_when_ready and (self.trainable() or self._relieved)):
            self.next_round(self.now)
        else:
            self.put_aside(self._block)

    def round_yielded(self, epoch: int, done: int) -> None:
        if epoch != self._helper_epoch:
            return
        run = self._helping
        self.close_round(run)
        self.put_aside([_with_steps(claim, claim.steps_done + done) for claim in run.claims] + self._block)

    def close_round(self, run: _Round) -> None:
        self._helping = None
        seconds = self.now - run.since
        self.help_busy_s += seconds * len(run.claims) / self.pools.trainer.ranks
        self.record("help", run.since, self.now, f"{_samples(run.claims)} samples v{run.claims[0].version}")

    def put_aside(self, claims: list[Claim]) -> None:
        """The helper stops; what it has not finished stays with it until an idle replica may have it."""
        self._held, self._block = claims, []
        self._relieved = False
        if self._decision.hand_over and self.idle:
            self.return_held()
        self.trainer_free()

    def return_held(self) -> None:
        """Partial latents go to whoever pulls next with the same version."""
        if self._held:
            for claim in self._held:
                self.queue.give_back(claim, claim.steps_done)
            self._held = []
            self.wake()

    def offer_help(self, replica: int) -> None:
        """An idle replica takes yielded work, or a running helper sample that it would finish earlier."""
        if self._decision is None or not self._decision.hand_over or self.step != self.version[replica]:
            return
        run = self._helping
        if run is None:
            if self._held:
                self.at(self.now, self.return_held)
            return
        if run.yielding:
            return
        done = max(0, math.ceil((self.now - run.start) / run.step_s - 1e-9))
        left = max(self.workload.denoise_steps - claim.steps_done for claim in run.claims) - done
        most = max(len(claim.fragment.samples) for claim in run.claims)
        own = (self.profile.denoise_fixed_s + self.profile.denoise_s * most) / self._speed[replica]
        if left > 0 and worth_handing_over(left, run.step_s, own):
            self._relieved = True
            self.ask_to_yield()
