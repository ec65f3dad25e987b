"""Draws docs/images/data-flow.svg: the way of a sample through a training step.

python docs/draw_data_flow.py
"""

from __future__ import annotations

from pathlib import Path

import matplotlib
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch

PICTURE = Path(__file__).parent / "images" / "data-flow.svg"

# name: (x, y, title, line below, colour); units of the 15 x 8 canvas, (x, y) is the centre of a box
DRIVER, GENERATOR, TRAINER, QUEUE = "#dbe7f5", "#dff0dc", "#fbe5d0", "#ececec"
BOXES = {
    "prompts": (1.4, 6.8, "prompt rows", "data/prompts.py", DRIVER),
    "manager": (4.9, 6.8, "rollout manager", "rollout/manager.py", DRIVER),
    "step": (10.4, 6.8, "training step", "trainer/step.py", DRIVER),
    "fit": (13.6, 6.8, "PPOTrainer.fit (veRL)", "trainer/trainer.py", DRIVER),
    "replica": (2.2, 4.2, "replicas", "rollout/replica.py, sampler.py", GENERATOR),
    "queue": (7.5, 4.2, "TransferQueue", "latents, sigmas, log-probs, embeddings", QUEUE),
    "reward": (7.5, 5.6, "reward workers", "rewards/manager.py", QUEUE),
    "worker": (12.8, 4.2, "Trainer ranks", "trainer/worker.py", TRAINER),
    "transaction": (12.8, 2.3, "transaction", "engine/transaction.py, tiles.py", TRAINER),
    "publisher": (7.5, 1.2, "weight channel", "sync/channel.py, publisher.py", QUEUE),
}
WIDTH, HEIGHT = 2.5, 0.8

# (from, to, text, side the arrow leaves, side it enters, offset of the text)
ARROWS = (
    ("prompts", "manager", "1 groups", "r", "l", (0, 0.16)),
    ("manager", "replica", "2 replicas pull\nfragments", "b", "t", (-0.95, 0.1)),
    ("replica", "queue", "3 trajectory rows", "r", "l", (0, 0.16)),
    ("replica", "reward", "4 pixels", "r", "l", (-0.1, 0.25)),
    ("reward", "manager", "5 scores", "t", "c", (0.6, 0.05)),
    ("manager", "step", "6 complete groups", "r", "l", (0, 0.16)),
    ("step", "worker", "7 fragment +\nadvantages", "b", "t", (-1.0, 0.1)),
    ("queue", "worker", "8 rows, by each rank", "r", "l", (0, 0.16)),
    ("worker", "transaction", "9 accumulate\n(tiles), commit", "b", "t", (1.1, 0)),
    ("transaction", "publisher", "10 weights or LoRA", "b", "r", (-0.6, -0.2)),
    ("publisher", "replica", "11 version k + checksum", "l", "b", (0.2, -1.15)),
    ("fit", "step", "step()", "l", "r", (0, 0.16)),
)
SIDES = {
    "l": (-WIDTH / 2, 0),
    "r": (WIDTH / 2, 0),
    "t": (0, HEIGHT / 2),
    "b": (0, -HEIGHT / 2),
    "c": (WIDTH / 3, -HEIGHT / 2),
}


def draw() -> Figure:
    figure = Figure(figsize=(13, 7))
    axis = figure.add_axes((0, 0, 1, 1))
    axis.set(xlim=(0, 15), ylim=(0.3, 7.9))
    axis.set_axis_off()
    for x, y, width, height, title in (
        (0.1, 6.25, 14.8, 1.5, "driver process"),
        (0.5, 3.45, 3.4, 1.65, "Generator pool"),
        (11.0, 1.55, 3.6, 3.55, "Trainer pool"),
    ):
        frame = FancyBboxPatch((x, y), width, height, boxstyle="round,pad=0.03", fill=False, ls="--", ec="#999999")
        axis.add_patch(frame)
        axis.text(x + 0.1, y + height - 0.12, title, fontsize=9, color="#666666", va="top")
    for x, y, title, where, colour in BOXES.values():
        corner = (x - WIDTH / 2, y - HEIGHT / 2)
        axis.add_patch(FancyBboxPatch(corner, WIDTH, HEIGHT, boxstyle="round,pad=0.02", fc=colour, ec="#444444"))
        axis.text(x, y + 0.13, title, ha="center", va="center", fontsize=11, weight="bold")
        axis.text(x, y - 0.2, where, ha="center", va="center", fontsize=7.5, family="monospace")
    for source, target, text, leaves, enters, shift in ARROWS:
        start = [BOXES[source][i] + SIDES[leaves][i] for i in (0, 1)]
        end = [BOXES[target][i] + SIDES[enters][i] for i in (0, 1)]
        bent = (leaves in "tbc") != (enters in "tbc")
        style = f"angle,angleA={90 if leaves in 'tb' else 0},angleB={90 if enters in 'tb' else 0},rad=6"
        arrow = {"arrowstyle": "-|>", "color": "#333333", "connectionstyle": style if bent else "arc3"}
        axis.annotate("", xy=end, xytext=start, arrowprops=arrow)
        middle = [(start[i] + end[i]) / 2 + shift[i] for i in (0, 1)]
        axis.text(*middle, text, ha="center", va="center", fontsize=9, color="#222222")
    axis.text(
        7.5,
        0.5,
        "Colocated: the Trainer ranks are the replicas too, and step 11 is a copy inside the process.",
        ha="center",
        fontsize=9,
        style="italic",
    )
    return figure


if __name__ == "__main__":
    matplotlib.rcParams["svg.hashsalt"] = "verl_digen"  # the same picture gives the same file
    PICTURE.parent.mkdir(exist_ok=True)
    draw().savefig(PICTURE, metadata={"Date": None})
