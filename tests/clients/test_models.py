"""Models as people write them: what lifting, or a step of fit, once got wrong or left unsaid."""

from __future__ import annotations

import math
import warnings

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lpom
from lpom import LPOM, Adaptive
from lpom.methods import Batch, Problem


def gradients(model: nn.Module, run, *inputs, target: Tensor | None = None) -> dict[str, Tensor]:
    """Of a mean square, by the names of the weights."""
    model.zero_grad()
    outputs = run(*inputs)
    target = torch.zeros_like(outputs) if target is None else target
    ((outputs - target) ** 2).mean().backward()
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def cosine(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    assert found.keys() == expected.keys()
    a, b = (torch.cat([g.flatten() for g in side.values()]) for side in (found, expected))
    return float(F.cosine_similarity(a, b, dim=0))


def check_close_to_the_gradient(model: nn.Module, *inputs, least: float = 0.999) -> lpom.Lifted:
    """Outputs equal, the gradient close; returns the lifted model after its pass."""
    lifted = lpom.lift(model)
    torch.testing.assert_close(lifted(*inputs), model(*inputs))
    assert cosine(gradients(model, lifted, *inputs), gradients(model, model, *inputs)) > least
    return lifted


def stepped(model: nn.Module, x: Tensor, y: Tensor) -> dict[str, Tensor]:
    """The gradient in a default step of `fit`, of the mean loss; the weights move by it."""
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    method = LPOM(weights=Adaptive(optimizer="sgd", learning_rate=1.0))
    problem = Problem(model, lpom.losses.get("squared"))
    method.step(problem, Batch(x, y), method.init(problem))
    return {n: before[n] - p.detach() for n, p in model.named_parameters()}


# activations on pieces of a layer's output


class Gated(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.wide, self.last = how, nn.Linear(6, 16), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        z = self.wide(x)
        match self.how:
            case "chunk":
                value, gate = z.chunk(2, -1)
            case "split":
                value, gate = z.split(8, -1)
            case "slices":
                value, gate = z[..., :8], z[..., 8:]
            case "unbind":
                value, gate = z.unflatten(-1, (2, 8)).unbind(-2)
            case _:
                value, gate = z[..., ::2], z[..., 1::2]
        return self.last(torch.tanh(value) * torch.sigmoid(gate))


class WaveNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv1d(2, 4, 1)
        self.dilated = nn.ModuleList(nn.Conv1d(4, 8, 2, dilation=d) for d in (1, 2, 4))
        self.mixed = nn.ModuleList(nn.Conv1d(4, 4, 1) for _ in range(3))
        self.last = nn.Conv1d(4, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for dilated, mixed in zip(self.dilated, self.mixed, strict=True):
            value, gate = dilated(F.pad(x, (dilated.dilation[0], 0))).chunk(2, 1)
            x = x + mixed(torch.tanh(value) * torch.sigmoid(gate))
        return self.last(x).flatten(1)


class Cell(nn.Module):
    """An LSTM as tutorials write it."""

    def __init__(self) -> None:
        super().__init__()
        self.gates, self.last = nn.Linear(3 + 5, 20), nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = c = x.new_zeros(len(x), 5)
        for k in range(x.shape[1]):
            i, f, g, o = self.gates(torch.cat([x[:, k], h], 1)).chunk(4, 1)
            c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
            h = torch.sigmoid(o) * torch.tanh(c)
        return self.last(h)


class PoolAbove(nn.Module):
    """Max-pooling of what an activation gives."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(1, 4, 3), nn.Linear(36, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(F.max_pool2d(torch.relu(self.first(x)), 2).flatten(1))


class EmptyPart(nn.Module):
    """A list of parts that begins as an empty tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.cat([torch.zeros(0, dtype=x.dtype), torch.tanh(self.first(x))])
        return self.last(x)


MODELS = {
    **{how: (lambda how=how: Gated(how), (6,)) for how in ("chunk", "split", "slices", "unbind")},
    "strided": (lambda: Gated("strided"), (6,)),
    "wavenet": (WaveNet, (2, 9)),
    "cell": (Cell, (4, 3)),
    "pool above": (PoolAbove, (1, 8, 8)),
    "empty part": (EmptyPart, (6,)),
}


@pytest.mark.parametrize("name", MODELS)
def test_lift_and_a_step_of_fit_have_one_gradient_close_to_the_plain_one(name):
    make, shape = MODELS[name]
    torch.manual_seed(0)
    model, x = make().double(), torch.randn(7, *shape, dtype=torch.float64)
    y = torch.randn_like(model(x))
    check_close_to_the_gradient(model, x)
    lifted = gradients(model, lpom.lift(model), x, target=y)
    scale = y[0].numel() / 2  # the loss of fit halves the squares, and adds a row's up
    for n, found in stepped(model, x, y).items():
        torch.testing.assert_close(found, scale * lifted[n], rtol=1e-10, atol=1e-12)


# attention


@pytest.mark.parametrize("masked", ["left", "right", "a whole row"])
def test_attention_with_rows_that_see_nothing(masked):
    """As left padding makes them; torch's answer there is zero, and its gradient finite."""
    torch.manual_seed(0)

    class Attend(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(8, 24)

        def forward(self, x: Tensor, seen: Tensor) -> Tensor:
            q, k, v = (t.unflatten(-1, (2, 4)).transpose(1, 2) for t in self.first(x).chunk(3, -1))
            causal = torch.ones(6, 6, dtype=torch.bool).tril()
            mask = seen[:, None, None, :] & causal
            return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)

    seen = torch.ones(2, 6, dtype=torch.bool)
    if masked == "left":
        seen[0, :3] = False
    elif masked == "right":
        seen[0, 3:] = False
    else:
        seen[1] = False
    model, x = Attend(), torch.randn(2, 6, 8)
    check_close_to_the_gradient(model, x, seen)
    assert all(g.isfinite().all() for g in gradients(model, lpom.lift(model), x, seen).values())


# what can't be lifted is named, and what can is


class Curve(torch.autograd.Function):
    @staticmethod
    def forward(ctx, z):
        ctx.save_for_backward(z)
        return z.sin()

    @staticmethod
    def backward(ctx, g):
        return g * ctx.saved_tensors[0].cos()


def scripted():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return torch.jit.trace(lambda z: torch.tanh(z) * 2, torch.ones(2, 6))


class Using(nn.Module):
    def __init__(self, function) -> None:
        super().__init__()
        self.function = function
        self.first, self.last = nn.Linear(4, 6), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.function(self.first(x)))


NOT_LIFTED = {
    "autograd function": (Curve.apply, "Curve"),
    "traced": (scripted(), "tanh"),
    "vmap": (torch.vmap(lambda row: torch.tanh(row)), "tanh"),
}


@pytest.mark.parametrize("name", NOT_LIFTED)
def test_what_keeps_its_own_derivative_is_reported(name):
    function, word = NOT_LIFTED[name]
    torch.manual_seed(0)
    model, x = Using(function), torch.randn(5, 4)
    lifted = check_close_to_the_gradient(model, x)
    assert "own derivative" in lifted.report() and word in lifted.report()
    with pytest.raises(ValueError, match=word):
        lpom.lift(model, strict=True)(x)


def test_a_numpy_call_cuts_the_gradient_off_as_it_does_in_torch():
    def through_numpy(z: Tensor) -> Tensor:
        return torch.from_numpy(np.tanh(z.detach().numpy()))

    model, x = Using(through_numpy), torch.randn(5, 4)
    lifted = lpom.lift(model)
    assert set(gradients(model, lifted, x)) == {"last.weight", "last.bias"}
    assert "nothing lifted yet" not in lifted.report()


@pytest.mark.parametrize(
    "function",
    [
        lambda z: z / (1 + z.exp()),
        lambda z: 1 / (2 + z.square()),
        lambda z: z * torch.rsqrt(z.pow(2).mean(-1, keepdim=True) + 1e-6),
        lambda z: z / z.norm(dim=-1, keepdim=True),
        lambda z: F.normalize(z, dim=-1),
        lambda z: (z - z.mean(-1, keepdim=True)) / (z.std(-1, keepdim=True) + 1e-5),
        lambda z: z.exp() / z.exp().sum(-1, keepdim=True),
        lambda z: torch.logsumexp(z, -1, keepdim=True) - z,
        lambda z: torch.log1p(z.abs()) * torch.sign(z).detach(),
        lambda z: torch.where(z > 0, z, 0.1 * torch.expm1(z)),
    ],
)
def test_formulas_written_by_hand_are_lifted(function):
    torch.manual_seed(0)
    model, x = Using(function).double(), torch.randn(5, 4, dtype=torch.float64)
    lifted = check_close_to_the_gradient(model, x)
    assert "own derivative" not in lifted.report()


ZEROS = torch.ones(5, 6, dtype=torch.float64)
ZEROS[1], ZEROS[2, 3] = 0, 0
#: Values at which torch has a finite gradient, and a displacement must not leave the domain.
AT_THE_END = {
    "logarithm of what is not chosen": lambda z: torch.where(z > 0, torch.log(z), z),
    "normalised rows of zeros": lambda z: F.normalize(z * ZEROS, dim=-1),
    "norm of a row of zeros": lambda z: (z * ZEROS).norm(dim=-1, keepdim=True),
    "vector norm": lambda z: torch.linalg.vector_norm(z * ZEROS, dim=-1, keepdim=True),
    "distances of points that are one": lambda z: torch.cdist(z, z),
    "deviation of a constant row": lambda z: (z * ZEROS).std(-1, keepdim=True) * z,
    "cosine": lambda z: F.cosine_similarity(z * ZEROS, z.flip(0), dim=-1)[:, None] * z,
    "root of a rectifier": lambda z: torch.sqrt((z * ZEROS).relu()),
    "power": lambda z: (z * ZEROS).abs().pow(1.5),
    "cut off": lambda z: F.threshold(z * ZEROS, 0.1, 0.0),
    "a mask in numbers": lambda z: torch.exp(z - 1e9 * (ZEROS == 0)),
    "rows of large numbers": lambda z: z * torch.rsqrt((3e3 * z).square().mean(-1, keepdim=True)),
}


@pytest.mark.parametrize("name", AT_THE_END)
def test_the_end_of_a_domain_leaves_the_gradient_finite(name):
    torch.manual_seed(0)
    model, x = Using(AT_THE_END[name]), torch.randn(5, 4, dtype=torch.float64)
    width = AT_THE_END[name](torch.ones(5, 6, dtype=torch.float64)).shape[1]
    model.last = nn.Linear(width, 2)
    lifted = check_close_to_the_gradient(model.double(), x)
    assert "own derivative" not in lifted.report()


# other surroundings


class Inner(nn.Module):
    """A model whose value is made of a gradient, as in an energy network."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        energy = self.last(torch.tanh(self.first(x))).sum()
        return torch.autograd.grad(energy, x, create_graph=True)[0]


def test_a_gradient_within_forward_is_a_value_like_any_other():
    torch.manual_seed(0)
    model, x = Inner().double(), torch.randn(5, 4, dtype=torch.float64)
    torch.testing.assert_close(lpom.lift(model)(x), model(x), rtol=1e-12, atol=1e-12)
    found, expected = (gradients(model, run, x) for run in (lpom.lift(model), model))
    assert cosine(found, expected) > 0.99


class TwoInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 6), nn.Linear(6, 2)

    def forward(self, table: Tensor, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(x) + table.mean()))


def test_the_size_of_a_batch_is_no_matter_of_the_order_of_inputs():
    torch.manual_seed(0)
    model, x = TwoInputs(), torch.randn(5, 4)
    first = gradients(model, lpom.lift(model), torch.ones(50), x)
    other = gradients(model, lpom.lift(model), torch.ones(2), x)
    for n in first:
        torch.testing.assert_close(first[n], other[n])


def test_infinite_entries_of_a_mask_leave_the_gradient_finite():
    def decayed(z: Tensor) -> Tensor:
        later = torch.ones(z.shape[-1], z.shape[-1], dtype=torch.bool).triu(1)
        sums = z[..., :, None] - z[..., None, :]
        return z @ torch.exp(sums.masked_fill(later, -math.inf)).mean(0)

    torch.manual_seed(0)
    check_close_to_the_gradient(Using(decayed).double(), torch.randn(5, 4, dtype=torch.float64))


# writing in place to what an activation has read, as torch allows it

IN_PLACE = {
    "swish": lambda z, layer: z.mul_(z.sigmoid()),
    "a shortcut that is added to": lambda z, layer: z.add_(layer(F.relu(z))),
    "the argument of tanh": lambda z, layer: torch.tanh(z) * z.add_(1),
    "the argument of softmax": lambda z, layer: torch.softmax(z, -1) * z.mul_(2),
    "a leaky rectifier": lambda z, layer: torch.sigmoid(z) * layer(F.leaky_relu(z, 0.1, True)),
    "a part of it": lambda z, layer: torch.relu(z[:, :3].mul_(torch.sigmoid(z[:, :3]))),
    "an item": lambda z, layer: torch.exp(z) + layer(_with_ones(z)),
}


def _with_ones(z: Tensor) -> Tensor:
    z[:, 0] = 1
    return z


@pytest.mark.parametrize("name", IN_PLACE)
def test_writing_over_what_an_activation_has_read(name):
    class Writing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(4, 6), nn.Linear(6, 6)

        def forward(self, x: Tensor) -> Tensor:
            return IN_PLACE[name](self.first(x), self.second)

    torch.manual_seed(0)
    check_close_to_the_gradient(Writing().double(), torch.randn(5, 4, dtype=torch.float64))


@pytest.mark.parametrize("size", [1e-12, 1e-18, 1e-24, 1e-32])
def test_a_tiny_gradient_of_a_row_is_scaled_like_any_other(size):
    """Its squares are no numbers of float32 any more."""
    torch.manual_seed(0)
    for function in (lambda z: F.softmax(z, -1), lambda z: F.layer_norm(z, (6,))):
        z, g = torch.randn(5, 6, requires_grad=True), torch.randn(5, 6)
        model = Using(function)
        model.first, model.last = nn.Identity(), nn.Identity()
        (found,) = torch.autograd.grad(lpom.lift(model)(z), z, size * g)
        (plain,) = torch.autograd.grad(model(z), z, g)
        assert bool(found.isfinite().all())
        torch.testing.assert_close(found / size, plain, rtol=1e-2, atol=1e-3)
