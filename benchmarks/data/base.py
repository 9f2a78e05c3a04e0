"""What every data set looks like once it is loaded."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

Array: TypeAlias = NDArray[Any]

#: Share of the training rows that is held out.
HELD_OUT = 1 / 6


@dataclass(frozen=True, eq=False)
class Dataset:
    """A data set, split into a training and a test part; rows are samples.

    Attributes
    ----------
    x_train, x_test : (n, features) float32; pictures are flat, unless `pictures` made them
    y_train, y_test : (n,) int64, class indices
    n_classes : how many classes there are
    image_shape : what a flat row reshapes to, (rows, columns) or (rows, columns, 3); none if it
        is no picture
    notes : how it was split, what stands in for what
    """

    name: str
    x_train: Array
    y_train: Array
    x_test: Array
    y_test: Array
    n_classes: int
    image_shape: tuple[int, ...] | None = None
    notes: str = ""

    def pictures(self) -> Dataset:
        """The same data with samples of shape (channels, rows, columns).

        Grey levels keep their values. Each colour is divided by its standard deviation over the
        training pictures.
        """
        if self.image_shape is None:
            raise ValueError(f"{self.name} has no pictures: its rows are features, not pixels.")
        train, test = (_channels_first(x, self.image_shape) for x in (self.x_train, self.x_test))
        if train.shape[1] > 1:
            deviations = train.std((0, 2, 3), dtype=np.float64).astype(np.float32)
            train, test = (x / deviations[:, None, None] for x in (train, test))
        return replace(self, x_train=train, x_test=test)

    def held_out(self) -> Dataset:
        """A fixed sixth of the training rows in place of the test rows, which are not used."""
        order = np.random.default_rng(0).permutation(len(self.x_train))
        rest, held = order[(n := int(len(order) * HELD_OUT)) :], order[:n]
        return replace(
            self,
            x_train=self.x_train[rest],
            y_train=self.y_train[rest],
            x_test=self.x_train[held],
            y_test=self.y_train[held],
        )

    def first(self, rows: int) -> Dataset:
        """The same data with the first ``rows`` of its training rows."""
        notes = f"The first {rows} training images."
        return replace(self, x_train=self.x_train[:rows], y_train=self.y_train[:rows], notes=notes)


def _channels_first(x: Array, shape: tuple[int, ...]) -> Array:
    """Rows, each a flat picture, as (n, channels, rows, columns); a copy."""
    images = x.reshape(len(x), shape[0], shape[1], -1)
    return np.moveaxis(images, 3, 1).copy(order="C")
