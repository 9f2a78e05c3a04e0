"""What of a model was not lifted, read off autograd's graph: nothing keeps a derivative unseen."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves

from lpom import attention, recurrent
from lpom.bending import WHOLE
from lpom.rows import Norm, Rows, Softmax
from lpom.rule import Device, Jump, Pointwise, ReLU

#: Operations that are affine in each tensor, or once a choice (of a maximum, a mask) is given.
_EDGES = frozenset(
    "AccumulateGrad Add Addbmm Addcmul Addmm Addmv Addr Alias Amax Amin Aminmax AsStrided Baddbmm "
    "Bmm Cat Clone Complex Conj ConjPhysical ConstantPadNd Copy CopyBackwards CopySlices Cross "
    "Cummax Cummin Cumsum Detach Diag DiagEmbed Diagonal Dot Embedding EmbeddingBag Expand Fill "
    "Flatten Flip Fold Gather GroupedMm Im2Col Col2Im Imag Kthvalue Lerp LiftFresh Linear Max "
    "Mean Median Min Mm Mode Movedim Mul MulConstant Mv Nansum Narrow NativeDropout Neg Nonzero "
    "Permute Prod "
    "Put Real Renorm Repeat Resolve Roll Rot90 Rsub SegmentReduce Select SelectScatter Slice "
    "SliceScatter Sort SparseMm Split SplitWithSizes Square Squeeze Stack Sub Sum SumToSize T "
    "Take Tensordot ToCopy Topk Trace Transpose Tril Triu Unbind Unflatten Unfold UnsafeSplit "
    "UnsafeView Unsqueeze Values Var VarMean Where Zero Zeros".split()
)
#: The same, by how their names begin.
_FAMILIES = (
    "Adaptive", "AvgPool", "Convolution", "CudnnBatch", "CudnnConv", "Fft", "FractionalMaxPool",
    "GridSampler", "Index", "Masked", "MaxPool", "MaxUnpool", "MiopenBatch", "Mkldnn",
    "NativeBatch", "PixelShuffle", "PixelUnshuffle", "Reflection", "Replication", "Reshape",
    "Scatter", "SlowConv",
    "ThnnConv", "Upsample", "View",
)  # fmt: skip
#: Losses, which a model may bring with it.
_LOSSES = frozenset(
    "NllLoss NllLoss2D CrossEntropyLoss MseLoss SmoothL1Loss HuberLoss BinaryCrossEntropy "
    "BinaryCrossEntropyWithLogits KlDiv SoftMarginLoss MultiMarginLoss MultilabelMarginLoss "
    "CtcLoss L1Loss".split()
)
#: The rule's own.
_RULES = (Pointwise, ReLU, Device, Jump, Rows, Softmax, Norm)
_OURS = (*_RULES, attention.Attention, *recurrent.FUNCTIONS)


def audit(outputs: Any) -> dict[str, str]:
    """What bends in autograd's graph below the outputs and was not lifted, and why."""
    kept: dict[str, str] = {}
    pending: list[tuple[Any, str]] = [
        (t.grad_fn, "")
        for t in tree_leaves(_fields(outputs))
        if isinstance(t, Tensor) and t.grad_fn is not None
    ]
    seen = set()
    while pending:
        node, above = pending.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        name = node.name()
        stem = name.rpartition("::")[2].rstrip("0123456789").removesuffix("Backward")
        pending += [(below, stem) for below, _ in node.next_functions]
        made = getattr(node, "_forward_cls", None)
        if made in _OURS or stem in _EDGES or stem in _LOSSES or stem.startswith(_FAMILIES):
            continue
        if stem == "LogSoftmax" and above in _LOSSES:  # the loss is no part of the network
            continue
        if stem in ("Div", "Pow") and _affine(node, stem):
            continue
        if made is not None:
            kept.setdefault(made.__name__, "it is an autograd function with a backward of its own")
        else:
            kept.setdefault(
                _readable(stem), "lpom does not know it, or it ran where calls can't be seen"
            )
    return kept


def _fields(outputs: Any) -> Any:
    """What holds the tensors of an output of any class."""
    if isinstance(outputs, Mapping):
        return dict(outputs)
    if hasattr(outputs, "__dict__") and not isinstance(outputs, Tensor):
        return list(vars(outputs).values())
    return outputs


def _affine(node: Any, stem: str) -> bool:
    """Whether a quotient has a constant below, or a power is a product."""
    if stem == "Div":
        return len(node.next_functions) < 2 or node.next_functions[1][0] is None
    return getattr(node, "_saved_exponent", None) in WHOLE


def _readable(stem: str) -> str:
    words = "".join(f"_{c.lower()}" if c.isupper() else c for c in stem)
    return words.lstrip("_")
