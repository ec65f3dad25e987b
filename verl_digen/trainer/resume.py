"""Saving and resuming a run (I9).

The order of prompts and every random draw are functions of (seed, step), so beside the engine's state a run's state is
its step number; what must agree between the two runs is checked. A checkpoint is written into a folder of its own and
renamed when it is complete; the tracker file is replaced in one move. A kill at any time leaves the last one intact.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from omegaconf import DictConfig
from verl.utils.checkpoint.checkpoint_manager import find_latest_ckpt_path

from verl_digen.config.plan import RunPlan
from verl_digen.data.prompts import PromptDataset, fingerprint

logger = logging.getLogger(__name__)
logger.setLevel(os.getenv("VERL_LOGGING_LEVEL", "INFO"))

RUN_FILE = "run.json"
ENGINE_FOLDER = "actor"
TRACKER = "latest_checkpointed_iteration.txt"


def run_state(plan: RunPlan, dataset: PromptDataset, *, shuffle: bool, step: int) -> dict[str, Any]:
    """What a resumed run must agree on, and the step."""
    return {
        "global_steps": step,
        "seed": plan.seed,
        "prompts_per_step": plan.prompts,
        "samples_per_prompt": plan.n,
        "train_prompts": len(dataset),
        "train_fingerprint": fingerprint(dataset),
        "shuffle": shuffle,
    }


def check_run_state(saved: dict[str, Any], current: dict[str, Any], folder: Path) -> None:
    """Refuse to go on with another order of prompts or other noise.

    Raises:
        ValueError: every entry that differs, saved and current.
    """
    differing = {k: (saved.get(k), v) for k, v in current.items() if k != "global_steps" and saved.get(k) != v}
    if differing:
        raise ValueError(
            f"checkpoint {folder} belongs to a run with other data or seeds (saved, now): "
            + "; ".join(f"{k}: {a} -> {b}" for k, (a, b) in differing.items())
            + ". Restore these options or start anew with trainer.resume_mode=disable"
        )


def save_run(config: DictConfig, state: dict[str, Any], write: Callable[[Path], None]) -> None:
    """Write ``global_step_N``, point the tracker at it, keep ``trainer.max_actor_ckpt_to_keep`` checkpoints.

    Args:
        config: the ``trainer`` section.
        state: see :func:`run_state`.
        write: writes the engine's state into the folder given to it.
    """
    root, step = Path(config.default_local_dir), state["global_steps"]
    final, partial = root / f"global_step_{step}", root / f".partial_global_step_{step}"
    for left in root.glob(".partial_global_step_*"):  # by a run that was killed while it wrote
        shutil.rmtree(left)
    partial.mkdir(parents=True)
    write(partial / ENGINE_FOLDER)
    (partial / RUN_FILE).write_text(json.dumps(state, indent=1))
    _sync(partial)
    if final.exists():  # a run that goes on from an older checkpoint comes to this step again
        shutil.rmtree(final)
    os.replace(partial, final)
    tracker = root / f".{TRACKER}"
    tracker.write_text(str(step))
    os.replace(tracker, root / TRACKER)
    logger.info("checkpoint written: %s", final)
    _prune(root, config.get("max_actor_ckpt_to_keep"), final)


def _sync(folder: Path) -> None:
    """Flush the files to disk before the rename makes them the checkpoint."""
    for file in folder.rglob("*"):
        if file.is_file():
            descriptor = os.open(file, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)


def _prune(root: Path, keep: int | None, newest: Path) -> None:
    if not keep or keep < 1:
        return
    ours = [p for p in root.glob("global_step_*") if p.name.removeprefix("global_step_").isdigit()]
    # higher numbers are of a run before this one: not newer, and not this run's to delete
    steps = sorted((p for p in ours if _number(p) <= _number(newest)), key=_number)
    for folder in steps[:-keep]:
        shutil.rmtree(folder)


def _number(folder: Path) -> int:
    return int(folder.name.removeprefix("global_step_"))


def find_checkpoint(config: DictConfig, state: dict[str, Any]) -> tuple[Path, int] | None:
    """The newest complete checkpoint, as ``trainer.resume_mode`` says, and its step. No device is needed.

    Args:
        config: the ``trainer`` section.
        state: of this run, see :func:`run_state`.

    Raises:
        ValueError: an unknown mode, a path that is no checkpoint, or another run's.
    """
    folder = _folder_to_resume(config)
    if folder is None:
        return None
    state_file = folder / RUN_FILE
    if not state_file.is_file():
        raise ValueError(f"{folder} holds no complete checkpoint ({RUN_FILE} is missing)")
    saved = json.loads(state_file.read_text())
    check_run_state(saved, state, folder)
    return folder, saved["global_steps"]


def _folder_to_resume(config) -> Path | None:
    if config.resume_mode == "disable":
        return None
    if config.resume_mode == "auto":
        root = Path(os.path.abspath(config.default_local_dir))
        latest = find_latest_ckpt_path(str(root))
        if latest is None and (root / TRACKER).exists():
            step = (root / TRACKER).read_text()
            raise ValueError(
                f"{root / TRACKER} names step {step}, but global_step_{step} is not there; resume another one with "
                "trainer.resume_mode=resume_path, or start anew with trainer.resume_mode=disable"
            )
        return Path(latest) if latest is not None else None
    if config.resume_mode == "resume_path":
        if not config.resume_from_path:
            raise ValueError("trainer.resume_mode=resume_path needs trainer.resume_from_path")
        return Path(os.path.abspath(config.resume_from_path))
    raise ValueError(f"trainer.resume_mode={config.resume_mode!r}: choose disable, auto or resume_path")
