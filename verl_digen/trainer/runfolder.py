"""A run's folder belongs to one run at a time, and a resumed run keeps the lines of its metrics file."""

from __future__ import annotations

import fcntl
import json
import logging
import os
import socket
import time
from pathlib import Path
from typing import Any, TextIO

logger = logging.getLogger(__name__)

LOCK = ".lock"
GRACE_S = 10.0  # a run whose driver was killed takes seconds to end
_held: dict[str, TextIO] = {}  # until the process ends, however it ends


def lock_folder(folder: str | Path, grace_s: float = GRACE_S) -> None:
    """Take the folder for this process.

    Raises:
        ValueError: a process of another run has it; the message names it.
    """
    path = Path(folder).resolve() / LOCK
    if str(path) in _held:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    file = open(path, "a+")  # noqa: SIM115 - held open: closing it gives the lock back
    deadline = time.monotonic() + grace_s
    while not _locked(file):
        if time.monotonic() > deadline:
            file.seek(0)
            owner = file.read().strip() or "another process"
            file.close()
            raise ValueError(
                f"trainer.default_local_dir={folder} belongs to a run that goes on ({owner}); choose another folder "
                "or end that run first"
            )
        time.sleep(0.2)
    file.truncate(0)
    file.write(f"process {os.getpid()} on {socket.gethostname()}, since {time.strftime('%Y-%m-%d %H:%M:%S')}\n")
    file.flush()
    _held[str(path)] = file


def _locked(file: TextIO) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def set_log_aside(log: str | None, resumed_step: int | None) -> None:
    """Before veRL's file logger empties its file: keep the lines up to the step that a run goes on from beside it.

    Steps after it are made again. A run that starts anew (``resumed_step`` None) keeps nothing, as veRL does.
    """
    if log is None:
        return
    path, aside = Path(log), _aside(log)
    if resumed_step is None:
        aside.unlink(missing_ok=True)
        return
    source = aside if aside.exists() else path  # a run that was killed in between has left it
    if not source.exists():
        return
    lines = [line for line in source.read_text().splitlines() if _step(line, resumed_step + 1) <= resumed_step]
    partial = aside.with_name(aside.name + ".partial")
    partial.write_text("".join(f"{line}\n" for line in lines))
    os.replace(partial, aside)


def put_log_back(log: str | None, backend: Any) -> None:
    """Write what was set aside at the head of the file that veRL's file logger ``backend`` has opened."""
    if log is not None and backend is not None and (aside := _aside(log)).exists():
        backend.fp.write(aside.read_bytes())
        aside.unlink()


def _aside(log: str) -> Path:
    return Path(f"{log}.before")


def _step(line: str, otherwise: int) -> int:
    """Step of a line; ``otherwise`` of one that was cut off."""
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return otherwise
