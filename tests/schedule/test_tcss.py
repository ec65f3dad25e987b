"""TCSS: the ledger refuses everything that breaks I4 and I5, and goes on after a resume."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_digen.schedule.tcss import StaleLedger, StalenessError


@given(groups=st.integers(1, 12), ratio=st.floats(0, 1), draw=st.randoms(use_true_random=False))
@settings(max_examples=60, deadline=None)
def test_any_sequence_keeps_the_bound_and_never_falls_two_versions_behind(groups, ratio, draw):
    """Random attempts, most of them illegal; what the ledger lets through must obey I5."""
    ledger = StaleLedger(groups, ratio)
    started = {}
    for attempt in range(40):
        step = ledger.published + draw.randint(0, 2)
        version = ledger.published + draw.randint(-2, 1)
        if draw.random() < 0.5:
            ledger.all_claimed(ledger.published)
        if sum(1 for s, _ in started.values() if s == step) < groups:
            try:
                ledger.start(attempt, step, version)
                started[attempt] = (step, version)
            except StalenessError:
                pass
        if draw.random() < 0.1:
            for uid, (of, by) in started.items():
                if of == ledger.published:
                    assert ledger.consume(uid, of, by) == of - by
            ledger.publish(ledger.published + 1)
    for step in {step for step, _ in started.values()}:
        ages = [step - version for s, version in started.values() if s == step]
        assert set(ages) <= {0, 1}
        assert sum(ages) <= ratio * groups + 1e-6
        if ratio == 0:
            assert not any(ages)


def test_stale_groups_wait_until_the_step_before_is_claimed():
    ledger = StaleLedger(4, 0.5)
    assert not ledger.may_start(1, 0)
    ledger.all_claimed(0)
    assert ledger.may_start(1, 0)
    ledger.reopen(0)
    assert not ledger.may_start(1, 0)


def test_the_allowance_is_rounded_down_and_freed_by_a_restart():
    ledger = StaleLedger(5, 0.5)
    assert ledger.stale_limit == 2
    ledger.all_claimed(0)
    ledger.start("a", 1, 0)
    ledger.start("b", 1, 0)
    with pytest.raises(StalenessError, match="stale groups 2 of 2"):
        ledger.start("c", 1, 0)
    ledger.restart("a")
    ledger.start("c", 1, 0)
    assert ledger.stale_groups(1) == 2
    assert StaleLedger(10, 0.3).stale_limit == 3  # 0.3 * 10 is 2.9999... in floating point


@pytest.mark.parametrize(
    ("step", "version", "message"),
    [(0, 1, "samples of version 1"), (1, 0, "trained in step 1"), (0, -1, "samples of version -1")],
)
def test_consume_checks_step_and_version(step, version, message):
    ledger = StaleLedger(2, 1.0)
    ledger.start("a", 0, 0)
    with pytest.raises(StalenessError, match=message):
        ledger.consume("a", step, version)


def test_nothing_is_trained_twice_unstarted_or_in_another_step():
    ledger = StaleLedger(2, 1.0)
    with pytest.raises(StalenessError, match="never started"):
        ledger.consume("x", 0, 0)
    ledger.start("a", 0, 0)
    with pytest.raises(StalenessError, match="started twice"):
        ledger.start("a", 0, 0)
    ledger.consume("a", 0, 0)
    with pytest.raises(StalenessError, match="trained twice"):
        ledger.consume("a", 0, 0)
    with pytest.raises(StalenessError, match="cannot restart"):
        ledger.restart("a")
    ledger.all_claimed(0)
    ledger.start("b", 1, 0)
    with pytest.raises(StalenessError, match="while 0 versions are published"):
        ledger.consume("b", 1, 0)


def test_publishes_are_counted_in_order_and_leave_nothing_untrained():
    ledger = StaleLedger(2)
    with pytest.raises(StalenessError, match="version 2 after version 0"):
        ledger.publish(2)
    ledger.start("a", 0, 0)
    with pytest.raises(StalenessError, match="1 of its groups were never trained"):
        ledger.publish(1)


def test_a_resumed_run_goes_on_counting_where_it_was():
    """Versions that start at 0 again after a resume are one of the known failures of async systems."""
    ledger = StaleLedger(4, 0.5, published=7)
    assert ledger.may_start(7, 7) and not ledger.may_start(7, 6) and not ledger.may_start(6, 6)
    ledger.start("a", 7, 7)
    ledger.all_claimed(7)
    ledger.start("s", 8, 7)
    ledger.consume("a", 7, 7)
    ledger.publish(8)
    assert ledger.consume("s", 8, 7) == 1 and ledger.stale_left(8) == 1


def test_bad_configuration():
    with pytest.raises(ValueError, match="max_stale_ratio=1.5"):
        StaleLedger(4, 1.5)
