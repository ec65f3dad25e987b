"""The sampling loop: rows stand alone, records are what training needs, stopping changes nothing."""

import pytest
import torch

from verl_digen.diffusion.denoise import Denoiser, PartialState, denoise, run_to_end
from verl_digen.diffusion.kernels import transition
from verl_digen.diffusion.noise import initial_noise, sample_key, transition_noise
from verl_digen.diffusion.windows import StepSelection, recorded_states, select_steps

SHAPE = (3, 5, 7)
T = 8
SAMPLES = [(f"g{g}", j) for g in range(3) for j in range(2)]
SIGMAS = torch.linspace(1, 0, T + 1) ** 0.7
KINDS_AND_ETAS = [("sde", 0.7), ("dance", 0.3), ("cps", 0.8)]


def predict(x, sigma, i):
    """A velocity in bf16, row by row, that depends on everything it is given."""
    return (torch.sin(x * (1.0 + i / 10)) * sigma.reshape(-1, 1, 1, 1) + 0.1 * x).bfloat16()


def selection_of(uid, kind="window"):
    options = {"window": {"window_size": 2}, "fraction": {"fraction": 0.6}, "all": {}}[kind]
    return select_steps(kind, T, key=sample_key(0, uid, 0, "window"), **options)


def arguments(samples, kind="sde", eta=0.7, selection="window", dtype=torch.float32, **kwargs):
    return {
        "predict": predict,
        "x_init": initial_noise(0, samples, SHAPE),
        "sigmas": SIGMAS,
        "kind": kind,
        "eta": eta,
        "selections": [selection_of(uid, selection) for uid, _ in samples],
        "noise_fn": lambda i: transition_noise(0, samples, i, SHAPE),
        "dtype": dtype,
    } | kwargs


def assert_same_rows(a, b, rows_b):
    """Result a equals the rows of b, to the bit."""
    assert torch.equal(a.x_final, b.x_final[rows_b])
    assert torch.equal(a.step_log_probs.nan_to_num(7), b.step_log_probs[:, rows_b].nan_to_num(7))
    for mine, row in enumerate(rows_b):
        assert a.starts[mine] == b.starts[row]
        for name in ("latents", "sigmas", "log_probs"):
            assert torch.equal(getattr(a, name)[mine], getattr(b, name)[row]), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("kind", "eta"), KINDS_AND_ETAS)
@pytest.mark.parametrize("selection", ["window", "fraction", "all"])
def test_recorded_transitions_score_to_the_same_bits(kind, eta, selection, dtype):
    """What training does with the record gives ratio exactly 1, also with gaps between the trained steps."""
    result = run_to_end(denoise(**arguments(SAMPLES, kind, eta, selection, dtype)))
    for b, (uid, _) in enumerate(SAMPLES):
        chosen = selection_of(uid, selection)
        states, starts = recorded_states(chosen)
        assert result.starts[b] == starts and result.latents[b].shape == (len(states), *SHAPE)
        assert result.latents[b].dtype == dtype and result.log_probs[b].shape == (len(starts),)
        assert torch.equal(result.sigmas[b], SIGMAS[list(states)]), "the sampler's own values"
        first = torch.tensor(starts)
        x, x_next = result.latents[b][first], result.latents[b][first + 1]
        sigma, sigma_next = result.sigmas[b][first], result.sigmas[b][first + 1]
        v = torch.cat(
            [predict(x[k : k + 1], sigma[k : k + 1].to(dtype), i) for k, i in enumerate(chosen.trained_steps)]
        )
        scored = transition(kind, x, v, sigma, sigma_next, eta, x_next=x_next, dtype=dtype)
        assert torch.equal(scored.log_prob, result.log_probs[b])
        assert torch.equal(result.step_log_probs[list(chosen.trained_steps), b], result.log_probs[b])
        assert (~result.step_log_probs[:, b].isnan()).nonzero().flatten().tolist() == list(chosen.sde_steps)


@pytest.mark.parametrize(("kind", "eta"), KINDS_AND_ETAS)
def test_matches_a_plain_loop(kind, eta):
    """Row by row, step by step: SDE inside the row's window, ODE outside."""
    result = run_to_end(denoise(**arguments(SAMPLES, kind, eta, "window")))
    for b, sample in enumerate(SAMPLES):
        x = initial_noise(0, [sample], SHAPE)
        for i in range(T):
            s, n = SIGMAS[i : i + 1], SIGMAS[i + 1 : i + 2]
            if i in selection_of(sample[0]).sde_steps:
                eps = transition_noise(0, [sample], i, SHAPE)
                x = transition(kind, x, predict(x, s, i), s, n, eta, noise=eps).x_next
            else:
                x = x - (s - n).reshape(-1, 1, 1, 1) * predict(x, s, i).float()
        assert torch.equal(x[0], result.x_final[b])


@pytest.mark.parametrize("rows", [[0], [5], [3, 0], [4, 1, 5], [5, 4, 3, 2, 1, 0]])
@pytest.mark.parametrize("selection", ["window", "fraction"])
def test_a_row_does_not_depend_on_the_rows_beside_it(rows, selection):
    whole = run_to_end(denoise(**arguments(SAMPLES, selection=selection)))
    part = run_to_end(denoise(**arguments([SAMPLES[r] for r in rows], selection=selection)))
    assert_same_rows(part, whole, rows)


@pytest.mark.parametrize("stop", range(T + 1))
@pytest.mark.parametrize("selection", ["window", "fraction"])
def test_going_on_elsewhere_gives_the_same_bits(stop, selection):
    straight = run_to_end(denoise(**arguments(SAMPLES, selection=selection)))
    here = Denoiser(**arguments(SAMPLES, selection=selection))
    for i in range(stop):
        assert here.step() == i
    handed = here.state()
    for _ in range(stop, T):  # the first place going on must not change what it handed over
        here.step()
    elsewhere = denoise(**arguments(SAMPLES, selection=selection, x_init=None, start=handed))
    result = run_to_end(elsewhere)
    assert_same_rows(result, straight, list(range(len(SAMPLES))))
    assert_same_rows(here.result(), straight, list(range(len(SAMPLES))))


def test_yields_after_each_step_and_leaves_gradient_mode_alone():
    steps = denoise(**arguments(SAMPLES))
    weight = torch.ones((), requires_grad=True)
    for expected in range(T):
        assert next(steps) == expected
        assert torch.is_grad_enabled() and (weight * 2).requires_grad
    with pytest.raises(StopIteration) as stop:
        next(steps)
    assert not stop.value.value.x_final.requires_grad


def test_no_autograd_graph_is_kept():
    weight = torch.ones((), requires_grad=True)
    result = run_to_end(denoise(**arguments(SAMPLES, predict=lambda x, s, i: x * weight)))
    assert not any(t.requires_grad for t in [result.x_final, *result.latents, *result.log_probs])


def test_validation_is_all_ode_whatever_the_kind():
    x_init = initial_noise(0, SAMPLES, SHAPE)
    result = run_to_end(denoise(predict, x_init, SIGMAS, "sde", 0.7))
    x = x_init
    for i in range(T):
        x = x - (SIGMAS[i] - SIGMAS[i + 1]) * predict(x, SIGMAS[i].expand(len(SAMPLES)), i).float()
    assert torch.equal(result.x_final, x)
    assert result.latents == result.log_probs == result.starts == [] and result.step_log_probs is None
    part = Denoiser(predict, x_init, SIGMAS)
    part.step()
    assert torch.equal(run_to_end(denoise(predict, None, SIGMAS, start=part.state())).x_final, x)


def test_exact_velocity_lands_on_the_data():
    data = torch.randn(2, *SHAPE, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    x_init = initial_noise(0, SAMPLES[:2], SHAPE, dtype=torch.float64)
    for kwargs in ({}, {"kind": "sde", "eta": 0.7}, {"kind": "cps", "eta": 0.8}):
        if kwargs:
            kwargs |= {"selections": [selection_of("g0", "all")] * 2}
            kwargs |= {"noise_fn": lambda i: transition_noise(0, SAMPLES[:2], i, SHAPE)}
        run = denoise(
            lambda x, s, i: (x - data) / s.reshape(-1, 1, 1, 1), x_init, SIGMAS, dtype=torch.float64, **kwargs
        )
        torch.testing.assert_close(run_to_end(run).x_final, data, rtol=0, atol=1e-9)


def test_record_false_keeps_nothing_and_changes_nothing():
    full, bare = (run_to_end(denoise(**arguments(SAMPLES, record=record))) for record in (True, False))
    assert torch.equal(full.x_final, bare.x_final) and bare.latents == bare.log_probs == []


def test_noise_is_asked_for_only_where_a_row_is_sde():
    asked = []

    def noise_fn(i):
        asked.append(i)
        return transition_noise(0, SAMPLES, i, SHAPE)

    run_to_end(denoise(**arguments(SAMPLES, noise_fn=noise_fn)))
    assert asked == sorted({i for uid, _ in SAMPLES for i in selection_of(uid).sde_steps})


def test_recorded_latents_do_not_keep_the_batch_alive():
    run = Denoiser(**arguments(SAMPLES, selection="all"))
    stored = run.state().latents[0][0]
    assert stored.untyped_storage().nbytes() == 4 * 3 * 5 * 7


ONE = StepSelection(T, (1,), (1,))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x_init": None}, "exactly one of x_init and start"),
        ({"start": PartialState(torch.zeros(6, *SHAPE), 0)}, "exactly one of x_init and start"),
        ({"kind": "ode"}, "kind 'ode' draws no noise"),
        ({"noise_fn": None}, "needs noise_fn"),
        ({"eta": 0.0}, "eta > 0"),
        ({"selections": [ONE] * 5}, "5 selections for 6 rows"),
        ({"selections": [ONE] * 5 + [StepSelection(9, (1,), (1,))]}, "row 5 is for 9 steps, the schedule has 8"),
        ({"selections": [ONE] * 5 + [StepSelection(T, (7,), (7,))]}, "step 7 of 8 ends at sigma 0"),
        ({"sigmas": torch.ones(T + 1)}, "must fall strictly"),
    ],
)
def test_refuses(change, message):
    with pytest.raises(ValueError, match=message):
        run_to_end(denoise(**(arguments(SAMPLES) | change)))


def test_refuses_a_start_that_does_not_fit():
    run = Denoiser(**arguments(SAMPLES, selection="all"))
    run.step()
    good = run.state()
    for start, message in [
        (PartialState(good.x, 1), "0 steps of log-probs, but 1 steps are made"),
        (PartialState(good.x, 1, (), good.step_log_probs), r"\[0, 0, 0, 0, 0, 0\] recorded states per row"),
        (PartialState(good.x, 9, good.latents, good.step_log_probs), "start.i = 9 is outside the 8 steps"),
        (PartialState(good.x.double(), 1, good.latents, good.step_log_probs), "would change its bits"),
    ]:
        with pytest.raises(ValueError, match=message):
            Denoiser(**arguments(SAMPLES, selection="all", x_init=None, start=start))
    with pytest.raises(ValueError, match="only 1 of 8 steps"):
        run.result()
    run_to_end(denoise(**arguments(SAMPLES, selection="all", x_init=None, start=good)))
    while not run.done:
        run.step()
    with pytest.raises(ValueError, match="all 8 steps are made"):
        run.step()
