"""Stand-ins for tensors while a model is traced."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

from torch import fx


class ShapedProxy(fx.Proxy):
    """A proxy that knows its sizes: numbers, or proxies where they follow the batch's."""

    @property
    def shape(self) -> Any:
        sizes = self.tracer.sizes(self.node)  # type: ignore[attr-defined]
        if sizes is None:
            return self.tracer.create_proxy("call_function", getattr, (self, "shape"), {})
        return tuple(
            a if a == b else self.tracer.create_proxy("call_method", "size", (self, d), {})
            for d, (a, b) in enumerate(sizes)
        )

    def size(self, dim: int | None = None) -> Any:
        if self.tracer.sizes(self.node) is None:  # type: ignore[attr-defined]
            args = (self,) if dim is None else (self, dim)
            return self.tracer.create_proxy("call_method", "size", args, {})
        return self.shape if dim is None else self.shape[dim]

    @property
    def ndim(self) -> Any:
        sizes = self.tracer.sizes(self.node)  # type: ignore[attr-defined]
        if sizes is None:
            return self.tracer.create_proxy("call_function", getattr, (self, "ndim"), {})
        return len(sizes)

    def dim(self) -> Any:
        return self.ndim

    @property
    def T(self) -> Any:
        return self.t()

    @property
    def mT(self) -> Any:
        return self.transpose(-2, -1)

    def __len__(self) -> int:
        parts = self.tracer.parts(self.node)  # type: ignore[attr-defined]
        size = self.size(0) if parts is None else parts
        if isinstance(size, int):
            return size
        raise fx.proxy.TraceError("len() of a tensor is the size of the batch")

    def __iter__(self) -> Iterator[Any]:
        sizes = self.tracer.sizes(self.node)  # type: ignore[attr-defined]
        if sizes is not None and sizes[0][0] == sizes[0][1]:
            return iter([operator.getitem(self, i) for i in range(sizes[0][0])])
        parts = self.tracer.parts(self.node)  # type: ignore[attr-defined]
        if parts is not None:
            return iter([operator.getitem(self, i) for i in range(parts)])
        return super().__iter__()
