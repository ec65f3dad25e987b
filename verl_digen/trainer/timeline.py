"""What every pool did in a step, as the spans and bubbles of :mod:`verl_digen.schedule.trace`.

Times are wall clocks of the machines concerned: on several nodes their clocks must agree (NTP) for gaps to mean
something. The simulator writes the same names, so pictures, Chrome traces and bubble metrics come from the same code.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterator, Sequence
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
    """Name, for each row with devices, why it had no work in each piece of the step.

    The causes are found once for each pool and not for each row, so the work is n log n in spans and bubbles.
    """
    colocated = plan.digen.placement == "colocated"
    causes = _causes(trace.spans, plan, end_s)
    busy: dict[str, list[tuple[float, float]]] = {row: [] for row in trace.devices}
    for span in trace.spans:
        if span.row in busy and span.name in GENERATING + TRAINING and span.start_s < span.end_s:
            busy[span.row].append((span.start_s, span.end_s))
    for row, intervals in busy.items():
        pieces = causes["trainer" if row == "trainer" or colocated else "generator"]
        for start, end in _gaps(intervals, end_s):
            for index in range(bisect.bisect_right(pieces, start, key=_starts) - 1, len(pieces)):
                cause, since, until = pieces[index]
                if since >= end:
                    break
                if cause is not None:
                    trace.bubble(row, cause, max(since, start), min(until, end))


Piece = tuple[str | None, float, float]


def _starts(piece: Piece) -> float:
    return piece[1]


def _causes(spans: Sequence[Span], plan: RunPlan, end_s: float) -> dict[str, list[Piece]]:
    """For each pool the (cause, start, end) of all pieces of the step: why a row of it that has no work has none.

    In colocated placement there is one pool, and no cause while the Trainer's devices train.
    """
    names = {"publish", "generate", "score", "train", "commit", "fetch"}
    scored_s = min((span.end_s for span in spans if span.name == "score"), default=math.inf)
    changes = [(0.0, 0, ""), (end_s, 0, "")] + ([(scored_s, 0, "")] if 0 < scored_s < end_s else [])
    for span in spans:
        start, end = max(span.start_s, 0.0), min(span.end_s, end_s)
        if span.name in names and start < end:
            changes += [(start, 1, span.name), (end, -1, span.name)]
    changes.sort()
    going = dict.fromkeys(names, 0)
    pieces: dict[str, list[Piece]] = {"trainer": [], "generator": []}
    for (at, change, name), (until, *_) in zip(changes, changes[1:], strict=False):
        if name:
            going[name] += change
        if at == until:
            continue
        now = {name for name, count in going.items() if count}
        for pool, known in pieces.items():
            cause = _cause(pool, now, plan, scored=at >= scored_s)
            if known and known[-1][0] == cause:
                known[-1] = (cause, known[-1][1], until)
            else:
                known.append((cause, at, until))
    return pieces


def _cause(pool: str, now: set[str], plan: RunPlan, scored: bool) -> str | None:
    """Why a pool has no work while the spans ``now`` go on; ``scored``: something was scored before."""
    training = now & set(TRAINING)
    if plan.digen.placement == "colocated":
        if training:
            return None
        if "publish" in now:
            return "generator: wait for publish"
        if "generate" in now:
            return "generator: wait for slower replicas"
        return "trainer: wait for reward" if "score" in now else "trainer: wait for control"
    if "publish" in now:
        return f"{pool}: wait for publish"
    if pool == "generator":
        return "generator: wait for training" if training or "score" in now else "generator: wait for control"
    if "generate" in now:
        return "trainer: barrier" if plan.one_shot and scored else "trainer: wait for generation"
    return "trainer: wait for reward" if "score" in now else "trainer: wait for control"


def _gaps(intervals: list[tuple[float, float]], end_s: float) -> Iterator[tuple[float, float]]:
    """What is left of the time from 0 to ``end_s`` without some intervals."""
    at = 0.0
    for start, end in sorted(intervals):
        if start > at:
            yield at, min(start, end_s)
        at = max(at, end)
        if at >= end_s:
            return
    if at < end_s:
        yield at, end_s


def bubble_metrics(trace: Trace) -> dict[str, float]:
    """Device-seconds without work by cause, as ``bubble/<pool>_<cause>_s``."""
    causes = bubbles_by_cause(trace.bubbles, trace.devices)
    return {f"bubble/{cause.replace(': ', '_').replace(' ', '_')}_s": seconds for cause, seconds in causes.items()}


def learn(measured: Measured, plan: RunPlan, outcome: StepOutcome, activity: Activity, times: StepTimes) -> None:
    """Take the durations of a step into the profile; of the Trainer those of rank 0, as the others keep step."""
    for report in activity.reports:
        count = len(report.samples)
        measured.denoise.observe(count, report.phases["denoise"] / plan.digen.sampling.num_steps)
        measured.observe("encode", report.phases["encode"] / len({uid for uid, _ in report.samples}))
        measured.observe("decode", (report.phases["decode"] + report.phases["store"]) / count)
    for scoring in activity.scorings:
        measured.observe("score", scoring.ended - scoring.started)
    for done in outcome.accumulated:
        if done["rank"] != 0:
            continue
        measured.observe("fetch", done["fetch"])
        measured.observe("tiles", done["rounds"])
        for start, end, cells in done["tile_times"]:
            if cells:
                measured.tile.observe(cells, end - start)
    for commit in outcome.commits:
        measured.observe("commit", commit["commit_s"])
    for start, end in times.publishes:
        measured.observe("publish", end - start)
