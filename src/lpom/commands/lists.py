"""``lpom methods``, ``lpom networks`` and ``lpom activations``: what exists."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from lpom import activations, methods, networks


def list_methods() -> None:
    """List the training methods: objective, cost of a step, and the data a step takes."""
    rows = [
        (name, method.equation, method.costs, "all rows" if method.full_batch else "mini-batch")
        for name, method in methods.METHODS.items()
    ]
    _print(("method", "minimises", "a step costs", "a step takes"), rows)


def list_networks() -> None:
    """List the known networks, for train --network."""
    _print(
        ("network", "what it is"), [(name, networks.describe(name)) for name in networks.names()]
    )


def list_activations() -> None:
    """List the activations: formula, range, Lipschitz constant, and whether they jump."""
    rows = []
    for act in activations.examples():
        settings = ", ".join(f"{key} {value}" for key, value in act.params().items())
        formula = act.formula + (f"   ({settings})" if settings else "")
        bounds = f"{act.lower:.4g} to {act.upper:.4g}"
        rows.append((act.name, formula, bounds, f"{act.lipschitz:g}", "yes" if act.jumps else "no"))
    _print(("activation", "phi(z)", "range", "Lipschitz", "jumps"), rows)


def _print(columns: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> None:
    table = Table()
    for column in columns:
        table.add_column(column, no_wrap=column == columns[0])
    for row in rows:
        table.add_row(*map(Text, row))
    Console(highlight=False).print(table)
