"""Typed options of the plugin (``trainer.v1.digen``): one dataclass per section, checked once at start-up.

Defaults stand in ``config/digen/default.yaml`` next to their meaning; a test keeps the two equal.
"""

from __future__ import annotations

import difflib
import math
from dataclasses import dataclass, field
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigKeyError, OmegaConfBaseException

PREFIX = "trainer.v1.digen"
KERNELS = ("sde", "dance", "cps")


def _choice(option: str, value: Any, allowed: tuple) -> None:
    if value not in allowed:
        raise ValueError(f"{PREFIX}.{option}={value!r} is unknown; choose one of {', '.join(map(str, allowed))}")


def _positive(option: str, value: float | None, *, optional: bool = False) -> None:
    if value is None and optional:
        return
    if value is None or not math.isfinite(value) or value <= 0:
        raise ValueError(f"{PREFIX}.{option}={value} must be a positive number")


@dataclass(kw_only=True)
class SelectionConfig:
    kind: str = "all"
    window_size: int | None = None
    window_range: list[int] | None = None
    mode: str = "random"
    stride: int = 1
    iterations: int = 1
    fraction: float | None = None
    per: str = "group"

    def __post_init__(self):
        _choice("sampling.selection.kind", self.kind, ("all", "window", "fraction"))
        _choice("sampling.selection.mode", self.mode, ("random", "progressive"))
        _choice("sampling.selection.per", self.per, ("group", "step"))
        used = {"all": (), "window": ("window_size", "window_range", "mode"), "fraction": ("fraction",)}[self.kind]
        if self.kind == "window" and self.mode == "progressive":
            used += ("stride", "iterations")
        defaults = SelectionConfig.__dataclass_fields__
        for name in ("window_size", "window_range", "mode", "stride", "iterations", "fraction"):
            if name not in used and getattr(self, name) != defaults[name].default:
                raise ValueError(
                    f"{PREFIX}.sampling.selection.{name}={getattr(self, name)} is not read with "
                    f"selection.kind={self.kind} and mode={self.mode}; remove it or change the kind"
                )


@dataclass(kw_only=True)
class SamplingConfig:
    num_steps: int = 10
    kind: str = "sde"
    eta: float = 0.7
    guidance_scale: float = 1.0
    guidance_rescale: bool = False
    embedded_guidance: float | None = None
    split_cfg: bool = False
    shift: float | None = None
    height: int | None = None
    width: int | None = None
    num_frames: int | None = None
    same_noise: bool = False
    batch_size: int | None = None
    selection: SelectionConfig = field(default_factory=SelectionConfig)

    def __post_init__(self):
        _choice("sampling.kind", self.kind, KERNELS)
        _positive("sampling.num_steps", self.num_steps)
        _positive("sampling.eta", self.eta)
        for name in ("shift", "height", "width", "num_frames", "batch_size"):
            _positive(f"sampling.{name}", getattr(self, name), optional=True)
        if self.split_cfg and self.guidance_scale == 1.0:
            raise ValueError(f"{PREFIX}.sampling.split_cfg=true is not read with guidance_scale=1.0 (no guidance)")
        if self.guidance_rescale and self.guidance_scale == 1.0:
            raise ValueError(
                f"{PREFIX}.sampling.guidance_rescale=true is not read with guidance_scale=1.0 (no guidance)"
            )


@dataclass(kw_only=True)
class FunctionSpec:
    """A function by its registered name, or of a file."""

    path: str | None = None
    name: str | None = None
    kwargs: dict[str, Any] = field(default_factory=dict)


@dataclass(kw_only=True)
class RewardSpec(FunctionSpec):
    weight: float = 1.0
    batched: bool = False


@dataclass(kw_only=True)
class ValidationConfig:
    num_steps: int | None = None
    guidance_scale: float | None = None
    batch_size: int | None = None
    grid_samples: int = 40
    metrics: dict[str, FunctionSpec] = field(default_factory=dict)

    def __post_init__(self):
        for name in ("num_steps", "batch_size"):
            _positive(f"validation.{name}", getattr(self, name), optional=True)
        if self.grid_samples < 0:
            raise ValueError(f"{PREFIX}.validation.grid_samples={self.grid_samples} must be 0 or more")


@dataclass(kw_only=True)
class AlgorithmConfig:
    norm: str = "group"
    adv_max: float = 5.0
    kl_form: str = "transition"

    def __post_init__(self):
        _choice("algorithm.norm", self.norm, ("group", "global", "none"))
        _choice("algorithm.kl_form", self.kl_form, ("transition", "transition_without_delta", "velocity"))
        _positive("algorithm.adv_max", self.adv_max)


@dataclass(kw_only=True)
class EMAConfig:
    enable: bool = False
    decay: float = 0.9
    every: int = 8
    validate: bool = False

    def __post_init__(self):
        if not 0.0 <= self.decay < 1.0:
            raise ValueError(f"{PREFIX}.ema.decay={self.decay} must lie in [0, 1)")
        _positive("ema.every", self.every)
        if self.validate and not self.enable:
            raise ValueError(f"{PREFIX}.ema.validate=true needs {PREFIX}.ema.enable=true")


@dataclass(kw_only=True)
class GapConfig:
    enable: bool | None = None  # None: as the preset says; a bool in a DigenConfig
    fragment_size: int | None = None

    def __post_init__(self):
        _positive("gap.fragment_size", self.fragment_size, optional=True)


@dataclass(kw_only=True)
class TspConfig:
    enable: bool | None = None  # None: as the preset says; a bool in a DigenConfig
    max_cells: int | None = None
    auto: bool = False
    memory_fraction: float = 0.9
    reduce: str = "transaction"

    def __post_init__(self):
        _positive("tsp.max_cells", self.max_cells, optional=True)
        _choice("tsp.reduce", self.reduce, ("transaction", "tile"))
        if not 0.0 < self.memory_fraction <= 1.0:
            raise ValueError(f"{PREFIX}.tsp.memory_fraction={self.memory_fraction} must lie in (0, 1]")


@dataclass(kw_only=True)
class TcssConfig:
    enable: bool = False
    max_stale_ratio: float = 0.5
    correction: str = "clip"
    weight_cap: float = 2.0

    def __post_init__(self):
        _choice("tcss.correction", self.correction, ("clip", "decoupled"))
        _positive("tcss.weight_cap", self.weight_cap)
        if not 0.0 < self.max_stale_ratio <= 1.0:
            raise ValueError(
                f"{PREFIX}.tcss.max_stale_ratio={self.max_stale_ratio} must lie in (0, 1]; to switch stale groups off "
                f"set {PREFIX}.tcss.enable=false"
            )
        defaults = TcssConfig.__dataclass_fields__
        for name in ("max_stale_ratio", "correction", "weight_cap"):
            unread = not self.enable or (name == "weight_cap" and self.correction != "decoupled")
            if unread and getattr(self, name) != defaults[name].default:
                why = (
                    f"{PREFIX}.tcss.enable=false" if not self.enable else f"{PREFIX}.tcss.correction={self.correction}"
                )
                raise ValueError(f"{PREFIX}.tcss.{name}={getattr(self, name)} is not read with {why}")


@dataclass(kw_only=True)
class FailureConfig:
    max_retries: int = 2
    generate_timeout_s: float = 1800.0
    reward_timeout_s: float = 300.0
    train_timeout_s: float = 3600.0
    sync_timeout_s: float = 900.0

    def __post_init__(self):
        if self.max_retries < 0:
            raise ValueError(f"{PREFIX}.failure.max_retries={self.max_retries} must be 0 or more")
        for name in ("generate_timeout_s", "reward_timeout_s", "train_timeout_s", "sync_timeout_s"):
            _positive(f"failure.{name}", getattr(self, name))


@dataclass(kw_only=True)
class TraceConfig:
    every: int = 0

    def __post_init__(self):
        if self.every < 0:
            raise ValueError(f"{PREFIX}.trace.every={self.every} must be 0 or more")


@dataclass(kw_only=True)
class PoolStrings:
    trainer: str | None = None
    rollout: str | None = None
    reward: str | None = None


@dataclass(kw_only=True)
class ThreadsConfig:
    trainer: int | None = None
    rollout: int | None = None

    def __post_init__(self):
        _positive("threads.trainer", self.trainer, optional=True)
        _positive("threads.rollout", self.rollout, optional=True)


@dataclass(kw_only=True)
class RewardWorkersConfig:
    num_gpus: float = 0.0

    def __post_init__(self):
        if not 0.0 <= self.num_gpus < math.inf or (self.num_gpus > 1 and self.num_gpus != int(self.num_gpus)):
            raise ValueError(
                f"{PREFIX}.reward_workers.num_gpus={self.num_gpus} must be 0, a share of one device, or whole devices"
            )


@dataclass(kw_only=True)
class DigenConfig:
    """All options under ``trainer.v1.digen``.

    Raises:
        ValueError: an unknown option name, a value of the wrong type, an impossible or an unread combination.
    """

    preset: str | None = None
    placement: str = "colocated"
    accelerator_type: PoolStrings = field(default_factory=PoolStrings)
    arithmetic: str = "float32"
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    validation: ValidationConfig = field(default_factory=ValidationConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    rewards: dict[str, RewardSpec] = field(default_factory=dict)
    reward_workers: RewardWorkersConfig = field(default_factory=RewardWorkersConfig)
    ema: EMAConfig = field(default_factory=EMAConfig)
    gap: GapConfig = field(default_factory=GapConfig)
    tsp: TspConfig = field(default_factory=TspConfig)
    tcss: TcssConfig = field(default_factory=TcssConfig)
    trace: TraceConfig = field(default_factory=TraceConfig)
    failure: FailureConfig = field(default_factory=FailureConfig)
    threads: ThreadsConfig = field(default_factory=ThreadsConfig)

    def __post_init__(self):
        _choice("preset", self.preset, (None, "digen"))
        _choice("placement", self.placement, ("colocated", "disaggregated"))
        _choice("arithmetic", self.arithmetic, ("float32", "float64"))
        for mechanism in (self.gap, self.tsp):
            if mechanism.enable is None:
                mechanism.enable = self.preset == "digen"
        if self.accelerator_type.reward is not None and not self.reward_workers.num_gpus:
            raise ValueError(
                f"{PREFIX}.accelerator_type.reward={self.accelerator_type.reward} is not read with "
                f"{PREFIX}.reward_workers.num_gpus=0"
            )
        if self.tcss.enable and self.placement == "colocated":
            raise ValueError(
                f"{PREFIX}.tcss.enable=true needs {PREFIX}.placement=disaggregated: colocated replicas share the "
                "Trainer's devices, so nothing is generated while it trains"
            )
        if self.tcss.enable and not self.gap.enable:
            raise ValueError(f"{PREFIX}.tcss.enable=true needs {PREFIX}.gap.enable=true: groups start one by one")
        if self.gap.fragment_size is not None and not self.gap.enable:
            raise ValueError(
                f"{PREFIX}.gap.fragment_size={self.gap.fragment_size} is not read with gap.enable=false; "
                f"use {PREFIX}.sampling.batch_size for the one-shot path"
            )
        if self.sampling.batch_size is not None and self.gap.enable:
            raise ValueError(
                f"{PREFIX}.sampling.batch_size={self.sampling.batch_size} is not read with gap.enable=true; "
                f"use {PREFIX}.gap.fragment_size"
            )


def parse_digen(config: DictConfig | dict) -> DigenConfig:
    """Build :class:`DigenConfig` from ``trainer.v1.digen`` of a composed configuration.

    Raises:
        ValueError: an unknown name (with the closest known one), a wrong type or an impossible value.
    """
    schema = OmegaConf.structured(DigenConfig)
    try:
        return OmegaConf.to_object(OmegaConf.merge(schema, config))
    except ConfigKeyError as error:
        key = str(error.full_key or error.key)
        section, _, name = key.rpartition(".")
        node = OmegaConf.select(schema, section) if section else schema
        for entries, spec in (("rewards.", RewardSpec), ("validation.metrics.", FunctionSpec)):
            if section.startswith(entries):
                node = OmegaConf.structured(spec)
        known = [str(k) for k in node] if node is not None else []
        close = difflib.get_close_matches(name or key, known, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise ValueError(
            f"unknown option {PREFIX}.{key}{hint} Options there: {', '.join(sorted(known)) or 'none'}"
        ) from error
    except OmegaConfBaseException as error:
        raise ValueError(f"{PREFIX}.{error.full_key or ''}: {str(error).splitlines()[0]}") from error
