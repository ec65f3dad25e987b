"""A folder belongs to one run at a time; a resumed run keeps its metrics file."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from verl.utils.tracking import FileLogger

from verl_digen.trainer.runfolder import lock_folder, put_log_back, set_log_aside

HOLD = """
import sys
from verl_digen.trainer.runfolder import lock_folder
lock_folder(sys.argv[1])
print("locked", flush=True)
sys.stdin.readline()
"""


def test_a_folder_is_one_runs_until_its_process_ends_however(tmp_path):
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout.readline() == "locked\n"
        with pytest.raises(ValueError, match=f"default_local_dir={tmp_path} belongs to .*process {other.pid} on "):
            lock_folder(tmp_path, grace_s=0.1)
        lock_folder(tmp_path / "another")
        other.kill()
        other.wait()
        lock_folder(tmp_path, grace_s=0.1)
        lock_folder(tmp_path / "another" / ".." / "", grace_s=0.1)  # the same process again
    assert "belongs" not in (tmp_path / ".lock").read_text()


def lines(*steps: int) -> str:
    return "".join(json.dumps({"step": step, "data": {"loss": float(step)}}) + "\n" for step in steps)


@pytest.fixture
def log(tmp_path, monkeypatch):
    path = tmp_path / "metrics.jsonl"
    monkeypatch.setenv("VERL_FILE_LOGGER_PATH", str(path))
    return path


def start(log, resumed_step, *steps):
    """veRL's logger as a run makes it, after ``resumed_step``, with a line for each of ``steps``."""
    set_log_aside(str(log), resumed_step)
    backend = FileLogger("p", "e")
    put_log_back(str(log), backend)
    for step in steps:
        backend.log({"loss": float(step)}, step)
    backend.finish()


def steps_of(log) -> list[int]:
    return [json.loads(line)["step"] for line in log.read_text().splitlines()]


def test_a_resumed_run_keeps_the_lines_up_to_its_checkpoint(log):
    log.write_text(lines(0, 1, 2, 3, 4) + '{"step": 5, "da')
    start(log, 3, 4, 5)
    assert steps_of(log) == [0, 1, 2, 3, 4, 5]
    assert [path.name for path in log.parent.iterdir()] == [log.name]


def test_a_kill_while_the_file_is_empty_loses_no_line(log):
    log.write_text(lines(1, 2, 3))
    set_log_aside(str(log), 2)
    FileLogger("p", "e").finish()  # empties the file; killed before anything is put back
    assert log.read_text() == ""
    start(log, 2, 3)
    assert steps_of(log) == [1, 2, 3]


def test_a_run_that_starts_anew_starts_its_file_anew(log):
    log.write_text(lines(1, 2, 3))
    set_log_aside(str(log), 2)  # by a run that was killed
    start(log, None, 1)
    assert steps_of(log) == [1]


def test_without_a_file_there_is_nothing_to_keep(log):
    start(log, 2, 3)
    assert steps_of(log) == [3]
    set_log_aside(None, 2)
    put_log_back(None, None)
