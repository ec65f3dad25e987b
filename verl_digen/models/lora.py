"""LoRA on a diffusers transformer, built the same way in the Trainer and in every replica."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import contextmanager

import torch
from peft import LoraConfig

ADAPTER = "default"


def add_lora(
    transformer: torch.nn.Module,
    *,
    rank: int,
    alpha: int,
    target_modules: Sequence[str] | str,
    dtype: torch.dtype,
    seed: int = 0,
) -> int:
    """Inject a trainable LoRA adapter into ``transformer`` and freeze everything else.

    The adapter starts as the identity (B = 0); A is drawn from ``seed``, so every rank and replica holds the same.

    Args:
        target_modules: module names, or one of peft's patterns as text.
        dtype: dtype of the adapter (the master dtype; the base keeps its own).

    Returns:
        Number of adapter tensors bound (> 0).

    Raises:
        ValueError: no module of the transformer matches ``target_modules``.
    """
    targets = target_modules if isinstance(target_modules, str) else list(target_modules)
    config = LoraConfig(r=rank, lora_alpha=alpha, target_modules=targets, init_lora_weights=True)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            transformer.add_adapter(config, adapter_name=ADAPTER)
        except ValueError as error:
            raise ValueError(
                f"actor_rollout_ref.model.target_modules={targets} matches no module of "
                f"{type(transformer).__name__}: {error}"
            ) from error
    bound = 0
    for name, parameter in transformer.named_parameters():
        is_adapter = "lora_" in name
        parameter.requires_grad_(is_adapter)
        if is_adapter:
            parameter.data = parameter.data.to(dtype)
            bound += 1
    return bound


@contextmanager
def adapter_disabled(transformer: torch.nn.Module):
    """Run the transformer without its LoRA adapter: the reference policy of a LoRA run."""
    transformer.disable_adapters()
    try:
        yield
    finally:
        transformer.enable_adapters()
        for name, parameter in transformer.named_parameters():
            parameter.requires_grad_("lora_" in name)
