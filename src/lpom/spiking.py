"""LPOM's rule where libraries for spiking networks take a surrogate gradient."""

from __future__ import annotations

from typing import final

from torch import Tensor, nn

from lpom.activations import Activation, Step
from lpom.checks import check_number
from lpom.rule import Device, Displacement


@final
class Spike(nn.Module):
    r"""1 where the membrane is at its threshold or above, 0 below; trained by LPOM's rule.

    The gradient is :math:`g\,(\phi(z + d) - \phi(z - d)) / (2 d)` on the step itself, two-sided:
    neurons within d of their threshold learn. d is the smaller of half a ``window`` and the root
    mean square of the distances z from the threshold in this call, so it follows the size of the
    potentials, and a layer that stays below its threshold learns to reach it.

    Parameters
    ----------
    window : float
        The largest window, in units of the potential.
    activation : Activation, optional
        Another function that jumps, such as ``lpom.activations.get("sign")``.

    Examples
    --------
    ``snntorch.Leaky(beta=0.9, spike_grad=lpom.spike())`` and
    ``spikingjelly.activation_based.neuron.LIFNode(surrogate_function=lpom.spike())``.

    >>> import torch
    >>> spike(window=1.0)(torch.tensor([-0.2, 0.0, 0.3]))
    tensor([0., 1., 1.])
    """

    def __init__(self, window: float = 2.0, *, activation: Activation | None = None) -> None:
        super().__init__()
        check_number("window", window)
        self.window, self.activation = window, Step() if activation is None else activation

    def forward(self, z: Tensor) -> Tensor:
        x: Tensor = Device.apply(z, self, Displacement())  # type: ignore[no-untyped-call]
        return x

    # What the rule asks, as of an activation that chooses its own displacement

    elementwise = True
    sides = 2

    def phi(self, z: Tensor) -> Tensor:
        return self.activation.phi(z)

    def displacement(self, z: Tensor, x: Tensor) -> Tensor:
        return z.square().mean().sqrt().clamp(1e-6, self.window / 2)

    def extra_repr(self) -> str:
        return f"window={self.window:g}, activation={self.activation!r}"


spike = Spike
