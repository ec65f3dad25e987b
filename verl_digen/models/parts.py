"""Reading a model folder in the diffusers layout: which parts it has, and loading one of them.

Weights are read from safetensors only, and only classes of diffusers and transformers are built: nothing in
a model folder is unpickled or run.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from verl_digen.config.weights import WeightFileError, check_file, part_weights, read_json

_LIBRARIES = ("diffusers", "transformers")
_TOKENIZER_FILES = ("tokenizer.json", "vocab.json", "spiece.model", "tokenizer.model")


def read_index(path: str | Path) -> dict[str, Any]:
    """``model_index.json`` of a model folder.

    Raises:
        ValueError: no such folder, or no readable index in it.
    """
    path = Path(path)
    if not path.is_dir():
        raise ValueError(
            f"model folder {path} does not exist (a local folder in the diffusers layout is needed; "
            "fetch a published model with `hf download NAME --local-dir DIR` first)"
        )
    return _read_json(path / "model_index.json")


def read_config(path: str | Path, part: str) -> dict[str, Any]:
    """``config.json`` of one part."""
    return _read_json(Path(path) / part / "config.json")


def _read_json(file: Path) -> dict[str, Any]:
    try:
        return json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"cannot read {file}: {error}") from error


def check_parts(path: str | Path, need: Iterable[str], optional: Iterable[str] = ()) -> None:
    """Check that a model folder has the parts ``need``, without loading any.

    A part is there if ``model_index.json`` names it and its folder holds what its kind needs: a scheduler its
    configuration, a tokenizer its vocabulary, anything else its configuration and all its safetensors files, each
    whole. A part in ``optional`` may be absent (``[null, null]`` in the index).

    Raises:
        ValueError: lists everything that is missing, cut, empty or a git-lfs pointer.
    """
    path, optional = Path(path), set(optional)
    index = read_index(path)
    problems = []
    for part in need:
        entry = index.get(part)
        if not entry or entry[0] is None:
            if part not in optional:
                problems.append(f"{part}: not named in model_index.json")
        elif not (path / part).is_dir():
            problems.append(f"{part}: no folder {path / part}")
        else:
            problems += [f"{part}: {problem}" for problem in _problems(path / part, part)]
    if problems:
        named = sorted(key for key, value in index.items() if not key.startswith("_") and isinstance(value, list))
        raise ValueError(
            f"actor_rollout_ref.model.path={path}: {len(problems)} thing(s) missing or broken: {'; '.join(problems)} "
            f"(parts named in its index: {', '.join(named) or 'none'})"
        )


def _problems(folder: Path, part: str) -> list[str]:
    """What keeps a part's folder from being loaded; headers of weights are read, weights are not."""
    if part.startswith("tokenizer"):
        return _tokenizer_problems(folder)
    config = "scheduler_config.json" if part.startswith("scheduler") else "config.json"
    problems = []
    try:
        read_json(folder / config)
    except WeightFileError as error:
        problems.append(str(error))
    if not part.startswith("scheduler"):
        problems += part_weights(folder).problems
    return problems


def _tokenizer_problems(folder: Path) -> list[str]:
    found = [folder / name for name in _TOKENIZER_FILES if (folder / name).is_file()]
    problems = [] if found else [f"none of {', '.join(_TOKENIZER_FILES)}"]
    for file in found:
        try:
            check_file(file)
        except WeightFileError as error:
            problems.append(str(error))
    return problems


def part_class(path: str | Path, part: str) -> type:
    """The class that ``model_index.json`` names for a part.

    Raises:
        ValueError: the index does not name the part, or names a class that is not of diffusers or transformers.
    """
    path = Path(path)
    library, class_name = (read_index(path).get(part) or [None, None])[:2]
    if library not in _LIBRARIES:
        raise ValueError(
            f"part {part!r} of {path} is a {class_name} of {library!r}; "
            f"only parts of {' and '.join(_LIBRARIES)} are built"
        )
    cls = getattr(importlib.import_module(library), class_name, None)
    if cls is None:
        version = importlib.import_module(library).__version__
        raise ValueError(f"part {part!r} of {path} is a {class_name}, which {library} {version} does not have")
    return cls


def load_part(path: str | Path, part: str, *, dtype: torch.dtype | None = None) -> Any:
    """One part of a model folder, built by the class that ``model_index.json`` names, through its ``from_pretrained``.

    Raises:
        ValueError: as :func:`part_class`.
    """
    cls = part_class(path, part)
    options: dict[str, Any] = {"subfolder": part, "local_files_only": True}
    if not part.startswith(("scheduler", "tokenizer")):
        options["use_safetensors"] = True
        if dtype is not None:
            options["dtype" if cls.__module__.startswith("transformers.") else "torch_dtype"] = dtype
    return cls.from_pretrained(str(path), **options)
