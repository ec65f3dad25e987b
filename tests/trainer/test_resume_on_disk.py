"""Which checkpoint a run goes on from, and that a kill at any moment leaves one (I9)."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from verl_digen.trainer import resume
from verl_digen.trainer.resume import find_checkpoint, run_state, save_run


class Killed(BaseException):
    """Stands for SIGKILL: nothing after it runs."""


class Saver:
    """A run that has nothing but its checkpoints."""

    def __init__(self, root: Path, step: int = 0, *, prompts: int = 2, **options):
        values = {"default_local_dir": str(root), "resume_mode": "auto", "resume_from_path": None, **options}
        self.config = SimpleNamespace(**values, get=values.get)
        plan = SimpleNamespace(seed=1, prompts=prompts, n=4)
        self.state = run_state(plan, [{"prompt": "a"}, {"prompt": "b"}], shuffle=True, step=step)

    def write(self, folder: Path) -> None:
        folder.mkdir()
        (folder / "state.json").write_text(str(self.state["global_steps"]))

    def save(self) -> None:
        save_run(self.config, self.state, self.write)

    def find(self):
        return find_checkpoint(self.config, self.state)


def test_the_newest_is_found_and_sets_the_step(tmp_path):
    assert Saver(tmp_path, 99).find() is None
    Saver(tmp_path, 9).save()
    Saver(tmp_path, 10).save()
    assert Saver(tmp_path).find() == (tmp_path / "global_step_10", 10)
    assert Saver(tmp_path, resume_mode="disable").find() is None
    older = Saver(tmp_path, resume_mode="resume_path", resume_from_path=str(tmp_path / "global_step_9"))
    assert older.find() == (tmp_path / "global_step_9", 9)


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
    Saver(tmp_path, 3).save()
    with pytest.raises(ValueError, match=words):
        Saver(tmp_path, **options).find()


@pytest.mark.parametrize("moment", ["writing", "syncing", "renaming", "tracking"])
@pytest.mark.parametrize("again", [False, True], ids=["next step", "same step again"])
def test_a_kill_at_any_moment_leaves_a_checkpoint(tmp_path, monkeypatch, moment, again):
    Saver(tmp_path, 4).save()
    doomed = Saver(tmp_path, 4 if again else 5)
    replaced = []

    def kill(*_):
        raise Killed

    def replace(source, target):
        replaced.append(Path(target).name)
        if (moment, len(replaced)) in {("renaming", 1), ("tracking", 2)}:
            raise Killed
        os.rename(source, target)

    if moment == "writing":
        doomed.write = kill
    if moment == "syncing":
        monkeypatch.setattr(resume, "_sync", kill)
    monkeypatch.setattr(resume.os, "replace", replace)
    with pytest.raises(Killed):
        doomed.save()
    monkeypatch.undo()
    if again and moment == "renaming":
        # the one moment without a checkpoint under its name: refused, never a silent start from nothing
        with pytest.raises(ValueError, match="names step 4, but global_step_4 is not there"):
            Saver(tmp_path).find()
        return
    assert Saver(tmp_path).find() == (tmp_path / "global_step_4", 4)
    Saver(tmp_path, 5).save()  # what is left of the attempt is no obstacle
    assert Saver(tmp_path).find() == (tmp_path / "global_step_5", 5)
    assert not list(tmp_path.glob(".partial*"))


def test_higher_numbers_of_an_older_run_are_not_counted_as_newest(tmp_path):
    for step in (80, 90):
        Saver(tmp_path, step).save()
    for step in (1, 2, 3):
        Saver(tmp_path, step, max_actor_ckpt_to_keep=2).save()
    assert sorted(p.name for p in tmp_path.glob("global_step_*")) == [f"global_step_{n}" for n in (2, 3, 80, 90)]
    assert Saver(tmp_path).find() == (tmp_path / "global_step_3", 3)


def test_pruning_leaves_other_folders_and_the_newest_alone(tmp_path):
    for name in ("global_step_3_copy", "global_step_best", "grids", "global_step_90"):
        (tmp_path / name).mkdir()
    for step in (1, 2, 3):
        Saver(tmp_path, step, max_actor_ckpt_to_keep=1).save()
    left = sorted(p.name for p in tmp_path.iterdir() if p.is_dir())
    assert left == ["global_step_3", "global_step_3_copy", "global_step_90", "global_step_best", "grids"]
