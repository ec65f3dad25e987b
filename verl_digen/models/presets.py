"""Published models by name: configurations of the transformers as their model cards give them, without weights.

For sizes, memory and schedules of the real models on a machine that holds none of them: everything is built on torch's
meta device. Sources are the ``config.json`` files of the repositories named on the model hub.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn


@dataclass(frozen=True, kw_only=True)
class Preset:
    """A published model.

    Attributes:
        family: name of the model family.
        source: repository on the model hub.
        transformer_class: of diffusers.
        transformer: its configuration.
        scheduler: configuration of ``FlowMatchEulerDiscreteScheduler``, or of the class it names in ``_class_name``.
        vae: what the family reads of the VAE's configuration.
        published_billions: parameters of the transformer as the authors state them.
        size: (height, width, frames) in pixels of the recipes and model cards.
        latent_shape: of one sample of this size.
        tokens: of the transformer's sequence for one sample of this size, without the text.
        text: (length, width) of the prompt tensors that the transformer attends to.
    """

    family: str
    source: str
    transformer_class: str
    transformer: dict[str, Any] = field(default_factory=dict)
    scheduler: dict[str, Any] = field(default_factory=dict)
    vae: dict[str, Any] = field(default_factory=dict)
    published_billions: float
    size: tuple[int, int, int]
    latent_shape: tuple[int, ...]
    tokens: int
    text: tuple[int, int]

    def build(self) -> nn.Module:
        """The transformer on the meta device: shapes, no memory."""
        import diffusers

        with torch.device("meta"):
            return getattr(diffusers, self.transformer_class)(**self.transformer)


_SD3 = {"shift": 3.0}
_FLUX_SHIFT = {"base_image_seq_len": 256, "base_shift": 0.5, "max_image_seq_len": 4096, "max_shift": 1.15}
_QWEN_SHIFT = {"base_image_seq_len": 256, "base_shift": 0.5, "max_image_seq_len": 8192, "max_shift": 0.9}
_WAN_SCHEDULER = {
    "_class_name": "UniPCMultistepScheduler",
    "prediction_type": "flow_prediction",
    "use_flow_sigmas": True,
}
_IMAGE_VAE = {"block_out_channels": [128, 256, 512, 512]}
_WAN = {"patch_size": (1, 2, 2), "text_dim": 4096, "freq_dim": 256, "attention_head_dim": 128}

PRESETS: dict[str, Preset] = {
    "sd3.5-medium": Preset(
        family="sd3",
        source="stabilityai/stable-diffusion-3.5-medium",
        transformer_class="SD3Transformer2DModel",
        transformer={
            "sample_size": 128,
            "num_layers": 24,
            "num_attention_heads": 24,
            "attention_head_dim": 64,
            "caption_projection_dim": 1536,
            "joint_attention_dim": 4096,
            "pooled_projection_dim": 2048,
            "pos_embed_max_size": 384,
            "dual_attention_layers": tuple(range(13)),
            "qk_norm": "rms_norm",
            "in_channels": 16,
            "out_channels": 16,
        },
        scheduler=_SD3,
        vae=_IMAGE_VAE,
        published_billions=2.5,
        size=(512, 512, 1),
        latent_shape=(16, 64, 64),
        tokens=1024,
        text=(333, 4096),
    ),
    "sd3.5-large": Preset(
        family="sd3",
        source="stabilityai/stable-diffusion-3.5-large",
        transformer_class="SD3Transformer2DModel",
        transformer={
            "sample_size": 128,
            "num_layers": 38,
            "num_attention_heads": 38,
            "attention_head_dim": 64,
            "caption_projection_dim": 2432,
            "joint_attention_dim": 4096,
            "pooled_projection_dim": 2048,
            "pos_embed_max_size": 192,
            "qk_norm": "rms_norm",
            "in_channels": 16,
            "out_channels": 16,
        },
        scheduler=_SD3,
        vae=_IMAGE_VAE,
        published_billions=8.0,
        size=(512, 512, 1),
        latent_shape=(16, 64, 64),
        tokens=1024,
        text=(333, 4096),
    ),
    "flux.1-dev": Preset(
        family="flux",
        source="black-forest-labs/FLUX.1-dev",
        transformer_class="FluxTransformer2DModel",
        transformer={"guidance_embeds": True, "in_channels": 64, "num_layers": 19, "num_single_layers": 38},
        scheduler={"shift": 3.0, "use_dynamic_shifting": True, **_FLUX_SHIFT},
        vae=_IMAGE_VAE,
        published_billions=12.0,
        size=(512, 512, 1),
        latent_shape=(16, 64, 64),
        tokens=1024,
        text=(512, 4096),
    ),
    "qwen-image": Preset(
        family="qwen_image",
        source="Qwen/Qwen-Image",
        transformer_class="QwenImageTransformer2DModel",
        transformer={"num_layers": 60, "joint_attention_dim": 3584, "in_channels": 64, "out_channels": 16},
        scheduler={"shift_terminal": 0.02, "use_dynamic_shifting": True, **_QWEN_SHIFT},
        vae={"temperal_downsample": [False, True, True]},
        published_billions=20.0,
        size=(512, 512, 1),
        latent_shape=(16, 64, 64),
        tokens=1024,
        text=(512, 3584),
    ),
    "wan2.1-t2v-1.3b": Preset(
        family="wan",
        source="Wan-AI/Wan2.1-T2V-1.3B-Diffusers",
        transformer_class="WanTransformer3DModel",
        transformer={**_WAN, "num_layers": 30, "num_attention_heads": 12, "ffn_dim": 8960},
        scheduler={**_WAN_SCHEDULER, "flow_shift": 3.0},
        vae={"scale_factor_temporal": 4, "scale_factor_spatial": 8},
        published_billions=1.3,
        size=(240, 416, 33),
        latent_shape=(16, 9, 30, 52),
        tokens=9 * 15 * 26,
        text=(512, 4096),
    ),
    "wan2.1-t2v-14b": Preset(
        family="wan",
        source="Wan-AI/Wan2.1-T2V-14B-Diffusers",
        transformer_class="WanTransformer3DModel",
        transformer={**_WAN, "num_layers": 40, "num_attention_heads": 40, "ffn_dim": 13824},
        scheduler={**_WAN_SCHEDULER, "flow_shift": 3.0},
        vae={"scale_factor_temporal": 4, "scale_factor_spatial": 8},
        published_billions=14.0,
        size=(480, 832, 81),
        latent_shape=(16, 21, 60, 104),
        tokens=21 * 30 * 52,
        text=(512, 4096),
    ),
    "wan2.2-ti2v-5b": Preset(
        family="wan",
        source="Wan-AI/Wan2.2-TI2V-5B-Diffusers",
        transformer_class="WanTransformer3DModel",
        transformer={
            **_WAN,
            "num_layers": 30,
            "num_attention_heads": 24,
            "ffn_dim": 14336,
            "in_channels": 48,
            "out_channels": 48,
        },
        scheduler={**_WAN_SCHEDULER, "flow_shift": 5.0},
        vae={"scale_factor_temporal": 4, "scale_factor_spatial": 16},
        published_billions=5.0,
        size=(704, 1280, 121),
        latent_shape=(48, 31, 44, 80),
        tokens=31 * 22 * 40,
        text=(512, 4096),
    ),
    "hunyuanvideo": Preset(
        family="hunyuan_video",
        source="hunyuanvideo-community/HunyuanVideo",
        transformer_class="HunyuanVideoTransformer3DModel",
        scheduler={"shift": 7.0},
        vae={"temporal_compression_ratio": 4, "spatial_compression_ratio": 8},
        published_billions=13.0,
        size=(480, 480, 53),
        latent_shape=(16, 14, 60, 60),
        tokens=14 * 30 * 30,
        text=(256, 4096),
    ),
}


def get_preset(name: str) -> Preset:
    """The published model called ``name``.

    Raises:
        ValueError: there is none; the message lists those there are.
    """
    if name not in PRESETS:
        raise ValueError(f"unknown model {name!r}; available: {', '.join(PRESETS)}")
    return PRESETS[name]
