"""The prompt files of the digits example and the command that writes them."""

from __future__ import annotations

import sys

import pytest

from verl_digen.cli.main import main
from verl_digen.data.digits import TRAIN_TEMPLATES, VAL_TEMPLATES, load_scans, write_digits_prompts
from verl_digen.data.prompts import PromptDataset


def test_train_and_validation_prompts_are_separate(tmp_path):
    files = write_digits_prompts(tmp_path)
    train, val = PromptDataset(files["train"]), PromptDataset(files["val"])
    assert len(train) == 10 * len(TRAIN_TEMPLATES) and len(val) == 10 * len(VAL_TEMPLATES)
    prompts = [{data[i]["prompt"] for i in range(len(data))} for data in (train, val)]
    assert not prompts[0] & prompts[1] and [len(p) for p in prompts] == [len(train), len(val)]
    assert train[7]["prompt"] == "a handwritten seven" and train[7]["ground_truth"] == "7"
    assert {train[i]["data_source"] for i in range(len(train))} == {"digits"}
    with pytest.raises(ValueError, match="both have"):
        write_digits_prompts(tmp_path, val_templates=TRAIN_TEMPLATES[:1])


def test_scans():
    images, labels = load_scans()
    assert images.shape == (1797, 8, 8) and images.min() == 0 and images.max() == 16 and set(labels) == set(range(10))


def test_command_writes_model_and_prompts_and_may_be_repeated(tmp_path, capsys):
    for _ in range(2):
        assert main(["prepare", "digits", "--out", str(tmp_path / "digits")]) == 0
        output = capsys.readouterr().out
        assert "40 prompts" in output and "20 prompts" in output and "MB" in output
    assert {path.name for path in (tmp_path / "digits").iterdir()} == {"model", "train.parquet", "val.parquet"}
    (tmp_path / "digits" / "model" / "model_index.json").write_text("{}")
    assert main(["prepare", "digits", "--out", str(tmp_path / "digits")]) == 2
    assert "not the shipped digits model" in capsys.readouterr().err


@pytest.mark.slow
def test_without_scikit_learn_the_command_says_what_to_install(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    assert main(["prepare", "digits-weights", "--out", str(tmp_path)]) == 2
    assert "pip install 'verl-digen[digits]'" in capsys.readouterr().err
    assert main(["prepare", "digits", "--out", str(tmp_path)]) == 0  # training needs none of it


def test_command_rebuilds_weights(tmp_path, capsys):
    arguments = ["prepare", "digits-weights", "--out", str(tmp_path), "--iterations", "2"]
    assert main(arguments) == 0
    assert "flow loss" in capsys.readouterr().out
    assert (tmp_path / "model" / "model_index.json").is_file() and (tmp_path / "digit_classifier.npz").is_file()
