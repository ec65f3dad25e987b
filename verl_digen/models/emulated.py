"""An EMULATED model, for tests and benchmarks of the control plane only: it takes configured times.

Forward and backward occupy a pretended device for times that grow with the batch, plus a part per pass for
communication; the tensors are real and small. Eight of these fit on two cores and still run real actors, real transfers
and real collectives. Figures made with it are labelled *emulated*.

The device works as an accelerator does: a call returns while its work is still going on, and the next call waits until
the one before is done. So the host's own time is hidden behind the device's, as it is in a real run.
"""

from __future__ import annotations

import hashlib
import json
import time
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from verl_digen.models.family import Guidance, ModelFamily, register_family

CHANNELS, SIDE, EMBEDDING = 4, 8, 16
FORWARD_SHARE = 1.0 / 3.0  # of a training pass; the backward takes the rest


@dataclass(frozen=True, kw_only=True)
class EmulatedCosts:
    """Seconds on the pretended device.

    Attributes:
        denoise_s, denoise_fixed_s: a sampling forward, per sample and per pass.
        decode_s: per sample.
        train_cell_s, tile_fixed_s: forward and backward of a tile, per cell and per tile (communication).
    """

    denoise_s: float
    train_cell_s: float
    denoise_fixed_s: float = 0.0
    decode_s: float = 0.0
    tile_fixed_s: float = 0.0

    def __post_init__(self) -> None:
        negative = {name: value for name, value in asdict(self).items() if not value >= 0}
        if negative:
            raise ValueError(f"emulated costs must not be negative: {negative}")


class PretendedDevice:
    """Does one thing after another; the caller may be ahead of it by one call."""

    def __init__(self) -> None:
        self._free_at = 0.0

    def occupy(self, seconds: float) -> None:
        """Wait until the device is free, then give it work of this length and return."""
        self.wait()
        self._free_at = time.monotonic() + seconds

    def wait(self) -> None:
        """Wait until the device has nothing to do."""
        left = self._free_at - time.monotonic()
        if left > 0:
            time.sleep(left)


class _Backward(torch.autograd.Function):
    """The identity, whose backward occupies the device."""

    @staticmethod
    def forward(ctx, x: Tensor, device: PretendedDevice, seconds: float) -> Tensor:
        ctx.device, ctx.seconds = device, seconds
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient: Tensor):
        ctx.device.occupy(ctx.seconds)
        return gradient, None, None


class EmulatedTransformer(nn.Module):
    """Velocity = x · scale + bias(time, prompt), in the times of :class:`EmulatedCosts`; a hundred parameters."""

    def __init__(self, costs: EmulatedCosts, device: PretendedDevice) -> None:
        super().__init__()
        self.costs, self.device_clock = costs, device
        self.scale = nn.Parameter(torch.ones(CHANNELS, 1, 1))
        self.mix = nn.Linear(EMBEDDING + 1, CHANNELS)

    def forward(self, x: Tensor, timestep: Tensor, embedding: Tensor) -> Tensor:
        """[B, C, S, S] for ``x`` [B, C, S, S], ``timestep`` [B] in 0..1000 and ``embedding`` [B, D]."""
        costs, cells = self.costs, len(x)
        features = torch.cat([embedding, timestep.to(embedding.dtype)[:, None] / 1000], dim=1)
        velocity = x * self.scale + self.mix(features)[:, :, None, None]
        if not torch.is_grad_enabled():
            self.device_clock.occupy(costs.denoise_fixed_s + costs.denoise_s * cells)
            return velocity
        seconds = costs.tile_fixed_s + costs.train_cell_s * cells
        self.device_clock.occupy(FORWARD_SHARE * seconds)
        return _Backward.apply(velocity, self.device_clock, (1.0 - FORWARD_SHARE) * seconds)


@register_family
class EmulatedFamily(ModelFamily):
    """``EmulatedPipeline``. Latents [4, 8, 8]; condition: ``embedding`` [16], made from the prompt's hash."""

    name = "emulated"
    pipeline_classes = ("EmulatedPipeline",)
    lora_target_modules = ("mix",)
    conditioner_parts: ClassVar[tuple[str, ...]] = ()

    def load_transformer(self, *, attention_backend: str | None = None) -> nn.Module:
        """As configured in ``transformer/config.json``; there is no attention, so the backend is only noted."""
        transformer = EmulatedTransformer(EmulatedCosts(**self.transformer_config["costs"]), self.clock)
        transformer.load_state_dict(load_file(self.path / "transformer" / "diffusion_pytorch_model.safetensors"))
        self.attention_backend = attention_backend
        return transformer.to(self.device, self.dtype).requires_grad_(False).eval()

    @cached_property
    def clock(self) -> PretendedDevice:
        """The device of all that this object loads."""
        return PretendedDevice()

    @property
    def runs_behind(self) -> bool:
        return True

    def synchronize(self) -> None:
        self.clock.wait()

    def load_conditioner(self) -> None:
        """There is nothing to load: prompts are hashed, and latents are pictures already."""

    def _encode_prompt(self, prompt: str) -> dict[str, Tensor]:
        digest = hashlib.blake2b(prompt.encode(), digest_size=EMBEDDING).digest()
        return {"embedding": torch.tensor([byte / 127.5 - 1 for byte in digest], dtype=self.dtype, device=self.device)}

    def _forward(
        self, transformer: nn.Module, x: Tensor, timestep: Tensor, cond: dict[str, Tensor], guidance: Guidance
    ) -> Tensor:
        return transformer(x, timestep, cond["embedding"])

    def decode(self, latents: Tensor) -> np.ndarray:
        self.clock.occupy(self.transformer_config["costs"]["decode_s"] * len(latents))
        grey = latents.detach().float().mean(dim=1, keepdim=True).clamp(-1, 1).permute(0, 2, 3, 1)
        self.clock.wait()  # as every read of device memory on the host does
        return ((grey + 1) * 127.5).round().to(torch.uint8).cpu().numpy()

    def latent_shape(self, height: int, width: int, num_frames: int = 1) -> tuple[int, ...]:
        self.check_size(height, width, num_frames)
        return (CHANNELS, SIDE, SIDE)

    def default_size(self) -> tuple[int, int, int]:
        return SIDE, SIDE, 1

    def check_size(self, height: int, width: int, num_frames: int = 1) -> None:
        if (height, width, num_frames) != self.default_size():
            raise ValueError(f"the emulated model makes {SIDE} x {SIDE} images, got {height} x {width} x {num_frames}")


def write_emulated_model(folder: str | Path, costs: EmulatedCosts) -> Path:
    """Write a model folder whose passes take ``costs``; returns it."""
    folder = Path(folder)
    (folder / "transformer").mkdir(parents=True, exist_ok=True)
    (folder / "scheduler").mkdir(exist_ok=True)
    index: dict[str, Any] = {
        "_class_name": "EmulatedPipeline",
        "scheduler": ["diffusers", "FlowMatchEulerDiscreteScheduler"],
        "transformer": ["verl_digen", "EmulatedTransformer"],
    }
    (folder / "model_index.json").write_text(json.dumps(index, indent=1))
    scheduler = {"_class_name": "FlowMatchEulerDiscreteScheduler", "num_train_timesteps": 1000, "shift": 1.0}
    (folder / "scheduler" / "scheduler_config.json").write_text(json.dumps(scheduler, indent=1))
    config = {"_class_name": "EmulatedTransformer", "costs": asdict(costs)}
    (folder / "transformer" / "config.json").write_text(json.dumps(config, indent=1))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        transformer = EmulatedTransformer(costs, PretendedDevice())
    save_file(transformer.state_dict(), folder / "transformer" / "diffusion_pytorch_model.safetensors")
    return folder
