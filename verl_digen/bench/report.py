"""One self-contained HTML page of a run: curves, sample grids, timelines, plan, settings, warnings.

Everything is in the file: the page loads nothing, and its content policy forbids it to. What is read:

- ``about.json``, ``warnings.log`` (:mod:`verl_digen.trainer.about`), ``grids/`` and ``traces/`` of the run's folder;
- the JSON lines of veRL's ``file`` logger, from where ``about.json`` says.

What a run did not write is named on the page, with the option that switches it on.
"""

from __future__ import annotations

import base64
import json
import math
import time
from collections.abc import Iterable, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from verl_digen.bench.runlog import LogLine, RunLogError, accuracy_series, read_log, series, validation_metrics
from verl_digen.planner.timeline import COLOURS, OTHER
from verl_digen.rewards.metrics.digit_quality import REAL

MAX_GRIDS, MAX_TRACES, MAX_POINTS = 40, 6, 1000
MAX_WARNINGS = 200
PAGE = "report.html"


def write_report(run_dir: str | Path, out: str | Path | None = None, log: str | Path | None = None) -> Path:
    """Write the page of a run.

    Args:
        run_dir: ``trainer.default_local_dir`` of the run.
        out: file to write; None is ``report.html`` in ``run_dir``.
        log: JSON lines of the run's metrics; None takes what ``about.json`` says, or the ``*.jsonl`` in the folder.

    Returns:
        the file.

    Raises:
        RunLogError: no such folder, nothing of a run in it, or a log that cannot be read.
    """
    folder = Path(run_dir)
    content = page_of(collect(folder, log))
    file = Path(out) if out is not None else folder / PAGE
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(content, encoding="utf-8")
    return file


def page_of(run: dict[str, Any]) -> str:
    """The page, with the run's data as JSON in it. Text of the run cannot end the element or become markup."""
    page = files("verl_digen.bench") / "page"
    data = json.dumps(run, allow_nan=False).replace("<", "\\u003c")
    parts = {"/*STYLE*/": "report.css", "/*CHARTS*/": "charts.js", "/*SCRIPT*/": "report.js"}
    html = (page / "report.html").read_text(encoding="utf-8")
    for mark, name in parts.items():
        html = html.replace(mark, (page / name).read_text(encoding="utf-8"))
    return html.replace("/*RUN*/", data)


def collect(folder: Path, log: str | Path | None = None) -> dict[str, Any]:
    """All that the page shows, as JSON: see the keys below."""
    if not folder.is_dir():
        raise RunLogError(f"no such folder: {folder} (give trainer.default_local_dir of a run)")
    about = _about(folder)
    lines, missing = _metrics(folder, about, log)
    grids = [
        {"step": _step(f), "src": _data_uri(f)}
        for f in evenly(sorted((folder / "grids").glob("step_*.png")), MAX_GRIDS)
    ]
    traces = [_trace(f) for f in evenly(sorted((folder / "traces").glob("step_*.json")), MAX_TRACES)]
    if not (about or lines or grids or traces):
        raise RunLogError(
            f"nothing of a run in {folder}: no about.json, no metrics, no grids, no traces "
            "(give trainer.default_local_dir of a run, and --log for metrics elsewhere)"
        )
    if not about:
        missing.append("Plan and settings: about.json is not in the folder; a run writes it when it starts.")
    if not grids:
        missing.append(
            "Samples: no grids. Set trainer.v1.digen.validation.grid_samples above 0, and trainer.test_freq or "
            "trainer.val_before_train so that the run validates."
        )
    if not traces:
        missing.append("Timeline: no traces. Set trainer.v1.digen.trace.every, for example to 10.")
    return {
        "folder": str(folder.resolve()),
        "written": time.strftime("%Y-%m-%d %H:%M"),
        "about": about,
        "figures": figures(lines),
        "metrics": {name: _rounded(series(lines, name)) for name in _names(lines)},
        "quality": [
            {"metric": metric, "key": key, "points": _rounded(points), "real": _real(metric, key)}
            for (metric, key), points in validation_metrics(lines).items()
        ],
        "grids": grids,
        "traces": traces,
        "colours": COLOURS | {"": OTHER},
        "findings": findings(lines, about),
        "warnings": _warnings(folder),
        "missing": missing,
    }


# ---- what the run left ---------------------------------------------------------------------------------------------


def _about(folder: Path) -> dict[str, Any]:
    file = folder / "about.json"
    if not file.is_file():
        return {}
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise RunLogError(f"{file} is not JSON: {error}") from error


def _metrics(folder: Path, about: dict[str, Any], log: str | Path | None) -> tuple[list[LogLine], list[str]]:
    """Lines of the log (none without one), and what to say about a log that is missing."""
    if log is not None:
        return read_log(log), []
    recorded = about.get("metrics_log")
    found = [Path(recorded)] if recorded and Path(recorded).is_file() else sorted(folder.glob("*.jsonl"))
    if len(found) > 1:
        raise RunLogError(f"several logs in {folder}: {', '.join(f.name for f in found)}; choose one with --log")
    if found and found[0].stat().st_size:
        return read_log(found[0]), []
    if recorded:
        return [], [f"Curves: {recorded} is not there or empty; give the run's metrics with --log."]
    return [], ["Curves: no metrics. Put file into trainer.logger ([console,file]), or give the log with --log."]


def _warnings(folder: Path) -> list[str]:
    file = folder / "warnings.log"
    lines = file.read_text(encoding="utf-8", errors="replace").splitlines() if file.is_file() else []
    if len(lines) > MAX_WARNINGS:
        lines = [f"({len(lines) - MAX_WARNINGS} lines before these are left out)", *lines[-MAX_WARNINGS:]]
    return lines


def _trace(file: Path) -> dict[str, Any]:
    """A step of the Chrome trace as rows of spans ``[name, category, start, seconds, detail]``."""
    trace = json.loads(file.read_text(encoding="utf-8"))
    events = trace["traceEvents"]
    names = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    rows = {tid: {"row": name, "spans": []} for tid, name in sorted(names.items())}
    for event in events:
        if event["ph"] == "X":
            span = [event["name"], event["cat"], event["ts"] / 1e6, event["dur"] / 1e6, event["args"].get("detail", "")]
            rows[event["tid"]]["spans"].append(span)
    return {"step": _step(file), "source": trace["otherData"]["source"], "rows": list(rows.values())}


def _step(file: Path) -> int:
    return int(file.stem.partition("_")[2])


def _data_uri(file: Path) -> str:
    return "data:image/png;base64," + base64.b64encode(file.read_bytes()).decode()


def evenly(items: Sequence[Any], count: int) -> list[Any]:
    """At most ``count`` of the items, spread evenly, the first and the last among them."""
    if len(items) <= count:
        return list(items)
    return [items[round(i * (len(items) - 1) / (count - 1))] for i in range(count)]


# ---- what the page says --------------------------------------------------------------------------------------------


def _names(lines: Iterable[LogLine]) -> list[str]:
    return sorted({name for line in lines for name, value in line.data.items() if _is_number(value)})


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _rounded(points: Sequence[tuple[int, float]]) -> list[list[float]]:
    """Points with six significant digits, at most :data:`MAX_POINTS`; what is not finite is left out."""
    finite = [(step, value) for step, value in points if math.isfinite(value)]
    return [[step, float(f"{value:.6g}")] for step, value in evenly(finite, MAX_POINTS)]


def _real(metric: str, key: str) -> float | None:
    return REAL.get(key) if metric == "digit_quality" else None


def figures(lines: Sequence[LogLine]) -> list[dict[str, str]]:
    """The run's figures at the top of the page: title, value and what it was before."""
    out = []
    seconds, reward = series(lines, "timing_s/step"), series(lines, "reward/mean")
    if seconds:
        total, middle = sum(v for _, v in seconds), sorted(v for _, v in seconds)[len(seconds) // 2]
        out.append({"title": "training steps", "value": str(len(seconds)), "note": f"{_duration(total)} of training"})
        out.append({"title": "median step", "value": _duration(middle), "note": "to published weights"})
    named = [("reward", reward), ("validation accuracy", accuracy_series(lines))]
    named += [(key.replace("_", " "), points) for (_, key), points in validation_metrics(lines).items()]
    for title, points in named:
        if points:
            first, last = points[0], points[-1]
            out.append({"title": title, "value": f"{last[1]:.3f}", "note": f"{first[1]:.3f} at step {first[0]}"})
    return out


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.1f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def findings(lines: Sequence[LogLine], about: dict[str, Any]) -> list[str]:
    """What in the metrics deserves a look; the pages metrics.md and troubleshooting.md say what to do about it."""
    out = []
    settings = about.get("settings", {})
    trainer, actor = settings.get("trainer", {}), settings.get("actor_rollout_ref", {}).get("actor", {})
    steps, planned = series(lines, "timing_s/step"), trainer.get("total_training_steps")
    if planned and steps and steps[-1][0] < planned:
        out.append(
            f"The log ends at step {steps[-1][0]} of trainer.total_training_steps={planned}: the run goes on, or it "
            "ended early."
        )
    gap, clip = series(lines, "actor/log_prob_gap_max"), actor.get("clip_ratio")
    if gap and clip:
        step, worst = max(gap, key=lambda point: point[1])
        if worst > 0.1 * clip:
            out.append(
                f"actor/log_prob_gap_max is {worst:.3g} at step {step}, more than a tenth of the clip range {clip:g}: "
                "Trainer and rollout do not compute the same, unless there are several optimizer steps per rollout."
            )
    rules = (
        ("reward/zero_std_ratio", 0.5, "most groups have equal rewards and train nothing"),
        ("actor/clip_high", 0.5, "most cells lie above the clip range"),
        ("actor/clip_low", 0.5, "most cells lie below the clip range"),
    )
    for name, bound, meaning in rules:
        points = series(lines, name)
        if points and points[-1][1] > bound:
            out.append(f"{name} is {points[-1][1]:.2f} at step {points[-1][0]}: {meaning}.")
    for line in lines:
        bad = sorted(name for name, value in line.data.items() if _is_number(value) and not math.isfinite(value))
        if bad:
            out.append(f"Step {line.step} has metrics that are not finite: {', '.join(bad[:5])}.")
            break
    spread = validation_metrics(lines).get(("digit_quality", "spread"), [])
    if spread and spread[-1][1] < 0.5 * REAL["spread"]:
        out.append(
            f"The spread of the samples of a digit is {spread[-1][1]:.3f}, less than half of that of real digits "
            f"({REAL['spread']:g}): the policy collapses (reward hacking). A KL to the initial policy or a lower "
            "learning rate helps."
        )
    return out
