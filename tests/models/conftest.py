"""Model folders for the tests: a tiny random SD3.5 in the diffusers layout, and the shipped digits model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch


def _word_tokenizer(length: int):
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    words = ["<pad>", "<bos>", "<unk>", "<eos>", "a", "red", "blue", "cat", "dog", "on", "the", "moon"]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A <eos>", special_tokens=[("<bos>", 1), ("<eos>", 3)]
    )
    special = {"pad_token": "<pad>", "bos_token": "<bos>", "unk_token": "<unk>", "eos_token": "<eos>"}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=length, **special)


def _clip(projection_dim: int):
    from transformers import CLIPTextConfig, CLIPTextModelWithProjection

    return CLIPTextModelWithProjection(
        CLIPTextConfig(
            vocab_size=20,
            hidden_size=32,
            intermediate_size=37,
            projection_dim=projection_dim,
            num_hidden_layers=3,
            num_attention_heads=4,
            max_position_embeddings=16,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=3,
        )
    )


def build_tiny_sd3(path: Path, **scheduler_options) -> Path:
    """Sizes as in diffusers' own fast tests; dual attention and query-key norm as in SD3.5."""
    from diffusers import (
        AutoencoderKL,
        FlowMatchEulerDiscreteScheduler,
        SD3Transformer2DModel,
        StableDiffusion3Pipeline,
    )
    from transformers import T5Config, T5EncoderModel

    torch.manual_seed(0)
    transformer = SD3Transformer2DModel(
        sample_size=16,
        patch_size=2,
        in_channels=4,
        out_channels=4,
        num_layers=2,
        attention_head_dim=8,
        num_attention_heads=4,
        joint_attention_dim=64,
        caption_projection_dim=32,
        pooled_projection_dim=64,
        pos_embed_max_size=24,
        dual_attention_layers=(0,),
        qk_norm="rms_norm",
    )
    vae = AutoencoderKL(
        in_channels=3,
        out_channels=3,
        block_out_channels=(4, 8),
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        layers_per_block=1,
        latent_channels=4,
        norm_num_groups=1,
        use_quant_conv=False,
        use_post_quant_conv=False,
        shift_factor=0.0609,
        scaling_factor=1.5035,
    )
    t5 = T5EncoderModel(T5Config(vocab_size=20, d_model=64, d_kv=8, d_ff=37, num_layers=2, num_heads=4))
    pipeline = StableDiffusion3Pipeline(
        transformer=transformer,
        scheduler=FlowMatchEulerDiscreteScheduler(**{"shift": 3.0, **scheduler_options}),
        vae=vae,
        text_encoder=_clip(32),
        tokenizer=_word_tokenizer(16),
        text_encoder_2=_clip(32),
        tokenizer_2=_word_tokenizer(16),
        text_encoder_3=t5,
        tokenizer_3=_word_tokenizer(16),
    )
    pipeline.save_pretrained(path, safe_serialization=True)
    return path


@pytest.fixture(scope="session")
def build_sd3():
    """``build_sd3(path, **scheduler_options)`` writes a tiny SD3.5 to ``path``."""
    return build_tiny_sd3


@pytest.fixture(scope="session")
def sd3_path(tmp_path_factory) -> Path:
    return build_tiny_sd3(tmp_path_factory.mktemp("sd3"))


@pytest.fixture(scope="session")
def digits_path() -> Path:
    from verl_digen.models.digits import ASSETS

    return ASSETS
