"""What README and docs name exists: files, links, headings, options, subcommands, modules, messages, metrics."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
IDS = [str(page.relative_to(ROOT)) for page in PAGES]
PREFIX = "trainer.v1.digen."

pages = pytest.mark.parametrize("page", PAGES, ids=IDS)


def code(page: Path) -> str:
    """Text of all code spans and blocks of a page, one per line."""
    text = page.read_text()
    blocks = re.findall(r"^```.*?\n(.*?)^```", text, flags=re.M | re.S)
    spans = re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```", "", text, flags=re.M | re.S))
    return "\n".join([*blocks, *spans])


# ---- links and files -------------------------------------------------------------------------------------------


@pages
def test_relative_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if re.match(r"[a-z]+://", target):
            continue
        path, _, heading = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), f"{page.name} links to {target}"
        assert file.is_relative_to(ROOT)
        if heading:
            titles = re.findall(r"^#+ (.+)$", file.read_text(), flags=re.M)
            anchors = {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}
            assert heading in anchors, f"{page.name} links to {target}"


FILE = re.compile(r"(?<![\w./-])((?:[\w.-]+/)*[\w.-]+\.(?:py|md|yaml|sh|patch|svg|png|txt|toml))(?![\w/])")
# what a run or a user makes
MADE = re.compile(
    r"(my_rewards\.py|my_metrics\.py|step_\d+\.png|latest_checkpointed_iteration\.txt|ladder\.png|costs\.yaml|report\.html|about\.json|warnings\.log)$"
)


@pages
def test_files_that_are_named_exist(page):
    for name in sorted(set(FILE.findall(code(page)))):
        if MADE.search(name):
            continue
        places = (ROOT / name, ROOT / "verl_digen" / name, page.parent / name)
        siblings = list((ROOT / "verl_digen").glob(f"*/{name}"))  # in the picture's manner: `sampler.py`
        assert siblings or any(place.exists() for place in places), f"{page.name} names {name}"


@pages
def test_folders_that_are_named_exist(page):
    for name in sorted(
        set(re.findall(r"`((?:verl_digen|recipes|patches|tests|docs)/(?:[\w-]+/)*)`", page.read_text()))
    ):
        assert (ROOT / name).is_dir(), f"{page.name} names {name}"


# ---- options and commands --------------------------------------------------------------------------------------


@cache
def option_names() -> set[str]:
    """Every option under ``trainer.v1.digen`` and every section, as dotted names."""
    from tests.docs.test_reference_on_cpu import reference
    from verl_digen.config.digen import DigenConfig

    names = {name for name, _ in reference().leaves(DigenConfig)}
    return names | {name.rsplit(".", i)[0] for name in names for i in range(1, name.count(".") + 1)}


def known_option(name: str) -> bool:
    if name.startswith("rewards."):
        parts = name.split(".")
        return len(parts) == 2 or (len(parts) == 3 and parts[2] in ("weight", "path", "name", "kwargs", "batched"))
    return name in option_names()


def named_options(text: str) -> set[str]:
    return {name.rstrip(".") for name in re.findall(r"trainer\.v1\.digen\.([\w.]+)", text)}


@pages
def test_options_that_are_named_exist(page):
    for name in sorted(named_options(page.read_text())):
        assert known_option(name), f"{page.name} names {PREFIX}{name}"


@pytest.mark.parametrize("recipe", sorted((ROOT / "recipes").glob("*.yaml")), ids=lambda path: path.stem)
def test_options_of_recipes_exist(recipe):
    """Also in their comments; the yaml itself is parsed against the dataclasses in tests/recipes."""
    for name in sorted(named_options(recipe.read_text())):
        assert known_option(name), f"{recipe.name} names {PREFIX}{name}"


def test_the_check_of_options_sees_a_wrong_name():
    assert known_option("gap.enable") and known_option("sampling") and known_option("rewards.NAME.weight")
    assert not known_option("gap.enabled") and not known_option("rewards.NAME.wieght")


@pages
def test_short_option_names_are_ends_of_real_ones(page):
    """Tables shorten ``trainer.v1.digen.gap.fragment_size`` to ``gap.fragment_size``."""
    sections = "gap|tsp|ema|sampling|validation|algorithm|failure|threads|accelerator_type"
    for name in re.findall(rf"`((?:{sections})\.\w+(?:\.\w+)*)", page.read_text()):
        assert known_option(name) or is_in_schedule(name), f"{page.name} names {name}"


def is_in_schedule(name: str) -> bool:
    """Whether ``gap.plan_fragments`` is a function or a class of ``verl_digen/schedule/gap.py``."""
    module, attribute = name.split(".")[:2]
    file = ROOT / "verl_digen" / "schedule" / f"{module}.py"
    return file.is_file() and re.search(rf"^(def|class) {attribute}\b", file.read_text(), flags=re.M) is not None


@pages
def test_subcommands_that_are_named_exist(page):
    from verl_digen.cli.main import COMMANDS

    for name in re.findall(r"verl-digen ([a-z][\w-]*)", code(page)):
        assert name in COMMANDS, f"{page.name} names verl-digen {name}"
        assert (ROOT / "verl_digen" / "cli" / f"{name}.py").is_file(), f"verl-digen {name} has no module"


@pages
def test_recipes_that_are_named_exist(page):
    for name in re.findall(r"--config-name ([\w.-]+)", code(page)):
        assert (ROOT / "recipes" / f"{name}.yaml").is_file(), f"{page.name} names recipe {name}"


# ---- architecture ----------------------------------------------------------------------------------------------


def test_every_module_has_its_line():
    text = (ROOT / "docs" / "architecture.md").read_text()
    package = ROOT / "verl_digen"
    modules = [str(file.relative_to(package)) for file in package.rglob("*.py") if file.name != "__init__.py"]
    missing = [name for name in modules if "/" in name and f"`{name}`" not in text]
    assert not missing


def rooms_table() -> dict[str, set[str]]:
    """Room -> rooms that it may import from, as the page says."""
    text = (ROOT / "docs" / "architecture.md").read_text().split("## Rooms")[1].split("###")[0]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("| `")]
    return {row[0].strip("`").rstrip("/").removesuffix(".py"): set(re.findall(r"[a-z_]+", row[2])) for row in rows}


def imports_of(room: str) -> set[str]:
    package = ROOT / "verl_digen"
    files = (package / room).rglob("*.py") if (package / room).is_dir() else [package / f"{room}.py"]
    found = set()
    for file in files:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "verl_digen":
                parts = node.module.split(".")
                found |= {parts[1]} if len(parts) > 1 else {alias.name for alias in node.names}
    return found - {room, "version"}


def test_rooms_import_only_what_the_page_says():
    table = rooms_table()
    folders = {path.name for path in (ROOT / "verl_digen").iterdir() if (path / "__init__.py").is_file()}
    assert folders <= set(table)
    wrong = {room: imports_of(room) - allowed for room, allowed in table.items() if imports_of(room) - allowed}
    assert not wrong


# ---- messages, metrics, examples -------------------------------------------------------------------------------


@cache
def messages() -> str:
    """All text that the package can write, pieces of f-strings joined by an ellipsis."""
    texts = []
    for file in (ROOT / "verl_digen").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.JoinedStr):
                texts.append("".join(v.value if isinstance(v, ast.Constant) else "…" for v in node.values))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                texts.append(node.value)
    return "\n".join(texts)


def test_messages_that_are_quoted_are_the_codes():
    quoted = re.findall(r'`"([^"`]+)"`', (ROOT / "docs" / "troubleshooting.md").read_text())
    assert len(quoted) > 20
    missing = [text for text in quoted if text not in messages()]
    assert not missing


def test_every_metric_has_its_line():
    from tests.docs.fake_step import logged_names

    text = (ROOT / "docs" / "metrics.md").read_text()
    missing = [name for name in logged_names() if f"`{name}`" not in text]
    assert not missing


def test_the_example_family_runs(tmp_path):
    """The Python block of adding-a-model-family.md on the digits weights: same embeddings and prediction."""
    import json
    import shutil

    import torch

    from verl_digen.models import family as families
    from verl_digen.models.digits import ASSETS

    block = re.search(r"```python\n(.*?)```", (ROOT / "docs" / "adding-a-model-family.md").read_text(), re.S)[1]
    known = families.available_families()
    try:
        scope: dict = {"__name__": "example_family"}
        exec(block, scope)
        model = shutil.copytree(ASSETS, tmp_path / "model")
        index = json.loads((model / "model_index.json").read_text()) | {"_class_name": "PixelPipeline"}
        (model / "model_index.json").write_text(json.dumps(index))
        assert families.family_for(model) is scope["PixelFamily"]
        outputs = []
        for path in (model, ASSETS):
            family = families.family_for(path)(path)
            family.load_conditioner()
            (cond,) = family.encode_prompts(["a handwritten seven"])
            cond = {name: value[None] for name, value in cond.items()}
            x = torch.linspace(-1, 1, 64).reshape(1, *family.latent_shape(*family.default_size()))
            with torch.no_grad():
                v = family.predict(family.load_transformer(), x, torch.tensor([0.5]), cond, families.Guidance())
            outputs.append((v, family.decode(x)))
        assert torch.equal(outputs[0][0], outputs[1][0])
        assert outputs[0][1].shape == outputs[1][1].shape == (1, 8, 8, 1)
        assert abs(outputs[0][1].astype(int) - outputs[1][1].astype(int)).max() <= 1
    finally:
        families._FAMILIES.clear()
        families._FAMILIES.update(known)


def test_the_example_reward_runs(tmp_path):
    import numpy as np

    from verl_digen.config.digen import RewardSpec
    from verl_digen.rewards.manager import load_reward

    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "rewards.md").read_text(), re.S)
    file = tmp_path / "my_rewards.py"
    file.write_text(blocks[0])
    function = load_reward("brightness", RewardSpec(path=str(file), kwargs={"target": 0.5}))
    result = function(np.full((8, 8, 3), 128, np.uint8), "a grey square", "", {})
    assert result["score"] == pytest.approx(1.0, abs=0.01)


def test_the_example_validation_metric_runs(tmp_path):
    import numpy as np

    from verl_digen.config.digen import FunctionSpec
    from verl_digen.trainer.validate import load_metrics

    (block,) = re.findall(
        r"```python\n(.*?)```", (ROOT / "docs" / "rewards.md").read_text().split("## Validation")[1], re.S
    )
    (tmp_path / "my_metrics.py").write_text(block)
    spec = FunctionSpec(path=str(tmp_path / "my_metrics.py"), name="diversity", kwargs={"scale": 255})
    images = [np.full((8, 8, 3), shade, np.uint8) for shade in (0, 255)]
    assert load_metrics({"d": spec})["d"](images, ["", ""], ["", ""]) == {"pixel_std": 0.5}


def test_the_example_prompts_are_read(tmp_path, monkeypatch):
    from verl_digen.data.prompts import PromptDataset

    monkeypatch.chdir(tmp_path)
    exec(re.search(r"```python\n(.*?)```", (ROOT / "docs" / "getting-started.md").read_text(), re.S)[1], {})
    assert PromptDataset("train.parquet")[1]["ground_truth"] == "books"
