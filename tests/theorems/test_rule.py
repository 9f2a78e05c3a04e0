r"""The rule of the default step, transcribed and put into random modules.

It is autograd with another answer at every function that bends. With a displacement d held,

.. math:: g \mapsto g\,(\phi(z + d) - \phi(z - d)) / (2 d), \qquad
          g \mapsto |g| / d\,(\phi(z) - \phi(z - d \operatorname{sign} g)),

from two sides and from one, with :math:`d = \delta \min(\mathrm{spread}(z), 1)`; a row of a norm
or a softmax moves along its gradient by :math:`\delta` times its size, and has one weight. With mu
held, :math:`g \mapsto \mu (\phi(z) - \phi(z - g / \mu))`. Here these lines stand as they are,
without the closed forms of the library, and `programs` has the modules.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import lpom
from lpom import LPOM, Adaptive
from lpom.methods import Batch, Problem

from .programs import SPELLINGS, Functions, Program, data

SIZE, MU = 0.02, 3.0
SEEDS = range(40)


class Answer(torch.autograd.Function):
    """``phi(z)``, which answers a gradient by whatever it is given."""

    @staticmethod
    def forward(ctx: Any, z: Tensor, phi: Any, answer: Any) -> Tensor:
        ctx.save_for_backward(z)
        ctx.phi, ctx.answer = phi, answer
        return phi(z)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        (z,) = ctx.saved_tensors
        return ctx.answer(ctx.phi, z, g), None, None


Phi = Callable[[Tensor], Tensor]


@dataclass
class Transcribed(Functions):
    """Two sides, one side, or a weight mu for the mean loss of the rows."""

    sides: int = 2
    size: float = SIZE
    mu: float | None = None

    def moved(self, phi: Phi, z: Tensor, g: Tensor, pull: Tensor, weight: Tensor) -> Tensor:
        if self.sides == 2:
            return weight / 2 * (phi(z + pull) - phi(z - pull))
        return weight * (phi(z) - phi(z - pull))

    def held(self, phi: Phi, z: Tensor, g: Tensor, room: Tensor | None = None) -> Tensor:
        """A weight mu, by the number of rows as the gradient is; more near an end of phi."""
        mu = torch.full_like(z, self.mu / len(z))
        if room is not None:
            mu = torch.maximum(mu, g.abs() / (room / 2))
        return mu * (phi(z) - phi(z - g / mu))

    def element(self, phi: Phi, z: Tensor, g: Tensor, room: Tensor | None = None) -> Tensor:
        if self.mu is not None:
            return self.held(phi, z, g, room)
        d = (
            self.size * min(float(z.std()), 1.0) * torch.ones_like(z)
            if room is None
            else self.size * room
        )
        if self.sides == 2:  # the same for either sign of g
            return self.moved(phi, z, g, d, g / d)
        return self.moved(phi, z, g, d * g.sign(), g.abs() / d)

    def row(self, phi: Phi, z: Tensor, g: Tensor, size: Tensor | float) -> Tensor:
        if self.mu is not None:
            return self.held(phi, z, g)
        length = g.norm(dim=-1, keepdim=True).clamp_min(1e-200)  # a row may have none
        e = self.size * size
        return self.moved(phi, z, g, e * g / length, length / e)

    # as `programs` asks for them

    def elementwise(self, name: str, spelling: int, z: Tensor) -> Tensor:
        if name == "sqrt":
            x = Answer.apply(z, torch.sigmoid, self.element)
            return Answer.apply(
                x, torch.sqrt, lambda phi, z, g: self.element(phi, z, g, room=z.abs())
            )
        if name == "exp":
            return Answer.apply(0.3 * z, torch.exp, self.element)
        return Answer.apply(z, SPELLINGS[name][0], self.element)

    def part_in_place(self, name: str, z: Tensor, width: int) -> Tensor:
        phi = torch.tanh if name == "tanh" else torch.relu
        return torch.cat([Answer.apply(z[:, :width], phi, self.element), z[:, width:]], 1)

    def softmax(self, z: Tensor) -> Tensor:
        def answer(phi: Phi, z: Tensor, g: Tensor) -> Tensor:
            return self.row(phi, z, g, 1.0)

        return Answer.apply(z, lambda z: torch.softmax(z, -1), answer)

    def layer_norm(self, z: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        def answer(phi: Phi, z: Tensor, g: Tensor) -> Tensor:
            centred = z - z.mean(-1, keepdim=True)
            g = g - g.mean(-1, keepdim=True)
            size = (centred.square().sum(-1, keepdim=True) + z.shape[-1] * 1e-5).sqrt()
            return self.row(phi, z, g, size)

        return Answer.apply(z, lambda z: F.layer_norm(z, z.shape[-1:]), answer) * weight + bias

    def rms_norm(self, z: Tensor, weight: Tensor) -> Tensor:
        def answer(phi: Phi, z: Tensor, g: Tensor) -> Tensor:
            size = (z.square().sum(-1, keepdim=True) + z.shape[-1] * 1e-6).sqrt()
            return self.row(phi, z, g, size)

        return Answer.apply(z, lambda z: F.rms_norm(z, z.shape[-1:], None, 1e-6), answer) * weight


def gradients(program: Program, outputs: Tensor, target: Tensor) -> dict[str, Tensor]:
    """Of the mean loss of the rows; zero where nothing comes down."""
    loss = (outputs - target).square().sum(1).mean()
    names, weights = zip(*program.named_parameters(), strict=True)
    found = torch.autograd.grad(loss, weights, allow_unused=True)
    return {
        name: torch.zeros_like(weight) if gradient is None else gradient
        for name, weight, gradient in zip(names, weights, found, strict=True)
    }


def flat(gradients: dict[str, Tensor]) -> Tensor:
    return torch.cat([gradient.flatten() for gradient in gradients.values()])


RULES = {
    "two sides": (Transcribed(), {"displacement": SIZE}),
    "one side": (Transcribed(sides=1), {"displacement": SIZE, "sides": 1}),
    "mu": (Transcribed(sides=1, mu=MU), {"mu": MU}),
}


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("seed", SEEDS)
def test_lifting_a_random_module_is_autograd_with_the_rule(seed, rule):
    """Values and gradients, through views, pieces, writes in place, masks and shared weights."""
    program, (x, target) = Program(seed), data(seed)
    functions, settings = RULES[rule]
    expected = program.run(x, functions)
    outputs = lpom.lift(program, **settings)(x)
    torch.testing.assert_close(outputs, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(outputs, program(x), rtol=1e-12, atol=1e-12)
    found = gradients(program, outputs, target)
    close = 1e-9 * float(1 + flat(found).norm())
    torch.testing.assert_close(found, gradients(program, expected, target), rtol=1e-9, atol=close)


@pytest.mark.parametrize("seed", SEEDS)
def test_the_error_of_two_sides_is_of_second_order(seed):
    r"""And that of one side of first: half the displacement leaves a quarter, or a half."""
    program, (x, target) = Program(seed, smooth=True), data(seed)
    exact = flat(gradients(program, program(x), target))
    for sides, order in ((2, 2), (1, 1)):
        errors = []
        for size in (4e-3, 2e-3, 1e-3):
            outputs = lpom.lift(program, displacement=size, sides=sides)(x)
            errors.append(float((flat(gradients(program, outputs, target)) - exact).norm()))
        least = 1e-9 * float(exact.norm())
        assert errors[2] <= 0.6**order * 1.2 * errors[1] + least
        assert errors[1] <= 0.6**order * 1.2 * errors[0] + least
        assert errors[2] < 0.02 * float(exact.norm())


@pytest.mark.parametrize("seed", SEEDS)
def test_at_its_defaults_it_is_close_to_the_gradient(seed):
    """With kinks too, and on so few rows; the zoo has this for what people use."""
    program, (x, target) = Program(seed), data(seed)
    exact = flat(gradients(program, program(x), target))
    found = flat(gradients(program, lpom.lift(program)(x), target))
    assert float(F.cosine_similarity(found, exact, dim=0)) > 0.95


@pytest.mark.parametrize("settings", [{}, {"sides": 1}, {"mu": MU}], ids=["held", "one side", "mu"])
@pytest.mark.parametrize("seed", SEEDS)
def test_a_step_of_fit_is_that_of_a_lifted_module(seed, settings):
    """With mu it moves states on a graph: another engine, where torch.fx can follow the module."""
    program, (x, target) = Program(seed), data(seed)
    loss = lpom.losses.get("squared")
    outputs = lpom.lift(program, **settings)(x)
    outputs.backward(loss.gradient(outputs.detach(), target) / len(x))
    expected = {n: p.grad for n, p in program.named_parameters() if p.grad is not None}
    program.zero_grad()
    method = LPOM(weights=Adaptive(optimizer="sgd", learning_rate=1e-3), **settings)
    problem = Problem(program, loss, example=x)
    try:
        method.step(problem, Batch(x, target), method.init(problem))
    except lpom.UntrainableError as error:
        assert "mu" in settings
        pytest.skip(str(error))
    found = {n: p.grad for n, p in program.named_parameters() if p.grad is not None}
    size = float(flat(expected).norm())
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12 * (1 + size))


@pytest.mark.parametrize("seed", SEEDS[:10])
def test_it_needs_neither_the_mean_nor_the_scale_of_the_loss(seed):
    """A loss times a thousand has gradients times a thousand."""
    program, (x, target) = Program(seed), data(seed)
    lifted = lpom.lift(program, sides=1)
    found = flat(gradients(program, lifted(x), target))
    loss = 1000 * (lifted(x) - target).square().sum(1).mean()
    program.zero_grad()
    loss.backward()
    scaled = {n: p.grad for n, p in program.named_parameters() if p.grad is not None}
    named = gradients(program, lifted(x), target)
    for name, gradient in scaled.items():
        close = 1e-7 * float(1000 * found.norm())
        torch.testing.assert_close(gradient, 1000 * named[name], rtol=1e-9, atol=close)


@pytest.mark.parametrize("seed", SEEDS[:15])
def test_nothing_keeps_its_own_derivative(seed):
    lifted = lpom.lift(Program(seed), strict=True)
    lifted(data(seed)[0])
    assert "own derivative" not in lifted.report()
