"""One sweep down a stack of Linear layers, with little between the products.

It is the step that `lpom.states` makes of any graph. A small network would spend half its time on
the questions that are asked there at every node and whose answers here are known from the start.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lpom.activations import Activation, Identity
from lpom.graph import Graph
from lpom.losses import Loss
from lpom._old_states import CACHED, Learner
from lpom.weights.gradients import ones

#: Columns of a product below which it takes less time to have them turned round.
FEW = 16


@final
class Stack:
    """Linear layers one on the other, each followed by an activation; the module has the weights.

    Parameters
    ----------
    layers : weight, bias and activation of each, from the data up
    """

    def __init__(
        self, layers: Sequence[tuple[nn.Parameter, nn.Parameter | None, Activation]]
    ) -> None:
        self.layers = list(layers)
        self._widest = max(len(W) for W, _, _ in layers)

    @classmethod
    def of(cls, graph: Graph) -> Stack | None:
        """The network as a stack, if it is one whose weights all move and stand there but once."""
        linears = [node.edge.linear for node in graph]
        inner = [node.layer for node in graph]
        straight = all(node.sources == (node.index - 1,) for node in graph)
        if None in linears or any(inner) or not straight or graph.output != len(graph):
            return None
        layers = [
            (cast(nn.Parameter, linear.weight), linear.bias, node.activation)
            for linear, node in zip(linears, graph, strict=True)
            if linear is not None
        ]
        weights = [p for W, b, _ in layers for p in (W, b) if p is not None]
        plain = all(type(p) is nn.Parameter and p.requires_grad for p in weights)
        alone = len({id(p) for p in weights}) == len(weights) and not graph.jumps
        return cls(layers) if plain and alone else None

    def takes(self, inputs: Tensor) -> bool:
        if inputs.ndim != 2 or inputs.shape[0] * self._widest > CACHED:
            return False
        # a callback may freeze some of them on the way
        return all(W.requires_grad and (b is None or b.requires_grad) for W, b, _ in self.layers)

    def sweep(
        self,
        inputs: Tensor,
        target: Tensor,
        loss: Loss,
        mu: Sequence[float],
        decay: float = 0.0,
        learner: Learner | None = None,
    ) -> Tensor:
        r"""Feed forward, and then from above each state and the gradients of the weights below it.

        .. math:: R_i = \phi_i(Z_i) - \phi_i(Z_i - G_i), \qquad
            G_{i-1} = \frac{\mu_i}{\mu_{i-1}} R_i W_i, \qquad
            \nabla W_i = \frac{\mu_i}{m} R_i^T X_i + c W_i

        with :math:`G_L = \nabla \mathrm{loss} / \mu_L` (eqs. 25, 28; `mu` is by the index of the
        state above a layer, so the first is not read) and c the weight decay. A ``learner`` moves
        the matrices in place of gradients, with a decay of its own. Returns the outputs.
        """
        X, Z = [inputs], []
        for W, b, activation in self.layers:
            Z.append(_values(X[-1], W, b))
            X.append(activation.phi(Z[-1]))
        outputs = X.pop()
        m = inputs.shape[0]
        one = ones(m, inputs.dtype, inputs.device)  # for each row
        pull, said = loss.gradient(outputs, target) / mu[-1], outputs
        for i in reversed(range(len(self.layers))):
            W, b, activation = self.layers[i]
            R = pull
            if not isinstance(activation, Identity):
                R = activation.response(Z[i], pull, out=Z[i], said=said)
            said, turned, share = X[i], R.t(), mu[i + 1] / m
            if i:
                pull = R @ W
                if mu[i + 1] != mu[i]:
                    pull *= mu[i + 1] / mu[i]
            if learner is None:
                torch.addmm(W, turned, said, beta=decay, alpha=share, out=_gradient(W))
            else:
                learner.descend(W, R, said, share)
            if b is not None:
                g = _gradient(b)
                # a product takes less time than a sum and its multiple
                torch.addmv(g, turned, one, beta=0, alpha=share, out=g)
        return outputs


def _values(X: Tensor, W: Tensor, b: Tensor | None) -> Tensor:
    """``X @ W.T + b``; of few columns one after the other in memory.

    A product is vectorised along what comes last there, and so is the softmax above it.
    """
    if W.shape[0] >= FEW:
        return F.linear(X, W, b)
    columns = torch.mm(W, X.t()) if b is None else torch.addmm(b[:, None], W, X.t())
    return columns.t()


def _gradient(weight: Tensor) -> Tensor:
    """Where its gradient goes: memory that is there already, since new pages cost time."""
    if weight.grad is None:
        weight.grad = torch.empty_like(weight)
    return weight.grad
