"""Start a run as a process tree, follow the lines of its log, watch its memory, and leave nothing behind.

What must hold: after :func:`watch` returns or raises, no process of the tree is left, and no other process was touched.
Ray's workers are in process groups of their own and outlive their parent, so a run's processes are known by having been
descendants of it, and by a mark in the environment that they inherit.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

POLL_S = 0.1
MEMORY_EVERY_S = 2.0
ENDING_S = 15.0
KILLED_S = 60.0  # a killed process ends as soon as it is given a core
MARK = "VERL_DIGEN_BENCH_RUN"

# what a process's command line contains -> kind; the first that fits
KINDS = (
    ("ray::TaskRunner", "task_runner"),
    ("ray::DiffusionActorWorker", "trainer_worker"),
    ("ray::DiffusionRolloutWorker", "replica"),
    ("ray::DiffusionRewardLoopWorker", "reward_worker"),
    ("ray::TransferQueueController", "transfer_queue"),
    ("ray::SimpleStorageUnit", "transfer_queue"),
    ("ray::IDLE", "ray_idle"),
    ("ray::", "ray_system"),
    ("/ray/", "ray_system"),
    ("verl.trainer.main_ppo", "driver"),
    ("verl_digen.bench.floor", "floor"),
)


class RunFailed(RuntimeError):
    """A run ended with an error or did not end; the message holds the last lines of its output."""


@dataclass(kw_only=True)
class Watched:
    """What was seen of a run.

    Attributes:
        started: wall clock at which the process was started.
        arrivals: wall clock at which each line of the log appeared.
        memory_mb: kind of process -> largest sum of resident memory of its processes at one time, in MiB. Pages that
            several processes share (libraries, Ray's object store) are counted in each.
        processes: kind -> most of them at one time.
    """

    started: float
    arrivals: list[float] = field(default_factory=list)
    memory_mb: dict[str, float] = field(default_factory=dict)
    processes: dict[str, int] = field(default_factory=dict)


def kind_of(cmdline: str) -> str:
    """Kind of a process by its command line (Ray writes the actor's class there)."""
    return next((kind for part, kind in KINDS if part in cmdline), "other")


class ProcessTree:
    """A process and all its descendants, those included whose parent has ended.

    Args:
        root: the process.
        mark: value of ``MARK`` in the environment of the root, which its descendants inherit and no other process has.
    """

    def __init__(self, root: psutil.Process, mark: str):
        self.root, self.mark = root, mark
        self.seen: set[psutil.Process] = {root}

    def refresh(self) -> None:
        """Add descendants that are new."""
        try:
            self.seen.update(self.root.children(recursive=True))
        except psutil.NoSuchProcess:
            return

    def refresh_marked(self) -> None:
        """Add every process that bears the mark: also those that lost their parent before they were ever seen."""
        self.refresh()
        for process in psutil.process_iter():
            try:
                if process.environ().get(MARK) == self.mark:
                    self.seen.add(process)
            except psutil.Error:  # gone, or another user's
                continue

    def alive(self) -> list[psutil.Process]:
        """Processes that still run."""
        return [p for p in self.seen if p.is_running() and _status(p) not in (psutil.STATUS_ZOMBIE, None)]

    def measure(self, watched: Watched) -> None:
        """Raise the maxima in ``watched``."""
        memory: dict[str, float] = {}
        count: dict[str, int] = {}
        for process in self.alive():
            try:
                kind, resident = kind_of(" ".join(process.cmdline())), process.memory_info().rss
            except psutil.Error:
                continue
            memory[kind] = memory.get(kind, 0.0) + resident / 2**20
            count[kind] = count.get(kind, 0) + 1
        for kind in memory:
            watched.memory_mb[kind] = max(watched.memory_mb.get(kind, 0.0), memory[kind])
            watched.processes[kind] = max(watched.processes.get(kind, 0), count[kind])

    def end(self) -> None:
        """End what is left: interrupt the root so that it can clean up, then terminate, then kill."""
        self.refresh_marked()
        if self.root.is_running():
            _signal([self.root], signal.SIGINT)
            psutil.wait_procs([self.root], timeout=ENDING_S)
        for number, patience in ((signal.SIGTERM, ENDING_S / 3), (signal.SIGKILL, KILLED_S)):
            self.refresh_marked()
            left = self.alive()
            if not left:
                return
            _signal(left, number)
            _wait_until_gone(left, patience)


def _wait_until_gone(processes: Sequence[psutil.Process], patience: float) -> None:
    """Wait for the end of processes; one that nobody reaps counts as ended."""
    deadline = time.monotonic() + patience
    while time.monotonic() < deadline and any(_status(p) not in (psutil.STATUS_ZOMBIE, None) for p in processes):
        time.sleep(POLL_S)


def _status(process: psutil.Process) -> str | None:
    try:
        return process.status()
    except psutil.NoSuchProcess:
        return None


def _signal(processes: Sequence[psutil.Process], number: int) -> None:
    for process in processes:
        try:
            process.send_signal(number)
        except psutil.NoSuchProcess:
            continue


def watch(
    command: Sequence[str],
    *,
    cwd: Path,
    output: Path,
    env: dict[str, str] | None = None,
    log: Path | None = None,
    timeout_s: float = 3600.0,
    on_line: Callable[[str], None] | None = None,
) -> Watched:
    """Run ``command`` to its end.

    Args:
        cwd: working folder of the process.
        output: file for its stdout and stderr.
        env: added to this process's environment.
        log: a file to which the process appends lines.
        timeout_s: after which the run counts as failed.
        on_line: called with each line of ``log`` as it appears.

    Raises:
        RunFailed: another exit status than 0, or too late.
    """
    watched, mark = Watched(started=time.time()), uuid.uuid4().hex
    with open(output, "wb") as stdout:
        process = psutil.Popen(
            list(command),
            cwd=cwd,
            env=os.environ | (env or {}) | {MARK: mark},
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # a Ctrl-C in the terminal reaches the run through end(), once
        )
        tree = ProcessTree(process, mark)
        try:
            status = _follow(process, tree, watched, log, timeout_s, on_line)
        finally:
            tree.end()
    if status != 0:
        why = f"did not end within {timeout_s:g} s" if status is None else f"ended with status {status}"
        raise RunFailed(f"{' '.join(command)}\n{why}; last lines of {output}:\n{tail(output)}")
    return watched


def _follow(process, tree: ProcessTree, watched: Watched, log, timeout_s, on_line) -> int | None:
    position, next_measure = 0, 0.0
    while True:
        status = process.poll()
        now = time.time()
        if log is not None and log.exists():
            position = _new_lines(log, position, now, watched, on_line)
        if status is not None:
            return status
        if now - watched.started > timeout_s:
            return None
        if now >= next_measure:
            tree.refresh()
            tree.measure(watched)
            next_measure = now + MEMORY_EVERY_S
        time.sleep(POLL_S)


def _new_lines(log: Path, position: int, now: float, watched: Watched, on_line) -> int:
    """Take the whole lines after ``position``; returns the position after them."""
    with open(log, "rb") as file:
        file.seek(position)
        text = file.read()
    whole = text[: text.rfind(b"\n") + 1]
    for line in whole.splitlines():
        watched.arrivals.append(now)
        if on_line is not None:
            on_line(line.decode())
    return position + len(whole)


def tail(file: Path, lines: int = 25) -> str:
    """The last lines of a file, each cut to 300 characters."""
    with open(file, errors="replace") as handle:
        rows = handle.read().splitlines()
    return "\n".join(f"  {row[:300]}" for row in rows[-lines:])
