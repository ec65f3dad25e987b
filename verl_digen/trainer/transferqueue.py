"""The TransferQueue of a run: its own, and there for as long as the run goes on.

TransferQueue finds its controller by one fixed name in a Ray cluster. A second run on the cluster would join the queue
of the first, with equal keys, and whoever ends first takes it down. So the second is refused. A call to a controller
that is gone is never answered, so a thread of the driver asks for it, and interrupts whatever the driver waits for.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable

import ray
from transfer_queue import interface

EVERY_S = 5.0


class TransferQueueError(RuntimeError):
    """The TransferQueue belongs to another run, or is gone."""


def own_controller(timeout_s: float = 60.0) -> ray.actor.ActorHandle:
    """The controller that ``main_ppo`` has started for this run.

    Raises:
        TransferQueueError: it is that of another run on this Ray cluster, which is left as it is.
    """
    controller = ray.get_actor("TransferQueueController", namespace="transfer_queue")
    own = ray.get_runtime_context().get_job_id()
    try:
        owner = ray.get(controller.__ray_call__.remote(_job), timeout=timeout_s)
    except (ray.exceptions.RayActorError, ray.exceptions.GetTimeoutError) as error:
        owner = f"that is ending ({type(error).__name__})"
    if owner != own:
        # private: main_ppo calls tq.close() on its way out, which kills the controller it has joined
        interface._TQ_CONTROLLER = None
        raise TransferQueueError(
            f"this Ray cluster already serves another run (Ray job {owner}; this one is {own}) and both would share "
            "its TransferQueue. Start this run when that one has ended, or on a Ray cluster of its own (RAY_ADDRESS of "
            "another cluster, or ray_kwargs.ray_init.address=local)"
        )
    return controller


def _job(_) -> str:
    return ray.get_runtime_context().get_job_id()


class QueueWatch:
    """``with QueueWatch(probe):`` in the main thread; ends the block when ``probe`` raises, whatever it waits for.

    Args:
        probe: asks the queue for a sign of life.
        every_s: seconds between two questions.

    Raises:
        TransferQueueError: when the block is left, if the queue was lost.
    """

    def __init__(self, probe: Callable[[], object], every_s: float = EVERY_S):
        self._probe, self._every_s = probe, every_s
        self._stop = threading.Event()
        self.lost: Exception | None = None

    @classmethod
    def of(cls, controller: ray.actor.ActorHandle, timeout_s: float) -> QueueWatch:
        """A watch of a controller that has to answer within ``timeout_s``."""
        return cls(lambda: ray.get(controller.__ray_call__.remote(_job), timeout=timeout_s))

    def __enter__(self) -> QueueWatch:
        self._before = signal.signal(signal.SIGUSR1, self._interrupt)
        self._thread = threading.Thread(target=self._watch, name="digen-queue-watch", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, kind, error, traceback) -> None:
        self._stop.set()
        if self.lost is None:
            signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # what comes from here on comes too late
        signal.signal(signal.SIGUSR1, self._before)
        if self.lost is not None:
            cause = f"{type(self.lost).__name__}: {str(self.lost).splitlines()[0] if str(self.lost) else ''}"
            raise TransferQueueError(f"the TransferQueue of this run is gone ({cause})") from self.lost

    def _watch(self) -> None:
        while not self._stop.wait(self._every_s):
            try:
                self._probe()
            except Exception as error:  # noqa: BLE001 - handed to the main thread
                if not self._stop.is_set():
                    self.lost = error
                    signal.pthread_kill(threading.main_thread().ident, signal.SIGUSR1)
                return

    @staticmethod
    def _interrupt(number, frame) -> None:
        raise KeyboardInterrupt  # the one exception of a signal that ray.get hands on
