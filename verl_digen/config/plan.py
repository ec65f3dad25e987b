"""The resolved plan of a run: every size that follows from the configuration, checked before a device is taken (I10).

:func:`resolve_plan` is the one place where options meet each other. It reads files (model index, prompt files' names)
but no weights, and imports neither torch nor ray.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, field
from pathlib import Path

from omegaconf import DictConfig

from verl_digen.config.deadlines import Deadlines
from verl_digen.config.digen import PREFIX, DigenConfig, parse_digen
from verl_digen.config.ranges import check_ranges
from verl_digen.config.weights import part_weights

RESUME_NEEDS = ("model", "optimizer", "extra")  # of actor.checkpoint.save_contents


@dataclass(frozen=True, kw_only=True)
class RunPlan:
    """Sizes of a run. P prompt groups per step, n samples each, m logical batches, K trained transitions per sample."""

    digen: DigenConfig
    prompts: int
    n: int
    logical_batches: int
    prompts_per_batch: int
    epochs: int
    transitions: int
    trainer_ranks: int
    replicas: int
    fragment_size: int
    one_shot: bool
    loss: str
    clip_low: float
    clip_high: float
    kl_beta: float
    lora_rank: int
    seed: int
    transformer_parameters: int
    transformer_bytes: int
    notes: tuple[str, ...] = field(default_factory=tuple)

    @property
    def samples(self) -> int:
        """Samples per step."""
        return self.prompts * self.n

    @property
    def cells_per_batch(self) -> int:
        """Cells (sample × transition) of a logical batch: the denominator of the loss."""
        return self.prompts_per_batch * self.n * self.transitions

    @property
    def largest_tile(self) -> int:
        """Most cells that a rank would put through one forward and backward, memory permitting."""
        share = self.cells_per_batch if self.digen.tsp.enable else self.prompts_per_batch * self.n
        cells = math.ceil(share / self.trainer_ranks)
        return min(cells, self.digen.tsp.max_cells or cells)

    @property
    def on_policy(self) -> bool:
        """One commit per publish: the anchor is the current forward, the first ratio exactly 1 (I6)."""
        return self.logical_batches == 1 and self.epochs == 1

    @property
    def deadlines(self) -> Deadlines:
        """How long each kind of waiting may last."""
        return Deadlines.of(self.digen.failure)

    @property
    def max_stale_ratio(self) -> float:
        """ρ of TCSS, 0 when it is off."""
        return self.digen.tcss.max_stale_ratio if self.digen.tcss.enable else 0.0

    @property
    def with_reference(self) -> bool:
        return self.kl_beta > 0

    def rows(self) -> list[tuple[str, str]]:
        """The plan as (what, value) for the table printed at start-up."""
        digen = self.digen
        mode = digen.placement + ("" if self.one_shot else " + GAP") + (" + TSP" if digen.tsp.enable else "")
        if digen.tcss.enable:
            limit = math.floor(self.max_stale_ratio * self.prompts + 1e-9)
            mode += f" + TCSS (at most {limit} of {self.prompts} groups one version stale, {digen.tcss.correction})"
        tile = f"at most {self.largest_tile} cells, within {digen.tsp.memory_fraction:.0%} of a device's memory"
        if digen.tsp.auto:
            tile += ", fewer where that is faster"
        span = "samples x transitions" if digen.tsp.enable else "samples at one transition"
        master = 8 if digen.arithmetic == "float64" else 4
        trained = self.transformer_parameters if not self.lora_rank else 0
        state = trained * 4 * master / self.trainer_ranks / 2**20
        anchor = "current forward (ratio exactly 1)" if self.on_policy else "rollout log-probs"
        if self.on_policy and digen.tcss.enable:
            anchor += "; of stale groups the rollout log-probs"
        return [
            ("mode", mode),
            ("Trainer pool", f"{self.trainer_ranks} ranks{_typed(digen.accelerator_type.trainer)}"),
            ("Generator pool", f"{self.replicas} replicas{_typed(digen.accelerator_type.rollout)}"),
            ("step", f"{self.prompts} prompts x {self.n} samples = {self.samples} samples"),
            ("logical batches", f"{self.logical_batches} of {self.prompts_per_batch} prompts, {self.epochs} epoch(s)"),
            ("cells per logical batch", f"{self.cells_per_batch} ({self.transitions} transitions per sample)"),
            ("fragment", f"{self.fragment_size} samples"),
            ("tile", f"{span}, {tile}"),
            ("anchor of the ratio", anchor),
            ("loss", f"{self.loss}, clip {self.clip_low:g}/{self.clip_high:g}, KL {self.kl_beta:g}"),
            ("fine-tuning", f"LoRA rank {self.lora_rank}" if self.lora_rank else "full"),
            (
                "memory per Trainer rank",
                f"transformer {self.transformer_bytes / 2**20 / self.trainer_ranks:.1f} MiB on disk"
                + (f", {state:.1f} MiB weights + gradients + AdamW" if trained else " + adapter state"),
            ),
            ("deadlines", ", ".join(f"{what} {seconds:g} s" for what, seconds, _ in self.deadlines.rows())),
            *(("note", note) for note in self.notes),
        ]


def _typed(accelerator: str | None) -> str:
    return f" of {accelerator}" if accelerator else ""


def resolve_plan(config: DictConfig) -> RunPlan:
    """Check a composed configuration and compute its plan.

    Raises:
        ValueError: with all the numbers that disagree and the option to change.
    """
    digen = parse_digen(config.trainer.v1.digen)
    _check_fixed(config)
    check_ranges(config)
    actor, rollout = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
    prompts, batch = config.data.train_batch_size, actor.ppo_mini_batch_size
    if batch > prompts or prompts % batch:
        raise ValueError(
            f"data.train_batch_size={prompts} prompts must be a multiple of "
            f"actor_rollout_ref.actor.ppo_mini_batch_size={batch} prompts"
        )
    if rollout.n < 2:
        raise ValueError(
            f"actor_rollout_ref.rollout.n={rollout.n}: group advantages of fewer than 2 samples are 0 and nothing is "
            "learned; set it to at least 2"
        )
    trainer_ranks = config.trainer.nnodes * config.trainer.n_gpus_per_node
    replicas = _replicas(config, digen, trainer_ranks)
    transitions = _transitions(digen)
    _check_dtypes(config, digen)
    samples = prompts * rollout.n
    _check_stale(digen, prompts, batch, actor.ppo_epochs)
    kl_beta = actor.kl_loss_coef if actor.use_kl_loss else 0.0
    notes, one_shot = _one_shot(digen, kl_beta)
    notes += _checkpoint_notes(config)
    parameters, size = transformer_size(config.actor_rollout_ref.model.path)
    _check_validation(config)
    _check_files(config)
    clip_low = actor.clip_ratio_low if actor.clip_ratio_low is not None else actor.clip_ratio
    clip_high = actor.clip_ratio_high if actor.clip_ratio_high is not None else actor.clip_ratio
    return RunPlan(
        digen=digen,
        prompts=prompts,
        n=rollout.n,
        logical_batches=prompts // batch,
        prompts_per_batch=batch,
        epochs=actor.ppo_epochs,
        transitions=transitions,
        trainer_ranks=trainer_ranks,
        replicas=replicas,
        fragment_size=_fragment_size(digen, rollout.n, samples, replicas),
        one_shot=one_shot,
        loss=actor.policy_loss.loss_mode,
        clip_low=clip_low,
        clip_high=clip_high,
        kl_beta=kl_beta,
        lora_rank=config.actor_rollout_ref.model.lora_rank,
        seed=config.data.seed if config.data.get("seed") is not None else 42,
        transformer_parameters=parameters,
        transformer_bytes=size,
        notes=notes,
    )


def _check_stale(digen: DigenConfig, prompts: int, batch: int, epochs: int) -> None:
    tcss = digen.tcss
    if not tcss.enable:
        return
    if math.floor(tcss.max_stale_ratio * prompts + 1e-9) < 1:
        raise ValueError(
            f"{PREFIX}.tcss.max_stale_ratio={tcss.max_stale_ratio} of data.train_batch_size={prompts} groups allows no "
            f"stale group; set it to at least {1 / prompts:g} or {PREFIX}.tcss.enable=false"
        )
    if tcss.correction == "decoupled" and (batch != prompts or epochs != 1):
        raise ValueError(
            f"{PREFIX}.tcss.correction=decoupled takes the current policy as the proximal one, which holds for one "
            f"commit per step: actor_rollout_ref.actor.ppo_mini_batch_size={batch} must be data.train_batch_size="
            f"{prompts} and actor_rollout_ref.actor.ppo_epochs={epochs} must be 1; or use correction=clip"
        )


def _fragment_size(digen: DigenConfig, n: int, samples: int, replicas: int) -> int:
    if digen.gap.enable:
        asked = digen.gap.fragment_size or n
        size = asked // n * n if asked >= n else math.ceil(n / math.ceil(n / asked))  # as schedule.gap cuts
    else:
        size = digen.sampling.batch_size or math.ceil(samples / replicas)
    return min(size, samples)


def _one_shot(digen: DigenConfig, kl_beta: float) -> tuple[tuple[str, ...], bool]:
    """Notes, and whether a step is generated whole before it is trained."""
    if digen.gap.enable and digen.algorithm.norm == "global" and kl_beta > 0:
        return (
            (
                "algorithm.norm=global needs the standard deviation of the whole logical batch before the first "
                "gradient when a KL is in the loss; GAP falls back to one-shot",
            ),
            True,
        )
    return (), not digen.gap.enable


def _checkpoint_notes(config: DictConfig) -> tuple[str, ...]:
    """A note if no run can go on from this run's checkpoints; unknown contents are an error."""
    option = "actor_rollout_ref.actor.checkpoint.save_contents"
    contents = list(config.actor_rollout_ref.actor.checkpoint.save_contents)
    known = (*RESUME_NEEDS, "hf_model")
    unknown = [name for name in contents if name not in known]
    if unknown or not contents:
        raise ValueError(f"{option}={contents}: choose one or more of {', '.join(known)}")
    lacking = [name for name in RESUME_NEEDS if name not in contents]
    if not lacking:
        return ()
    return (f"a run cannot be resumed from its checkpoints: {option} lacks {', '.join(lacking)}",)


def _replicas(config: DictConfig, digen: DigenConfig, trainer_ranks: int) -> int:
    rollout = config.actor_rollout_ref.rollout
    for name in ("tensor_model_parallel_size", "data_parallel_size", "pipeline_model_parallel_size"):
        if rollout[name] != 1:
            raise ValueError(
                f"actor_rollout_ref.rollout.{name}={rollout[name]}: a diffusers replica uses one device; set it to 1"
            )
    if digen.placement == "colocated":
        if rollout.nnodes:
            raise ValueError(
                f"actor_rollout_ref.rollout.nnodes={rollout.nnodes} is not read with {PREFIX}.placement=colocated; "
                f"set it to 0 or set {PREFIX}.placement=disaggregated"
            )
        if digen.accelerator_type.rollout not in (None, digen.accelerator_type.trainer):
            raise ValueError(
                f"{PREFIX}.accelerator_type.rollout={digen.accelerator_type.rollout} differs from the Trainer's "
                f"{digen.accelerator_type.trainer}, but colocated replicas use the Trainer's devices"
            )
        return trainer_ranks
    replicas = rollout.nnodes * rollout.n_gpus_per_node
    if replicas < 1:
        raise ValueError(
            f"{PREFIX}.placement=disaggregated needs a Generator pool: actor_rollout_ref.rollout.nnodes="
            f"{rollout.nnodes} x actor_rollout_ref.rollout.n_gpus_per_node={rollout.n_gpus_per_node} gives no device"
        )
    return replicas


def _transitions(digen: DigenConfig) -> int:
    """K, after checking that the selection is never empty and lies inside the steps."""
    from verl_digen.diffusion.windows import check_selection, select_steps

    options = digen.sampling.selection
    arguments = {
        "window_size": options.window_size,
        "window_range": None if options.window_range is None else tuple(options.window_range),
        "mode": options.mode,
        "stride": options.stride,
        "iterations": options.iterations,
        "fraction": options.fraction,
        "transition_kind": digen.sampling.kind,
    }
    try:
        check_selection(options.kind, digen.sampling.num_steps, **arguments)
    except ValueError as error:
        raise ValueError(f"{PREFIX}.sampling.selection: {error}") from error
    return len(select_steps(options.kind, digen.sampling.num_steps, key=0, **arguments).trained_steps)


def _check_fixed(config: DictConfig) -> None:
    """Options of veRL that a diffusion run needs at one value."""
    from verl_digen.diffusion.losses import get_loss

    wanted = {
        "actor_rollout_ref.actor.strategy": (config.actor_rollout_ref.actor.strategy, "fsdp2"),
        "actor_rollout_ref.rollout.name": (config.actor_rollout_ref.rollout.name, "diffusers"),
        "actor_rollout_ref.rollout.checkpoint_engine.backend": (
            config.actor_rollout_ref.rollout.checkpoint_engine.backend,
            "digen",
        ),
        "algorithm.adv_estimator": (config.algorithm.adv_estimator, "digen_group"),
        "reward.reward_manager.name": (config.reward.reward_manager.name, "diffusion"),
    }
    wrong = [f"{name}={found} (needs {value})" for name, (found, value) in wanted.items() if found != value]
    if wrong:
        raise ValueError(
            "trainer.v1.trainer_mode=digen needs other values of veRL's options; `- digen: default` in the recipe sets "
            f"them: {'; '.join(wrong)}"
        )
    get_loss(config.actor_rollout_ref.actor.policy_loss.loss_mode)
    if not config.trainer.v1.digen.rewards and not config.reward.custom_reward_function.path:
        raise ValueError(f"no reward: set {PREFIX}.rewards or reward.custom_reward_function.path")


def _check_dtypes(config: DictConfig, digen: DigenConfig) -> None:
    dtype = config.actor_rollout_ref.model.dtype
    if (digen.arithmetic == "float64") != (dtype == "float64"):
        raise ValueError(
            f"{PREFIX}.arithmetic={digen.arithmetic} and actor_rollout_ref.model.dtype={dtype}: float64 is used for "
            "both or for neither"
        )


def validates(config: DictConfig) -> bool:
    """Whether the run has any validation."""
    return bool(config.trainer.val_before_train) or config.trainer.test_freq > 0


def prompt_files(config: DictConfig, option: str) -> list[str]:
    """The files of ``data.train_files`` or ``data.val_files``, which are null, one or several."""
    files = config.data[option]
    return [files] if isinstance(files, str) else list(files or [])


def _check_validation(config: DictConfig) -> None:
    n = config.actor_rollout_ref.rollout.val_kwargs.n
    if n < 1:
        raise ValueError(
            f"actor_rollout_ref.rollout.val_kwargs.n={n} must be 1 or more; to run no validation, set "
            "trainer.test_freq=-1 and trainer.val_before_train=false"
        )
    if config.trainer.val_only and not config.trainer.val_before_train:
        raise ValueError(
            "trainer.val_only=true runs the validation before training and ends, but trainer.val_before_train=false "
            "switches that off; set trainer.val_before_train=true"
        )
    if validates(config) and not prompt_files(config, "val_files"):
        raise ValueError(
            f"data.val_files={config.data.val_files}: trainer.val_before_train={config.trainer.val_before_train} and "
            f"trainer.test_freq={config.trainer.test_freq} ask for a validation; name a file, or set "
            "trainer.val_before_train=false and trainer.test_freq=-1"
        )


def _check_files(config: DictConfig) -> None:
    if not prompt_files(config, "train_files"):
        raise ValueError(f"data.train_files={config.data.train_files}: a run needs prompts to train; name a file")
    for option in ("train_files", "val_files") if validates(config) else ("train_files",):
        for file in prompt_files(config, option):
            if not os.path.isfile(os.path.expanduser(file)):
                raise ValueError(f"data.{option}: {file} does not exist (for digits: verl-digen prepare digits)")


def transformer_size(path: str) -> tuple[int, int]:
    """(parameters, bytes) of the transformer in a model folder, from the headers of its safetensors files.

    Raises:
        ValueError: no weights there, or files that cannot be loaded.
    """
    folder = Path(os.path.expanduser(path)) / "transformer"
    weights = part_weights(folder)
    if weights.problems:
        raise ValueError(f"actor_rollout_ref.model.path={path}: in {folder}: {'; '.join(weights.problems)}")
    return weights.parameters, weights.bytes
