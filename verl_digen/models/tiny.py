"""Tiny random models of every family in the real folder layout: real classes, real parts, a few thousand parameters.

For tests, and for trying a recipe on a machine without accelerators (``verl-digen prepare tiny FAMILY``). They draw
noise: what they show is that a recipe runs, not that it learns.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

_TEXT = (
    "a an the of on in with and one small old red blue green cat dog moon sea house street handwritten number digit "
    "zero two three four five six seven eight nine drawing picture photo video walking running word sign says"
)
_WORDS = _TEXT.split()
_LENGTH = 16  # of CLIP's texts
_WIDTH = 32  # of the text encoders


def tiny_families() -> list[str]:
    """Families that :func:`build_tiny` can make."""
    return sorted(_BUILDERS)


def build_tiny(family: str, path: str | Path, **scheduler_options: Any) -> Path:
    """Write a tiny random model of ``family`` to ``path`` and return it.

    Args:
        scheduler_options: options of the scheduler's class, over those of the published model.

    Raises:
        ValueError: no such family.
    """
    if family not in _BUILDERS:
        raise ValueError(f"no tiny model of family {family!r}; available: {', '.join(tiny_families())}")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        pipeline = _BUILDERS[family](scheduler_options)
    pipeline.save_pretrained(str(path), safe_serialization=True)
    return Path(path)


# ---- text encoders -----------------------------------------------------------------------------------------


def _tokenizer(length: int, side: str = "right"):
    """Words as tokens; every other word is the same unknown one."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    words = ["<pad>", "<bos>", "<unk>", "<eos>", *_WORDS]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A <eos>", special_tokens=[("<bos>", 1), ("<eos>", 3)]
    )
    special = {"pad_token": "<pad>", "bos_token": "<bos>", "unk_token": "<unk>", "eos_token": "<eos>"}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=length, padding_side=side, **special)


def _vocabulary() -> int:
    return len(_WORDS) + 4


def _clip(cls_name: str, length: int = _LENGTH):
    import transformers

    config = transformers.CLIPTextConfig(
        vocab_size=_vocabulary(),
        hidden_size=_WIDTH,
        intermediate_size=37,
        projection_dim=_WIDTH,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=length,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=3,
    )
    return getattr(transformers, cls_name)(config)


def _t5(cls_name: str, width: int):
    import transformers

    config_cls = transformers.UMT5Config if cls_name.startswith("UMT5") else transformers.T5Config
    return getattr(transformers, cls_name)(
        config_cls(vocab_size=_vocabulary(), d_model=width, d_kv=8, d_ff=37, num_layers=2, num_heads=4)
    )


def _kl_vae(**options: Any):
    from diffusers import AutoencoderKL

    sizes = {"block_out_channels": (4, 8), "layers_per_block": 1, "latent_channels": 4, "norm_num_groups": 1}
    blocks = {"down_block_types": ("DownEncoderBlock2D",) * 2, "up_block_types": ("UpDecoderBlock2D",) * 2}
    plain = {"use_quant_conv": False, "use_post_quant_conv": False}
    return AutoencoderKL(in_channels=3, out_channels=3, **sizes, **blocks, **plain, **options)


def _euler(options: dict[str, Any], **published: Any):
    from diffusers import FlowMatchEulerDiscreteScheduler

    return FlowMatchEulerDiscreteScheduler(**{**published, **options})


# ---- families ----------------------------------------------------------------------------------------------


def _sd3(options: dict[str, Any]):
    """Dual attention and query-key norm as in SD3.5 medium."""
    from diffusers import SD3Transformer2DModel, StableDiffusion3Pipeline

    transformer = SD3Transformer2DModel(
        sample_size=16,
        patch_size=2,
        in_channels=4,
        out_channels=4,
        num_layers=2,
        attention_head_dim=8,
        num_attention_heads=4,
        joint_attention_dim=2 * _WIDTH,
        caption_projection_dim=32,
        pooled_projection_dim=2 * _WIDTH,
        pos_embed_max_size=24,
        dual_attention_layers=(0,),
        qk_norm="rms_norm",
    )
    return StableDiffusion3Pipeline(
        transformer=transformer,
        scheduler=_euler(options, shift=3.0),
        vae=_kl_vae(shift_factor=0.0609, scaling_factor=1.5035),
        text_encoder=_clip("CLIPTextModelWithProjection"),
        tokenizer=_tokenizer(_LENGTH),
        text_encoder_2=_clip("CLIPTextModelWithProjection"),
        tokenizer_2=_tokenizer(_LENGTH),
        text_encoder_3=_t5("T5EncoderModel", 2 * _WIDTH),
        tokenizer_3=_tokenizer(_LENGTH),
    )


def _flux(options: dict[str, Any]):
    """Guidance-distilled, as FLUX.1-dev."""
    from diffusers import FluxPipeline, FluxTransformer2DModel

    transformer = FluxTransformer2DModel(
        patch_size=1,
        in_channels=16,
        num_layers=2,
        num_single_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=_WIDTH,
        pooled_projection_dim=_WIDTH,
        axes_dims_rope=(4, 4, 8),
        guidance_embeds=True,
    )
    shift = {"base_image_seq_len": 256, "max_image_seq_len": 4096, "base_shift": 0.5, "max_shift": 1.15}
    return FluxPipeline(
        transformer=transformer,
        scheduler=_euler(options, shift=3.0, use_dynamic_shifting=True, **shift),
        vae=_kl_vae(shift_factor=0.1159, scaling_factor=0.3611),
        text_encoder=_clip("CLIPTextModel"),
        tokenizer=_tokenizer(_LENGTH),
        text_encoder_2=_t5("T5EncoderModel", _WIDTH),
        tokenizer_2=_tokenizer(_LENGTH),
    )


def _qwen_image(options: dict[str, Any]):
    from diffusers import AutoencoderKLQwenImage, QwenImagePipeline, QwenImageTransformer2DModel
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    text = {
        "vocab_size": _vocabulary(),
        "hidden_size": _WIDTH,
        "intermediate_size": 37,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "rope_scaling": {"mrope_section": [2, 3, 3], "rope_type": "default", "type": "default"},
        "rope_theta": 1000000.0,
        "bos_token_id": 1,
        "eos_token_id": 3,
        "pad_token_id": 0,
    }
    vision = {
        "depth": 1,
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_heads": 2,
        "out_hidden_size": _WIDTH,
        "fullatt_block_indexes": [0],
    }
    special = {"image_token_id": 0, "video_token_id": 0, "vision_start_token_id": 0, "vision_end_token_id": 0}
    encoder = Qwen2_5_VLForConditionalGeneration(
        Qwen2_5_VLConfig(text_config=text, vision_config=vision, **special, tie_word_embeddings=False)
    )
    transformer = QwenImageTransformer2DModel(
        patch_size=2,
        in_channels=16,
        out_channels=4,
        num_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=_WIDTH,
        axes_dims_rope=(8, 4, 4),
    )
    vae = AutoencoderKLQwenImage(
        base_dim=12,
        z_dim=4,
        dim_mult=[1, 2],
        num_res_blocks=1,
        temperal_downsample=[False],
        latents_mean=[-0.5, 0.1, 0.2, -0.1],
        latents_std=[2.0, 1.5, 1.0, 0.5],
    )
    shift = {"base_image_seq_len": 256, "max_image_seq_len": 8192, "base_shift": 0.5, "max_shift": 0.9}
    return QwenImagePipeline(
        transformer=transformer,
        scheduler=_euler(options, use_dynamic_shifting=True, shift_terminal=0.02, **shift),
        vae=vae,
        text_encoder=encoder,
        tokenizer=_tokenizer(128),
    )


def _wan(options: dict[str, Any]):
    from diffusers import AutoencoderKLWan, WanPipeline, WanTransformer3DModel

    transformer = WanTransformer3DModel(
        patch_size=(1, 2, 2),
        num_attention_heads=2,
        attention_head_dim=12,
        in_channels=4,
        out_channels=4,
        text_dim=_WIDTH,
        freq_dim=32,
        ffn_dim=32,
        num_layers=2,
        cross_attn_norm=True,
        qk_norm="rms_norm_across_heads",
        rope_max_seq_len=32,
    )
    vae = AutoencoderKLWan(
        base_dim=4,
        z_dim=4,
        dim_mult=[1, 1, 1, 1],
        num_res_blocks=1,
        temperal_downsample=[False, True, True],
        latents_mean=[-0.7, 0.2, 0.1, -0.3],
        latents_std=[2.8, 1.4, 2.3, 2.6],
    )
    return WanPipeline(
        transformer=transformer,
        scheduler=_euler(options, shift=3.0),
        vae=vae,
        text_encoder=_t5("UMT5EncoderModel", _WIDTH),
        tokenizer=_tokenizer(512),
    )


def _hunyuan_video(options: dict[str, Any]):
    from diffusers import AutoencoderKLHunyuanVideo, HunyuanVideoPipeline, HunyuanVideoTransformer3DModel
    from transformers import LlamaConfig, LlamaModel

    transformer = HunyuanVideoTransformer3DModel(
        in_channels=4,
        out_channels=4,
        num_attention_heads=2,
        attention_head_dim=16,
        num_layers=2,
        num_single_layers=2,
        num_refiner_layers=1,
        patch_size=2,
        patch_size_t=1,
        guidance_embeds=True,
        text_embed_dim=_WIDTH,
        pooled_projection_dim=_WIDTH,
        rope_axes_dim=(4, 6, 6),
    )
    vae = AutoencoderKLHunyuanVideo(
        in_channels=3,
        out_channels=3,
        latent_channels=4,
        down_block_types=("HunyuanVideoDownBlock3D",) * 4,
        up_block_types=("HunyuanVideoUpBlock3D",) * 4,
        block_out_channels=(8, 8, 8, 8),
        layers_per_block=1,
        norm_num_groups=4,
        scaling_factor=0.476986,
        spatial_compression_ratio=8,
        temporal_compression_ratio=4,
        mid_block_add_attention=True,
    )
    llama = LlamaModel(
        LlamaConfig(
            vocab_size=_vocabulary(),
            hidden_size=_WIDTH,
            intermediate_size=37,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=4,
            bos_token_id=1,
            eos_token_id=3,
            pad_token_id=0,
            max_position_embeddings=512,
        )
    )
    return HunyuanVideoPipeline(
        transformer=transformer,
        scheduler=_euler(options, shift=7.0),
        vae=vae,
        text_encoder=llama,
        tokenizer=_tokenizer(512),
        text_encoder_2=_clip("CLIPTextModel", 77),
        tokenizer_2=_tokenizer(77),
    )


_BUILDERS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "sd3": _sd3,
    "flux": _flux,
    "qwen_image": _qwen_image,
    "wan": _wan,
    "hunyuan_video": _hunyuan_video,
}
