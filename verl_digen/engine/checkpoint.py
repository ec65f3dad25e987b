"""Checkpoints of the engine: tensors as safetensors through torch's distributed checkpoint, the rest as JSON.

Nothing is pickled and nothing is unpickled. A checkpoint written by W ranks loads on any number of ranks. Folder::

    weights/*.safetensors   model.<name>, optim.<state>.<name>, ema.<name> (each rank its shards)
    state.json              LR schedule, optimizer hyperparameters and step counts, EMA count, ranks, dtype
    lora.safetensors        LoRA runs: the whole adapter, for use elsewhere
    transformer/            full runs with ``hf_model`` in actor.checkpoint.save_contents: diffusers layout
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch.distributed.tensor import DTensor

STATE_FILE = "state.json"


def load_tensors(path: str | os.PathLike) -> dict[str, torch.Tensor]:
    """Tensors of a safetensors file, or of ``lora.safetensors`` in a folder.

    Raises:
        ValueError: no such file.
    """
    path = Path(path)
    file = path / "lora.safetensors" if path.is_dir() else path
    if not file.is_file():
        raise ValueError(f"{file} does not exist; expected a safetensors file")
    return load_file(file)


def _optimizer_tensors(engine) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
    """Optimizer state by name: tensors shaped like parameters, and scalars."""
    tensors, scalars = {}, {}
    for name, parameter in engine.named_trainable():
        for key, value in engine.optimizer.state.get(parameter, {}).items():
            if isinstance(value, torch.Tensor) and value.dim() > 0:
                tensors[f"optim.{key}.{name}"] = value
            elif value is not None:
                scalars[f"{key}.{name}"] = float(value)
    return tensors, scalars


def _model_tensors(engine) -> dict[str, torch.Tensor]:
    tensors = {f"model.{name}": p.detach() for name, p in engine.named_trainable()}
    if engine.ema is not None:
        tensors |= {f"ema.{name}": value for name, value in engine.ema.average.items()}
    return tensors


def save_engine(engine, path: str) -> None:
    """Write a checkpoint of ``engine``; every rank calls it, and it returns when all have written."""
    folder = Path(path)
    if dist.get_rank() == 0:
        folder.mkdir(parents=True, exist_ok=True)
    dist.barrier()
    optimizer, scalars = _optimizer_tensors(engine)
    weights = folder / "weights"
    dcp.save(
        _model_tensors(engine) | optimizer,
        storage_writer=dcp.HuggingFaceStorageWriter(str(weights), save_distributed=True),
    )
    if dist.get_rank() == 0:
        groups = [{k: v for k, v in group.items() if k != "params"} for group in engine.optimizer.param_groups]
        state = {
            "ranks": dist.get_world_size(),
            "dtype": str(engine.master_dtype),
            "lora": _lora(engine),
            "optimizer_tensors": sorted(optimizer),
            "optimizer_scalars": scalars,
            "param_groups": groups,
            "lr_scheduler": engine.lr_scheduler.state_dict(),
            "ema_commits": engine.ema.commits if engine.ema is not None else None,
        }
        (folder / STATE_FILE).write_text(json.dumps(state, default=_plain))
    _export(engine, folder)
    dist.barrier()


def _lora(engine) -> list[int]:
    """Adapter tensors and alpha; both 0 without LoRA. The rank is in the tensors' shapes."""
    return [engine.lora_bound, engine.model_config.lora_alpha] if engine.lora_bound else [0, 0]


def _plain(value):
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, tuple):
        return list(value)
    raise TypeError(f"{type(value).__name__} has no JSON form")


def _export(engine, folder: Path) -> None:
    """The trained weights in a form that other programs load."""
    contents = engine.checkpoint_config.save_contents
    if not engine.lora_bound and "hf_model" not in contents:
        return
    whole = {}
    for name, parameter in engine.named_trainable():
        value = parameter.detach()
        value = value.full_tensor() if isinstance(value, DTensor) else value
        if dist.get_rank() == 0:
            whole[name] = value.cpu().contiguous()
    if dist.get_rank():
        return
    if engine.lora_bound:
        save_file(whole, folder / "lora.safetensors")
    else:
        target = folder / "transformer"
        target.mkdir(exist_ok=True)
        save_file(whole, target / "diffusion_pytorch_model.safetensors", metadata={"format": "pt"})
        engine.module.save_config(target)


def load_engine(engine, path: str) -> None:
    """Restore what :func:`save_engine` wrote.

    Raises:
        ValueError: no checkpoint there, or one of another kind (dtype, LoRA, EMA).
    """
    folder = Path(path)
    if not (folder / STATE_FILE).is_file():
        raise ValueError(f"{folder} holds no complete checkpoint ({STATE_FILE} is missing)")
    state = json.loads((folder / STATE_FILE).read_text())
    ema_here, ema_there = engine.ema is not None, state["ema_commits"] is not None
    asked = (str(engine.master_dtype), _lora(engine), ema_here)
    found = (state["dtype"], state["lora"], ema_there)
    if asked != found:
        raise ValueError(
            f"checkpoint {folder} was written with (dtype, [LoRA tensors, alpha], EMA) = {found}, this run has "
            f"{asked}; change trainer.v1.digen.arithmetic, actor_rollout_ref.model.lora_rank or lora_alpha, or "
            "trainer.v1.digen.ema.enable, or start with trainer.resume_mode=disable"
        )
    if state["optimizer_tensors"] or state["optimizer_scalars"]:
        _materialise_optimizer_state(engine, state["optimizer_scalars"])
    optimizer, _ = _optimizer_tensors(engine)
    if sorted(optimizer) != state["optimizer_tensors"]:
        raise ValueError(
            f"checkpoint {folder} holds {len(state['optimizer_tensors'])} optimizer tensors, this run's optimizer has "
            f"{len(optimizer)}; actor_rollout_ref.actor.optim.optimizer must be that of the checkpoint"
        )
    dcp.load(
        _model_tensors(engine) | optimizer,
        storage_reader=dcp.HuggingFaceStorageReader(str(folder / "weights")),
    )
    for group, saved in zip(engine.optimizer.param_groups, state["param_groups"], strict=True):
        group.update({k: tuple(v) if isinstance(v, list) else v for k, v in saved.items()})
    engine.lr_scheduler.load_state_dict(state["lr_scheduler"])
    if engine.ema is not None:
        engine.ema.commits = state["ema_commits"]
    dist.barrier()


def _materialise_optimizer_state(engine, scalars: dict[str, float]) -> None:
    """Give the optimizer the state tensors that the checkpoint fills; a fresh optimizer has none before its first step.

    A step with zero gradients and a learning rate of 0 makes the optimizer itself create them; weights keep their bits.
    """
    kept = [(group["lr"], group.get("weight_decay")) for group in engine.optimizer.param_groups]
    for group in engine.optimizer.param_groups:
        group["lr"] = 0.0
        if "weight_decay" in group:
            group["weight_decay"] = 0.0
    for parameter in engine.trainable_parameters():
        parameter.grad = torch.zeros_like(parameter)
    engine.optimizer.step()
    engine.optimizer.zero_grad(set_to_none=True)
    for group, (lr, decay) in zip(engine.optimizer.param_groups, kept, strict=True):
        group["lr"] = lr
        if decay is not None:
            group["weight_decay"] = decay
    for name, parameter in engine.named_trainable():
        state = engine.optimizer.state[parameter]
        for key, value in state.items():
            if f"{key}.{name}" in scalars:
                saved = scalars[f"{key}.{name}"]
                state[key] = torch.full_like(value, saved) if isinstance(value, torch.Tensor) else saved
