"""Which checkpoint a run goes on from, and that a kill at any moment leaves one (I9)."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from verl_digen.trainer import resume
from verl_digen.trainer.resume import find_checkpoint, save_trainer


class Killed(BaseException):
    """Stands for SIGKILL: nothing after it runs."""


def trainer(root: Path, step: int = 0, *, prompts: int = 2, **options) -> SimpleNamespace:
    def save(path, _, step):
        Path(path).mkdir()
        (Path(path) / "state.json").write_text(str(step))

    values = {"default_local_dir": str(root), "resume_mode": "auto", "resume_from_path": None, **options}
    section = SimpleNamespace(**values, get=values.get)
    return SimpleNamespace(
        config=SimpleNamespace(trainer=section, data={"shuffle": True}),
        plan=SimpleNamespace(seed=1, prompts=prompts, n=4),
        train_dataset=[{"prompt": "a"}, {"prompt": "b"}],
        global_steps=step,
        actor_rollout_wg=SimpleNamespace(workers=[SimpleNamespace(save_checkpoint=SimpleNamespace(remote=save))]),
        _wait=lambda calls, doing: calls,
    )


def test_the_newest_is_found_and_sets_the_step(tmp_path):
    fresh = trainer(tmp_path, 99)
    assert find_checkpoint(fresh) is None and fresh.global_steps == 0
    save_trainer(trainer(tmp_path, 9))
    save_trainer(trainer(tmp_path, 10))
    resumed = trainer(tmp_path)
    assert find_checkpoint(resumed) == tmp_path / "global_step_10" and resumed.global_steps == 10
    assert find_checkpoint(trainer(tmp_path, resume_mode="disable")) is None
    older = trainer(tmp_path, resume_mode="resume_path", resume_from_path=str(tmp_path / "global_step_9"))
    assert find_checkpoint(older) == tmp_path / "global_step_9" and older.global_steps == 9


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"resume_mode": "newest"}, "resume_mode='newest'"),
        ({"resume_mode": "resume_path"}, "needs trainer.resume_from_path"),
        ({"resume_mode": "resume_path", "resume_from_path": "nowhere"}, "run.json is missing"),
        ({"prompts": 3}, "prompts_per_step: 2 -> 3"),
    ],
)
def test_what_cannot_be_resumed_is_refused(tmp_path, options, words):
    save_trainer(trainer(tmp_path, 3))
    with pytest.raises(ValueError, match=words):
        find_checkpoint(trainer(tmp_path, **options))


@pytest.mark.parametrize("moment", ["writing", "syncing", "renaming", "tracking"])
@pytest.mark.parametrize("again", [False, True], ids=["next step", "same step again"])
def test_a_kill_at_any_moment_leaves_a_checkpoint(tmp_path, monkeypatch, moment, again):
    save_trainer(trainer(tmp_path, 4))
    doomed = trainer(tmp_path, 4 if again else 5)
    replaced = []

    def kill(*_):
        raise Killed

    def replace(source, target):
        replaced.append(Path(target).name)
        if (moment, len(replaced)) in {("renaming", 1), ("tracking", 2)}:
            raise Killed
        os.rename(source, target)

    if moment == "writing":
        doomed.actor_rollout_wg.workers[0].save_checkpoint.remote = kill
    if moment == "syncing":
        monkeypatch.setattr(resume, "_sync", kill)
    monkeypatch.setattr(resume.os, "replace", replace)
    with pytest.raises(Killed):
        save_trainer(doomed)
    monkeypatch.undo()
    if again and moment == "renaming":
        # the one moment without a checkpoint under its name: refused, never a silent start from nothing
        with pytest.raises(ValueError, match="names step 4, but global_step_4 is not there"):
            find_checkpoint(trainer(tmp_path))
        return
    resumed = trainer(tmp_path)
    assert find_checkpoint(resumed) == tmp_path / "global_step_4" and resumed.global_steps == 4
    save_trainer(trainer(tmp_path, 5))  # what is left of the attempt is no obstacle
    assert find_checkpoint(trainer(tmp_path)) == tmp_path / "global_step_5"
    assert not list(tmp_path.glob(".partial*"))


def test_pruning_leaves_other_folders_and_the_newest_alone(tmp_path):
    for name in ("global_step_3_copy", "global_step_best", "grids", "global_step_90"):
        (tmp_path / name).mkdir()
    for step in (1, 2, 3):
        save_trainer(trainer(tmp_path, step, max_actor_ckpt_to_keep=1))
    left = sorted(p.name for p in tmp_path.iterdir() if p.is_dir())
    assert left == ["global_step_3", "global_step_3_copy", "global_step_90", "global_step_best", "grids"]
