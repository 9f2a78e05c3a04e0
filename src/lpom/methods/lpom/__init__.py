"""Lifted Proximal Operator Machines (Li, Fang, Lin, AAAI 2019)."""

from lpom.methods.lpom.method import LPOM, LPOMState

__all__ = ["LPOM", "LPOMState"]
