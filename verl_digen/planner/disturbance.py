"""Jitter, stragglers and failures of the simulator, all from a seed.

A factor belongs to a sample, not to the place or the moment it is generated, so that two schedules of the
same seed face the same work.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from verl_digen.schedule.work import require_not_negative

_MASK = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class Failure:
    """Replica ``replica`` (index) loses all it is doing at ``at_s`` and is back after ``down_s`` seconds."""

    replica: int
    at_s: float
    down_s: float

    def __post_init__(self) -> None:
        require_not_negative(self, "replica", "at_s", "down_s")


@dataclass(frozen=True, slots=True, kw_only=True)
class Disturbance:
    """What goes differently from the profile.

    Attributes:
        seed: of every draw.
        jitter: standard deviation of the logarithm of a sample's generation time (mean stays 1).
        straggler_share: share of samples that are stragglers.
        straggler_factor: how much longer these take.
        failures: replicas that fail.
    """

    seed: int = 0
    jitter: float = 0.0
    straggler_share: float = 0.0
    straggler_factor: float = 1.0
    failures: tuple[Failure, ...] = ()

    def __post_init__(self) -> None:
        require_not_negative(self, "jitter", "straggler_share")
        if self.straggler_share > 1 or self.straggler_factor < 1:
            raise ValueError(
                f"disturbance: straggler_share={self.straggler_share} must not exceed 1 and "
                f"straggler_factor={self.straggler_factor} must be at least 1"
            )

    @property
    def varies(self) -> bool:
        """Whether samples differ in duration."""
        return self.jitter > 0 or (self.straggler_share > 0 and self.straggler_factor > 1)

    def factor(self, uid: int, j: int) -> float:
        """Duration of a sample relative to the profile."""
        state = _mix(_mix(_mix(self.seed & _MASK) ^ (uid & _MASK)) ^ (j & _MASK))
        factor = 1.0
        if self.jitter:
            radius = math.sqrt(-2.0 * math.log(1.0 - _uniform(state)))
            normal = radius * math.cos(2.0 * math.pi * _uniform(_mix(state)))
            factor = math.exp(self.jitter * normal - 0.5 * self.jitter * self.jitter)
        if self.straggler_share and _uniform(_mix(state ^ 0x5BD1E995)) < self.straggler_share:
            factor *= self.straggler_factor
        return factor


def _mix(value: int) -> int:
    """One round of the splitmix64 generator."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def _uniform(value: int) -> float:
    """A number in [0, 1) from 53 of the bits."""
    return (value >> 11) * (1.0 / (1 << 53))
