"""The embedded default: handwritten digits in pixel space, small enough to train on two CPU cores.

An SD3 transformer of 0.43 M parameters on 8 x 8 grey images, one tiny text encoder and no VAE, in the same
folder layout and through the same loading code as every other model. The weights ship with the package and are
weakly pretrained on purpose, so that reinforcement learning has something to teach.
"""

from __future__ import annotations

import filecmp
import os
import shutil
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from torch import Tensor

from verl_digen.models.family import register_family, uint8_pixels
from verl_digen.models.sd3 import SD3Family

ASSETS = Path(__file__).parent / "assets" / "digits"


@register_family
class DigitsFamily(SD3Family):
    """``DigitsPipeline``. Latents are pixels [1, 8, 8] in -1..1.

    Conditions: ``prompt_embeds`` [8, 32] and ``pooled_prompt_embeds`` [32].
    """

    name = "digits"
    pipeline_classes = ("DigitsPipeline",)
    conditioner_parts = ("tokenizer", "text_encoder")
    optional_parts: ClassVar[tuple[str, ...]] = ()
    vae_scale_factor = 1

    def load_conditioner(self) -> None:
        self.check_parts(self.path, need=self.conditioner_parts)
        self.tokenizer = self._load_frozen("tokenizer")
        self.text_encoder = self._load_frozen("text_encoder")

    def _encode_prompt(self, prompt: str) -> dict[str, Tensor]:
        tokens = tokenize(self.tokenizer, [prompt]).to(self.device)
        output = self.text_encoder(tokens)
        return {"prompt_embeds": output.last_hidden_state[0], "pooled_prompt_embeds": output.text_embeds[0]}

    def decode(self, latents: Tensor) -> np.ndarray:
        return uint8_pixels(latents)

    def _timestep_options(self, num_steps: int, height: int, width: int, num_frames: int) -> dict[str, Any]:
        """Evenly spaced from 1 to 1/T before the shift (diffusers' default would spend the last step on 0.001 to 0)."""
        return {"sigmas": np.linspace(1.0, 1.0 / num_steps, num_steps).tolist()}


def tokenize(tokenizer: Any, prompts: list[str]) -> Tensor:
    """Token ids [B, L], padded and cut to the tokenizer's own length, as the pipeline does for CLIP."""
    length = tokenizer.model_max_length
    encoded = tokenizer(prompts, padding="max_length", max_length=length, truncation=True, return_tensors="pt")
    return encoded.input_ids


def ensure_digits_model(dst: str | Path) -> Path:
    """Copy the shipped model to ``dst`` and return it. Files that are there already and equal stay as they are.

    Safe to call from several processes at once: a file appears under its name only when it is complete.

    Raises:
        ValueError: ``dst`` holds a file of that name with other content.
    """
    dst = Path(dst)
    sources = sorted(file for file in ASSETS.rglob("*") if file.is_file())
    if not sources:
        raise ValueError(f"no digits model in {ASSETS}: rebuild it with `verl-digen prepare digits-weights`")
    for source in sources:
        target = dst / source.relative_to(ASSETS)
        if target.exists():
            if not filecmp.cmp(source, target, shallow=False):
                raise ValueError(f"{target} is not the shipped digits model; choose another folder or remove {dst}")
            continue
        target.parent.mkdir(parents=True, exist_ok=True)
        partial = target.with_name(f".{target.name}.{os.getpid()}")
        shutil.copyfile(source, partial)
        os.replace(partial, target)
    return dst
