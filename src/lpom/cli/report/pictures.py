"""Pixels as PNG files inside the page: samples, and the weights of units that look at pixels."""

from __future__ import annotations

import base64
import io
from typing import Any

import matplotlib
import numpy as np
from matplotlib.colors import to_hex
from PIL import Image

from lpom.datasets import Dataset
from lpom.datasets.base import Array
from lpom.predictor import Predictor

UNITS = 48  # shown of the first layer
_MAP = matplotlib.colormaps["RdBu_r"]  # told apart by every kind of colour vision
_UNUSED = (0.5, 0.5, 0.5)  # a pixel that the network does not look at
_QUANTILE = 0.995  # of the weights that the colours cover; the few beyond it saturate


def png(pixels: Array) -> str:
    """An image with values in [0, 1], (rows, columns) or (rows, columns, 3), as a data URI."""
    file = io.BytesIO()
    Image.fromarray(np.round(255 * pixels).astype(np.uint8)).save(file, "PNG", optimize=True)
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


def first_layer(predictor: Predictor, data: Dataset) -> dict[str, Any]:
    """The units of the first layer with the largest weights, each as a picture of its weights.

    All share one scale, from ``-limit`` to ``limit``; a pixel without a weight is grey.
    """
    weights = next(predictor.model.parameters()).detach().double().numpy()
    shown = np.sort(np.argsort(-np.linalg.norm(weights, axis=1), kind="stable")[:UNITS])
    place = {name: k for k, name in enumerate(data.feature_names)}
    pixels = np.full((len(shown), len(place)), np.nan)
    pixels[:, [place[name] for name in predictor.features.names]] = weights[shown]
    limit = float(np.nanquantile(np.abs(pixels), _QUANTILE)) or 1.0
    in_colour = len(data.image_shape or ()) == 3
    return {
        "count": len(weights),
        "limit": limit,
        "scale": [] if in_colour else [to_hex(_MAP(share)) for share in np.linspace(0, 1, 9)],
        "units": [
            {"unit": int(k), "picture": png(_painted(row.reshape(data.image_shape), limit))}
            for k, row in zip(shown, pixels, strict=True)
        ],
    }


def _painted(weights: Array, limit: float) -> Array:
    """Weights as colours: blue to red, or each channel's own where there are three."""
    level = np.clip(0.5 + 0.5 * weights / limit, 0, 1)
    if weights.ndim == 3:
        return np.nan_to_num(level, nan=0.5)
    colours = np.asarray(_MAP(np.nan_to_num(level, nan=0.5))[..., :3])
    colours[np.isnan(weights)] = _UNUSED
    return colours
