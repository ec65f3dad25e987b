"""What a run makes for people to look at: pictures, dumps, lines of loggers. When one fails, the run goes on.

Each failure is a warning with its traceback (also in ``warnings.log``) and counts in the metric ``outputs/failed``.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

logger = logging.getLogger(__name__)


class Outputs:
    """Counts what could not be written since the run started."""

    def __init__(self):
        self.failed = 0

    @contextmanager
    def attempt(self, what: str) -> Iterator[None]:
        """Whatever raises inside is a warning that names ``what``."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 - any library of any logger or picture; shown and counted
            self.failed += 1
            logger.warning("%s failed, the run goes on: %s: %s", what, type(error).__name__, error, exc_info=True)

    def metrics(self) -> dict[str, float]:
        return {"outputs/failed": float(self.failed)}

    def guard(self, tracking: Any) -> Any:
        """veRL's ``Tracking`` with every backend behind :meth:`attempt`; returns it."""
        for name, backend in tracking.logger.items():
            tracking.logger[name] = GuardedLogger(name, backend, self)
        return tracking


class GuardedLogger:
    """A backend of veRL's ``Tracking`` whose ``log`` and ``finish`` cannot end a run; all else is the backend's."""

    def __init__(self, name: str, backend: Any, outputs: Outputs):
        self._name, self._backend, self._outputs = name, backend, outputs

    def log(self, *args: Any, **kwargs: Any) -> None:
        with self._outputs.attempt(f"logging to {self._name}"):
            self._backend.log(*args, **kwargs)

    def finish(self, *args: Any, **kwargs: Any) -> None:
        with self._outputs.attempt(f"closing the logger {self._name}"):
            self._backend.finish(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)
