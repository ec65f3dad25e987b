"""A run notices that its TransferQueue is gone, whatever it waits for."""

from __future__ import annotations

import queue
import signal
import threading
from concurrent.futures import Future

import pytest

from verl_digen.trainer.transferqueue import QueueWatch, TransferQueueError


class Probe:
    """Answers a few times, then the controller is dead."""

    def __init__(self, answers: int):
        self.answers, self.asked = answers, 0

    def __call__(self) -> None:
        self.asked += 1
        if self.asked > self.answers:
            raise RuntimeError("The actor died\nand so on")


@pytest.mark.parametrize(
    "wait",
    [
        lambda: queue.Queue().get(timeout=20),
        lambda: threading.Event().wait(20),
        lambda: Future().result(timeout=20),  # how TransferQueue's own calls wait
    ],
)
def test_a_lost_queue_ends_what_the_main_thread_waits_for(wait):
    before, probe = signal.getsignal(signal.SIGUSR1), Probe(2)
    gone = r"is gone \(RuntimeError: The actor died\)"
    with pytest.raises(TransferQueueError, match=gone) as caught, QueueWatch(probe, 0.01):
        wait()
    assert isinstance(caught.value.__context__, KeyboardInterrupt)  # the wait was cut short
    assert probe.asked == 3 and signal.getsignal(signal.SIGUSR1) == before


def test_an_error_of_the_run_itself_is_handed_on_and_nothing_is_left():
    probe = Probe(10**9)
    with pytest.raises(ValueError, match="a bad step"), QueueWatch(probe, 0.01) as watch:
        raise ValueError("a bad step")
    assert watch.lost is None
    watch._thread.join(5)
    assert not watch._thread.is_alive()


def test_a_probe_that_fails_when_the_run_has_ended_is_nobodys_business():
    asked, ended = threading.Event(), threading.Event()

    def probe() -> None:
        asked.set()
        ended.wait(5)
        raise RuntimeError("the cluster is being taken down")

    with QueueWatch(probe, 0.0) as watch:
        assert asked.wait(5)
    ended.set()
    watch._thread.join(5)
    assert watch.lost is None
