"""``verl-digen report``: what of a run is on its page, and what the page says about what is missing."""

from __future__ import annotations

import json
import re

import pytest

from tests.bench.fake_run import HOSTILE, write_grid, write_metrics, write_run
from verl_digen.bench import report
from verl_digen.bench.report import collect, evenly, findings, page_of, write_report
from verl_digen.bench.runlog import LogLine
from verl_digen.cli import main


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    return write_run(tmp_path_factory.mktemp("report") / "run")


def on_page(html: str) -> dict:
    """The run's data as the browser reads it."""
    (text,) = re.findall(r'<script type="application/json" id="run">(.*?)</script>', html, re.S)
    return json.loads(text)


def test_everything_of_a_run_is_in_the_page(run_dir, tmp_path, capsys):
    assert main.main(["report", str(run_dir), "--out", str(tmp_path / "page.html")]) == 0
    assert capsys.readouterr().out == f"report: {tmp_path / 'page.html'}\n"
    run = on_page((tmp_path / "page.html").read_text())
    assert run["about"]["plan"][0] == ["mode", "disaggregated + GAP + TSP"]
    assert [grid["step"] for grid in run["grids"]] == [0, 10, 20] and [t["step"] for t in run["traces"]] == [10, 20]
    assert len({grid["src"] for grid in run["grids"]}) == 3
    assert run["metrics"]["reward/mean"][-1] == [20, 0.85] and len(run["metrics"]["reward/mean"]) == 20
    spread = next(item for item in run["quality"] if item["key"] == "spread")
    assert spread["points"][0] == [0, 0.19] and spread["real"] == 0.165
    assert {"title": "validation accuracy", "value": "0.950", "note": "0.500 at step 0"} in run["figures"]
    assert run["findings"] == run["warnings"] == run["missing"] == []
    rows = {row["row"]: row["spans"] for row in run["traces"][0]["rows"]}
    assert rows["trainer"][0][:4] == ["train", "work", 1.0, pytest.approx(0.8)]
    assert rows["trainer"][-1][:2] == ["trainer: wait for generation", "bubble"]


def test_the_page_names_no_other_file_or_address(run_dir):
    """Nothing to load: besides SVG's namespace there is no address in it, and its policy allows none."""
    html = page_of(collect(run_dir))
    markup = html.replace(json.dumps(collect(run_dir)), "")
    assert set(re.findall(r"https?://[^\s\"'<]+", markup)) == {"http://www.w3.org/2000/svg"}
    assert "default-src 'none'" in html and not re.search(r"<(link|iframe|script[^>]* src)", markup)


def test_text_of_the_run_cannot_leave_its_place(tmp_path):
    html = page_of(collect(write_run(tmp_path / "run", name=HOSTILE)))
    assert html.count("</script>") == 2  # the data's and the code's
    assert on_page(html)["about"]["experiment"] == HOSTILE


def test_what_a_run_did_not_write_is_named_with_its_option(tmp_path):
    write_metrics(tmp_path / "log.jsonl")  # no grids, no traces, no settings
    missing = "\n".join(collect(tmp_path)["missing"])
    for option in ("validation.grid_samples", "trainer.test_freq", "trainer.v1.digen.trace.every", "about.json"):
        assert option in missing
    assert "trainer.logger" not in missing
    write_grid(tmp_path / "other", 3)
    missing = "\n".join(collect(tmp_path / "other")["missing"])
    assert "trainer.logger" in missing and "grid_samples" not in missing
    write_report(tmp_path / "other")
    assert (tmp_path / "other" / "report.html").is_file()


def test_a_log_elsewhere(run_dir, tmp_path):
    log = write_metrics(tmp_path / "mine.jsonl", steps=4)
    assert len(collect(run_dir, log)["metrics"]["reward/mean"]) == 4
    lost = write_run(tmp_path / "run")
    (tmp_path / "log" / "metrics.jsonl").unlink()
    assert "is not there or empty; give the run's metrics with --log" in "\n".join(collect(lost)["missing"])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda folder: None, "no such folder"),
        (lambda folder: folder.mkdir(), "nothing of a run in"),
        (
            lambda folder: [write_metrics(folder / f"{name}.jsonl") for name in "ab"],
            "several logs in .*a.jsonl, b.jsonl",
        ),
        (lambda folder: (folder.mkdir(), (folder / "about.json").write_text("{")), "about.json is not JSON"),
    ],
)
def test_what_is_no_run_is_refused(tmp_path, make, message, capsys):
    make(tmp_path / "run")
    assert main.main(["report", str(tmp_path / "run")]) == 2
    assert re.search(message, capsys.readouterr().err)


def test_long_runs_are_thinned_with_first_and_last(monkeypatch, tmp_path):
    assert evenly(range(10), 4) == [0, 3, 6, 9] and evenly([1, 2], 4) == [1, 2]
    monkeypatch.setattr(report, "MAX_POINTS", 6)
    write_metrics(tmp_path / "log.jsonl")
    points = collect(tmp_path)["metrics"]["reward/mean"]
    assert len(points) == 6 and points[0][0] == 1 and points[-1][0] == 20


def test_warnings_of_the_log_are_on_the_page(monkeypatch, tmp_path):
    folder = write_run(tmp_path / "run")
    (folder / "warnings.log").write_text("".join(f"WARNING number {i}\n" for i in range(5)))
    assert len(collect(folder)["warnings"]) == 5
    monkeypatch.setattr(report, "MAX_WARNINGS", 2)
    assert collect(folder)["warnings"] == [
        "(3 lines before these are left out)",
        "WARNING number 3",
        "WARNING number 4",
    ]


SETTINGS = {"trainer": {"total_training_steps": 9}, "actor_rollout_ref": {"actor": {"clip_ratio": 1e-3}}}


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"timing_s/step": 1.0}, "ends at step 3 of trainer.total_training_steps=9: the run goes on"),
        ({"actor/log_prob_gap_max": 2e-4}, "0.0002 at step 3, more than a tenth of the clip range 0.001"),
        ({"reward/zero_std_ratio": 0.8}, "zero_std_ratio is 0.80 at step 3: most groups have equal rewards"),
        ({"actor/clip_high": 0.6}, "most cells lie above the clip range"),
        ({"actor/grad_norm": float("nan")}, "Step 3 has metrics that are not finite: actor/grad_norm"),
        ({"val-aux/digits/digit_quality/spread": 0.04}, "less than half of that of real digits .*reward hacking"),
    ],
)
def test_findings(data, message):
    (found,) = findings([LogLine(3, data)], {"settings": SETTINGS})
    assert re.search(message, found)


def test_a_healthy_run_has_no_findings():
    data = {"timing_s/step": 1.0, "actor/log_prob_gap_max": 1e-5, "reward/zero_std_ratio": 0.1, "actor/clip_high": 0.0}
    assert findings([LogLine(9, data | {"val-aux/digits/digit_quality/spread": 0.12})], {"settings": SETTINGS}) == []
    assert findings([], {}) == []


def test_metrics_that_are_not_finite_leave_a_page_that_a_browser_reads(tmp_path):
    (tmp_path / "log.jsonl").write_text('{"step": 1, "data": {"a": NaN, "b": 2.0, "c": "text", "d": null}}\n')
    run = on_page(page_of(collect(tmp_path)))
    assert run["metrics"] == {"a": [], "b": [[1, 2.0]]}
