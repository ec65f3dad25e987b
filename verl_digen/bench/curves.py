"""A run to look at: reward and accuracy over the steps as a picture and in the terminal, samples before and after."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from verl_digen.bench.runlog import (
    TRAIN_REWARD,
    LogLine,
    Point,
    RunLogError,
    accuracy_series,
    series,
    validation_metrics,
)

BLOCKS = "▁▂▃▄▅▆▇█"


def draw_curve(lines: Sequence[LogLine], file: str | Path, title: str = "digits") -> Path:
    """Write the picture of mean training reward and validation accuracy over the steps.

    Raises:
        RunLogError: the log has neither.
    """
    from matplotlib.figure import Figure

    reward, accuracy = series(lines, TRAIN_REWARD), accuracy_series(lines)
    if not reward and not accuracy:
        raise RunLogError(f"nothing to draw: no {TRAIN_REWARD} and no validation accuracy in {len(lines)} lines")
    figure = Figure(figsize=(6.4, 3.8), layout="constrained")
    axes = figure.subplots()
    if reward:
        axes.plot(*zip(*reward, strict=True), color="C0", marker=".", label="training reward (mean of the step)")
    if accuracy:
        axes.plot(*zip(*accuracy, strict=True), color="C3", marker="o", label="validation accuracy")
        for step, value in (accuracy[0], accuracy[-1]):
            axes.annotate(f"{value:.2f}", (step, value), textcoords="offset points", xytext=(0, 7), ha="center")
    axes.set(xlabel="step", ylim=(0, 1.05), title=title)
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right", fontsize=8)
    file = Path(file)
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=120)
    return file


def validation_grids(run_dir: str | Path) -> tuple[Path, Path]:
    """The first and the last sample grid that validation wrote to ``run_dir/grids/step_NNNNN.png``.

    Raises:
        RunLogError: fewer than two.
    """
    folder = Path(run_dir) / "grids"
    grids = sorted(folder.glob("step_*.png"))
    if len(grids) < 2:
        raise RunLogError(
            f"before and after need two sample grids, {folder} has {len(grids)} (trainer.v1.digen.validation."
            "grid_samples must be more than 0, and the run validated before and after training)"
        )
    return grids[0], grids[-1]


def validation_dumps(folder: str | Path, count: int = 40) -> tuple[tuple[np.ndarray, str], tuple[np.ndarray, str]]:
    """Before and after from ``trainer.validation_data_dir`` (``STEP.jsonl`` and the images): (tiled image, title) each.

    Args:
        count: samples shown, spread evenly over those of the dump, the same ones on both sides.

    Raises:
        RunLogError: fewer than two dumps.
    """
    from PIL import Image

    folder = Path(folder)
    dumps = sorted(folder.glob("[0-9]*.jsonl"), key=lambda file: int(file.stem))
    if len(dumps) < 2:
        raise RunLogError(f"before and after need two validation dumps, {folder} has {len(dumps)}")

    def tiled(dump: Path) -> tuple[np.ndarray, str]:
        rows = [json.loads(row) for row in dump.read_text().splitlines()]
        rows.sort(key=lambda row: (row["uid"], row["sample"]))
        rows = rows[:: max(len(rows) // count, 1)][:count]
        images = [np.asarray(Image.open(folder / row["image"]).convert("RGB")) for row in rows]
        return _tile(images), f"step {dump.stem}"

    return tiled(dumps[0]), tiled(dumps[-1])


def _tile(images: Sequence[np.ndarray], columns: int = 10) -> np.ndarray:
    """uint8 [H, W, 3] images of one size, side by side on white with a gap of one pixel."""
    height, width = images[0].shape[:2]
    rows = -(-len(images) // columns)
    canvas = np.full((rows * (height + 1), min(columns, len(images)) * (width + 1), 3), 255, np.uint8)
    for i, image in enumerate(images):
        top, left = (i // columns) * (height + 1), (i % columns) * (width + 1)
        canvas[top : top + height, left : left + width] = image
    return canvas


def draw_before_after(run_dir: str | Path, file: str | Path, titles: tuple[str, str] = ("before", "after")) -> Path:
    """Write one picture with the samples of the first and of the last validation side by side.

    Taken from ``run_dir/grids``, or, where there are no two grids, from dumps in ``run_dir/validation``.

    Raises:
        RunLogError: neither has two.
    """
    from matplotlib.figure import Figure
    from PIL import Image

    run_dir, dumps = Path(run_dir), Path(run_dir) / "validation"
    if dumps.is_dir() and len(list((run_dir / "grids").glob("step_*.png"))) < 2:
        sides = [image for image, _ in validation_dumps(dumps)]
    else:
        sides = [np.asarray(Image.open(grid).convert("RGB")) for grid in validation_grids(run_dir)]
    height, width = max(s.shape[0] for s in sides), max(s.shape[1] for s in sides)
    figure = Figure(figsize=(13, 0.4 + 6.5 * height / width), layout="constrained")
    for axis, side, title in zip(figure.subplots(1, 2), sides, titles, strict=True):
        axis.imshow(side, interpolation="nearest" if side.shape[1] < 400 else None)
        axis.set_axis_off()
        axis.set_title(title, fontsize=12)
    file = Path(file)
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=150)
    return file


def sparkline(values: Sequence[float], low: float = 0.0, high: float = 1.0) -> str:
    """One character per value, from ``low`` to ``high``; what lies outside takes the nearest block."""
    span = high - low
    return "".join(BLOCKS[min(max(int((v - low) / span * len(BLOCKS)), 0), len(BLOCKS) - 1)] for v in values)


def curve_table(lines: Sequence[LogLine], width: int = 40):
    """A rich table of the steps: training reward as a bar, validation accuracy where there is one.

    Args:
        width: characters of a bar for the value 1.
    """
    from rich.table import Table

    reward, accuracy = dict(series(lines, TRAIN_REWARD)), dict(accuracy_series(lines))
    table = Table(
        title=f"training reward {sparkline(list(reward.values()))}   validation accuracy "
        f"{sparkline(list(accuracy.values()))}",
        title_justify="left",
        box=None,
    )
    table.add_column("step", justify="right")
    table.add_column("reward", justify="right")
    table.add_column("", min_width=width)
    table.add_column("accuracy", justify="right")
    for step in sorted(reward.keys() | accuracy.keys()):
        shown = reward.get(step)
        table.add_row(
            str(step),
            "" if shown is None else f"{shown:.3f}",
            "" if shown is None else "█" * round(min(max(shown, 0.0), 1.0) * width),
            f"[bold red]{accuracy[step]:.3f}[/bold red]" if step in accuracy else "",
        )
    return table


def metrics_table(lines: Sequence[LogLine]):
    """A rich table of the validation metrics before and after, beside real digits where that is known; None without.

    These are measured by judges that are not the reward: what they say is not what was trained.
    """
    from rich.table import Table

    from verl_digen.rewards.metrics.digit_quality import REAL

    found = validation_metrics(lines)
    if not found:
        return None
    table = Table(title="validation metrics (not trained on)", title_justify="left", box=None)
    for column in ("metric", "before", "after", "real digits"):
        table.add_column(column, justify="left" if column == "metric" else "right")
    for (metric, key), points in found.items():
        real = REAL.get(key) if metric == "digit_quality" else None
        shown = [f"{value:.3f}" for value in (points[0][1], points[-1][1])]
        table.add_row(key, *shown, "" if real is None else f"{real:.2f}")
    return table


def step_text(line: LogLine, total: int | None = None) -> str:
    """One line about a step, for following a run."""
    accuracy: list[Point] = accuracy_series([line])
    parts = [f"step {line.step}" + (f"/{total}" if total else "")]
    if TRAIN_REWARD in line.data:
        parts.append(f"reward {line.data[TRAIN_REWARD]:.3f}")
    if accuracy:
        parts.append(f"validation accuracy {accuracy[0][1]:.3f}")
    if "timing_s/step" in line.data:
        parts.append(f"{line.data['timing_s/step']:.1f} s")
    return "  ".join(parts)
