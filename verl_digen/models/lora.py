"""LoRA on a diffusers transformer, built the same way in the Trainer and in every replica."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import contextmanager

import torch
from peft import LoraConfig

ADAPTER = "default"
REFERENCE = "reference"  # the frozen adapter of a run that starts from one


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

    The adapter starts as the identity (B = 0); A is drawn from N(0, 1/rank), as FlowGRPO does, with ``seed``, so every
    rank and replica holds the same.

    Args:
        target_modules: module names, or one of peft's patterns as text.
        dtype: dtype of the adapter (the master dtype; the base keeps its own).

    Returns:
        Number of adapter tensors bound (> 0).

    Raises:
        ValueError: no module of the transformer matches ``target_modules``.
    """
    targets = target_modules if isinstance(target_modules, str) else list(target_modules)
    config = LoraConfig(r=rank, lora_alpha=alpha, target_modules=targets, init_lora_weights="gaussian")
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


@torch.no_grad()
def add_reference_adapter(transformer: torch.nn.Module) -> None:
    """Keep the adapter as it is as a second, frozen one: the initial policy of a run that starts from an adapter."""
    transformer.add_adapter(transformer.peft_config[ADAPTER], adapter_name=REFERENCE)
    parameters = dict(transformer.named_parameters())
    for name, parameter in parameters.items():
        if f".{REFERENCE}." in name:
            parameter.data = parameters[name.replace(f".{REFERENCE}.", f".{ADAPTER}.")].data.clone()
    _train_adapter(transformer)


@contextmanager
def reference_adapter(transformer: torch.nn.Module):
    """Run the transformer as the reference of a LoRA run: with its frozen adapter, if it has one, or with none."""
    has_own = REFERENCE in transformer.peft_config
    if has_own:
        transformer.set_adapter(REFERENCE)
    else:
        transformer.disable_adapters()
    try:
        yield
    finally:
        if not has_own:
            transformer.enable_adapters()
        _train_adapter(transformer)


def _train_adapter(transformer: torch.nn.Module) -> None:
    transformer.set_adapter(ADAPTER)
    for name, parameter in transformer.named_parameters():
        parameter.requires_grad_("lora_" in name and f".{REFERENCE}." not in name)
