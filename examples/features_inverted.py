"""What a trained network knows of a digit: pictures found from the features of its layers."""

from __future__ import annotations

import sys
import warnings

import matplotlib.pyplot as plt
import torch
from sklearn.datasets import load_digits

import lpom
from lpom.inversion import TotalVariation


def main(out: str = "features_inverted.svg") -> None:
    X, y = load_digits(return_X_y=True)
    X = torch.tensor(X / 16, dtype=torch.float32)
    network = lpom.mlp([64, 96, 48, 10], "leaky_relu", seed=0)
    result = lpom.fit(network, X[:1500], torch.tensor(y[:1500]), epochs=30, seed=0)
    print(result)

    shown = X[1500:1508]
    rows = {"digit": shown}
    prior = TotalVariation(2e-3, (8, 8), low=0.0, high=1.0)
    for layers in (1, 2):
        part = network[: 2 * layers].requires_grad_(False).eval()
        features = part(shown)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", lpom.ConvergenceWarning)
            found = lpom.invert(part, features, prior=prior, max_iter=3000, tol=1e-4)
        error = float((part(found.x) - features).norm() / features.norm())
        distance = float((found.x - shown).norm() / shown.norm())
        print(f"from layer {layers}: features to {error:.1%}, pictures to {distance:.1%}")
        rows[f"from layer {layers}"] = found.x

    figure, axes = plt.subplots(len(rows), len(shown), figsize=(8, 3.2), layout="constrained")
    for line, (title, pictures) in zip(axes, rows.items(), strict=True):
        for axis, picture in zip(line, pictures, strict=True):
            axis.imshow(picture.reshape(8, 8).numpy(), cmap="gray", vmin=0, vmax=1)
            axis.set(xticks=[], yticks=[])
        line[0].set_ylabel(title)
    figure.savefig(out)


if __name__ == "__main__":
    main(*sys.argv[1:])
