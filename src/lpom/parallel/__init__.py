"""Layers at the same time and rows side by side, over ``torch.distributed``."""

from lpom.parallel.pipeline import Alone, Pipeline, Team
from lpom.parallel.ranks import Parallel, Ranks, own_cores

__all__ = ["Alone", "Parallel", "Pipeline", "Ranks", "Team", "own_cores"]
