"""A run's folder with the files that a real run writes, settings and traces by the same writers; nothing is trained."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
from omegaconf import OmegaConf

from verl_digen.schedule.trace import Trace, write_chrome_trace
from verl_digen.trainer.about import write_about

PLAN = [("mode", "disaggregated + GAP + TSP"), ("step", "10 prompts x 16 samples = 160 samples")]
HOSTILE = "</script><script>document.title='taken'</script><img src=x onerror=\"document.title='taken'\">"


def write_metrics(file: Path, steps: int = 20, every: int = 5) -> Path:
    """Metrics as veRL's file logger writes them: a validation first, then steps, some with a validation."""

    def validation(step: int) -> dict[str, float]:
        done = step / steps
        return {
            "val-core/digits/acc/mean@20": 0.5 + 0.45 * done,
            "val-aux/digits/acc/best@20/mean": 0.99,
            "val-aux/digits/digit_quality/judge_svm": 0.5 + 0.4 * done,
            "val-aux/digits/digit_quality/judge_knn": 0.5 + 0.38 * done,
            "val-aux/digits/digit_quality/distance": 1.95 - 0.3 * done,
            "val-aux/digits/digit_quality/spread": 0.19 - 0.08 * done,
        }

    rows = [{"step": 0, "data": validation(0)}]
    for step in range(1, steps + 1):
        data = {
            "training/global_step": step,
            "reward/mean": 0.45 + 0.4 * step / steps,
            "reward/group_std_mean": 0.3 - 0.1 * step / steps,
            "reward/zero_std_ratio": 0.0,
            "actor/kl": 0.002 * step,
            "actor/approx_kl": 1e-9,
            "actor/clip_high": 0.0,
            "actor/clip_low": 0.0,
            "actor/grad_norm": 0.03 + 0.01 * (step % 3),
            "actor/lr": 5e-4,
            "actor/log_prob_gap_max": 2e-7,
            "actor/log_prob_gap_mean": 1e-7,
            "timing_s/step": 5.0 + step % 2,
            "timing_s/gen": 2.0,
            "timing_s/update_actor": 2.5,
            "timing_s/update_weights": 0.1,
            "bubble/trainer_wait_for_generation_s": 1.0,
            "bubble/generator_wait_for_training_s": 2.0,
            "perf/utilisation_generator": 0.6,
            "perf/utilisation_trainer": 0.7,
            "perf/samples_per_s": 29.0,
        }
        rows.append({"step": step, "data": data | (validation(step) if step % every == 0 else {})})
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def write_grid(folder: Path, step: int) -> None:
    from PIL import Image

    (folder / "grids").mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.full((160, 400), 10 * step, np.uint8)).save(folder / "grids" / f"step_{step:05d}.png")


def write_trace(folder: Path, step: int) -> None:
    trace = Trace(source="measured", devices={"replica0": 1, "trainer": 1})
    for i in range(4):
        trace.work("replica0", "generate", i, i + 0.9, f"fragment {i}, 4 samples")
        trace.work("trainer", "train", i + 1, i + 1.8, "36 cells")
        trace.work("reward", "score", i + 0.9, i + 0.95)
    trace.work("trainer", "commit", 4.8, 4.9)
    trace.work("publish", "publish", 4.9, 5.0)
    trace.bubble("trainer", "trainer: wait for generation", 0, 1)
    (folder / "traces").mkdir(parents=True, exist_ok=True)
    write_chrome_trace(trace, folder / "traces" / f"step_{step:05d}.json")


def write_run(folder: Path, *, name: str = "flow_grpo") -> Path:
    """A whole run: metrics (in the folder beside), grids, traces, settings."""
    trainer = {
        "project_name": "digits",
        "experiment_name": name,
        "default_local_dir": str(folder),
        "logger": ["console", "file"],
        "total_training_steps": 20,
        "v1": {"digen": {"placement": "disaggregated", "gap": {"enable": True}}},
    }
    actor = {"clip_ratio": 1e-3, "optim": {"lr": 5e-4}}
    config = OmegaConf.create({"trainer": trainer, "actor_rollout_ref": {"actor": actor}})
    file = write_about(SimpleNamespace(config=config), PLAN)
    about = json.loads(file.read_text())
    about["metrics_log"] = str(write_metrics(folder.parent / "log" / "metrics.jsonl"))
    file.write_text(json.dumps(about))
    for step in (0, 10, 20):
        write_grid(folder, step)
    for step in (10, 20):
        write_trace(folder, step)
    return folder
