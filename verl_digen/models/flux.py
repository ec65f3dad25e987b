"""FLUX.1 (Black Forest Labs, 2024): double- and single-stream DiT with rotary positions and embedded guidance."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn

from verl_digen.models.family import Guidance, register_family, uint8_pixels
from verl_digen.models.packed import PackedImageFamily, pack_latents, patch_positions, unpack_latents


@register_family
class FluxFamily(PackedImageFamily):
    """``FluxPipeline``: FLUX.1-dev (``embedded`` guidance is an input) and FLUX.1-schnell (no guidance).

    Latents [C, H/8, W/8].

    Conditions: ``prompt_embeds`` [L, D] of T5, padded to ``max_sequence_length`` and read without a mask, and
    ``pooled_prompt_embeds`` [D] of CLIP.
    """

    name = "flux"
    pipeline_classes = ("FluxPipeline",)
    lora_target_modules = (
        "attn.to_q",
        "attn.to_k",
        "attn.to_v",
        "attn.to_out.0",
        "attn.add_q_proj",
        "attn.add_k_proj",
        "attn.add_v_proj",
        "attn.to_add_out",
        "ff.net.0.proj",
        "ff.net.2",
        "ff_context.net.0.proj",
        "ff_context.net.2",
    )
    conditioner_parts = ("tokenizer", "tokenizer_2", "text_encoder", "text_encoder_2", "vae")
    max_sequence_length = 512  # of T5; the pipeline's default

    def load_conditioner(self) -> None:
        from diffusers import FluxPipeline

        self.check_parts(self.path, need=self.conditioner_parts)
        parts = {part: self._load_frozen(part) for part in self.conditioner_parts}
        self.pipeline = FluxPipeline(transformer=None, scheduler=self.scheduler, **parts)
        self.pipeline.vae.enable_slicing()

    def _encode_prompt(self, prompt: str) -> dict[str, Tensor]:
        embeds, pooled, _ = self.pipeline.encode_prompt(
            prompt=[prompt], device=self.device, max_sequence_length=self.max_sequence_length
        )
        return {"prompt_embeds": embeds[0], "pooled_prompt_embeds": pooled[0]}

    def check_guidance(self, guidance: Guidance) -> None:
        if self.transformer_config["guidance_embeds"] != (guidance.embedded is not None):
            wanted = "reads an embedded guidance" if self.transformer_config["guidance_embeds"] else "reads none"
            raise ValueError(
                f"the model of {self.path} {wanted}, but trainer.v1.digen.sampling.embedded_guidance="
                f"{'null' if guidance.embedded is None else guidance.embedded} (FLUX.1-dev: 3.5, FLUX.1-schnell: null)"
            )

    def _forward(
        self, transformer: nn.Module, x: Tensor, timestep: Tensor, cond: dict[str, Tensor], guidance: Guidance
    ) -> Tensor:
        _, _, height, width = x.shape
        embedded = guidance.embedded
        velocity = transformer(
            hidden_states=pack_latents(x),
            timestep=timestep / 1000,
            guidance=None if embedded is None else torch.full_like(timestep, embedded),
            pooled_projections=cond["pooled_prompt_embeds"],
            encoder_hidden_states=cond["prompt_embeds"],
            txt_ids=x.new_zeros(cond["prompt_embeds"].shape[1], 3),
            img_ids=patch_positions(height, width, device=x.device, dtype=x.dtype),
            return_dict=False,
        )[0]
        return unpack_latents(velocity, height, width)

    @torch.no_grad()
    def decode(self, latents: Tensor) -> np.ndarray:
        vae = self.pipeline.vae
        latents = latents.to(self.device, vae.dtype) / vae.config.scaling_factor + vae.config.shift_factor
        return uint8_pixels(vae.decode(latents, return_dict=False)[0])
