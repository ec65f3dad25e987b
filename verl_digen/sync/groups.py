"""Process groups of the weight channel: one class per transport, none of them known to torch's default world.

torch's own factories register a group in the world, which then keeps its communicator for the life of the process. The
classes here are built directly, so that leaving a channel frees everything.

All of them behave alike: :meth:`broadcast` gives a work whose ``is_completed`` never blocks, and :meth:`abort` may be
called from another thread. On nccl and hccl an end that is gone is not noticed: the work of the others completes only
by ``abort``. On gloo it is noticed when its socket closes, and a work that waits for an end which is alive and silent
cannot be ended at all: the caller stops waiting for it, and a thread of its own waits until its socket closes.
"""

from __future__ import annotations

import os
import threading
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from verl.utils.device import get_torch_device


class GlooGroup:
    """Over sockets of the node's own address."""

    def __init__(self, store: dist.Store, rank: int, world: int, timeout: timedelta, address: str):
        options = dist.ProcessGroupGloo._Options()  # private: torch's public Options have no timeout for a bare backend
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=address)]
        options._timeout = timeout
        self._group = dist.ProcessGroupGloo(store, rank, world, options)

    def broadcast(self, tensor: torch.Tensor) -> dist.Work:
        """From rank 0 to all."""
        return _broadcast(self._group, tensor)

    def abort(self) -> None:
        """Leave. The destructor waits for operations that are under way, so it is given to a thread."""
        group, self._group = self._group, None
        held = [group]
        del group
        threading.Thread(target=held.clear, name="digen-gloo-leaving", daemon=True).start()

    close = abort


class NcclGroup:
    """A communicator of the current device, built at once."""

    def __init__(self, store: dist.Store, rank: int, world: int, timeout: timedelta, address: str):
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout  # private: see GlooGroup
        options.config.blocking = False  # so that building the communicator can be aborted too
        with _environment(TORCH_NCCL_ASYNC_ERROR_HANDLING="0"):  # else its watchdog would end the process
            self._group = dist.ProcessGroupNCCL(store, rank, world, options)
        self._group.eager_connect_single_device(torch.device("cuda", get_torch_device().current_device()))

    def broadcast(self, tensor: torch.Tensor) -> dist.Work:
        """From rank 0 to all."""
        return _broadcast(self._group, tensor)

    def abort(self) -> None:
        """End the kernels that are under way and free the communicator."""
        self._group.abort()

    def close(self) -> None:
        """Free the communicator; nothing is under way."""
        self._group.shutdown()


class HcclGroup:
    """The same on Ascend."""

    def __init__(self, store: dist.Store, rank: int, world: int, timeout: timedelta, address: str):
        from torch_npu._C._distributed_c10d import ProcessGroupHCCL  # private: torch_npu exports no other name for it

        options = ProcessGroupHCCL.Options()
        options._timeout = timeout
        with _environment(HCCL_ASYNC_ERROR_HANDLING="0"):
            self._group = ProcessGroupHCCL(store, rank, world, options)

    def broadcast(self, tensor: torch.Tensor) -> dist.Work:
        """From rank 0 to all."""
        return _broadcast(self._group, tensor)

    def abort(self) -> None:
        """End what is under way and free the communicator."""
        self._group.abort_hccl_comm("weight channel")

    close = abort


GROUPS = {"cpu": GlooGroup, "cuda": NcclGroup, "npu": HcclGroup}


def open_group(device: str, store: dist.Store, rank: int, world: int, timeout: timedelta, address: str):
    """The group of a device type (``cpu``, ``cuda``, ``npu``); all ends call it together.

    Args:
        store: where the ends find each other.
        timeout: after which the transport gives up by itself; longer than any wait of the channel.
        address: of this node, as the others reach it.
    """
    return GROUPS[device](store, rank, world, timeout, address)


def _broadcast(group, tensor: torch.Tensor) -> dist.Work:
    options = dist.BroadcastOptions()
    options.rootRank, options.rootTensor = 0, 0
    return group.broadcast([tensor], options)


@contextmanager
def _environment(**values: str):
    """Variables that a constructor reads."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
