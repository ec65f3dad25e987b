"""I9: a run that was stopped, also by SIGKILL or SIGINT, goes on bit for bit."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import load_file

from tests.e2e.harness import RECIPES, SMALL

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

KEEP = ["actor_rollout_ref.actor.checkpoint.save_contents=[model,optimizer,extra,hf_model]"]
OPTIONS = [
    *KEEP,
    "trainer.save_freq=1",
    "trainer.v1.digen.ema.enable=true",
    "trainer.v1.digen.ema.every=1",
    "actor_rollout_ref.actor.optim.lr_scheduler_type=cosine",
    "actor_rollout_ref.actor.optim.lr_warmup_steps=2",
]
STRAIGHT = 16  # steps of the run that nobody stops; each leaves a checkpoint
MORE = 2  # steps after resuming
HORIZON = f"trainer.total_training_steps={STRAIGHT + 400}"  # of the LR schedule, the same for all
# an engine of the default precision in the processes that tests share
TUNING = ["trainer.v1.digen.arithmetic=float32", "actor_rollout_ref.model.dtype=float32", *OPTIONS, HORIZON]


def same_bits(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


@pytest.fixture(scope="module")
def straight():
    """Checkpoints of the run that nobody stops."""
    return {}


def exported(folder: Path, step: int) -> dict[str, torch.Tensor]:
    return load_file(folder / f"global_step_{step}" / "actor" / "transformer" / "diffusion_pytorch_model.safetensors")


def start_process(digits_dir: Path, folder: Path, *overrides: str) -> subprocess.Popen:
    """The run as a user starts it, on a Ray cluster of its own."""
    folder.mkdir(parents=True, exist_ok=True)
    environment = {**os.environ, "VERL_FILE_LOGGER_PATH": str(folder / "log.jsonl"), "PYTHONUNBUFFERED": "1"}
    environment.pop("RAY_ADDRESS", None)
    with open(folder / "output.txt", "a") as output:
        return subprocess.Popen(
            [
                *(sys.executable, "-m", "verl.trainer.main_ppo"),
                *("--config-dir", str(RECIPES), "--config-name", "digits"),
                f"recipe.digits_dir={digits_dir}",
                f"trainer.default_local_dir={folder}",
                *SMALL,
                *OPTIONS,
                HORIZON,
                *overrides,
            ],
            env=environment,
            cwd=folder,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            # a shell's background job ignores it, and Python would then raise nothing
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )


def wait_for_step(process: subprocess.Popen, folder: Path, step: int, seconds: float = 300) -> None:
    deadline = time.monotonic() + seconds
    log = folder / "log.jsonl"
    while time.monotonic() < deadline:
        assert process.poll() is None, (folder / "output.txt").read_text()[-4000:]
        if log.exists() and any(
            json.loads(line)["data"].get("training/global_step", 0) >= step for line in log.read_text().splitlines()
        ):
            return
        time.sleep(0.2)
    raise AssertionError(f"step {step} was not reached in {seconds} s: {(folder / 'output.txt').read_text()[-4000:]}")


def family_tree(process: subprocess.Popen) -> list[psutil.Process]:
    root = psutil.Process(process.pid)
    return [root, *root.children(recursive=True)]


def test_stopped_twice_and_resumed_twice_equals_straight(one, digits_dir, tmp_path, straight):
    """SIGINT after the second step; resumed, SIGKILL two steps later; resumed again, in the processes of the first."""
    run = one.again(tuning=TUNING)
    run.trainer.total_training_steps = STRAIGHT
    run.fit()
    known = {s["training/global_step"]: s for s in run.steps()}
    straight["folder"] = Path(run.config.trainer.default_local_dir)

    folder = tmp_path / "stopped"
    stop_process(start_process(digits_dir, folder), folder, "SIGINT", 2)
    saved = max(int(path.name.rpartition("_")[2]) for path in folder.glob("global_step_*"))
    os.rename(folder / "log.jsonl", folder / "log_1.jsonl")
    stop_process(start_process(digits_dir, folder, "trainer.resume_mode=auto"), folder, "SIGKILL", saved + 2)
    middle = [json.loads(line)["data"] for line in (folder / "log.jsonl").read_text().splitlines()]
    middle = [row for row in middle if "training/global_step" in row]
    assert middle[0]["training/global_step"] == saved + 1  # nothing was done twice, nothing left out

    run = one.again("trainer.resume_mode=auto", f"trainer.default_local_dir={folder}", tuning=TUNING)
    resumed_at = run.trainer.global_steps
    last = resumed_at + MORE
    assert resumed_at >= saved + 2 and last <= STRAIGHT
    run.trainer.total_training_steps = last
    run.fit()
    assert [s["training/global_step"] for s in run.steps()] == list(range(resumed_at + 1, last + 1))
    for step in [*middle, *run.steps()]:
        number = step["training/global_step"]
        for name in ("reward/mean", "actor/grad_norm", "actor/lr"):
            assert step[name] == known[number][name], (number, name)
    assert same_bits(exported(folder, last), exported(straight["folder"], last)), f"weights differ at {last}"


def stop_process(process: subprocess.Popen, folder: Path, how: str, step: int) -> None:
    """Stop a run after a step, and see that nothing of it is left running."""
    wait_for_step(process, folder, step)
    members = family_tree(process)
    if how == "SIGINT":
        process.send_signal(signal.SIGINT)
        process.wait(timeout=60)
        _, alive = psutil.wait_procs(members, timeout=30)
        assert not alive, f"left running: {[p.cmdline()[:3] for p in alive]}"
        return
    for member in members:
        if member.is_running():
            member.kill()
    process.wait(timeout=30)


def test_another_runs_checkpoint_is_refused_before_a_device_is_taken(launch, straight):
    assert straight, "the tests above leave a checkpoint"
    with pytest.raises(ValueError, match=r"seed: 42 -> 7") as caught:
        launch("data.seed=7", "trainer.resume_mode=auto", f"trainer.default_local_dir={straight['folder']}")
    assert "trainer.resume_mode=disable" in str(caught.value)
