"""Files of a step's timeline: Chrome trace, picture, and the measured costs as a workload file."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml

from verl_digen.config.plan import RunPlan
from verl_digen.planner.timeline import draw_timeline
from verl_digen.schedule.measure import Measured
from verl_digen.schedule.trace import Trace, write_chrome_trace

FOLDER = "traces"
COSTS = "costs.yaml"


def workload_file(plan: RunPlan, measured: Measured, step: int, reward_workers: int) -> dict[str, Any]:
    """What ``verl-digen simulate`` and ``plan`` read: the workload of the run and the costs measured in it.

    ``measured`` holds the same costs by load, so that those of several runs can be put together.
    """
    return {
        "source": f"measured in a live run until step {step}, on its own devices (speed 1)",
        "workload": {
            "name": "live",
            "groups": plan.prompts,
            "samples_per_group": plan.n,
            "denoise_steps": plan.digen.sampling.num_steps,
            "trained_transitions": plan.transitions,
            "logical_batches": plan.logical_batches,
        },
        "costs": asdict(measured.profile()),
        "reward_slots": reward_workers * plan.fragment_size,
        "measured": measured.state_dict(),
    }


def write_step_trace(trainer, trace: Trace, step: int) -> None:
    """Write ``traces/step_N.json`` (opens in Perfetto), ``traces/step_N.png`` and ``traces/costs.yaml``."""
    folder = Path(trainer.config.trainer.default_local_dir) / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    write_chrome_trace(trace, folder / f"step_{step:05d}.json")
    draw_timeline([(f"step {step}", trace)], folder / f"step_{step:05d}.png")
    workers = len(trainer.reward_loop_manager.reward_loop_workers)
    file = workload_file(trainer.plan, trainer.measured, step, workers)
    (folder / COSTS).write_text(yaml.safe_dump(file, sort_keys=False))
