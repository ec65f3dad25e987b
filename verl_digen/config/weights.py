"""What the headers of a model folder's safetensors files say, and what is wrong with the files. No weights are read."""

from __future__ import annotations

import json
import math
import struct
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

POINTER = b"version https://git-lfs.github.com/spec"
# name of the weights, and whether their library prefers the index of shards to a single file
_NAMES = (("diffusion_pytorch_model", True), ("model", False))


class WeightFileError(ValueError):
    """A file of a model folder cannot be what it should be; the message names the file and the cause."""


@dataclass(frozen=True)
class PartWeights:
    """Weights of one part: numbers of parameters and bytes, and a sentence for each thing that is wrong."""

    parameters: int = 0
    bytes: int = 0
    problems: list[str] = field(default_factory=list)


def check_file(file: Path) -> None:
    """Refuse an empty file and a git-lfs pointer.

    Raises:
        WeightFileError: names the file and the cause.
    """
    with open(file, "rb") as handle:
        start = handle.read(1024)
    if not start:
        raise WeightFileError(f"{file.name} is empty")
    if start.startswith(POINTER):
        size = next((line.split()[1].decode() for line in start.splitlines() if line.startswith(b"size ")), "?")
        raise WeightFileError(
            f"{file.name} is a git-lfs pointer to a file of {size} bytes: run `git lfs pull` where the model was "
            "cloned, or fetch it with `hf download NAME --local-dir DIR`"
        )


def read_json(file: Path) -> Any:
    """A JSON file.

    Raises:
        WeightFileError: it is not there, empty, a pointer or no JSON.
    """
    if not file.is_file():
        raise WeightFileError(f"no {file.name}")
    check_file(file)
    try:
        return json.loads(file.read_bytes())
    except ValueError as error:
        raise WeightFileError(f"{file.name} is no JSON: {error}") from error


def read_tensors(file: Path) -> dict[str, dict[str, Any]]:
    """The tensors that the header of a safetensors file names, after checking the header against the file's size.

    Raises:
        WeightFileError: the file is empty, a pointer, cut or something else.
    """
    check_file(file)
    size = file.stat().st_size
    with open(file, "rb") as handle:
        start = handle.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
        text = handle.read(length) if 0 < length <= size - 8 else b""
    try:
        header = json.loads(text)
        tensors = {name: entry for name, entry in header.items() if name != "__metadata__"}
        end = 8 + length + max((entry["data_offsets"][1] for entry in tensors.values()), default=0)
    except (ValueError, AttributeError, TypeError, KeyError) as error:
        raise WeightFileError(
            f"{file.name} ({size} bytes) has no safetensors header: it is cut, or another kind of file"
        ) from error
    if end != size:
        raise WeightFileError(f"{file.name} has {size} bytes, its header asks for {end}: the copy is incomplete")
    return tensors


def part_weights(folder: Path) -> PartWeights:
    """The weights that ``from_pretrained`` of diffusers or transformers would load from a part's folder.

    They are those of an index of shards, or a single file; files of other variants do not count.
    """
    problems: list[str] = []
    tensors: dict[str, dict[str, Any]] = {}
    try:
        shards = _shards(folder)
    except WeightFileError as error:
        return PartWeights(problems=[str(error)])
    for shard, named in shards.items():
        if not (folder / shard).is_file():
            problems.append(f"no {shard}, which the index names")
            continue
        try:
            found = read_tensors(folder / shard)
        except WeightFileError as error:
            problems.append(str(error))
            continue
        lacking = sorted(set(named) - set(found))
        if lacking:
            problems.append(f"{shard} lacks {len(lacking)} tensors that the index names ({lacking[0]}, ...)")
        tensors |= found
    parameters = sum(math.prod(entry["shape"]) for entry in tensors.values())
    size = sum(entry["data_offsets"][1] - entry["data_offsets"][0] for entry in tensors.values())
    if not problems and not parameters:
        problems.append(f"{', '.join(shards)} holds no weights")
    return PartWeights(parameters, size, problems)


def _shards(folder: Path) -> dict[str, list[str]]:
    """File name -> the tensors that an index says are in it ([] for a single file without an index)."""
    for name, index_first in _NAMES:
        single, index = folder / f"{name}.safetensors", folder / f"{name}.safetensors.index.json"
        if index.is_file() and (index_first or not single.is_file()):
            shards: dict[str, list[str]] = {}
            weight_map = read_json(index).get("weight_map")
            if not weight_map:
                raise WeightFileError(f"{index.name} names no weights (weight_map)")
            for tensor, shard in weight_map.items():
                shards.setdefault(shard, []).append(tensor)
            return dict(sorted(shards.items()))
        if single.is_file():
            return {single.name: []}
    raise WeightFileError(_nothing(folder))


def _nothing(folder: Path) -> str:
    """Why there is nothing to load in a folder."""
    files = sorted(file.name for file in folder.iterdir()) if folder.is_dir() else []
    wanted = " or ".join(f"{name}.safetensors" for name, _ in _NAMES)
    variants = [name for name in files if name.endswith(".safetensors")]
    pickled = [name for name in files if name.endswith((".bin", ".pt", ".pth", ".ckpt"))]
    if variants:
        hint = (
            f" (found {', '.join(variants)}: only files without a variant in the name are loaded; rename them, and the "
            "names in their index)"
        )
    elif pickled:
        hint = f" (found {', '.join(pickled)}: pickled weights are not loaded)"
    else:
        hint = ""
    return f"no {wanted}, nor their index of shards{hint}"
