"""What every pool did in a step, as the spans and bubbles of :mod:`verl_digen.schedule.trace`.

Times are wall clocks of the machines concerned: on several nodes their clocks must agree (NTP) for gaps to mean
something. The simulator writes the same names, so pictures, Chrome traces and bubble metrics come from the same code.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from verl_digen.config.plan import RunPlan
from verl_digen.rollout.requests import Activity
from verl_digen.schedule.measure import Measured
from verl_digen.schedule.trace import Span, Trace, bubbles_by_cause
from verl_digen.trainer.step import StepOutcome

GENERATING, TRAINING = ("generate",), ("train", "fetch", "commit")


@dataclass
class StepTimes:
    """Wall clocks of one step.

    Attributes:
        started, ended: of the step, publishing included.
        publishes: (start, end) of each publish in it.
    """

    started: float
    ended: float = 0.0
    publishes: list[tuple[float, float]] = field(default_factory=list)


def step_trace(plan: RunPlan, outcome: StepOutcome, activity: Activity, times: StepTimes) -> Trace:
    """Spans of a step in seconds from its start, with its bubbles.

    Rows: each replica, ``trainer`` (its first rank; the others run the same tiles in step), ``reward``, ``driver``
    (``assemble``: from a group's last reward to the moment it is handed to the Trainer), ``publish``.
    """
    zero = times.started
    devices = {f"replica{rank}": 1 for rank in range(plan.replicas)}
    if plan.digen.placement == "disaggregated":
        devices["trainer"] = plan.trainer_ranks
    trace = Trace(source="measured", devices=devices)

    def span(row: str, name: str, start: float, end: float, detail: str = "") -> None:
        if end > zero:  # work for the next step begins in this one, and is told of when it ends
            trace.work(row, name, max(start - zero, 0.0), end - zero, detail)

    for report in activity.reports:
        span(
            report.replica,
            "generate",
            report.started,
            report.ended,
            f"fragment {report.fragment_id}, {len(report.samples)} samples, version {report.version}",
        )
        decoded = report.ended - report.phases["store"]
        span(report.replica, "decode", decoded - report.phases["decode"], decoded)
    for scoring in activity.scorings:
        detail = f"fragment {scoring.fragment_id}, {scoring.samples} samples, worker {scoring.worker}"
        span("reward", "score", scoring.started, scoring.ended, detail)
    for group in outcome.groups:
        if group.taken:
            span("driver", "assemble", group.completed, group.taken, f"group {group.group.uid}")
    for done in outcome.accumulated:
        if done["rank"] != 0:
            continue
        span("trainer", "fetch", done["started"], done["fetched"])
        for start, end, cells in done["tile_times"]:
            span("trainer", "train", start, end, f"{cells} cells")
    for commit in outcome.commits:
        span("trainer", "commit", commit["commit_started"], commit["commit_ended"])
    for start, end in times.publishes:
        span("publish", "publish", start, end)
    _find_bubbles(trace, plan, times.ended - zero)
    return trace


def _find_bubbles(trace: Trace, plan: RunPlan, end_s: float) -> None:
    """Cut the step at every event and name, for each row with devices, why it had no work in each piece."""
    colocated = plan.digen.placement == "colocated"
    busy: dict[str, list[tuple[float, float]]] = {row: [] for row in trace.devices}
    for span in trace.spans:
        if span.row in busy and span.name in GENERATING + TRAINING:
            busy[span.row].append((span.start_s, span.end_s))
        elif colocated and span.row == "trainer" and span.name in TRAINING:
            for row in busy:
                busy[row].append((span.start_s, span.end_s))
    spans = {name: _of(trace.spans, name) for name in ("publish", "generate", "score", "train", "commit", "fetch")}
    edges = sorted({0.0, end_s, *(min(max(t, 0.0), end_s) for s in trace.spans for t in (s.start_s, s.end_s))})
    for row in trace.devices:
        open_cause, since = None, 0.0
        for start, end in zip(edges, edges[1:], strict=False):
            middle = (start + end) / 2
            cause = None if _covers(busy[row], middle) else _cause(row, middle, spans, plan, colocated)
            if cause != open_cause:
                if open_cause is not None:
                    trace.bubble(row, open_cause, since, start)
                open_cause, since = cause, start
        if open_cause is not None:
            trace.bubble(row, open_cause, since, end_s)


def _cause(row: str, at: float, spans: dict[str, list[tuple[float, float]]], plan: RunPlan, colocated: bool) -> str:
    def now(*names: str) -> bool:
        return any(_covers(spans[name], at) for name in names)

    pool = "trainer" if row == "trainer" else "generator"
    if now("publish"):
        return f"{pool}: wait for publish"
    if colocated:
        if now("generate"):
            return "generator: wait for slower replicas"
        return "trainer: wait for reward" if now("score") else "trainer: wait for control"
    if pool == "generator":
        if now("train", "commit", "fetch") or now("score"):
            return "generator: wait for training"
        return "generator: wait for control"
    if now("generate"):
        scored = any(end <= at for _, end in spans["score"])
        return "trainer: barrier" if plan.one_shot and scored else "trainer: wait for generation"
    return "trainer: wait for reward" if now("score") else "trainer: wait for control"


def _of(spans: Iterable[Span], name: str) -> list[tuple[float, float]]:
    return [(span.start_s, span.end_s) for span in spans if span.name == name]


def _covers(intervals: Sequence[tuple[float, float]], at: float) -> bool:
    return any(start <= at < end for start, end in intervals)


def bubble_metrics(trace: Trace) -> dict[str, float]:
    """Device-seconds without work by cause, as ``bubble/<pool>_<cause>_s``."""
    causes = bubbles_by_cause(trace.bubbles, trace.devices)
    return {f"bubble/{cause.replace(': ', '_').replace(' ', '_')}_s": seconds for cause, seconds in causes.items()}


def learn(measured: Measured, plan: RunPlan, outcome: StepOutcome, activity: Activity, times: StepTimes) -> None:
    """Take the durations of a step into the profile."""
    for report in activity.reports:
        count = len(report.samples)
        measured.denoise.observe(count, report.phases["denoise"] / plan.digen.sampling.num_steps)
        measured.observe("encode", report.phases["encode"] / len({uid for uid, _ in report.samples}))
        measured.observe("decode", (report.phases["decode"] + report.phases["store"]) / count)
    for scoring in activity.scorings:
        measured.observe("score", scoring.ended - scoring.started)
    for done in outcome.accumulated:
        measured.observe("fetch", done["fetch"])
        measured.observe("tiles", done["rounds"])
        for start, end, cells in done["tile_times"]:
            if cells:
                measured.tile.observe(cells, end - start)
    for commit in outcome.commits:
        measured.observe("commit", commit["commit_s"])
    for start, end in times.publishes:
        measured.observe("publish", end - start)
