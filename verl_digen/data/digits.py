"""Prompts and real scans for the digits model (scikit-learn's ``load_digits``, 1797 handwritten digits of 8 x 8)."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np

WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
TRAIN_TEMPLATES = ("a handwritten {}", "a scan of the digit {}", "the number {} in ink", "a drawing of {}")
VAL_TEMPLATES = ("the digit {} written by hand", "a picture of a {}")


def digit_prompts(templates: tuple[str, ...] = (*TRAIN_TEMPLATES, *VAL_TEMPLATES)) -> list[list[str]]:
    """For each digit 0..9, its prompts in the order of ``templates``."""
    return [[template.format(word) for template in templates] for word in WORDS]


def load_scans() -> tuple[np.ndarray, np.ndarray]:
    """The real scans: images fp32 [1797, 8, 8] with values 0..16, and the digit of each, int64 [1797].

    Raises:
        ImportError: scikit-learn, which has them, is not installed.
    """
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise ImportError(
            "the scans of handwritten digits come with scikit-learn: pip install 'verl-digen[digits]'. It is needed to "
            "rebuild the shipped digits weights; to train with them it is not"
        ) from error

    digits = load_digits()
    return digits.images.astype(np.float32), digits.target.astype(np.int64)


def halves(scans: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The scans (or their labels) that the reward classifier learns from, and those that its judges learn from."""
    return scans[0::2], scans[1::2]


def write_digits_prompts(
    directory: str | Path,
    *,
    train_templates: tuple[str, ...] = TRAIN_TEMPLATES,
    val_templates: tuple[str, ...] = VAL_TEMPLATES,
) -> dict[str, Path]:
    """Write ``train.parquet`` and ``val.parquet`` in the columns of :class:`~verl_digen.data.prompts.PromptDataset`.

    One row per template and digit; the two files share no template.

    Raises:
        ValueError: a template is in both files.
    """
    shared = sorted(set(train_templates) & set(val_templates))
    if shared:
        raise ValueError(f"train and validation prompts must have separate templates, both have {shared}")
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    files = {}
    for split, templates in (("train", train_templates), ("val", val_templates)):
        files[split] = directory / f"{split}.parquet"
        _write_parquet(files[split], _rows(split, templates))
    return files


def _rows(split: str, templates: tuple[str, ...]) -> list[dict]:
    return [
        {
            "prompt": template.format(word),
            "data_source": "digits",
            "reward_model": {"style": "rule", "ground_truth": str(digit)},
            "extra_info": {"split": split, "index": number * len(WORDS) + digit, "template": template},
        }
        for number, template in enumerate(templates)
        for digit, word in enumerate(WORDS)
    ]


def _write_parquet(file: Path, rows: list[dict]) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    partial = file.with_name(f".{file.name}.{os.getpid()}")
    pq.write_table(pa.Table.from_pylist(rows), partial)
    os.replace(partial, file)
