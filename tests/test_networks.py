"""mlp: the chain of Linear layers that most examples begin with."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from lpom import activations, mlp
from lpom.activations import LeakyReLU
from lpom.graph import trace


def test_mlp_puts_the_activation_between_layers_and_the_output_s_last():
    model = mlp([4, 8, 6, 3], "tanh", "sigmoid")
    assert [type(module).__name__ for module in model] == [
        *("Linear", "Tanh", "Linear", "Tanh", "Linear", "Sigmoid")
    ]
    assert [(m.in_features, m.out_features) for m in model[::2]] == [(4, 8), (8, 6), (6, 3)]
    assert type(mlp([4, 8, 3])[-1]) is nn.Linear  # identity needs no module
    (last,) = trace(mlp([4, 2], output=LeakyReLU(0.1)))
    assert last.activation == LeakyReLU(0.1)


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


def test_an_activation_is_known_by_what_it_is_not_by_its_name():
    odd = activations.from_function(torch.tanh, lipschitz=1.0, name="identity")
    assert len(mlp([4, 3, 2], odd)) == 3
