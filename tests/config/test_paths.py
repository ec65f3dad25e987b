"""Paths: ``~`` in every option, and any name of a folder in an override."""

from __future__ import annotations

from hydra.core.override_parser.overrides_parser import OverridesParser
from hypothesis import example, given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

from verl_digen.config.paths import expand_home, override


def test_home_is_put_in_every_option_and_nothing_else_changes(monkeypatch):
    monkeypatch.setenv("HOME", "/home/ann")
    values = {
        "trainer": {"default_local_dir": "~/runs/a", "resume_from_path": None, "total_epochs": 3},
        "data": {"train_files": ["~/a.parquet", "b.parquet"], "val_files": "~"},
        "rewards": {"mine": {"path": "~/r.py", "kwargs": {"texts": ["~ 5", "a~/b", "~x"]}}},
    }
    config = OmegaConf.create(values)
    OmegaConf.set_struct(config, True)
    expand_home(config)
    assert OmegaConf.to_container(config) == {
        "trainer": {"default_local_dir": "/home/ann/runs/a", "resume_from_path": None, "total_epochs": 3},
        "data": {"train_files": ["/home/ann/a.parquet", "b.parquet"], "val_files": "/home/ann"},
        "rewards": {"mine": {"path": "/home/ann/r.py", "kwargs": {"texts": ["~ 5", "a~/b", "~x"]}}},
    }


def test_what_is_missing_stays_missing():
    config = OmegaConf.create({"path": "???", "other": "~/x"})
    expand_home(config)
    assert OmegaConf.missing_keys(config) == {"path"} and not config.other.startswith("~")


@settings(deadline=None, max_examples=150)
@given(st.text(st.characters(exclude_categories=("Cs", "Cc")), min_size=1))
@example("/data/a (copy)/x=1,y's/é 数字")
@example("a'b\\'c\\")
@example("${oc.env:HOME}/x")
@example("a\\${b}")
@example("a\\\\${b}\\")
@example('[a,b]{c:d}#;*?&"')
def test_any_text_comes_through_an_override(text):
    (parsed,) = OverridesParser.create().parse_overrides([override("trainer.default_local_dir", text)])
    assert parsed.key_or_group == "trainer.default_local_dir"
    config = OmegaConf.create({"value": parsed.value()})
    assert config.value == text
