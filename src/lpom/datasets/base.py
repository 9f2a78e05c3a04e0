"""What every data set looks like once it is loaded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from os import PathLike
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

Array: TypeAlias = NDArray[Any]
DataDir: TypeAlias = str | PathLike[str] | None


@dataclass(frozen=True, eq=False)
class Dataset:
    """A data set, split into a training and a test part; rows are samples.

    Attributes
    ----------
    x_train, x_test : (n, features) float32
        Images are flattened; `picture` turns a row back into one, and `pictures` is the same data
        set with (n, channels, rows, columns), for networks with convolutions.
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
        if np.ndim(row) == 3:  # of `pictures`: channels come first
            row = np.moveaxis(row, 0, -1)
        image = np.reshape(row, shape) * self.picture_scale + self.picture_offset
        return np.clip(image, 0.0, 1.0)

    def pictures(self) -> Dataset:
        """The same data with samples of shape (channels, rows, columns).

        Grey levels keep their values. Each colour is divided by its standard deviation over the
        training pictures, so that CIFAR-10, whose means are subtracted already, is normalised per
        channel; `picture` undoes it.
        """
        shape = self._shape_of_pictures()
        if self.x_train.ndim == 4:
            return self
        train, test = (_channels_first(x, shape) for x in (self.x_train, self.x_test))
        if len(shape) == 2:
            return replace(self, x_train=train, x_test=test)
        # torch adds up in a way that keeps float32 exact enough, without a copy of the data
        deviations = torch.from_numpy(train).std((0, 2, 3), correction=0).numpy()
        for x in (train, test):
            x /= deviations[:, None, None]
        return replace(
            self,
            x_train=train,
            x_test=test,
            picture_scale=self.picture_scale * deviations,
            notes=f"{self.notes} Each colour is divided by its standard deviation over the "
            "training pictures.",
        )

    def _shape_of_pictures(self) -> tuple[int, ...]:
        if self.image_shape is None:
            raise ValueError(
                f"{self.name} has no pictures: its rows are {len(self.feature_names)} features, "
                "not pixels."
            )
        return self.image_shape


def _channels_first(x: Array, shape: tuple[int, ...]) -> Array:
    """Rows, each a flat image, as (n, channels, rows, columns); a copy."""
    images = x.reshape(len(x), shape[0], shape[1], -1)
    return np.moveaxis(images, 3, 1).copy(order="C")


def pixel_names(shape: Sequence[int]) -> tuple[str, ...]:
    """Feature names of a flattened image, in the order of its pixels."""
    rows, columns = shape[:2]
    colours = ("_red", "_green", "_blue") if len(shape) == 3 else ("",)
    return tuple(
        f"pixel_{row}_{column}{colour}"
        for row in range(rows)
        for column in range(columns)
        for colour in colours
    )
