"""Which transitions of a trajectory are drawn with noise (SDE) and which of those are trained.

``all``: every step but the last. ``window``: w consecutive steps inside [a, b) and only they are SDE (FlowGRPO-Fast;
MixGRPO arXiv 2507.21802). ``fraction``: SDE everywhere but at the last step, a random fraction of them trained
(DanceGRPO arXiv 2505.07818).

Draw the choice once per prompt group (or per training step), never per sample: windows that differ inside a group
inflate the variance of its rewards about fourfold and are known to collapse training.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass

from verl_digen.diffusion.kernels import check_kind

SELECTION_KINDS = ("all", "window", "fraction")
WINDOW_MODES = ("random", "progressive")


@dataclass(frozen=True)
class StepSelection:
    """The steps of one group's trajectories.

    Attributes:
        num_steps: T, number of transitions; transition i goes from sigma_i to sigma_{i+1}.
        sde_steps: sorted indices of the transitions drawn with noise.
        trained_steps: sorted indices of the transitions recorded and trained, a subset of sde_steps; never empty.

    Raises:
        ValueError: if one of these does not hold.
    """

    num_steps: int
    sde_steps: tuple[int, ...]
    trained_steps: tuple[int, ...]

    def __post_init__(self) -> None:
        for name in ("sde_steps", "trained_steps"):
            steps = getattr(self, name)
            if list(steps) != sorted(set(steps)):
                raise ValueError(f"{name} must be sorted and distinct, got {steps}")
            if any(not 0 <= step < self.num_steps for step in steps):
                raise ValueError(f"{name} {steps} lie outside the {self.num_steps} steps 0...{self.num_steps - 1}")
        if not self.trained_steps:
            raise ValueError(f"no trained step (num_steps {self.num_steps}, sde_steps {self.sde_steps})")
        if not set(self.trained_steps) <= set(self.sde_steps):
            raise ValueError(f"trained_steps {self.trained_steps} must be among sde_steps {self.sde_steps}")


def select_steps(
    kind: str,
    num_steps: int,
    *,
    key: int | None = None,
    window_size: int | None = None,
    window_range: tuple[int, int] | None = None,
    mode: str = "random",
    training_step: int = 0,
    stride: int = 1,
    iterations: int = 1,
    rollback: bool = True,
    fraction: float | None = None,
    transition_kind: str = "sde",
) -> StepSelection:
    """Choose the steps of one group (or of one training step).

    Args:
        kind: one of ``SELECTION_KINDS``.
        num_steps: T.
        key: of ``noise.sample_key(..., "window")``; needed by the random choices, not used by the others. The same key
            gives the same steps.
        window_size: w, for ``window``.
        window_range: (a, b), for ``window``: the window lies in [a, b); all steps but the last if None.
        mode: ``random`` position, or ``progressive`` by training step.
        training_step: counted from 0; moves the progressive window.
        stride: steps by which the progressive window moves; its last position is shortened to end at b.
        iterations: training steps for which it stays at a position.
        rollback: start again at a after the end is reached; else stay there.
        fraction: f in (0, 1], for ``fraction``: floor(f * (T - 1)) steps are trained.
        transition_kind: kind of the kernel; the last step cannot be in a window of ``sde`` or ``dance``.

    Raises:
        ValueError: everything ``check_selection`` refuses, or a random choice without a key.
    """
    check_selection(
        kind,
        num_steps,
        window_size=window_size,
        window_range=window_range,
        mode=mode,
        stride=stride,
        iterations=iterations,
        rollback=rollback,
        fraction=fraction,
        transition_kind=transition_kind,
    )
    but_last = tuple(range(num_steps - 1))
    if kind == "all":
        return StepSelection(num_steps, but_last, but_last)
    if kind == "fraction":
        ranked = sorted(but_last, key=lambda step: _random_int(key, step))
        return StepSelection(num_steps, but_last, tuple(sorted(ranked[: _fraction_count(fraction, num_steps)])))
    a, b = window_range or (0, num_steps - 1)
    room = b - a - window_size
    if mode == "random":
        start = a + _random_int(key, 0) % (room + 1)
    else:
        if training_step < 0:
            raise ValueError(f"training_step must be >= 0, got {training_step}")
        last_position = math.ceil(room / stride)
        moves = training_step // iterations
        position = moves % (last_position + 1) if rollback else min(moves, last_position)
        start = a + min(position * stride, room)
    steps = tuple(range(start, start + window_size))
    return StepSelection(num_steps, steps, steps)


def check_selection(
    kind: str,
    num_steps: int,
    *,
    window_size: int | None = None,
    window_range: tuple[int, int] | None = None,
    mode: str = "random",
    stride: int = 1,
    iterations: int = 1,
    rollback: bool = True,
    fraction: float | None = None,
    transition_kind: str = "sde",
) -> None:
    """Refuse a selection that would be empty, leave the steps, train the last one, or carry an option nobody reads.

    Arguments as for ``select_steps``. Call it once at start-up; ``select_steps`` calls it too.

    Raises:
        ValueError: with all the numbers that disagree.
    """
    check_kind(transition_kind)
    if transition_kind == "ode":
        raise ValueError("transition kind 'ode' has no noise: it has no SDE steps to select")
    if kind not in SELECTION_KINDS:
        raise ValueError(f"unknown step selection {kind!r}; available: {', '.join(SELECTION_KINDS)}")
    if num_steps < 2:
        raise ValueError(f"num_steps {num_steps}: at least 2 are needed, the last one is not trained")
    if mode not in WINDOW_MODES:
        raise ValueError(f"unknown window mode {mode!r}; available: {', '.join(WINDOW_MODES)}")
    progressive = kind == "window" and mode == "progressive"
    _refuse_unused(
        f"{kind}" + (f" (mode {mode})" if kind == "window" else ""),
        {
            "window_size": kind != "window" and window_size is not None,
            "window_range": kind != "window" and window_range is not None,
            "mode": kind != "window" and mode != "random",
            "stride": not progressive and stride != 1,
            "iterations": not progressive and iterations != 1,
            "rollback": not progressive and rollback is not True,
            "fraction": kind != "fraction" and fraction is not None,
        },
    )
    if stride < 1 or iterations < 1:
        raise ValueError(f"stride and iterations must be >= 1, got stride {stride}, iterations {iterations}")
    if kind == "window":
        _check_window(num_steps, window_size, window_range, transition_kind)
    if kind == "fraction":
        if fraction is None or not 0.0 < fraction <= 1.0:
            raise ValueError(f"fraction must be in (0, 1], got {fraction}")
        if _fraction_count(fraction, num_steps) == 0:
            raise ValueError(f"fraction {fraction} of {num_steps - 1} steps (num_steps {num_steps} - 1) trains 0 steps")


def _check_window(num_steps: int, size: int | None, span: tuple[int, int] | None, transition_kind: str) -> None:
    if size is None or size < 1:
        raise ValueError(f"window_size must be >= 1, got {size}: the window would be empty")
    a, b = span or (0, num_steps - 1)
    if not (0 <= a < b <= num_steps):
        raise ValueError(f"window_range [{a}, {b}) is empty or outside the {num_steps} steps 0...{num_steps - 1}")
    if size > b - a:
        raise ValueError(f"window_size {size} does not fit in window_range [{a}, {b}) of {b - a} steps")
    if b == num_steps and transition_kind in ("sde", "dance"):
        raise ValueError(
            f"window_range [{a}, {b}) includes the last of {num_steps} steps ({num_steps - 1}), which "
            f"{transition_kind} never trains; end the range at {num_steps - 1}"
        )


def _refuse_unused(what: str, unused: dict[str, bool]) -> None:
    names = [name for name, is_unused in unused.items() if is_unused]
    if names:
        raise ValueError(f"step selection {what} does not use {', '.join(names)}: remove it or change the selection")


def _fraction_count(fraction: float, num_steps: int) -> int:
    # 0.29 * 100 is 28.999999999999996 in floating point; the user means 29.
    return math.floor(fraction * (num_steps - 1) + 1e-9)


def _random_int(key: int | None, counter: int) -> int:
    """A 64-bit integer of (key, counter); hashed, because sequences of ``random`` may change with Python."""
    if key is None:
        raise ValueError("a random choice of steps needs a key (noise.sample_key(seed, uid, 0, 'window'))")
    return int.from_bytes(hashlib.blake2b(f"{int(key)}:{counter}".encode(), digest_size=8).digest(), "big")


def recorded_states(selection: StepSelection) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Which latents x_i to store for the trained transitions, and where each transition starts among them.

    Returns:
        states: sorted union of {i, i + 1} over the trained steps i. K + 1 of them if the steps are consecutive.
        starts: one per trained step: transition k goes from states[starts[k]] to states[starts[k] + 1].
    """
    states = tuple(sorted({s for i in selection.trained_steps for s in (i, i + 1)}))
    return states, tuple(states.index(i) for i in selection.trained_steps)
