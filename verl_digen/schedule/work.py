"""The words of the schedule as types: workloads, pools, fragments, tiles and decisions.

Everything here is frozen and plain. Times are seconds, memory is GiB (2**30 bytes), speeds are relative
to the device on which a profile was measured (speed 2.0 halves every time of that device).
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

Uid = str | int
"""Identity of one prompt occurrence. A live run uses strings, the simulator uses integers."""

SampleKey = tuple[Uid, int]
"""One generation of a group: ``(uid, j)`` with ``0 <= j < samples_per_group``."""


def require_positive(owner: object, *names: str) -> None:
    """Raise ``ValueError`` naming every field of ``owner`` in ``names`` that is not above zero."""
    bad = {name: getattr(owner, name) for name in names if not getattr(owner, name) > 0}
    if bad:
        listed = ", ".join(f"{name}={value!r}" for name, value in bad.items())
        raise ValueError(f"{type(owner).__name__}: must be above zero: {listed}")


def require_not_negative(owner: object, *names: str) -> None:
    """Raise ``ValueError`` naming every field of ``owner`` in ``names`` that is below zero or not a number."""
    bad = {name: getattr(owner, name) for name in names if not getattr(owner, name) >= 0}
    if bad:
        listed = ", ".join(f"{name}={value!r}" for name, value in bad.items())
        raise ValueError(f"{type(owner).__name__}: must not be negative: {listed}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """What one step asks for.

    Attributes:
        name: label for tables and pictures.
        groups: prompt groups per step, P.
        samples_per_group: generations per prompt, n (``rollout.n``).
        denoise_steps: sampling steps of one trajectory.
        trained_transitions: recorded transitions of a trajectory that are trained, K.
        logical_batches: optimizer steps per publish, m; the groups are split into m runs of equal length.
    """

    name: str
    groups: int
    samples_per_group: int
    denoise_steps: int
    trained_transitions: int
    logical_batches: int = 1

    def __post_init__(self) -> None:
        require_positive(self, "groups", "samples_per_group", "denoise_steps", "trained_transitions", "logical_batches")
        if self.trained_transitions > self.denoise_steps:
            raise ValueError(
                f"workload {self.name}: trained_transitions={self.trained_transitions} exceeds "
                f"denoise_steps={self.denoise_steps}"
            )
        if self.groups % self.logical_batches:
            raise ValueError(
                f"workload {self.name}: groups={self.groups} is not divisible by logical_batches={self.logical_batches}"
            )

    @property
    def samples(self) -> int:
        """Samples per step, P·n."""
        return self.groups * self.samples_per_group

    @property
    def cells(self) -> int:
        """Trained cells per step: samples × trained transitions."""
        return self.samples * self.trained_transitions


@dataclass(frozen=True, slots=True, kw_only=True)
class Replica:
    """One rollout engine of the Generator pool.

    Attributes:
        name: label of its row in traces.
        speed: denoising speed of the whole replica relative to the profile's device.
        devices: devices it occupies; used for utilisation.
    """

    name: str
    speed: float = 1.0
    devices: int = 1

    def __post_init__(self) -> None:
        require_positive(self, "speed", "devices")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerPool:
    """The training pool; its ranks run every tile in step, so the slowest rank sets the pace.

    Attributes:
        ranks: data-parallel ranks; each is one helper slot when the Trainer generates.
        speed: speed of the slowest rank relative to the profile's device.
        devices_per_rank: devices of one rank (sequence or tensor parallel).
    """

    ranks: int
    speed: float = 1.0
    devices_per_rank: int = 1

    def __post_init__(self) -> None:
        require_positive(self, "ranks", "speed", "devices_per_rank")

    @property
    def devices(self) -> int:
        return self.ranks * self.devices_per_rank


@dataclass(frozen=True, slots=True, kw_only=True)
class Pools:
    """A placement.

    Attributes:
        replicas: the Generator, one entry per replica.
        trainer: the Trainer.
        reward_slots: samples scored at the same time; 0 means that scoring is never a queue.
        colocated: replicas and Trainer share the same devices and take turns.
    """

    replicas: tuple[Replica, ...]
    trainer: TrainerPool
    reward_slots: int = 0
    colocated: bool = False

    def __post_init__(self) -> None:
        if not self.replicas:
            raise ValueError("pools: the Generator has 0 replicas; at least 1 is needed")
        require_not_negative(self, "reward_slots")
        generator = sum(replica.devices for replica in self.replicas)
        if self.colocated and generator != self.trainer.devices:
            raise ValueError(
                f"pools: colocated placement needs the same devices on both sides, but the replicas take "
                f"{generator} and the Trainer {self.trainer.devices}"
            )

    @property
    def devices(self) -> int:
        """Devices in use; shared ones count once, reward servers do not count."""
        generator = sum(replica.devices for replica in self.replicas)
        return generator if self.colocated else generator + self.trainer.devices

    @property
    def generator_speed(self) -> float:
        """Summed speed of the replicas."""
        return sum(replica.speed for replica in self.replicas)


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """How a step is run: what the planner chooses and what a live run is configured with.

    Attributes:
        fragment_size: samples per fragment; ``None`` for one fragment per logical batch (one-shot).
        max_cells: cells of a tile per rank.
        tsp: tiles may span transitions.
        policy: TAG policy; ``none`` leaves bubbles empty.
        fixed_k: fragments per bubble of the policy ``fixed``.
        max_stale_ratio: ρ of TCSS; 0 is strictly on-policy.
        rollout_batch: samples a replica denoises together.
        barrier: training starts only when the whole step is generated and scored.
        recompute_old_log_probs: an extra forward pass over every cell before it is trained.
    """

    fragment_size: int | None = None
    max_cells: int = 1
    tsp: bool = False
    policy: str = "none"
    fixed_k: int = 1
    max_stale_ratio: float = 0.0
    rollout_batch: int = 1
    barrier: bool = False
    recompute_old_log_probs: bool = False

    def __post_init__(self) -> None:
        require_positive(self, "max_cells", "rollout_batch")
        require_not_negative(self, "fixed_k", "max_stale_ratio")
        if self.max_stale_ratio > 1:
            raise ValueError(f"schedule: max_stale_ratio={self.max_stale_ratio} must not exceed 1")
        if self.fragment_size is not None and self.fragment_size < 1:
            raise ValueError(f"schedule: fragment_size={self.fragment_size} must be at least 1")


@dataclass(frozen=True, slots=True)
class Fragment:
    """A unit that is generated, scored and handed over, or trained, at once: some samples of a group, or whole groups.

    Attributes:
        index: position in the plan of its step.
        step: the step it belongs to.
        logical_batch: the optimizer step inside the step, fixed before anything is generated.
        samples: keys in pull order.
    """

    index: int
    step: int
    logical_batch: int
    samples: tuple[SampleKey, ...]

    @property
    def uids(self) -> tuple[Uid, ...]:
        """The groups it touches, in order."""
        return tuple(dict.fromkeys(uid for uid, _ in self.samples))


@dataclass(frozen=True, slots=True)
class Tile:
    """One forward/backward of one rank: cells ``start <= c < stop`` of a fragment in the plan's order.

    An empty tile (``start == stop``) still takes part in the collectives of its round.
    """

    rank: int
    round: int
    start: int
    stop: int

    @property
    def cells(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class Claim:
    """A fragment handed to a replica or to the helper.

    Attributes:
        fragment: what to generate.
        version: the weights it must be denoised with from beginning to end (I4).
        attempt: how often its groups were started before; results of older attempts are late.
        steps_done: denoising steps already behind it (0 for a fresh one).
    """

    fragment: Fragment
    version: int
    attempt: int = 0
    steps_done: int = 0

    @property
    def step(self) -> int:
        """The step its samples belong to."""
        return self.fragment.step


class Action(enum.Enum):
    """What the Trainer does with a bubble."""

    SKIP = "skip"
    GENERATE = "generate"


@dataclass(frozen=True, slots=True)
class Decision:
    """The answer of a TAG policy at a bubble.

    Attributes:
        action: skip the bubble, or generate on the Trainer's devices.
        fragments: fragments to claim (0 when skipping).
        yield_when_ready: give way at the next denoising step once a training fragment is ready.
        hand_over: after yielding, an idle replica of the same version may go on with the partial latents.
        predicted_s: predicted time from now to the end of the logical batch; NaN when the policy predicts nothing.
    """

    action: Action
    fragments: int = 0
    yield_when_ready: bool = False
    hand_over: bool = False
    predicted_s: float = field(default=float("nan"), compare=False)

    def __post_init__(self) -> None:
        if (self.action is Action.GENERATE) != (self.fragments > 0):
            raise ValueError(f"decision: {self.action.value} with fragments={self.fragments}")


SKIP = Decision(Action.SKIP)
