r"""The state blocks of one batch: all activations, and the sweeps that move them.

The block of a hidden state has the optimality condition (eq. 17 of the paper)

.. math:: 0 \in \phi_{i-1}^{-1}(X_i) - Z_{i-1} + r (\phi_i(Z_i) - X_{i+1}) W_i,
          \qquad r = \mu_i / \mu_{i-1} .

The plain iteration (eq. 25) solves it for :math:`X_i` as if the rest stood still. The safe step
keeps the pre-activation :math:`P`, :math:`X = \phi(P)`, as variable and moves only the share
:math:`\alpha` of the way there: mirror descent with mirror map :math:`\Phi^*`, which never raises
the block's objective when :math:`\alpha \le 2 / (1 + r \gamma_{i-1} \gamma_i \|W_i\|_2^2)`. Half
of that is taken, so a norm that power iteration has seen from below does no harm.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from lpom.losses import Loss
from lpom.network import Lifted

ORDERS = ("interleaved", "top-down", "paper", "parallel")

#: Called with a layer's index and residual while the states below it are still the old ones.
Visit = Callable[[int, Tensor], None]


class BatchStates:
    """States ``X``, their pre-activations ``P`` and the maps' outputs ``Z`` for one batch.

    ``X[i + 1] = phi_i(P[i])`` always; ``Z[i] = map_i(X[i])`` is refreshed by the sweep that
    moved ``X[i]``. They start feed-forward, where ``P = Z``. ``alpha[i]`` is the share of the way
    that ``X[i + 1]`` goes; without it the iteration is the paper's plain one.
    """

    def __init__(
        self,
        network: Lifted,
        loss: Loss,
        target: Tensor,
        inputs: Tensor,
        mu: Sequence[float],
        alpha: Sequence[float | Tensor] | None = None,
    ) -> None:
        self.network, self.loss, self.target = network, loss, target
        self.mu, self.alpha = mu, alpha
        self.Z, self.X = network.feed_forward(inputs)
        self.P = list(self.Z)

    def residual(self, i: int) -> Tensor:
        """``phi_i(Z[i]) - X[i + 1]``: what layer i does not yet say of the state above it."""
        return self.network[i].activation.phi(self.Z[i]) - self.X[i + 1]

    def output_pull(self) -> Tensor:
        return self.loss.gradient(self.X[-1], self.target) / self.mu[-1]

    def hidden_pull(self, i: int, residual: Tensor) -> Tensor:
        """The pull of layer i's residual on the state ``X[i]`` below it."""
        return self.mu[i] / self.mu[i - 1] * self.network[i].map.adjoint(residual)

    def move(self, i: int, pull: Tensor) -> Tensor:
        """Move ``X[i + 1]`` towards ``phi_i(Z[i] - pull)`` (eqs. 25 and 28), damped in P.

        Returns the layer's residual after the move. Where the state was feed-forward it is
        ``X_old - X_new``, with no further evaluation of the activation.
        """
        phi = self.network[i].activation.phi
        if self.P[i] is self.Z[i]:
            said, step = self.X[i + 1], pull
        else:
            said, step = phi(self.Z[i]), self.P[i] - self.Z[i] + pull
        self.P[i] = self.P[i] - (step if self.alpha is None else self.alpha[i] * step)
        self.X[i + 1] = phi(self.P[i])
        return said - self.X[i + 1]

    def refresh(self, i: int) -> None:
        """Bring ``Z[i]`` up to date with ``X[i]`` and the weights."""
        self.Z[i] = self.network[i].map.apply(self.X[i])

    def refresh_all(self, *, weights_moved: bool = False) -> None:
        for i in range(0 if weights_moved else 1, len(self.network)):
            self.refresh(i)


def sweep(states: BatchStates, order: str, visit: Visit | None = None) -> None:
    """Move every state once, in the given order, and bring ``Z`` up to date.

    Interleaved leaves ``Z`` as it was: weights move too, and often nothing follows. Its
    ``visit`` sees each layer's residual in the moment that the layer's weights and the state
    below it share it: after the state above has moved, before that below does.
    """
    last = len(states.network) - 1
    if order == "paper":
        for i in range(1, last + 1):
            states.move(i - 1, states.hidden_pull(i, states.residual(i)))
            states.refresh(i)
        states.move(last, states.output_pull())
    elif order == "parallel":
        pulls = [states.hidden_pull(i, states.residual(i)) for i in range(1, last + 1)]
        for i, pull in enumerate([*pulls, states.output_pull()]):
            states.move(i, pull)
        states.refresh_all()
    else:
        pull = states.output_pull()
        for i in range(last, -1, -1):
            R = states.move(i, pull)
            if i > 0:
                pull = states.hidden_pull(i, R)
            if visit is not None:
                visit(i, R)
        if visit is None:
            states.refresh_all()


def relative_change(old: Sequence[Tensor], new: Sequence[Tensor]) -> Tensor:
    """The largest relative change of any layer's pre-activations.

    Not of its states: where phi is flat these stand still while the former are on their way.
    """
    tiny = torch.finfo(new[0].dtype).tiny
    changes = [
        torch.linalg.vector_norm(b - a) / torch.linalg.vector_norm(a).clamp_min(tiny)
        for a, b in zip(old, new, strict=True)
    ]
    return torch.stack(changes).max()
