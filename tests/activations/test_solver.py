"""A solver as an activation: blackbox differentiation is LPOM with mu held."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from torch import nn

import lpom
from lpom.activations import from_solver
from lpom.exceptions import DeviceError, UntrainableError

#: All matchings of three to three, as vectors of nine.
MATCHINGS = torch.stack(
    [torch.eye(3)[list(order)].flatten() for order in itertools.permutations(range(3))]
).double()


def best(z):
    return MATCHINGS[int((MATCHINGS @ z).argmax())]


def batched(z):
    return MATCHINGS[(z @ MATCHINGS.T).argmax(1)]


def rows(n=20, seed=0):
    return torch.randn(n, 9, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def vlastelica(z, g, lam):
    """Algorithm 1 of the paper, in costs w = -z: (x(w + lam g) - x(w)) / lam, for w."""
    return -(batched(-(-z + lam * g)) - batched(z)) / lam


def test_one_at_a_time_and_all_at_once_by_tensors_or_arrays():
    z = rows()
    expected = batched(z)
    for solver in (
        from_solver(best),
        from_solver(batched, batched=True),
        from_solver(lambda z: best(torch.tensor(z)).numpy(), numpy=True),
        from_solver(lambda z: batched(torch.tensor(z)).tolist(), numpy=True, batched=True),
    ):
        assert torch.equal(solver.phi(z), expected) and solver.calls == 20
    turned = from_solver(batched, batched=True, dim=1)
    assert torch.equal(
        turned.phi(z.reshape(4, 5, 9).movedim(-1, 1)).movedim(1, -1).reshape(20, 9), expected
    )


@pytest.mark.parametrize("lam", [0.1, 1.0, 10.0])
def test_mu_held_is_blackbox_differentiation(lam):
    z, g = rows().requires_grad_(), rows(seed=1)
    layer = lpom.lift(from_solver(batched, batched=True).to_module(), mu=1 / lam, reduction="sum")
    (found,) = torch.autograd.grad((layer(z) * g).sum(), z)
    torch.testing.assert_close(found, vlastelica(z.detach(), g, lam))


@pytest.mark.parametrize("lam", [1.0, 10.0])
def test_it_is_pyepo_s_rule(lam):
    pyepo = pytest.importorskip("pyepo")
    from pyepo import EPO
    from pyepo.model.opt import optModel

    class Matching(optModel):
        modelSense = EPO.MINIMIZE

        def _getModel(self):
            return None, list(range(9))

        @property
        def num_cost(self):
            return 9

        def setObj(self, c):
            self.costs = torch.as_tensor(np.asarray(c)).double()

        def solve(self):
            x = best(-self.costs)
            return x.numpy(), float(self.costs @ x)

    costs, g = rows().requires_grad_(), rows(seed=1)
    theirs = pyepo.func.blackboxOpt(Matching(), lam)(costs)
    (expected,) = torch.autograd.grad((theirs * g).sum(), costs)
    layer = lpom.lift(from_solver(best).to_module(), mu=1 / lam, reduction="sum")
    ours = layer(-costs)
    (found,) = torch.autograd.grad((ours * g).sum(), costs)
    torch.testing.assert_close(ours.detach(), theirs.detach().double())
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("sides", [1, 2])
def test_a_row_moves_by_its_own_length_along_its_gradient(sides):
    z, g = rows().requires_grad_(), rows(seed=1)
    solver = from_solver(batched, batched=True, sides=sides)
    (found,) = torch.autograd.grad((lpom.lift(solver.to_module())(z) * g).sum(), z)
    assert solver.calls == 20 * (1 + sides)
    with torch.no_grad():
        length = (z - z.mean(-1, keepdim=True)).norm(dim=-1, keepdim=True)
        size = g.norm(dim=-1, keepdim=True)
        high = batched(z + length * g / size) if sides == 2 else batched(z)
        expected = size / (sides * length) * (high - batched(z - length * g / size))
    torch.testing.assert_close(found, expected)
    for scale in (1e-6, 1e6):  # it needs no scale of the loss
        (other,) = torch.autograd.grad((lpom.lift(solver.to_module())(z) * g * scale).sum(), z)
        torch.testing.assert_close(other / scale, found)


def test_the_gap_is_what_falls_short_of_the_best():
    solver, z = from_solver(best), rows()
    for x in MATCHINGS:
        gap = solver.gap(x.expand(20, 9), z)
        assert gap.shape == (20, 1) and gap.min() >= 0
        value = (z @ MATCHINGS.T).amax(1, keepdim=True) - z @ x[:, None]
        torch.testing.assert_close(gap, value)
    assert solver.gap(solver.phi(z), z).abs().max() < 1e-12
    torch.testing.assert_close(solver.primitive(z), (z @ MATCHINGS.T).amax(1, keepdim=True))


def test_it_stands_between_two_trained_layers():
    torch.manual_seed(0)
    x = torch.randn(300, 5)
    truth, value = torch.randn(5, 9), torch.randn(9)
    y = batched((x @ truth).double()).float() @ value[:, None]
    solver = from_solver(lambda z: batched(z.double()).float(), batched=True)
    model = nn.Sequential(nn.Linear(5, 9), solver.to_module(), nn.Linear(9, 1))
    lifted = lpom.lift(model, strict=True)
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    losses = []
    for _ in range(300):
        optimizer.zero_grad()
        loss = (lifted(x) - y).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.35 * float(y.var())
    assert "solver" in lifted.report()


def test_what_a_solver_may_do_wrong():
    z = rows()
    with pytest.raises(DeviceError, match="shape"):
        from_solver(lambda z: z[:4]).phi(z)
    with pytest.raises(DeviceError, match="not finite"):
        from_solver(lambda z: z / 0).phi(z)
    with pytest.raises(UntrainableError, match="lift"):
        from_solver(best).phi(z.requires_grad_())
    with pytest.raises(TypeError, match="saved"):
        from_solver(best).params()
