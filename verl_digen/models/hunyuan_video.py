"""HunyuanVideo (arXiv 2412.03603): double- and single-stream DiT, Llama and CLIP encoders, embedded guidance."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from verl_digen.models.family import Guidance, register_family, uint8_pixels
from verl_digen.models.parts import read_config
from verl_digen.models.video import VideoFamily


@register_family
class HunyuanVideoFamily(VideoFamily):
    """``HunyuanVideoPipeline`` (the original 13B model). Latents [C, F', H', W'].

    Conditions: ``prompt_embeds`` [L, D] of Llama with ``prompt_attention_mask`` [L], and ``pooled_prompt_embeds`` [D]
    of CLIP. The guidance-distilled model takes ``embedded`` guidance x 1000.
    """

    name = "hunyuan_video"
    pipeline_classes = ("HunyuanVideoPipeline",)
    lora_target_modules = (
        "attn.to_q",
        "attn.to_k",
        "attn.to_v",
        "attn.to_out.0",
        "attn.add_q_proj",
        "attn.add_k_proj",
        "attn.add_v_proj",
        "attn.to_add_out",
    )
    conditioner_parts = ("tokenizer", "tokenizer_2", "text_encoder", "text_encoder_2", "vae")
    max_sequence_length = 256  # of Llama; the pipeline's default
    trained_size = (720, 1280, 129)

    def load_conditioner(self) -> None:
        from diffusers import HunyuanVideoPipeline

        self.check_parts(self.path, need=self.conditioner_parts)
        parts = {part: self._load_frozen(part) for part in self.conditioner_parts}
        self.pipeline = HunyuanVideoPipeline(transformer=None, scheduler=self.scheduler, **parts)
        self.pipeline.vae.enable_slicing()
        self.pipeline.vae.enable_tiling()  # as published: a whole video does not fit otherwise

    def _encode_prompt(self, prompt: str) -> dict[str, Tensor]:
        embeds, pooled, mask = self.pipeline.encode_prompt(
            prompt=[prompt], device=self.device, max_sequence_length=self.max_sequence_length
        )
        return {
            "prompt_embeds": embeds[0],
            "pooled_prompt_embeds": pooled[0],
            "prompt_attention_mask": mask[0].to(torch.bool),
        }

    def check_guidance(self, guidance: Guidance) -> None:
        if self.transformer_config["guidance_embeds"] != (guidance.embedded is not None):
            wanted = "reads an embedded guidance" if self.transformer_config["guidance_embeds"] else "reads none"
            raise ValueError(
                f"the model of {self.path} {wanted}, but trainer.v1.digen.sampling.embedded_guidance="
                f"{'null' if guidance.embedded is None else guidance.embedded} (HunyuanVideo: 6)"
            )

    def _forward(
        self, transformer: nn.Module, x: Tensor, timestep: Tensor, cond: dict[str, Tensor], guidance: Guidance
    ) -> Tensor:
        embedded = guidance.embedded
        return transformer(
            hidden_states=x,
            timestep=timestep,
            encoder_hidden_states=cond["prompt_embeds"],
            encoder_attention_mask=cond["prompt_attention_mask"].to(x.dtype),
            pooled_projections=cond["pooled_prompt_embeds"],
            guidance=None if embedded is None else torch.full_like(timestep, embedded * 1000.0, dtype=x.dtype),
            return_dict=False,
        )[0]

    @torch.no_grad()
    def decode(self, latents: Tensor) -> np.ndarray:
        vae = self.pipeline.vae
        latents = latents.to(self.device, vae.dtype) / vae.config.scaling_factor
        return uint8_pixels(vae.decode(latents, return_dict=False)[0])

    @cached_property
    def compression(self) -> tuple[int, int]:
        config = read_config(self.path, "vae")
        return config["temporal_compression_ratio"], config["spatial_compression_ratio"]

    @property
    def patch(self) -> tuple[int, int]:
        return self.transformer_config["patch_size_t"], self.transformer_config["patch_size"]

    def _timestep_options(self, num_steps: int, height: int, width: int, num_frames: int) -> dict[str, Any]:
        return {"sigmas": np.linspace(1.0, 0.0, num_steps + 1)[:-1]}
