"""Workload and testbed files as typed objects, and the profile they give on a placement.

A file is a mapping (read from YAML by the command line). Every key is checked: an unknown or missing one is an error.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields, replace

from verl_digen.schedule.profile import Profile
from verl_digen.schedule.work import Workload, require_not_negative, require_positive


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceGroup:
    """Equal devices of a testbed.

    Attributes:
        name: label.
        count: devices.
        speed: sustained speed relative to the profile's device.
        memory_gib: memory of one device.
        bandwidth_gib_s: network bandwidth of a node, GiB/s.
    """

    name: str
    count: int
    speed: float = 1.0
    memory_gib: float = 80.0
    bandwidth_gib_s: float = 25.0

    def __post_init__(self) -> None:
        require_positive(self, "count", "speed", "memory_gib", "bandwidth_gib_s")


@dataclass(frozen=True, slots=True, kw_only=True)
class Testbed:
    """The devices there are, and how well a replica spreads over several of them.

    Attributes:
        parallel_efficiency: speed kept at each doubling of a replica's devices.
    """

    __test__ = False  # not a test class, whatever its name suggests to pytest

    name: str
    groups: tuple[DeviceGroup, ...]
    parallel_efficiency: float = 0.9

    def __post_init__(self) -> None:
        require_positive(self, "parallel_efficiency")
        if not self.groups or self.parallel_efficiency > 1:
            raise ValueError(
                f"testbed {self.name}: {len(self.groups)} device groups, parallel_efficiency={self.parallel_efficiency}"
            )

    @property
    def devices(self) -> int:
        return sum(group.count for group in self.groups)

    def replica_speed(self, group: DeviceGroup, width: int) -> float:
        """Speed of a replica of ``width`` devices."""
        return group.speed * width * self.parallel_efficiency ** math.log2(width)


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """What must fit, GiB.

    Attributes:
        rollout_gib: weights, encoders and decoder of a replica, divided over its devices.
        rollout_sample_gib: more for each sample of a replica's batch, divided likewise.
        trainer_state_gib: weights, gradients and optimizer state, sharded over all ranks.
        trainer_fixed_gib: not sharded, on every rank (one gathered block, encoders).
        cell_gib: activations of one cell of a tile.
        usable: share of a device's memory that may be planned with.
    """

    rollout_gib: float = 0.0
    rollout_sample_gib: float = 0.0
    trainer_state_gib: float = 0.0
    trainer_fixed_gib: float = 0.0
    cell_gib: float = 1e-6
    usable: float = 0.92

    def __post_init__(self) -> None:
        require_not_negative(self, *(f.name for f in fields(self)))
        require_positive(self, "cell_gib", "usable")

    def rollout_need(self, width: int, batch: int) -> float:
        """Memory of one device of a replica."""
        return (self.rollout_gib + batch * self.rollout_sample_gib) / width

    def trainer_need(self, ranks: int, cells: int) -> float:
        """Memory of one rank."""
        return self.trainer_state_gib / ranks + self.trainer_fixed_gib + cells * self.cell_gib


@dataclass(frozen=True, slots=True, kw_only=True)
class Communication:
    """What moves over the network.

    Attributes:
        gathered_gib: weights gathered for one pass through the sharded model.
        per_tile: such passes of one forward/backward (gather, gather again, reduce).
        exposed: share of that time not hidden behind compute.
        published_gib: weights of a publish.
    """

    gathered_gib: float = 0.0
    per_tile: float = 3.0
    exposed: float = 0.5
    published_gib: float = 0.0

    def __post_init__(self) -> None:
        require_not_negative(self, *(f.name for f in fields(self)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One workload file: what a step asks for, what it costs, and where the numbers come from."""

    workload: Workload
    costs: Profile
    memory: Memory = field(default_factory=Memory)
    communication: Communication = field(default_factory=Communication)
    source: str = ""
    reward_slots: int = 0

    def profile(self, trainer_group: DeviceGroup, ranks: int) -> Profile:
        """Costs on a placement: communication over the Trainer's network is added to what the file gives.

        Gathering takes what the other nodes hold; a Trainer of one rank gathers nothing. The result is in
        seconds of a device of speed 1, so network times are multiplied by the Trainer's speed, which divides
        them again where they are used.
        """
        move = self.communication
        share = (1.0 - 1.0 / ranks) / trainer_group.bandwidth_gib_s * trainer_group.speed
        gather = move.gathered_gib * move.exposed * share
        costs = self.costs
        return replace(
            costs,
            tile_fixed_s=costs.tile_fixed_s + move.per_tile * gather,
            logprob_fixed_s=costs.logprob_fixed_s + gather,
            helper_denoise_s=costs.helper_denoise_s or costs.denoise_s,
            helper_fixed_s=costs.helper_fixed_s + gather,
            publish_s=costs.publish_s + move.published_gib / trainer_group.bandwidth_gib_s,
        )

    def resized(self, denoise_steps: int | None = None, trained_fraction: float | None = None) -> Case:
        """The case with other sampling steps or another trained share of them (rounded, at least one)."""
        work = self.workload
        steps = denoise_steps or work.denoise_steps
        share = work.trained_transitions / work.denoise_steps if trained_fraction is None else trained_fraction
        if not 0 < share <= 1:
            raise ValueError(f"workload {work.name}: trained_fraction={share} must lie above 0 and not above 1")
        return replace(
            self, workload=replace(work, denoise_steps=steps, trained_transitions=max(1, round(share * steps)))
        )


def _build(cls: type, mapping: object, where: str, **extra: object):
    if not isinstance(mapping, Mapping):
        raise ValueError(f"{where}: expected a mapping, got {type(mapping).__name__}")
    known = {f.name: f for f in fields(cls) if f.name not in extra}
    unknown = sorted(set(mapping) - set(known))
    missing = sorted(
        name
        for name, f in known.items()
        if name not in mapping and f.default is MISSING and f.default_factory is MISSING
    )
    if unknown or missing:
        raise ValueError(f"{where}: unknown keys {unknown}, missing keys {missing}; known: {', '.join(sorted(known))}")
    return cls(**mapping, **extra)


def read_case(mapping: Mapping, where: str = "workload file") -> Case:
    """Build a :class:`Case`. ``ValueError`` names unknown, missing and impossible entries."""
    allowed = {"workload", "costs", "memory", "communication", "source", "reward_slots", "testbed", "measured"}
    unknown = sorted(set(mapping) - allowed)
    if unknown or not {"workload", "costs"} <= set(mapping):
        raise ValueError(f"{where}: unknown keys {unknown}; needs workload and costs; known: {sorted(allowed)}")
    return Case(
        workload=_build(Workload, mapping["workload"], f"{where}: workload"),
        costs=_build(Profile, mapping["costs"], f"{where}: costs"),
        memory=_build(Memory, mapping.get("memory", {}), f"{where}: memory"),
        communication=_build(Communication, mapping.get("communication", {}), f"{where}: communication"),
        source=str(mapping.get("source", "")),
        reward_slots=int(mapping.get("reward_slots", 0)),
    )


def read_testbed(mapping: Mapping, where: str = "testbed") -> Testbed:
    """Build a :class:`Testbed`."""
    mapping = dict(mapping)
    groups = tuple(_build(DeviceGroup, group, f"{where}: groups") for group in mapping.pop("groups", ()))
    return _build(Testbed, mapping, where, groups=groups)
