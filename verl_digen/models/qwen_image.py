"""Qwen-Image (arXiv 2508.02324): double-stream MM-DiT, Qwen2.5-VL as text encoder, true CFG with norm rescale."""

from __future__ import annotations

from functools import cached_property

import numpy as np
import torch
from torch import Tensor, nn

from verl_digen.models.family import Guidance, guided_velocity, register_family, uint8_pixels
from verl_digen.models.packed import PackedImageFamily, pack_latents, unpack_latents
from verl_digen.models.parts import read_config


@register_family
class QwenImageFamily(PackedImageFamily):
    """``QwenImagePipeline``. Latents [C, H/8, W/8].

    Conditions: ``prompt_embeds`` [L, D] and ``prompt_embeds_mask`` [L] with the prompt's own number of tokens (at most
    ``max_sequence_length``), padded to a multiple of ``length_multiple``; a batch is padded to its longest prompt, and
    the mask keeps the padding out. Prompts of about the same length so have one shape wherever they are batched, and
    bf16 rounds the same in rollout and training.
    """

    name = "qwen_image"
    pipeline_classes = ("QwenImagePipeline",)
    lora_target_modules = (
        "attn.to_q",
        "attn.to_k",
        "attn.to_v",
        "attn.to_out.0",
        "attn.add_q_proj",
        "attn.add_k_proj",
        "attn.add_v_proj",
        "attn.to_add_out",
        "img_mlp.net.0.proj",
        "img_mlp.net.2",
        "txt_mlp.net.0.proj",
        "txt_mlp.net.2",
    )
    conditioner_parts = ("tokenizer", "text_encoder", "vae")
    max_sequence_length = 512  # the pipeline's default
    length_multiple = 64
    trained_side = 1328

    def load_conditioner(self) -> None:
        from diffusers import QwenImagePipeline

        self.check_parts(self.path, need=self.conditioner_parts)
        parts = {part: self._load_frozen(part) for part in self.conditioner_parts}
        self.pipeline = QwenImagePipeline(transformer=None, scheduler=self.scheduler, **parts)
        self.pipeline.vae.enable_slicing()

    def _encode_prompt(self, prompt: str) -> dict[str, Tensor]:
        # the text encoder refuses an empty text; the pipeline's own stand-in for "no negative prompt" is a space
        embeds, mask = self.pipeline.encode_prompt(
            prompt=[prompt or " "], device=self.device, max_sequence_length=self.max_sequence_length
        )
        # without padding the pipeline gives no mask
        mask = torch.ones(embeds.shape[:2], dtype=torch.bool, device=embeds.device) if mask is None else mask.bool()
        padding = -embeds.shape[1] % self.length_multiple
        return {
            "prompt_embeds": torch.nn.functional.pad(embeds[0], (0, 0, 0, padding)),
            "prompt_embeds_mask": torch.nn.functional.pad(mask[0], (0, padding)),
        }

    def _forward(
        self, transformer: nn.Module, x: Tensor, timestep: Tensor, cond: dict[str, Tensor], guidance: Guidance
    ) -> Tensor:
        _, _, height, width = x.shape
        velocity = transformer(
            hidden_states=pack_latents(x),
            timestep=timestep / 1000,
            encoder_hidden_states=cond["prompt_embeds"],
            encoder_hidden_states_mask=cond["prompt_embeds_mask"],
            img_shapes=[[(1, height // 2, width // 2)]] * len(x),
            return_dict=False,
        )[0]
        return unpack_latents(velocity, height, width)

    def _guide(self, v_cond: Tensor, v_neg: Tensor, guidance: Guidance) -> Tensor:
        """The norms of ``rescale`` are those of single patches."""
        _, _, height, width = v_cond.shape
        guided = guided_velocity(pack_latents(v_cond), pack_latents(v_neg), guidance, (-1,))
        return unpack_latents(guided, height, width)

    @torch.no_grad()
    def decode(self, latents: Tensor) -> np.ndarray:
        vae = self.pipeline.vae
        latents = latents.to(self.device, vae.dtype).unsqueeze(2)  # one frame
        mean, std = (latents.new_tensor(value).view(1, -1, 1, 1, 1) for value in self._latent_statistics)
        return uint8_pixels(vae.decode(latents * std + mean, return_dict=False)[0][:, :, 0])

    @cached_property
    def _latent_statistics(self) -> tuple[list[float], list[float]]:
        """Mean and standard deviation of the VAE's latents, by channel."""
        config = read_config(self.path, "vae")
        return config["latents_mean"], config["latents_std"]

    @cached_property
    def vae_scale_factor(self) -> int:
        return 2 ** len(read_config(self.path, "vae")["temperal_downsample"])
