"""Reading the JSON lines that veRL's ``file`` logger writes: ``{"step": N, "data": {metric: value}}`` per line."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

STEP_SECONDS = "timing_s/step"
TRAIN_REWARD = "reward/mean"
VALIDATION_ACCURACY = re.compile(r"val-core/[^/]+/acc/mean@\d+")

VALIDATION_METRIC = re.compile(r"val-aux/[^/]+/([^/@]+)/([^/@]+)")

Point = tuple[int, float]


@dataclass(frozen=True)
class LogLine:
    """Metrics of one step; step 0 is the validation before training."""

    step: int
    data: dict[str, float]


class RunLogError(ValueError):
    """A log that is missing, or lacks what was asked of it; the message says what it has."""


def parse_line(text: str, where: str = "log") -> LogLine:
    """One line of the log.

    Raises:
        RunLogError: not a JSON object with ``step`` and ``data``.
    """
    try:
        entry = json.loads(text)
        return LogLine(int(entry["step"]), dict(entry["data"]))
    except (ValueError, KeyError, TypeError) as error:
        raise RunLogError(f"{where}: not a line of veRL's file logger ({error!r}): {text[:120]!r}") from error


def read_log(file: str | Path) -> list[LogLine]:
    """All lines in the order of their steps. A last line without its newline is still being written and is left out.

    Raises:
        RunLogError: no such file, no line in it, or a line of another form.
    """
    file = Path(file)
    try:
        text = file.read_text()
    except OSError as error:
        raise RunLogError(f"no log to read: {error} (trainer.logger must contain 'file')") from error
    whole = text[: text.rfind("\n") + 1].splitlines()
    lines = [parse_line(row, f"{file}:{number}") for number, row in enumerate(whole, start=1) if row.strip()]
    if not lines:
        raise RunLogError(f"{file} has no complete line yet")
    return sorted(lines, key=lambda line: line.step)


def series(lines: Sequence[LogLine], metric: str) -> list[Point]:
    """(step, value) of the lines that have ``metric``."""
    return [(line.step, float(line.data[metric])) for line in lines if metric in line.data]


def accuracy_series(lines: Sequence[LogLine]) -> list[Point]:
    """(step, validation accuracy ``val-core/SOURCE/acc/mean@N``), the mean over the sources if there are several."""
    points = []
    for line in lines:
        values = [float(v) for name, v in line.data.items() if VALIDATION_ACCURACY.fullmatch(name)]
        if values:
            points.append((line.step, sum(values) / len(values)))
    return points


def validation_metrics(lines: Sequence[LogLine]) -> dict[tuple[str, str], list[Point]]:
    """(metric, key) -> (step, value) of ``trainer.v1.digen.validation.metrics``, the mean over the sources.

    veRL's own ``val-aux`` figures have an ``@`` in their names.
    """
    found: dict[tuple[str, str], dict[int, list[float]]] = {}
    for line in lines:
        for name, value in line.data.items():
            if match := VALIDATION_METRIC.fullmatch(name):
                found.setdefault((match[1], match[2]), {}).setdefault(line.step, []).append(float(value))
    return {name: [(step, sum(v) / len(v)) for step, v in steps.items()] for name, steps in found.items()}


@dataclass(frozen=True, kw_only=True)
class RunSummary:
    """The figures of a run.

    Attributes:
        before, after: validation accuracy of the first and the last validation.
        steps: training steps in the log.
        train_s: sum of ``timing_s/step``: generation, rewards, training, publishing and checkpoints of all steps.
            Start-up and validation are not in it.
        validate_s: sum of ``timing_s/testing``; the validation before training is not timed by veRL.
    """

    before: float
    after: float
    steps: int
    train_s: float
    validate_s: float

    def line(self) -> str:
        """The quickstart's last line."""
        accuracy = f"before {self.before:.3f} after {self.after:.3f}"
        return f"digits accuracy: {accuracy} ({self.steps} steps, {self.train_s:.0f} s)"


def summarise(lines: Sequence[LogLine]) -> RunSummary:
    """Figures of a run that was validated before and after training.

    Raises:
        RunLogError: fewer than two validations, or no training step.
    """
    accuracy, seconds = accuracy_series(lines), series(lines, STEP_SECONDS)
    if len(accuracy) < 2 or accuracy[0][0] != 0 or not seconds:
        raise RunLogError(
            f"before and after need a validation at step 0 and a later one: the log has validation accuracy at steps "
            f"{[step for step, _ in accuracy]} and {len(seconds)} training steps (trainer.val_before_train=true and "
            "trainer.test_freq > 0 give them)"
        )
    return RunSummary(
        before=accuracy[0][1],
        after=accuracy[-1][1],
        steps=len(seconds),
        train_s=sum(value for _, value in seconds),
        validate_s=sum(value for _, value in series(lines, "timing_s/testing")),
    )
