"""Every model family through the real trainer: two steps on a tiny random model in the dtypes of its recipe.

Two FSDP2 ranks, three replicas, GAP + TSP, prompts of unlike length, gradient checkpointing. Trainer and rollout must
give the same log-probs against the clip range (I11), and the checkpoint must load in the stock pipeline. What is not
covered: learning (the models are random) and devices.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

import diffusers
import numpy as np
import pytest
import torch
from PIL import Image

from tests.e2e.harness import relative_difference
from verl_digen.cli.main import main
from verl_digen.models.tiny import build_tiny

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

LORA = ["actor_rollout_ref.model.lora_rank=4", "actor_rollout_ref.model.lora_alpha=8"]
VIDEO = ["trainer.v1.digen.sampling.num_frames=5"]
# family -> options of its recipe that matter here, and the clip range of the recipe
CASES = {
    "sd3": ([*LORA, "trainer.v1.digen.sampling.guidance_scale=4.5"], 1e-4),
    "flux": ([*LORA, "trainer.v1.digen.sampling.embedded_guidance=3.5"], 1e-4),
    "qwen_image": (
        ["trainer.v1.digen.sampling.guidance_scale=4.0", "trainer.v1.digen.sampling.guidance_rescale=true"],
        1e-5,
    ),
    "wan": ([*VIDEO, "trainer.v1.digen.sampling.guidance_scale=4.5"], 1e-3),
    "hunyuan_video": ([*VIDEO, *LORA, "trainer.v1.digen.sampling.embedded_guidance=6.018"], 1e-4),
}
COMMON = [
    "actor_rollout_ref.model.dtype=bfloat16",
    "actor_rollout_ref.model.enable_gradient_checkpointing=true",
    "trainer.v1.digen.arithmetic=float32",
    "trainer.v1.digen.sampling.height=32",
    "trainer.v1.digen.sampling.width=48",
    "trainer.v1.digen.validation.grid_samples=2",
    "~trainer.v1.digen.rewards.digit_classifier",
    "+trainer.v1.digen.rewards.jpeg_compressibility.weight=1.0",
    "trainer.v1.digen.gap.enable=true",
    "trainer.v1.digen.tsp.enable=true",
    "trainer.total_training_steps=2",
    "trainer.save_freq=2",
    "trainer.test_freq=2",
]


@pytest.mark.parametrize("family", CASES)
def test_two_steps_and_an_export(pools, family, tmp_path):
    options, clip = CASES[family]
    model = build_tiny(family, tmp_path / "model")
    run = pools.again(tuning=[f"actor_rollout_ref.model.path={model}", *COMMON, *options])
    before = run.weights()
    run.fit()
    steps = run.steps()
    assert len(steps) == 2 and relative_difference(before, run.weights()) > 0
    for step in steps:
        assert math.isfinite(step["actor/grad_norm"]) and step["actor/grad_norm"] > 0
        assert step["actor/log_prob_gap_max"] <= clip
    lengths = {len(prompt.split()) for prompt in _prompts(run)}
    assert len(lengths) > 1

    folder = run.trainer.config.trainer.default_local_dir
    out = tmp_path / "exported"
    assert main(["export", f"{folder}/global_step_2", "--out", str(out)]) == 0
    cls = getattr(diffusers, json.loads((model / "model_index.json").read_text())["_class_name"])
    if LORA[0] in options:
        pipeline = cls.from_pretrained(model)
        pipeline.load_lora_weights(out)
        own = dict(pipeline.transformer.named_parameters())
        loaded = {name: p for name, p in own.items() if "lora_" in name}
        assert len(loaded) == len(run.weights())
        assert any(p.abs().max() > 0 for name, p in loaded.items() if "lora_B" in name)
    else:
        pipeline = cls.from_pretrained(out)
        for name, weight in run.weights().items():
            torch.testing.assert_close(dict(pipeline.transformer.named_parameters())[name], weight)
    grid = np.asarray(Image.open(next((Path(folder) / "grids").glob("*.png"))))
    assert grid.std() > 0
    assert bool(list((Path(folder) / "grids").glob("*.gif"))) == (VIDEO[0] in options)


def _prompts(run) -> list[str]:
    return [group.prompt for group in run.trainer._groups_of_step(1)]
