"""Who has the device of a Trainer rank: one of training, the replica in the same process, and nobody."""

from __future__ import annotations

import torch
from verl.utils.device import get_device_name

from verl_digen.rollout.sampler import Sampler


class DeviceOwner:
    """Moves models between device and host so that only the one at work is on the device.

    Without offloading of parameters both copies stay on the device and nothing moves.

    Args:
        engine: the training engine. Its parameters are on the device from :meth:`begin` to :meth:`end` only, when it
            offloads them.
        sampler: the replica's copy in colocated placement, or None.
    """

    def __init__(self, engine, sampler: Sampler | None):
        self._engine, self._sampler = engine, sampler
        self._mode = None
        self._lent = False

    @property
    def shared(self) -> bool:
        """Whether training and the replica take turns on the device."""
        return self._sampler is not None and self._engine.is_param_offload_enabled

    def begin(self) -> None:
        """A transaction opens: training has the device."""
        if self.shared:
            self._sampler.to(torch.device("cpu"))
        self._mode = self._engine.train_mode()
        self._mode.__enter__()

    def train(self) -> None:
        """Training goes on; takes the device back from the replica."""
        if self._lent:
            self._sampler.to(torch.device("cpu"))
            self._engine.to(get_device_name(), model=True, optimizer=False, grad=False)
            self._lent = False

    def generate(self) -> None:
        """The replica is at work; an open transaction leaves the device to it, with its gradients."""
        if self.shared and self._mode is not None and not self._lent:
            self._engine.to("cpu", model=True, optimizer=False, grad=False)
            self._lent = True

    def end(self) -> None:
        """The transaction is closed: nobody has the device."""
        self._lent = False
        if self._mode is not None:
            mode, self._mode = self._mode, None
            mode.__exit__(None, None, None)
