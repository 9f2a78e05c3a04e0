"""``lpom methods`` and ``lpom activations``: what exists."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from lpom import activations, methods

FORMULAS = {
    "sigmoid": "1 / (1 + exp(-z))",
    "tanh": "tanh(z)",
    "relu": "max(z, 0)",
    "leaky_relu": "z if z > 0, else slope z",
    "elu": "z if z > 0, else alpha (exp(z) - 1)",
    "softplus": "log(1 + exp(beta z)) / beta",
    "identity": "z",
    "hardtanh": "z clipped to its range",
    "hardsigmoid": "z / 6 + 1 / 2 clipped to its range",
    "relu6": "z clipped to its range",
    "step": "1 if z >= 0, else 0",
    "sign": "1 if z >= 0, else -1",
    "staircase": "z rounded to one of its levels",
}


def list_methods() -> None:
    """List the training methods: objective, cost of a step, and the data a step takes."""
    rows = [
        (name, method.equation, method.costs, "all rows" if method.full_batch else "mini-batch")
        for name, method in methods.METHODS.items()
    ]
    _print(("method", "minimises", "a step costs", "a step takes"), rows)


def list_activations() -> None:
    """List the activations: formula, range, Lipschitz constant, and whether they jump."""
    rows = []
    for name in activations.names():
        act = activations.get(name)
        settings = ", ".join(f"{key} {value:g}" for key, value in act.params().items())
        formula = FORMULAS[name] + (f"   ({settings})" if settings else "")
        bounds = f"{act.lower:g} to {act.upper:g}"
        rows.append((name, formula, bounds, f"{act.lipschitz:g}", "yes" if act.jumps else "no"))
    _print(("activation", "phi(z)", "range", "Lipschitz", "jumps"), rows)


def _print(columns: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> None:
    table = Table()
    for column in columns:
        table.add_column(column, no_wrap=column == columns[0])
    for row in rows:
        table.add_row(*map(Text, row))
    Console(highlight=False).print(table)
