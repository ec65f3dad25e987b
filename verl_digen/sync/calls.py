"""Waiting for answers of other processes, never without a deadline."""

from __future__ import annotations

from typing import Any

import ray

from verl_digen.config.deadlines import Deadline


def results(refs: list[ray.ObjectRef], doing: str, deadline: Deadline) -> list[Any]:
    """The values of ``refs``.

    Raises:
        TimeoutError: not all are there within ``deadline``; says what was being done and which option gives more time.
        ray.exceptions.RayError: a call failed or its process is gone.
    """
    try:
        return ray.get(refs, timeout=deadline.seconds)
    except ray.exceptions.GetTimeoutError as error:
        raise TimeoutError(f"{doing} took longer than {deadline}") from error
