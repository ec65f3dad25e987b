"""``verl-digen prepare``: the digits model and its prompts in a folder, or the shipped weights anew."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    targets = parser.add_subparsers(dest="target", metavar="TARGET", required=True)
    digits = targets.add_parser("digits", help="model folder, train.parquet and val.parquet of the digits example")
    digits.add_argument("--out", type=Path, required=True, help="folder to write to")
    tiny = targets.add_parser("tiny", help="tiny random model of a family in the real folder layout")
    tiny.add_argument("family", help="family, for example flux")
    tiny.add_argument("--out", type=Path, required=True, help="folder to write to")
    classifiers = targets.add_parser("digits-classifiers", help="fit the reward of the digits and its judges anew")
    classifiers.add_argument("--out", type=Path, help="folder to write to (default: over the shipped files)")
    weights = targets.add_parser("digits-weights", help="the same, after training the shipped digits model anew")
    weights.add_argument("--out", type=Path, help="folder to write to (default: over the shipped files)")
    weights.add_argument("--iterations", type=int, default=None, help="flow-matching steps of the transformer")
    weights.add_argument("--seed", type=int, default=0)


def run(args: argparse.Namespace) -> int:
    try:
        return _TARGETS[args.target](args)
    except (ImportError, ValueError) as error:
        print(f"verl-digen prepare: {error}", file=sys.stderr)
        return 2


def _digits(args: argparse.Namespace) -> int:
    from verl_digen.data.digits import write_digits_prompts
    from verl_digen.data.prompts import PromptDataset
    from verl_digen.models.digits import ensure_digits_model

    model = ensure_digits_model(args.out / "model")
    files = write_digits_prompts(args.out)
    rows = [("model", str(model), f"{_megabytes(model):.2f} MB")]
    rows += [(name, str(file), f"{len(PromptDataset(file))} prompts") for name, file in files.items()]
    _table("digits", ("what", "where", "size"), rows)
    return 0


def _tiny(args: argparse.Namespace) -> int:
    from verl_digen.models.tiny import build_tiny

    print(f"random {args.family} model (it draws noise): {build_tiny(args.family, args.out)}")
    return 0


def _digits_weights(args: argparse.Namespace) -> int:
    import torch

    from verl_digen.data.digits import digit_prompts, load_scans
    from verl_digen.models.digits import ASSETS
    from verl_digen.models.digits_pretrain import ITERATIONS, build_digits_model

    images, labels = load_scans()
    model = args.out / "model" if args.out else ASSETS
    iterations = args.iterations if args.iterations is not None else ITERATIONS
    pixels = torch.from_numpy(images / 8 - 1).unsqueeze(1)
    losses = build_digits_model(
        model, pixels, torch.from_numpy(labels), digit_prompts(), iterations=iterations, seed=args.seed
    )
    rows = [("model", str(model), f"{_megabytes(model):.2f} MB, flow loss {losses['flow_loss']:.3f}")]
    _table("digits weights", ("what", "where", "result"), rows)
    return _digits_classifiers(args)


def _digits_classifiers(args: argparse.Namespace) -> int:
    from verl_digen.data.digits import halves, load_scans
    from verl_digen.rewards.functions.digit_classifier import WEIGHTS, save_classifier, train_classifier
    from verl_digen.rewards.metrics.digit_quality import JUDGES, save_judges, train_svm

    (reward_images, judge_images), (reward_labels, judge_labels) = (halves(part) for part in load_scans())
    classifier, judges = (args.out / file.name if args.out else file for file in (WEIGHTS, JUDGES))
    fitted = train_classifier(reward_images, reward_labels)
    save_classifier(fitted, classifier)
    svm = train_svm(judge_images, judge_labels)
    save_judges(svm, reward_images, judge_images, judge_labels, judges)
    score = fitted.score(judge_images.reshape(-1, 64) / 8 - 1, judge_labels)
    judged = svm.score(reward_images.reshape(-1, 64) / 16, reward_labels)
    rows = [
        ("reward classifier", str(classifier), f"{score:.3f}"),
        ("judges", str(judges), f"{judged:.3f} (support vector machine)"),
    ]
    _table("digits classifiers", ("what", "where", "accuracy on the other half of the scans"), rows)
    return 0


_TARGETS = {
    "digits": _digits,
    "tiny": _tiny,
    "digits-classifiers": _digits_classifiers,
    "digits-weights": _digits_weights,
}


def _megabytes(folder: Path) -> float:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()) / 1e6


def _table(title: str, columns: tuple[str, ...], rows: list[tuple[str, ...]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title)
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*row)
    Console().print(table)
