"""A CPU platform for veRL: whole training runs on machines without an accelerator (tests, quickstart).

It is used when it is asked for (``VERL_PLATFORM=cpu``) and at no other time. Automatic detection passes
it by, so that plain veRL on a head node without a GPU falls back to 'nvidia' as it did before.

The names of devices and of Ray resources part ways here: the torch device is ``cpu``, while pools are
still counted in Ray's ``GPU`` resource, which a CPU machine may declare
(``ray_kwargs.ray_init.num_gpus=N``). veRL's ``ResourcePoolManager`` knows no other resource than GPU and NPU.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from verl.plugin.platform.platform_base import PlatformBase

from verl_digen.platform import cpu_device


class PlatformCPU(PlatformBase):
    """The CPU as veRL's accelerator; collectives run over gloo."""

    @property
    def device_name(self) -> str:
        return "cpu"

    @property
    def vendor_name(self) -> str:
        return "cpu"

    @property
    def device_module(self) -> ModuleType:
        return cpu_device

    def is_available(self) -> bool:
        return True

    def is_platform_available(self, use_smi_check: bool = False) -> bool:
        """Only when ``VERL_PLATFORM`` names it; veRL then does not even ask."""
        return os.environ.get("VERL_PLATFORM", "").strip().lower() == "cpu"

    def current_device(self) -> str:
        """``"cpu"`` instead of an index, see :func:`verl_digen.platform.cpu_device.current_device`."""
        return cpu_device.current_device()

    def device_count(self) -> int:
        return cpu_device.device_count()

    def set_device(self, device_index: int) -> None:
        cpu_device.set_device(device_index)

    def synchronize(self, device_index: int | None = None) -> None:
        cpu_device.synchronize(device_index)

    def manual_seed(self, seed: int) -> None:
        cpu_device.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        cpu_device.manual_seed_all(seed)

    def set_allocator_settings(self, settings: str) -> None:
        """The settings (``expandable_segments``) are those of the CUDA allocator; there is nothing to set."""

    def empty_cache(self) -> None:
        cpu_device.empty_cache()

    def get_device_capability(self, device_index: int = 0) -> tuple[int | None, int | None]:
        return None, None

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        """Ray sets it for the GPUs that the machine declares; torch on the CPU does not read it."""
        return "CUDA_VISIBLE_DEVICES"

    def ray_resource_name(self) -> str:
        return "GPU"

    def ray_noset_envvars(self) -> list[str]:
        return ["RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"]

    def is_ipc_supported(self) -> bool:
        """No device handles can be shared between processes; weights go by the channel."""
        return False

    def get_collective_module(self) -> Any:
        """No nccl-like module; ``torch.distributed`` with gloo is all there is."""
        return None

    @contextmanager
    def nvtx_range(self, msg: str) -> Iterator[None]:
        yield

    def profiler_start(self) -> None:
        """No device profiler."""

    def profiler_stop(self) -> None:
        """No device profiler."""

    def cudart(self) -> Any:
        return None
