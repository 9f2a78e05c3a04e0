"""Devices: what is read and how often, noise, faults, budgets, drift, and the free calibration."""

from __future__ import annotations

import copy
import json

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits
from torch import nn

import lpom
from lpom.activations import calibrated, get, measured
from lpom.activations.table import fit_curves
from lpom.exceptions import DeviceError, DeviceWarning, UntrainableError


class Lab:
    """Units of their own gain and offset, with noise; it counts what is read."""

    def __init__(self, units=6, noise=0.0, shape=torch.tanh, seed=0):
        self.generator = torch.Generator().manual_seed(seed)
        self.gain = 0.5 + 1.5 * torch.rand(units, generator=self.generator)
        self.offset = 0.5 * torch.randn(units, generator=self.generator)
        self.noise, self.shape, self.read_values, self.drift = noise, shape, 0, 0.0

    def exact(self, z):
        return self.shape(self.gain.to(z) * z + self.offset.to(z) + self.drift)

    def __call__(self, z):
        self.read_values += z.numel()
        return self.exact(z) + self.noise * torch.randn(z.shape, generator=self.generator).to(z)


def network(device, units=6):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, units), device.to_module(), nn.Linear(units, 2))


def gradient(model, x):
    model.zero_grad()
    model(x).square().sum().backward()
    return next(model.parameters()).grad.clone()


def inputs(n=50, seed=1):
    return torch.randn(n, 4, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("sides", [1, 2])
def test_without_noise_it_is_back_propagation_through_each_curve(sides):
    lab = Lab()
    model, x = network(measured(lab, sides=sides, noise=0.0)), inputs()
    plain = copy.deepcopy(model)
    z = x @ plain[0].weight.T + plain[0].bias
    expected = torch.autograd.grad(plain[2](lab.exact(z)).square().sum(), plain[0].weight)[0]
    found = gradient(lpom.lift(model), x)
    assert torch.cosine_similarity(found.flatten(), expected.flatten(), 0) > 0.999


@pytest.mark.parametrize(("sides", "times"), [(1, 2), (2, 3)])
def test_nothing_is_read_twice(sides, times):
    lab = Lab()
    device = measured(lab, sides=sides, noise=0.01)
    gradient(lpom.lift(network(device)), inputs(50))
    assert lab.read_values == device.readings == times * 50 * 6
    assert device.calls == times


def test_the_noise_is_measured_by_unit_and_sets_the_displacement():
    spread = torch.tensor([0.0, 0.01, 0.05, 0.1, 0.2, 0.4])
    generator = torch.Generator().manual_seed(0)
    device = measured(lambda z: z.tanh() + spread * torch.randn(z.shape, generator=generator))
    model = lpom.lift(network(device))
    for seed in range(300):
        gradient(model, inputs(64, seed))
    np.testing.assert_allclose(device.noise[2:], spread[2:], rtol=0.35)
    z = torch.randn(200, 6)
    d = device.displacement(z, device.phi(z))
    assert d.shape == (6,) and (d.diff()[1:4] > 0).all() and d.max() <= 1.5


def test_the_displacement_has_a_bound_in_units_of_the_argument():
    device = measured(lambda z: z / 50 + torch.randn(z.shape), noise=1.0)
    z = 50 * torch.randn(100, 3)
    assert device.displacement(z, device.phi(z)) <= 1.5
    fixed = measured(torch.tanh, displacement=0.2, noise=1.0)
    assert float(fixed.displacement(z, z)) == pytest.approx(0.2)


def test_a_single_sample_is_answered():
    for device in (measured(Lab(noise=0.1)), measured(torch.tanh, shared=True, noise=0.0)):
        assert gradient(lpom.lift(network(device)), inputs(1)).isfinite().all()
    one = measured(torch.tanh, noise=0.1)
    z = torch.zeros(1, 1, requires_grad=True)
    (slope,) = torch.autograd.grad(lpom.lift(one.to_module())(z).sum(), z)
    assert float(slope) == pytest.approx(float(torch.tensor(1.5).tanh()) / 1.5)


def test_averaged_readings_have_less_noise():
    lab = Lab(noise=0.1)
    device = measured(lab, repeats=4)
    model = lpom.lift(network(device))
    for seed in range(101):
        gradient(model, inputs(64, seed))
    assert float(device.noise.mean()) == pytest.approx(0.05, rel=0.2)


def test_a_device_has_no_derivative():
    model, x = network(measured(Lab())), inputs()
    with pytest.raises(UntrainableError, match="lift"):
        model(x)
    with torch.no_grad():
        assert model(x).shape == (50, 2)


def test_arrays_may_go_in_and_lists_come_out():
    device = measured(lambda z: np.tanh(z).tolist(), numpy=True)
    z = torch.randn(3, 2)
    torch.testing.assert_close(device.phi(z), z.tanh())


class Faulty:
    """Fails in the given way in its first calls."""

    def __init__(self, way, times):
        self.way, self.times, self.calls = way, times, 0

    def __call__(self, z):
        self.calls += 1
        if self.calls > self.times:
            return z.tanh()
        if self.way == "raises":
            raise OSError("cable out")
        if self.way == "shape":
            return z.tanh()[:-1]
        if self.way == "some nan":  # other elements each time
            return torch.where(
                torch.arange(len(z))[:, None] % 2 == self.calls % 2, torch.nan, z.tanh()
            )
        return torch.full_like(z, torch.nan)


@pytest.mark.parametrize("way", ["raises", "shape", "nan", "some nan"])
def test_what_fails_now_and_then_is_tried_again(way):
    z = torch.randn(4, 3)
    device = measured(Faulty(way, 2), retries=2, pause=0.0)
    torch.testing.assert_close(device.phi(z), z.tanh())
    assert device.calls == (2 if way == "some nan" else 3)


@pytest.mark.parametrize(
    ("way", "named"), [("raises", "cable out"), ("shape", "shape"), ("nan", "NaN")]
)
def test_what_keeps_failing_is_named(way, named):
    device = measured(Faulty(way, 99), retries=1, pause=0.0, name="bench 3")
    with pytest.raises(DeviceError, match=f"bench 3.*{named}"):
        device.phi(torch.randn(4, 3))
    assert device.calls == 2


def test_a_fault_in_training_loses_no_weights():
    faulty = Faulty("raises", 0)
    device = measured(faulty, retries=0, noise=0.0, shared=True)
    model = network(device)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    lifted = lpom.lift(model)
    for step in range(6):
        if step == 4:
            faulty.times = 99  # from now on
            weights = copy.deepcopy(model.state_dict())
            with pytest.raises(DeviceError):
                lifted(inputs()).square().sum().backward()
            break
        optimizer.zero_grad()
        lifted(inputs()).square().sum().backward()
        optimizer.step()
    assert all(torch.equal(v, weights[k]) for k, v in model.state_dict().items())
    assert all(v.isfinite().all() for v in weights.values())


def test_a_budget_is_kept():
    device = measured(torch.tanh, budget=100)
    device.phi(torch.randn(9, 10))
    with pytest.raises(DeviceError, match="budget of 100"):
        device.phi(torch.randn(2, 10))
    assert device.readings == 90


def trained(lab, **options):
    device = measured(lab, **options)
    model = lpom.lift(network(device))
    for seed in range(60):
        gradient(model, inputs(64, seed))
    return device, model.module


def test_curves_come_for_free_and_stand_in_for_the_device():
    lab = Lab(noise=0.03)
    device, model = trained(lab)
    before = device.readings
    table = device.calibrate()
    assert device.readings == before
    z = device.pairs()[0].quantile(torch.linspace(0.02, 0.98, 50), dim=0)
    assert (table.phi(z) - lab.exact(z)).abs().max() < 0.05
    assert device.monotone.all() and table.slope_bound == 0
    assert device.lipschitz == pytest.approx(float(lab.gain.max()), rel=0.4)
    assert device.gap(device.phi(z).clamp(-0.5, 0.5), z).isfinite().any()

    plain = calibrated(model)
    x = inputs()
    with torch.no_grad():
        exact = plain[2](lab.exact(model[0](x)))
        torch.testing.assert_close(plain(x), exact, rtol=0, atol=0.1)
    assert device.readings == before + z.numel()  # of the line above, for the gap
    assert model[1].activation is device
    saved = json.loads(json.dumps(plain[1].activation.params()))
    assert get("table", **saved) == plain[1].activation
    with pytest.raises(TypeError, match="calibrated"):
        device.params()


def test_curves_that_turn_back_are_told_and_smoothed():
    lab = Lab(noise=0.03, shape=lambda z: torch.sin(2 * z) ** 2)
    device, _ = trained(lab)
    assert not device.monotone.any()
    z = device.pairs()[0].quantile(torch.linspace(0.02, 0.98, 50), dim=0)
    assert (device.calibrate().phi(z) - lab.exact(z)).abs().max() < 0.12
    assert device.slope_bound > 0.5
    assert "monotone: 0" in device.report() and "readings" in device.report()


def test_falling_curves_are_monotone_too():
    z = np.random.default_rng(0).normal(size=(500, 2))
    x = np.stack([-np.tanh(z[:, 0]), np.tanh(z[:, 1])], 1)
    noise = 0.02 * np.random.default_rng(1).normal(size=x.shape)
    knots, values, monotone = fit_curves(z, x + noise)
    assert monotone.all()
    np.testing.assert_allclose(values[0], -np.tanh(knots), atol=0.1)


def test_drift_is_followed_and_said():
    lab = Lab(noise=0.01)
    device = measured(lab, keep=1024)
    model = lpom.lift(network(device))
    for seed in range(150):
        gradient(model, inputs(64, seed))
    assert float(device.drift().max()) < 0.03
    with pytest.warns(DeviceWarning, match="drifted"):
        for seed in range(100):  # as slow as it may be
            lab.drift += 0.006
            gradient(model, inputs(64, seed))
    assert float(device.drift().max()) > 0.1
    z = device.pairs(100)[0]
    newest = device.calibrate(recent=64).phi(z) - lab.exact(z)
    oldest = device._first[0].phi(z) - lab.exact(z)
    assert newest.abs().mean() < 0.3 * oldest.abs().mean()


def test_one_curve_for_all_units_and_channels_of_pictures():
    shared = measured(torch.tanh, shared=True)
    shared.probe(torch.randn(64, 7))
    assert len(shared.monotone) == 1
    lab = Lab(3, noise=0.01)
    device = measured(lambda z: lab(z.movedim(1, -1)).movedim(-1, 1), dim=1, name="a camera").probe(
        torch.randn(64, 3, 5, 5)
    )
    assert device.calibrate().phi(torch.randn(2, 3, 4, 4)).shape == (2, 3, 4, 4)


def test_nothing_is_known_before_it_is_read():
    device = measured(torch.tanh)
    with pytest.raises(DeviceError, match="probe"):
        device.calibrate()
    assert measured(torch.tanh, lipschitz=1.0).lipschitz == 1.0 and not device.jumps
    assert copy.deepcopy(device) is device


@pytest.mark.parametrize(
    "options", [{"sides": 3}, {"repeats": 0}, {"keep": 1.5}, {"displacement": "some"}]
)
def test_bad_options_are_refused(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        measured(torch.tanh, **options)


def test_a_table_with_noise_is_read_further_away():
    z = np.linspace(-3, 3, 601)
    noisy = np.tanh(z) + 0.05 * np.random.default_rng(0).normal(size=z.size)
    x = inputs(200)
    model = network(lpom.activations.from_table(z, noisy, noise=0.05))
    exact = copy.deepcopy(model)
    exact[1] = nn.Tanh()
    found, expected = gradient(lpom.lift(model), x), gradient(exact, x)
    assert torch.cosine_similarity(found.flatten(), expected.flatten(), 0) > 0.97


def digits():
    X, y = load_digits(return_X_y=True)
    return (X / 16).astype(np.float32), y


@pytest.mark.parametrize("mu", [None, 20.0])
def test_fit_reads_each_value_once_and_from_both_sides(mu):
    X, y = digits()
    lab = Lab(20, noise=0.02)
    device = measured(lab, noise=0.02)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 20), device.to_module(), nn.Linear(20, 10))
    method = lpom.methods.LPOM(mu=mu)
    lpom.fit(model, X[:500], y[:500], method=method, epochs=1, batch_size=50)
    few = 1.4 if mu else 1.1  # values for the history come on top
    assert device.readings == lab.read_values <= few * 500 * 20 * (2 if mu else 3)


def test_fit_trains_through_a_device_as_well_as_through_its_curve():
    X, y = digits()
    device = measured(Lab(30, noise=0.04))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 30), device.to_module(), nn.Linear(30, 10))
    lpom.fit(model, X[:1200], y[:1200], loss="cross-entropy", epochs=15, batch_size=50)
    _, accuracy = lpom.evaluate(model, X[1200:], y[1200:], loss="cross-entropy")
    assert accuracy > 0.85
    before = device.readings
    _, curves = lpom.evaluate(calibrated(model), X[1200:], y[1200:], loss="cross-entropy")
    assert curves > accuracy - 0.03 and device.readings == before


def test_a_fault_in_fit_leaves_the_weights_of_the_last_step(tmp_path):
    X, y = digits()
    faulty = Faulty("raises", 0)
    device = measured(faulty, shared=True, retries=0, noise=0.0)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 20), device.to_module(), nn.Linear(20, 10))
    start = copy.deepcopy(model.state_dict())

    def read(z):
        if faulty.calls == 40:
            faulty.times = 10**9
        return faulty(z)

    device.read = read
    with pytest.raises(DeviceError, match="cable out"):
        lpom.fit(model, X, y, loss="cross-entropy", epochs=5, batch_size=50)
    assert all(value.isfinite().all() for value in model.state_dict().values())
    assert not torch.equal(model[0].weight, start["0.weight"])


@pytest.mark.parametrize("shared", [True, False])
def test_calibrated_curves_go_into_onnx(tmp_path, shared):
    pytest.importorskip("onnxscript")
    runtime = pytest.importorskip("onnxruntime")
    device = measured(Lab(noise=0.02), shared=shared).probe(torch.randn(200, 6))
    model = calibrated(network(device)).eval()
    path = lpom.export.to_onnx(model, tmp_path / "curves.onnx", inputs(5))
    session = runtime.InferenceSession(str(path))
    (outputs,) = session.run(None, {session.get_inputs()[0].name: inputs(5).numpy()})
    np.testing.assert_allclose(outputs, model(inputs(5)).detach(), atol=1e-5)
