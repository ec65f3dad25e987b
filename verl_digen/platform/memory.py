"""Peak device memory of a process; on a CPU the peak resident set, which cannot be reset."""

from __future__ import annotations

from verl.utils.device import get_device_name, get_torch_device


def reset_peak_memory() -> None:
    """Start a new measurement where the platform can."""
    if get_device_name() != "cpu":
        get_torch_device().reset_peak_memory_stats()


def peak_memory_bytes() -> int:
    """Largest memory since the last reset (on a CPU: since the process started)."""
    return get_torch_device().max_memory_allocated()
