"""docs/configuration.md is what the dataclasses and the list of veRL options that are read give."""

from __future__ import annotations

import dataclasses
import importlib.util
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest

DOCS = Path(__file__).resolve().parents[2] / "docs"


@cache
def reference() -> ModuleType:
    spec = importlib.util.spec_from_file_location("build_reference", DOCS / "build_reference.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_is_up_to_date():
    """If not: python docs/build_reference.py"""
    assert (DOCS / "configuration.md").read_text() == reference().build()


def test_an_option_without_meaning_and_a_meaning_without_option_are_refused():
    @dataclasses.dataclass
    class Inner:
        a: int = 1

    @dataclasses.dataclass
    class Outer:
        inner: Inner = dataclasses.field(default_factory=Inner)
        b: bool = False

    options = dict(reference().leaves(Outer))
    assert options == {"inner.a": 1, "b": False}
    assert list(reference().matched(options, {"inner.a": "x", "b": "y"}, "t")) == [
        ("inner.a", 1, "x"),
        ("b", False, "y"),
    ]
    with pytest.raises(ValueError, match=r"without a meaning: \['b'\]"):
        reference().matched(options, {"inner.a": "x"}, "t")
    with pytest.raises(ValueError, match=r"without an option: \['c'\]"):
        reference().matched(options, {"inner.a": "x", "b": "y", "c": "z"}, "t")


def test_defaults_are_written_as_in_yaml():
    assert [reference().value(x) for x in (None, True, "", 5.0, "sde")] == ["null", "true", "???", "5.0", "sde"]
