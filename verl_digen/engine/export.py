"""Trained weights in the layouts of diffusers and peft, from a run or from its checkpoint."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from peft import LoraConfig

from verl_digen.models.adapter import CHECKPOINT_FOLDER, save_adapter
from verl_digen.models.parts import load_part, part_class, read_config, read_index

SHARD_SIZE = "5GB"


def write_transformer(
    folder: Path,
    model_path: str | Path,
    parameters: dict[str, torch.Tensor],
    buffers: dict[str, torch.Tensor],
    *,
    part: str,
    shard_size: str = SHARD_SIZE,
) -> None:
    """Write a transformer with diffusers' own ``save_pretrained``, under the class that the model's index names.

    Args:
        folder: made if it is not there.
        model_path: model folder that it was trained from; its configuration is read, not its weights.
        parameters: every parameter, whole, by name.
        buffers: at least the persistent ones.
        part: name of the transformer in the model folder.
        shard_size: largest size of one file; more weights make several files and an index.
    """
    with torch.device("meta"):
        module = part_class(model_path, part).from_config(read_config(model_path, part))
    wanted = module.state_dict().keys()
    tensors = {name: value for name, value in {**buffers, **parameters}.items() if name in wanted}
    module.load_state_dict(tensors, assign=True)
    module.save_pretrained(folder, max_shard_size=shard_size)


def read_weights(folder: Path, kind: str, dtype: torch.dtype | None) -> dict[str, torch.Tensor]:
    """Whole tensors of a checkpoint's ``weights/``, written by any number of ranks; one process reads them.

    Args:
        kind: ``model`` or ``ema``.
        dtype: of the result; None keeps the checkpoint's.

    Raises:
        ValueError: the checkpoint holds no weights of this kind.
    """
    reader = dcp.HuggingFaceStorageReader(str(folder))
    found = reader.read_metadata().state_dict_metadata if folder.is_dir() else {}
    tensors = {
        name: torch.empty(entry.size, dtype=dtype or entry.properties.dtype)
        for name, entry in found.items()
        if name.startswith(f"{kind}.")
    }
    if not tensors:
        kinds = sorted({name.partition(".")[0] for name in found})
        raise ValueError(f"{folder} holds no {kind} weights (it holds: {', '.join(kinds) or 'nothing'})")
    dcp.load(tensors, storage_reader=reader, no_dist=True)
    return {name.removeprefix(f"{kind}."): value for name, value in tensors.items()}


def export_adapter(
    engine_folder: Path, state: dict, out: Path, *, kind: str, dtype: torch.dtype | None, model: Path
) -> None:
    """Write a LoRA checkpoint's adapter; arguments as :func:`export_model`."""
    weights = read_weights(engine_folder / "weights", kind, dtype)
    config = LoraConfig.from_pretrained(str(engine_folder / CHECKPOINT_FOLDER))
    save_adapter(out, model, weights, config, part=state["part"])


def export_model(
    engine_folder: Path,
    state: dict,
    out: Path,
    *,
    kind: str,
    dtype: torch.dtype | None,
    model: Path,
    shard_size: str = SHARD_SIZE,
) -> None:
    """Write a whole model folder: the trained transformer, and the other parts copied from the model it started from.

    Args:
        engine_folder: ``global_step_N/actor``.
        state: its ``state.json``.
        out: the new folder.
        kind: ``model`` (current weights) or ``ema``.
        dtype: of the transformer; None keeps the checkpoint's (the master weights').
        model: model folder that the run started from.
        shard_size: largest size of one weight file.
    """
    part = state["part"]
    weights = read_weights(engine_folder / "weights", kind, dtype)
    # buffers are not trained: they are the base model's
    buffers = dict(load_part(model, part, dtype=next(iter(weights.values())).dtype).named_buffers())
    out.mkdir(parents=True, exist_ok=True)
    for name, entry in read_index(model).items():
        if name != part and isinstance(entry, list) and (model / name).is_dir():
            shutil.copytree(model / name, out / name, dirs_exist_ok=True)
    write_transformer(out / part, model, weights, buffers, part=part, shard_size=shard_size)
    shutil.copy(model / "model_index.json", out / "model_index.json")  # last: without it, the folder is no model
