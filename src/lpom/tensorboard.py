"""Logging for TensorBoard: the scalars of every epoch, as :class:`lpom.History` has them."""

from __future__ import annotations

import os
from types import TracebackType
from typing import final

from lpom.checks import require
from lpom.training.history import Epoch

_PAIRS = ("loss", "score")  # measured on training and, as validation_*, on validation data
_PER_LAYER = ("gaps", "rates")


@final
class TensorBoard:
    """A callback of :func:`lpom.fit` that writes event files into ``folder``.

    The step of every scalar is the epoch. Each epoch is on the disk when the callback returns;
    ``close`` (or a ``with`` block) ends the writer's thread.

    >>> with TensorBoard("logs") as log:  # doctest: +SKIP
    ...     lpom.fit(model, X, y, callbacks=[log])
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        require("tensorboard", "Logging for TensorBoard")
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(os.fspath(folder))

    def __call__(self, epoch: Epoch) -> None:
        for name, value in scalars(epoch).items():
            self._writer.add_scalar(name, value, epoch.epoch)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()

    def __enter__(self) -> TensorBoard:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def scalars(epoch: Epoch) -> dict[str, float]:
    """The values of an epoch under names that TensorBoard groups by the part before the slash.

    >>> scalars(Epoch(1, 2.0, 50.0, 0.75, 0.5, 0.9, gaps=(0.1,)))["gap/layer 1"]
    0.1
    """
    found = {"seconds": epoch.seconds, "samples per second": epoch.samples_per_second}
    if epoch.objective is not None:
        found["objective"] = epoch.objective
    for name in _PAIRS:
        found[f"{name}/training"] = getattr(epoch, name)
        if (value := getattr(epoch, f"validation_{name}")) is not None:
            found[f"{name}/validation"] = value
    for name in _PER_LAYER:
        for i, value in enumerate(getattr(epoch, name)):
            found[f"{name.removesuffix('s')}/layer {i + 1}"] = value
    return found
