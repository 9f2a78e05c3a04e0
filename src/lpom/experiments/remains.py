"""What penalties have left of a network, measured."""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lpom import saving
from lpom.compacting import compact

#: Batches that the two networks predict in turn, and rows of each.
ROUNDS, ROWS = 30, 1000


@torch.no_grad()
def remains(model: nn.Module, inputs: Tensor) -> dict[str, Any]:
    """Shares of a trained network, as plain numbers.

    ``nonzero``: of the numbers in matrices and kernels, those that are not zero. ``weights``,
    ``multiplications``: of the compacted network to the whole one. ``bytes``: of the compacted
    network's model file to the numbers of the whole one. ``time``: for a batch of ``inputs`` by
    the compacted network to the whole one, the two in turn, by the medians.
    """
    matrices = [p for p in model.parameters() if p.ndim > 1]
    nonzero = sum(int(torch.count_nonzero(p)) for p in matrices)
    small, report = compact(model, inputs[:1])
    before, after = report.before, report.after
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.safetensors.gz"
        saving.save(small.state_dict(), path)
        written = path.stat().st_size
    assert before.multiplications is not None and after.multiplications is not None
    return {
        "nonzero": nonzero / sum(p.numel() for p in matrices),
        "weights": after.weights / before.weights,
        "multiplications": after.multiplications / before.multiplications,
        "bytes": written / before.bytes,
        "time": _time_ratio(small.eval(), model.eval(), inputs[:ROWS]),
    }


def _time_ratio(small: nn.Module, whole: nn.Module, inputs: Tensor) -> float:
    seconds: dict[nn.Module, list[float]] = {small: [], whole: []}
    for k in range(ROUNDS + 2):
        for model, taken in seconds.items():
            begun = time.process_time()
            model(inputs)
            if k >= 2:  # the first ones reserve memory
                taken.append(time.process_time() - begun)
    return statistics.median(seconds[small]) / statistics.median(seconds[whole])
