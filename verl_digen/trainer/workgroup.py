"""The one place that submits calls to the Trainer's ranks.

Invariant: every rank gets the same calls in the same order, whoever makes them (the step, a publish, the fleet, the
helper). Collectives of two calls would meet each other otherwise, and wait for ever. So a lock is held while a call is
submitted to all ranks, and nobody else calls ``.remote`` on a training rank. Answers are awaited without the lock.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from typing import Any

import ray

from verl_digen.config.deadlines import Deadline
from verl_digen.sync.calls import results

_SMALL = (bool, int, float, str, type(None))


class TrainerGroup:
    """Calls to all ranks of the Trainer.

    Args:
        workers: actor handles by rank.
    """

    def __init__(self, workers: list[Any]):
        self.workers = list(workers)
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self.workers)

    def call(self, method: str, *args: Any, **kwargs: Any) -> list[ray.ObjectRef]:
        """Submit ``method(*args, **kwargs)`` to all ranks; returns one reference per rank at once.

        An argument that is no plain number or string is put into the object store once, not once per rank.
        """
        args = [self._once(value) for value in args]
        kwargs = {name: self._once(value) for name, value in kwargs.items()}
        with self._lock:
            return [getattr(worker, method).remote(*args, **kwargs) for worker in self.workers]

    def first(self, method: str, *args: Any, **kwargs: Any) -> ray.ObjectRef:
        """Submit a call that has no collective of the Trainer in it to rank 0 alone."""
        with self._lock:
            return getattr(self.workers[0], method).remote(*args, **kwargs)

    def get(self, refs: list[ray.ObjectRef], doing: str, deadline: Deadline) -> list[Any]:
        """The answers; see :func:`verl_digen.sync.calls.results`."""
        return results(refs, f"{doing} on {len(self.workers)} ranks", deadline)

    def when_done(self, refs: list[ray.ObjectRef], then: Callable[[], Any]) -> None:
        """Call ``then`` once all answers are there, good or bad; from another thread."""
        left = itertools.count(len(refs) - 1, -1)

        def answered(_) -> None:
            if next(left) == 0:
                then()

        for ref in refs:
            ref.future().add_done_callback(answered)

    def _once(self, value: Any) -> Any:
        small = isinstance(value, (*_SMALL, ray.ObjectRef)) or len(self.workers) == 1
        return value if small else ray.put(value)
