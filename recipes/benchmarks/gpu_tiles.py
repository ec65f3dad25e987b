"""Cost of training tiles and sampling batches, and agreement of rollout and training log-probs, on one device.

``python recipes/benchmarks/gpu_tiles.py [--models flux wan qwen] [--depth 4] [--json FILE]`` prints one table;
``--device cpu --tiny`` runs the same code on tiny networks. One process, without Ray and without veRL.

The networks are diffusers' transformers with the published widths and heads of FLUX.1, Wan2.1-14B and Qwen-Image,
fewer blocks, and random weights, the output scaled to velocities of RMS 1. Three kinds of rows:

- ``agreement``: trajectories are sampled in one batch, without gradient; their transitions are scored again in
  training tiles of other shapes. |lp difference| is between the two log-probs (mean over the latent elements), and
  |r - 1| is how far the first importance ratio is from 1.
- ``sample``: one denoising step of a batch.
- ``train``: forward and backward of the FlowGRPO loss over a tile of samples x transitions, a cell each, with a sigma
  of its own. There is no optimizer step; gradients stay allocated, as between the tiles of a step.

Times per cell hold for the reduced depth: compare shapes with each other, not with the time of the whole model. Peak
memory includes the weights and, in training, their gradients.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import diffusers
import torch
from diffusers.models.attention_dispatch import dispatch_attention_fn
from rich import box
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from verl_digen.diffusion.denoise import DenoiseResult, denoise, run_to_end
from verl_digen.diffusion.kernels import Transition, transition
from verl_digen.diffusion.losses import FlowGRPOConfig, compute_loss, ratio_metrics
from verl_digen.diffusion.noise import draw, initial_noise, sample_key, transition_noise
from verl_digen.diffusion.windows import StepSelection
from verl_digen.models.attention import attention_backends, use_attention_backend

GIB = 2**30
SEED = 0
KIND, ETA, SHIFT = "sde", 0.7, 3.0
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
LORA_TARGETS = ("to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out")
MEASURED = ("ms", "ms_per_cell", "speedup_per_cell", "peak_gib", "lp_diff_mean", "lp_diff_max", "ratio_dev_max")
SKIPPED = "skipped: time budget"

Condition = dict[str, Tensor]


@dataclass(frozen=True, kw_only=True)
class Network:
    """A transformer of one family and how it is called.

    Attributes:
        transformer: the denoiser, on the device of the run.
        latent_shape: shape of one sample's latents as the transformer takes them (packed tokens for FLUX and Qwen).
        tokens: latent tokens of one sample; text tokens come on top of them.
        condition_shapes: shape of each prompt tensor of one sample.
        call: (transformer, x [B, ...], sigma [B] fp32, conditions [B, ...]) -> velocity [B, ...].
    """

    transformer: nn.Module
    latent_shape: tuple[int, ...]
    tokens: int
    condition_shapes: dict[str, tuple[int, ...]]
    call: Callable[[nn.Module, Tensor, Tensor, Condition], Tensor]

    def predict(self, x: Tensor, sigma: Tensor, cond: Condition) -> Tensor:
        """Velocity (noise - data) [B, ...] in the dtype of ``x``; the forward runs in the dtype of ``cond``."""
        dtype = next(iter(cond.values())).dtype
        return self.call(self.transformer, x.to(dtype), sigma.float(), cond).to(x.dtype)


@dataclass(frozen=True, kw_only=True)
class Cells:
    """C cells: one sample at one transition each.

    Attributes:
        x, x_next: [C, ...] latents in fp32. sigma, sigma_next, advantage: [C]. cond: prompt tensors [C, ...].
    """

    x: Tensor
    x_next: Tensor
    sigma: Tensor
    sigma_next: Tensor
    advantage: Tensor
    cond: Condition


# ---- networks ----------------------------------------------------------------------------------------------


def flux(size: tuple[int, int], depth: int, text: int, tiny: bool) -> Network:
    """FLUX.1: 24 heads x 128; depth / 2 double and depth single blocks (published: 19 and 38). Guidance embedded."""
    rows, columns = (side // 16 for side in size)
    widths = {"joint_attention_dim": 4096, "pooled_projection_dim": 768}
    if tiny:
        widths = {"joint_attention_dim": 32, "pooled_projection_dim": 16}
    transformer = diffusers.FluxTransformer2DModel(
        num_layers=depth // 2, num_single_layers=depth, guidance_embeds=True, **heads(tiny, rope=True), **widths
    )

    def call(module: nn.Module, x: Tensor, sigma: Tensor, cond: Condition) -> Tensor:
        ids = torch.zeros(rows, columns, 3, device=x.device)
        ids[..., 1] += torch.arange(rows, device=x.device)[:, None]
        ids[..., 2] += torch.arange(columns, device=x.device)
        return module(
            hidden_states=x,
            timestep=sigma,
            guidance=torch.full_like(sigma, 3.5),
            encoder_hidden_states=cond["prompt_embeds"],
            pooled_projections=cond["pooled_prompt_embeds"],
            img_ids=ids.flatten(0, 1),
            txt_ids=torch.zeros(text, 3, device=x.device),
            return_dict=False,
        )[0]

    return Network(
        transformer=transformer,
        latent_shape=(rows * columns, transformer.config.in_channels),
        tokens=rows * columns,
        condition_shapes={
            "prompt_embeds": (text, widths["joint_attention_dim"]),
            "pooled_prompt_embeds": (widths["pooled_projection_dim"],),
        },
        call=call,
    )


def wan(size: tuple[int, int, int], depth: int, text: int, tiny: bool) -> Network:
    """Wan2.1-14B: 40 heads x 128, feed-forward 13824 (published depth: 40)."""
    height, width, frames = size
    latent = ((frames - 1) // 4 + 1, height // 8, width // 8)
    widths = {"text_dim": 32, "freq_dim": 32, "ffn_dim": 64} if tiny else {"text_dim": 4096, "ffn_dim": 13824}
    transformer = diffusers.WanTransformer3DModel(num_layers=depth, **heads(tiny, published=40), **widths)

    def call(module: nn.Module, x: Tensor, sigma: Tensor, cond: Condition) -> Tensor:
        prompt = cond["prompt_embeds"]
        return module(hidden_states=x, timestep=sigma * 1000, encoder_hidden_states=prompt, return_dict=False)[0]

    return Network(
        transformer=transformer,
        latent_shape=(transformer.config.in_channels, *latent),
        tokens=math.prod(latent) // 4,
        condition_shapes={"prompt_embeds": (text, widths["text_dim"])},
        call=call,
    )


def qwen(size: tuple[int, int], depth: int, text: int, tiny: bool) -> Network:
    """Qwen-Image: 24 heads x 128 (published depth: 60)."""
    rows, columns = (side // 16 for side in size)
    width = 32 if tiny else 3584
    transformer = diffusers.QwenImageTransformer2DModel(
        num_layers=depth, joint_attention_dim=width, **heads(tiny, rope=True)
    )

    def call(module: nn.Module, x: Tensor, sigma: Tensor, cond: Condition) -> Tensor:
        return module(
            hidden_states=x,
            timestep=sigma,
            encoder_hidden_states=cond["prompt_embeds"],
            img_shapes=[[(1, rows, columns)]] * len(x),
            return_dict=False,
        )[0]

    return Network(
        transformer=transformer,
        latent_shape=(rows * columns, transformer.config.in_channels),
        tokens=rows * columns,
        condition_shapes={"prompt_embeds": (text, width)},
        call=call,
    )


def heads(tiny: bool, *, published: int = 24, rope: bool = False) -> dict:
    """Attention heads, of 128 channels each or, tiny, 2 heads of 16; with the split of a head over rotary axes."""
    shape = {"num_attention_heads": 2 if tiny else published, "attention_head_dim": 16 if tiny else 128}
    return shape | ({"axes_dims_rope": (4, 6, 6) if tiny else (16, 56, 56)} if rope else {})


BUILDERS = {"flux": flux, "wan": wan, "qwen": qwen}


def build(model: str, args: argparse.Namespace) -> Network:
    """The network of ``model`` on the device: random weights of a fixed seed, cast, scaled, with its trained part."""
    torch.manual_seed(SEED)
    size = args.video_size if model == "wan" else args.image_size
    with torch.device(args.device):
        network = BUILDERS[model](size, args.depth, args.text_tokens, args.tiny)
    transformer = network.transformer.eval()
    # as diffusers loads it: parts named by the class stay in fp32
    keep = set(transformer._keep_in_fp32_modules or ())
    for name, tensor in [*transformer.named_parameters(), *transformer.named_buffers()]:
        if tensor.is_floating_point() and not keep & set(name.split(".")):
            tensor.data = tensor.data.to(DTYPES[args.dtype])
    use_attention_backend(transformer, args.attention, args.device)
    if args.lora_rank:
        from verl_digen.models.lora import add_lora

        rank, dtype = args.lora_rank, DTYPES[args.dtype]
        add_lora(transformer, rank=rank, alpha=2 * rank, target_modules=LORA_TARGETS, dtype=dtype, seed=SEED)
    if args.checkpointing:
        transformer.enable_gradient_checkpointing()
    scale_output(network, args)
    return network


@torch.no_grad()
def scale_output(network: Network, args: argparse.Namespace) -> None:
    """Scale the last layer so that velocities have RMS 1, as those of a trained model: errors are relative to it."""
    tile = synthetic_cells(network, 1, 1, args)
    rms = network.predict(tile.x, tile.sigma, tile.cond).square().mean().sqrt()
    for parameter in network.transformer.proj_out.parameters():
        parameter.div_(rms)


# ---- cells -------------------------------------------------------------------------------------------------


def schedule(steps: int) -> Tensor:
    """[steps + 1] sigmas from 1 to 0 with the static shift ``SHIFT``."""
    t = torch.linspace(1, 0, steps + 1, dtype=torch.float64)
    return (SHIFT * t / (1 + (SHIFT - 1) * t)).float()


def conditions(network: Network, samples: Sequence[int], args: argparse.Namespace) -> Condition:
    """Random prompt tensors of samples, another prompt each: [B, ...] in the dtype of the run."""
    out = {}
    for index, (name, shape) in enumerate(network.condition_shapes.items()):
        keys = {j: sample_key(SEED, "prompt", j, "init", index) for j in samples}
        drawn = {j: draw(key, shape, DTYPES[args.dtype], args.device) for j, key in keys.items()}
        out[name] = torch.stack([drawn[j] for j in samples])
    return out


def synthetic_cells(network: Network, samples: int, transitions: int, args: argparse.Namespace) -> Cells:
    """A tile of samples x transitions on straight paths between noise and data; transition k is step k (wrapped)."""
    sigmas = schedule(args.steps)
    cells = [(j, k % (args.steps - 1)) for j in range(samples) for k in range(transitions)]
    pairs = [("synthetic", j) for j, _ in cells]
    noise = initial_noise(SEED, pairs, network.latent_shape, device=args.device)
    data = transition_noise(SEED, pairs, 0, network.latent_shape, device=args.device)
    sigma, sigma_next = (sigmas[[k + ahead for _, k in cells]].to(args.device) for ahead in (0, 1))
    wide, wide_next = (s.reshape(-1, *[1] * len(network.latent_shape)) for s in (sigma, sigma_next))
    return Cells(
        x=(1 - wide) * data + wide * noise,
        x_next=(1 - wide_next) * data + wide_next * noise,
        sigma=sigma,
        sigma_next=sigma_next,
        advantage=torch.tensor([1.0 - 2.0 * (j % 2) for j, _ in cells], device=args.device),
        cond=conditions(network, [j for j, _ in cells], args),
    )


def recorded_cells(
    result: DenoiseResult, cond: Condition, samples: range, transitions: range, device: str
) -> tuple[Cells, Tensor]:
    """Recorded transitions as one tile, sample by sample, and their rollout log-probs [C]."""
    cells = [(j, k) for j in samples for k in transitions]
    starts = [result.starts[j][k] for j, k in cells]

    def states(ahead: int) -> tuple[Tensor, Tensor]:
        places = [(j, start + ahead) for (j, _), start in zip(cells, starts, strict=True)]
        return (
            torch.stack([result.latents[j][i] for j, i in places]),
            torch.stack([result.sigmas[j][i] for j, i in places]).to(device),
        )

    (x, sigma), (x_next, sigma_next) = states(0), states(1)
    rows = [j for j, _ in cells]
    tile = Cells(
        x=x,
        x_next=x_next,
        sigma=sigma,
        sigma_next=sigma_next,
        advantage=torch.ones(len(cells), device=device),
        cond={name: value[rows] for name, value in cond.items()},
    )
    return tile, torch.stack([result.log_probs[j][k] for j, k in cells])


# ---- what is measured --------------------------------------------------------------------------------------


def score(network: Network, cells: Cells) -> Transition:
    """One forward over all cells, each at its own sigma, and the log-prob [C] of its recorded ``x_next``."""
    velocity = network.predict(cells.x, cells.sigma, cells.cond)
    return transition(KIND, cells.x, velocity, cells.sigma, cells.sigma_next, ETA, x_next=cells.x_next)


def train_tile(network: Network, cells: Cells, planned_cells: int) -> None:
    """Forward and backward of the FlowGRPO loss; adds to the gradients."""
    log_prob = score(network, cells).log_prob
    tile = {"log_prob": log_prob, "advantage": cells.advantage}
    loss, _ = compute_loss("flow_grpo", tile, FlowGRPOConfig(), planned_cells=planned_cells)
    loss.backward()


@torch.no_grad()
def sampling_step(network: Network, cells: Cells, noise: Tensor) -> Tensor:
    """One denoising step of the batch: the next latents [B, ...]."""
    velocity = network.predict(cells.x, cells.sigma, cells.cond)
    return transition(KIND, cells.x, velocity, cells.sigma, cells.sigma_next, ETA, noise=noise).x_next


def rollout(network: Network, args: argparse.Namespace) -> tuple[DenoiseResult, Condition]:
    """Sample ``args.rollout_batch`` trajectories in one batch and record ``args.transitions`` steps, spread evenly."""
    pairs = [("rollout", j) for j in range(args.rollout_batch)]
    cond = conditions(network, range(args.rollout_batch), args)
    last = args.steps - 2  # the last step ends at sigma 0 and is never trained
    trained = [k * last // max(1, args.transitions - 1) for k in range(args.transitions)]
    selection = StepSelection(args.steps, tuple(range(last + 1)), tuple(trained))
    result = run_to_end(
        denoise(
            lambda x, sigma, _: network.predict(x, sigma, cond),
            initial_noise(SEED, pairs, network.latent_shape, device=args.device),
            schedule(args.steps),
            KIND,
            ETA,
            [selection] * len(pairs),
            lambda i: transition_noise(SEED, pairs, i, network.latent_shape, device=args.device),
        )
    )
    return result, cond


def measure_agreement(
    network: Network,
    recorded: tuple[DenoiseResult, Condition],
    samples: int,
    transitions: int,
    args: argparse.Namespace,
) -> dict:
    """Score all recorded transitions in tiles of samples x transitions, with gradient as in training."""
    result, cond = recorded
    trained, drawn = [], []
    for j in range(0, args.rollout_batch, samples):
        for k in range(0, args.transitions, transitions):
            piece = range(j, min(j + samples, args.rollout_batch)), range(k, min(k + transitions, args.transitions))
            cells, log_probs = recorded_cells(result, cond, *piece, args.device)
            trained.append(score(network, cells).log_prob.detach())
            drawn.append(log_probs)
    trained, drawn = torch.cat(trained), torch.cat(drawn)
    gap = (trained.double() - drawn.double()).abs()
    ratio = ratio_metrics(trained, drawn, 1e-4, 1e-4)
    return {
        "lp_diff_mean": float(gap.mean()),
        "lp_diff_max": float(gap.max()),
        "ratio_dev_max": float(ratio["ratio_dev_abs_max"]),
    }


def measure_step(network: Network, batch: int, args: argparse.Namespace) -> dict:
    """Time and memory of one denoising step of a batch."""
    cells = synthetic_cells(network, batch, 1, args)
    noise = torch.randn_like(cells.x)
    return timed(lambda: sampling_step(network, cells, noise), args)


def measure_tile(network: Network, samples: int, transitions: int, args: argparse.Namespace) -> dict:
    """Time and memory of one training tile."""
    cells = synthetic_cells(network, samples, transitions, args)
    return timed(lambda: train_tile(network, cells, samples * transitions), args)


def timed(work: Callable[[], object], args: argparse.Namespace) -> dict:
    """Median time [ms] of ``work`` after warm-up, and the largest memory allocated meanwhile [GiB], None on a CPU."""
    on_gpu = args.device == "cuda"
    synchronize = torch.cuda.synchronize if on_gpu else lambda: None
    for _ in range(args.warmup):
        work()
    synchronize()
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    times = []
    for _ in range(args.repeats):
        begin = time.perf_counter()
        work()
        synchronize()
        times.append(1e3 * (time.perf_counter() - begin))
    return {"ms": statistics.median(times), "peak_gib": torch.cuda.max_memory_allocated() / GIB if on_gpu else None}


# ---- the sweep ---------------------------------------------------------------------------------------------


class Sweep:
    """Rows of one model. A row is measured, ``oom``, or skipped when the time left does not hold it.

    Args:
        facts: what is the same in all rows.
        deadline: time (of ``time.perf_counter``) at which the last row has to be done.
        rows: where they are appended.
    """

    def __init__(self, facts: dict, deadline: float, rows: list[dict]) -> None:
        self.facts, self.deadline, self.rows = facts, deadline, rows
        self._seconds: dict[str, float] = {}  # kind -> seconds per unit of work of its last row
        self._first: dict[str, float] = {}  # kind -> ms of its row of one cell

    def add(self, kind: str, samples: int, transitions: int, measure: Callable[[], dict], work: int) -> bool:
        """Append one row; ``work`` is what its duration is proportional to. Returns False if memory ran out."""
        cells = samples * transitions
        row = {
            "model": self.facts["model"],
            "kind": kind,
            "samples": samples,
            "transitions": transitions,
            "cells": cells,
            **dict.fromkeys(MEASURED),
            "status": "ok",
            **self.facts,
            "source": "measured",
        }
        self.rows.append(row)
        begin = time.perf_counter()
        if begin + self._seconds.get(kind, 0.0) * work >= self.deadline:
            row["status"] = SKIPPED
            return True
        print(f"{row['model']}: {kind} {samples} x {transitions}", file=sys.stderr, flush=True)
        try:
            row.update(measure())
        except torch.OutOfMemoryError:
            row["status"] = "oom"
            return False
        self._seconds[kind] = (time.perf_counter() - begin) / work
        if row["ms"] is not None:
            row["ms_per_cell"] = row["ms"] / cells
            if cells == 1:
                self._first[kind] = row["ms"]
            if kind in self._first:
                row["speedup_per_cell"] = self._first[kind] / row["ms_per_cell"]
        return True


def powers_of_two(largest: int) -> list[int]:
    return [2**n for n in range(largest.bit_length())]


def tile_shapes(max_cells: int) -> list[tuple[int, int]]:
    """(samples, transitions), powers of two of at most ``max_cells`` cells, the smallest tiles first."""
    sides = powers_of_two(max_cells)
    return sorted(((s, k) for s in sides for k in sides if s * k <= max_cells), key=lambda t: (t[0] * t[1], t[0]))


def sweep_model(model: str, args: argparse.Namespace, facts: dict, deadline: float, rows: list[dict]) -> None:
    """Append all rows of a model to ``rows``: agreement, sampling, training."""
    network = build(model, args) if time.perf_counter() < deadline else None  # None: every row will be skipped
    if network is not None:
        size = sum(p.numel() for p in network.transformer.parameters())
        facts = facts | {"parameters": size, "tokens": network.tokens}
    sweep = Sweep({"model": model, **facts}, deadline, rows)

    def add(kind: str, shape: tuple[int, int], measure: Callable[[], dict], work: int) -> None:
        if not sweep.add(kind, *shape, measure, work):
            network.transformer.zero_grad(set_to_none=True)
            release_memory(args)

    recorded = cache(lambda: rollout(network, args))
    for s, k in tile_shapes(args.max_cells):
        if s <= args.rollout_batch and k <= args.transitions:
            add(
                "agreement",
                (s, k),
                lambda s=s, k=k: measure_agreement(network, recorded(), s, k, args),
                args.rollout_batch * args.transitions,
            )
    recorded.cache_clear()
    rounds = args.warmup + args.repeats
    for batch in powers_of_two(args.max_batch):
        add("sample", (batch, 1), lambda batch=batch: measure_step(network, batch, args), batch * rounds)
    for s, k in tile_shapes(args.max_cells):
        add("train", (s, k), lambda s=s, k=k: measure_tile(network, s, k, args), s * k * rounds)


def release_memory(args: argparse.Namespace) -> None:
    """Give back what an ended row or model held."""
    gc.collect()
    if args.device == "cuda":
        torch.cuda.empty_cache()


# ---- output ------------------------------------------------------------------------------------------------


def print_table(rows: list[dict], args: argparse.Namespace, facts: dict) -> None:
    """One table of all rows, with what they have in common above it."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=150)
    sizes = {row["model"]: row for row in rows if "parameters" in row}
    lines = [
        f"measured on {facts['device']}: torch {facts['torch']}, diffusers {facts['diffusers']}, {facts['dtype']}, "
        f"attention {facts['attention']}",
        f"{facts['trained']} trained, gradient checkpointing {'on' if args.checkpointing else 'off'}; "
        f"rollout: batch {args.rollout_batch}, {KIND} eta {ETA:g}, {args.steps} steps",
        *(
            f"{name}: {row['parameters']:,} parameters, {row['tokens']} latent + {args.text_tokens} text tokens"
            for name, row in sizes.items()
        ),
    ]
    table = Table(title="\n".join(lines), title_justify="left", box=box.SIMPLE, collapse_padding=True)
    table.add_column("model")
    table.add_column("kind")
    columns = {
        "samples": ("samples", "d"),
        "transitions": ("transitions", "d"),
        "cells /\nbatch": ("cells", "d"),
        "ms": ("ms", ".1f"),
        "ms per\ncell": ("ms_per_cell", ".1f"),
        "cells/s over\n1 cell": ("speedup_per_cell", ".2f"),
        "peak\nGiB": ("peak_gib", ".1f"),
        "mean\n|lp diff|": ("lp_diff_mean", ".1e"),
        "max\n|lp diff|": ("lp_diff_max", ".1e"),
        "max\n|r - 1|": ("ratio_dev_max", ".1e"),
    }
    for title in columns:
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("status", no_wrap=True)
    before = None
    for row in rows:
        if before is not None and (row["model"], row["kind"]) != before:
            table.add_section()
        before = row["model"], row["kind"]
        values = ("" if row[key] is None else format(row[key], form) for key, form in columns.values())
        table.add_row(row["model"], row["kind"], *values, row["status"])
    console.print(table)


# ---- options -----------------------------------------------------------------------------------------------


def size_of(parts: int) -> Callable[[str], tuple[int, ...]]:
    """Parser of ``HxW`` (2 parts) or ``HxWxFRAMES`` (3 parts)."""

    def parse(text: str) -> tuple[int, ...]:
        sizes = text.split("x")
        if len(sizes) != parts or not all(s.isdecimal() and int(s) > 0 for s in sizes):
            raise argparse.ArgumentTypeError(f"need {'x'.join(['N'] * parts)} with positive numbers, got {text!r}")
        sizes = tuple(int(s) for s in sizes)
        if any(side % 16 for side in sizes[:2]):
            raise argparse.ArgumentTypeError(f"height and width must be multiples of 16, got {text!r}")
        if parts == 3 and sizes[2] % 4 != 1:
            raise argparse.ArgumentTypeError(f"the number of frames must be 4 n + 1, got {text!r}")
        return sizes

    return parse


def at_least(smallest: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        if not text.isdecimal() or int(text) < smallest:
            raise argparse.ArgumentTypeError(f"need a whole number of at least {smallest}, got {text!r}")
        return int(text)

    return parse


def parse_options(argv: Sequence[str] | None) -> argparse.Namespace:
    """Options with everything resolved; a bad one ends the program before anything starts."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--models", nargs="+", choices=list(BUILDERS), default=list(BUILDERS), metavar="MODEL", help="flux, wan, qwen")
    add("--depth", type=at_least(1), help="blocks; FLUX: single ones, and half as many double ones (default: 4)")
    add("--device", choices=("cuda", "cpu"), default="cuda")
    add("--dtype", choices=list(DTYPES), default="bfloat16", help="of weights and forward; latents are always fp32")
    add("--attention", default="auto", help="name of diffusers' switch; auto: flash where it can be had, else native")
    add("--checkpointing", action=argparse.BooleanOptionalAction, default=True, help="gradient checkpointing")
    add("--lora-rank", type=at_least(0), default=0, help="train LoRA on the attention; 0: all weights")
    add("--image-size", type=size_of(2), help="pixels, FLUX and Qwen-Image (default: 1024x1024)")
    add("--video-size", type=size_of(3), help="pixels and frames, Wan (default: 480x832x33)")
    add("--text-tokens", type=at_least(1), help="tokens of a prompt (default: 512)")
    add("--max-cells", type=at_least(1), default=8, help="cells of the largest training tile")
    add("--max-batch", type=at_least(1), default=8, help="largest sampling batch")
    add("--rollout-batch", type=at_least(1), default=4, help="samples of the recorded rollout")
    add("--transitions", type=at_least(1), default=4, help="recorded transitions of a sample")
    add("--steps", type=at_least(2), default=10, help="denoising steps of the rollout")
    add("--warmup", type=at_least(0), default=1, help="untimed repeats of a row")
    add("--repeats", type=at_least(1), default=3, help="timed repeats of a row; the median is shown")
    add("--budget-s", type=float, default=420.0, help="rows that would end later are skipped [s]")
    add("--tiny", action="store_true", help="tiny widths and few tokens, to try the benchmark itself")
    add("--json", type=Path, help="also write the rows to this file")
    args = parser.parse_args(argv)

    if len(set(args.models)) != len(args.models):
        parser.error(f"--models names a model twice: {' '.join(args.models)}")
    if "flux" in args.models and args.depth is not None and args.depth % 2:
        parser.error(f"--depth must be even for flux (half as many double as single blocks), got {args.depth}")
    if args.transitions > args.steps - 1:
        parser.error(f"--transitions can be at most --steps - 1 = {args.steps - 1}, got {args.transitions}")
    if not 0 < args.budget_s < math.inf:
        parser.error(f"--budget-s must be a positive number of seconds, got {args.budget_s}")
    if args.json is not None and not args.json.resolve().parent.is_dir():
        parser.error(f"--json: there is no folder {args.json.resolve().parent}")
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch finds no CUDA device; --device cpu --tiny tries the benchmark on a CPU")
    usable = attention_backends(args.device)
    if args.attention == "auto":
        args.attention = "flash" if "flash" in usable and args.dtype == "bfloat16" else "native"
    if args.attention not in usable:
        parser.error(f"--attention {args.attention} cannot be had on {args.device}; available: {', '.join(usable)}")
    try:
        try_attention(args)
    except (RuntimeError, ValueError) as error:
        parser.error(f"--attention {args.attention} cannot train in {args.dtype} on {args.device}: {error}")
    args.depth = args.depth or (2 if args.tiny else 4)
    args.image_size = args.image_size or ((64, 64) if args.tiny else (1024, 1024))
    args.video_size = args.video_size or ((32, 32, 5) if args.tiny else (480, 832, 33))
    args.text_tokens = args.text_tokens or (8 if args.tiny else 512)
    return args


def try_attention(args: argparse.Namespace) -> None:
    """A small forward and backward of the attention backend: some take no fp32, some have no backward."""
    q, k, v = torch.ones(3, 1, 16, 2, 128, device=args.device, dtype=DTYPES[args.dtype], requires_grad=True)
    dispatch_attention_fn(q, k, v, backend=args.attention).sum().backward()


def main(argv: Sequence[str] | None = None) -> None:
    args = parse_options(argv)
    begin = time.perf_counter()
    diffusers.utils.logging.set_verbosity_error()
    facts = {
        "device": torch.cuda.get_device_name() if args.device == "cuda" else "cpu",
        "dtype": args.dtype,
        "attention": args.attention,
        "trained": f"LoRA rank {args.lora_rank}" if args.lora_rank else "all weights",
        "checkpointing": args.checkpointing,
        "depth": args.depth,
        "tiny": args.tiny,
        "rollout_batch": args.rollout_batch,
        "torch": torch.__version__,
        "diffusers": diffusers.__version__,
    }
    rows: list[dict] = []
    try:
        for index, model in enumerate(args.models):
            now = time.perf_counter()
            share = (begin + args.budget_s - now) / (len(args.models) - index)
            sweep_model(model, args, facts, now + share, rows)
            release_memory(args)
    finally:  # what was measured is not lost with what failed
        print_table(rows, args, facts)
        if args.json is not None:
            args.json.write_text(json.dumps(rows, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
