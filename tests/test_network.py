"""Modules seen as layers, and the networks that mlp makes."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from lpom import activations, mlp
from lpom.activations import Elementwise, Identity, LeakyReLU, ReLU, Sigmoid, Sign, Tanh
from lpom.network import Lifted


def kinds(model: nn.Module) -> list[object]:
    return [layer.activation for layer in Lifted.from_module(model)]


def test_linear_layers_and_what_follows_them():
    first, second, third = nn.Linear(4, 5), nn.Linear(5, 3), nn.Linear(3, 2, bias=False)
    network = Lifted.from_module(nn.Sequential(first, nn.LeakyReLU(0.2), second, third, nn.Tanh()))
    assert [layer.activation for layer in network] == [LeakyReLU(0.2), Identity(), Tanh()]
    assert [layer.map.module for layer in network] == [first, second, third]
    assert len(network) == 3 and network[1].map.module is second
    assert network.n_inputs == 4 and network.n_outputs == 2
    expected = [first.weight, first.bias, second.weight, second.bias, third.weight]
    assert all(a is b for a, b in zip(network.parameters, expected, strict=True))


def test_a_single_linear_layer_is_a_network():
    assert kinds(nn.Linear(3, 2)) == [Identity()]
    assert kinds(nn.Sequential(nn.Linear(3, 2), nn.Identity())) == [Identity()]


def test_nested_sequentials_are_read_in_order():
    inner = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.ReLU()), nn.Linear(4, 4))
    model = nn.Sequential(nn.Sequential(nn.Linear(3, 4), nn.Sigmoid()), inner, nn.Tanh())
    assert kinds(model) == [Sigmoid(), ReLU(), Tanh()]


def test_flatten_may_come_first():
    model = nn.Sequential(nn.Flatten(), nn.Linear(4, 2), nn.ReLU())
    assert kinds(model) == [ReLU()]


def test_activations_of_one_s_own_are_kept():
    softsign = activations.from_function(nn.functional.softsign, lipschitz=1.0, name="softsign")
    assert kinds(nn.Sequential(nn.Linear(2, 2), Elementwise(softsign))) == [softsign]


@pytest.mark.parametrize("name", activations.names())
def test_feed_forward_is_the_module_and_remembers_every_layer(name):
    model = mlp([3, 5, 4, 2], name, "sigmoid", seed=0, dtype=torch.float64)
    inputs = torch.randn(6, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    network = Lifted.from_module(model)
    Z, X = network.feed_forward(inputs)
    assert [len(Z), len(X)] == [3, 4] and X[0] is inputs
    torch.testing.assert_close(X[-1], model(inputs).detach(), rtol=0, atol=0)
    for i, layer in enumerate(network):
        torch.testing.assert_close(Z[i], layer.map.module(X[i]).detach(), rtol=0, atol=0)
        torch.testing.assert_close(X[i + 1], layer.activation.phi(Z[i]), rtol=0, atol=0)


def test_smoothed_has_the_same_maps_and_no_jumps():
    network = Lifted.from_module(mlp([3, 5, 2], "sign", seed=0))
    assert network.jumps
    ramps = network.smoothed(0.3)
    assert not ramps.jumps
    assert [layer.activation for layer in ramps] == [Sign(0.3), Identity()]
    assert all(a.map is b.map for a, b in zip(network, ramps, strict=True))
    assert not Lifted.from_module(mlp([3, 5, 2], "relu")).jumps


SHARED = nn.Linear(3, 3)
WRONG = [
    (
        nn.Sequential(nn.ReLU(), nn.Linear(3, 3)),
        "the model must begin with a Linear layer, got ReLU(). Apply earlier steps to the data "
        "instead.",
    ),
    (
        nn.Sequential(SHARED, nn.ReLU(), SHARED),
        "the same Linear layer appears twice in the model; LPOM updates each layer on its own, so "
        "shared weights are not supported. Use two layers.",
    ),
    (
        nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.ReLU()),
        "two activations in a row: tanh and then ReLU(). Put a Linear layer between them or drop "
        "one.",
    ),
    (
        nn.Sequential(nn.Linear(3, 3), nn.Softmax(dim=1)),
        "Softmax(dim=1) is not elementwise and cannot be used as an activation; leave it out and "
        "train on the logits with loss='cross-entropy'.",
    ),
    (
        nn.Sequential(),
        "the model has no Linear layer to train; expected a torch.nn.Sequential of Linear layers "
        "each followed by an activation, got Sequential.",
    ),
]


@pytest.mark.parametrize(("model", "sentence"), WRONG, ids=lambda case: type(case).__name__)
def test_what_cannot_be_trained_is_said(model, sentence):
    with pytest.raises(ValueError) as caught:
        Lifted.from_module(model)
    assert str(caught.value) == sentence


@pytest.mark.parametrize(
    ("module", "sentence"),
    [
        (nn.Dropout(0.5), "Dropout is not an elementwise function .* leave it out"),
        (nn.BatchNorm1d(3), "BatchNorm1d is not an elementwise function .* leave it out"),
        (nn.Flatten(), "no activation is known for the module Flatten"),
    ],
    ids=repr,
)
def test_other_modules_are_named_in_the_error(module, sentence):
    with pytest.raises(TypeError, match=sentence):
        Lifted.from_module(nn.Sequential(nn.Linear(3, 3), module, nn.Linear(3, 3)))
    with pytest.raises(TypeError, match=sentence):
        Lifted.from_module(nn.Sequential(nn.Linear(3, 3), nn.ReLU(), module))


def test_a_linear_layer_must_be_what_its_class_says():
    class Doubled(nn.Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    class Named(nn.Linear):
        pass

    with pytest.raises(ValueError, match="Doubled has a forward method of its own"):
        Lifted.from_module(nn.Sequential(Doubled(3, 3)))
    assert len(Lifted.from_module(nn.Sequential(Named(3, 3)))) == 1
    lazy = nn.Sequential(nn.LazyLinear(4), nn.ReLU(), nn.Linear(4, 2))
    with pytest.raises(ValueError, match="LazyLinear layer has no weights yet"):
        Lifted.from_module(lazy)
    lazy(torch.randn(5, 3))
    assert Lifted.from_module(lazy).n_inputs == 3


def test_an_activation_is_known_by_what_it_is_not_by_its_name():
    odd = activations.from_function(torch.tanh, lipschitz=1.0, name="identity")
    assert len(mlp([4, 3, 2], odd)) == 3


def test_functions_that_fall_are_refused():
    with pytest.raises(ValueError, match="nn.GELU is not monotone: it falls before it rises"):
        Lifted.from_module(nn.Sequential(nn.Linear(3, 3), nn.GELU(), nn.Linear(3, 3)))


def test_mlp_puts_the_activation_between_layers_and_the_output_s_last():
    model = mlp([4, 8, 6, 3], "tanh", "sigmoid")
    assert [type(module).__name__ for module in model] == [
        *("Linear", "Tanh", "Linear", "Tanh", "Linear", "Sigmoid")
    ]
    assert [(m.in_features, m.out_features) for m in model[::2]] == [(4, 8), (8, 6), (6, 3)]
    assert type(mlp([4, 8, 3])[-1]) is nn.Linear  # identity needs no module
    assert kinds(mlp([4, 2], output=LeakyReLU(0.1))) == [LeakyReLU(0.1)]


@pytest.mark.parametrize("name", ["relu", "tanh", "sigmoid", "hardsigmoid", "step"])
def test_mlp_starts_glorot_scaled_by_the_slope_of_the_activation(name):
    """Uniform within sqrt(6 / (in + out)), over the Lipschitz constant where there is one."""
    model = mlp([300, 200, 100], name, seed=0, dtype=torch.float64)
    act = activations.get(name)
    gain = 1.0 if act.jumps else 1 / act.lipschitz
    bounds = gain * math.sqrt(6 / 500), math.sqrt(6 / 300)
    for linear, bound in zip((model[0], model[-1]), bounds, strict=True):
        weight = linear.weight.detach()
        assert 0.999 * bound < weight.abs().max() <= bound
        assert float(weight.std()) == pytest.approx(bound / math.sqrt(3), rel=0.01)
        assert (linear.bias == 0).all()


def test_mlp_is_the_same_for_the_same_seed_and_leaves_the_global_one_alone():
    torch.manual_seed(5)
    before = torch.get_rng_state()
    models = [mlp([3, 4, 2], seed=seed) for seed in (0, 0, 1)]
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(models[0][0].weight, models[1][0].weight)
    assert not torch.equal(models[0][0].weight, models[2][0].weight)


def test_mlp_without_biases_and_in_double_precision():
    model = mlp([3, 4, 2], bias=False, dtype=torch.float64)
    assert [module.bias for module in model if isinstance(module, nn.Linear)] == [None, None]
    assert model(torch.zeros(1, 3, dtype=torch.float64)).tolist() == [[0.0, 0.0]]


@pytest.mark.parametrize("sizes", [[], [3], [3, 0], [3, 2.5, 1], [3, -1]], ids=str)
def test_mlp_says_what_sizes_are(sizes):
    with pytest.raises(ValueError) as caught:
        mlp(sizes)
    assert str(caught.value) == (
        "sizes needs the widths of at least inputs and outputs, each an integer of at least 1, "
        f"e.g. [784, 300, 10]; got {sizes}."
    )


def test_a_weight_made_of_other_parameters_is_refused():
    layer = torch.nn.utils.parametrizations.weight_norm(nn.Linear(5, 8))
    with pytest.raises(
        ValueError, match="computed from other parameters .*remove_parametrizations"
    ):
        Lifted.from_module(nn.Sequential(layer, nn.ReLU(), nn.Linear(8, 3)))
    torch.nn.utils.parametrize.remove_parametrizations(layer, "weight")
    assert len(Lifted.from_module(nn.Sequential(layer, nn.ReLU(), nn.Linear(8, 3)))) == 2


def test_widths_must_fit():
    with pytest.raises(ValueError, match="takes 5 inputs, but the one before it has 4 outputs"):
        Lifted.from_module(nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(5, 2)))


def test_a_module_of_ones_own_is_sent_back_for_its_sequential():
    class Own(nn.Module):
        pass

    with pytest.raises(ValueError, match="expected a torch.nn.Sequential .*, got Own"):
        Lifted.from_module(Own())


@pytest.mark.parametrize("flatten", [nn.Flatten(0), nn.Flatten(2), nn.Flatten(1, 2)], ids=repr)
def test_a_flatten_that_does_not_make_rows_is_refused(flatten):
    with pytest.raises(ValueError, match="each sample must become one row"):
        Lifted.from_module(nn.Sequential(flatten, nn.Linear(3, 2)))
