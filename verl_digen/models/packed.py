"""What image families with 2 x 2 patches of latents share: packing, sizes, and a schedule that shifts with the size."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from verl_digen.models.family import ModelFamily
from verl_digen.models.parts import read_config


def pack_latents(x: Tensor) -> Tensor:
    """Latents [B, C, H, W] as tokens [B, H/2 * W/2, 4C], one for each 2 x 2 patch."""
    b, c, h, w = x.shape
    return x.view(b, c, h // 2, 2, w // 2, 2).permute(0, 2, 4, 1, 3, 5).reshape(b, (h // 2) * (w // 2), 4 * c)


def unpack_latents(tokens: Tensor, height: int, width: int) -> Tensor:
    """The inverse of :func:`pack_latents` for latents of ``height`` x ``width``."""
    b, _, c = tokens.shape
    patches = tokens.view(b, height // 2, width // 2, c // 4, 2, 2)
    return patches.permute(0, 3, 1, 4, 2, 5).reshape(b, c // 4, height, width)


def patch_positions(height: int, width: int, *, device: torch.device, dtype: torch.dtype) -> Tensor:
    """(0, row, column) of each patch [H/2 * W/2, 3] of latents of ``height`` x ``width``."""
    rows, columns = torch.arange(height // 2, device=device), torch.arange(width // 2, device=device)
    places = torch.cartesian_prod(rows, columns).reshape(-1, 2)
    return torch.nn.functional.pad(places, (1, 0)).to(dtype)


class PackedImageFamily(ModelFamily):
    """Image families whose transformer reads 2 x 2 patches and whose schedule shifts with the number of patches.

    Latents [C, H/8, W/8] (for a VAE that reduces by 8); the sides are multiples of 16 pixels.
    """

    trained_side = 1024

    @cached_property
    def vae_scale_factor(self) -> int:
        """Pixels per latent position, in each direction."""
        return 2 ** (len(read_config(self.path, "vae")["block_out_channels"]) - 1)

    def latent_shape(self, height: int, width: int, num_frames: int = 1) -> tuple[int, ...]:
        self.check_size(height, width, num_frames)
        channels = self.transformer_config["in_channels"] // 4
        return channels, height // self.vae_scale_factor, width // self.vae_scale_factor

    def default_size(self) -> tuple[int, int, int]:
        return self.trained_side, self.trained_side, 1

    def check_size(self, height: int, width: int, num_frames: int = 1) -> None:
        multiple = 2 * self.vae_scale_factor
        if num_frames != 1:
            raise ValueError(f"family {self.name!r} makes images: num_frames must be 1, got {num_frames}")
        if height < 1 or width < 1 or height % multiple or width % multiple:
            raise ValueError(f"height and width must be positive multiples of {multiple}, got {height} x {width}")

    def _timestep_options(self, num_steps: int, height: int, width: int, num_frames: int) -> dict[str, Any]:
        from diffusers.pipelines.flux.pipeline_flux import calculate_shift

        config = self.scheduler.config
        options: dict[str, Any] = {"sigmas": np.linspace(1.0, 1 / num_steps, num_steps)}
        if config.get("use_dynamic_shifting"):
            _, rows, columns = self.latent_shape(height, width)
            options["mu"] = calculate_shift(
                (rows // 2) * (columns // 2),
                config.get("base_image_seq_len", 256),
                config.get("max_image_seq_len", 4096),
                config.get("base_shift", 0.5),
                config.get("max_shift", 1.15),
            )
        return options
