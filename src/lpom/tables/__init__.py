"""A table as a learning task: columns become inputs, one column the target, outputs answers.

Everything learnt from a table is plain state that goes to JSON and back exactly, so that a model
file can hold it.
"""

from lpom.tables.features import Features
from lpom.tables.splits import split_rows
from lpom.tables.targets import Classes, Quantity, Target, fit_target, target_from_json

__all__ = [
    "Classes",
    "Features",
    "Quantity",
    "Target",
    "fit_target",
    "split_rows",
    "target_from_json",
]
