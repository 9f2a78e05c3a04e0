r"""What one side of a norm adds to the derivative, to every order, in closed form.

For rows z of D entries let :math:`R^2 = |z|^2 + D \epsilon`, :math:`n = \sqrt D z / R`,
:math:`u = g / |g|` and :math:`c = \langle z, u \rangle / R`. The generating function of the
Legendre polynomials :math:`P_k` turns the rule over a displacement :math:`\delta R` into

.. math:: \frac{\sqrt D\,|g|}{R} \sum_{k \ge 0} \delta^k
          \Bigl(P_k(c)\, u - P_{k + 1}(c)\, \frac{z}{R}\Bigr),

of which two sides have the even k alone. k = 0 is the derivative. k = 1 is, for a gradient across
the row (c = 0), a positive half of the row's own direction: a step against it makes rows smaller.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import lpom

ROWS, D = 7, 12
NORMS = {
    "rms": lambda: nn.RMSNorm(D, 1e-3),
    "rms, no eps": lambda: nn.RMSNorm(D, 0.0),
    "layer": lambda: nn.LayerNorm(D, 1e-3),
}


def problem(name: str) -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    norm = NORMS[name]().double()
    for p in norm.parameters():
        nn.init.normal_(p)
    z = torch.randn(ROWS, D, dtype=torch.float64) * torch.logspace(-1, 1, ROWS).double()[:, None]
    return norm, z + 0.3, torch.randn(ROWS, D, dtype=torch.float64)


def answer(norm: nn.Module, z: Tensor, g: Tensor, delta: float, sides: int) -> Tensor:
    """Of the library."""
    z = z.clone().requires_grad_()
    lpom.lift(norm, displacement=delta, sides=sides)(z).backward(g)
    assert z.grad is not None
    return z.grad


def derivative(norm: nn.Module, z: Tensor, g: Tensor) -> Tensor:
    z = z.clone().requires_grad_()
    return torch.autograd.grad(norm(z), z, g)[0]


def parts(norm: nn.Module, z: Tensor, g: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """z / R, u, c and sqrt(D) |g| / R, on the centred space for a layer norm."""
    g = g * norm.weight
    if isinstance(norm, nn.LayerNorm):
        z, g = z - z.mean(-1, keepdim=True), g - g.mean(-1, keepdim=True)
    R = (z.square().sum(-1, keepdim=True) + D * norm.eps).sqrt()
    length = g.norm(dim=-1, keepdim=True)
    u = g / length
    return z / R, u, (z * u).sum(-1, keepdim=True) / R, D**0.5 * length / R


def order(norm: nn.Module, z: Tensor, g: Tensor, k: int) -> Tensor:
    """What stands at delta to the k."""
    direction, u, c, scale = parts(norm, z, g)
    P = torch.special.legendre_polynomial_p
    return scale * (P(c, torch.tensor(k)) * u - P(c, torch.tensor(k + 1)) * direction)


@pytest.mark.parametrize("name", NORMS)
def test_order_zero_is_the_derivative(name: str) -> None:
    norm, z, g = problem(name)
    torch.testing.assert_close(order(norm, z, g, 0), derivative(norm, z, g))


@pytest.mark.parametrize("name", NORMS)
def test_first_order_is_a_bend_towards_the_gradient_and_a_pull_along_the_row(name: str) -> None:
    norm, z, g = problem(name)
    direction, _, c, scale = parts(norm, z, g)
    pull = scale / 2 * (1 - c**2) * direction
    torch.testing.assert_close(order(norm, z, g, 1), c * order(norm, z, g, 0) + pull)


@pytest.mark.parametrize("known", [1, 2, 3])
@pytest.mark.parametrize("name", NORMS)
def test_what_is_left_of_one_side_falls_with_the_next_order(name: str, known: int) -> None:
    """With the first-order term known the error falls as delta squared, and so on."""
    norm, z, g = problem(name)

    def left(delta: float) -> Tensor:
        series = sum(delta**k * order(norm, z, g, k) for k in range(known + 1))
        return (answer(norm, z, g, delta, 1) - series).norm(dim=-1)

    ratios = left(0.01) / left(0.005)
    torch.testing.assert_close(
        ratios, torch.full_like(ratios, 2.0 ** (known + 1)), rtol=0.1, atol=0
    )


@pytest.mark.parametrize("name", NORMS)
def test_two_sides_have_the_even_orders_alone(name: str) -> None:
    norm, z, g = problem(name)
    exact = derivative(norm, z, g)

    def left(delta: float) -> Tensor:
        return answer(norm, z, g, delta, 2) - exact

    torch.testing.assert_close(
        left(0.01), 0.01**2 * order(norm, z, g, 2), rtol=1e-3, atol=1e-4 * float(left(0.01).norm())
    )


@pytest.mark.parametrize("name", NORMS)
def test_across_a_row_one_side_pulls_it_towards_a_smaller_size(name: str) -> None:
    """For c = 0 the answer along the row is delta / 2 sqrt(D) |g| |z| / R^2, which is positive."""
    norm, z, g = problem(name)
    nn.init.ones_(norm.weight)
    direction, _, c, scale = parts(norm, z, g)
    g = g - (g * direction).sum(-1, keepdim=True) / direction.square().sum(-1, keepdim=True) * (
        direction
    )
    direction, _, c, scale = parts(norm, z, g)
    torch.testing.assert_close(c, torch.zeros_like(c), rtol=0, atol=1e-12)
    unit = direction / direction.norm(dim=-1, keepdim=True)
    along = (answer(norm, z, g, 1e-3, 1) * unit).sum(-1, keepdim=True)
    expected = 1e-3 / 2 * scale * direction.norm(dim=-1, keepdim=True)
    torch.testing.assert_close(along, expected, rtol=1e-5, atol=0)
    assert (along > 0).all()
    plain = (answer(norm, z, g, 1e-3, 2) * unit).sum(-1)
    torch.testing.assert_close(plain, torch.zeros_like(plain), rtol=0, atol=1e-9)


def test_a_norm_written_by_hand_is_met_as_a_root() -> None:
    """Its one side is that of an elementwise root, so it isn't the formula above."""

    class ByHand(nn.Module):
        def __init__(self, norm: nn.RMSNorm) -> None:
            super().__init__()
            self.weight, self.eps = norm.weight, norm.eps

        def forward(self, z: Tensor) -> Tensor:
            return z * torch.rsqrt(z.square().mean(-1, keepdim=True) + self.eps) * self.weight

    norm, z, g = problem("rms")
    hand = ByHand(norm)
    torch.testing.assert_close(derivative(hand, z, g), derivative(norm, z, g))
    beyond = answer(hand, z, g, 0.01, 1) - derivative(hand, z, g)
    assert (beyond - 0.01 * order(norm, z, g, 1)).norm() > 0.5 * beyond.norm()
