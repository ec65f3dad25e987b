"""What a run writes about itself: settings without secrets, where its metrics are, and its warnings."""

from __future__ import annotations

import json
import logging
from types import SimpleNamespace

import pytest
from omegaconf import OmegaConf

from verl_digen.trainer.about import WARNINGS, file_logger_path, without_secrets, write_about

PLAN = [("mode", "colocated"), ("step", "2 prompts x 2 samples = 4 samples")]


def config(folder):
    trainer = {
        "project_name": "digits",
        "experiment_name": "flow",
        "default_local_dir": str(folder),
        "logger": ["console", "file"],
    }
    variables = {"WANDB_API_KEY": "abc123", "HF_TOKEN": "def456", "TOKENIZERS_PARALLELISM": "false"}
    return OmegaConf.create(
        {"trainer": trainer, "ray_kwargs": {"env_vars": variables}, "same": "${trainer.project_name}"}
    )


@pytest.fixture(autouse=True)
def no_handlers_left():
    root = logging.getLogger("verl_digen")
    before = list(root.handlers)
    yield
    for handler in [h for h in root.handlers if h not in before]:
        root.removeHandler(handler)
        handler.close()


def test_plan_settings_and_log_are_in_the_file(tmp_path, monkeypatch):
    monkeypatch.setenv("VERL_FILE_LOGGER_PATH", str(tmp_path / "log.jsonl"))
    about = json.loads(write_about(SimpleNamespace(config=config(tmp_path / "run")), PLAN).read_text())
    assert about["plan"] == [list(row) for row in PLAN]
    assert about["settings"]["same"] == "digits"  # resolved
    assert about["metrics_log"] == str(tmp_path / "log.jsonl")
    assert about["versions"]["verl"]


def test_no_secret_is_in_the_file(tmp_path):
    text = write_about(SimpleNamespace(config=config(tmp_path)), PLAN).read_text()
    assert "abc123" not in text and "def456" not in text
    assert json.loads(text)["settings"]["ray_kwargs"]["env_vars"]["TOKENIZERS_PARALLELISM"] == "false"
    assert without_secrets({"pad_tokens": "x", "tokenizer": "y", "tokens": [{"password": "z"}]}) == {
        "pad_tokens": "x",
        "tokenizer": "y",
        "tokens": [{"password": "***"}],
    }


def test_the_log_is_where_verls_logger_writes_it(tmp_path, monkeypatch):
    """Compared with the logger itself, for both of its environment variables."""
    from verl.utils.tracking import FileLogger

    monkeypatch.chdir(tmp_path)
    for variables in ({}, {"VERL_FILE_LOGGER_ROOT": "elsewhere"}, {"VERL_FILE_LOGGER_PATH": "here.jsonl"}):
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        made = FileLogger("digits", "flow")
        made.finish()
        assert file_logger_path(config(tmp_path)) == str(tmp_path / made.filepath)
    assert file_logger_path(OmegaConf.create({"trainer": {"logger": ["console"]}})) is None


def test_warnings_of_the_package_are_kept_by_the_run_that_gave_them(tmp_path):
    log = logging.getLogger("verl_digen.rollout.manager")
    for name in ("first", "second"):
        write_about(SimpleNamespace(config=config(tmp_path / name)), PLAN)
        assert not (tmp_path / name / WARNINGS).exists()  # none, no file
        log.warning("replica of the %s run was restarted", name)
        log.info("not a warning")
    for name, other in (("first", "second"), ("second", "first")):
        text = (tmp_path / name / WARNINGS).read_text()
        assert f"WARNING verl_digen.rollout.manager: replica of the {name} run" in text
        assert other not in text and "not a warning" not in text
