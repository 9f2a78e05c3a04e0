"""Training through devices that can only be read: LPOM's rule beside what others use.

The devices are 36 optical neurons that were really measured (T. Wang et al., Nature Photonics 2023,
CC BY 4.0): their mean curves, with scatter drawn from their own readings, 2 to 4 % of the range.
784 - 36 devices (once or three times) - 10, MNIST, Adam with a linear decay. The rivals are

- oracle: back-propagation with the exact slope of every device, which nobody has
- nominal: physics-aware training, forward by the device, backward by one curve for all units
- fitted: the same with a curve for each unit, fitted before training to readings of its own
- identity: straight-through with slope 1
- localzo: two readings at a random distance of 0.5 times a normal number
- spsa: all units of a sample are moved at once, up and down, and the loss is compared

    python benchmarks/devices.py --data DIR            # all tables, small
    python benchmarks/devices.py --data DIR one drift --seeds 3 --digits 60000 --epochs 5
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lpom
from data import load
from data.svhn import read_part
from lpom.activations import Elementwise, Table, from_function, get, measured
from lpom.activations.table import fit_curves

UNITS = 36


# The devices


def readings(data: Path, later: bool = False) -> tuple[np.ndarray, np.ndarray]:
    """Inputs from -2 to 2 and values from -1 to 1, (readings, neurons)."""
    file = np.load(data / "optical-neurons" / "readings.npz")
    ranges = [(file[key].min(0), file[key].max(0)) for key in ("light_in", "light_out")]
    prefix = "later_" if later else ""
    z, x = (file[prefix + key].astype(float) for key in ("light_in", "light_out"))
    (low_z, high_z), (low_x, high_x) = ranges
    return 4 * (z - low_z) / (high_z - low_z) - 2, 2 * (x - low_x) / (high_x - low_x) - 1


class Device:
    """One layer of units: a curve each, a gain and an offset each, scatter, drift."""

    def __init__(
        self,
        curve: Callable[[Tensor], Tensor],
        scatter: Tensor,
        seed: int,
        spread: bool = False,
        units: int = UNITS,
    ) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.curve, self.scatter, self.time, self.drifts = curve, scatter, 0.0, 0.0
        draw = torch.rand(units, generator=self.generator)
        self.gain = 3 ** (2 * draw - 1) if spread else torch.ones(units)
        self.offset = 0.45 * torch.randn(units, generator=self.generator) * spread
        self.way = torch.randn(2, units, generator=self.generator).sign()
        self.read_values = 0

    def exact(self, z: Tensor) -> Tensor:
        change = self.drifts * self.time
        gain = self.gain * (1 + change * self.way[0])
        return self.curve(gain * z + self.offset + change * self.way[1])

    def slope(self, z: Tensor) -> Tensor:
        return (self.exact(z + 0.05) - self.exact(z - 0.05)) / 0.1

    def __call__(self, z: Tensor) -> Tensor:
        self.read_values += z.numel()
        x = self.exact(z)
        row = torch.randint(len(self.scatter), z.shape, generator=self.generator)
        return x + self.scatter.gather(0, row.reshape(-1, z.shape[-1])).reshape(z.shape)


def optical(data: Path, later: bool = False) -> tuple[Callable[[Tensor], Tensor], Tensor]:
    """Curves of the neurons and what their readings scatter around them by."""
    z, x = readings(data, later)
    knots, values, _ = fit_curves(z, x, cells=40)
    curve = Table(tuple(knots), tuple(map(tuple, values)))
    scatter = torch.tensor(x) - curve.phi(torch.tensor(z))
    return curve.phi, scatter.float()


# The rules


class Backward(torch.autograd.Function):
    """The device forward, ``slope(z, g)`` backward."""

    @staticmethod
    def forward(ctx: Any, z: Tensor, device: Device, backward: Any) -> Tensor:
        ctx.save_for_backward(z)
        ctx.backward_rule = backward
        return device(z)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None, None]:
        (z,) = ctx.saved_tensors
        return ctx.backward_rule(z, g), None, None


class Through(nn.Module):
    def __init__(self, device: Device, backward: Any) -> None:
        super().__init__()
        self.device, self.backward_rule = device, backward

    def forward(self, z: Tensor) -> Tensor:
        return Backward.apply(z, self.device, self.backward_rule)


def twin(device: Device, nominal: Callable[[Tensor], Tensor]) -> Any:
    return lambda z, g: g * (nominal(z + 0.1) - nominal(z - 0.1)) / 0.2


def fitted_twin(device: Device, n: int) -> Any:
    """A curve for each unit, from n readings of each."""
    z = torch.linspace(-3, 3, n)[torch.randperm(n, generator=device.generator)]
    z = z[:, None].expand(n, len(device.gain))
    knots, values, _ = fit_curves(z.numpy(), device(z).numpy(), cells=24)
    return twin(device, Table(tuple(knots), tuple(map(tuple, values))).phi)


def local_zo(device: Device) -> Any:
    def rule(z: Tensor, g: Tensor) -> Tensor:
        u = torch.randn(z.shape, generator=device.generator)
        return g * (device(z + 0.5 * u) - device(z - 0.5 * u)) / 1.0 * u

    return rule


LPOM: dict[str, dict[str, Any]] = {
    "lpom": {},
    "lpom one side": {"sides": 1},
    "lpom d=0.5": {"displacement": 0.5},
}
RIVALS = ["oracle", "nominal", "fitted", "identity", "localzo", "spsa"]


def backward(rule: str, device: Device, data: Any, probes: int) -> Any:
    """What a rival does with the gradient."""
    if rule == "oracle":
        return lambda z, g: g * device.slope(z)
    if rule == "nominal":
        return twin(device, data.nominal)
    if rule == "fitted":
        return fitted_twin(device, probes)
    return local_zo(device) if rule == "localzo" else lambda z, g: g


def network(rule: str, devices: list[Device], data: Any, probes: int, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    units = len(devices[0].gain)
    layers: list[nn.Module] = []
    for k, device in enumerate(devices):
        layers.append(nn.Linear(784 if k == 0 else units, units))
        if rule in LPOM or rule.startswith("mu"):
            layers.append(measured(device, **LPOM.get(rule, {"noise": 0.0})).to_module())
        else:
            layers.append(Through(device, backward(rule, device, data, probes)))
    layers.append(nn.Linear(units, 10))
    model = nn.Sequential(*layers)
    if rule in LPOM:
        return lpom.lift(model)
    return lpom.lift(model, mu=float(rule.split("=")[1])) if rule.startswith("mu") else model


def spsa(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """A loss whose gradient in the weights is that of two readings of the whole network."""
    size = 0.3
    generator = model[1].device.generator
    moves = [
        torch.randn(len(x), m.out_features, generator=generator).sign()
        for m in model
        if isinstance(m, nn.Linear)
    ][:-1]

    def run(sign: float) -> tuple[Tensor, list[Tensor]]:
        h, states, k = x, [], 0
        for m in model:
            h = m(h.detach()) if isinstance(m, nn.Linear) else m.device(h.detach())
            if isinstance(m, nn.Linear) and k < len(moves):
                states.append(h)
                h, k = h + sign * size * moves[k], k + 1
        return h, states

    with torch.no_grad():
        up, down = (F.cross_entropy(run(s)[0], y, reduction="none") for s in (1.0, -1.0))
    outputs, states = run(0.0)
    change = ((up - down) / (2 * size))[:, None] / len(x)
    return F.cross_entropy(outputs, y) + sum(
        (change * move * z).sum() for move, z in zip(moves, states, strict=True)
    )


def train(
    model: nn.Module, devices: list[Device], data: Any, epochs: int, seed: int, rule: str
) -> None:
    x, y = data.train
    steps = epochs * (len(x) // 100)
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, steps)
    generator = torch.Generator().manual_seed(seed)
    done = 0
    for _ in range(epochs):
        for rows in torch.randperm(len(x), generator=generator).split(100)[: len(x) // 100]:
            for device in devices:
                device.time = done / steps
            loss = (
                spsa(model, x[rows], y[rows])
                if rule == "spsa"
                else F.cross_entropy(model(x[rows]), y[rows])
            )
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            done += 1


@torch.no_grad()
def accuracy(model: nn.Module, data: Any) -> float:
    x, y = data.test
    plain = lpom.unlift(model)
    return 100 * float((plain(x).argmax(1) == y).double().mean())


# Data


class Data:
    """Grey pictures of 28 x 28 around their mean grey: MNIST, or digits and CIFAR-10 cut to that.

    Of the house numbers the test digits alone are there of all classes: the first 20,000 of them,
    in a fixed order, are trained on and the others tested with.
    """

    def __init__(self, digits: int, pictures: str = "mnist") -> None:
        if pictures == "svhn":
            x, y = read_part("test")
            order = np.random.default_rng(0).permutation(len(x))
            parts = [(x[order[:20000]], y[order[:20000]]), (x[order[20000:]], y[order[20000:]])]
        else:
            loaded = load(pictures)
            parts = [(loaded.x_train, loaded.y_train), (loaded.x_test, loaded.y_test)]
        greys = [_grey(x) for x, _ in parts]
        mean = greys[0].mean()
        self.nominal: Callable[[Tensor], Tensor] = torch.tanh
        self.train, self.test = (
            (torch.tensor(grey - mean), torch.tensor(y))
            for grey, (_, y) in zip(greys, parts, strict=True)
        )
        self.train = self.train[0][:digits], self.train[1][:digits]


def _grey(x: np.ndarray) -> np.ndarray:
    if x.size == len(x) * 784:
        return x.reshape(-1, 784).astype(np.float32)
    grey = x.reshape(-1, 32, 32, 3).astype(np.float32).mean(-1)[:, 2:30, 2:30]
    return grey.reshape(-1, 784) / (255 if grey.max() > 2 else 1)


# The tables


def run(
    options: Any,
    title: str,
    rules: Iterable[str],
    devices: Callable[[int], list[Device]],
    data: Data,
    after: Callable[[list[Device]], None] | None = None,
) -> dict[str, list[float]]:
    """Train by each rule, on each seed; print accuracies and readings per unit of a step."""
    print(f"\n{title}", flush=True)
    found: dict[str, list[float]] = {}
    for rule in rules:
        scores, values = [], 0.0
        for seed in range(options.seeds):
            layers = devices(seed)
            for layer in layers:
                layer.read_values = 0
            model = network(rule, layers, data, options.probes, seed)
            train(model, layers, data, options.epochs, seed, rule)
            values = sum(layer.read_values for layer in layers) / len(layers)
            values /= options.epochs * len(data.train[0]) * len(layers[0].gain)
            if after is not None:
                after(layers)
            scores.append(accuracy(model, data))
        found[rule] = scores
        print(
            f"  {rule:14s} {np.mean(scores):6.2f}   "
            f"{' '.join(f'{s:5.1f}' for s in scores)}   {values:.2f} readings a value",
            flush=True,
        )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("tables", nargs="*", default=[])
    parser.add_argument("--data", type=Path, default=os.environ.get("LPOM_DATA"))
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--digits", type=int, default=12000)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument(
        "--probes", type=int, default=500, help="readings per unit of a fitted twin"
    )
    parser.add_argument("--rules", nargs="*", help="these alone")
    parser.add_argument("--picture", type=Path, help="draw the table of noise here")
    options = parser.parse_args()
    os.environ["LPOM_DATA"] = str(options.data)
    options.data = Path(options.data)
    tables = {
        "one": one,
        "three": three,
        "drift": drift,
        "noise": noise,
        "later": later,
        "waves": waves,
        "smooth": smooth,
        "windows": windows,
    }
    for name in options.tables or tables:
        tables[name](options)


def _optical_layers(options: Any, n: int, spread: bool, drifts: float = 0.0) -> Any:
    curve, scatter = optical(options.data)

    def make(seed: int) -> list[Device]:
        layers = [Device(curve, scatter, 100 * seed + k, spread) for k in range(n)]
        for layer in layers:
            layer.drifts = drifts
        return layers

    return make


def _data(options: Any) -> Data:
    data = Data(options.digits)
    z, x = readings(options.data)
    knots, values, _ = fit_curves(z.reshape(-1, 1), x.reshape(-1, 1), cells=40)
    data.nominal = Table(tuple(knots), tuple(values[0])).phi
    return data


def one(options: Any) -> None:
    data = _data(options)
    rules = options.rules or ["oracle", *LPOM, *RIVALS[1:], "mu=20", "mu=1"]
    for spread in (False, True):
        title = "one layer, " + ("gains 1/3 to 3, offsets of 45 %" if spread else "as measured")
        run(options, title, rules, _optical_layers(options, 1, spread), data)


def three(options: Any) -> None:
    rules = options.rules or ["oracle", *LPOM, *RIVALS[1:], "mu=20", "mu=1"]
    run(options, "three layers, spread", rules, _optical_layers(options, 3, True), _data(options))


def drift(options: Any) -> None:
    rules = options.rules or ["oracle", *LPOM, "fitted", "nominal"]
    layers = _optical_layers(options, 3, True, 0.2)
    run(options, "three layers, gain and offset drift by 20 %", rules, layers, _data(options))


def noise(options: Any) -> None:
    data, rules = _data(options), options.rules or ["oracle", *LPOM, "nominal", "fitted", "mu=20"]
    curve, _ = optical(options.data)
    levels, table = [0.0, 0.01, 0.036, 0.1], []
    for level in levels:

        def make(seed: int, level: float = level) -> list[Device]:
            draw = torch.randn(3000, UNITS, generator=torch.Generator().manual_seed(seed))
            return [Device(curve, 2 * level * draw, 100 * seed + k, True) for k in range(3)]

        table.append(
            run(options, f"three layers, noise {level:.1%} of the range", rules, make, data)
        )
    if options.picture:
        import matplotlib.pyplot as plt

        for rule in rules:
            plt.plot(
                [100 * s for s in levels], [np.mean(row[rule]) for row in table], "o-", label=rule
            )
        plt.xlabel("read noise, % of the range")
        plt.ylabel("test accuracy, %")
        plt.legend()
        plt.savefig(options.picture)


def later(options: Any) -> None:
    curve, scatter = optical(options.data, later=True)

    def after(layers: list[Device]) -> None:
        for layer in layers:
            layer.curve, layer.scatter = curve, scatter

    rules = options.rules or ["oracle", "lpom", "nominal", "fitted"]
    layers = _optical_layers(options, 1, False)
    run(options, "one layer, tested with the later readings", rules, layers, _data(options), after)


def waves(options: Any) -> None:
    data = _data(options)
    data.nominal = lambda z: 2 * torch.sin(1.2 * z) ** 2 - 1
    for n in (1, 3):

        def make(seed: int, n: int = n) -> list[Device]:
            layers = []
            for k in range(n):
                generator = torch.Generator().manual_seed(1000 + 10 * seed + k)
                phase = 3 * torch.rand(UNITS, generator=generator)
                scatter = 0.06 * torch.randn(3000, UNITS, generator=generator)

                def curve(z: Tensor, phase: Tensor = phase) -> Tensor:
                    return 2 * torch.sin(1.2 * z + phase) ** 2 - 1

                layers.append(Device(curve, scatter, 100 * seed + k))
            return layers

        rules = options.rules or ["oracle", *LPOM, "nominal", "fitted", "identity"]
        run(options, f"sin^2, {n} layers, a phase for each unit, noise 3 %", rules, make, data)


def smooth(options: Any) -> None:
    """Functions that are not monotone, by their values alone, in 784-300-100-10."""
    data = Data(options.digits)
    shapes = {"gaussian": get("gaussian").phi, "sine": torch.sin, "gelu": F.gelu}
    print("\n784-300-100-10, Adam with the derivative; by values alone")
    for name, shape in shapes.items():
        row = []
        for by_values in (False, True):
            scores = []
            for seed in range(options.seeds):
                torch.manual_seed(seed)
                act = Elementwise(from_function(shape, name=name))
                sizes = [784, 300, 100, 10]
                layers = [nn.Linear(a, b) for a, b in zip(sizes, sizes[1:], strict=False)]
                model = nn.Sequential(layers[0], act, layers[1], act, layers[2])
                model = lpom.lift(model) if by_values else model
                train(model, [], data, options.epochs, seed, "adam")
                scores.append(accuracy(model, data))
            row.append(np.mean(scores))
        print(f"  {name:10s} {row[0]:6.2f} {row[1]:6.2f}", flush=True)


class Window(torch.autograd.Function):
    """A jump forward, a ramp of a fixed width backward: straight-through."""

    @staticmethod
    def forward(ctx: Any, z: Tensor, phi: Any, width: float) -> Tensor:
        ctx.save_for_backward(z)
        ctx.phi, ctx.width = phi, width
        return phi(z)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None, None]:
        (z,) = ctx.saved_tensors
        w = ctx.width
        return g * (ctx.phi(z + w / 2) - ctx.phi(z - w / 2)) / w, None, None


class Fixed(nn.Module):
    def __init__(self, phi: Any, width: float) -> None:
        super().__init__()
        self.phi, self.width = phi, width

    def forward(self, z: Tensor) -> Tensor:
        return Window.apply(z, self.phi, self.width)


def windows(options: Any) -> None:
    """The default for jumps beside fixed windows, in 784-300-100-10."""
    widths = [0.5, 1.0, 2.0, 4.0]
    print(f"\n784-300-100-10; the default, then windows of {widths}")
    for pictures in ("mnist", "svhn", "cifar-10"):
        data = Data(options.digits, pictures)
        for name in ("step", "sign"):
            row = []
            for width in [None, *widths]:
                scores = []
                for seed in range(options.seeds):
                    torch.manual_seed(seed)
                    phi = get(name)
                    act = Elementwise(phi) if width is None else Fixed(phi.phi, width)
                    sizes = [784, 300, 100, 10]
                    layers = [nn.Linear(a, b) for a, b in zip(sizes, sizes[1:], strict=False)]
                    model = nn.Sequential(layers[0], act, layers[1], act, layers[2])
                    model = lpom.lift(model) if width is None else model
                    train(model, [], data, options.epochs, seed, "adam")
                    scores.append(accuracy(model, data))
                row.append(np.mean(scores))
            best = max(row[1:])
            print(
                f"  {pictures:6s} {name:5s} {row[0]:6.2f}   "
                f"{' '.join(f'{v:6.2f}' for v in row[1:])}   to the best {row[0] - best:+.2f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
