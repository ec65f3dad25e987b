"""What veRL asks of ``torch.cuda``, answered for the CPU: the ``device_module`` of the CPU platform.

Only what veRL 0.9.1 calls and what has a truthful answer on a CPU is here; any other name raises
``AttributeError`` as on every module, so that a new call in veRL is noticed instead of guessed at.
``tests/platform/test_cpu.py`` compares this list with the calls in the installed veRL.

Memory is that of this process: "allocated" and "reserved" are its resident set size, because a CPU
allocator reserves nothing beyond it. The peak is the kernel's (``ru_maxrss``) and cannot be reset.
"""

from __future__ import annotations

import os
import platform
import resource
import sys
from dataclasses import dataclass

import torch
from torch.cpu import Event, Stream, StreamContext, current_stream, stream, synchronize

__all__ = [
    "Event",
    "Stream",
    "StreamContext",
    "current_device",
    "current_stream",
    "device_count",
    "empty_cache",
    "get_device_name",
    "get_device_properties",
    "get_rng_state",
    "ipc_collect",
    "is_available",
    "manual_seed",
    "manual_seed_all",
    "max_memory_allocated",
    "max_memory_reserved",
    "mem_get_info",
    "memory_allocated",
    "memory_reserved",
    "set_device",
    "set_rng_state",
    "stream",
    "synchronize",
]


@dataclass(frozen=True)
class CPUProperties:
    """The part of ``torch.cuda.get_device_properties`` that exists for a CPU; memory in bytes."""

    name: str
    total_memory: int
    multi_processor_count: int


def is_available() -> bool:
    """A CPU is always there."""
    return True


def current_device() -> str:
    """``"cpu"``: an index would mean an accelerator to ``Tensor.to``. veRL only ever hands it to torch."""
    return "cpu"


def device_count() -> int:
    """One device, whatever the number of cores; how many workers share it is Ray's affair."""
    return 1


def set_device(device: int | str | torch.device) -> None:
    """Nothing to select. Every index is accepted: veRL passes the local rank.

    Raises:
        ValueError: the device is an accelerator.
    """
    if not isinstance(device, int) and torch.device(device).type != "cpu":
        raise ValueError(f"the CPU platform cannot select device {device!r}")


def empty_cache() -> None:
    """The CPU allocator keeps no cache that torch can release."""


def ipc_collect() -> None:
    """There are no inter-process device handles to collect."""


def manual_seed(seed: int) -> None:
    """Seed the CPU generator of this process; on the CPU that is torch's default generator."""
    torch.default_generator.manual_seed(seed)


manual_seed_all = manual_seed


def get_rng_state(device: object = None) -> torch.Tensor:
    """State of the CPU generator (uint8)."""
    return torch.get_rng_state()


def set_rng_state(new_state: torch.Tensor, device: object = None) -> None:
    """Restore what :func:`get_rng_state` gave."""
    torch.set_rng_state(new_state)


def get_device_name(device: object = None) -> str:
    """Name of the processor as the operating system tells it."""
    return platform.processor() or platform.machine()


def get_device_properties(device: object = None) -> CPUProperties:
    """Name, total memory in bytes, and the cores this process may use."""
    return CPUProperties(get_device_name(), mem_get_info()[1], _usable_cores())


def memory_allocated(device: object = None) -> int:
    """Resident set size of this process in bytes; its peak where the system does not tell the present one."""
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except FileNotFoundError:
        return _peak_rss()


def max_memory_allocated(device: object = None) -> int:
    """Peak resident set size of this process in bytes (the kernel's figure may lag a little behind the present one)."""
    return max(_peak_rss(), memory_allocated())


memory_reserved = memory_allocated
max_memory_reserved = max_memory_allocated


def mem_get_info(device: object = None) -> tuple[int, int]:
    """(available, total) memory of the machine in bytes."""
    page = os.sysconf("SC_PAGE_SIZE")
    return os.sysconf("SC_AVPHYS_PAGES") * page, os.sysconf("SC_PHYS_PAGES") * page


def _usable_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _peak_rss() -> int:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # kilobytes on Linux, bytes on macOS
