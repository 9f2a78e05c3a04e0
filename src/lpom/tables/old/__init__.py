"""A table as a learning task: columns become inputs, some the target, outputs answers.

Everything learnt from a table is plain state that goes to JSON and back exactly, so that a model
file can hold it.
"""

from lpom.tables.old.columns import Column, Locale
from lpom.tables.old.features import Features, TableEncoder
from lpom.tables.old.plan import ColumnPlan
from lpom.tables.old.targets import Classes, Quantity, Several, Target, fit_target, target_from_json

__all__ = [
    "Classes",
    "Column",
    "ColumnPlan",
    "Features",
    "Locale",
    "Quantity",
    "Several",
    "TableEncoder",
    "Target",
    "fit_target",
    "target_from_json",
]
