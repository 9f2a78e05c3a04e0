"""What every data set looks like once it is loaded."""

from __future__ import annotations

from dataclasses import dataclass
from os import PathLike
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

Array: TypeAlias = NDArray[Any]
DataDir: TypeAlias = str | PathLike[str] | None


@dataclass(frozen=True, eq=False)
class Dataset:
    """A data set, split into a training and a test part; rows are samples.

    Attributes
    ----------
    x_train, x_test : (n, features) float32
        Images are flattened; `picture` turns a row back into one.
    y_train, y_test : (n,) int64 or float32
        Class indices, or the numbers to predict in a regression.
    classes : tuple of str
        What the class indices mean; empty for a regression.
    feature_names : tuple of str
        One name per column.
    image_shape : tuple of int or None
        What a flat row reshapes to: (rows, columns) or (rows, columns, 3); None if it is no image.
    notes : str
        What a reader of a result should know: how it was split, what stands in for what.
    picture_scale, picture_offset
        ``row * picture_scale + picture_offset`` is the image with values in [0, 1].
    """

    name: str
    x_train: Array
    y_train: Array
    x_test: Array
    y_test: Array
    classes: tuple[str, ...]
    feature_names: tuple[str, ...]
    image_shape: tuple[int, ...] | None = None
    notes: str = ""
    picture_scale: float | Array = 1.0
    picture_offset: float | Array = 0.0

    def picture(self, row: Array) -> Array:
        """A row of `x_train` or `x_test` as an image to show, with values in [0, 1]."""
        shape = self._shape_of_pictures()
        image = np.reshape(row, shape) * self.picture_scale + self.picture_offset
        return np.clip(image, 0.0, 1.0)

    def _shape_of_pictures(self) -> tuple[int, ...]:
        if self.image_shape is None:
            raise ValueError(
                f"{self.name} has no pictures: its rows are {len(self.feature_names)} features, "
                "not pixels."
            )
        return self.image_shape
