"""Validation metrics: each sees the samples of one data source, is loaded at start, and its figures are numbers."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from verl_digen.config.digen import FunctionSpec
from verl_digen.trainer.outputs import Outputs
from verl_digen.trainer.validate import load_metrics, run_metrics


def result(uid, source, truth, n=2):
    group = SimpleNamespace(uid=uid, prompt=f"prompt of {uid}", ground_truth=truth, data_source=source)
    return SimpleNamespace(group=group, samples=[SimpleNamespace(uid=uid, j=j) for j in range(n)])


RESULTS = [result("a", "digits", "3"), result("b", "signs", "stop"), result("c", "digits", "4")]
PIXELS = {(r.group.uid, j): np.full((2, 2, 1), 10 * i + j, np.uint8) for i, r in enumerate(RESULTS) for j in range(2)}


def test_a_metric_sees_the_samples_of_one_source_with_their_prompts():
    seen = []

    def look(images, prompts, ground_truths):
        seen.append(([int(image[0, 0, 0]) for image in images], prompts, ground_truths))
        return {"count": len(images), "shade": np.float32(images[0].mean())}

    found = run_metrics({"look": look}, RESULTS, PIXELS, Outputs().attempt)
    assert found == {
        "val-aux/digits/look/count": 4.0,
        "val-aux/digits/look/shade": 0.0,
        "val-aux/signs/look/count": 2.0,
        "val-aux/signs/look/shade": 10.0,
    }
    assert seen[0] == ([0, 1, 20, 21], ["prompt of a"] * 2 + ["prompt of c"] * 2, ["3", "3", "4", "4"])
    assert run_metrics({}, RESULTS, {}, Outputs().attempt) == {}  # no pixels are needed


def fail(images, prompts, truths):
    raise SystemError("no judge")


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda images, prompts, truths: {"y": 1.0, "x": float("nan")}, "x is no finite number: nan"),
        (lambda images, prompts, truths: {"x": "high"}, "x is no finite number: 'high'"),
        (lambda images, prompts, truths: {"x": True}, "x is no finite number: True"),
        (fail, "SystemError: no judge"),
    ],
)
def test_a_metric_that_fails_is_a_warning_and_leaves_the_others(function, message, caplog):
    outputs = Outputs()
    metrics = {"bad": function, "good": lambda images, prompts, truths: {"n": len(images)}}
    found = run_metrics(metrics, RESULTS, PIXELS, outputs.attempt)
    assert found == {"val-aux/digits/good/n": 4.0, "val-aux/signs/good/n": 2.0}
    assert outputs.failed == 2
    assert "the validation metric 'bad' of 'digits' failed, the run goes on" in caplog.text and message in caplog.text


def test_functions_are_found_by_name_or_in_a_file(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text("def mine(images, prompts, ground_truths, *, factor=1):\n    return {'n': factor * len(images)}\n")
    specs = {
        "digit_quality": FunctionSpec(),
        "double": FunctionSpec(path=str(file), name="mine", kwargs={"factor": 2}),
    }
    loaded = load_metrics(specs)
    assert loaded["double"]([0, 0], [], []) == {"n": 4}
    assert loaded["digit_quality"].__name__ == "digit_quality"
    for spec, message in (
        (FunctionSpec(), "unknown validation metric 'mine'; available: digit_quality"),
        (FunctionSpec(path=str(tmp_path / "no.py")), "validation metric 'mine': no file"),
        (FunctionSpec(path=str(file), name="other"), "has no function 'other'"),
    ):
        with pytest.raises(ValueError, match=message):
            load_metrics({"mine": spec})
