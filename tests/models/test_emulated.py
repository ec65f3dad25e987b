"""The emulated model takes the configured times and nothing else about it is pretended."""

from __future__ import annotations

import pytest
import torch

from tests.clock import Clock
from verl_digen.models import emulated
from verl_digen.models.emulated import EmulatedCosts, PretendedDevice, write_emulated_model
from verl_digen.models.family import Guidance, family_for

COSTS = EmulatedCosts(denoise_s=1.0, denoise_fixed_s=0.5, decode_s=2.0, train_cell_s=6.0, tile_fixed_s=3.0)


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(emulated, "time", clock)
    return clock


@pytest.fixture
def family(tmp_path):
    write_emulated_model(tmp_path / "model", COSTS)
    family = family_for(tmp_path / "model")(tmp_path / "model", dtype=torch.float64)
    family.check_parts(family.path)
    return family


def inputs(family, count: int):
    x = torch.randn(count, *family.latent_shape(*family.default_size()), dtype=torch.float64)
    (cond,) = family.encode_prompts(["a prompt"])
    return x, torch.full((count,), 0.5), {name: value.expand(count, -1) for name, value in cond.items()}


def test_sampling_takes_its_time_and_lets_the_host_run_ahead_by_one_step(family, clock):
    transformer = family.load_transformer()
    x, sigma, cond = inputs(family, 3)
    with torch.no_grad():
        for step in range(4):
            assert clock.now == pytest.approx(100.0 + max(0, step - 1) * 3.5)
            x = family.predict(transformer, x, sigma, cond, Guidance())
    pixels = family.decode(x)
    assert clock.now == pytest.approx(100.0 + 4 * 3.5 + 3 * 2.0)
    assert pixels.shape == (3, 8, 8, 1) and pixels.dtype == "uint8"


def test_a_tile_takes_its_time_and_gives_real_gradients(family, clock):
    transformer = family.load_transformer().requires_grad_(True)
    x, sigma, cond = inputs(family, 2)
    velocity = family.predict(transformer, x, sigma, cond, Guidance())
    assert clock.now == pytest.approx(100.0)
    velocity.square().sum().backward()
    assert clock.now == pytest.approx(100.0 + (3.0 + 2 * 6.0) / 3)  # the forward's third; the backward goes on
    family.synchronize()
    assert clock.now == pytest.approx(100.0 + 3.0 + 2 * 6.0)
    expected = (2 * velocity.detach() * x).sum(dim=(0, 2, 3), keepdim=True)[0]
    assert torch.allclose(transformer.scale.grad, expected)
    assert transformer.mix.weight.grad.abs().sum() > 0


def test_samples_do_not_depend_on_their_batch(family, clock):
    transformer = family.load_transformer()
    x, sigma, cond = inputs(family, 4)
    with torch.no_grad():
        whole = family.predict(transformer, x, sigma, cond, Guidance())
        one = family.predict(transformer, x[2:3], sigma[2:3], {k: v[2:3] for k, v in cond.items()}, Guidance())
    assert torch.allclose(whole[2:3], one, atol=1e-12)
    assert not torch.equal(family.encode_prompts(["another"])[0]["embedding"], cond["embedding"][0])


def test_a_device_does_one_thing_after_another(clock):
    device = PretendedDevice()
    device.occupy(2.0)
    device.occupy(3.0)
    assert clock.now == 102.0
    device.wait()
    assert clock.now == 105.0


def test_bad_costs_and_sizes_are_refused(family):
    with pytest.raises(ValueError, match="must not be negative: {'denoise_s': -1"):
        EmulatedCosts(denoise_s=-1, train_cell_s=1)
    with pytest.raises(ValueError, match="makes 8 x 8 images, got 16 x 8 x 1"):
        family.sigmas(4, 16, 8)
