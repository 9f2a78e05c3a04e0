"""Tables as they come: columns to inputs of a network (`TableEncoder`), and what is predicted."""

from lpom.tables.encoder import TableEncoder
from lpom.tables.target import Target

__all__ = ["TableEncoder", "Target"]
