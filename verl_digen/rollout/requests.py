"""What travels between the manager, the replicas, the reward workers and the trainer: plain descriptions."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

TRAIN = "train"
VALIDATION = "val"


@dataclass(frozen=True, kw_only=True)
class PromptGroup:
    """One prompt occurrence with its n samples.

    Attributes:
        uid: stable name, derived from (seed, epoch, position); the key of every random draw of the group.
        n: samples.
        partition: ``train`` or ``val`` of the TransferQueue.
    """

    uid: str
    n: int
    prompt: str
    negative_prompt: str
    ground_truth: str
    data_source: str
    extra_info: dict[str, Any] = field(default_factory=dict)
    partition: str = TRAIN

    @property
    def samples(self) -> list[tuple[str, int]]:
        return [(self.uid, j) for j in range(self.n)]


@dataclass(frozen=True, kw_only=True)
class Fragment:
    """Samples that one replica denoises in one batch.

    Attributes:
        fragment_id: distinct within a run, for messages and tags.
        groups: the groups that the samples belong to, by uid.
        samples: (uid, j), uid-major.
        version: the version that the replica must hold when it starts.
        training_step: 1-based; moves progressive windows.
        attempt: how often these samples have been tried before.
    """

    fragment_id: int
    groups: dict[str, PromptGroup]
    samples: tuple[tuple[str, int], ...]
    version: int
    training_step: int
    attempt: int = 0

    @property
    def partition(self) -> str:
        return next(iter(self.groups.values())).partition

    @property
    def validate(self) -> bool:
        return self.partition == VALIDATION


@dataclass(frozen=True, kw_only=True)
class FragmentReport:
    """What a replica says of a finished fragment; latents and pixels travel elsewhere.

    Attributes:
        version: stamped when denoising started.
        noise_hashes: of the initial noise, one per sample.
        transitions: trained transitions K of each sample.
        effective: the sampling parameters really used.
        started, ended: seconds since the epoch; ``phases`` names seconds inside.
    """

    fragment_id: int
    replica: str
    version: int
    samples: tuple[tuple[str, int], ...]
    noise_hashes: tuple[str, ...]
    transitions: tuple[int, ...]
    effective: dict[str, Any]
    started: float
    ended: float
    phases: dict[str, float]
    peak_memory_bytes: int


@dataclass(frozen=True, kw_only=True)
class SampleResult:
    """A scored sample as the driver knows it: no latents, no pixels."""

    uid: str
    j: int
    reward: float
    extra: dict[str, Any]
    version: int
    replica: str
    transitions: int
    noise_hash: str


class RolloutError(RuntimeError):
    """Samples could not be generated or scored; the message names them, the place and the cause."""


@dataclass
class GroupResult:
    """A complete group: all samples generated and scored under one version.

    Attributes:
        completed, taken: seconds since the epoch at which its last sample was scored, and at which the trainer took it.
        staleness: versions between the step it is trained in and the one it was generated under, when it was taken.
    """

    group: PromptGroup
    samples: list[SampleResult]
    version: int
    completed: float
    taken: float = 0.0
    staleness: int = 0


@dataclass(frozen=True)
class Scoring:
    """A fragment at a reward worker; seconds since the epoch."""

    fragment_id: int
    worker: int
    samples: int
    started: float
    ended: float


@dataclass
class Activity:
    """What replicas and reward workers did for training samples since the last report."""

    reports: list[FragmentReport] = field(default_factory=list)
    scorings: list[Scoring] = field(default_factory=list)


def named(samples: tuple[tuple[str, int], ...]) -> str:
    """The first samples of a fragment, for messages."""
    return ", ".join(f"({uid}, {j})" for uid, j in samples[:4]) + (" ..." if len(samples) > 4 else "")


def row_key(uid: str, j: int) -> str:
    """TransferQueue key of a sample."""
    return f"{uid}_{j}_0"
