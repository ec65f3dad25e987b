"""Videos as animations: every frame arrives, in its place."""

from __future__ import annotations

import numpy as np
from PIL import Image, ImageSequence

from verl_digen.trainer.videos import side_by_side, write_gif


def test_an_animation_has_every_frame(tmp_path):
    frames = np.stack([np.full((8, 12, 3), value, np.uint8) for value in (0, 100, 200)])
    write_gif(tmp_path / "video.gif", frames)
    read = [np.asarray(f.convert("RGB")) for f in ImageSequence.Iterator(Image.open(tmp_path / "video.gif"))]
    assert [frame.shape for frame in read] == [(8, 12, 3)] * 3
    assert [int(frame.mean()) for frame in read] == [0, 100, 200]


def test_videos_stand_in_rows():
    videos = [np.full((2, 3, 4, 1), value, np.uint8) for value in (1, 2, 3)]
    both = side_by_side(videos, columns=2)
    assert both.shape == (2, 6, 8, 1)
    assert both[0, 0, 0] == 1 and both[1, 0, 4] == 2 and both[1, 3, 0] == 3 and both[0, 3, 4] == 0
