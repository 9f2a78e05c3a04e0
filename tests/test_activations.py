"""Activations: lookup, torch's own, a user's functions and tables, behaviour in float32."""

from __future__ import annotations

import copy
import itertools
import json
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
    CELU,
    ELU,
    GELU,
    SELU,
    Absolute,
    Clamp,
    Cosine,
    Elementwise,
    GroupNorm,
    Hardshrink,
    Hardsigmoid,
    Hardswish,
    Hardtanh,
    Identity,
    L2Normalize,
    LayerNorm,
    LeakyReLU,
    LogSigmoid,
    Mish,
    OneHot,
    ReLU,
    ReLU6,
    RMSNorm,
    Sigmoid,
    Sign,
    SiLU,
    Sine,
    Softmax,
    Softplus,
    Softshrink,
    Softsign,
    Sparsemax,
    Staircase,
    Step,
    Table,
    Tanh,
    Threshold,
    TopK,
    from_call,
    from_function,
    from_module,
    from_table,
    is_activation,
    split,
)

MODULES = [
    *((ReLU(), nn.ReLU()), (LeakyReLU(0.2), nn.LeakyReLU(0.2)), (Sigmoid(), nn.Sigmoid())),
    *((Tanh(), nn.Tanh()), (ELU(1.5), nn.ELU(1.5)), (Softplus(2.0), nn.Softplus(2.0))),
    *((Identity(), nn.Identity()), (Hardtanh(-0.3, 2.0), nn.Hardtanh(-0.3, 2.0))),
    *((Hardsigmoid(), nn.Hardsigmoid()), (ReLU6(), nn.ReLU6()), (SELU(), nn.SELU())),
    *((CELU(0.7), nn.CELU(0.7)), (LogSigmoid(), nn.LogSigmoid()), (Softsign(), nn.Softsign())),
    *((Softshrink(0.3), nn.Softshrink(0.3)), (Hardshrink(0.3), nn.Hardshrink(0.3))),
]
BENT_MODULES = [
    *((GELU(), nn.GELU()), (GELU("tanh"), nn.GELU("tanh")), (SiLU(), nn.SiLU())),
    *((Mish(), nn.Mish()), (Hardswish(), nn.Hardswish())),
]
VECTOR_MODULES = [
    (Softmax(1), nn.Softmax(1)),
    (RMSNorm((3, 4)), nn.RMSNorm((3, 4), elementwise_affine=False)),
    (RMSNorm((4,), 0.1), nn.RMSNorm(4, 0.1, elementwise_affine=False)),
    (LayerNorm((4,), 1e-3), nn.LayerNorm(4, 1e-3, elementwise_affine=False)),
    (LayerNorm((3, 4)), nn.LayerNorm((3, 4), elementwise_affine=False)),
]
CASES = [
    *(each for each in activations.examples() if each.elementwise and not each.slope_bound),
    *(activation for activation, _ in MODULES),
    *(Step(0.5), Sign(0.1), Staircase(3, 0.1, 0.07), Hardshrink(0.5, 0.2)),
    *(Threshold(2.0, -1.0, 0.5), Clamp(None, 0.5)),
]
BENT = [example for example in activations.examples() if example.slope_bound]
VECTOR = [example for example in activations.examples() if not example.elementwise]
every = pytest.mark.parametrize("activation", CASES, ids=repr)


@pytest.mark.parametrize("activation", [*CASES, *VECTOR], ids=repr)
def test_params_round_trip(activation):
    saved = json.loads(json.dumps(activation.params(), allow_nan=False))
    again = activations.get(activation.name, **saved)
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
        *(("leaky_relu", {"negative_slope": 0.0}), ("leaky_relu", {"negative_slope": 1.5})),
        *(("elu", {"alpha": -1.0}), ("softplus", {"beta": math.inf})),
        *(("hardtanh", {"min_val": 1.0, "max_val": 1.0}), ("step", {"width": -0.1})),
        *(("sign", {"width": math.nan}), ("staircase", {"levels": 0})),
        *(("staircase", {"levels": 2.5}), ("staircase", {"step": 0.0})),
        *(("staircase", {"step": 1.0, "width": 1.1}), ("celu", {"alpha": 0.0})),
        *(("clamp", {"min": 1.0, "max": 1.0}), ("clamp", {"min": math.nan})),
        *(("softshrink", {"lambd": -0.5}), ("hardshrink", {"lambd": 0.5, "width": 1.1})),
        ("threshold", {"threshold": 0.0, "value": 0.0}),
        *(("threshold", {"threshold": 1.0, "value": 0.0, "width": 2.1}), ("top_k", {"k": 0})),
        *(("one_hot", {"width": -1.0}), ("l2_normalize", {"eps": 0.0})),
        *(("rms_norm", {"shape": (4,), "eps": 0.0}), ("layer_norm", {"shape": ()})),
        *(("layer_norm", {"shape": (4,), "eps": -1.0}), ("group_norm", {"groups": 0})),
        ("group_norm", {"groups": 2, "eps": 0.0}),
    ],
)
def test_bad_parameters_are_refused(name, params):
    with pytest.raises(ValueError, match=f"{name}.*got"):
        activations.get(name, **params)


@pytest.mark.parametrize(("activation", "module"), [*MODULES, *BENT_MODULES], ids=repr)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_phi_is_the_torch_module_bit_for_bit(activation, module, dtype):
    z = torch.linspace(-40, 40, 10001, dtype=dtype)
    assert torch.equal(activation.phi(z), module(z))
    assert repr(activation.to_module()) == repr(module)
    assert from_module(module) == activation
    assert from_module(activation.to_module()) == activation


@pytest.mark.parametrize(("activation", "module"), VECTOR_MODULES, ids=lambda a: repr(a))
def test_functions_of_slices_are_the_torch_modules(activation, module):
    z = 3 * torch.randn(5, 3, 4, generator=torch.Generator().manual_seed(0))
    assert torch.equal(activation.phi(z), module(z))
    assert repr(activation.to_module()) == repr(module)
    assert from_module(module) == activation and is_activation(module)


def test_group_norm_and_normalize_are_torch_s():
    z = torch.randn(5, 6, 3, 2, generator=torch.Generator().manual_seed(0))
    made = from_module(nn.GroupNorm(3, 6, 0.1, affine=False))
    assert made == GroupNorm(3, 0.1)
    assert torch.equal(made.phi(z), F.group_norm(z, 3, eps=0.1))
    assert made.gap(z, z).shape == (5, 3, 1, 1)
    assert torch.equal(L2Normalize(1).phi(z), F.normalize(z))
    assert from_module(nn.Softmax2d()).phi(z).equal(nn.Softmax2d()(z))


def test_what_has_weights_is_no_activation():
    for module in (nn.LayerNorm(4), nn.RMSNorm(4), nn.GroupNorm(2, 4)):
        assert not is_activation(module)
        with pytest.raises(ValueError, match=r"_norm with weight or bias .* belong to the edge"):
            from_module(module)
    assert not is_activation(nn.PReLU()) and not is_activation(nn.Linear(2, 2))
    assert is_activation(nn.ReLU()) and is_activation(Elementwise(Step()))
    assert is_activation(nn.GELU()) and is_activation(nn.Softmin())  # the second to be refused


LACKING = [
    *(Step(), Sign(), Staircase(3, 0.5), Step(0.5)),
    *(Sparsemax(), TopK(2), OneHot(width=0.3), GroupNorm(2), L2Normalize()),
    *(Clamp(None, 0.3), Threshold(1.0, 0.0), Hardshrink(0.5, 0.5)),
    Table((-1, 0, 1), (0, 0.2, 1)),
]


@pytest.mark.parametrize("activation", LACKING, ids=repr)
def test_elementwise_is_the_module_of_what_torch_lacks(activation):
    module = activation.to_module()
    assert isinstance(module, Elementwise)
    assert repr(activation) in repr(module)
    assert from_module(copy.deepcopy(module)) == activation
    network = nn.Sequential(nn.Linear(3, 4), module)
    x = torch.linspace(-2, 2, 15).reshape(5, 3)
    exported = torch.export.export(network, (x,)).module()
    assert torch.equal(exported(x), activation.phi(network[0](x)))


CALLS = [
    *(("relu", (), {"inplace": True}, ReLU()), ("relu_", (), {}, ReLU()), ("tanh", (), {}, Tanh())),
    *(("sigmoid_", (), {}, Sigmoid()), ("leaky_relu", (0.2, True), {}, LeakyReLU(0.2))),
    *(("leaky_relu_", (), {"negative_slope": 0.0}, ReLU()), ("elu", (2.0, False), {}, ELU(2.0))),
    *(("gelu", (), {"approximate": "tanh"}, GELU("tanh")), ("silu_", (True,), {}, SiLU())),
    *(("hardswish", (), {"inplace": False}, Hardswish()), ("sin", (), {}, Sine())),
    *(("cos_", (), {}, Cosine()), ("abs", (), {}, Absolute()), ("selu", (), {}, SELU())),
    *(("celu_", (0.5,), {}, CELU(0.5)), ("softplus", (2.0, 20.0), {}, Softplus(2.0))),
    *(("hardtanh", (-2, 3), {}, Hardtanh(-2, 3)), ("hardsigmoid", (False,), {}, Hardsigmoid())),
    *(("relu6", (), {}, ReLU6()), ("softsign", (), {}, Softsign())),
    *(("logsigmoid", (), {}, LogSigmoid()), ("log_sigmoid", (), {}, LogSigmoid())),
    *(("softshrink", (0.1,), {}, Softshrink(0.1)), ("softshrink", (0,), {}, Identity())),
    *(("hardshrink", (), {"lambd": 0.1}, Hardshrink(0.1)), ("hardshrink", (0,), {}, Identity())),
    *(("softmax", (-1,), {}, Softmax(-1)), ("softmax", (1, 3, torch.float32), {}, Softmax(1))),
    ("softmax", (), {"dim": 2, "dtype": None}, Softmax(2)),
    *(("_softmax", (1, False), {}, Softmax(1)), ("normalize", (), {"dim": -1}, L2Normalize(-1))),
    ("normalize", (2.0, 1, 0.5), {}, L2Normalize(1, 0.5)),
    ("clamp", (0.5, 1), {}, Hardtanh(0.5, 1)),
    *(("clip", (), {"max": 6, "min": 0}, Hardtanh(0, 6)), ("clamp", (0,), {}, ReLU())),
    *(("clamp_", (-1.0,), {}, Clamp(-1.0, None)), ("clamp_min", (0,), {}, ReLU())),
    *(("clamp_max", (2,), {}, Clamp(None, 2.0)), ("clamp", (torch.zeros(3),), {}, None)),
    *(("threshold", (0.0, 0.0), {}, ReLU()), ("threshold_", (1.0, 1.0), {}, Clamp(1.0))),
    ("threshold", (0.5, 0), {}, Threshold(0.5, 0)),
    ("rms_norm", ([4],), {"eps": 0.1}, RMSNorm((4,), 0.1)),
    ("layer_norm", ((4,), None, None, 0.1), {}, LayerNorm((4,), 0.1)),
    ("layer_norm", ([4], None, None, 1e-5, False), {}, LayerNorm((4,))),
    ("group_norm", (2, None, None, 0.1, True), {}, GroupNorm(2, 0.1)),
    *(("prelu", (0.1,), {}, None), ("linear", (), {}, None), ("exp", (), {}, None)),
]


@pytest.mark.parametrize(("name", "args", "kwargs", "expected"), CALLS)
def test_calls_of_torch_are_recognised(name, args, kwargs, expected):
    assert from_call(name, args, kwargs) == expected


@pytest.mark.parametrize("name", activations.UNSUPPORTED)
def test_calls_that_are_no_gradient_are_refused(name):
    with pytest.raises(ValueError, match=name):
        from_call(name)


@pytest.mark.parametrize(
    ("name", "args", "message"),
    [
        ("log_softmax", (-1,), "train on logits with cross-entropy"),
        ("softmax", (), r"softmax needs its dimension.*dim=-1"),
        ("softplus", (1.0, 5.0), "threshold=5"),
        ("threshold", (0.0, 1.0), "threshold.*from 0 to 1|threshold.*1 to 0"),
        ("normalize", (1.0,), "with p=1 its derivative is not symmetric.*p=2"),
        ("layer_norm", ((4,), torch.ones(4)), "belong to the edge"),
        ("relu", (1, 2, 3), "not those of torch.nn.functional"),
    ],
)
def test_calls_that_cannot_be_trained_say_why(name, args, message):
    with pytest.raises(ValueError, match=message):
        from_call(name, args)


def test_a_slice_of_softmin_or_log_softmax_is_refused_as_a_module():
    for module in (nn.Softmin(dim=1), nn.LogSoftmax(dim=1)):
        with pytest.raises(ValueError, match=type(module).__name__):
            from_module(module)
    assert from_module(nn.Threshold(1.0, 0.5)) == Threshold(1.0, 0.5)


def test_names_are_what_can_be_made_without_arguments():
    for name in activations.names():
        assert activations.get(name).elementwise
    assert not set(activations.names()) & set(activations.vector_names())
    named = {example.name for example in activations.examples()}
    assert named == {*activations.names(), *activations.vector_names(), "table", "threshold"}


def test_unknown_modules_are_refused():
    with pytest.raises(TypeError, match=r"PReLU.*LeakyReLU.*from_function"):
        from_module(nn.PReLU())
    with pytest.raises(TypeError, match="Dropout"):
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


@pytest.mark.parametrize("size", [1e-6, 0.1, 3.0, 200.0])
@pytest.mark.parametrize(
    "activation", [*CASES, *BENT, *VECTOR, Softmax(1), RMSNorm((4, 8))], ids=repr
)
def test_responses_are_differences_of_values(activation, size):
    torch.manual_seed(0)
    z = torch.randn(2, 4, 8, dtype=torch.float64)
    pull = size * torch.randn(2, 4, 8, dtype=torch.float64)
    close = {"rtol": 1e-9, "atol": 1e-13}
    expected = activation.phi(z) - activation.phi(z - pull)
    torch.testing.assert_close(activation.response(z, pull), expected, **close)
    for d in (pull.abs(), size) if activation.elementwise else (pull,):
        expected = activation.phi(z + d) - activation.phi(z - d)
        torch.testing.assert_close(activation.difference(z, d), expected, **close)


@pytest.mark.parametrize("activation", [ReLU(), Identity(), Hardtanh(-40, 40), LeakyReLU(0.3)])
def test_small_pulls_survive_large_values_in_single_precision(activation):
    z, pull = torch.full((3,), 30.0), torch.tensor([1e-9, -1e-9, 1e-20])
    assert torch.equal(activation.response(z, pull), pull)


def test_norms_answer_small_pulls_in_single_precision():
    z = torch.randn(20, 64, generator=torch.Generator().manual_seed(0)) + 3
    pull = 1e-6 * torch.randn(20, 64, generator=torch.Generator().manual_seed(1))
    for norm in (RMSNorm((64,), 1e-5), LayerNorm((64,))):
        wide = norm.response(z.double(), pull.double())
        torch.testing.assert_close(norm.response(z, pull).double(), wide, rtol=1e-4, atol=1e-11)


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


@pytest.mark.parametrize("activation", VECTOR, ids=repr)
def test_one_value_per_slice(activation):
    z = torch.linspace(-3, 3, 96).reshape(3, 4, 8).sin()
    x = activation.phi(z)
    assert x.shape == z.shape and x.dtype == z.dtype
    slices = (3, 2, 1) if isinstance(activation, GroupNorm) else (3, 4, 1)
    for made in (activation.primitive(z), activation.conjugate(x), activation.gap(x, z)):
        assert made.shape == slices and made.dtype == z.dtype


def test_slices_of_several_dimensions_and_along_others():
    z = torch.randn(3, 4, 8, generator=torch.Generator().manual_seed(0))
    assert LayerNorm((4, 8)).gap(z, z).shape == (3, 1, 1)
    assert Softmax(1).primitive(z).shape == (3, 1, 8)
    assert TopK(2, 1).gap(TopK(2, 1).phi(z), z).shape == (3, 1, 8)


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
    ("phi", "options", "message"),
    [
        (lambda z: 2 * torch.tanh(z), {}, r"steeper.*slope of 1\.99"),
        (lambda z: (z > 0).to(z.dtype), {"lipschitz": 10.0}, r"steeper .* of 64"),
        (lambda z: z.sum(), {}, "same shape"),
        (lambda z: z.float(), {}, "dtype"),
        (lambda z: z.double(), {}, r"made torch.float64 of torch.float32"),
        (lambda z: torch.log1p(torch.exp(z)), {}, "finite everywhere"),
        (torch.relu, {"lipschitz": math.inf}, "'staircase'"),
        (torch.relu, {"lipschitz": 0.0}, "above 0"),
        (lambda z: z.clamp_(-1, 1), {}, "writes over what it is given"),
        (lambda z: z.clamp_(-1, 1), {"dim": -1}, "writes over what it is given"),
        (lambda z: z.softmax(-1), {}, "not elementwise.*dim=-1"),
        (lambda z: z / (1 + z.norm()), {}, "not elementwise"),
    ],
    ids="steep jump sum float double overflow inf zero place slices softmax norm".split(),
)
def test_from_function_refuses(phi, options, message):
    with pytest.raises(ValueError, match=message):
        from_function(phi, name="mine", **{"lipschitz": 1.0, **options})


def test_a_function_of_slices_is_checked():
    def turned(z):  # monotone, but its Jacobian is not symmetric
        half = z.shape[-1] // 2
        return z + torch.cat([z[..., half:], -z[..., :half]], -1)

    def whole(z):
        return z - z.mean()

    def refuse(phi, message, lipschitz=2.0, dim=-1):
        with pytest.raises(ValueError, match=message):
            from_function(phi, lipschitz=lipschitz, name="mine", dim=dim)

    refuse(turned, r"gradient of no function.*not symmetric")
    refuse(lambda z: torch.log_softmax(z, -1), r"gradient of no function", lipschitz=4.0)
    refuse(lambda z: torch.softmax(z, -1), r"steeper than lipschitz=0\.2 .* slope of 0\.", 0.2)
    refuse(whole, r"every slice along dim=-1 by itself")
    refuse(lambda z: torch.softmax(z, 1), r"every slice along dim=-1 by itself")
    refuse(lambda z: z.sum(-1), "same shape")
    refuse(lambda z: z.float(), "keep the dtype")
    refuse(lambda z: z / 0 * 0, "finite everywhere")
    refuse(lambda z: torch.softmax(z, -1), "finite and above 0", math.inf)

    for phi, constant in [
        (Sparsemax().phi, 1.0),
        (LayerNorm((12,), 0.01).phi, 10.0),
        (TopK(3, width=0.5).phi, 2.0),
    ]:
        made = from_function(phi, lipschitz=constant, dim=-1)
        assert (made.lipschitz, made.elementwise, made.dim) == (constant, False, -1)
    third = from_function(lambda z: torch.softmax(z, 3), lipschitz=0.5, dim=3, name="third")
    with pytest.raises(TypeError, match="'third'.*cannot be saved by name"):
        third.params()


def test_a_table_is_interpolated_and_constant_beyond():
    z, values = np.array([-1.0, 0.0, 0.5, 2.0]), np.array([-2.0, -2.0, 1.0, 1.5])
    made = from_table(torch.tensor(z), values)
    at = torch.linspace(-4, 5, 901, dtype=torch.float64)
    np.testing.assert_allclose(made.phi(at).numpy(), np.interp(at.numpy(), z, values), atol=1e-14)
    assert (made.lower, made.upper, made.lipschitz) == (-2, 1.5, 6)
    assert made == Table((-1, 0, 0.5, 2), (-2, -2, 1, 1.5)) and made.kinks == (-1, 0, 0.5, 2)
    params = {"z": [-1, 0, 0.5, 2], "values": [-2, -2, 1, 1.5], "noise": 0.0, "dim": -1}
    assert made.params() == params
    for end in (-3.0, 0.2, 1.0, 4.0):
        area = quad(np.interp, -1.0, end, args=(z, values), points=[0.0, 0.5, 2.0])[0]
        assert float(made.primitive(torch.tensor(end, dtype=torch.float64))) == pytest.approx(
            area, abs=1e-9
        )


@pytest.mark.parametrize(
    ("z", "values", "message"),
    [
        ([0, 0, 1], [0, 1, 2], r"z of a table must increase, got 0 and then 0"),
        ([0], [1], "at least 2"),
        ([0, 1], [1, 2, 3], "as many values as z"),
        ([0, math.inf], [0, 1], "finite"),
        ([0, 1], [2, 2], "must differ"),
    ],
)
def test_bad_tables_are_refused(z, values, message):
    with pytest.raises(ValueError, match=message):
        from_table(z, values)


def test_custom_works_as_a_module_and_in_float32():
    made = from_function(F.softsign, lipschitz=1.0, name="softsign")
    assert made != Softsign()
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


def test_sparsemax_ends_where_an_element_is_at_its_level():
    """In single precision the level may come out on either side of it, round after round."""
    generator = torch.Generator().manual_seed(0)
    z = 0.9 * torch.rand(2000, 3, generator=generator)
    z -= z.amax(-1, keepdim=True)
    level = (z.topk(2).values.sum(-1, keepdim=True) - 1) / 2
    z = z.scatter(-1, z.argmin(-1, keepdim=True), level)  # which changes nothing above it
    said = Sparsemax().phi(z)
    torch.testing.assert_close(said.sum(-1), torch.ones(2000))
    torch.testing.assert_close(said, (z - level).clamp(min=0), atol=1e-6, rtol=0)


@pytest.mark.parametrize("activation", BENT, ids=repr)
def test_a_function_that_turns_back_is_split_in_two(activation):
    z = torch.linspace(-30, 30, 60001, dtype=torch.float64)
    c, part = split(activation)
    torch.testing.assert_close(part.phi(z) - c * z, activation.phi(z))
    slopes = activation.phi(z).diff() / z.diff()
    assert slopes.min() == pytest.approx(-c, rel=1e-3)
    assert slopes.abs().max() == pytest.approx(activation.lipschitz, rel=1e-3)
    x = activation.phi(z)
    assert (x.min(), x.max()) == pytest.approx(
        (activation.lower, min(activation.upper, float(x.max()))), abs=1e-6
    )
    with pytest.raises(ValueError, match="not monotone"):
        activation.conjugate(x)
    assert activation.gap(x.flip(0), z).min() >= -1e-10
    assert activation.gap(x, z).abs().max() < 1e-10 < activation.gap(x + 1e-3, z).min()
    assert part.gap(part.phi(z), z).abs().max() < 1e-10
    assert split(part) == (0.0, part) and split(ReLU()) == (0.0, ReLU())


@pytest.mark.parametrize(
    ("phi", "least", "most"),
    [(torch.sin, -1.0, 1.0), (F.silu, -0.0998, 1.0998), (lambda z: torch.sin(z) ** 2, -1.0, 1.0)],
    ids=["sin", "silu", "sin^2"],
)
def test_any_lipschitz_function_is_taken_and_its_slopes_estimated(phi, least, most):
    guess = from_function(phi)
    assert guess.lipschitz == pytest.approx(max(-least, most), rel=0.02)
    assert guess.slope_bound == pytest.approx(-least, rel=0.02)
    told = from_function(phi, lipschitz=2.0, lower_slope=-1.5)
    assert (told.lipschitz, told.slope_bound) == (2.0, 1.5)
    with pytest.raises(ValueError, match="lower_slope"):
        from_function(phi, lower_slope=0.0)
    z = torch.linspace(-5, 5, 101, dtype=torch.float64)
    expected = [quad(lambda t: float(phi(torch.tensor(t))), 0, float(end))[0] for end in z[::20]]
    torch.testing.assert_close(guess.primitive(z)[::20], torch.tensor(expected).double())
    c, part = split(guess)
    assert part.gap(part.phi(z.flip(0)), z).min() > -1e-12


def test_softmin_along_a_dimension_is_taken_and_has_no_gap():
    softmin = from_function(lambda z: torch.softmax(-z, -1), lipschitz=0.5, dim=-1)
    assert 0.1 < softmin.slope_bound <= 0.5
    z = torch.randn(3, 5)
    with pytest.raises(ValueError, match="not monotone"):
        softmin.gap(softmin.phi(z), z)
    with pytest.raises(ValueError, match="slices"):
        split(softmin)


def test_a_table_has_a_curve_for_each_unit():
    rows = [[0.0, 1.0, 1.5], [2.0, 2.0, 5.0], [1.0, 0.0, 2.0]]
    z = torch.linspace(-2, 4, 21, dtype=torch.float64)[:, None].expand(21, 3)
    table = from_table([0, 1, 3], rows, noise=0.1)
    for j, row in enumerate(rows):
        alone = from_table([0, 1, 3], row)
        torch.testing.assert_close(table.phi(z)[:, j], alone.phi(z[:, j]))
        torch.testing.assert_close(table.primitive(z)[:, j], alone.primitive(z[:, j]))
    assert (table.lipschitz, table.slope_bound, table.noise) == (1.5, 1.0, 0.1)
    upright = from_table([0, 1, 3], rows, dim=1)
    images = z.T[None, :, :, None]
    torch.testing.assert_close(upright.phi(images)[0, :, :, 0], table.phi(z).T)
    with pytest.raises(ValueError, match="3 units"):
        table.phi(z[:, :2])
    saved = json.loads(json.dumps(table.params()))
    assert activations.get("table", **saved) == table

    rising = from_table([0, 1, 3], rows[:2])
    x, z = rising.phi(z[:, :2].flip(0)), z[:, :2]
    for j, row in enumerate(rows[:2]):
        gap = from_table([0, 1, 3], row).gap(x[:, j], z[:, j])
        torch.testing.assert_close(rising.gap(x, z)[:, j], gap)
    assert (rising.gap(x + 10, z) == math.inf).all() and rising.gap(x, z).min() > -1e-12
