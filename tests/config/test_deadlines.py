"""Who waits has more time than what it waits for, whatever the options are."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from verl_digen.config.deadlines import QUEUE_DEPTH, Deadline, Deadlines
from verl_digen.config.digen import FailureConfig

SECONDS = st.floats(min_value=0.5, max_value=1e5)


@given(SECONDS, SECONDS, SECONDS, SECONDS, st.integers(min_value=0, max_value=5))
def test_who_waits_has_more_time_than_what_it_waits_for(generate, reward, train, sync, retries):
    table = Deadlines.of(
        FailureConfig(
            max_retries=retries,
            generate_timeout_s=generate,
            reward_timeout_s=reward,
            train_timeout_s=train,
            sync_timeout_s=sync,
        )
    )
    s = {what: seconds for what, seconds, _ in table.rows()}
    assert s["busy"] >= QUEUE_DEPTH * s["generate"]  # a call waits behind all fragments at the replica
    assert s["connect"] > s["busy"]  # the others wait in the rendezvous for the busy one
    assert s["publish"] >= s["connect"] + s["transfer"]
    assert s["replace"] >= s["load"] + max(s["busy"], s["train"]) + s["transfer"]
    assert s["group"] >= (retries + 1) * (s["generate"] + s["reward"] + s["replace"])
    assert s["collective"] > max(s["train"], s["publish"], s["replace"])


def test_the_defaults():
    table = {what: seconds for what, seconds, _ in Deadlines.of(FailureConfig()).rows()}
    assert table["publish"] == 2 * 1800 + 60 + 900 and table["collective"] == 900 + 3600 + 3660 + 900 + 60


def test_a_deadline_says_where_it_comes_from():
    generate, sync = Deadline(10, "generate_timeout_s"), Deadline(5, "sync_timeout_s")
    both = 2 * (generate + sync)
    assert str(both) == "30 s (trainer.v1.digen.failure: 2 x (generate_timeout_s + sync_timeout_s))"
