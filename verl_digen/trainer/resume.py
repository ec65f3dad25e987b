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
from pathlib import Path
from typing import Any

from verl.utils.checkpoint.checkpoint_manager import find_latest_ckpt_path

from verl_digen.data.prompts import fingerprint

logger = logging.getLogger(__name__)
logger.setLevel(os.getenv("VERL_LOGGING_LEVEL", "INFO"))

RUN_FILE = "run.json"
TRACKER = "latest_checkpointed_iteration.txt"


def run_state(trainer) -> dict[str, Any]:
    """What a resumed run must agree on, and the step."""
    plan = trainer.plan
    return {
        "global_steps": trainer.global_steps,
        "seed": plan.seed,
        "prompts_per_step": plan.prompts,
        "samples_per_prompt": plan.n,
        "train_prompts": len(trainer.train_dataset),
        "train_fingerprint": fingerprint(trainer.train_dataset),
        "shuffle": bool(trainer.config.data.get("shuffle", True)),
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


def save_trainer(trainer) -> None:
    """Write ``global_step_N``, point the tracker at it, keep ``trainer.max_actor_ckpt_to_keep`` checkpoints."""
    config = trainer.config.trainer
    root = Path(config.default_local_dir)
    final = root / f"global_step_{trainer.global_steps}"
    partial = root / f".partial_global_step_{trainer.global_steps}"
    for left in root.glob(".partial_global_step_*"):  # by a run that was killed while it wrote
        shutil.rmtree(left)
    partial.mkdir(parents=True)
    workers = trainer.actor_rollout_wg.workers
    writing = [w.save_checkpoint.remote(str(partial / "actor"), None, trainer.global_steps) for w in workers]
    trainer._wait(writing, f"writing the checkpoint of step {trainer.global_steps}")
    (partial / RUN_FILE).write_text(json.dumps(run_state(trainer), indent=1))
    _sync(partial)
    if final.exists():  # a run that goes on from an older checkpoint comes to this step again
        shutil.rmtree(final)
    os.replace(partial, final)
    tracker = root / f".{TRACKER}"
    tracker.write_text(str(trainer.global_steps))
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
    steps = sorted(ours, key=lambda p: int(p.name.removeprefix("global_step_")))
    for folder in steps[:-keep]:
        if folder != newest:
            shutil.rmtree(folder)


def find_checkpoint(trainer) -> Path | None:
    """The newest complete checkpoint, as ``trainer.resume_mode`` says; sets ``global_steps``. No device is needed.

    Raises:
        ValueError: an unknown mode, a path that is no checkpoint, or another run's.
    """
    trainer.global_steps = 0
    folder = _folder_to_resume(trainer.config.trainer)
    if folder is None:
        return None
    state_file = folder / RUN_FILE
    if not state_file.is_file():
        raise ValueError(f"{folder} holds no complete checkpoint ({RUN_FILE} is missing)")
    saved = json.loads(state_file.read_text())
    check_run_state(saved, run_state(trainer), folder)
    trainer.global_steps = saved["global_steps"]
    return folder


def load_engine_state(trainer, folder: Path) -> None:
    """Load weights, optimizer and schedule of a checkpoint into the training workers."""
    workers = trainer.actor_rollout_wg.workers
    trainer._wait([w.load_checkpoint.remote(local_path=str(folder / "actor")) for w in workers], f"loading {folder}")
    logger.info("resumed from %s at step %d", folder, trainer.global_steps)


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
