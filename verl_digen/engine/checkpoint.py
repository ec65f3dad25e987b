"""Checkpoints of the engine: tensors as safetensors through torch's distributed checkpoint, the rest as JSON.

Nothing is pickled and nothing is unpickled. A checkpoint written by W ranks loads on any number of ranks. What is in
it follows ``actor_rollout_ref.actor.checkpoint.save_contents``::

    state.json              always: what the checkpoint holds, ranks, dtype, model folder, LoRA rank and alpha
    weights/*.safetensors   each rank its shards
        model.<name>, ema.<name>     with ``model``
        optim.<state>.<name>         with ``optimizer``; hyperparameters and step counts are in state.json
    (in state.json)         LR schedule, with ``extra``
    lora_adapter/           LoRA runs, always: the adapter as diffusers and peft load it
    transformer/            full runs, with ``hf_model``: the transformer as diffusers loads it

Resuming needs ``model``, ``optimizer`` and ``extra``.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.tensor import DTensor

from verl_digen.config.plan import RESUME_NEEDS
from verl_digen.engine.export import write_transformer
from verl_digen.models.adapter import CHECKPOINT_FOLDER, save_adapter
from verl_digen.models.lora import ADAPTER

logger = logging.getLogger(__name__)

STATE_FILE = "state.json"
WEIGHTS = "weights"


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
    contents = list(engine.checkpoint_config.save_contents)
    if dist.get_rank() == 0:
        folder.mkdir(parents=True, exist_ok=True)
    dist.barrier()
    optimizer, scalars = _optimizer_tensors(engine) if "optimizer" in contents else ({}, {})
    tensors = (_model_tensors(engine) if "model" in contents else {}) | optimizer
    if tensors:
        writer = dcp.HuggingFaceStorageWriter(str(folder / WEIGHTS), save_distributed=True)
        dcp.save(tensors, storage_writer=writer)
    if dist.get_rank() == 0:
        state = {
            "contents": contents,
            "ranks": dist.get_world_size(),
            "dtype": str(engine.master_dtype),
            "model": str(engine.family.path.resolve()),
            "part": engine.family.transformer_part,
            "lora": _lora(engine),
            "ema_commits": engine.ema.commits if engine.ema is not None else None,
        }
        if "optimizer" in contents:
            groups = [{k: v for k, v in group.items() if k != "params"} for group in engine.optimizer.param_groups]
            state |= {"optimizer_tensors": sorted(optimizer), "optimizer_scalars": scalars, "param_groups": groups}
        if "extra" in contents:
            state["lr_scheduler"] = engine.lr_scheduler.state_dict()
        (folder / STATE_FILE).write_text(json.dumps(state, default=_plain))
    _export(engine, folder, contents)
    dist.barrier()


def _lora(engine) -> dict[str, int]:
    """Adapter tensors, rank and alpha; all 0 without LoRA."""
    config = engine.model_config
    rank, alpha = (config.lora_rank, config.lora_alpha) if engine.lora_bound else (0, 0)
    return {"tensors": engine.lora_bound, "rank": rank, "alpha": alpha}


def _plain(value):
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, tuple):
        return list(value)
    raise TypeError(f"{type(value).__name__} has no JSON form")


def _export(engine, folder: Path, contents: list[str]) -> None:
    """The trained weights in the form that other programs load, gathered on the first rank."""
    if not engine.lora_bound and "hf_model" not in contents:
        return
    whole = {}
    for name, parameter in engine.named_trainable():
        value = parameter.detach()
        value = value.full_tensor() if isinstance(value, DTensor) else value
        if dist.get_rank() == 0:
            whole[name] = value.cpu()
    if dist.get_rank():
        return
    model, part = engine.family.path, engine.family.transformer_part
    if engine.lora_bound:
        config = engine.module.peft_config[ADAPTER]
        save_adapter(folder / CHECKPOINT_FOLDER, model, whole, config, part=part)
    else:
        buffers = {name: buffer.cpu() for name, buffer in engine.module.named_buffers()}
        write_transformer(folder / "transformer", model, whole, buffers, part=part)


def read_state(folder: Path) -> dict:
    """``state.json`` of a checkpoint.

    Raises:
        ValueError: it is not there.
    """
    if not (folder / STATE_FILE).is_file():
        raise ValueError(f"{folder} holds no complete checkpoint ({STATE_FILE} is missing)")
    return json.loads((folder / STATE_FILE).read_text())


def load_engine(engine, path: str) -> None:
    """Restore what :func:`save_engine` wrote.

    Raises:
        ValueError: no checkpoint there, one without what a resumed run needs, or one of another kind (dtype, LoRA,
            EMA).
    """
    folder = Path(path)
    state = read_state(folder)
    missing = [name for name in RESUME_NEEDS if name not in state["contents"]]
    if missing:
        raise ValueError(
            f"checkpoint {folder} was written with actor_rollout_ref.actor.checkpoint.save_contents="
            f"{state['contents']} and lacks {missing}, which a resumed run needs. Its weights start a new run "
            "(trainer.resume_mode=disable) as actor_rollout_ref.model.lora_adapter_path, or exported with `verl-digen "
            "export` as actor_rollout_ref.model.path"
        )
    ema_here, ema_there = engine.ema is not None, state["ema_commits"] is not None
    asked = (str(engine.master_dtype), _lora(engine), ema_here)
    found = (state["dtype"], state["lora"], ema_there)
    if asked != found:
        raise ValueError(
            f"checkpoint {folder} was written with (dtype, LoRA, EMA) = {found}, this run has {asked}; change "
            "trainer.v1.digen.arithmetic, actor_rollout_ref.model.lora_rank or lora_alpha, or "
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
        storage_reader=dcp.HuggingFaceStorageReader(str(folder / WEIGHTS)),
    )
    _resume_options(engine, state, folder)
    if engine.ema is not None:
        engine.ema.commits = state["ema_commits"]
    dist.barrier()


def _resume_options(engine, state: dict, folder: Path) -> None:
    """Restore where the LR schedule stands. Options of the optimizer are this run's; those that differ are named."""
    scheduler, changed = engine.lr_scheduler, []
    rates = list(scheduler.base_lrs)
    scheduler.load_state_dict(state["lr_scheduler"])
    for index, (group, saved) in enumerate(zip(engine.optimizer.param_groups, state["param_groups"], strict=True)):
        old_rate, group["lr"] = scheduler.base_lrs[index], saved["lr"]
        if rates[index] != old_rate:
            changed.append(f"lr {old_rate} -> {rates[index]}")
            group["lr"] = rates[index] * scheduler.lr_lambdas[index](scheduler.last_epoch)
        group["initial_lr"] = rates[index]
        for name, value in saved.items():
            old = tuple(value) if isinstance(value, list) else value
            if name not in ("lr", "initial_lr") and group.get(name) != old:
                changed.append(f"{name} {old} -> {group.get(name)}")
    scheduler.base_lrs = rates
    scheduler._last_lr = [group["lr"] for group in engine.optimizer.param_groups]  # what get_last_lr returns
    if changed and dist.get_rank() == 0:
        logger.warning("resuming %s with other options of actor.optim: %s", folder, "; ".join(changed))


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
