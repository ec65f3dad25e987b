"""One table of deadlines: how long each kind of waiting may last, derived from the options under ``failure``.

The rule: who waits has more time than what it waits for. Four options say how long work itself may take (a fragment at
a replica, its scoring, a call of the Trainer, moving the weights once); every other deadline is a sum of these, so that
the one which runs out first names the work that was slow, and not somebody who waited for it.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from verl_digen.config.digen import PREFIX, FailureConfig

# Fragments handed to a replica at a time: one at work and one waiting there, so that no call latency shows.
QUEUE_DEPTH = 2
# A process answers a ping from a thread of its own; only a stopped process or a lost node does not.
PING_S = 60.0


@dataclass(frozen=True)
class Deadline:
    """A time to wait and where it comes from.

    Attributes:
        seconds: how long.
        rule: the option, or the sum of options, that gives it.
    """

    seconds: float
    rule: str

    def __add__(self, other: Deadline) -> Deadline:
        return Deadline(self.seconds + other.seconds, f"{self.rule} + {other.rule}")

    def __rmul__(self, times: int) -> Deadline:
        rule = f"({self.rule})" if " + " in self.rule else self.rule
        return Deadline(times * self.seconds, f"{times} x {rule}")

    def __str__(self) -> str:
        return f"{self.seconds:g} s ({PREFIX}.failure: {self.rule})"


def longest(*deadlines: Deadline) -> Deadline:
    """The longest of several."""
    return max(deadlines, key=lambda deadline: deadline.seconds)


@dataclass(frozen=True, kw_only=True)
class Deadlines:
    """The table.

    Attributes:
        generate: one fragment at a replica, from the moment it is its turn.
        reward: one fragment at a reward worker.
        train: a call of the Trainer: begin, accumulate, commit.
        load: a model from disk, a checkpoint to or from disk, a reward worker's start.
        transfer: the weights once through the channel, when all ends are there.
        ping: an answer from a process that is alive.
        busy: a replica to reach a call that waits behind its fragments.
        connect: all ends of the weight channel to find each other.
        publish: a version to be held by every replica, from the call on.
        replace: a dead replica's successor to hold the version of the others.
        group: the next complete prompt group: every attempt of a fragment may use its time up.
        collective: one rank of the Trainer for the others, in one operation.
    """

    generate: Deadline
    reward: Deadline
    train: Deadline
    load: Deadline
    transfer: Deadline
    ping: Deadline
    busy: Deadline
    connect: Deadline
    publish: Deadline
    replace: Deadline
    group: Deadline
    collective: Deadline

    @classmethod
    def of(cls, failure: FailureConfig) -> Deadlines:
        """The table for the options of a run."""
        generate, reward, train, sync = (
            Deadline(getattr(failure, name), name)
            for name in ("generate_timeout_s", "reward_timeout_s", "train_timeout_s", "sync_timeout_s")
        )
        ping = Deadline(PING_S, f"{PING_S:g} s")
        attempts = failure.max_retries + 1
        busy = QUEUE_DEPTH * generate
        connect = busy + ping
        publish = connect + sync
        # the weights come from a replica that may be busy, or from the Trainer that may be in a call
        replace = sync + longest(busy, train) + connect + sync
        group = attempts * (busy + reward + replace)
        return cls(
            generate=generate,
            reward=reward,
            train=train,
            load=sync,
            transfer=sync,
            ping=ping,
            busy=busy,
            connect=connect,
            publish=publish,
            replace=replace,
            group=group,
            collective=longest(train, publish, replace) + ping,
        )

    def rows(self) -> list[tuple[str, float, str]]:
        """(what, seconds, rule) of every entry."""
        return [(f.name, getattr(self, f.name).seconds, getattr(self, f.name).rule) for f in fields(self)]
