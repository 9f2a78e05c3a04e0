"""diagnose() says what it should of networks that were made to have something to say."""

from __future__ import annotations

import pytest
import torch

import lpom
from lpom import LPOM, Sweeps


@pytest.fixture
def data():
    generator = torch.Generator().manual_seed(0)
    X = torch.randn(40, 6, generator=generator, dtype=torch.float64)
    return X, torch.randint(3, (40,), generator=generator)


def network(activation="tanh", output="identity"):
    return lpom.mlp([6, 5, 4, 3], activation, output, seed=0, dtype=torch.float64)


def test_norms_rates_and_tau_are_those_of_the_weights(data):
    model = network()
    method = LPOM(mu=[3.0, 5.0, 7.0])
    found = lpom.diagnose(model, *data, method=method)
    weights = [layer.weight.detach() for layer in model if hasattr(layer, "weight")]
    for W, layer in zip(weights, found.layers, strict=True):
        assert layer.norm == pytest.approx(float(torch.linalg.matrix_norm(W, 2)), rel=1e-3)
    for i, ratio in ((0, 5 / 3), (1, 7 / 5)):
        product = weights[i + 1].abs().T @ weights[i + 1].abs()
        norm_1, norm_inf = product.sum(0).max(), product.sum(1).max()
        assert found.layers[i].rho == pytest.approx(float(ratio * (norm_1 * norm_inf).sqrt()))
        assert found.layers[i].rate <= found.layers[i].rho * (1 + 1e-9)
    assert found.tau == found.layers[-1].rho == pytest.approx(0.5 / 7)  # cross-entropy: 1/2


def test_a_settled_network_fulfils_the_state_conditions(data):
    settled = LPOM(mu=2.0, states=Sweeps("top-down", max_sweeps=2000, tolerance=1e-12))
    found = lpom.diagnose(network(), *data, method=settled)
    assert max(layer.state_residual for layer in found.layers) < 1e-8
    assert all(layer.gap > 0 for layer in found.layers)
    assert found.objective < float(lpom.objective(network(), *data).total) / 40


def test_dead_units_and_classes_are_seen(data):
    model = network("relu", "relu")
    with torch.no_grad():
        model[0].bias[:3] = -1e3
        model[4].bias[1] = -1e3
    found = lpom.diagnose(model, *data, loss="squared")
    assert found.layers[0].dead == pytest.approx(3 / 5)
    assert 1 in found.dead_classes and 0 not in found.dead_classes
    assert any("output 1 is dead" in sentence for sentence in found.advice())
    assert any("60% of the units of layer 1" in sentence for sentence in found.advice())


def test_saturation_is_seen(data):
    model = network("tanh")
    with torch.no_grad():
        model[0].weight.mul_(1e4)
    found = lpom.diagnose(model, *data)
    assert found.layers[0].saturated > 0.95
    assert found.layers[2].saturated == 0  # identity has no ends


def test_jumps_can_be_looked_at(data):
    found = lpom.diagnose(network("step"), *data)
    assert all(layer.rate < float("inf") for layer in found.layers)
    assert "layer" in str(found)


def test_weights_are_left_alone(data):
    model = network()
    before = [p.detach().clone() for p in model.parameters()]
    lpom.diagnose(model, *data, method=LPOM(weights="exact"))
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_the_method_is_a_name_or_an_lpom(data):
    named, made = (lpom.diagnose(network(), *data, method=m) for m in ("lpom", LPOM()))
    assert named == made
    with pytest.raises(ValueError, match="not at that of 'adam'"):
        lpom.diagnose(network(), *data, method="adam")
