"""Layers at the same time and rows side by side, over ``torch.distributed``."""

from lpom.parallel.pipeline import Pipeline
from lpom.parallel.ranks import Parallel, Ranks, own_cores

__all__ = ["Parallel", "Pipeline", "Ranks", "own_cores"]
