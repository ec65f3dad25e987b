"""Wan 2.1 and Wan 2.2 TI2V text-to-video (arXiv 2503.20314): DiT with cross-attention to UMT5, causal 3D VAE."""

from __future__ import annotations

from functools import cached_property

import numpy as np
import torch
from torch import Tensor, nn

from verl_digen.models.family import Guidance, register_family, uint8_pixels
from verl_digen.models.parts import read_config, read_index
from verl_digen.models.video import VideoFamily


@register_family
class WanFamily(VideoFamily):
    """``WanPipeline`` with one transformer: Wan2.1-T2V-1.3B and -14B, Wan2.2-TI2V-5B (as text-to-video).

    Latents [C, F', H', W']. Conditions: ``prompt_embeds`` [L, D] of UMT5, zeros behind the prompt's own tokens.
    The VAE decodes in fp32, as published.
    """

    name = "wan"
    pipeline_classes = ("WanPipeline",)
    lora_target_modules = ("to_q", "to_k", "to_v", "to_out.0")
    conditioner_parts = ("tokenizer", "text_encoder", "vae")
    max_sequence_length = 512  # the pipeline's default
    trained_size = (480, 832, 81)
    vae_dtype = torch.float32

    @classmethod
    def check_parts(cls, path, need=None) -> None:
        super().check_parts(path, need)
        second = read_index(path).get("transformer_2")
        if second and second[0] is not None:
            raise ValueError(
                f"{path} has two transformers that share the noise levels (Wan2.2-A14B); models with one are trained"
            )

    def load_conditioner(self) -> None:
        from diffusers import WanPipeline

        self.check_parts(self.path, need=self.conditioner_parts)
        parts = {part: self._load_frozen(part) for part in self.conditioner_parts}
        self.pipeline = WanPipeline(transformer=None, scheduler=self.scheduler, **parts)
        self.pipeline.vae.enable_slicing()

    def _encode_prompt(self, prompt: str) -> dict[str, Tensor]:
        embeds, _ = self.pipeline.encode_prompt(
            prompt=[prompt],
            do_classifier_free_guidance=False,
            max_sequence_length=self.max_sequence_length,
            device=self.device,
        )
        return {"prompt_embeds": embeds[0]}

    def _forward(
        self, transformer: nn.Module, x: Tensor, timestep: Tensor, cond: dict[str, Tensor], guidance: Guidance
    ) -> Tensor:
        if self.index.get("expand_timesteps"):  # the model takes a time for every token
            patch_t, patch_h, patch_w = self.transformer_config["patch_size"]
            tokens = (x.shape[2] // patch_t) * (x.shape[3] // patch_h) * (x.shape[4] // patch_w)
            timestep = timestep[:, None].expand(-1, tokens)
        return transformer(
            hidden_states=x, timestep=timestep, encoder_hidden_states=cond["prompt_embeds"], return_dict=False
        )[0]

    @torch.no_grad()
    def decode(self, latents: Tensor) -> np.ndarray:
        vae = self.pipeline.vae
        latents = latents.to(self.device, vae.dtype)
        mean, std = (
            latents.new_tensor(vae.config[name]).view(1, -1, 1, 1, 1) for name in ("latents_mean", "latents_std")
        )
        return uint8_pixels(vae.decode(latents * std + mean, return_dict=False)[0])

    @cached_property
    def compression(self) -> tuple[int, int]:
        config = read_config(self.path, "vae")
        return config.get("scale_factor_temporal", 4), config.get("scale_factor_spatial", 8)

    @property
    def patch(self) -> tuple[int, int]:
        temporal, spatial, _ = self.transformer_config["patch_size"]
        return temporal, spatial

    def _effective_shift(self, num_steps: int, height: int, width: int, num_frames: int) -> float:
        config = self.scheduler.config  # the published scheduler calls it flow_shift
        return float(config["flow_shift"] if "flow_shift" in config else config["shift"])
