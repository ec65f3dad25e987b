"""What a run leaves behind, with most optional parts switched on at once."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import yaml
from PIL import Image

from tests.e2e.harness import RECIPES
from verl_digen.bench.emulated import overrides_of, scaled, write_data
from verl_digen.bench.predict import read_measured
from verl_digen.planner.catalog import read_case

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

CUSTOM = """
def brightness(data_source, solution_image, ground_truth, extra_info, prompt):
    return {"score": float(solution_image.mean()) / 255.0, "bright": float(solution_image.mean() > 60)}
"""


def test_everything_on_at_once(pools, tmp_path, monkeypatch):
    """bf16 with gradient checkpointing, EMA validation, three rewards, fraction of steps, grids, dumps, tensorboard."""
    judge = tmp_path / "judge.py"
    judge.write_text(CUSTOM)
    rollouts, validations, board = tmp_path / "rollouts", tmp_path / "validations", tmp_path / "board"
    monkeypatch.setenv("TENSORBOARD_DIR", str(board))
    options = [
        "trainer.v1.digen.arithmetic=float32",
        "actor_rollout_ref.model.dtype=bfloat16",
        "actor_rollout_ref.model.enable_gradient_checkpointing=true",
        "trainer.v1.digen.preset=digen",
        "trainer.v1.digen.sampling.num_steps=6",
        "trainer.v1.digen.sampling.selection.kind=fraction",
        "trainer.v1.digen.sampling.selection.fraction=0.6",
        "trainer.v1.digen.ema.enable=true",
        "trainer.v1.digen.ema.every=1",
        "trainer.v1.digen.ema.validate=true",
        "trainer.v1.digen.validation.grid_samples=6",
        "+trainer.v1.digen.rewards.jpeg_compressibility={weight: 0.1}",
        f"reward.custom_reward_function.path={judge}",
        "reward.custom_reward_function.name=brightness",
        f"trainer.rollout_data_dir={rollouts}",
        f"trainer.validation_data_dir={validations}",
        "trainer.logger=[file,tensorboard]",
        "trainer.val_before_train=true",
        "trainer.test_freq=2",
        "trainer.v1.digen.trace.every=2",
        "trainer.total_training_steps=2",
    ]
    run = pools.again(tuning=options).fit()
    steps = run.steps()
    assert len(steps) == 2
    for step in steps:
        named = [step[f"reward/extra/reward/{n}"] for n in ("digit_classifier", "jpeg_compressibility", "custom")]
        assert step["reward/mean"] == pytest.approx(named[0] + 0.1 * named[1] + named[2], abs=1e-5)
        assert step["actor/ratio_max_dev"] == 0.0
        assert step["actor/cells"] == 3 * 4 * 3  # floor(0.6 x 5) transitions of 12 samples
        assert step["sync/changed"] == 1.0
        assert sum(value for name, value in step.items() if name.startswith("bubble/")) > 0
        # bf16 on both sides: the same kernel on the same velocities up to the batch geometry, judged by the clip range
        assert step["actor/log_prob_gap_max"] <= run.trainer.plan.clip_low / 10
    validations_logged = [row["data"] for row in run.log if any(k.startswith("val-core/") for k in row["data"])]
    assert len(validations_logged) == 2

    folder = run.config.trainer.default_local_dir
    for step in (0, 2):
        assert Image.open(f"{folder}/grids/step_{step:05d}.png").size[0] > 300
        lines = (validations / f"{step}.jsonl").read_text().splitlines()
        assert len(lines) == len(run.trainer.val_dataset)
    rows = [json.loads(line) for line in (rollouts / "1.jsonl").read_text().splitlines()]
    assert len(rows) == 12
    assert len({(r["uid"], r["sample"]) for r in rows}) == 12
    image = np.asarray(Image.open(rollouts / rows[0]["image"]))
    assert image.shape == (8, 8)
    assert np.std([r["advantage"] for r in rows]) > 0
    assert any(board.rglob("events.out.tfevents.*"))
    # after the validation with averaged weights the replicas hold the trained ones again
    assert not run.trainer.fleet.publisher._averaged

    # the timeline of the second step: every phase, and what was waited for
    traces = Path(folder) / "traces"
    assert sorted(path.name for path in traces.iterdir()) == ["costs.yaml", "step_00002.json", "step_00002.png"]
    events = json.loads((traces / "step_00002.json").read_text())["traceEvents"]
    names = {event["name"] for event in events if event["ph"] == "X"}
    assert names >= {"generate", "decode", "score", "assemble", "fetch", "train", "commit", "publish"}
    assert any(event.get("cat") == "bubble" for event in events)
    # the publish is the last work of the step, and the validation after it, which drew the grid, is no bubble of it
    work = [event for event in events if event["ph"] == "X" and event.get("cat") != "bubble"]
    assert max(work, key=lambda event: event["ts"] + event["dur"])["name"] == "publish"
    assert run.trainer._times.ended < Path(f"{folder}/grids/step_00002.png").stat().st_mtime
    assert read_case(yaml.safe_load((traces / "costs.yaml").read_text())).workload.groups == 3


def test_emulated_devices_run_the_real_control_plane(pools, tmp_path):
    """3 + 2 devices that only take times: samples, rewards, tiles, reductions and publishes are real."""
    file = RECIPES / "workloads" / "wan2.2-5b.yaml"
    case = scaled(read_case(yaml.safe_load(file.read_text())), scale=1000.0, groups=8)
    data = write_data(case, tmp_path / "emulated")
    streaming = ["trainer.v1.digen.preset=digen", "trainer.v1.digen.trace.every=3"]
    run = pools.again(*streaming, tuning=overrides_of(case, data, 3, 2, cells=4)).fit()
    assert [step["actor/cells"] for step in run.steps()] == [8 * 8 * 2] * 3
    assert all(step["sync/changed"] == 1.0 and step["actor/grad_norm"] > 0 for step in run.steps())
    # what the run measured is a profile that the planner and the simulator read
    assert read_measured([Path(run.config.trainer.default_local_dir) / "traces" / "costs.yaml"]).known
