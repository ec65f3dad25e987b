"""Validation and what a run leaves to look at: sample grids, JSON lines, images."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from numbers import Real
from pathlib import Path
from typing import Any

import numpy as np

from verl_digen.config.digen import FunctionSpec
from verl_digen.rewards.metrics import METRICS
from verl_digen.rollout.requests import VALIDATION, GroupResult
from verl_digen.trainer.metrics import numbers
from verl_digen.trainer.videos import side_by_side, write_gif

Sample = tuple[str, int]


class Validator:
    """Validation of the current weights: ODE sampling of all validation prompts with fixed noise.

    The noise of a validation sample is keyed by its row, so pictures of different steps can be compared.

    Args:
        trainer: a :class:`~verl_digen.trainer.trainer.DigenTrainer`.
    """

    def __init__(self, trainer):
        self.trainer = trainer
        self.manager = trainer.agent_loop_manager

    def run(self) -> dict[str, float]:
        """Generate, score, write the grid and dumps; returns ``val-core/...`` and ``val-aux/...`` metrics."""
        from verl_digen.trainer.trainer import prompt_group

        trainer = self.trainer
        n = trainer.config.actor_rollout_ref.rollout.val_kwargs.n
        groups = [
            prompt_group(trainer.val_dataset[index], f"val{index:06d}", n, VALIDATION)
            for index in range(len(trainer.val_dataset))
        ]
        dump_dir = trainer.config.trainer.get("validation_data_dir", None)
        shown = grid_samples([s for g in groups for s in g.samples], trainer.plan.digen.validation.grid_samples)
        everything = {s for g in groups for s in g.samples}
        self.manager.generate_sequences(
            groups,
            version=trainer.fleet.version,
            training_step=max(trainer.global_steps, 1),
            keep_pixels=everything if dump_dir or trainer.validation_metrics else set(shown),
            batch_size=self._batch_size(),
        )
        results = [self.manager.next_group(trainer.plan.deadlines.group.seconds) for _ in groups]
        results.sort(key=lambda r: r.group.uid)
        if shown:
            with trainer.outputs.attempt(f"the sample grid of step {trainer.global_steps}"):
                self._write_grid(results, shown)
        if dump_dir:
            with trainer.outputs.attempt(f"dumping the validation of step {trainer.global_steps} to {dump_dir}"):
                dump_samples(trainer, results, dump_dir)
        figures = run_metrics(trainer.validation_metrics, results, self.manager.pixels, trainer.outputs.attempt)
        for sample in everything:  # pixels of the training step are still to be dumped
            self.manager.pixels.pop(sample, None)
        return self._metrics(results) | figures

    def _batch_size(self) -> int | None:
        """Samples that a replica denoises at once: as many as in training, however many prompts there are."""
        plan = self.trainer.plan
        return plan.digen.validation.batch_size or (None if plan.digen.gap.enable else plan.fragment_size)

    def _metrics(self, results: list[GroupResult]) -> dict[str, float]:
        sources = [result.group.data_source for result in results for _ in result.samples]
        samples = [sample for result in results for sample in result.samples]
        values = [numbers(sample.extra) | {"reward": sample.reward} for sample in samples]
        names = dict.fromkeys(name for row in values for name in row)
        # veRL leaves out None: a number that only some samples report is averaged over those, by data source
        infos = {name: [row.get(name) for row in values] for name in names}
        metrics = self.trainer._val_metrics_update(sources, [sample.uid for sample in samples], infos, [])
        return {name: float(value) for name, value in metrics.items()}

    def _write_grid(self, results: list[GroupResult], shown: list[Sample]) -> None:
        trainer = self.trainer
        by_sample = {(s.uid, s.j): (r.group.prompt, s.reward) for r in results for s in r.samples}
        path = Path(trainer.config.trainer.default_local_dir) / "grids" / f"step_{trainer.global_steps:05d}.png"
        images = [self.manager.pixels[s] for s in shown]
        figure = draw_grid(images, [by_sample[s] for s in shown], f"step {trainer.global_steps}")
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=110)
        if images[0].ndim == 4:
            write_gif(path.with_suffix(".gif"), side_by_side(images))
        log_grid(trainer.logger.logger, path, trainer.global_steps)


def load_metrics(specs: Mapping[str, FunctionSpec]) -> dict[str, Callable[..., Mapping[str, float]]]:
    """The functions of ``trainer.v1.digen.validation.metrics``.

    Raises:
        ValueError: no such registered function, file, or function in the file.
    """
    return {label: METRICS.load(label, spec.path, spec.name, spec.kwargs) for label, spec in specs.items()}


def run_metrics(
    metrics: Mapping[str, Callable[..., Mapping[str, float]]],
    results: list[GroupResult],
    pixels: Mapping[Sample, np.ndarray],
    attempt: Callable[[str], AbstractContextManager],
) -> dict[str, float]:
    """``val-aux/SOURCE/NAME/KEY`` of the samples of each data source.

    A function that raises, or gives what is no finite number, ends no run: it is a warning, and its figures are absent.

    Args:
        attempt: see :meth:`verl_digen.trainer.outputs.Outputs.attempt`.
    """
    if not metrics:
        return {}  # the pixels were not kept
    out: dict[str, float] = {}
    for source in sorted({result.group.data_source for result in results}):
        samples = [(r.group, s) for r in results if r.group.data_source == source for s in r.samples]
        images = [pixels[(s.uid, s.j)] for _, s in samples]
        prompts, truths = [g.prompt for g, _ in samples], [g.ground_truth for g, _ in samples]
        for label, function in metrics.items():
            with attempt(f"the validation metric {label!r} of {source!r}"):
                found = function(images, prompts, truths)
                for key, value in found.items():
                    if isinstance(value, bool) or not isinstance(value, Real) or not math.isfinite(value):
                        raise ValueError(f"{key} is no finite number: {value!r}")
                out |= {f"val-aux/{source}/{label}/{key}": float(value) for key, value in found.items()}
    return out


def grid_samples(samples: list[Sample], count: int) -> list[Sample]:
    """``count`` samples spread evenly over all, always the same ones."""
    if count <= 0 or not samples:
        return []
    step = max(len(samples) / count, 1.0)
    return [samples[int(i * step)] for i in range(min(count, len(samples)))]


def draw_grid(images: list[np.ndarray], labels: list[tuple[str, float]], title: str):
    """A matplotlib figure of images uint8 [H, W, C] (of a video [F, H, W, C] the middle frame) with their rewards."""
    from matplotlib.figure import Figure

    columns = min(10, len(images))
    rows = -(-len(images) // columns)
    figure = Figure(figsize=(1.1 * columns, 1.35 * rows + 0.4), layout="constrained")
    figure.suptitle(title, fontsize=9, parse_math=False)
    axes = np.atleast_1d(figure.subplots(rows, columns, squeeze=False)).ravel()
    for axis in axes:
        axis.set_axis_off()
    for axis, image, (prompt, reward) in zip(axes, images, labels, strict=False):
        frame = image[len(image) // 2] if image.ndim == 4 else image
        if frame.shape[-1] == 1:
            axis.imshow(frame[..., 0], cmap="gray", vmin=0, vmax=255)
        else:
            axis.imshow(frame)
        # a prompt is text: `$` starts no formula, a line break no line
        axis.set_title(f"{' '.join(prompt.split())[:22]}\n{reward:.2f}", fontsize=5, parse_math=False)
    return figure


def log_grid(loggers: dict[str, Any], path: Path, step: int) -> None:
    """Give the picture to the loggers that show pictures (tensorboard, wandb)."""
    from PIL import Image

    if "tensorboard" in loggers:
        image = np.asarray(Image.open(path).convert("RGB"))
        loggers["tensorboard"].writer.add_image("validation/grid", image, step, dataformats="HWC")
    if "wandb" in loggers:
        wandb = loggers["wandb"]
        wandb.log({"validation/grid": wandb.Image(str(path))}, step=step)


def dump_samples(trainer, results: list[GroupResult], folder: str) -> None:
    """Write ``STEP.jsonl`` and the images ``STEP/UID_J.png`` of complete groups; of a video the middle frame, and the
    whole as ``STEP/UID_J.gif``."""
    from PIL import Image

    step, pixels = trainer.global_steps, trainer.agent_loop_manager.pixels
    image_dir = Path(folder) / str(step)
    image_dir.mkdir(parents=True, exist_ok=True)
    advantages = trainer.outcome.advantages if trainer.outcome is not None else {}
    with open(os.path.join(folder, f"{step}.jsonl"), "w") as file:
        for result in results:
            for s in result.samples:
                image = pixels[(s.uid, s.j)]
                frame = image[len(image) // 2] if image.ndim == 4 else image
                name = f"{s.uid}_{s.j}.png"
                Image.fromarray(frame[..., 0] if frame.shape[-1] == 1 else frame).save(image_dir / name)
                if image.ndim == 4:
                    write_gif(image_dir / f"{s.uid}_{s.j}.gif", image)
                row = {
                    "step": step,
                    "uid": s.uid,
                    "sample": s.j,
                    "prompt": result.group.prompt,
                    "ground_truth": result.group.ground_truth,
                    "image": f"{step}/{name}",
                    "reward": s.reward,
                    "advantage": advantages.get((s.uid, s.j)),
                    "version": s.version,
                    "replica": s.replica,
                    "extra": s.extra,
                }
                file.write(json.dumps(row, default=repr) + "\n")
