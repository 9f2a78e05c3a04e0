r"""One interleaved sweep down a stack of Linear layers: the whole method on one screen.

.. math:: R_i = \text{rule}(\phi_i, Z_i, G_i), \qquad G_{i-1} = R_i W_i, \qquad
    \nabla W_i = R_i^T X_i / m + c W_i

with :math:`G` the gradient of the loss, sample by sample, at the output, c the weight decay, and
the rule that of `lpom.rule` (eqs. 25 and 28, from the output down). The same numbers as autograd
on the lifted model, and as `lpom.states` with one sweep, without what surrounds each call there:
half the time of a small network's step. A large matrix moves a few rows at a time as soon as its
residuals are there, so its gradient is never there as a whole: a third of the memory.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import cast, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lpom import activations
from lpom.activations import Activation, Identity, ReLU, Softmax
from lpom.losses import Loss
from lpom.rows import softmax_answer
from lpom.rule import SAMPLE, Displacement, Rule, Weight, spread
from lpom.weights.adam import Adam

#: Columns of a product below which it takes less time to have them turned round.
FEW = 16


@final
class Stack:
    """Linear layers one on the other, each followed by an activation; the module has the weights.

    Parameters
    ----------
    layers : the Linear layer and the activation of each, from the data up
    flattens : whether each sample is made one row first
    """

    def __init__(self, layers: Sequence[tuple[nn.Linear, Activation]], flattens: bool = False):
        self.layers, self.flattens = list(layers), flattens

    @classmethod
    def of(cls, model: nn.Module) -> Stack | None:
        """A Sequential of nothing but Linear layers and activations; None for others."""
        layers: list[tuple[nn.Linear, Activation]] = []
        flattens, ended = False, False
        for module in _in_a_row(model):
            if module._forward_hooks or module._forward_pre_hooks:
                return None
            if type(module) is nn.Flatten and not layers and module.start_dim == 1:
                flattens = True
            elif type(module) is nn.Linear:
                layers.append((module, Identity()))
            elif layers and not ended and activations.is_activation(module):
                activation = activations.from_module(module)
                if layers[-1][1] != Identity() or not _has_answer(activation):
                    return None
                layers[-1] = (layers[-1][0], activation)
            elif type(module) is not nn.Identity:
                return None
        weights = [p for layer, _ in layers for p in layer.parameters()]
        plain = all(type(p) is nn.Parameter and not p._backward_hooks for p in weights)
        alone = len({id(p) for p in weights}) == len(weights)
        return cls(layers, flattens) if layers and plain and alone else None

    def takes(self, inputs: Tensor) -> bool:
        """Whether inputs are rows that the first layer takes, and no weight is frozen by now."""
        rows = isinstance(inputs, Tensor) and (inputs.ndim == 2 or self.flattens)
        return rows and all(p.requires_grad for layer, _ in self.layers for p in layer.parameters())

    @torch.no_grad()
    def sweep(
        self,
        inputs: Tensor,
        target: Tensor,
        loss: Loss,
        rules: Sequence[Rule],
        optimizer: torch.optim.Optimizer | None = None,
        decay: float = 0.0,
    ) -> Tensor:
        """Feed forward; then, from the output down, residuals and the gradients of the weights.

        There is one rule per layer. An ``optimizer`` that can moves large matrices at once.
        Returns the outputs.
        """
        X, Z = [inputs.flatten(1) if self.flattens else inputs], []
        for layer, activation in self.layers:
            Z.append(_product(X[-1], layer.weight, layer.bias))
            X.append(activation.phi(Z[-1]))
        outputs, share = X[-1], 1 / len(inputs)
        G = loss.gradient(outputs, target)
        ones = inputs.new_ones(len(inputs))
        for i in reversed(range(len(self.layers))):
            layer, activation = self.layers[i]
            R = answer(activation, Z[i], X[i + 1], G, rules[i])
            if i:
                G = R @ layer.weight
            if isinstance(optimizer, Adam) and layer.weight.numel() > optimizer.above:
                layer.weight.grad = None
                optimizer.descend(cast(nn.Parameter, layer.weight), R, X[i], share, decay)
            else:
                W = layer.weight
                torch.addmm(W, R.t(), X[i], beta=decay, alpha=share, out=_gradient(W))
            if layer.bias is not None:  # a product takes less time than a sum and its multiple
                b = _gradient(layer.bias)
                torch.addmv(b, R.t(), ones, beta=0, alpha=share, out=b)
        return outputs


def answer(activation: Activation, z: Tensor, x: Tensor, g: Tensor, rule: Rule) -> Tensor:
    """What an activation with ``x = phi(z)`` answers to the gradient g."""
    if isinstance(activation, Identity):
        return g
    if isinstance(activation, Softmax):
        return softmax_answer(x, g, rule)
    if activation.measured:
        return rule.device(activation, z, x, g)
    if isinstance(rule, Weight):  # which knows forms without the difference of two near numbers
        return rule.mu * activation.response(z, g / rule.mu)
    if not isinstance(rule, Displacement) or rule.sides == 1:
        return rule.elementwise(z, g).answer(activation.phi, z, x)
    d = rule.size * _spread(z)
    if isinstance(activation, ReLU):
        return z.mul_(0.5 / d).add_(0.5).clamp_(0, 1).mul_(g)
    difference = activation.phi(z + d).sub_(activation.phi(z - d))
    return difference.mul_(g).mul_(0.5 / d)


def _spread(z: Tensor) -> float | Tensor:
    """`lpom.rule.spread`; on a processor by numbers, which take less time than small tensors."""
    n = z.numel()
    if not z.is_cpu or n < 2:
        return spread(z)
    sample = z.reshape(-1)[:: (n // SAMPLE) | 1] if n > SAMPLE else z.reshape(-1)
    n, mean = len(sample), sample.mean().item()
    variance = (torch.dot(sample, sample).item() - n * mean * mean) / (n - 1)
    if not variance > 1e-3 * mean * mean:  # else the difference keeps enough of its digits
        return spread(z)
    deviation, info = math.sqrt(variance), torch.finfo(z.dtype)
    rounding = 1e4 * info.eps * math.hypot(deviation, mean) + info.tiny**0.25
    return min(max(min(deviation, 1.0), rounding), 10.0) if math.isfinite(deviation) else 1.0


def _has_answer(activation: Activation) -> bool:
    rows = isinstance(activation, Softmax) and activation.dim == -1
    return not activation.jumps and (activation.elementwise or rows)


def _in_a_row(model: nn.Module) -> Iterable[nn.Module]:
    """The modules that a Sequential calls, one after the other."""
    hooked = model._forward_hooks or model._forward_pre_hooks
    if type(model) is nn.Sequential and not hooked:
        for module in model:
            yield from _in_a_row(module)
    else:
        yield model


def _product(X: Tensor, W: Tensor, b: Tensor | None) -> Tensor:
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
