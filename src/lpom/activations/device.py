"""A device that can only be read: its values, its noise, its faults, and a curve for free."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable
from typing import Any, final

import numpy as np
import torch
from torch import Tensor, nn

from lpom.activations.base import Activation, Elementwise, Parameter
from lpom.activations.custom import refuse_to_save
from lpom.activations.table import (
    Array,
    Table,
    bounded_spread,
    fit_curves,
    noisy_displacement,
)
from lpom.exceptions import DeviceError, DeviceWarning, UntrainableError, warn

_CHECK = 100  # answers from one look at the noise to the next
_SAMPLE = 64  # rows of a batch that are kept, and that are read again for the noise


@final
class Measured(Activation):
    r"""An activation that is read from a device: noisy, slow, another curve for each unit.

    Nothing is asked of the curves: they may rise, fall, turn back, differ and drift. Training reads
    every value once on the way forward and ``sides`` times on the way back, at displaced inputs.
    Every pair that passes by is remembered (the newest ``keep`` rows), so there is a curve of each
    unit at the end, see `calibrate`. The class is also called `measured`.

    Parameters
    ----------
    read : callable
        From pre-activations to values of the same shape: whole batches, (m, units).
    numpy : bool
        Whether it takes arrays in place of tensors. It may give either.
    shared : bool
        Whether all units have one curve.
    noise : float or Tensor, optional
        The standard deviation of a reading, of all or by unit. By default it is measured: a sample
        of 64 rows is read again in the first step and every 100 steps.
    displacement : "auto" or float
        How far from z it is read: by the noise, or in units of the smaller of 1 and the spread of
        z. With noise this is what decides, see the notes.
    sides : {1, 2}
        Two sides take one reading more and have a quarter of the noise's variance.
    repeats : int
        How many readings are averaged for every value.
    budget : int, optional
        How many readings may be taken in all; then `DeviceError` is raised.
    retries : int
        How often a call that raises, or gives NaN or another shape, is repeated, after ``pause``
        seconds and then twice as long each time.
    keep : int
        How many of the newest rows are remembered for `Measured.calibrate`.
    lipschitz : float, optional
        A bound on all slopes, where several sweeps or the safe step need one; by default that of
        the calibrated curves.
    dim : int
        The dimension of the input along which units differ.

    Attributes
    ----------
    readings, calls : int
        How many values were read so far, and in how many calls.

    Notes
    -----
    A two-sided answer has the noise :math:`\sigma / (\sqrt 2 d)` and the bias
    :math:`d^2 \phi''' / 6`, whose squares together are least at :math:`d \sim \sigma^{1/3}`. In
    units of the spreads of z and x "auto" takes
    :math:`d = s_z (4 \sigma / s_x)^{1/3}`, at least 0.01 and at most 1.5; the 4 was chosen on held
    devices with noise of 3.6 and 10 % of their range, where 1 to 8 are nearly as good.

    Examples
    --------
    >>> import torch
    >>> gain = torch.tensor([0.5, 1.0, 2.0])
    >>> device = measured(lambda z: torch.tanh(gain * z) + 0.01 * torch.randn(z.shape))
    >>> network = torch.nn.Sequential(torch.nn.Linear(4, 3), device.to_module())
    """

    formula = "read from a device"
    measured = True
    jumps = False

    def __init__(
        self,
        read: Callable[[Any], Any],
        *,
        numpy: bool = False,
        shared: bool = False,
        noise: float | Tensor | None = None,
        displacement: str | float = "auto",
        sides: int = 2,
        repeats: int = 1,
        budget: int | None = None,
        retries: int = 2,
        pause: float = 0.1,
        keep: int = 4096,
        lipschitz: float | None = None,
        dim: int = -1,
        name: str = "device",
    ) -> None:
        for key, value in {"repeats": repeats, "keep": keep}.items():
            if value != int(value) or value < 1:
                raise ValueError(f"{key} of a device must be an integer >= 1, got {value!r}.")
        if sides not in (1, 2):
            raise ValueError(f"sides of a device must be 1 or 2, got {sides!r}.")
        if displacement != "auto" and not (
            isinstance(displacement, int | float) and displacement > 0
        ):
            raise ValueError(f"displacement must be 'auto' or above 0, got {displacement!r}.")
        self.read, self.numpy, self.shared, self.dim, self.name = read, numpy, shared, dim, name
        self.size, self.sides, self.repeats, self.keep = displacement, sides, repeats, keep
        self.budget, self.retries, self.pause, self.bound = budget, retries, pause, lipschitz
        self.noise = None if noise is None else torch.as_tensor(noise).float()
        self._measures_noise = noise is None
        self.readings = self.calls = self._answers = self._rows = 0
        self._z = self._x = torch.empty(0, 0)
        self._curve: tuple[int, Table, Array] | None = None
        self._first: tuple[Table, Tensor, Tensor] | None = None  # curves, and the inputs they hold
        self._drift = 0.0

    # What it says

    def phi(self, z: Tensor) -> Tensor:
        if torch.is_grad_enabled() and z.requires_grad:
            raise UntrainableError(
                f"the device {self.name!r} has no derivative. Train with lpom.fit, or call "
                "lpom.lift(model) in place of the model; evaluate under torch.no_grad()."
            )
        x = self._ask(z.detach())
        for _ in range(self.repeats - 1):
            x = x + self._ask(z.detach())
        x = x / self.repeats
        self._remember(z.detach(), x)
        return x

    def _ask(self, z: Tensor) -> Tensor:
        """One reading of every element; what fails is tried again."""
        x: Tensor | None = None
        problem: Exception | str = ""
        for attempt in range(self.retries + 1):
            if attempt:
                time.sleep(self.pause * 2 ** (attempt - 1))
            if self.budget is not None and self.readings + z.numel() > self.budget:
                raise DeviceError(
                    f"the budget of {self.budget:,} readings of {self.name!r} is spent: "
                    f"{self.readings:,} were taken, and {z.numel():,} more are asked for. The "
                    "weights are those of the last step; evaluate with "
                    "lpom.activations.calibrated(model), or raise the budget."
                )
            self.readings, self.calls = self.readings + z.numel(), self.calls + 1
            try:
                values = self.read(z.cpu().numpy() if self.numpy else z)
            except Exception as error:
                problem = error
                continue
            found = torch.as_tensor(values, dtype=z.dtype, device=z.device)
            if found.shape != z.shape:
                problem = f"it gave values of shape {tuple(found.shape)} for {tuple(z.shape)}"
                continue
            x = found if x is None else torch.where(x.isfinite(), x, found)
            missing = int((~x.isfinite()).sum())
            if not missing:
                return x
            problem = f"{missing} of {x.numel()} values are NaN or infinite"
        tries = f"{self.retries + 1} tries" if self.retries else "the only try"
        raise DeviceError(
            f"the device {self.name!r} failed in {tries}: {problem}. The weights are those of the "
            "last step: mend the device and call fit again, with resume=True where there is a "
            "checkpoint, or give a larger retries=."
        ) from (problem if isinstance(problem, Exception) else None)

    # How the rule reads it

    def displacement(self, z: Tensor, x: Tensor) -> Tensor:
        """By unit: larger with the noise, never above 1.5 nor 1.5 times the spread of ``z``."""
        if self._measures_noise and self._answers % _CHECK == 0:
            self._look_at_noise(z, x)
        self._answers += 1
        if self.size != "auto":
            return float(self.size) * bounded_spread(z)
        assert self.noise is not None
        return noisy_displacement(z, x, self.noise.to(z), self.dim)

    def _look_at_noise(self, z: Tensor, x: Tensor) -> None:
        """Read a sample once more; what differs is noise. Drift is looked at on this occasion."""
        part, known = z[:_SAMPLE], x[:_SAMPLE]
        again = self._by_unit(self._ask(part) - known)
        squares = again.square() / (1 + 1 / self.repeats)
        pooled = squares.mean()
        n = len(squares)
        variance = (squares.sum(0) + 2 * pooled) / (n + 2)  # few rows say little of one unit
        noise = (variance / self.repeats).sqrt().cpu().float()
        if self.noise is not None and self.noise.shape == noise.shape:
            noise = ((self.noise.square() + noise.square()) / 2).sqrt()
        self.noise = noise
        if self._rows >= self.keep:
            self._look_at_drift()

    def _look_at_drift(self) -> None:
        if self._first is None:
            z, _ = self.pairs()
            self._first = self.calibrate(), z.amin(0), z.amax(0)
        drift = float(self.drift().max())
        if drift > self._drift + 0.15:  # less may be how curves are fitted
            self._drift = drift
            warn(
                f"the device {self.name!r} has drifted by {drift:.0%} of its range since training "
                "began. Training follows it; evaluate with the newest curves, calibrate().",
                DeviceWarning,
            )

    # What is remembered

    def _by_unit(self, z: Tensor) -> Tensor:
        """Rows, one column per unit."""
        return z.reshape(-1, 1) if self.shared else z.movedim(self.dim, -1).flatten(0, -2)

    def _remember(self, z: Tensor, x: Tensor) -> None:
        rows, values = self._by_unit(z).cpu().float(), self._by_unit(x).cpu().float()
        if len(rows) > _SAMPLE:
            step = len(rows) // _SAMPLE
            rows, values = rows[self.calls % step :: step], values[self.calls % step :: step]
        if self._z.shape[1] != rows.shape[1]:
            self._z = torch.empty(self.keep, rows.shape[1])
            self._x, self._rows = torch.empty_like(self._z), 0
        places = (self._rows + torch.arange(len(rows))) % self.keep
        self._z[places], self._x[places] = rows, values
        self._rows += len(rows)

    def pairs(self, recent: int | None = None) -> tuple[Tensor, Tensor]:
        """Inputs and values that were read, the oldest first: (rows, units) each."""
        if self._rows < 16:
            raise DeviceError(
                f"the device {self.name!r} has not been read at 16 rows yet; train with it, or "
                "call probe(z) first."
            )
        count = min(self._rows, self.keep)
        order = (self._rows - count + torch.arange(count)) % self.keep
        order = order[-min(recent or count, count) :]
        return self._z[order], self._x[order]

    def probe(self, z: Tensor) -> Measured:
        """Read it at ``z``, (rows, units), before it is used."""
        with torch.no_grad():
            for rows in z.split(_SAMPLE):
                self.phi(rows)
        return self

    def calibrate(self, recent: int | None = None) -> Table:
        """A curve of each unit, from the readings that training took anyway.

        Means over intervals, made monotone by isotonic regression where they are so up to their
        scatter, else a smoothing spline.

        Parameters
        ----------
        recent : int, optional
            Use the newest rows alone, where the device drifts.
        """
        if recent is None and self._curve is not None and self._curve[0] == self._rows:
            return self._curve[1]
        z, x = (each.double().numpy() for each in self.pairs(recent))
        knots, values, monotone = fit_curves(z, x)
        curves = values[0] if len(values) == 1 else values
        table = Table(tuple(knots), tuple(map(_tuple, curves)), dim=self.dim)
        if recent is None:
            self._curve = self._rows, table, monotone
        return table

    @property
    def monotone(self) -> Array:
        """Of each unit whether it is monotone, up to the scatter of its readings."""
        self.calibrate()
        assert self._curve is not None
        return self._curve[2]

    def drift(self) -> Tensor:
        """By how much of its range each unit moved since the first ``keep`` rows, root mean square.

        Zero before these were read; inputs that did not occur then are left out.
        """
        z, x = self.pairs()
        if self._first is None:
            return torch.zeros(x.shape[1])
        table, low, high = self._first
        moved = (_along_units(self.calibrate(), z) - _along_units(table, z)).square()
        known = (z >= low) & (z <= high)
        mean = (moved * known).sum(0) / known.sum(0).clamp(min=1)
        return mean.sqrt() / (x.amax(0) - x.amin(0)).clamp(min=1e-30)

    def report(self) -> str:
        """What is known of the device."""
        lines = [f"{self.name}: {self.readings:,} readings in {self.calls:,} calls"]
        if self._rows >= 16:
            table, monotone = self.calibrate(), self.monotone
            span = table.upper - table.lower
            lines.append(f"units: {len(monotone)}, of which monotone: {int(monotone.sum())}")
            lines.append(f"slopes: from {-table.slope_bound:.3g} to {table.lipschitz:.3g}")
            if self.noise is not None:
                lines.append(f"noise: {float(self.noise.mean()) / span:.1%} of the range")
            lines.append(f"drift: at most {float(self.drift().max()):.1%} of the range")
        return "\n".join(lines)

    # As any other activation, by its curve

    @property
    def lipschitz(self) -> float:
        return self.calibrate().lipschitz if self.bound is None else float(self.bound)

    @property
    def slope_bound(self) -> float:  # type: ignore[override]
        return 0.0 if self._rows < 16 else self.calibrate().slope_bound

    @property
    def lower(self) -> float:
        return -math.inf if self._rows < 16 else float(self.pairs()[1].min())

    @property
    def upper(self) -> float:
        return math.inf if self._rows < 16 else float(self.pairs()[1].max())

    def primitive(self, z: Tensor) -> Tensor:
        return self.calibrate().primitive(z)

    def conjugate(self, x: Tensor) -> Tensor:
        return self.calibrate().conjugate(x)

    def gap(self, x: Tensor, z: Tensor) -> Tensor:
        return self.calibrate().gap(x, z)

    def params(self) -> dict[str, Parameter]:
        refuse_to_save(self.name, "Save lpom.activations.calibrated(model), which has its curves.")

    def __deepcopy__(self, memo: dict[int, Any]) -> Measured:
        return self  # there is one device

    def __repr__(self) -> str:
        return f"Measured({self.name!r})"


measured = Measured


def calibrated(model: nn.Module, recent: int | None = None) -> nn.Module:
    """A copy of the model with curves in place of its devices, for evaluation, files and ONNX."""
    model = copy.deepcopy(model)
    for module in model.modules():
        if isinstance(module, Elementwise) and isinstance(module.activation, Measured):
            module.activation = module.activation.calibrate(recent)
    return model


def _along_units(table: Table, z: Tensor) -> Tensor:
    """The curves at rows of one column per unit."""
    return Table(table.z, table.values).phi(z)


def _tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, np.ndarray) else float(value)
