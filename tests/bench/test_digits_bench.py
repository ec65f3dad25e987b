"""The bench command without any run: modes, order, figures from fake logs, what happens to the processes of a run."""

from __future__ import annotations

import json
import sys

import psutil
import pytest
import yaml

from verl_digen.bench import digits
from verl_digen.bench.digits import MODES, Measurement, Plan, order_of_runs, read_measurement, report, run_command
from verl_digen.bench.processes import RunFailed, Watched, kind_of, watch
from verl_digen.cli import bench as cli
from verl_digen.cli import main
from verl_digen.schedule.measure import Measured
from verl_digen.shipped import shipped

KEYS = {"mode", "step_s", "ratio_to_floor", "samples_per_s"}


def _plan(tmp_path, *modes, **options) -> Plan:
    return Plan(modes=modes, recipes=shipped("recipes"), out=tmp_path, **options)


def _measured(mode: str, *step_s: float, **options) -> Measurement:
    return Measurement(mode=mode, step_s=list(step_s), start_s=30.0, **options)


# ---- modes -------------------------------------------------------------------------------------------------


def test_unknown_mode_lists_the_modes(tmp_path, capsys):
    assert main.main(["bench", "digits", "--modes", "floor,turbo", "--out", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert "'turbo'" in error and all(mode in error for mode in MODES)


@pytest.mark.parametrize("modes", [(), ("gap", "gap")])
def test_no_mode_or_one_twice_is_refused(tmp_path, modes):
    with pytest.raises(ValueError, match="each once"):
        _plan(tmp_path, *modes)


@pytest.mark.parametrize("option", [{"steps": 0}, {"warmup": -1}, {"rounds": 0}])
def test_sizes_are_checked(tmp_path, option):
    with pytest.raises(ValueError, match=f"{next(iter(option))} must be at least"):
        _plan(tmp_path, "floor", **option)


def test_every_mode_is_a_recipe_that_resolves(tmp_path):
    """Overrides of each mode are composed and checked as a run would check them."""
    from verl_digen.bench.workload import compose_recipe, prepare
    from verl_digen.config.plan import resolve_plan

    data = prepare(tmp_path / "data")
    wanted = {
        "colocated": ("colocated", True, False),
        "disaggregated": ("disaggregated", True, False),
        "one-shot": ("disaggregated", True, False),
        "gap": ("disaggregated", False, False),
        "gap+tsp": ("disaggregated", False, True),
    }
    for mode, expected in wanted.items():
        plan = resolve_plan(compose_recipe(shipped("recipes"), (f"recipe.digits_dir={data}", *MODES[mode])))
        assert (plan.digen.placement, plan.one_shot, plan.digen.tsp.enable) == expected, mode


def test_the_callers_overrides_come_last(tmp_path):
    command = run_command("gap", tmp_path, _plan(tmp_path, "gap", steps=3, warmup=1), ("data.train_batch_size=4",))
    assert command[1:3] == ["-m", "verl.trainer.main_ppo"]
    assert "trainer.total_training_steps=4" in command and "trainer.v1.digen.gap.enable=true" in command
    assert command[-1] == "data.train_batch_size=4"


def test_order_alternates_between_floors():
    assert order_of_runs(("floor", "a", "b"), 1) == ["floor", "a", "b", "floor"]
    assert order_of_runs(("a", "floor", "b"), 2) == ["floor", "a", "b", "floor", "b", "a", "floor"]
    assert order_of_runs(("a",), 2) == ["a", "a"]


# ---- figures -----------------------------------------------------------------------------------------------


def test_measurement_from_a_log(tmp_path):
    """Warm-up left out, start-up time from the arrival of the first line, wall time between the lines."""
    log = tmp_path / "metrics.jsonl"
    seconds = [9.0, 5.0, 4.0, 4.2]
    log.write_text(
        "".join(
            json.dumps({"step": i + 1, "data": {"timing_s/step": s, "timing_s/gen": s / 4}}) + "\n"
            for i, s in enumerate(seconds)
        )
    )
    seen = Watched(started=100.0, arrivals=[149.0, 154.5, 159.0, 163.5], memory_mb={"replica": 600.0})
    found = read_measurement("gap", log, seen, warmup=2)
    assert found.step_s == [4.0, 4.2]
    assert found.start_s == pytest.approx(40.0)
    assert found.wall_step_s == pytest.approx([4.5, 4.5])
    assert found.phases == {"gen": pytest.approx(1.025)}
    with pytest.raises(ValueError, match="4 steps in 4 lines"):
        read_measurement("gap", log, seen, warmup=4)


def test_rows_have_the_keys_and_ratios_to_the_median_floor(tmp_path):
    plan = _plan(tmp_path, "floor", "colocated", "gap", rounds=2)
    found = report(
        [
            _measured("floor", 2.0, 2.0, 8.0),
            _measured("colocated", 2.4, 2.5, 2.6, memory_mb={"driver": 500.0}, processes={"driver": 1}),
            _measured("gap", 1.5),
            _measured("floor", 2.2),
            _measured("gap", 1.7),
            _measured("colocated", 2.7, memory_mb={"driver": 520.0, "replica": 1.0}, processes={"driver": 1}),
            _measured("floor", 1.9),
        ],
        plan,
        samples=160,
    )
    rows = found["rows"]
    assert [row["mode"] for row in rows] == ["floor", "colocated", "gap"]
    assert all(row.keys() >= KEYS for row in rows)
    assert [row["step_s"] for row in rows] == pytest.approx([2.0, 2.6, 1.6])
    assert [row["ratio_to_floor"] for row in rows] == pytest.approx([1.0, 1.3, 0.8])
    assert [row["samples_per_s"] for row in rows] == pytest.approx([80.0, 160 / 2.6, 100.0])
    assert rows[1]["memory_mb"] == {"driver": 520.0, "replica": 1.0} and rows[1]["rounds"] == 2
    assert found["floor_drift"] == pytest.approx(0.3 / 2.0)
    json.dumps(found)


def test_without_a_floor_there_is_no_ratio(tmp_path):
    (row,) = report([_measured("gap", 1.5)], _plan(tmp_path, "gap"), samples=160)["rows"]
    assert row["ratio_to_floor"] is None and row["step_s"] == 1.5


@pytest.mark.parametrize("as_json", [False, True])
def test_command_prints_a_table_or_json(tmp_path, monkeypatch, capsys, as_json):
    """The whole command, with measurements in place of runs."""
    monkeypatch.setattr(digits, "_measure_floor", lambda spec, folder, plan: _measured("floor", 2.0))
    costs = Measured()
    costs.denoise.observe(4, 0.004)
    costs.tile.observe(4, 0.012)

    def measure_mode(mode, folder, plan, overrides):
        (folder / "traces").mkdir()
        (folder / "traces" / "costs.yaml").write_text(yaml.safe_dump({"measured": costs.state_dict()}))
        return _measured(mode, 2.5, memory_mb={"driver": 1.0}, processes={"driver": 1})

    monkeypatch.setattr(digits, "measure_mode", measure_mode)
    monkeypatch.setattr(cli.signal, "signal", lambda *_: None)
    arguments = ["bench", "digits", "--modes", "floor,gap", "--out", str(tmp_path), "actor_rollout_ref.rollout.n=4"]
    assert main.main(arguments + ["--json"] * as_json) == 0
    printed = capsys.readouterr()
    assert "run 3/3: floor" in printed.err
    if as_json:
        found = json.loads(printed.out)
        assert [row["mode"] for row in found["rows"]] == ["floor", "gap"]
        row = found["rows"][1]
        assert row["ratio_to_floor"] == 1.25 and found["samples_per_step"] == 40
        # 10 groups of 4: a group takes 10 steps of 4 ms to generate and 9 tiles of 12 ms to train, one after another
        assert row["predicted_s"] == pytest.approx(0.04 + 10 * 9 * 0.012)
        assert row["bound_s"] <= row["predicted_s"] * (1 + 1e-9)
        assert row["deviation"] == pytest.approx(2.5 / row["predicted_s"] - 1)
    else:
        assert "1.250" in printed.out and "drift 0.0%" in printed.out
    assert len((tmp_path / "measurements.jsonl").read_text().splitlines()) == 3


# ---- processes ---------------------------------------------------------------------------------------------


def test_kinds_of_processes():
    assert kind_of("ray::DiffusionActorWorker.accumulate") == "trainer_worker"
    assert kind_of("ray::DiffusionRolloutWorker") == "replica"
    assert kind_of("ray::IDLE") == "ray_idle" and kind_of("ray::DashboardAgent") == "ray_system"
    assert kind_of("python -m verl.trainer.main_ppo --config-name digits") == "driver"
    assert kind_of("/lib/python/site-packages/ray/core/src/ray/raylet/raylet --x") == "ray_system"


def _script(tmp_path, text: str) -> list[str]:
    file = tmp_path / "run.py"
    file.write_text(text)
    return [sys.executable, str(file)]


# a grandchild in a session of its own, as Ray's workers are, that ignores the polite signals
CHILD = """
import os, subprocess, sys, time
code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
child = subprocess.Popen([sys.executable, "-c", code], start_new_session=True)
open("child.pid", "w").write(str(child.pid))
"""


def _gone(pid: int) -> bool:
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def test_watch_follows_the_log_and_measures(tmp_path):
    lines: list[str] = []
    command = _script(
        tmp_path,
        "import time\nfor i in range(3):\n    print(i, file=open('log', 'a'), flush=True)\n    time.sleep(0.3)\n",
    )
    seen = watch(
        command, cwd=tmp_path, output=tmp_path / "output", log=tmp_path / "log", timeout_s=60, on_line=lines.append
    )
    assert lines == ["0", "1", "2"]
    assert len(seen.arrivals) == 3 and seen.arrivals == sorted(seen.arrivals) and seen.arrivals[0] > seen.started
    assert seen.memory_mb["other"] > 0 and seen.processes["other"] == 1


def test_a_failed_run_shows_its_last_lines_and_leaves_no_process(tmp_path, monkeypatch):
    monkeypatch.setattr("verl_digen.bench.processes.ENDING_S", 1.5)
    command = _script(tmp_path, CHILD + "print('the reason')\nsys.exit(3)\n")
    with pytest.raises(RunFailed, match=r"ended with status 3(.|\n)*the reason"):
        watch(command, cwd=tmp_path, output=tmp_path / "output", timeout_s=60)
    assert _gone(int((tmp_path / "child.pid").read_text()))


def test_a_run_that_is_interrupted_or_late_leaves_no_process(tmp_path, monkeypatch):
    monkeypatch.setattr("verl_digen.bench.processes.ENDING_S", 1.5)
    command = _script(tmp_path, CHILD + "print('line', file=open('log', 'a'), flush=True)\ntime.sleep(600)\n")
    with pytest.raises(RunFailed, match="did not end within 2 s"):
        watch(command, cwd=tmp_path, output=tmp_path / "output", timeout_s=2)
    assert _gone(int((tmp_path / "child.pid").read_text()))

    def interrupt(_):
        raise KeyboardInterrupt

    (tmp_path / "log").unlink()
    with pytest.raises(KeyboardInterrupt):  # not RunFailed: the child is not waited for
        watch(command, cwd=tmp_path, output=tmp_path / "output", log=tmp_path / "log", timeout_s=60, on_line=interrupt)
    assert _gone(int((tmp_path / "child.pid").read_text()))
