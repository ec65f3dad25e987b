"""The interface of a model family, and the registry that finds the family of a model folder.

A family knows how one kind of diffusion pipeline is loaded, prompted, run, decoded and scheduled. Everything
comes from a folder in the diffusers layout (``model_index.json`` and one subfolder per part). ``predict``
takes sigma per sample and no step number, so that sampling and training call the same function.

Conventions: sigma runs from 1 (noise) to 0 (data); the prediction is the velocity ``noise - data``.
"""

from __future__ import annotations

import importlib
import math
import pkgutil
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from verl_digen.models.attention import use_attention_backend
from verl_digen.models.parts import check_parts, load_part, read_config, read_index

__all__ = [
    "Guidance",
    "ModelFamily",
    "available_families",
    "check_parts",
    "family_for",
    "guided_velocity",
    "register_family",
    "stack_conditions",
    "uint8_pixels",
]


@dataclass(frozen=True, kw_only=True)
class Guidance:
    """How the conditional and the unconditional prediction are combined.

    Args:
        scale: classifier-free guidance ``v_neg + scale * (v - v_neg)``; 1 means none, and 0 really means 0
            (the negative prompt alone).
        rescale: bring the norm of the guided velocity back to that of the conditional one ("true CFG" norm rescale).
        embedded: the guidance value given to a guidance-distilled model as an input, or None.
        split: predict with and without the prompt in two forwards of B instead of one of 2B, for less memory.
    """

    scale: float = 1.0
    rescale: bool = False
    embedded: float | None = None
    split: bool = False

    def __post_init__(self) -> None:
        if not math.isfinite(self.scale) or (self.embedded is not None and not math.isfinite(self.embedded)):
            raise ValueError(f"guidance must be finite, got scale={self.scale}, embedded={self.embedded}")
        if self.rescale and not self.uses_cfg:
            raise ValueError("guidance rescale=True has no effect with scale=1.0: set another scale, or rescale=False")

    @classmethod
    def of(cls, sampling: Any, scale: float | None = None) -> Guidance:
        """The guidance of ``trainer.v1.digen.sampling``; validation may ask for another ``scale``."""
        scale = sampling.guidance_scale if scale is None else scale
        return cls(
            scale=scale,
            rescale=sampling.guidance_rescale and scale != 1.0,
            embedded=sampling.embedded_guidance,
            split=sampling.split_cfg,
        )

    @property
    def uses_cfg(self) -> bool:
        """Whether a second, unconditional prediction is needed."""
        return self.scale != 1.0


def guided_velocity(v_cond: Tensor, v_neg: Tensor, guidance: Guidance, norm_dims: tuple[int, ...]) -> Tensor:
    """Classifier-free guidance on velocities [B, ...], in at least fp32.

    The norms of ``rescale`` run over ``norm_dims``.
    """
    wide = torch.promote_types(v_cond.dtype, torch.float32)
    v_cond, v_neg = v_cond.to(wide), v_neg.to(wide)
    v = v_neg + guidance.scale * (v_cond - v_neg)
    if guidance.rescale:
        norm_cond = torch.linalg.vector_norm(v_cond, dim=norm_dims, keepdim=True)
        norm = torch.linalg.vector_norm(v, dim=norm_dims, keepdim=True)
        v = v * (norm_cond / norm.clamp_min(torch.finfo(wide).tiny))
    return v


def stack_conditions(rows: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Prompt tensors of several prompts as one batch: [L, ...] each to [B, L, ...].

    Prompts of unlike length are padded with zeros at the end. That needs a mask among the tensors (a name that ends in
    ``mask``), in which zero means "no token"; without one, zeros would be read as tokens.

    Raises:
        ValueError: the prompts have other tensors, tensors that differ in more than their length, or no mask.
    """
    names = rows[0].keys()
    if any(row.keys() != names for row in rows):
        raise ValueError(f"prompts have unlike tensors: {sorted({tuple(row) for row in rows})}")
    return {name: _stack_padded(name, [row[name] for row in rows], names) for name in names}


def _stack_padded(name: str, tensors: list[Tensor], names: Iterable[str]) -> Tensor:
    shapes = {tuple(tensor.shape) for tensor in tensors}
    if len(shapes) == 1:
        return torch.stack(tensors)
    if () in shapes or len({shape[1:] for shape in shapes}) > 1 or not any(other.endswith("mask") for other in names):
        raise ValueError(
            f"{name} of the prompts differ in shape, {' and '.join(str(list(s)) for s in sorted(shapes))}, and can be "
            f"padded only in length and beside a mask (tensors: {', '.join(names)})"
        )
    return torch.nn.utils.rnn.pad_sequence(tensors, batch_first=True)


def uint8_pixels(image: Tensor) -> np.ndarray:
    """Pixels in -1..1, channels second, as uint8 with channels last: [B, C, H, W] to [B, H, W, C], and [B, C, F, H, W]
    to [B, F, H, W, C]. Rounded as diffusers makes pictures, on the device, so that only bytes come to the host."""
    unit = (image.detach() * 0.5 + 0.5).clamp(0, 1)
    return (unit.float() * 255).round().to(torch.uint8).movedim(1, -1).contiguous().cpu().numpy()


class ModelFamily(ABC):
    """One kind of diffusion pipeline. Subclasses fill in the class variables and the abstract methods.

    Args:
        path: model folder in the diffusers layout, on a local disk.
        dtype: dtype of the weights that this object loads.
        device: where they are put.

    Attributes:
        compute_dtype: dtype of the transformer's inputs; None takes that of its parameters. Needed when the
            parameters are kept in another dtype than the forward runs in (FSDP2 mixed precision).
        shift: of the schedule, in place of the one in the model folder (None: that one); set before the first sigmas.
    """

    name: ClassVar[str]
    pipeline_classes: ClassVar[tuple[str, ...]]
    lora_target_modules: ClassVar[tuple[str, ...]]
    transformer_part: ClassVar[str] = "transformer"
    conditioner_parts: ClassVar[tuple[str, ...]]
    optional_parts: ClassVar[tuple[str, ...]] = ()
    vae_dtype: ClassVar[torch.dtype | None] = None  # None: that of the other parts

    def __init__(
        self, path: str | Path, *, dtype: torch.dtype = torch.float32, device: str | torch.device = "cpu"
    ) -> None:
        self.path = Path(path)
        self.dtype = dtype
        self.device = torch.device(device)
        self.compute_dtype: torch.dtype | None = None
        self.attention_backend: str | None = None
        self.shift: float | None = None
        self.check_parts(self.path, need=(self.transformer_part, "scheduler"))

    # ---- loading -------------------------------------------------------------------------------------------

    @classmethod
    def check_parts(cls, path: str | Path, need: tuple[str, ...] | None = None) -> None:
        """Raise a ValueError listing every part of ``need`` (default: all) that ``path`` lacks; reads no weights."""
        need = need if need is not None else (cls.transformer_part, "scheduler", *cls.conditioner_parts)
        check_parts(path, need=need, optional=cls.optional_parts)

    def load_transformer(self, *, attention_backend: str | None = None) -> nn.Module:
        """The denoiser, frozen and in eval mode, in ``dtype`` on ``device``.

        Args:
            attention_backend: a name of diffusers' attention switch (``native``, ``flash``, ``_flash_3``, ...);
                None leaves the model as diffusers builds it.

        Raises:
            ValueError: the backend cannot be had here; the message lists those that can.
        """
        transformer = load_part(self.path, self.transformer_part, dtype=self.dtype)
        transformer = transformer.to(self.device).requires_grad_(False).eval()
        if attention_backend is not None:
            self.install_dispatched_attention(transformer)
            use_attention_backend(transformer, attention_backend, self.device)
        self.attention_backend = attention_backend
        return transformer

    def install_dispatched_attention(self, transformer: nn.Module) -> None:  # noqa: B027 - most families need nothing
        """Make ``transformer`` obey diffusers' attention switch, for families whose processors ignore it."""

    @abstractmethod
    def load_conditioner(self) -> None:
        """Load tokenizers, text encoders and the VAE. Only what encodes prompts or decodes latents calls it."""

    def _load_frozen(self, part: str) -> Any:
        """A part on ``device``, frozen if it has weights; None for an optional part that the model goes without."""
        if part in self.optional_parts and self.index.get(part, [None])[0] is None:
            return None
        dtype = self.vae_dtype if part == "vae" and self.vae_dtype is not None else self.dtype
        module = load_part(self.path, part, dtype=dtype)
        return module.to(self.device).requires_grad_(False).eval() if isinstance(module, nn.Module) else module

    # ---- the device's clock --------------------------------------------------------------------------------

    @property
    def runs_behind(self) -> bool:
        """Whether a call returns while its work is still going on, so that a clock read then shows too little."""
        return self.device.type != "cpu"

    def synchronize(self) -> None:
        """Wait until the device has done what it was asked for. For the ends of measured phases, not for hot loops."""
        if self.device.type != "cpu":
            torch.get_device_module(self.device).synchronize(self.device)

    # ---- prompts and pixels --------------------------------------------------------------------------------

    @torch.no_grad()
    def encode_prompts(self, prompts: list[str]) -> list[dict[str, Tensor]]:
        """Embeddings of each prompt, without a batch dimension (for example ``prompt_embeds`` [L, D]).

        Each prompt is encoded in a call of its own, so that its embeddings are bit for bit the same whichever
        prompts it is asked with.
        """
        return [self._encode_prompt(prompt) for prompt in prompts]

    @abstractmethod
    def _encode_prompt(self, prompt: str) -> dict[str, Tensor]: ...

    @abstractmethod
    def decode(self, latents: Tensor) -> np.ndarray:
        """Pixels of final latents [B, ...]: uint8 [B, H, W, C], or [B, F, H, W, C] for video."""

    # ---- prediction ----------------------------------------------------------------------------------------

    def predict(
        self,
        transformer: nn.Module,
        x: Tensor,
        sigma: Tensor,
        cond: dict[str, Tensor],
        guidance: Guidance,
        negative: dict[str, Tensor] | None = None,
    ) -> Tensor:
        """Velocity (noise - data) at ``x``.

        Args:
            x: latents [B, ...]; cast to the transformer's dtype for the forward.
            sigma: noise level of each sample [B]; the model's time is sigma x 1000 (the scheduler's
                ``num_train_timesteps``), in fp32 as in the pipeline.
            cond: what :meth:`encode_prompts` gives, batched [B, ...].
            guidance: with ``uses_cfg``, ``negative`` is needed, and both predictions share one forward of 2B unless
                the guidance is ``split``.
            negative: embeddings of the negative prompt, batched as ``cond``.

        Returns:
            [B, ...] in the dtype of ``x``.
        """
        self.check_guidance(guidance)
        if guidance.uses_cfg and negative is None:
            raise ValueError(f"guidance scale {guidance.scale} needs the embeddings of a negative prompt, got none")
        if sigma.shape != x.shape[:1]:
            raise ValueError(f"sigma must have shape [{x.shape[0]}] (one per sample), got {list(sigma.shape)}")
        dtype = self.compute_dtype or _input_dtype(transformer)
        inputs = [x.to(dtype), sigma.to(torch.float32) * self.num_train_timesteps, _cast(cond, dtype)]
        if not guidance.uses_cfg:
            return self._forward(transformer, *inputs, guidance).to(x.dtype)
        neg_inputs = [*inputs[:2], _cast(negative, dtype)]
        if guidance.split:
            v_cond = self._forward(transformer, *inputs, guidance)
            v_neg = self._forward(transformer, *neg_inputs, guidance)
        else:
            both = [_concatenate(a, b) for a, b in zip(inputs, neg_inputs, strict=True)]
            v_cond, v_neg = self._forward(transformer, *both, guidance).chunk(2)
        return self._guide(v_cond, v_neg, guidance).to(x.dtype)

    @abstractmethod
    def _forward(
        self, transformer: nn.Module, x: Tensor, timestep: Tensor, cond: dict[str, Tensor], guidance: Guidance
    ) -> Tensor:
        """One call of the transformer: ``x`` [B, ...], ``timestep`` [B] in 0..1000, fp32."""

    def check_guidance(self, guidance: Guidance) -> None:
        """Refuse guidance that the model would ignore. Families with an embedded guidance override it."""
        if guidance.embedded is not None:
            raise ValueError(f"family {self.name!r} has no embedded guidance, but {guidance.embedded} was asked for")

    def _guide(self, v_cond: Tensor, v_neg: Tensor, guidance: Guidance) -> Tensor:
        """Both predictions [B, ...] combined; the norms of ``rescale`` are those of whole samples."""
        return guided_velocity(v_cond, v_neg, guidance, tuple(range(1, v_cond.ndim)))

    # ---- sizes ---------------------------------------------------------------------------------------------

    @abstractmethod
    def latent_shape(self, height: int, width: int, num_frames: int = 1) -> tuple[int, ...]:
        """Shape of one sample's latents, without the batch dimension, for an image of this size in pixels."""

    @abstractmethod
    def default_size(self) -> tuple[int, int, int]:
        """(height, width, frames) in pixels that the model was trained for."""

    @abstractmethod
    def check_size(self, height: int, width: int, num_frames: int = 1) -> None:
        """Raise a ValueError with the numbers if the model cannot make this size."""

    # ---- schedule ------------------------------------------------------------------------------------------

    @cached_property
    def index(self) -> dict[str, Any]:
        """``model_index.json``."""
        return read_index(self.path)

    @cached_property
    def transformer_config(self) -> dict[str, Any]:
        """``config.json`` of the transformer."""
        return read_config(self.path, self.transformer_part)

    @cached_property
    def scheduler(self) -> Any:
        """The pipeline's own scheduler object. Its state is that of the last call of :meth:`sigmas`.

        Raises:
            ValueError: another ``shift`` is asked for, and the schedule takes its shift from the resolution.
        """
        scheduler = load_part(self.path, "scheduler")
        if self.shift is not None:
            if scheduler.config.get("use_dynamic_shifting"):
                raise ValueError(
                    f"trainer.v1.digen.sampling.shift={self.shift:g}: the schedule of {self.path} takes its shift from "
                    "the resolution; set it to null"
                )
            option = "flow_shift" if "flow_shift" in scheduler.config else "shift"
            scheduler = type(scheduler).from_config({**scheduler.config, option: self.shift})
        return scheduler

    @property
    def num_train_timesteps(self) -> int:
        return self.scheduler.config.num_train_timesteps

    def sigmas(self, num_steps: int, height: int, width: int, num_frames: int = 1) -> Tensor:
        """Noise levels fp32 [num_steps + 1] as the pipeline's scheduler sets them for this size; the last is 0.

        Raises:
            ValueError: fewer than one step, or a schedule that does not fall from at most 1 to 0.
        """
        if num_steps < 1:
            raise ValueError(f"num_steps must be at least 1, got {num_steps}")
        self.check_size(height, width, num_frames)
        self.scheduler.set_timesteps(device="cpu", **self._timestep_options(num_steps, height, width, num_frames))
        sigmas = self.scheduler.sigmas.to(torch.float32).clone()
        falling = bool((sigmas[1:] < sigmas[:-1]).all())
        if len(sigmas) != num_steps + 1 or not falling or sigmas[0] > 1 or sigmas[-1] != 0:
            raise ValueError(
                f"the scheduler of {self.path} gives sigmas {sigmas.tolist()} for {num_steps} steps; "
                f"wanted {num_steps + 1} falling values from at most 1 to 0"
            )
        return sigmas

    def _timestep_options(self, num_steps: int, height: int, width: int, num_frames: int) -> dict[str, Any]:
        """What the pipeline passes to the scheduler's ``set_timesteps``."""
        return {"num_inference_steps": num_steps}

    def effective_parameters(
        self,
        num_steps: int,
        height: int,
        width: int,
        num_frames: int = 1,
        guidance: Guidance | None = None,
        transformer: nn.Module | None = None,
    ) -> dict[str, Any]:
        """What a generation of this request really uses, in plain types, to be compared with the request."""
        guidance = guidance or Guidance()
        self.check_guidance(guidance)
        sigmas = self.sigmas(num_steps, height, width, num_frames)
        parameter = next(transformer.parameters(), None) if transformer is not None else None
        return {
            "family": self.name,
            "height": height,
            "width": width,
            "num_frames": num_frames,
            "latent_shape": list(self.latent_shape(height, width, num_frames)),
            "num_steps": len(sigmas) - 1,
            "sigmas": sigmas.tolist(),
            "shift": self._effective_shift(num_steps, height, width, num_frames),
            "guidance_scale": guidance.scale,
            "guidance_rescale": guidance.rescale,
            "guidance_embedded": guidance.embedded,
            "dtype": str(parameter.dtype if parameter is not None else self.dtype).removeprefix("torch."),
            "attention_backend": self.attention_backend or "default",
        }

    def _effective_shift(self, num_steps: int, height: int, width: int, num_frames: int) -> float:
        """The static shift, or exp(mu) of a shift that depends on the resolution."""
        options = self._timestep_options(num_steps, height, width, num_frames)
        return math.exp(options["mu"]) if "mu" in options else float(self.scheduler.shift)


def _input_dtype(transformer: nn.Module) -> torch.dtype:
    """Dtype of the parameters, without those of modules that the model keeps in fp32 whatever its dtype."""
    kept = getattr(transformer, "_keep_in_fp32_modules", None) or ()
    return next(
        parameter.dtype
        for name, parameter in transformer.named_parameters()
        if parameter.is_floating_point() and not any(part in name.split(".") for part in kept)
    )


def _cast(cond: dict[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    return {key: value.to(dtype) if value.is_floating_point() else value for key, value in cond.items()}


def _concatenate(a: Any, b: Any) -> Any:
    """Two batches as one; where prompts are of unlike length, the shorter ones are padded."""
    if not isinstance(a, dict):
        return torch.cat([a, b])
    if a.keys() == b.keys() and all(a[key].shape[1:] == b[key].shape[1:] for key in a):
        return {key: torch.cat([a[key], b[key]]) for key in a}
    rows = [dict(zip(side, values, strict=True)) for side in (a, b) for values in zip(*side.values(), strict=True)]
    try:
        return stack_conditions(rows)
    except ValueError as error:
        raise ValueError(f"prompt and negative prompt do not fit into one forward: {error}") from error


# ---- registry ----------------------------------------------------------------------------------------------

_FAMILIES: dict[str, type[ModelFamily]] = {}


def register_family(cls: type[ModelFamily]) -> type[ModelFamily]:
    """Class decorator: make a family known under its ``name`` and its ``pipeline_classes``."""
    known = _FAMILIES.get(cls.name)
    if known is not None and (known.__module__, known.__qualname__) != (cls.__module__, cls.__qualname__):
        raise ValueError(f"model family {cls.name!r} is taken by {known.__module__}.{known.__qualname__}")
    _FAMILIES[cls.name] = cls
    return cls


def available_families() -> dict[str, type[ModelFamily]]:
    """All families by name. Every module of this folder is imported: a new family is one new file."""
    package = importlib.import_module("verl_digen.models")
    for module in pkgutil.iter_modules(package.__path__, "verl_digen.models."):
        importlib.import_module(module.name)
    return dict(_FAMILIES)


def family_for(path: str | Path, name: str | None = None) -> type[ModelFamily]:
    """The family called ``name``, or the one whose pipeline class ``model_index.json`` names.

    Raises:
        ValueError: no such family; the message lists the families and their pipeline classes.
    """
    families = available_families()
    listing = "; ".join(f"{n} ({', '.join(c.pipeline_classes)})" for n, c in sorted(families.items()))
    if name is not None:
        if name not in families:
            raise ValueError(f"unknown model family {name!r}; available: {listing}")
        return families[name]
    pipeline_class = read_index(path).get("_class_name")
    for cls in families.values():
        if pipeline_class in cls.pipeline_classes:
            return cls
    raise ValueError(f"{path} holds a {pipeline_class!r}, which no model family covers; available: {listing}")
