r"""Rows moved against the network that learns them: noise in the worst direction.

With the loss :math:`\ell` of a row :math:`x`, each row is given as

.. math:: x + u \varepsilon \, g / \|g\|_2, \qquad g = \partial \ell / \partial x,

:math:`u` drawn between 0 and 1. Where the model is lifted (`lpom.lift`), :math:`g` is LPOM's pull
on the data, found by the activations alone, so that jumps have one too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torch.utils.data import Dataset as TorchDataset

from lpom.checks import check_choice, check_number
from lpom.datasets.augmentation import Batch, as_it_is
from lpom.training.compile import check_processor


def adversarial_loader(
    model: nn.Module,
    X: Any,
    y: Any,
    batch_size: int,
    *,
    size: float,
    loss: Callable[[Tensor, Tensor], Tensor] = F.cross_entropy,
    precision: str | None = None,
    seed: int = 0,
    generator: torch.Generator | None = None,
) -> DataLoader[Batch]:
    """A data loader of shuffled batches, every row moved towards a higher loss of ``model``.

    A network that learns from it is harder to fool, and often more accurate on rows that nobody
    moved. A batch costs two thirds of a training step more. It is moved when it is drawn, by the
    weights of that moment, in evaluation mode; order and lengths are drawn from
    ``loader.generator`` alone.

    Parameters
    ----------
    model : the module that is trained, or ``lpom.lift(module)``, for LPOM's own direction
    X : (n, ...)
    y : (n, ...), as ``loss`` takes it
    batch_size : rows of a batch; the last one has what is left
    size : farthest that a row is moved, in the Euclidean norm
    loss : of the model's outputs and y, averaged over the rows
    precision : {None, "bf16"}, of the products that find the direction
    seed : where a generator that is not given starts from
    generator : draws everything; on the CPU

    Examples
    --------
    >>> import lpom
    >>> model = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 3))
    >>> X, y = torch.randn(60, 2), torch.randint(3, (60,))
    >>> loader = adversarial_loader(lpom.lift(model), X, y, 20, size=0.3)
    >>> result = lpom.fit(model, loader, epochs=2, seed=0, progress=False)
    """
    X, y = torch.as_tensor(X), torch.as_tensor(y)
    if X.ndim < 2 or len(X) == 0 or len(X) != len(y) or not X.is_floating_point():
        raise ValueError(
            "adversarial_loader takes rows X of floating-point numbers, at least one, and as many "
            f"targets; got X of shape {tuple(X.shape)} and {X.dtype}, y of shape {tuple(y.shape)}."
        )
    check_number("batch_size", batch_size, whole=True)
    check_number("size", size, strict=False)
    if precision is not None:
        check_choice("precision", precision, ("bf16",))
        check_processor(model.parameters())
    if generator is None:
        generator = torch.Generator().manual_seed(seed)
    rows = _Moved(model, X, y, generator, size, loss, precision == "bf16")
    return DataLoader(rows, batch_size, shuffle=True, generator=generator, collate_fn=as_it_is)


def worst_direction(
    model: nn.Module, X: Tensor, y: Tensor, loss: Callable[[Tensor, Tensor], Tensor]
) -> Tensor:
    """Where the loss of each row grows fastest, of length 1; zero where it does not grow at all.

    The model answers as in evaluation, each row for itself, and is left as it was.
    """
    training = [module for module in model.modules() if module.training]
    device = next(iter(model.parameters()), X).device
    model.eval()
    try:
        with torch.enable_grad():
            X = X.detach().to(device).requires_grad_()
            (g,) = torch.autograd.grad(loss(model(X), y.to(device)), X)
    finally:
        for module in training:
            module.training = True
    flat = g.flatten(1)
    # the largest number first, so that squares of tiny ones do not vanish
    largest = flat.abs().amax(1, keepdim=True)
    flat = torch.where(largest > 0, flat / largest, 0.0)
    return F.normalize(flat).view_as(g)


class _Moved(TorchDataset[Batch]):
    """Rows by number, moved anew each time; a loader asks for a whole batch at once."""

    def __init__(
        self,
        model: nn.Module,
        X: Tensor,
        y: Tensor,
        generator: torch.Generator,
        size: float,
        loss: Callable[[Tensor, Tensor], Tensor],
        rounded: bool,
    ) -> None:
        self.model, self.X, self.y, self.generator = model, X, y, generator
        self.size, self.loss, self.rounded = size, loss, rounded

    def __len__(self) -> int:
        return len(self.X)

    def __getitem__(self, row: int) -> Batch:
        rows, targets = self.__getitems__([row])
        return rows[0], targets[0]

    def __getitems__(self, rows: Sequence[int]) -> Batch:
        chosen = torch.tensor(rows)
        X, y = self.X[chosen.to(self.X.device)], self.y[chosen.to(self.y.device)]
        shares = torch.rand(len(rows), *[1] * (X.ndim - 1), generator=self.generator)
        with torch.autocast(X.device.type, torch.bfloat16, enabled=self.rounded):
            direction = worst_direction(self.model, X, y, self.loss)
        return X + self.size * shares.to(X) * direction.to(X), y
