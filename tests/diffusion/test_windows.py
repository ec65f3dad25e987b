"""Which steps are SDE and trained: properties over all the options, and what is refused."""

import math
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verl_digen.diffusion.noise import sample_key
from verl_digen.diffusion.windows import StepSelection, check_selection, recorded_states, select_steps

MANY_KEYS = [sample_key(0, f"group-{g}", 0, "window") for g in range(600)]


@st.composite
def selections(draw):
    """(kind, num_steps, options) that must be accepted."""
    num_steps = draw(st.integers(2, 40))
    kind = draw(st.sampled_from(["all", "window", "fraction"]))
    options = {"key": draw(st.integers(0, 2**64 - 1)), "training_step": draw(st.integers(0, 500))}
    if kind == "fraction":
        options["fraction"] = draw(st.floats(1 / (num_steps - 1), 1.0))
    if kind == "window":
        options["transition_kind"] = draw(st.sampled_from(["sde", "dance", "cps"]))
        end = num_steps if options["transition_kind"] == "cps" else num_steps - 1
        a = draw(st.integers(0, end - 1))
        b = draw(st.integers(a + 1, end))
        options |= {"window_range": (a, b), "window_size": draw(st.integers(1, b - a))}
        if draw(st.booleans()):
            options |= {"mode": "progressive", "stride": draw(st.integers(1, 5))}
            options |= {"iterations": draw(st.integers(1, 30)), "rollback": draw(st.booleans())}
    return kind, num_steps, options


@given(selections())
def test_selection_is_inside_the_steps_and_never_empty(case):
    kind, num_steps, options = case
    s = select_steps(kind, num_steps, **options)
    assert s == select_steps(kind, num_steps, **options), "the same key gives the same steps"
    assert s.trained_steps == tuple(sorted(set(s.trained_steps))) and s.trained_steps
    assert set(s.trained_steps) <= set(s.sde_steps) <= set(range(num_steps))
    if options.get("transition_kind", "sde") != "cps":
        assert num_steps - 1 not in s.sde_steps
    if kind == "all":
        assert s.trained_steps == s.sde_steps == tuple(range(num_steps - 1))
    if kind == "fraction":
        assert s.sde_steps == tuple(range(num_steps - 1))
        assert len(s.trained_steps) == math.floor(options["fraction"] * (num_steps - 1) + 1e-9)
    if kind == "window":
        a, b = options["window_range"]
        first = s.sde_steps[0]
        assert s.sde_steps == s.trained_steps == tuple(range(first, first + options["window_size"]))
        assert a <= first and s.sde_steps[-1] < b


@given(selections())
def test_recorded_states_give_every_trained_transition(case):
    kind, num_steps, options = case
    s = select_steps(kind, num_steps, **options)
    states, starts = recorded_states(s)
    assert list(states) == sorted(set(states)) and len(starts) == len(s.trained_steps)
    for step, start in zip(s.trained_steps, starts, strict=True):
        assert (states[start], states[start + 1]) == (step, step + 1)
    assert set(states) == {x for i in s.trained_steps for x in (i, i + 1)}, "nothing is stored in vain"
    if kind != "fraction":
        assert len(states) == len(s.trained_steps) + 1
        assert starts == tuple(range(len(s.trained_steps)))


def test_recorded_states_with_gaps():
    assert recorded_states(StepSelection(9, (1, 2, 5, 7), (1, 2, 5, 7))) == ((1, 2, 3, 5, 6, 7, 8), (0, 1, 3, 5))


def test_random_windows_reach_every_position_evenly():
    seen = Counter(
        select_steps("window", 12, key=k, window_size=3, window_range=(2, 10)).sde_steps[0] for k in MANY_KEYS
    )
    assert sorted(seen) == [2, 3, 4, 5, 6, 7]
    assert min(seen.values()) > 70 and max(seen.values()) < 135  # 100 expected, s.d. 9


def test_random_fractions_reach_every_step_evenly():
    chosen = [select_steps("fraction", 11, key=k, fraction=0.3).trained_steps for k in MANY_KEYS]
    assert {len(c) for c in chosen} == {3}
    seen = Counter(step for c in chosen for step in c)
    assert sorted(seen) == list(range(10))
    assert min(seen.values()) > 140 and max(seen.values()) < 220  # 180 expected, s.d. 11
    assert len(set(chosen)) > 100  # of 120 subsets


def test_fraction_counts_as_the_user_means_it():
    """0.29 * 100 is 28.999... in floating point."""
    assert len(select_steps("fraction", 101, key=0, fraction=0.29).trained_steps) == 29
    assert len(select_steps("fraction", 11, key=0, fraction=0.69).trained_steps) == 6
    assert select_steps("fraction", 5, key=0, fraction=1.0).trained_steps == (0, 1, 2, 3)


def progressive(training_step, **options):
    options = {"window_size": 2, "window_range": (1, 8), "mode": "progressive"} | options
    return select_steps("window", 10, training_step=training_step, **options).sde_steps[0]


def test_progressive_window_moves_stays_and_rolls_back():
    # the last position is shortened to 6, so that step 7 is trained too
    assert [progressive(t, stride=2) for t in range(9)] == [1, 3, 5, 6, 1, 3, 5, 6, 1]
    assert [progressive(t, stride=2, iterations=3) for t in range(14)] == [1] * 3 + [3] * 3 + [5] * 3 + [6] * 3 + [
        1
    ] * 2
    assert [progressive(t, stride=3, rollback=False) for t in range(6)] == [1, 4, 6, 6, 6, 6]
    assert [progressive(t, window_range=(1, 3), stride=4) for t in range(3)] == [1, 1, 1]


@given(st.integers(1, 6), st.integers(1, 5), st.integers(1, 8), st.integers(0, 6))
def test_progressive_window_trains_every_step_of_its_range(window, iterations, stride, extra):
    span = (1, 1 + window + extra)
    steps = set()
    for t in range((extra + 1) * iterations):
        s = select_steps(
            "window",
            20,
            training_step=t,
            window_size=window,
            window_range=span,
            mode="progressive",
            stride=min(stride, window),
            iterations=iterations,
        )
        steps |= set(s.trained_steps)
    assert steps == set(range(*span))


@pytest.mark.parametrize(
    ("kind", "num_steps", "options", "message"),
    [
        ("most", 10, {}, "unknown step selection 'most'; available: all, window, fraction"),
        ("all", 1, {}, "num_steps 1"),
        ("all", 10, {"transition_kind": "ode"}, "no SDE steps"),
        ("all", 10, {"transition_kind": "x"}, "unknown transition kind"),
        ("all", 10, {"window_size": 2}, "all does not use window_size"),
        ("all", 10, {"fraction": 0.5, "stride": 2}, "does not use stride, fraction"),
        ("fraction", 10, {"fraction": 0.5, "mode": "progressive"}, "does not use mode"),
        ("window", 10, {"window_size": 2, "iterations": 5}, r"window \(mode random\) does not use iterations"),
        ("window", 10, {"window_size": 2, "rollback": False}, "does not use rollback"),
        ("window", 10, {"window_size": 2, "fraction": 0.5}, "does not use fraction"),
        ("window", 10, {}, "window_size must be >= 1, got None"),
        ("window", 10, {"window_size": 0}, "window_size must be >= 1, got 0"),
        ("window", 10, {"window_size": 2, "mode": "sliding"}, "unknown window mode 'sliding'"),
        ("window", 10, {"window_size": 1, "window_range": (4, 4)}, r"\[4, 4\) is empty"),
        ("window", 10, {"window_size": 1, "window_range": (-1, 4)}, r"\[-1, 4\)"),
        ("window", 10, {"window_size": 1, "window_range": (5, 11)}, r"\[5, 11\) is empty or outside the 10 steps"),
        ("window", 10, {"window_size": 4, "window_range": (2, 5)}, r"window_size 4 does not fit.*\[2, 5\) of 3"),
        ("window", 10, {"window_size": 10}, r"window_size 10 does not fit in window_range \[0, 9\)"),
        ("window", 10, {"window_size": 2, "window_range": (5, 10)}, r"last of 10 steps \(9\), which sde never"),
        ("window", 10, {"window_size": 2, "mode": "progressive", "stride": 0}, "stride 0"),
        ("window", 10, {"window_size": 2, "mode": "progressive", "iterations": 0}, "iterations 0"),
        ("fraction", 10, {}, r"fraction must be in \(0, 1\], got None"),
        ("fraction", 10, {"fraction": 1.5}, "got 1.5"),
        ("fraction", 10, {"fraction": 0.1}, r"fraction 0.1 of 9 steps .* trains 0 steps"),
    ],
)
def test_check_selection_refuses(kind, num_steps, options, message):
    with pytest.raises(ValueError, match=message):
        check_selection(kind, num_steps, **options)
    with pytest.raises(ValueError, match=message):
        select_steps(kind, num_steps, key=1, **options)


def test_cps_may_have_the_last_step_in_its_range():
    check_selection("window", 10, window_size=2, window_range=(5, 10), transition_kind="cps")


def test_random_choices_need_a_key_and_a_counted_training_step():
    for kind, options in (("window", {"window_size": 2}), ("fraction", {"fraction": 0.5})):
        with pytest.raises(ValueError, match="needs a key"):
            select_steps(kind, 10, **options)
    with pytest.raises(ValueError, match="training_step must be >= 0, got -1"):
        progressive(-1)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ((5, (0, 1), ()), "no trained step"),
        ((5, (0, 1), (2,)), "must be among"),
        ((5, (1, 0), (1,)), "sorted"),
        ((5, (0, 0), (0,)), "distinct"),
        ((5, (4, 5), (4,)), "outside the 5 steps"),
        ((5, (-1, 0), (0,)), "outside the 5 steps"),
    ],
)
def test_step_selection_refuses(args, message):
    with pytest.raises(ValueError, match=message):
        StepSelection(*args)
