"""``actor_rollout_ref.model`` of a diffusion run (``config/model/diffusion_model.yaml``)."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any

from verl.base_config import BaseConfig

DTYPES = ("float32", "bfloat16", "float64")


@dataclass
class DiffusionModelConfig(BaseConfig):
    """The diffusion counterpart of veRL's ``HFModelConfig``.

    Raises:
        ValueError: unknown dtype, negative LoRA rank, a folder that does not exist.
    """

    _mutable_fields = {"model_type", "path"}

    path: str = ""
    family: str | None = None
    dtype: str = "float32"
    attention_backend: str | None = None
    enable_gradient_checkpointing: bool = False
    lora_rank: int = 0
    lora_alpha: int = 64
    target_modules: Any = None
    lora_adapter_path: str | None = None
    # The fields below are what veRL's shared code reads of a model config; a diffusion model has fixed values.
    model_type: str = field(default="diffusion_model", init=False)
    use_remove_padding: bool = field(default=False, init=False)
    use_fused_kernels: bool = field(default=False, init=False)
    trust_remote_code: bool = field(default=False, init=False)
    tokenizer: Any = field(default=None, init=False)
    processor: Any = field(default=None, init=False)

    def __post_init__(self):
        if self.dtype == "float16":
            raise ValueError(
                "actor_rollout_ref.model.dtype='float16': gradients are not scaled, and at the size of SD3.5 they are "
                "about 1e-9 per element of the prediction, below float16's smallest number 6e-8; use bfloat16"
            )
        if self.dtype not in DTYPES:
            raise ValueError(f"actor_rollout_ref.model.dtype={self.dtype!r}: choose one of {', '.join(DTYPES)}")
        if self.lora_rank < 0:
            raise ValueError(f"actor_rollout_ref.model.lora_rank={self.lora_rank} must be 0 (full) or more")
        if self.lora_rank == 0 and (self.target_modules or self.lora_adapter_path):
            raise ValueError(
                "actor_rollout_ref.model.target_modules and lora_adapter_path are not read with lora_rank=0 "
                "(full fine-tuning); set lora_rank or remove them"
            )
        self.path = os.path.abspath(os.path.expanduser(self.path))
        if not os.path.isfile(os.path.join(self.path, "model_index.json")):
            raise ValueError(
                f"actor_rollout_ref.model.path={self.path} holds no model_index.json; it must be a model folder in "
                "the diffusers layout (for digits: verl-digen prepare digits --out DIR)"
            )

    def get_processor(self):
        return None
