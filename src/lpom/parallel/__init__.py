"""Layers at the same time and rows side by side, over ``torch.distributed``."""

from lpom.parallel.pipeline import Pipeline, Team
from lpom.parallel.ranks import Parallel, Ranks, own_cores

__all__ = ["Parallel", "Pipeline", "Ranks", "Team", "own_cores"]
