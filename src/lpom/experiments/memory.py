"""How much memory a step of a method takes: the bytes of the tensors it makes."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lpom.methods import Batch, Method, Problem


def peak_bytes(method: Method[Any], problem: Problem, batch: Batch) -> int:
    """Most bytes alive at once in the first two steps, beyond the data and the weights.

    The second step is where variables that a method keeps meet those that replace them. The
    weights of ``problem`` move: give it a copy.
    """
    live = LiveTensors()
    with live:
        state = method.init(problem)
        for _ in range(2):
            method.step(problem, batch, state)
    return live.peak


class LiveTensors(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of all storages that operations make, until they are freed.

    What an operation allocates for itself and frees before it returns is not seen.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.held = self.peak = 0
        self._known: dict[int, weakref.ref[Any]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {t.untyped_storage().data_ptr() for t in _tensors((args, kwargs))}
        made = func(*args, **(kwargs or {}))
        for tensor in _tensors(made):
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in given | self._known.keys():
                self._hold(storage.data_ptr(), storage)
        return made

    def _hold(self, address: int, storage: torch.UntypedStorage) -> None:
        size = storage.nbytes()
        self.held += size
        self.peak = max(self.peak, self.held)

        def free(_: Any) -> None:
            self.held -= size
            del self._known[address]

        self._known[address] = weakref.ref(storage, free)


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]
