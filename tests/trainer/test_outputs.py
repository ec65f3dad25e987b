"""What a run makes to look at: text is text, unlike extras are kept, and a failure ends no run."""

from __future__ import annotations

import json
import logging
from types import SimpleNamespace

import numpy as np
import pytest
from verl.trainer.ppo.v1.trainer_base import PPOTrainer

from verl_digen.rollout.requests import VALIDATION, GroupResult, PromptGroup, SampleResult
from verl_digen.trainer.outputs import Outputs
from verl_digen.trainer.rewards import build_rewards
from verl_digen.trainer.trainer import DigenTrainer
from verl_digen.trainer.validate import Validator, draw_grid, dump_samples


def group(uid: str, source: str, extras: list[dict], prompt: str = "a seven") -> GroupResult:
    samples = [
        SampleResult(
            uid=uid, j=j, reward=0.25 + j, extra=extra, version=3, replica="r0", transitions=2, noise_hash=f"{uid}{j}"
        )
        for j, extra in enumerate(extras)
    ]
    wanted = PromptGroup(
        uid=uid,
        n=len(extras),
        prompt=prompt,
        negative_prompt="",
        ground_truth="7",
        data_source=source,
        extra_info={},
        partition=VALIDATION,
    )
    return GroupResult(wanted, samples, 3, 0.0)


class Trainer:
    """What validation and dumps read of the trainer."""

    _val_metrics_update = PPOTrainer._val_metrics_update

    def __init__(self, folder, results=(), *, dump: bool = False, batch_size: int | None = None, gap: bool = False):
        self.outputs, self.outcome, self.global_steps, self.validation_metrics = Outputs(), None, 4, {}
        self.config = SimpleNamespace(
            trainer={"default_local_dir": str(folder), "validation_data_dir": str(folder / "dump") if dump else None},
            actor_rollout_ref=SimpleNamespace(rollout=SimpleNamespace(val_kwargs=SimpleNamespace(n=2))),
        )
        self.config.trainer = type("Options", (dict,), {"__getattr__": dict.__getitem__})(self.config.trainer)
        self.plan = SimpleNamespace(
            digen=SimpleNamespace(
                validation=SimpleNamespace(grid_samples=4, batch_size=batch_size), gap=SimpleNamespace(enable=gap)
            ),
            fragment_size=12,
            deadlines=SimpleNamespace(group=SimpleNamespace(seconds=1.0)),
        )
        self.fleet = SimpleNamespace(version=3)
        self.val_dataset = [
            {
                "prompt": r.group.prompt,
                "negative_prompt": "",
                "ground_truth": "7",
                "data_source": r.group.data_source,
                "extra_info": {},
            }
            for r in results
        ]
        left = list(results)
        self.asked: dict = {}
        self.agent_loop_manager = SimpleNamespace(
            pixels={(s.uid, s.j): np.zeros((8, 8, 1), np.uint8) for r in results for s in r.samples},
            generate_sequences=lambda *args, **options: self.asked.update(options),
            next_group=lambda timeout: left.pop(0),
        )
        self.logger = SimpleNamespace(logger={})


@pytest.mark.parametrize(
    "prompt", ["$5 and $6", "$", "$a_{b^{c$", "a_{b^{c", "line\nbreak", "\\frac{", "七", "a\tb\x07"]
)
def test_a_prompt_in_a_picture_is_text(prompt, tmp_path):
    figure = draw_grid([np.zeros((8, 8, 1), np.uint8)] * 2, [(prompt, 0.5)] * 2, "step $1$ $")
    figure.savefig(tmp_path / "grid.png")
    title = figure.axes[0].get_title()
    assert title == " ".join(prompt.split()) + "\n0.50"


def test_numbers_that_some_samples_report_are_kept_by_data_source(tmp_path):
    results = [
        group("val000000", "digits", [{"acc": 1.0, "text": "x"}, {"acc": 0.0}]),
        group("val000001", "scans", [{"jpeg_kb": 2, "rare": 8.0}, {"jpeg_kb": 4}]),
    ]
    metrics = Validator(Trainer(tmp_path, results)).run()
    assert metrics["val-core/digits/acc/mean@2"] == 0.5
    assert metrics["val-aux/digits/reward/mean@2"] == 0.75
    assert metrics["val-core/scans/reward/mean@2"] == 0.75  # the source without acc has the reward as its figure
    assert metrics["val-aux/scans/jpeg_kb/mean@2"] == 3.0
    assert metrics["val-aux/scans/rare/mean@1"] == 8.0
    assert not any("text" in name or "digits/jpeg" in name or "scans/acc" in name for name in metrics)


@pytest.mark.parametrize(
    ("options", "size"), [({}, 12), ({"batch_size": 5}, 5), ({"gap": True}, None), ({"gap": True, "batch_size": 5}, 5)]
)
def test_a_batch_of_validation_is_no_larger_than_one_of_training(tmp_path, options, size):
    trainer = Trainer(tmp_path, [group("val000000", "digits", [{}, {}])], **options)
    Validator(trainer).run()
    assert trainer.asked["batch_size"] == size


def test_a_picture_or_a_dump_that_fails_is_a_warning_and_counted(tmp_path, caplog):
    (tmp_path / "grids").write_text("a file where the folder of the grids should be")
    (tmp_path / "dump").write_text("and one in the place of the dumps")
    trainer = Trainer(tmp_path, [group("val000000", "digits", [{}, {}])], dump=True)
    with caplog.at_level(logging.WARNING):
        metrics = Validator(trainer).run()
    assert metrics["val-core/digits/reward/mean@2"] == 0.75
    assert trainer.outputs.metrics() == {"outputs/failed": 2.0}
    grid, dump = (record.getMessage() for record in caplog.records)
    assert "the sample grid of step 4 failed" in grid and "FileExistsError" in grid
    assert "dumping the validation of step 4" in dump
    assert not trainer.agent_loop_manager.pixels


def test_dumps_hold_what_no_json_has(tmp_path):
    results = [group("val000000", "digits", [{"object": object, "kb": 2}, {}], prompt="$5 and $6")]
    dump_samples(Trainer(tmp_path, results), results, str(tmp_path / "dump"))
    rows = [json.loads(line) for line in (tmp_path / "dump" / "4.jsonl").read_text().splitlines()]
    assert rows[0]["extra"] == {"object": repr(object), "kb": 2} and rows[0]["prompt"] == "$5 and $6"
    assert (tmp_path / "dump" / rows[1]["image"]).is_file()


class Backend:
    Image = "an attribute of the backend"

    def __init__(self):
        self.rows, self.broken = [], False

    def log(self, data, step):
        if self.broken:
            raise OSError("no space left on device")
        self.rows.append((step, data))

    def finish(self, exit_code=0):
        raise RuntimeError("no network")


def test_a_logger_that_fails_does_not_end_the_run_nor_stop_the_others(caplog):
    full, sound = Backend(), Backend()
    trainer = DigenTrainer.__new__(DigenTrainer)
    trainer.outputs, trainer.config = Outputs(), SimpleNamespace(trainer=SimpleNamespace(logger=["console"]))
    assert getattr(trainer, "logger", None) is None  # main_ppo asks so when construction failed
    trainer.logger = SimpleNamespace(logger={"file": full, "console": sound})
    loggers = trainer.logger.logger
    full.broken = True
    for backend in loggers.values():
        backend.log(data={"loss": 1.0}, step=3)
    assert sound.rows == [(3, {"loss": 1.0})] and trainer.outputs.failed == 1
    assert "logging to file failed" in caplog.text and "no space left on device" in caplog.text
    full.broken = False
    loggers["file"].log(data={"loss": 2.0}, step=4)
    assert full.rows == [(4, {"loss": 2.0})]
    loggers["file"].finish(exit_code=0)
    assert trainer.outputs.failed == 2
    assert loggers["file"].Image == Backend.Image


def test_what_is_no_failure_of_an_output_goes_through():
    outputs = Outputs()
    with pytest.raises(KeyboardInterrupt), outputs.attempt("waiting"):
        raise KeyboardInterrupt
    assert outputs.failed == 0


def test_a_custom_reward_that_exits_when_imported_is_named(tmp_path):
    from omegaconf import OmegaConf

    (tmp_path / "leaves.py").write_text("raise SystemExit(0)\n")
    custom = {"path": str(tmp_path / "leaves.py"), "name": "judge", "reward_kwargs": {}}
    manager = {"source": "register", "name": "diffusion", "module": None}
    config = OmegaConf.create({"reward": {"custom_reward_function": custom, "reward_manager": manager}})
    with pytest.raises(ValueError, match="custom_reward_function.path=.*leaves.py calls sys.exit"):
        build_rewards(config)
