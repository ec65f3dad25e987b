"""``verl-digen export``: a checkpoint's weights as stock diffusers and peft load them.

LoRA runs give an adapter (``pipeline.load_lora_weights(DIR)``, ``PeftModel.from_pretrained(transformer, DIR)``), full
runs a whole model folder (``DiffusionPipeline.from_pretrained(DIR)``).
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

KINDS = {"current": "model", "ema": "ema"}
DTYPES = ("float32", "bfloat16", "float16", "float64")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("checkpoint", type=Path, metavar="CHECKPOINT", help="a folder global_step_N of a run")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder to write to; must not exist")
    parser.add_argument("--weights", choices=KINDS, default="current", help="current weights, or their EMA")
    parser.add_argument("--dtype", choices=DTYPES, help="of the written weights (default: the checkpoint's)")
    parser.add_argument(
        "--model", type=Path, metavar="FOLDER", help="model folder that the run started from (default: the run's)"
    )
    parser.add_argument("--shard-size", default="5GB", help="largest weight file of a model folder (default: 5GB)")


def run(args: argparse.Namespace) -> int:
    """Exit status: 0 done, 2 a bad argument or checkpoint."""
    try:
        what = _export(args)
    except ValueError as error:
        print(f"verl-digen export: {error}", file=sys.stderr)
        return 2
    print(f"{what} written to {args.out.resolve()}")
    return 0


def _export(args: argparse.Namespace) -> str:
    import torch

    from verl_digen.engine.checkpoint import STATE_FILE, read_state
    from verl_digen.engine.export import export_adapter, export_model
    from verl_digen.models.parts import read_index

    checkpoint = args.checkpoint.expanduser()
    folder = checkpoint if (checkpoint / STATE_FILE).is_file() else checkpoint / "actor"
    state = read_state(folder)
    if args.out.exists() and (args.out.is_file() or any(args.out.iterdir())):
        raise ValueError(f"--out {args.out} exists already and is not empty")
    model = (args.model or Path(state["model"])).expanduser()
    if not model.is_dir():
        raise ValueError(f"the run's model folder {model} is not there; name where it is now with --model FOLDER")
    read_index(model)
    options = {
        "kind": KINDS[args.weights],
        "dtype": getattr(torch, args.dtype) if args.dtype else None,
        "model": model,
    }
    if state["lora"]["tensors"]:
        export_adapter(folder, state, args.out, **options)
        return f"LoRA adapter (rank {state['lora']['rank']}, alpha {state['lora']['alpha']})"
    export_model(folder, state, args.out, shard_size=args.shard_size, **options)
    return "model folder"
