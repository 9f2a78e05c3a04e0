"""Train through a layer of devices that can only be read.

Each of 40 units is an amplifier with a gain and an offset of its own; a reading has noise of 3 %.
Training asks for values alone. On the way it learns a curve of each unit, and at the end the
network runs without the devices. Writes measured_device.svg.
"""

import matplotlib.pyplot as plt
import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import nn

import lpom
from lpom.activations import calibrated, measured

torch.manual_seed(0)
gain = torch.empty(40).uniform_(0.4, 2.5)
offset = 0.4 * torch.randn(40)


def amplifier(z):
    """What the laboratory gives: in place of this function, a call of your instrument."""
    return torch.tanh(gain * z + offset) + 0.06 * torch.randn(z.shape)


X, y = load_digits(return_X_y=True)
X = (X / 16).astype(np.float32)
device = measured(amplifier, name="amplifier")
network = nn.Sequential(nn.Linear(64, 40), device.to_module(), nn.Linear(40, 10))
lpom.fit(network, X[:1300], y[:1300], loss="cross-entropy", epochs=20, batch_size=50)

on_device = lpom.evaluate(network, X[1300:], y[1300:], loss="cross-entropy")[1]
by_curves = lpom.evaluate(calibrated(network), X[1300:], y[1300:], loss="cross-entropy")[1]
print(device.report())
print(f"test accuracy: {on_device:.1%} on the device, {by_curves:.1%} by its calibrated curves")

# The answer to a gradient of 0.05, by a weight mu and by a displacement
z = torch.linspace(-2.5, 2.5, 150)[:, None].expand(150, 40)
x, g, mu = device.phi(z), 0.05, 20.0
d = device.displacement(z, x)
held_mu = mu * (x - device.phi(z - g / mu)) / g
held_d = (device.phi(z + d) - device.phi(z - d)) / (2 * d)
slope = gain * (1 - torch.tanh(gain * z + offset) ** 2)

figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.4), layout="constrained")
inputs, values = device.pairs()
curve = device.calibrate()
for unit, color in zip((0, 1, 2), ("C0", "C1", "C2"), strict=True):
    left.plot(inputs[:150, unit], values[:150, unit], ".", ms=2, alpha=0.4, color=color)
    span = z[(z[:, unit] > inputs[:, unit].min()) & (z[:, unit] < inputs[:, unit].max())]
    left.plot(span[:, unit], curve.phi(span)[:, unit], color=color)
left.set(title="readings in training, and calibrated curves", xlabel="z", ylabel="value")
right.plot(z[:, 0], held_mu[:, 0], ".", ms=4, label=r"$\mu = 20$")
right.plot(z[:, 0], held_d[:, 0], ".", ms=4, label="displacement by the noise, two sides")
right.plot(z[:, 0], slope[:, 0], "k", lw=1, label="the slope, which nobody knows")
right.set(title="answer over gradient, unit 0", xlabel="z", ylim=(-4, 6))
right.legend(loc="upper left")
figure.savefig("measured_device.svg")
