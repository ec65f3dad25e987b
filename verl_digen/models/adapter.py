"""LoRA adapters on disk: what stock diffusers and peft write and read, rank and alpha included.

A folder that :func:`save_adapter` writes holds the adapter twice::

    pytorch_lora_weights.safetensors     pipeline.load_lora_weights(folder); rank and alpha in the file's metadata
    adapter_model.safetensors            peft.PeftModel.from_pretrained(transformer, folder); rank and alpha in
    adapter_config.json                  the JSON file

Both hold the same tensors, ``<module>.lora_A.weight`` [rank, in] and ``<module>.lora_B.weight`` [out, rank] below a
prefix.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from peft.utils import CONFIG_NAME, SAFETENSORS_WEIGHTS_NAME
from safetensors import SafetensorError, safe_open

from verl_digen.models.lora import ADAPTER
from verl_digen.models.parts import part_class, read_config, read_index

DIFFUSERS_FILE = "pytorch_lora_weights.safetensors"
DIFFUSERS_METADATA = "lora_adapter_metadata"
CHECKPOINT_FOLDER = "lora_adapter"  # in the engine's folder of a checkpoint
_PREFIXES = ("transformer.", "base_model.model.")
OPTION = "actor_rollout_ref.model.lora_adapter_path"


def file_name(parameter: str) -> str:
    """The name in a file of an adapter's parameter: peft's name in the model, without the adapter's own name."""
    return parameter.replace(f".{ADAPTER}.weight", ".weight")


def save_adapter(
    folder: Path, model_path: str | Path, tensors: dict[str, torch.Tensor], config: LoraConfig, *, part: str
) -> None:
    """Write an adapter with the save functions of diffusers and peft.

    Args:
        folder: made if it is not there.
        model_path: model folder of the base; its configuration and index are read, not its weights.
        tensors: whole tensors by parameter name in the transformer.
        config: the adapter's, as it was injected.
        part: name of the transformer in the model folder.
    """
    import diffusers

    # A pipeline that is not diffusers' own has no format of its own: the layout is the same for all.
    pipeline = getattr(diffusers, read_index(model_path).get("_class_name", ""), diffusers.StableDiffusion3Pipeline)
    tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
    pipeline.save_lora_weights(
        folder,
        transformer_lora_layers={file_name(name): tensor for name, tensor in tensors.items()},
        transformer_lora_adapter_metadata=config.to_dict(),
    )
    with torch.device("meta"):
        empty = part_class(model_path, part).from_config(read_config(model_path, part))
        wrapped = get_peft_model(empty, config, adapter_name=ADAPTER)
    wrapped.save_pretrained(folder, state_dict={f"base_model.model.{name}": value for name, value in tensors.items()})


@dataclass(frozen=True)
class AdapterHeader:
    """What a file says of its adapter without its tensors."""

    file: Path
    names: dict[str, str]  # name without prefix -> name in the file
    ranks: tuple[int, ...]
    alphas: tuple[float, ...]
    alpha_known: bool


def read_header(path: str | Path) -> AdapterHeader:
    """Find the adapter file in ``path`` and read its header.

    Args:
        path: a safetensors file, a folder that holds one, or a checkpoint (``global_step_N``).

    Raises:
        ValueError: no such file, or none that holds LoRA tensors.
    """
    file = _find_file(Path(path).expanduser())
    try:
        with safe_open(file, framework="pt") as opened:
            names = {_bare(name): name for name in opened.keys()}  # noqa: SIM118 - not a dict
            ranks = {opened.get_slice(full).get_shape()[0] for name, full in names.items() if ".lora_A." in name}
            metadata = opened.metadata() or {}
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{OPTION}={path}: {file} is no complete safetensors file: {error}") from error
    if not ranks:
        raise ValueError(f"{OPTION}={path}: {file} holds {len(names)} tensors, none of them named lora_A")
    config = _stored_config(file, metadata)
    for name in ("use_rslora", "use_dora"):
        if config.get(name):
            raise ValueError(f"{OPTION}={path}: the adapter was trained with {name}=true, which is not supported")
    alphas = {config["lora_alpha"], *(config.get("alpha_pattern") or {}).values()} if config else ranks
    return AdapterHeader(file, names, tuple(sorted(ranks)), tuple(sorted(alphas)), bool(config))


def _find_file(path: Path) -> Path:
    if path.is_file():
        return path
    if not path.exists():
        raise ValueError(f"{OPTION}={path} does not exist")
    folders = [path, path / CHECKPOINT_FOLDER, path / "actor" / CHECKPOINT_FOLDER]
    for folder in folders:
        for name in (DIFFUSERS_FILE, SAFETENSORS_WEIGHTS_NAME):
            if (folder / name).is_file():
                return folder / name
    others = list(path.glob("*.safetensors"))
    if len(others) == 1:
        return others[0]
    raise ValueError(
        f"{OPTION}={path}: no {DIFFUSERS_FILE} and no {SAFETENSORS_WEIGHTS_NAME} there (and {len(others)} other "
        "safetensors files); give the file itself, or a folder that diffusers, peft or a checkpoint of ours wrote"
    )


def _bare(name: str) -> str:
    for prefix in _PREFIXES:
        name = name.removeprefix(prefix)
    return file_name(name)


def _stored_config(file: Path, metadata: dict[str, str]) -> dict[str, Any]:
    """The LoRA configuration of diffusers' metadata or of peft's file beside the weights; {} if there is neither."""
    if DIFFUSERS_METADATA in metadata:
        stored = json.loads(metadata[DIFFUSERS_METADATA])
        return {key.removeprefix("transformer."): value for key, value in stored.items()}
    beside = file.parent / CONFIG_NAME
    if file.name == SAFETENSORS_WEIGHTS_NAME and beside.is_file():
        return json.loads(beside.read_text())
    return {}


def check_adapter(path: str | Path, *, rank: int, alpha: float) -> AdapterHeader:
    """Refuse an adapter whose rank or alpha is not the run's; reads no tensors.

    A file without alpha means alpha = rank, as diffusers and peft take it.

    Raises:
        ValueError: with both numbers and the option to change.
    """
    header = read_header(path)
    problems = []
    if header.ranks != (rank,):
        problems.append(f"rank {_numbers(header.ranks)}, but actor_rollout_ref.model.lora_rank={rank}")
    if header.alphas != (alpha,):
        source = "" if header.alpha_known else " (the file names none, which means the rank)"
        problems.append(f"alpha {_numbers(header.alphas)}{source}, but actor_rollout_ref.model.lora_alpha={alpha:g}")
    if problems:
        raise ValueError(f"{OPTION}={path}: the adapter in {header.file} has {' and '.join(problems)}; make them equal")
    return header


def _numbers(values: tuple[float, ...]) -> str:
    return ", ".join(f"{value:g}" for value in values)


@torch.no_grad()
def load_adapter(
    module: torch.nn.Module, path: str | Path, *, rank: int, alpha: float, adapter_name: str = ADAPTER
) -> None:
    """Fill an adapter of ``module`` from a file.

    Raises:
        ValueError: another rank or alpha, tensors that are missing or unknown, or of another shape.
    """
    header = check_adapter(path, rank=rank, alpha=alpha)
    own = {
        name.replace(f".{adapter_name}.weight", ".weight"): parameter
        for name, parameter in module.named_parameters()
        if f".{adapter_name}.weight" in name
    }
    missing, unknown = sorted(set(own) - set(header.names)), sorted(set(header.names) - set(own))
    if missing or unknown:
        raise ValueError(
            f"{OPTION}={path}: {header.file} lacks {_some(missing)} and holds {_some(unknown)} that this run's adapter "
            "does not have; actor_rollout_ref.model.target_modules must be those the adapter was trained with"
        )
    with safe_open(header.file, framework="pt") as opened:
        for name, parameter in own.items():
            value = opened.get_tensor(header.names[name])
            if value.shape != parameter.shape:
                raise ValueError(
                    f"{OPTION}={path}: {name} has shape {list(value.shape)} in {header.file}, here "
                    f"{list(parameter.shape)}: it was trained on another model"
                )
            parameter.copy_(value)


def _some(names: list[str]) -> str:
    return f"{len(names)} tensors ({', '.join(names[:2])}{', ...' if len(names) > 2 else ''})" if names else "0 tensors"
