"""The timeline picture of a run, drawn from its trace events (simulated or measured)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from verl_digen.schedule.trace import Trace

COLOURS = {
    "generate": "#4c9f70",
    "help": "#9bd1a4",
    "train": "#3b6fb6",
    "commit": "#1d3557",
    "publish": "#e09f3e",
    "score": "#8d6cab",
    "decode": "#2f6b4a",
    "fetch": "#a8c4e5",
    "assemble": "#c9b458",
    "switch": "#c8553d",
    "down": "#222222",
}
OTHER = "#999999"
"""Colour of span names that are not in :data:`COLOURS`."""


def draw_timeline(
    traces: Sequence[tuple[str, Trace]],
    path: str | Path,
    *,
    until_s: float | None = None,
    max_rows: int = 12,
    width_in: float = 9.0,
    dpi: int = 80,
) -> None:
    """Draw one band per trace on a common time axis and write a picture.

    Args:
        traces: titles and traces, top to bottom.
        path: file; the ending chooses the format (``.png``, ``.svg``).
        until_s: right end of the axis; the longest trace where not given.
        max_rows: rows drawn per trace; replicas beyond it are left out and counted in the title.
        width_in, dpi: size of the picture, inches and dots per inch.

    Raises:
        ValueError: nothing to draw.
    """
    if not traces:
        raise ValueError("timeline: no traces to draw")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    end = until_s if until_s is not None else max(trace.end_s for _, trace in traces)
    bands = [_rows(trace, max_rows) for _, trace in traces]
    heights = [0.16 * len(rows) + 0.5 for rows, _ in bands]
    figure = Figure(figsize=(width_in, sum(heights) + 0.6), dpi=dpi)
    FigureCanvasAgg(figure)
    axes = figure.subplots(len(traces), 1, squeeze=False, sharex=True, gridspec_kw={"height_ratios": heights})[:, 0]
    used: dict[str, str] = {}
    for axis, (title, trace), (rows, hidden) in zip(axes, traces, bands, strict=True):
        _draw_band(axis, trace, rows, end, used)
        more = f", {hidden} replicas not drawn" if hidden else ""
        axis.set_title(f"{title} ({trace.source}{more})", fontsize=8, loc="left", pad=2)
    axes[-1].set_xlabel("seconds", fontsize=7)
    figure.legend(
        handles=[Patch(color=colour, label=name) for name, colour in used.items()],
        loc="lower center",
        ncols=8,
        fontsize=7,
        frameon=False,
    )
    figure.tight_layout(rect=(0, 0.5 / (sum(heights) + 0.6), 1, 1), h_pad=0.4)
    figure.savefig(path, metadata={"Software": None} if str(path).endswith(".png") else None)


def _rows(trace: Trace, most: int) -> tuple[list[str], int]:
    """Rows to draw, the Trainer at the bottom and publishes under it, and how many replicas are left out."""
    shown = [row for row in trace.devices if row != "trainer"]
    hidden = max(0, len(shown) - most)
    names = {span.row for span in trace.spans}
    extra = [row for row in ("reward", "driver", "publish") if row in names]
    last = ["trainer"] if "trainer" in names or "trainer" in trace.devices else []
    return shown[:most] + last + extra, hidden


def _draw_band(axis, trace: Trace, rows: list[str], end: float, used: dict[str, str]) -> None:
    level = {row: len(rows) - 1 - index for index, row in enumerate(rows)}
    grouped: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for span in trace.spans:
        if span.row in level and span.start_s < end:
            grouped.setdefault((span.row, span.name), []).append((span.start_s, min(span.end_s, end) - span.start_s))
    for (row, name), pieces in grouped.items():
        colour = COLOURS.get(name, OTHER)
        used[name] = colour
        axis.broken_barh(pieces, (level[row] - 0.42, 0.84), facecolors=colour, edgecolors="white", linewidth=0.3)
    axis.set_xlim(0, end)
    axis.set_ylim(-0.6, len(rows) - 0.4)
    axis.set_yticks(range(len(rows)), rows[::-1], fontsize=6)
    axis.tick_params(axis="x", labelsize=6)
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)
