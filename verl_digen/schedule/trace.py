"""What happened when: spans of every row, bubbles by cause, and the Chrome trace format.

Simulator and live run write the same spans, so pictures and bubble metrics are made by the same code.
A row is a replica, ``trainer``, ``reward`` or ``publish``.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

WORK = ("generate", "help", "train", "commit")
"""Span names in which the devices of a row do what they are for."""


class Span(NamedTuple):
    """One thing on one row, in seconds from the start of the run."""

    row: str
    name: str
    start_s: float
    end_s: float
    detail: str = ""


@dataclass(slots=True)
class Trace:
    """Spans and bubbles of a run.

    Attributes:
        source: ``"simulated"`` or ``"measured"``; stands in every picture and file made from the trace.
        devices: devices of each row; rows without devices do not count for utilisation.
    """

    source: str
    devices: dict[str, int]
    spans: list[Span] = field(default_factory=list)
    bubbles: list[Span] = field(default_factory=list)

    def work(self, row: str, name: str, start_s: float, end_s: float, detail: str = "") -> None:
        """Record a span. ``ValueError`` when it ends before it starts."""
        if end_s < start_s:
            raise ValueError(f"trace: {name} on {row} ends at {end_s} before it starts at {start_s}")
        self.spans.append(Span(row, name, start_s, end_s, detail))

    def bubble(self, row: str, cause: str, start_s: float, end_s: float) -> None:
        """Record an interval in which a row had devices but no work."""
        if end_s > start_s:
            self.bubbles.append(Span(row, cause, start_s, end_s))

    @property
    def end_s(self) -> float:
        return max((span.end_s for span in self.spans), default=0.0)


def bubbles_by_cause(bubbles: Iterable[Span], devices: Mapping[str, int]) -> dict[str, float]:
    """Device-seconds of bubbles, summed by cause."""
    total: dict[str, float] = {}
    for bubble in bubbles:
        seconds = (bubble.end_s - bubble.start_s) * devices.get(bubble.row, 0)
        total[bubble.name] = total.get(bubble.name, 0.0) + seconds
    return total


def utilisation(trace: Trace, end_s: float | None = None) -> dict[str, float]:
    """Share of the time in which each row with devices did work (:data:`WORK`)."""
    end = trace.end_s if end_s is None else end_s
    busy = dict.fromkeys(trace.devices, 0.0)
    for span in trace.spans:
        if span.name in WORK and span.row in busy:
            busy[span.row] += span.end_s - span.start_s
    return {row: seconds / end if end else 0.0 for row, seconds in busy.items()}


def chrome_trace(trace: Trace) -> dict:
    """The trace as an object of the Chrome trace event format (opens in Perfetto); times become microseconds."""
    rows = list(dict.fromkeys([*trace.devices, *(span.row for span in trace.spans)]))
    number = {row: index for index, row in enumerate(rows)}
    events: list[dict] = [
        {"ph": "M", "name": "process_name", "pid": 0, "tid": 0, "args": {"name": f"verl_digen ({trace.source})"}}
    ]
    for row, index in number.items():
        events.append({"ph": "M", "name": "thread_name", "pid": 0, "tid": index, "args": {"name": row}})
        events.append({"ph": "M", "name": "thread_sort_index", "pid": 0, "tid": index, "args": {"sort_index": index}})
    for category, spans in (("work", trace.spans), ("bubble", trace.bubbles)):
        for span in spans:
            events.append(
                {
                    "ph": "X",
                    "cat": category,
                    "name": span.name,
                    "pid": 0,
                    "tid": number[span.row],
                    "ts": round(span.start_s * 1e6, 3),
                    "dur": round((span.end_s - span.start_s) * 1e6, 3),
                    "args": {"detail": span.detail} if span.detail else {},
                }
            )
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"source": trace.source}}


def write_chrome_trace(trace: Trace, path: str | Path) -> None:
    """Write :func:`chrome_trace` as JSON."""
    Path(path).write_text(json.dumps(chrome_trace(trace)), encoding="utf-8")
