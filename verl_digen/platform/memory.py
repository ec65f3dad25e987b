"""Device memory of a process; on a CPU the resident set, whose peak cannot be reset and whose limit is not ours."""

from __future__ import annotations

from verl.utils.device import get_device_name, get_torch_device


def reset_peak_memory() -> None:
    """Start a new measurement where the platform can."""
    if get_device_name() != "cpu":
        get_torch_device().reset_peak_memory_stats()


def peak_memory_bytes() -> int:
    """Largest memory since the last reset (on a CPU: since the process started)."""
    return get_torch_device().max_memory_allocated()


def allocated_bytes() -> int:
    """Memory allocated now (on a CPU: 0)."""
    return 0 if get_device_name() == "cpu" else get_torch_device().memory_allocated()


def total_bytes() -> int | None:
    """Memory of the device; None on a CPU, where other processes share it."""
    return None if get_device_name() == "cpu" else get_torch_device().mem_get_info()[1]


def release_cached() -> None:
    """Give unused memory of the allocator back to the device, so that it can be had in other sizes."""
    if get_device_name() != "cpu":
        get_torch_device().empty_cache()
