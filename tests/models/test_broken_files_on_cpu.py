"""Model folders whose files are pointers, cut, empty or not the ones that are loaded: refused, with file and cause."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from verl_digen.config.plan import transformer_size
from verl_digen.config.weights import part_weights
from verl_digen.models.family import family_for
from verl_digen.models.parts import load_part
from verl_digen.models.tiny import tiny_families

POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a21\nsize 4939119832\n"
WEIGHTS = {
    "transformer": "diffusion_pytorch_model.safetensors",
    "vae": "diffusion_pytorch_model.safetensors",
    "text_encoder": "model.safetensors",
    "text_encoder_3": "model.safetensors",
}


@pytest.fixture
def model(sd3_path, tmp_path) -> Path:
    return shutil.copytree(sd3_path, tmp_path / "model")


def check(model: Path) -> str:
    """The error of the check of all parts."""
    with pytest.raises(ValueError) as error:
        family_for(model).check_parts(model)
    assert f"actor_rollout_ref.model.path={model}" in str(error.value)
    return str(error.value)


def pointer(file: Path) -> str:
    file.write_text(POINTER)
    return "is a git-lfs pointer to a file of 4939119832 bytes: run `git lfs pull`"


def empty(file: Path) -> str:
    file.write_bytes(b"")
    return "is empty"


def cut(file: Path) -> str:
    content = file.read_bytes()
    file.write_bytes(content[:-1])
    return f"has {len(content) - 1} bytes, its header asks for {len(content)}"


def cut_in_the_header(file: Path) -> str:
    file.write_bytes(file.read_bytes()[:40])
    return "(40 bytes) has no safetensors header"


def a_page_of_html(file: Path) -> str:
    file.write_text("<!doctype html><html>sign in</html>")
    return "has no safetensors header: it is cut, or another kind of file"


def only_a_variant(file: Path) -> str:
    file.rename(file.with_name(file.name.replace(".safetensors", ".fp16.safetensors")))
    return f"found {file.name.replace('.safetensors', '.fp16.safetensors')}: only files without a variant"


@pytest.mark.parametrize("part", WEIGHTS)
@pytest.mark.parametrize("spoil", [pointer, empty, cut, cut_in_the_header, a_page_of_html, only_a_variant])
def test_weights_that_cannot_be_loaded_are_named_with_the_cause(model, part, spoil):
    file = model / part / WEIGHTS[part]
    cause = spoil(file)
    message = check(model)
    assert "1 thing(s)" in message and f"{part}: " in message and cause in message and file.name in message
    if part == "transformer":
        with pytest.raises(ValueError, match="actor_rollout_ref.model.path") as error:
            transformer_size(str(model))
        assert cause in str(error.value)


def test_all_broken_parts_are_listed_at_once(model):
    for part, file in WEIGHTS.items():
        (model / part / file).write_text(POINTER)
    (model / "tokenizer_2" / "tokenizer.json").write_text(POINTER)
    (model / "scheduler" / "scheduler_config.json").write_bytes(b"")
    (model / "vae" / "config.json").write_text("{")
    message = check(model)
    assert "7 thing(s)" in message
    assert "tokenizer_2: tokenizer.json is a git-lfs pointer" in message
    assert "scheduler: scheduler_config.json is empty" in message and "vae: config.json is no JSON" in message


def shards_of(folder: Path, name: str) -> Path:
    """Split a part's weights into two files and their index."""
    file = folder / f"{name}.safetensors"
    tensors = load_file(file)
    names = sorted(tensors)
    parts = {f"{name}-0000{i + 1}-of-00002.safetensors": names[i::2] for i in range(2)}
    for shard, wanted in parts.items():
        save_file({key: tensors[key] for key in wanted}, folder / shard, metadata={"format": "pt"})
    weight_map = {key: shard for shard, wanted in parts.items() for key in wanted}
    index = folder / f"{name}.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    file.unlink()
    return index


@pytest.mark.parametrize("part", ["transformer", "text_encoder"])
def test_shards_count_like_one_file_and_missing_ones_are_named(model, part):
    name = WEIGHTS[part].removesuffix(".safetensors")
    whole = part_weights(model / part)
    index = shards_of(model / part, name)
    assert part_weights(model / part) == whole
    load_part(model, part)
    second = model / part / f"{name}-00002-of-00002.safetensors"
    content = second.read_bytes()
    second.unlink()
    assert f"{part}: no {second.name}, which the index names" in check(model)
    first = (model / part / f"{name}-00001-of-00002.safetensors").read_bytes()
    second.write_bytes(first)  # the wrong shard under the name
    assert f"{second.name} lacks" in check(model)
    second.write_bytes(content[:-8])
    assert "the copy is incomplete" in check(model)
    second.write_bytes(content)
    family_for(model).check_parts(model)
    index.write_text(POINTER)
    assert f"{index.name} is a git-lfs pointer" in check(model)
    index.write_text("{}")
    assert f"{index.name} names no weights" in check(model)


def test_files_that_are_not_loaded_do_not_matter(model):
    for name in ("diffusion_pytorch_model.fp16.safetensors", "diffusion_pytorch_model.bin"):
        (model / "transformer" / name).write_text(POINTER)
    (model / "README.md").write_text(POINTER)
    family_for(model).check_parts(model)
    load_part(model, "transformer")


def test_the_file_that_is_counted_is_the_one_that_is_loaded(model):
    """Diffusers prefers the index of shards, transformers the single file."""
    for part, preferred in (("transformer", "shards"), ("text_encoder", "single")):
        folder, name = model / part, WEIGHTS[part].removesuffix(".safetensors")
        single = (folder / f"{name}.safetensors").read_bytes()
        shards_of(folder, name)
        (folder / f"{name}.safetensors").write_bytes(single)
        shard = folder / f"{name}-00001-of-00002.safetensors"
        shard.write_text(POINTER)
        problems = part_weights(folder).problems
        assert bool(problems) == (preferred == "shards")
        if problems:
            with pytest.raises(Exception):  # noqa: B017 - whatever the library raises
                load_part(model, part)
        else:
            load_part(model, part)


def test_parameters_are_those_of_the_loaded_module(model):
    module = load_part(model, "transformer", dtype=torch.float32)
    stored = sum(tensor.numel() for tensor in module.state_dict().values())
    assert transformer_size(str(model)) == (stored, 4 * stored)


@pytest.mark.parametrize("family", tiny_families())
def test_whole_folders_of_every_family_pass(family, tmp_path):
    from verl_digen.models.tiny import build_tiny

    path = build_tiny(family, tmp_path / family)
    family_for(path).check_parts(path)
    assert transformer_size(str(path))[0] > 0
