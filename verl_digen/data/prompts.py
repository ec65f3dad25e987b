"""Prompts from parquet files, and the order in which training meets them.

The order is a pure function of (seed, step): nothing has to be saved for a resumed run to go on where it was.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any

_REQUIRED = ("prompt", "data_source", "reward_model", "extra_info")


class PromptDataset:
    """Prompts of one or several parquet files.

    Columns: ``prompt`` (text), ``data_source`` (text), ``reward_model`` ({style, ground_truth}), ``extra_info``
    (mapping) and, optionally, ``negative_prompt`` (text).

    Raises:
        ValueError: a file that cannot be read, has no rows, lacks a column or holds something else in it.
    """

    def __init__(self, files: str | Path | Sequence[str | Path]) -> None:
        paths = [files] if isinstance(files, str | Path) else list(files)
        if not paths:
            raise ValueError("no prompt file given")
        self.files = [Path(path) for path in paths]
        self._rows = [row for file in self.files for row in _read_rows(file)]

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        """A row's columns, ``negative_prompt`` (or None) and ``ground_truth`` (that of ``reward_model``)."""
        return dict(self._rows[index])


def _read_rows(file: Path) -> list[dict[str, Any]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        table = pq.read_table(file)
    except (OSError, pa.ArrowException) as error:
        raise ValueError(f"cannot read prompt file {file}: {error}") from error
    missing = [name for name in _REQUIRED if name not in table.column_names]
    if missing:
        raise ValueError(
            f"prompt file {file} lacks {len(missing)} column(s): {', '.join(missing)} "
            f"(it has: {', '.join(table.column_names)})"
        )
    if not table.num_rows:
        raise ValueError(f"prompt file {file} has 0 rows")
    return [_check_row(file, number, row) for number, row in enumerate(table.to_pylist())]


def _check_row(file: Path, number: int, row: dict[str, Any]) -> dict[str, Any]:
    reward_model = row["reward_model"]
    negative = row.get("negative_prompt")
    if not isinstance(row["prompt"], str) or not isinstance(row["data_source"], str):
        raise ValueError(f"prompt file {file}, row {number}: prompt and data_source must be text, got {row}")
    if not isinstance(reward_model, dict) or "ground_truth" not in reward_model:
        raise ValueError(f"prompt file {file}, row {number}: reward_model must hold ground_truth, got {reward_model!r}")
    if negative is not None and not isinstance(negative, str):
        raise ValueError(f"prompt file {file}, row {number}: negative_prompt must be text, got {negative!r}")
    return {
        "prompt": row["prompt"],
        "negative_prompt": negative,
        "data_source": row["data_source"],
        "reward_model": reward_model,
        "ground_truth": reward_model["ground_truth"],
        "extra_info": dict(row["extra_info"] or {}),
    }


def fingerprint(dataset: PromptDataset) -> str:
    """A hash (32 hex digits) of all rows in their order: equal data sets have equal fingerprints."""
    digest = blake2b(digest_size=16)
    for index in range(len(dataset)):
        digest.update(json.dumps(dataset[index], sort_keys=True, default=str).encode() + b"\n")
    return digest.hexdigest()


def batch_indices(
    seed: int, size: int, batch_size: int, step: int, shuffle: bool = True
) -> tuple[int, list[tuple[int, int]]]:
    """The prompts of one training step.

    Each epoch goes through the data set once, in an order of its own (a permutation keyed by seed and epoch); the
    ``size % batch_size`` prompts at the end of that order are left out.

    Args:
        size: number of prompts.
        step: 1 is the first step.

    Returns:
        epoch (0 is the first), and ``(position, index)`` for each prompt of the batch: its place in the epoch's
        order, and its row in the data set.

    Raises:
        ValueError: a batch larger than the data set, or a size or step below 1.
    """
    if step < 1 or batch_size < 1:
        raise ValueError(f"step and batch size must be at least 1, got step {step}, batch size {batch_size}")
    if batch_size > size:
        raise ValueError(
            f"a batch of {batch_size} prompts cannot be drawn from a data set of {size}: "
            f"set data.train_batch_size to at most {size}, or add prompts"
        )
    epoch, step_in_epoch = divmod(step - 1, size // batch_size)
    first = step_in_epoch * batch_size
    order = _epoch_order(seed, epoch, size) if shuffle else range(size)
    return epoch, [(position, order[position]) for position in range(first, first + batch_size)]


def _epoch_order(seed: int, epoch: int, size: int) -> list[int]:
    import torch

    generator = torch.Generator().manual_seed(int.from_bytes(_key(seed, epoch), "little"))
    return torch.randperm(size, generator=generator).tolist()


def _key(*parts: int) -> bytes:
    return blake2b(":".join(map(str, parts)).encode(), digest_size=7).digest()


def group_uid(seed: int, epoch: int, position: int) -> str:
    """Name of one occurrence of a prompt: the same in every run of this seed, another for each (epoch, position).

    It has no ``_``, which separates the parts of a sample's key (``{uid}_{j}_0``).
    """
    return f"g{_key(seed).hex()}-{epoch}-{position}"
