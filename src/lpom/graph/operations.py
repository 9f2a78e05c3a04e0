"""What torch's operations do to a state: one table, by the bare name of the operation.

``F.relu``, ``torch.relu``, ``x.relu()`` and ``x.relu_()`` all have the name "relu". An operation
that is affine in the tensors it is given is named here; one that is not is an activation, which
`lpom.activations.from_call` knows, or can't be trained. A new kind of edge is a new name in one of
these sets.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.nn.utils import parametrize

#: Products of two tensors; where both depend on states, each factor becomes a state of its own.
PRODUCTS = frozenset(
    "mul multiply matmul mm bmm einsum outer linear bilinear conv1d conv2d conv3d conv_transpose1d "
    "conv_transpose2d conv_transpose3d addmm baddbmm addcmul tensordot inner mv".split()
)
#: Those in which a weight matrix meets a state: one to an edge.
WEIGHTED = frozenset(
    "linear bilinear conv1d conv2d conv3d "
    "conv_transpose1d conv_transpose2d conv_transpose3d".split()
)
#: Data is only moved: doing it twice costs nothing.
VIEWS = frozenset(
    "flatten unflatten reshape view view_as permute transpose swapaxes movedim t squeeze unsqueeze "
    "expand expand_as contiguous getitem select narrow chunk split tensor_split unbind identity "
    "dropout_off to float double type_as".split()
)
#: Views that are several pieces of the data.
SPLITS = frozenset("chunk split tensor_split unbind".split())
#: Affine once what the feed-forward pass chose is given: masks, statistics, places of maxima.
SWITCHES = frozenset(
    "dropout dropout1d dropout2d dropout3d alpha_dropout feature_alpha_dropout feature_dropout "
    "batch_norm max_pool1d max_pool2d max_pool3d adaptive_max_pool1d adaptive_max_pool2d "
    "adaptive_max_pool3d amax".split()
)
#: Affine in every tensor together.
SUMS = frozenset(
    "add radd sub subtract rsub neg negative cat concat concatenate stack hstack vstack pad "
    "avg_pool1d avg_pool2d avg_pool3d adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d "
    "mean sum cumsum interpolate upsample pixel_shuffle pixel_unshuffle channel_shuffle unfold "
    "fold roll flip repeat repeat_interleave tile index_select gather masked_fill where tril triu "
    "lerp embedding embedding_bag clone zero_pad".split()
)
#: Affine in the first tensor while the second is a constant.
QUOTIENTS = frozenset("truediv div divide true_divide".split())
#: Sizes and kinds of tensors, not their values.
SHAPES = frozenset("getattr size dim numel ndimension len".split())
#: New tensors that depend on sizes at most.
CONSTANTS = frozenset(
    "zeros ones full empty arange eye linspace new_zeros new_ones new_full new_empty new_tensor "
    "zeros_like ones_like full_like empty_like detach bool long int".split()
)

AFFINE = PRODUCTS | VIEWS | SWITCHES | SUMS | QUOTIENTS

#: Modules of torch that do one of these operations.
MODULES: dict[type[nn.Module], str] = {
    nn.Linear: "linear",
    nn.Bilinear: "bilinear",
    nn.Conv1d: "conv1d",
    nn.Conv2d: "conv2d",
    nn.Conv3d: "conv3d",
    nn.ConvTranspose1d: "conv_transpose1d",
    nn.ConvTranspose2d: "conv_transpose2d",
    nn.ConvTranspose3d: "conv_transpose3d",
    nn.Flatten: "flatten",
    nn.Unflatten: "unflatten",
    nn.Identity: "identity",
    nn.Embedding: "embedding",
    nn.EmbeddingBag: "embedding_bag",
    nn.Upsample: "interpolate",
    nn.UpsamplingNearest2d: "interpolate",
    nn.UpsamplingBilinear2d: "interpolate",
    nn.PixelShuffle: "pixel_shuffle",
    nn.PixelUnshuffle: "pixel_unshuffle",
    nn.ChannelShuffle: "channel_shuffle",
    nn.Unfold: "unfold",
    nn.Fold: "fold",
    nn.Dropout: "dropout",
    nn.Dropout1d: "dropout1d",
    nn.Dropout2d: "dropout2d",
    nn.Dropout3d: "dropout3d",
    nn.AlphaDropout: "alpha_dropout",
    nn.FeatureAlphaDropout: "feature_alpha_dropout",
    nn.BatchNorm1d: "batch_norm",
    nn.BatchNorm2d: "batch_norm",
    nn.BatchNorm3d: "batch_norm",
    **{
        getattr(nn, f"{kind}{d}d"): f"{name}{d}d"
        for d in (1, 2, 3)
        for kind, name in (
            ("AvgPool", "avg_pool"),
            ("AdaptiveAvgPool", "adaptive_avg_pool"),
            ("MaxPool", "max_pool"),
            ("AdaptiveMaxPool", "adaptive_max_pool"),
        )
    },
    **{
        getattr(nn, f"{kind}Pad{d}d"): "pad"
        for d in (1, 2, 3)
        for kind in ("Zero", "Constant", "Reflection", "Replication", "Circular")
        if hasattr(nn, f"{kind}Pad{d}d")
    },
}


def module_name(module: nn.Module) -> str | None:
    """The operation that a torch module does, where its class does what torch's own does."""
    for kind, name in MODULES.items():
        if isinstance(module, kind) and type(module).forward is kind.forward:
            return name
    return None


def is_computed(module: nn.Module) -> bool:
    """Whether a weight is made from other parameters: by weight_norm, pruning and the like.

    It is not looked at: that of spectral_norm changes whenever it is.
    """
    given = isinstance(vars(module).get("weight"), Tensor)  # as older ways leave it
    return given or parametrize.is_parametrized(module, "weight")


def call_name(target: str | Callable[..., Any]) -> str:
    """The bare name of a function or method: without the underscore of in-place forms."""
    name = target if isinstance(target, str) else getattr(target, "__name__", str(target))
    if name.startswith("__") and name.endswith("__"):
        return name.strip("_")
    return {"iadd": "add", "isub": "sub", "imul": "mul", "itruediv": "truediv"}.get(
        name, name.rstrip("_")
    )
