"""TCSS with real processes: groups of the next step under the version before, with validation, deaths and a resume."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import ray

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

STALE = [
    "trainer.v1.digen.preset=digen",
    "trainer.v1.digen.tcss.enable=true",
    "trainer.v1.digen.tcss.max_stale_ratio=0.7",  # 2 of 3 groups
    "trainer.v1.digen.gap.fragment_size=2",
]


def test_stale_groups_stay_within_the_bound_through_validation_death_and_resume(pools):
    """Six steps; averaged weights are validated after each second; a replica dies in step 2; resumed after step 4."""
    tuning = [
        "trainer.v1.digen.ema.enable=true",
        "trainer.v1.digen.ema.every=1",
        "trainer.v1.digen.ema.validate=true",
        "trainer.save_freq=4",
        "trainer.test_freq=2",
        "trainer.v1.digen.trace.every=1",
    ]
    run = pools.again(*STALE, "trainer.total_training_steps=4", tuning=tuning)
    victim = ray.get(run.trainer.replicas[1].workers[0].ping.remote())["pid"]
    announce, training = run.manager.generate_sequences, []

    def watched(groups, **options):
        announce(groups, **options)
        if groups[0].partition == "train":
            training.append(options["training_step"])
            if len(training) == 2:
                os.kill(victim, signal.SIGKILL)

    run.manager.generate_sequences = watched
    try:
        run.fit()
    finally:
        del run.manager.generate_sequences
    steps, folder = run.steps(), Path(run.config.trainer.default_local_dir)
    assert [s["training/global_step"] for s in steps] == [1, 2, 3, 4]
    with pytest.raises(ProcessLookupError):
        os.kill(victim, 0)

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
