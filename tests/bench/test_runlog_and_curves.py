"""What is read from a run's log, the last line of the quickstart, and the pictures."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest

from verl_digen.bench import curves
from verl_digen.bench.runlog import LogLine, RunLogError, accuracy_series, read_log, series, summarise
from verl_digen.cli import main

LAST_LINE = re.compile(r"digits accuracy: before 0\.\d+ after 0\.\d+ \(\d+ steps, \d+ s\)")


def _lines(steps: int = 6, every: int = 3) -> list[dict]:
    """A log as ``main_ppo`` writes it: validation before training, training steps, validation every ``every`` steps."""
    lines = [{"step": 0, "data": {"val-core/digits/acc/mean@20": 0.5, "val-core/digits/acc/best@20/mean": 0.99}}]
    for step in range(1, steps + 1):
        data = {"reward/mean": 0.5 + 0.05 * step, "timing_s/step": 2.0, "perf/samples_per_s": 80.0}
        if step % every == 0:
            data |= {"val-core/digits/acc/mean@20": 0.5 + 0.06 * step, "timing_s/testing": 1.5}
        lines.append({"step": step, "data": data})
    return lines


@pytest.fixture
def log(tmp_path):
    file = tmp_path / "metrics.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in _lines()))
    return file


@pytest.fixture
def run_dir(tmp_path):
    """A run's folder with the grids of three validations: black, grey, white."""
    from PIL import Image

    folder = tmp_path / "run"
    (folder / "grids").mkdir(parents=True)
    for step, shade in ((0, 0), (3, 128), (6, 255)):
        image = np.full((60, 100, 3), shade, np.uint8)
        Image.fromarray(image).save(folder / "grids" / f"step_{step:05d}.png")
    return folder


def test_summary_takes_first_and_last_validation_and_adds_the_step_times(log):
    lines = read_log(log)
    found = summarise(lines)
    assert (found.before, found.after, found.steps) == (0.5, pytest.approx(0.86), 6)
    assert found.train_s == 12.0 and found.validate_s == 3.0
    assert found.line() == "digits accuracy: before 0.500 after 0.860 (6 steps, 12 s)"
    assert LAST_LINE.fullmatch(found.line())


def test_only_the_mean_accuracy_counts():
    """best@N and worst@N stand beside mean@N under val-core; taking them would flatter the result."""
    line = LogLine(
        0, {"val-core/digits/acc/mean@20": 0.5, "val-core/digits/acc/best@20/mean": 1.0, "val-aux/x/acc/mean@2": 1}
    )
    assert accuracy_series([line]) == [(0, 0.5)]
    assert accuracy_series([LogLine(1, {"val-core/a/acc/mean@4": 0.2, "val-core/b/acc/mean@4": 0.4})]) == [
        (1, pytest.approx(0.3))
    ]


def test_a_line_that_is_being_written_is_left_out(log):
    whole = len(read_log(log))
    with open(log, "a") as file:
        file.write('{"step":7,"data":{"rew')
    assert len(read_log(log)) == whole


def test_bad_logs_are_errors(tmp_path, log):
    with pytest.raises(RunLogError, match="trainer.logger must contain 'file'"):
        read_log(tmp_path / "absent.jsonl")
    other = tmp_path / "other.jsonl"
    other.write_text('{"a": 1}\n')
    with pytest.raises(RunLogError, match="other.jsonl:1"):
        read_log(other)
    without_first = [line for line in read_log(log) if line.step > 0]
    with pytest.raises(RunLogError, match="val_before_train=true"):
        summarise(without_first)


def test_curve_picture_and_terminal(log, tmp_path):
    from PIL import Image
    from rich.console import Console

    lines = read_log(log)
    image = Image.open(curves.draw_curve(lines, tmp_path / "out" / "curve.png"))
    assert image.format == "PNG" and image.width > 400
    console = Console(width=100, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(curves.curve_table(lines))
    text = console.export_text()
    assert "0.860" in text and "0.550" in text and "▅" in text
    with pytest.raises(RunLogError, match="nothing to draw"):
        curves.draw_curve([LogLine(1, {"x": 1.0})], tmp_path / "none.png")


def test_sparkline_covers_the_range_and_clamps():
    assert curves.sparkline([0, 0.5, 1]) == "▁▅█"
    assert curves.sparkline([-3, 9]) == "▁█"


def test_before_after_shows_the_first_and_the_last_grid(run_dir, tmp_path):
    from PIL import Image

    picture = np.asarray(Image.open(curves.draw_before_after(run_dir, tmp_path / "both.png")).convert("L"))
    height, width = picture.shape
    assert picture[height // 2, width // 4] < 10  # the first grid is black
    assert picture[height // 2, 3 * width // 4] > 245  # the last is white
    with pytest.raises(RunLogError, match="has 0"):
        curves.draw_before_after(tmp_path / "empty", tmp_path / "none.png")


def test_before_after_from_validation_dumps(tmp_path):
    """Dumps serve where no grids were written; the same samples are shown on both sides."""
    from PIL import Image

    folder = tmp_path / "validation"
    for step, shade in ((0, 10), (12, 240)):
        (folder / str(step)).mkdir(parents=True)
        rows = []
        for j in reversed(range(12)):
            name = f"{step}/val0_{j}.png"
            Image.fromarray(np.full((8, 8), shade, np.uint8)).save(folder / name)
            rows.append({"uid": "val0", "sample": j, "image": name})
        (folder / f"{step}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (before, first), (after, last) = curves.validation_dumps(folder, count=6)
    assert (first, last) == ("step 0", "step 12")
    assert before.shape == after.shape == (9, 54, 3)
    assert before[4, 4, 0] == 10 and after[4, 4, 0] == 240
    assert curves.draw_before_after(tmp_path, tmp_path / "both.png").is_file()


def test_curve_command_ends_with_the_very_line(log, run_dir, tmp_path, capsys):
    out = tmp_path / "out"
    assert main.main(["bench", "curve", "--log", str(log), "--run-dir", str(run_dir), "--out", str(out)]) == 0
    printed = capsys.readouterr().out.rstrip().splitlines()
    assert LAST_LINE.fullmatch(printed[-1])
    for name in ("curve.png", "before_after.png"):
        assert (out / name).is_file() and any(str(out / name) in line for line in printed)


def test_follow_prints_each_step_once_and_ends_with_the_process(log, capsys):
    import subprocess
    import sys

    gone = subprocess.Popen([sys.executable, "-c", "pass"])
    gone.wait()
    assert main.main(["bench", "follow", "--log", str(log), "--pid", str(gone.pid)]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert len(printed) == 7
    assert printed[0] == "step 0  validation accuracy 0.500"
    assert printed[3] == "step 3  reward 0.650  validation accuracy 0.680  2.0 s"


def test_series_leaves_out_steps_without_the_metric(log):
    assert [step for step, _ in series(read_log(log), "timing_s/testing")] == [3, 6]
