"""What a run leaves behind, with most optional parts switched on at once."""

from __future__ import annotations

import json

import numpy as np
import pytest
from PIL import Image

from tests.e2e.harness import disaggregated

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

CUSTOM = """
def brightness(data_source, solution_image, ground_truth, extra_info, prompt):
    return {"score": float(solution_image.mean()) / 255.0, "bright": float(solution_image.mean() > 60)}
"""


def test_everything_on_at_once(launch, tmp_path, monkeypatch):
    """bf16 with gradient checkpointing, EMA validation, three rewards, fraction of steps, grids, dumps, tensorboard."""
    judge = tmp_path / "judge.py"
    judge.write_text(CUSTOM)
    rollouts, validations, board = tmp_path / "rollouts", tmp_path / "validations", tmp_path / "board"
    monkeypatch.setenv("TENSORBOARD_DIR", str(board))
    run = launch(
        *disaggregated(2),
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
        steps=2,
    ).fit()
    steps = run.steps()
    assert len(steps) == 2
    for step in steps:
        named = [step[f"reward/extra/reward/{n}"] for n in ("digit_classifier", "jpeg_compressibility", "custom")]
        assert step["reward/mean"] == pytest.approx(named[0] + 0.1 * named[1] + named[2], abs=1e-5)
        assert step["actor/ratio_max_dev"] == 0.0
        assert step["actor/cells"] == 3 * 4 * 3  # floor(0.6 x 5) transitions of 12 samples
        assert step["sync/changed"] == 1.0
        # bf16 on both sides: the same kernel on the same velocities up to the batch geometry
        assert step["actor/log_prob_gap_max"] < 0.05
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
    assert not run.trainer.checkpoint_manager._averaged
