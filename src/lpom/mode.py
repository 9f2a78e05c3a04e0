"""The mode under which a model runs: torch reports each call, and what bends goes to the rule."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from lpom.activations.base import apply
from lpom.bending import KNOWN, OPENED, ours
from lpom.exceptions import UntrainableError
from lpom.rule import ReLU, Rule


class Lifting(TorchFunctionMode):
    """While it is on, what bends is answered by the rule; all else is called as it is."""

    def __init__(self, rule: Rule, plan: Any) -> None:
        super().__init__()
        self.rule, self.plan = rule, plan
        self.lifted: dict[str, int] = {}
        self.modules: list[str] = []
        self.rectified: dict[int, _Rectified] = {}  # by where relu(z) lies in memory
        self.saved: dict[int, list[weakref.ref[_Saved]]] = {}  # by their memory
        self.hooks = None if torch.compiler.is_compiling() else _saving_hooks()

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is apply:
            return ours(self, *args)
        name = getattr(func, "__name__", "")
        if self.saved and _writes(name, args, kwargs):
            self.spare(kwargs.get("out", args[0] if args else None))
        known = KNOWN.get(name)
        if known is None:
            written = OPENED.get(func)
            if written is not None and _differentiates(args, kwargs):
                with self:
                    return written(*args, **kwargs)
            if func is Tensor.unflatten:  # a call of super(), which torch.compile can't follow
                func = torch.unflatten
            return func(*args, **kwargs)
        if not _differentiates(args, kwargs):
            return func(*args, **kwargs)
        handler, name = known
        return handler(self, func, name, args, kwargs)

    @contextmanager
    def sparing(self) -> Iterator[None]:
        """Look after what autograd saves for the way back.

        Of a rectifier z alone is kept: whoever saves ``relu(z)`` is given it anew. And what is
        saved may be written over in place, as it may after functions of which torch saves the
        result alone, and the rule the argument: `spare` copies it then.
        """
        if self.hooks is not None:  # somebody else's: they stay in charge
            yield
            return

        def pack(saved: Tensor) -> Any:
            found = self.rectified.get(saved.data_ptr())
            if found is not None:
                x = found.x()  # while it lives nobody else has its memory
                if x is not None and x._version == found.version and _alike(x, saved):
                    return found
            return self._keep(saved)

        def unpack(packed: Any) -> Tensor:
            if isinstance(packed, _Rectified):
                return packed.z.value().relu()
            kept: Tensor = packed.value()
            return kept

        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            yield

    def rectify(self, z: Tensor, rule: Rule) -> Tensor:
        x: Tensor = ReLU.apply(z, rule)  # type: ignore[no-untyped-call]
        if not torch.compiler.is_compiling():
            kept = self._keep(z.detach())
            self.rectified[x.data_ptr()] = _Rectified(kept, weakref.ref(x), x._version)
        return x

    def _keep(self, tensor: Tensor) -> _Saved:
        saved = _Saved(tensor, tensor._version)
        self.saved.setdefault(_memory(tensor), []).append(weakref.ref(saved))
        return saved

    def spare(self, target: Any) -> None:
        """Copy what autograd has saved of a tensor that is about to be written over."""
        if not isinstance(target, Tensor):
            return
        for reference in self.saved.pop(_memory(target), ()):
            saved = reference()
            if saved is not None and saved.tensor._version == saved.version:
                saved.tensor = saved.tensor.detach().clone()
                saved.version = saved.tensor._version

    def rule_for(self, name: str, kind: str) -> Rule:
        """The rule of a function, which is counted."""
        if torch.compiler.is_compiling():
            return self.rule if self.plan is None else self.plan.rule_of(name, kind)
        _check_recomputing(self.hooks)
        self.lifted[name] = self.lifted.get(name, 0) + 1
        return self.rule if self.plan is None else self.plan.rule_of(name, kind, *self.modules[-1:])


class _Saved:
    """A tensor that the way back needs, as it is now."""

    __slots__ = ("__weakref__", "tensor", "version")

    def __init__(self, tensor: Tensor, version: int) -> None:
        self.tensor, self.version = tensor, version

    def value(self) -> Tensor:
        if self.tensor._version != self.version:
            raise RuntimeError(
                f"a tensor of shape {tuple(self.tensor.shape)} that the way back needs was written "
                "over in place after it was used; write to a new tensor."
            )
        return self.tensor


def _memory(tensor: Tensor) -> int:
    if tensor.layout != torch.strided:
        return 0
    return tensor.untyped_storage().data_ptr()


def _writes(name: str, args: Any, kwargs: Mapping[str, Any]) -> bool:
    """Whether a call of torch writes over its first argument or ``out``."""
    if name[-1:] == "_":
        return not name.startswith("__") or name in _WRITING
    if "inplace" in kwargs or "out" in kwargs:
        return bool(kwargs.get("inplace")) or kwargs.get("out") is not None
    return len(args) > 3 and args[3] is True and name.endswith("dropout")


_WRITING = frozenset(
    f"__{name}__"
    for name in "setitem iadd isub imul itruediv ifloordiv imod ipow imatmul iand ior ixor".split()
)


class _Rectified(NamedTuple):
    """``x = relu(z)``, to be computed again when it is needed."""

    z: _Saved
    x: weakref.ref[Tensor]
    version: int


def _alike(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and a.stride() == b.stride() and a.dtype == b.dtype


def _differentiates(args: Any, kwargs: Any) -> bool:
    """Whether a gradient will come back through the call."""
    if not torch.is_grad_enabled():
        return False
    for value in (*args, *kwargs.values()):
        if isinstance(value, Tensor):
            if value.requires_grad:
                return True
        elif isinstance(value, list | tuple):
            if any(isinstance(v, Tensor) and v.requires_grad for v in value):
                return True
    return False


def _saving_hooks() -> Any:
    """What handles the tensors that autograd keeps, if anything does: checkpointing, say."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True)


def _check_recomputing(outside: Any) -> None:
    """Raise where the model has a part of itself run again on the way back: unlifted, there."""
    hooks = _saving_hooks()
    if hooks == outside:
        return
    if hooks is not None and hooks[0].__module__ == "torch.utils.checkpoint":
        raise UntrainableError(
            "the lifted model calls torch.utils.checkpoint, which runs a part of it again in "
            "backward(), where nothing is lifted: its gradients would be wrong. Turn activation "
            "checkpointing off, or lift the part inside, checkpoint(lpom.lift(part), x)."
        )
