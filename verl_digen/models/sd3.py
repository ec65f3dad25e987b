"""Stable Diffusion 3 and 3.5 (arXiv 2403.03206): MM-DiT, two CLIP encoders and T5, 16-channel VAE."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from verl_digen.models.attention import DispatchedJointAttention
from verl_digen.models.family import Guidance, ModelFamily, register_family, uint8_pixels
from verl_digen.models.parts import read_config


@register_family
class SD3Family(ModelFamily):
    """``StableDiffusion3Pipeline``. Latents [C, H/8, W/8].

    Conditions: ``prompt_embeds`` [L, D] (CLIP's 77 tokens, then T5's) and ``pooled_prompt_embeds`` [D] (of both CLIP).
    """

    name = "sd3"
    pipeline_classes = ("StableDiffusion3Pipeline",)
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
    conditioner_parts = (
        "tokenizer",
        "tokenizer_2",
        "tokenizer_3",
        "text_encoder",
        "text_encoder_2",
        "text_encoder_3",
        "vae",
    )
    optional_parts = ("tokenizer_3", "text_encoder_3")
    max_sequence_length = 256  # of T5; the pipeline's default

    def load_conditioner(self) -> None:
        from diffusers import SD3Transformer2DModel, StableDiffusion3Pipeline

        self.check_parts(self.path, need=self.conditioner_parts)
        parts = {part: self._load_frozen(part) for part in self.conditioner_parts}
        with torch.device("meta"):  # without T5 the pipeline asks the transformer for its width; weights are not needed
            transformer = SD3Transformer2DModel.from_config(self.transformer_config)
        self.pipeline = StableDiffusion3Pipeline(transformer=transformer, scheduler=self.scheduler, **parts)
        self.pipeline.vae.enable_slicing()  # one image at a time: bounded memory, and independent of the batch

    def install_dispatched_attention(self, transformer: nn.Module) -> None:
        transformer.set_attn_processor({name: DispatchedJointAttention() for name in transformer.attn_processors})

    def _encode_prompt(self, prompt: str) -> dict[str, Tensor]:
        embeds, _, pooled, _ = self.pipeline.encode_prompt(
            prompt=[prompt],
            prompt_2=None,
            prompt_3=None,
            device=self.device,
            do_classifier_free_guidance=False,
            max_sequence_length=self.max_sequence_length,
        )
        return {"prompt_embeds": embeds[0], "pooled_prompt_embeds": pooled[0]}

    def _forward(
        self, transformer: nn.Module, x: Tensor, timestep: Tensor, cond: dict[str, Tensor], guidance: Guidance
    ) -> Tensor:
        return transformer(
            hidden_states=x,
            timestep=timestep,
            encoder_hidden_states=cond["prompt_embeds"],
            pooled_projections=cond["pooled_prompt_embeds"],
            return_dict=False,
        )[0]

    @torch.no_grad()
    def decode(self, latents: Tensor) -> np.ndarray:
        vae = self.pipeline.vae
        latents = latents.to(self.device, vae.dtype) / vae.config.scaling_factor + vae.config.shift_factor
        return uint8_pixels(vae.decode(latents, return_dict=False)[0])

    @cached_property
    def vae_scale_factor(self) -> int:
        """Pixels per latent position, in each direction."""
        return 2 ** (len(read_config(self.path, "vae")["block_out_channels"]) - 1)

    def latent_shape(self, height: int, width: int, num_frames: int = 1) -> tuple[int, ...]:
        self.check_size(height, width, num_frames)
        return (
            self.transformer_config["in_channels"],
            height // self.vae_scale_factor,
            width // self.vae_scale_factor,
        )

    def default_size(self) -> tuple[int, int, int]:
        side = self.transformer_config["sample_size"] * self.vae_scale_factor
        return side, side, 1

    def check_size(self, height: int, width: int, num_frames: int = 1) -> None:
        patch = self.transformer_config["patch_size"]
        multiple = self.vae_scale_factor * patch
        if num_frames != 1:
            raise ValueError(f"family {self.name!r} makes images: num_frames must be 1, got {num_frames}")
        if height < 1 or width < 1 or height % multiple or width % multiple:
            raise ValueError(f"height and width must be positive multiples of {multiple}, got {height} x {width}")
        largest = self.transformer_config["pos_embed_max_size"] * multiple
        if max(height, width) > largest:
            raise ValueError(f"height and width can be at most {largest} for this model, got {height} x {width}")

    def _timestep_options(self, num_steps: int, height: int, width: int, num_frames: int) -> dict[str, Any]:
        options: dict[str, Any] = {"num_inference_steps": num_steps}
        config = self.scheduler.config
        if config.get("use_dynamic_shifting"):
            from diffusers.pipelines.stable_diffusion_3.pipeline_stable_diffusion_3 import calculate_shift

            _, rows, columns = self.latent_shape(height, width)
            patch = self.transformer_config["patch_size"]
            options["mu"] = calculate_shift(
                (rows // patch) * (columns // patch),
                config.get("base_image_seq_len", 256),
                config.get("max_image_seq_len", 4096),
                config.get("base_shift", 0.5),
                config.get("max_shift", 1.16),
            )
        return options
