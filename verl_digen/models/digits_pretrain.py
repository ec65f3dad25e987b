"""Rebuild the shipped digits model: text encoder, then a weak pretraining of the transformer by flow matching.

Everything is seeded and runs on one CPU thread, so that a rebuild on the same machine gives the same bytes.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from verl_digen.models.digits import DigitsFamily, tokenize

MAX_TOKENS = 8
TEXT_ITERATIONS = 150
ITERATIONS = 350
WRONG_PROMPT = 0.4  # disobedient on purpose: deterministic sampling is right about half of the time
# <eos> must not have id 2: transformers' CLIP takes that for an old configuration, and pools at the largest id instead
SPECIAL_TOKENS = {"pad_token": "<pad>", "bos_token": "<bos>", "unk_token": "<unk>", "eos_token": "<eos>"}


def build_digits_model(
    dst: str | Path,
    images: Tensor,
    labels: Tensor,
    prompts: list[list[str]],
    *,
    iterations: int = ITERATIONS,
    batch_size: int = 64,
    learning_rate: float = 2e-3,
    drop_prompt: float = 0.1,
    wrong_prompt: float = WRONG_PROMPT,
    seed: int = 0,
) -> dict[str, float]:
    """Write a digits model in the diffusers layout to ``dst``.

    Args:
        images: fp32 [N, 1, 8, 8] in -1..1.
        labels: int64 [N], the digit of each image.
        prompts: for each digit the texts that mean it; all must have at most 6 words.
        iterations: flow-matching steps of the transformer; more give a better, less teachable model.
        drop_prompt: share of samples trained with the empty prompt, so that guidance has a negative to use.
        wrong_prompt: share of samples trained with the prompt of a random digit: the model then draws well but obeys
            badly, which leaves something to learn.

    Returns:
        final losses: ``text_loss`` and ``flow_loss`` (mean of the last ten steps).
    """
    dst = Path(dst)
    dst.mkdir(parents=True, exist_ok=True)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            text_loss = _build_conditioner(dst, prompts)
            _write_index_and_scheduler(dst)
            embeds, pooled = _encode_all(dst, prompts)
            flow_loss = _pretrain_transformer(
                dst, images, labels, embeds, pooled, iterations, batch_size, learning_rate, drop_prompt, wrong_prompt
            )
    finally:
        torch.set_num_threads(threads)
    for file in dst.rglob("*.safetensors"):  # safetensors writes them readable by the owner alone
        file.chmod(0o644)
    return {"text_loss": text_loss, "flow_loss": flow_loss}


def _build_conditioner(dst: Path, prompts: list[list[str]]) -> float:
    """A word-level tokenizer, and a CLIP text encoder trained to tell the digits apart in all their wordings."""
    from transformers import CLIPTextConfig, CLIPTextModelWithProjection

    tokenizer = _word_tokenizer(sorted({word for texts in prompts for text in texts for word in text.split()}))
    tokenizer.save_pretrained(dst / "tokenizer")
    config = CLIPTextConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        projection_dim=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=MAX_TOKENS,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    encoder = CLIPTextModelWithProjection(config)
    head = torch.nn.Linear(32, len(prompts))
    ids = tokenize(tokenizer, [text for texts in prompts for text in texts])
    target = torch.tensor([digit for digit, texts in enumerate(prompts) for _ in texts])
    optimizer = torch.optim.AdamW([*encoder.parameters(), *head.parameters()], 5e-3)
    for _ in range(TEXT_ITERATIONS):
        loss = F.cross_entropy(head(encoder(ids).text_embeds), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    with torch.no_grad():  # unit scale, as the transformer would get from a grown-up encoder
        encoder.text_projection.weight.div_(encoder(ids).text_embeds.std())
    encoder.eval().save_pretrained(dst / "text_encoder", safe_serialization=True)
    return loss.item()


def _word_tokenizer(words: list[str]):
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    vocabulary = {word: i for i, word in enumerate([*SPECIAL_TOKENS.values(), *words])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=SPECIAL_TOKENS["unk_token"]))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    bos, eos = SPECIAL_TOKENS["bos_token"], SPECIAL_TOKENS["eos_token"]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A {eos}", special_tokens=[(bos, vocabulary[bos]), (eos, vocabulary[eos])]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=MAX_TOKENS, **SPECIAL_TOKENS)


def _write_index_and_scheduler(dst: Path) -> None:
    from diffusers import FlowMatchEulerDiscreteScheduler

    FlowMatchEulerDiscreteScheduler(shift=1.0).save_pretrained(dst / "scheduler")
    index = {
        "_class_name": DigitsFamily.pipeline_classes[0],
        "_diffusers_version": "0.38.0",
        "scheduler": ["diffusers", "FlowMatchEulerDiscreteScheduler"],
        "text_encoder": ["transformers", "CLIPTextModelWithProjection"],
        "tokenizer": ["transformers", "PreTrainedTokenizerFast"],
        "transformer": ["diffusers", "SD3Transformer2DModel"],
    }
    (dst / "model_index.json").write_text(json.dumps(index, indent=2) + "\n")


def _encode_all(dst: Path, prompts: list[list[str]]) -> tuple[Tensor, Tensor]:
    """Embeddings [digits + 1, templates, ...] as the family itself makes them; the last row is the empty prompt."""
    from verl_digen.models.parts import load_part

    tokenizer, encoder = load_part(dst, "tokenizer"), load_part(dst, "text_encoder").eval()
    table = [*prompts, [""] * len(prompts[0])]
    with torch.no_grad():
        outputs = [encoder(tokenize(tokenizer, texts)) for texts in table]
    return torch.stack([o.last_hidden_state for o in outputs]), torch.stack([o.text_embeds for o in outputs])


def _pretrain_transformer(
    dst: Path,
    images: Tensor,
    labels: Tensor,
    embeds: Tensor,
    pooled: Tensor,
    iterations: int,
    batch_size: int,
    learning_rate: float,
    drop_prompt: float,
    wrong_prompt: float,
) -> float:
    """Flow matching with logit-normal times (arXiv 2403.03206, section 3.1), one-cycle learning rate."""
    from diffusers import SD3Transformer2DModel

    transformer = SD3Transformer2DModel(
        sample_size=8,
        patch_size=1,
        in_channels=1,
        out_channels=1,
        num_layers=3,
        attention_head_dim=16,
        num_attention_heads=4,
        joint_attention_dim=32,
        caption_projection_dim=64,
        pooled_projection_dim=32,
        pos_embed_max_size=8,
    )
    optimizer = torch.optim.AdamW(transformer.parameters(), learning_rate)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, learning_rate, total_steps=iterations)
    losses = []
    for _ in range(iterations):
        rows = torch.randint(len(images), (batch_size,))
        random_digits = torch.randint(len(embeds) - 1, (batch_size,))
        digits = torch.where(torch.rand(batch_size) < wrong_prompt, random_digits, labels[rows])
        digits = torch.where(torch.rand(batch_size) < drop_prompt, len(embeds) - 1, digits)
        texts = torch.randint(embeds.shape[1], (batch_size,))
        clean, noise = images[rows], torch.randn(batch_size, *images.shape[1:])
        sigma = torch.sigmoid(torch.randn(batch_size))
        sigma_b111 = sigma[:, None, None, None]
        velocity = transformer(
            hidden_states=(1 - sigma_b111) * clean + sigma_b111 * noise,
            timestep=sigma * 1000,
            encoder_hidden_states=embeds[digits, texts],
            pooled_projections=pooled[digits, texts],
            return_dict=False,
        )[0]
        loss = F.mse_loss(velocity, noise - clean)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
    transformer.eval().save_pretrained(dst / "transformer", safe_serialization=True)
    return sum(losses[-10:]) / len(losses[-10:])
