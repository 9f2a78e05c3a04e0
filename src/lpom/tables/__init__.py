"""Tables as they come: columns to inputs of a network (`TableEncoder`), and what is predicted."""

from __future__ import annotations

from typing import Any

from lpom.tables.encoder import TableEncoder
from lpom.tables.target import Target

__all__ = ["TableEncoder", "Target"]

_OLD = ("Classes", "ColumnPlan", "Features", "Locale", "Quantity", "Several", "fit_target",
        "target_from_json", "Column")  # fmt: skip


def __getattr__(name: str) -> Any:
    if name in _OLD:
        from lpom.tables import old

        return getattr(old, name)
    raise AttributeError(name)
