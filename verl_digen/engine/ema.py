"""Exponential moving average of the trained parameters, sharded as they are.

The averages are copies that never alias the parameters (an alias makes the restore after validation a no-op, a fault
seen elsewhere on CPU).
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import contextmanager

import torch


class ParameterEMA:
    """``avg ← decay · avg + (1 − decay) · parameter`` every ``every`` commits.

    Args:
        parameters: the trainable parameters with their names, local shards or whole.
        decay: in [0, 1).
        every: commits between two updates.
    """

    def __init__(self, parameters: Iterable[tuple[str, torch.nn.Parameter]], *, decay: float, every: int):
        self._parameters = dict(parameters)
        self.decay = decay
        self.every = every
        self.commits = 0
        self.average = {name: p.detach().clone() for name, p in self._parameters.items()}

    @torch.no_grad()
    def update(self) -> None:
        """Count one commit and fold the parameters in when it is due."""
        self.commits += 1
        if self.commits % self.every:
            return
        for name, parameter in self._parameters.items():
            self.average[name].lerp_(parameter.detach(), 1.0 - self.decay)

    @contextmanager
    def swapped_in(self):
        """The parameters hold the averages inside the context and their own values, bit for bit, after it."""
        kept = {name: p.detach().clone() for name, p in self._parameters.items()}
        with torch.no_grad():
            for name, parameter in self._parameters.items():
                parameter.copy_(self.average[name])
        try:
            yield
        finally:
            with torch.no_grad():
                for name, parameter in self._parameters.items():
                    parameter.copy_(kept[name])
