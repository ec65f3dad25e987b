"""TCSS with real processes: groups of the next step under the version before, with validation and a resume."""

from __future__ import annotations

from pathlib import Path

import pytest

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

STALE = [
    "trainer.v1.digen.preset=digen",
    "trainer.v1.digen.tcss.enable=true",
    "trainer.v1.digen.tcss.max_stale_ratio=0.7",  # 2 of 3 groups
    "trainer.v1.digen.gap.fragment_size=2",
]


def test_stale_groups_stay_within_the_bound_through_validation_and_resume(pools):
    """Six steps; averaged weights are validated after each second; resumed after step 4."""
    tuning = [
        "trainer.v1.digen.ema.enable=true",
        "trainer.v1.digen.ema.every=1",
        "trainer.v1.digen.ema.validate=true",
        "trainer.save_freq=4",
        "trainer.test_freq=2",
        "trainer.v1.digen.trace.every=1",
    ]
    run = pools.again(*STALE, "trainer.total_training_steps=4", tuning=tuning)
    run.fit()
    steps, folder = run.steps(), Path(run.config.trainer.default_local_dir)
    assert [s["training/global_step"] for s in steps] == [1, 2, 3, 4]

    run = pools.again(
        *STALE,
        "trainer.total_training_steps=6",
        "trainer.resume_mode=auto",
        f"trainer.default_local_dir={folder}",
        tuning=tuning,
    )
    run.fit()
    resumed = run.steps()
    assert [s["training/global_step"] for s in resumed] == [5, 6]
    for first in (steps[0], resumed[0]):  # nothing can have been begun before
        assert first["staleness/max"] == 0 and "actor/stale/ratio_mean" not in first
    for step in [*steps, *resumed]:
        assert step["staleness/max"] <= 1 and step["staleness/stale_groups"] <= 2
        assert step["actor/cells"] == 3 * 4 * 3
        assert step["actor/log_prob_gap_max"] <= 1e-9  # of fresh cells
        if step["staleness/stale_groups"]:
            assert step["actor/stale/cells"] == step["staleness/stale_groups"] * 4 * 3
            assert step["actor/stale/ratio_max_dev"] > 0  # another policy than the one that is trained
    assert sum(s["staleness/stale_groups"] for s in [*steps, *resumed]) > 0
