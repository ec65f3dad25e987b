#!/usr/bin/env bash
# Step time of the digits recipe in each mode, as a ratio to a bare single-process loop that does the same work: what the
# framework costs, and what the streaming modes gain. All of it in one run on one machine: the floor is measured first,
# last and between the rounds; the modes are real `main_ppo` runs. Also: start to first step, memory of each process.
# Takes about 12 minutes on two quiet cores. Everything given goes to the command:
#
#     bash recipes/benchmarks/digits.sh                                    # floor, colocated, disaggregated
#     bash recipes/benchmarks/digits.sh --json >digits.json
#     bash recipes/benchmarks/digits.sh --threads 1 --modes floor,one-shot,gap,gap+tsp
#
# The last measures streaming with one core for the Generator and one for the Trainer. With a window of 2 of the trained
# transitions, add:   trainer.v1.digen.sampling.selection.kind=window trainer.v1.digen.sampling.selection.window_size=2
set -euo pipefail
RECIPES="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
exec verl-digen bench digits --recipes "$RECIPES" --modes floor,colocated,disaggregated --rounds 2 --steps 8 --warmup 2 "$@"
