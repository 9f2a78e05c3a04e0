"""Activations: lookup, torch modules, a user's own functions, behaviour in float32."""

from __future__ import annotations

import copy
import itertools
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from scipy.integrate import quad
from scipy.special import spence
from torch import nn

from lpom import activations
from lpom.activations import (
    ELU,
    Elementwise,
    Hardsigmoid,
    Hardtanh,
    Identity,
    LeakyReLU,
    ReLU,
    ReLU6,
    Sigmoid,
    Sign,
    Softplus,
    Staircase,
    Step,
    Tanh,
    from_function,
    from_module,
)

MODULES = [
    (ReLU(), nn.ReLU()),
    (LeakyReLU(0.2), nn.LeakyReLU(0.2)),
    (Sigmoid(), nn.Sigmoid()),
    (Tanh(), nn.Tanh()),
    (ELU(1.5), nn.ELU(1.5)),
    (Softplus(2.0), nn.Softplus(2.0)),
    (Identity(), nn.Identity()),
    (Hardtanh(-0.3, 2.0), nn.Hardtanh(-0.3, 2.0)),
    (Hardsigmoid(), nn.Hardsigmoid()),
    (ReLU6(), nn.ReLU6()),
]
CASES = [
    *map(activations.get, activations.names()),
    *(activation for activation, _ in MODULES),
    Step(0.5),
    Sign(0.1),
    Staircase(3, 0.1, 0.07),
]
every = pytest.mark.parametrize("activation", CASES, ids=repr)


@every
def test_params_round_trip(activation):
    again = activations.get(activation.name, **activation.params())
    assert again == activation and hash(again) == hash(activation)
    assert activations.get(activation) is activation


def test_get_knows_aliases_and_spellings():
    assert activations.get("logistic") == Sigmoid()
    assert activations.get("Leaky-ReLU", negative_slope=0.1) == LeakyReLU(0.1)


def test_get_helps_with_a_wrong_name():
    with pytest.raises(ValueError, match=r"'rleu'; did you mean 'relu'.*from_function"):
        activations.get("rleu")
    with pytest.raises(ValueError, match=r"'relu' has no setting 'alpha'; it has none"):
        activations.get("relu", alpha=1.0)
    with pytest.raises(TypeError, match="already has its own"):
        activations.get(ReLU(), alpha=1.0)
    assert activations.get(nn.ELU(2.0)) == ELU(2.0)
    with pytest.raises(
        TypeError, match="a name or an instance of Activation, got int; names are sigmoid"
    ):
        activations.get(3)


@pytest.mark.parametrize(
    ("name", "params"),
    [
        ("leaky_relu", {"negative_slope": 0.0}),
        ("leaky_relu", {"negative_slope": 1.5}),
        ("elu", {"alpha": -1.0}),
        ("softplus", {"beta": math.inf}),
        ("hardtanh", {"min_val": 1.0, "max_val": 1.0}),
        ("step", {"width": -0.1}),
        ("sign", {"width": math.nan}),
        ("staircase", {"levels": 0}),
        ("staircase", {"levels": 2.5}),
        ("staircase", {"step": 0.0}),
        ("staircase", {"step": 1.0, "width": 1.1}),
    ],
)
def test_bad_parameters_are_refused(name, params):
    with pytest.raises(ValueError, match=f"{name}.*got"):
        activations.get(name, **params)


@pytest.mark.parametrize(("activation", "module"), MODULES, ids=lambda a: repr(a))
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_phi_is_the_torch_module_bit_for_bit(activation, module, dtype):
    z = torch.linspace(-40, 40, 10001, dtype=dtype)
    assert torch.equal(activation.phi(z), module(z))
    assert repr(activation.to_module()) == repr(module)
    assert from_module(module) == activation
    assert from_module(activation.to_module()) == activation


@pytest.mark.parametrize("activation", [Step(), Sign(), Staircase(3, 0.5), Step(0.5)], ids=repr)
def test_elementwise_is_the_module_of_what_torch_lacks(activation):
    module = activation.to_module()
    assert isinstance(module, Elementwise)
    assert repr(activation) in repr(module)
    assert from_module(copy.deepcopy(module)) == activation
    network = nn.Sequential(nn.Linear(3, 4), module)
    x = torch.linspace(-2, 2, 15).reshape(5, 3)
    exported = torch.export.export(network, (x,)).module()
    assert torch.equal(exported(x), activation.phi(network[0](x)))


@pytest.mark.parametrize("module", [nn.GELU(), nn.SiLU(), nn.Mish(), nn.Hardswish()], ids=repr)
def test_modules_that_are_not_monotone_are_refused(module):
    with pytest.raises(ValueError, match="not monotone.*must be convex.*softplus"):
        from_module(module)
    with pytest.raises(ValueError, match="not monotone"):
        activations.get(type(module).__name__.lower())


def test_unknown_modules_are_refused():
    with pytest.raises(TypeError, match=r"PReLU.*LeakyReLU.*from_function"):
        from_module(nn.PReLU())
    with pytest.raises(TypeError, match="Dropout is not .* leave it out"):
        from_module(nn.Dropout())
    with pytest.raises(ValueError, match="threshold=5"):
        from_module(nn.Softplus(threshold=5))
    assert from_module(nn.Softplus(threshold=30)) == Softplus()


@every
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_shape_and_dtype_are_kept(activation, dtype):
    z = torch.linspace(-3, 3, 24, dtype=dtype).reshape(2, 3, 4)
    x = activation.phi(z)
    for made in (x, activation.primitive(z), activation.conjugate(x), activation.gap(x, z)):
        assert made.shape == z.shape and made.dtype == dtype


@every
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_finite_input_never_gives_nan_and_nan_is_not_hidden(activation, dtype):
    sizes = torch.tensor([0, 1e-45, 1e-30, 1e-3, 1, 90, 1e4, 1e19, 1e25, 3e38], dtype=dtype)
    values = torch.cat([sizes, -sizes])
    x, z = torch.meshgrid(values, values, indexing="ij")
    for made in (activation.phi(z), activation.primitive(z), activation.conjugate(x)):
        assert not made.isnan().any()
    assert not activation.gap(x, z).isnan().any()
    nan = torch.full((1,), math.nan, dtype=dtype)
    assert activation.gap(activation.phi(torch.zeros_like(nan)), nan).isnan().all()


@every
def test_float32_gap_agrees_with_float64(activation):
    generator = torch.Generator().manual_seed(0)
    z = 10 * torch.randn(4000, generator=generator)
    x = activation.phi(z + torch.randn(4000, generator=generator))
    exact = x.double().clamp(activation.lower, activation.upper)
    expected = activation.gap(exact, z.double())
    torch.testing.assert_close(activation.gap(x, z).double(), expected, rtol=1e-4, atol=2e-6)


@pytest.mark.parametrize("activation", [Identity(), ReLU(), LeakyReLU(0.25)], ids=repr)
def test_tiny_gaps_survive_float32(activation):
    z = torch.linspace(-64, 64, 257)
    x = activation.phi(z + 2.0**-10)  # exact in float32
    expected = activation.gap(x.double(), z.double())
    assert 0 < expected.max() < 1e-6
    torch.testing.assert_close(activation.gap(x, z).double(), expected, rtol=1e-6, atol=0)


def test_a_jump_takes_its_upper_value():
    below = torch.tensor(0.0).nextafter(torch.tensor(-1.0))
    z = torch.stack([torch.tensor(0.0), torch.tensor(-0.0), below])
    assert Step().phi(z).tolist() == [1, 1, 0]
    assert Sign().phi(z).tolist() == [1, 1, -1]
    z = torch.tensor([-9.0, 0.25, 0.5, 1.25, 1.5, 2.49, 2.5, 9.0])
    assert Staircase(3).phi(z).tolist() == [0, 0, 1, 1, 2, 2, 3, 3]


def test_values_of_a_ramp():
    z = torch.tensor([-1.0, -0.25, 0.0, 0.125, 0.25, 1.0])
    assert Step(0.5).phi(z).tolist() == [0, 0, 0.5, 0.75, 1, 1]
    assert Sign(0.5).phi(z).tolist() == [-1, -1, 0, 0.5, 1, 1]
    assert Step(0.5).lipschitz == 2 and Sign(0.5).lipschitz == 4 and Sign().lipschitz == math.inf
    assert Staircase(3, 0.5).smoothed(2.0) == Staircase(3, 0.5, 0.5)
    z = torch.linspace(-1, 3, 401)  # ramps that touch make a clipped ReLU
    torch.testing.assert_close(Staircase(3, 0.5, 0.5).phi(z), z.clamp(0, 1.5))


@pytest.mark.parametrize("activation", [Staircase(3, 0.7), Staircase(3, 0.7, 0.4)], ids=repr)
def test_primitive_of_a_staircase_against_quadrature(activation):
    def phi(z: float) -> float:
        return float(activation.phi(torch.tensor(z, dtype=torch.float64)))

    corners = [0.7 * (k + 0.5) + sign * 0.2 for k in range(3) for sign in (-1, 0, 1)]
    start = activation.primitive(torch.tensor(-1.0, dtype=torch.float64))
    for end in (0.3, 0.6, 1.0, 1.3, 1.9, 4.0):
        area = quad(phi, -1.0, end, points=[c for c in corners if c < end] or None, limit=200)[0]
        made = activation.primitive(torch.tensor(end, dtype=torch.float64)) - start
        assert float(made) == pytest.approx(area, abs=1e-7)


@pytest.mark.parametrize("beta", [0.5, 1.0, 4.0])
def test_primitive_of_softplus_is_a_dilogarithm(beta):
    z = np.linspace(-40, 40, 2001)
    expected = -spence(1 + np.exp(beta * z)) / beta**2
    made = Softplus(beta).primitive(torch.tensor(z)).numpy()
    np.testing.assert_allclose(made, expected, rtol=1e-13, atol=1e-15)
    q = np.exp(beta * z[beta * z < -6])  # where spence loses its digits, the series has them
    series = sum((-1) ** (k + 1) * q**k / k**2 for k in range(1, 8)) / beta**2
    np.testing.assert_allclose(made[beta * z < -6], series, rtol=1e-14)


def test_known_values_of_conjugates():
    x = torch.tensor([0.0, 0.5, 1.0], dtype=torch.float64)
    torch.testing.assert_close(Sigmoid().conjugate(x), -math.log(2) * (x == 0.5).double())
    ends = torch.tensor([-1.0, 0.0, 1.0], dtype=torch.float64)
    torch.testing.assert_close(Tanh().conjugate(ends), math.log(2) * ends.abs())
    assert float(ELU(2.0).conjugate(torch.tensor(-2.0))) == 2.0
    assert float(Softplus().conjugate(torch.tensor(0.0))) == pytest.approx(0, abs=1e-30)


@pytest.mark.parametrize(
    ("known", "phi"),
    [(Tanh(), torch.tanh), (Softplus(), F.softplus), (Hardtanh(), F.hardtanh), (ELU(), F.elu)],
    ids=["tanh", "softplus", "hardtanh", "elu"],
)
def test_from_function_rebuilds_known_activations(known, phi):
    made = from_function(phi, lipschitz=known.lipschitz, name="mine")
    assert (made.lower, made.upper) == pytest.approx((known.lower, known.upper))
    z = torch.linspace(-30, 30, 601, dtype=torch.float64)
    x = known.phi(z)
    zero = torch.zeros(1, dtype=torch.float64)
    torch.testing.assert_close(
        made.primitive(z), known.primitive(z) - known.primitive(zero), rtol=1e-10, atol=1e-9
    )
    torch.testing.assert_close(
        made.conjugate(x), known.conjugate(x) + known.primitive(zero), rtol=1e-10, atol=1e-9
    )
    torch.testing.assert_close(
        made.gap(x.flip(0), z), known.gap(x.flip(0), z), rtol=1e-9, atol=1e-9
    )


def test_from_function_finds_the_range():
    assert from_function(torch.arctan, lipschitz=1.0).upper == pytest.approx(math.pi / 2)
    assert from_function(torch.asinh, lipschitz=1.0).upper == math.inf
    shifted = from_function(lambda z: torch.relu(z) - 3, lipschitz=1.0)
    assert (shifted.lower, shifted.upper) == (-3, math.inf)
    far = torch.tensor([2e4], dtype=torch.float64)
    torch.testing.assert_close(shifted.conjugate(far), (far + 3) ** 2 / 2)


@pytest.mark.parametrize(
    ("phi", "lipschitz", "message"),
    [
        (torch.sin, 1.0, r"decreases: it is .* at z = .* but .* at z = "),
        (F.silu, 1.1, "decreases"),
        (lambda z: 2 * torch.tanh(z), 1.0, r"slope between .* is 1\.99"),
        (lambda z: (z > 0).to(z.dtype), 10.0, r"steeper .* is 64"),
        (lambda z: z.sum(), 1.0, "same shape"),
        (lambda z: z.float(), 1.0, "dtype"),
        (lambda z: torch.log1p(torch.exp(z)), 1.0, "finite everywhere"),
        (torch.relu, math.inf, "continuous.*'staircase'"),
        (torch.relu, 0.0, "above 0"),
    ],
    ids=["sin", "silu", "steep", "jump", "sum", "float", "overflow", "inf", "zero"],
)
def test_from_function_refuses(phi, lipschitz, message):
    with pytest.raises(ValueError, match=message):
        from_function(phi, lipschitz=lipschitz, name="mine")


def test_custom_works_as_a_module_and_in_float32():
    made = from_function(F.softsign, lipschitz=1.0, name="softsign")
    assert "softsign" in repr(made.to_module()) and from_module(made.to_module()) == made
    assert made == from_function(F.softsign, lipschitz=1.0, name="softsign")
    assert made != from_function(F.softsign, lipschitz=2.0, name="softsign")
    z = torch.linspace(-5, 5, 40).reshape(2, 20)
    exact = made.gap(z.flip(0).div(6).double(), z.double())
    gap = made.gap(z.flip(0) / 6, z)
    assert gap.dtype == torch.float32
    torch.testing.assert_close(gap.double(), exact, rtol=1e-5, atol=1e-5)
    with pytest.raises(TypeError, match="'softsign'.*cannot be saved by name"):
        made.params()


@every
def test_between_kinks_an_activation_is_affine(activation):
    if activation.kinks is None:
        return
    assert list(activation.kinks) == sorted(set(activation.kinks))
    ends = [-50.0, *activation.kinks, 50.0]
    for low, high in itertools.pairwise(ends):
        z = torch.linspace(low, high, 101, dtype=torch.float64)[1:-1]
        x = activation.phi(z)
        line = torch.lerp(x[0], x[-1], (z - z[0]) / (z[-1] - z[0]))
        torch.testing.assert_close(x, line)
