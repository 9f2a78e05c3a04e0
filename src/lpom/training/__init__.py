"""Training: :func:`fit`, the one loop behind it, where batches come from, what is recorded."""

from lpom.training.callbacks import Callback, EarlyStopping
from lpom.training.checkpoint import Checkpoint
from lpom.training.fit import fit
from lpom.training.history import Epoch, History, Result
from lpom.training.score import evaluate
from lpom.training.trainer import Trainer

__all__ = [
    "Callback",
    "Checkpoint",
    "EarlyStopping",
    "Epoch",
    "History",
    "Result",
    "Trainer",
    "evaluate",
    "fit",
]
