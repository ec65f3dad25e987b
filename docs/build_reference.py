"""Writes docs/configuration.md out of the dataclasses of verl_digen/config and the list of veRL options that are read.

    python docs/build_reference.py          # write the page
    python docs/build_reference.py --check  # exit status 1 if the page is not what would be written

Names and defaults come from the code; the meaning of each option stands here. An option without a meaning, and a
meaning without an option, are errors.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

PAGE = Path(__file__).with_name("configuration.md")

SECTIONS = {
    "": "Mode",
    "accelerator_type": "Accelerator types",
    "sampling": "Sampling",
    "sampling.selection": "Which transitions are trained",
    "validation": "Validation",
    "algorithm": "Algorithm",
    "rewards": "Rewards",
    "reward_workers": "Reward workers",
    "ema": "Averaged weights",
    "gap": "Generation-axis pipeline (GAP)",
    "tsp": "Timestep parallelism (TSP)",
    "tcss": "One version stale (TCSS)",
    "trace": "Timelines",
    "failure": "Failures and deadlines",
    "threads": "CPU threads",
}

DIGEN = {
    "preset": "`digen` switches `gap.enable` and `tsp.enable` on where they are null.",
    "placement": "`colocated`: every Trainer rank is a replica too, the devices generate and train in turn. "
    "`disaggregated`: a Trainer pool and a Generator pool, each a Ray placement group of its own.",
    "accelerator_type.trainer": "Ray resource that the nodes of the Trainer pool must have, for example "
    "`accelerator_type:H100`.",
    "accelerator_type.rollout": "The same for the Generator pool. Colocated: null, or the same as for the Trainer.",
    "accelerator_type.reward": "The same for reward workers with devices.",
    "reward_workers.num_gpus": "Devices of each of the `reward.num_workers` processes, in a placement group of their "
    "own: 0, a share of one device, or whole devices.",
    "arithmetic": "Dtype of latents, transitions, log-probs, losses, master weights and optimizer state: `float32` or "
    "`float64`. `float64` needs `actor_rollout_ref.model.dtype=float64`; equivalence tests use it.",
    "sampling.num_steps": "Denoising steps T.",
    "sampling.kind": "Transition kernel of the SDE steps: `sde`, `dance` or `cps`, see [math](math.md).",
    "sampling.eta": "Noise level, above 0; at most 1 for `cps`.",
    "sampling.guidance_scale": "True classifier-free guidance, in sampling and in training. 1.0 is none, "
    "0.0 really is 0.",
    "sampling.guidance_rescale": "Bring the norm of the guided velocity back to that of the conditional one. Refused "
    "without guidance.",
    "sampling.embedded_guidance": "Guidance that a distilled model takes as an input (FLUX.1-dev, HunyuanVideo).",
    "sampling.split_cfg": "Guidance by two forwards instead of one twice as large, for less memory.",
    "sampling.shift": "Shift of the schedule; null takes the model's own. Refused where it depends on the resolution.",
    "sampling.height": "Pixels; null takes the model's own size.",
    "sampling.width": "Pixels; null takes the model's own size.",
    "sampling.num_frames": "Frames; null takes the model's own. Image families make 1.",
    "sampling.same_noise": "One initial noise for all samples of a group. The SDE noise still differs.",
    "sampling.batch_size": "Samples that a replica denoises in one batch when GAP is off; null splits the step evenly "
    "over the replicas. With GAP on, `gap.fragment_size` says it.",
    "sampling.selection.kind": "`all`: all steps but the last are SDE and trained. `window`: some consecutive steps "
    "are SDE and trained. `fraction`: all but the last are SDE, a random part of them is trained.",
    "sampling.selection.window_size": "Steps in the window. Needed by `window`.",
    "sampling.selection.window_range": "`[a, b]`: the window lies in a ≤ step < b; null takes all steps but the last.",
    "sampling.selection.mode": "Position of the window: `random`, or `progressive` through the training steps.",
    "sampling.selection.stride": "Steps by which a progressive window moves.",
    "sampling.selection.iterations": "Training steps for which a progressive window stays where it is.",
    "sampling.selection.fraction": "In (0, 1]: ⌊f·(T − 1)⌋ steps are trained. Needed by `fraction`.",
    "sampling.selection.per": "The random choice is drawn per prompt `group` or per training `step`. Never per sample.",
    "validation.num_steps": "Denoising steps in validation, which samples by the ODE; null takes `sampling.num_steps`.",
    "validation.guidance_scale": "Guidance in validation; null takes `sampling.guidance_scale`.",
    "validation.batch_size": "Samples that a replica denoises in one batch in validation; null takes as many as in "
    "training.",
    "validation.grid_samples": "Images in the sample grid written at each validation; 0 writes none.",
    "validation.metrics": "Metric name → entry as of a reward, without `weight`: figures of all validation samples, "
    "see [rewards](rewards.md#validation-metrics).",
    "algorithm.norm": "Advantage: reward minus group mean, divided by the std of the `group`, by the std of all "
    "samples of the logical batch (`global`), or by nothing (`none`). `global` together with a KL makes GAP fall back "
    "to one-shot, and the plan says so.",
    "algorithm.adv_max": "Advantages are clamped to ± this.",
    "algorithm.kl_form": "KL to the reference, if `actor.use_kl_loss` is set: of the `transition`, "
    "`transition_without_delta` as FlowGRPO's code has it (published β belong to it), or the squared "
    "difference of the `velocity`.",
    "rewards": "Reward name → entry, see below and [rewards](rewards.md).",
    "ema.enable": "Keep an exponential moving average of the trained weights; it is in the checkpoints.",
    "ema.decay": "In [0, 1).",
    "ema.every": "Optimizer steps between two updates of the average.",
    "ema.validate": "Validate with the averaged weights. Needs `ema.enable`.",
    "gap.enable": "null: as the preset says, off without one. "
    "Train a group as soon as it is complete and scored, while others are generated. Off: the whole step "
    "is generated and scored first (one-shot).",
    "gap.fragment_size": "Most samples that are generated and scored at once: whole groups, or equal parts of one; "
    "null takes `rollout.n`. Refused with `gap.enable=false`.",
    "tsp.enable": "null: as the preset says, off without one. "
    "A tile may span several transitions of a sample. Off: a tile holds samples at one transition.",
    "tsp.max_cells": "Most cells (sample × transition) in one forward and backward; null sets no limit. Read "
    "with TSP off too.",
    "tsp.auto": "Search for the number of cells before the first step: from 1, doubled until a doubling gains less "
    "than 3 % or no longer fits; `max_cells` stays the limit. Off: as many as fit. The size depends on measured times, "
    "so two runs may differ in rounding.",
    "tsp.memory_fraction": "Share of a device's memory that the largest tile may fill; more counts as out of memory. "
    "Not read on a CPU.",
    "tsp.reduce": "Gradients are reduced over the ranks once per `transaction`, and are whole on every rank until "
    "then; or after every `tile`, which needs less memory and more communication.",
    "tcss.enable": "Replicas begin groups of the next step with the weights they hold while this step still trains and "
    "publishes, see [scheduling](scheduling.md). Needs GAP and disaggregated placement.",
    "tcss.max_stale_ratio": "At most this share of the groups of a step, rounded down, is one version stale; above 0, "
    "at most 1. No group is ever two versions stale.",
    "tcss.correction": "Loss of stale groups: `clip` (ratio to the policy that sampled them, clipped as ever), or "
    "`decoupled` (ratio to the current policy, weighed by the truncated importance weight; one optimizer step per "
    "rollout).",
    "tcss.weight_cap": "Largest importance weight with `decoupled`.",
    "trace.every": "Write the timeline (JSON for Perfetto, PNG) and the measured costs of every so many steps to "
    "`traces/` of `trainer.default_local_dir`; 0 writes none.",
    "failure.max_retries": "Attempts after the first one, for a fragment and for scoring it, before the step fails.",
    "failure.generate_timeout_s": "How long one fragment may take in a replica. Every other deadline of a run is a sum "
    "of these four; the plan that is printed at start-up lists them.",
    "failure.reward_timeout_s": "How long scoring a fragment may take.",
    "failure.train_timeout_s": "How long one call of the Trainer may take: all that is accumulated of a logical batch "
    "when it is complete, or its commit.",
    "failure.sync_timeout_s": "How long it may take to move the weights once: from disk (start, resume, restart), to a "
    "checkpoint, or through the weight channel when all its ends are there. A reward worker's start too.",
    "threads.trainer": "Threads of each training process on a CPU; null leaves torch's default.",
    "threads.rollout": "The same for each replica.",
}

REWARD_ENTRY = {
    "weight": "Factor in the weighted sum; 0 only reports the reward.",
    "path": "Python file with a function of your own; null takes a registered one.",
    "name": "Name of the function; null takes the entry's own name.",
    "kwargs": "Further keyword arguments of the function.",
    "batched": "The function takes the samples of a fragment in one call, as lists.",
}

MODEL = {
    "path": "Folder in the diffusers layout (`model_index.json`, `transformer/`, `scheduler/`, ...), on a local disk. "
    "Mandatory. Weights are read from safetensors only.",
    "family": "Model family by name; null finds it by the pipeline class in `model_index.json`.",
    "dtype": "Dtype of the forward and backward, the same in rollout and training: `float32`, `bfloat16` or "
    "`float64`. `float16` is refused: small gradients would vanish in it.",
    "attention_backend": "A name of diffusers' attention switch (`native`, `flash`, `_flash_3`, ...), the same on both "
    "sides; null leaves the model as diffusers builds it.",
    "enable_gradient_checkpointing": "Recompute activations in the backward pass.",
    "lora_rank": "0 is full fine-tuning.",
    "lora_alpha": "LoRA scale is alpha / rank.",
    "target_modules": "List of module names that get an adapter; null takes the family's own list. "
    "Refused with rank 0.",
    "lora_adapter_path": "Adapter to start from: a safetensors file or folder that diffusers, peft or "
    "`verl-digen export` wrote, or a checkpoint `global_step_N`. Its rank and alpha must be the run's (a file without "
    "alpha: alpha = rank). Refused with rank 0.",
}

READ_MEANING = {
    "actor_rollout_ref.actor.checkpoint.save_contents*": "What a checkpoint holds: `model` (weights and EMA), "
    "`optimizer` (its state), `extra` (LR schedule), `hf_model` (full runs: also `transformer/` as diffusers loads "
    "it). Resuming needs the first three. LoRA runs always write `lora_adapter/` as diffusers and peft load it.",
    "actor_rollout_ref.actor.clip_ratio": "Clip range of the ratio. Log-probs are means over latent elements: use "
    "1e-5 … 1e-3.",
    "actor_rollout_ref.actor.clip_ratio_high": "Upper clip range, if it differs.",
    "actor_rollout_ref.actor.clip_ratio_low": "Lower clip range, if it differs.",
    "actor_rollout_ref.actor.fsdp_config.fsdp_size": "Ranks that share one copy of the weights; −1 is all.",
    "actor_rollout_ref.actor.fsdp_config.offload_policy": "FSDP2's own CPU offload.",
    "actor_rollout_ref.actor.fsdp_config.optimizer_offload": "Optimizer state on the host between transactions.",
    "actor_rollout_ref.actor.fsdp_config.param_offload": "Weights of the Trainer on the host between transactions.",
    "actor_rollout_ref.actor.fsdp_config.reshard_after_forward": "FSDP2: free the gathered weights after the forward. "
    "`false` needs room for all of them; with several ranks they are then gathered once per transaction instead of "
    "twice per tile (`tsp.reduce=transaction`, no offloading).",
    "actor_rollout_ref.actor.kl_loss_coef": "Weight β of the KL, read if `use_kl_loss` is set.",
    "actor_rollout_ref.actor.optim.betas*": "Of Adam's kind of optimizers: two numbers, each at least 0 and below 1.",
    "actor_rollout_ref.actor.optim.clip_grad": "Largest gradient norm; 0 and null leave the gradient as it is.",
    "actor_rollout_ref.actor.optim.lr": "Learning rate.",
    "actor_rollout_ref.actor.optim.lr_scheduler_type": "`constant` or `cosine`.",
    "actor_rollout_ref.actor.optim.lr_warmup_steps": "Optimizer steps with a rising rate; 0 and −1: as "
    "`lr_warmup_steps_ratio` says.",
    "actor_rollout_ref.actor.optim.lr_warmup_steps_ratio": "Share of all optimizer steps with a rising rate.",
    "actor_rollout_ref.actor.optim.min_lr_ratio": "Last rate of the cosine, as a share of `lr`.",
    "actor_rollout_ref.actor.optim.num_cycles": "Waves of the cosine.",
    "actor_rollout_ref.actor.optim.optimizer": "Class of the optimizer.",
    "actor_rollout_ref.actor.optim.optimizer_impl": "Module of that class.",
    "actor_rollout_ref.actor.optim.override_optimizer_config*": "Further keyword arguments of that class (`eps`, ...).",
    "actor_rollout_ref.actor.optim.weight_decay": "Weight decay.",
    "actor_rollout_ref.actor.optim.zero_indexed_step": "Whether the cosine counts optimizer steps from 0.",
    "actor_rollout_ref.actor.policy_loss.loss_mode": "Loss by name. There is one: `flow_grpo`.",
    "actor_rollout_ref.actor.ppo_epochs": "Passes over the samples of a step.",
    "actor_rollout_ref.actor.ppo_mini_batch_size": "Prompts of a logical batch (one optimizer step); divides "
    "`data.train_batch_size`.",
    "actor_rollout_ref.actor.use_kl_loss": "Put the KL to the initial policy into the loss. LoRA: the adapter switched "
    "off is the reference, or a frozen copy of `lora_adapter_path`; full: a frozen second module is loaded.",
    "actor_rollout_ref.model.*": "The model, see above.",
    "actor_rollout_ref.rollout.checkpoint_engine.update_weights_bucket_megabytes": "Bucket of the weight channel.",
    "actor_rollout_ref.rollout.n": "Samples of a prompt group; at least 2.",
    "actor_rollout_ref.rollout.n_gpus_per_node": "Generator pool: devices per node. Disaggregated only.",
    "actor_rollout_ref.rollout.nnodes": "Generator pool: nodes. 0 with `placement=colocated`.",
    "actor_rollout_ref.rollout.val_kwargs.n": "Samples of each validation prompt.",
    "data.seed": "Run seed: order of prompts and every noise key.",
    "data.shuffle": "Shuffle the prompts in each epoch.",
    "data.train_batch_size": "Prompts of a step.",
    "data.train_files*": "Parquet file(s) of training prompts.",
    "data.val_files*": "Parquet file(s) of validation prompts.",
    "ray_kwargs.*": "Arguments of `ray.init`, as in veRL.",
    "recipe.*": "A recipe's own variables, for its interpolations.",
    "reward.custom_reward_function.*": "`path` and `name` of a function with veRL's signature; `weight` may be added. "
    "It is one more reward, `custom`.",
    "reward.num_workers": "Reward worker processes.",
    "trainer.default_local_dir": "Folder of checkpoints and of `grids/`.",
    "trainer.device": "`cuda`, `npu` or `cpu`.",
    "trainer.experiment_name": "For the loggers.",
    "trainer.logger*": "veRL's loggers: `console`, `file`, `tensorboard`, `wandb`, ...",
    "trainer.max_actor_ckpt_to_keep": "Older checkpoints beyond this number are removed.",
    "trainer.n_gpus_per_node": "Trainer pool: devices per node (in colocated placement the only pool).",
    "trainer.nnodes": "Trainer pool: nodes.",
    "trainer.project_name": "For the loggers.",
    "trainer.resume_from_path": "Checkpoint folder, with `resume_mode=resume_path`.",
    "trainer.resume_mode": "`auto`, `disable` or `resume_path`.",
    "trainer.rollout_data_dir": "Write the images and rewards of every training step there.",
    "trainer.save_freq": "Steps between checkpoints; −1 writes none.",
    "trainer.test_freq": "Steps between validations; −1 runs none.",
    "trainer.total_epochs": "Epochs over the training prompts.",
    "trainer.total_training_steps": "Steps; null takes all steps of `total_epochs`.",
    "trainer.v1.digen.*": "The plugin's own options, see above.",
    "trainer.val_before_train": "Validate before the first step.",
    "trainer.val_only": "Validate, then stop.",
    "trainer.validation_data_dir": "Write the images and rewards of every validation there.",
    "transfer_queue.*": "veRL's TransferQueue.",
}

INTRO = """\
# Configuration

<!-- Written by docs/build_reference.py; edit the text there. -->

A run is configured as every veRL run: Hydra composes veRL's `ppo_trainer`, our group `digen: default` and a recipe, and
every option can be set on the command line. `digen: default` sets what a diffusion run needs of veRL (trainer mode,
model config, replica, engine, channel, advantage, loss, reward manager). Our group is found without flags once the
package is installed:

```
python -m verl.trainer.main_ppo --config-name digits trainer.v1.digen.tsp.enable=true
python -m verl.trainer.main_ppo +digen=default actor_rollout_ref.model.path=DIR ...
```

Options are checked before a device is taken. An unknown name, a wrong type, an impossible value, an option that the
chosen mode does not read, and an option of veRL that a diffusion run does not read are errors that name the option. The
sizes that follow from them are printed at start as "resolved plan".
"""


def leaves(cls: type, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted name, default) of every option of a dataclass, sections opened."""
    for field in dataclasses.fields(cls):
        if not field.init or field.name.startswith("_"):  # set by the class itself, or veRL's own bookkeeping
            continue
        default = field.default if field.default is not dataclasses.MISSING else field.default_factory()
        if dataclasses.is_dataclass(default):
            yield from leaves(type(default), f"{prefix}{field.name}.")
        else:
            yield prefix + field.name, default


def matched(options: dict[str, Any], meanings: dict[str, str], what: str) -> Iterator[tuple[str, Any, str]]:
    """(option, default, meaning) in the order of the code.

    Raises:
        ValueError: an option without a meaning, or a meaning without an option.
    """
    if set(options) != set(meanings):
        raise ValueError(
            f"{what}: without a meaning: {sorted(set(options) - set(meanings))}; "
            f"without an option: {sorted(set(meanings) - set(options))}"
        )
    return ((name, default, meanings[name]) for name, default in options.items())


def value(default: Any) -> str:
    """A default as it is written in YAML."""
    if default is None:
        return "null"
    if isinstance(default, bool):
        return str(default).lower()
    if default == "":
        return "???"
    return str(default)


def table(rows: Iterator[tuple[str, Any, str]], prefix: str = "") -> str:
    lines = ["| option | default | meaning |", "|---|---|---|"]
    lines += [f"| `{prefix}{name}` | `{value(default)}` | {meaning} |" for name, default, meaning in rows]
    return "\n".join(lines) + "\n"


def build() -> str:
    """The whole page."""
    from verl_digen.config.digen import PREFIX, DigenConfig, RewardSpec
    from verl_digen.config.model import DiffusionModelConfig
    from verl_digen.config.unread import READ

    parts = [INTRO, f"## Options of the plugin: `{PREFIX}`\n"]
    rows = list(matched(dict(leaves(DigenConfig)), DIGEN, PREFIX))
    grouped = {section: [r for r in rows if section_of(r[0]) == section] for section in SECTIONS}
    if sum(map(len, grouped.values())) != len(rows):
        raise ValueError(f"a section has no title: {sorted({section_of(name) for name, *_ in rows} - set(SECTIONS))}")
    for section, title in SECTIONS.items():
        parts.append(f"### {title}\n")
        parts.append(table(iter(grouped[section]), f"{PREFIX}."))
        if section == "rewards":
            parts.append("An entry of `rewards`:\n")
            parts.append(table(matched(dict(leaves(RewardSpec)), REWARD_ENTRY, "rewards"), f"{PREFIX}.rewards.NAME."))
    parts.append("## The model: `actor_rollout_ref.model`\n")
    parts.append(table(matched(dict(leaves(DiffusionModelConfig)), MODEL, "model"), "actor_rollout_ref.model."))
    parts.append("## Options of veRL that a diffusion run reads\n")
    parts.append(
        "Defaults are veRL's with those of `digen: default` on top. `*` stands for any ending. Every other option of "
        "veRL that differs from its default is an error.\n"
    )
    rows = matched(read_defaults(READ), READ_MEANING, "READ")
    parts.append(table((name, default, with_range(name, meaning)) for name, default, meaning in rows))
    return "\n".join(parts)


def with_range(name: str, meaning: str) -> str:
    """The meaning, and the range that is checked."""
    from verl_digen.config.ranges import RANGES

    return f"{meaning} {str(RANGES[name])[0].upper()}{str(RANGES[name])[1:]}." if name in RANGES else meaning


def section_of(name: str) -> str:
    """``sampling.selection.kind`` -> ``sampling.selection``; an option that is its own section stays itself."""
    return name if name in SECTIONS else name.rpartition(".")[0]


def read_defaults(patterns: tuple[str, ...]) -> dict[str, Any]:
    """Defaults of the patterns that name one option; for the others a dash."""
    from hydra import compose, initialize_config_module
    from omegaconf import OmegaConf

    with initialize_config_module(config_module="verl.trainer.config", version_base=None):
        config = compose("ppo_trainer", overrides=["hydra.searchpath=[pkg://verl_digen.config]", "+digen=default"])
    found = {}
    for pattern in patterns:
        name = pattern.removesuffix("*")
        default = "–" if name.endswith(".") else OmegaConf.select(config, name)
        found[pattern] = OmegaConf.to_container(default) if OmegaConf.is_config(default) else default
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="compare instead of writing")
    page = build()
    if parser.parse_args().check:
        return int(page != PAGE.read_text())
    PAGE.write_text(page)
    return 0


if __name__ == "__main__":
    sys.exit(main())
