"""The CPU platform: complete, truthful, and chosen only when it is asked for."""

from __future__ import annotations

import inspect
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import verl
from verl.plugin.platform import PlatformBase, PlatformRegistry

from verl_digen.platform import cpu_device
from verl_digen.platform.cpu import PlatformCPU

# Calls that veRL 0.9.1 makes only where there is a CUDA or NPU device; on a CPU they must fail loudly.
ACCELERATOR_ONLY = {
    "memory": "memory_utils: snapshots of the CUDA allocator, by an explicit profiler option",
    "reset_peak_memory_stats": "memory_utils.reset_memory_stats: the kernel's peak cannot be reset",
    "reset_accumulated_memory_stats": "the same",
    "set_per_process_memory_fraction": "memory_utils.optimize_memory_*: only inference servers on GPUs",
}


def asked_of_device_module() -> set[str]:
    """Every ``get_torch_device().X``, and ``device.X`` where ``device = get_torch_device()``, in the installed veRL."""
    names: set[str] = set()
    for path in Path(verl.__file__).parent.rglob("*.py"):
        text = path.read_text()
        names |= set(re.findall(r"get_torch_device\(\)\.([A-Za-z_]\w*)", text))
        if re.search(r"\bdevice = get_torch_device\(\)", text):
            names |= set(re.findall(r"(?<![\w.])device\.([a-z_]\w*)", text))
    return names


def test_every_member_is_there():
    assert not inspect.isabstract(PlatformCPU)
    assert issubclass(PlatformCPU, PlatformBase)
    platform = PlatformCPU()
    assert (platform.device_name, platform.communication_backend_name()) == ("cpu", "gloo")
    assert platform.ray_resource_options(2) == {"num_gpus": 2}  # a CPU machine declares GPUs to Ray
    assert platform.is_available() and not platform.is_ipc_supported()
    assert platform.get_device_capability() == (None, None)
    assert platform.cudart() is None and platform.get_collective_module() is None
    with platform.nvtx_range("range"):
        platform.profiler_start()
        platform.profiler_stop()
    platform.set_allocator_settings("expandable_segments:True")
    platform.empty_cache()
    platform.synchronize()
    platform.set_device(1)  # veRL passes the local rank
    assert platform.device_count() == 1


def test_the_current_device_can_be_handed_to_torch():
    assert torch.zeros(1).to(PlatformCPU().current_device()).device.type == "cpu"
    assert torch.empty(1, device=torch.device(PlatformCPU().current_device())).device.type == "cpu"


def test_device_module_has_what_verl_asks_for():
    asked = asked_of_device_module()
    assert {"max_memory_allocated", "mem_get_info", "empty_cache", "synchronize"} <= asked
    missing = {name for name in asked if not hasattr(cpu_device, name)} - set(ACCELERATOR_ONLY)
    assert not missing, f"veRL asks get_torch_device() for {sorted(missing)}"
    assert not [name for name in ACCELERATOR_ONLY if hasattr(cpu_device, name)]
    assert not [name for name in cpu_device.__all__ if not hasattr(cpu_device, name)]


def test_an_unknown_attribute_is_an_error():
    with pytest.raises(AttributeError, match="graph_pool_handle"):
        PlatformCPU().device_module.graph_pool_handle()
    with pytest.raises(ValueError, match="cuda"):
        cpu_device.set_device("cuda:0")


def test_memory_is_that_of_this_process_in_bytes():
    before = cpu_device.memory_allocated()
    block = torch.ones(64 * 2**20 // 4)  # 64 MiB, touched
    grown = cpu_device.memory_allocated() - before
    assert 48 * 2**20 < grown < 256 * 2**20
    peak = cpu_device.max_memory_allocated()
    assert peak >= before + 48 * 2**20 and cpu_device.max_memory_reserved() >= peak
    free, total = cpu_device.mem_get_info()
    assert 0 < free < total and peak < total
    assert block.sum() == block.numel()
    assert cpu_device.get_device_properties(0).total_memory == total


def test_seeding_and_rng_state():
    platform = PlatformCPU()
    saved = cpu_device.get_rng_state()
    platform.manual_seed(7)
    state = cpu_device.get_rng_state()
    first = torch.rand(3)
    cpu_device.set_rng_state(state)
    assert torch.equal(torch.rand(3), first)
    platform.manual_seed_all(7)
    assert torch.equal(torch.rand(3), first)
    cpu_device.set_rng_state(saved)


def test_streams_and_events_of_the_cpu():
    stream = cpu_device.Stream()
    with cpu_device.stream(stream):
        stream.wait_stream(cpu_device.current_stream())
    assert cpu_device.Event().query()


def test_detection_passes_it_by(monkeypatch):
    assert PlatformRegistry.get("cpu") is PlatformCPU
    monkeypatch.delenv("VERL_PLATFORM", raising=False)
    assert not PlatformCPU().is_platform_available(use_smi_check=True)
    monkeypatch.setenv("VERL_PLATFORM", "nvidia")
    assert not PlatformCPU().is_platform_available()
    monkeypatch.setenv("VERL_PLATFORM", "CPU ")
    assert PlatformCPU().is_platform_available()


@pytest.mark.slow
def test_it_is_chosen_when_asked_for():
    """That it is not chosen otherwise is seen in tests/test_plugin.py, in the processes started there."""
    env = os.environ | {"VERL_PLATFORM": "cpu"}
    code = (
        "from verl.utils.device import get_device_name, get_nccl_backend, get_torch_device\n"
        "from verl.utils.memory_utils import aggressive_empty_cache, get_memory_info\n"
        "from verl.utils.profiler.performance import _get_current_mem_info\n"
        "aggressive_empty_cache(); _get_current_mem_info(); assert get_memory_info()['total_memory_gb'] > 0\n"
        "print(get_device_name(), get_nccl_backend())"
    )
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[-2:] == ["cpu", "gloo"]
