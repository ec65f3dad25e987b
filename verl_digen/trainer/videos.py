"""Videos as animated GIFs, which every browser and picture viewer plays."""

from __future__ import annotations

from pathlib import Path

import numpy as np

FRAMES_PER_SECOND = 8


def write_gif(path: Path, frames: np.ndarray) -> None:
    """Write frames uint8 [F, H, W, 1 or 3] as an animation that repeats."""
    from PIL import Image

    pictures = [Image.fromarray(frame[..., 0] if frame.shape[-1] == 1 else frame) for frame in frames]
    first, *others = pictures
    first.save(path, save_all=True, append_images=others, duration=1000 // FRAMES_PER_SECOND, loop=0)


def side_by_side(videos: list[np.ndarray], columns: int = 10) -> np.ndarray:
    """Videos [F, H, W, C] of one shape in rows of ``columns``, as one video; empty places are black."""
    columns = min(columns, len(videos))
    rows = -(-len(videos) // columns)
    black = np.zeros_like(videos[0])
    cells = [*videos, *[black] * (rows * columns - len(videos))]
    lines = [np.concatenate(cells[row * columns : (row + 1) * columns], axis=2) for row in range(rows)]
    return np.concatenate(lines, axis=1)
