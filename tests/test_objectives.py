"""The public objective, mu per layer, and the sentences about what is wrong with either."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import lpom
from lpom import losses
from lpom.graph import trace
from lpom.objectives import Objective, evaluate, kkt_residuals, per_node, rho, spectral_rates


@pytest.fixture
def model() -> nn.Sequential:
    return lpom.mlp([3, 4, 2], "tanh", seed=0, dtype=torch.float64)


def data(n: int = 5) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    X = torch.randn(n, 3, generator=generator, dtype=torch.float64)
    return X, torch.randn(n, 2, generator=generator, dtype=torch.float64)


def test_mu_may_be_one_number_a_list_or_numbers_by_name(model):
    graph = trace(model)
    assert per_node(3, graph)[1:] == [3.0, 3.0]
    assert per_node([1.0, 2.0], graph)[1:] == [1.0, 2.0]
    assert per_node((1, 2), graph)[1:] == [1.0, 2.0]
    assert per_node(torch.tensor([1.0, 2.0]), graph)[1:] == [1.0, 2.0]


def test_a_pattern_meets_names_of_nodes_and_of_weights(model):
    """The first that fits counts."""
    graph = trace(model)
    assert [node.name for node in graph] == ["1", "output"]
    assert per_node({"output": 7, "*": 1}, graph)[1:] == [1.0, 7.0]
    assert per_node({"0.weight": 7, "*": 1}, graph)[1:] == [7.0, 1.0]
    assert per_node({"*.bias": 7, "output": 1}, graph)[1:] == [7.0, 7.0]
    with pytest.raises(ValueError, match="no pattern for the node '1'.*it has 'output'"):
        per_node({"output": 7}, graph)


@pytest.mark.parametrize(
    ("mu", "sentence"),
    [
        (
            [1.0, 2.0, 3.0],
            "mu needs one value per weight layer: this network has 2, got 3. Give 2 values or a "
            "single one.",
        ),
        (0.0, "mu must be positive and finite in every layer, got 0.0."),
        ([1.0, -2.0], "mu must be positive and finite in every layer, got -2.0."),
        ({"output": 0, "*": 1.0}, "mu must be positive and finite in every layer, got 0.0."),
        (math.inf, "mu must be positive and finite in every layer, got inf."),
        (math.nan, "mu must be positive and finite in every layer, got nan."),
    ],
    ids=str,
)
def test_a_wrong_mu_is_said(model, mu, sentence):
    with pytest.raises(ValueError) as caught:
        per_node(mu, trace(model))
    assert str(caught.value) == sentence


def test_without_states_the_objective_is_the_loss(model):
    X, y = data()
    found = lpom.objective(model, X, y)
    outputs = model(X).detach()
    assert found.total == pytest.approx(float(((outputs - y) ** 2).sum()) / 2)
    assert found.total == pytest.approx(found.loss)
    assert found.gaps == pytest.approx((0.0, 0.0), abs=1e-14)
    assert found.mu == (20.0, 20.0)


def test_with_states_every_layer_adds_mu_times_its_gap(model):
    X, y = data()
    hidden = torch.tanh(torch.randn(5, 4, generator=torch.Generator().manual_seed(2))).double()
    found = lpom.objective(model, X, y, states=[hidden, y], mu=[2.0, 3.0])
    assert found.loss == 0.0
    # log cosh is the primitive of tanh; without an activation the gap is half a square
    Z = model[0](X).detach()
    conjugate = hidden * hidden.atanh() - hidden.atanh().cosh().log()
    first = float((conjugate + Z.cosh().log() - hidden * Z).sum())
    last = float((model[2](hidden).detach() - y).square().sum()) / 2
    assert found.gaps == pytest.approx((first, last))
    assert found.layers == pytest.approx((2 * first, 3 * last))
    assert found.total == pytest.approx(2 * first + 3 * last)


def test_the_loss_follows_the_targets(model):
    X, _ = data()
    classes = torch.tensor([0, 1, 1, 0, 1])
    expected = nn.functional.cross_entropy(model(X), classes, reduction="sum")
    assert lpom.objective(model, X, classes).total == pytest.approx(float(expected.detach()))
    found = lpom.objective(model, X, classes, loss="squared").total
    onehot = nn.functional.one_hot(classes, 2)
    assert found == pytest.approx(float((model(X) - onehot).square().sum().detach()) / 2)


def test_data_follow_the_model_s_dtype():
    X, y = data()
    single = lpom.mlp([3, 4, 2], "tanh", seed=0)
    double = lpom.mlp([3, 4, 2], "tanh", seed=0).double()
    assert lpom.objective(single, X, y).total == pytest.approx(
        lpom.objective(double, X.float().numpy(), y).total, rel=1e-5
    )


def test_wrong_shapes_are_said(model):
    X, y = data()
    with pytest.raises(ValueError, match="one tensor per layer.*got"):
        lpom.objective(model, X, y, states=[y])
    with pytest.raises(ValueError, match="to match the first Linear layer; got"):
        lpom.objective(model, X[:, 1:], y)
    with pytest.raises(ValueError, match="the same number of rows"):
        lpom.objective(model, X[1:], y)


def test_a_state_out_of_range_makes_the_objective_infinite(model):
    X, y = data()
    hidden = torch.full((5, 4), 1.5, dtype=torch.float64)
    found = lpom.objective(model, X, y, states=[hidden, y])
    assert found.gaps[0] == math.inf and math.isfinite(found.gaps[1])
    assert found.total == math.inf


def test_an_objective_adds_up():
    found = Objective(loss=1.0, gaps=(0.5, 0.25), mu=(2.0, 8.0))
    assert found.layers == (1.0, 2.0) and found.total == 4.0


def test_sums_over_samples_do_not_lose_small_ones_in_float32():
    """A large sample and many small ones: summed in double precision."""
    graph = trace(lpom.mlp([1, 1], seed=0))
    n = 2000
    target = torch.full((n + 1, 1), 1e-2)
    target[0] = 1e3
    X = [torch.zeros(n + 1, 1)] * 2
    found = evaluate(graph, losses.get("squared"), X, target, [1.0, 1.0]).loss
    assert found == pytest.approx(1e6 / 2 + n * 1e-4 / 2, rel=1e-9)


def test_one_layer_has_no_hidden_state_and_so_no_rho():
    graph = trace(lpom.mlp([3, 2], "relu", "sigmoid", seed=0))
    X = [torch.zeros(1, 3), torch.zeros(1, 2)]
    assert rho(graph, [1.0, 1.0], X) == []
    norms, rates = spectral_rates(graph, losses.get("squared"), [1.0, 0.5], X)
    assert len(norms) == 1 and rates == [0.5]  # gamma eta / mu = 1/4 * 1 / (1/2)


def test_residuals_are_root_mean_squares(model):
    """Twice the samples, each twice: the same residuals."""
    X, y = data()
    graph, mu = trace(model), [1.0, 1.0, 2.0]
    hidden = torch.tanh(X @ torch.ones(3, 4).double())
    once = kkt_residuals(graph, losses.get("squared"), [X, hidden, y + 1], y, mu)
    states = [torch.cat([x, x]) for x in (X, hidden, y + 1)]
    twice = kkt_residuals(graph, losses.get("squared"), states, torch.cat([y, y]), mu)
    for a, b in zip(once, twice, strict=True):
        assert a == pytest.approx(b)
