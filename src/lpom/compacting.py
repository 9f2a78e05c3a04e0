"""compact(): what penalties have emptied is really taken out of a network."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lpom.activations import Elementwise, from_module, is_activation
from lpom.modes import evaluating

_Layer = nn.Linear | nn.Conv2d
#: Modules that treat every channel alike and keep a constant what it is.
_PASSING = (
    nn.Identity,
    nn.Dropout,
    nn.Dropout1d,
    nn.Dropout2d,
    nn.MaxPool2d,
    nn.AdaptiveMaxPool2d,
    nn.AdaptiveAvgPool2d,
)


@dataclass(frozen=True)
class Size:
    """What a network holds and does: parameters, their bytes, products of one sample.

    ``multiplications`` is None where that cannot be said without an example of the data.
    """

    weights: int
    bytes: int
    multiplications: int | None


@dataclass(frozen=True)
class Report:
    """A network before and after, and what was taken out of which layer."""

    before: Size
    after: Size
    removed: dict[str, int]  # units or channels, by the name of the layer
    ranks: dict[str, int]  # of the layers that were split in two

    def __str__(self) -> str:
        lines = []
        for what in ("weights", "bytes", "multiplications"):
            a, b = getattr(self.before, what), getattr(self.after, what)
            known = a is not None and b is not None
            text = f"{a:,} -> {b:,} ({b / max(a, 1):.1%})" if known else "not known"
            lines.append(f"{what}: {text}")
        lines += [f"{name}: {n} units removed" for name, n in self.removed.items()]
        lines += [f"{name}: split at rank {rank}" for name, rank in self.ranks.items()]
        return "\n".join(lines)


@torch.no_grad()
def compact(model: nn.Module, example: Tensor | None = None) -> tuple[nn.Module, Report]:
    r"""A smaller network that predicts the same, to rounding, in evaluation; and a report.

    Units and channels between two layers of an ``nn.Sequential`` go if no weight leads to them
    (what they always say, :math:`\phi(b)`, is added to the bias above) or from them. Between the
    two may stand batch norm, elementwise activations, dropout, pooling and flattening. A Linear
    layer :math:`W = U V` of rank r becomes two where that leaves fewer weights than W has. Layers
    of other classes, with hooks or with weights that are computed are left alone, and so are those
    inside of torch's own modules. The model itself stays as it is; its sequences are taken to be
    called as a whole, and its layers to be called.

    Parameters
    ----------
    example : a batch of inputs, from which the multiplications of convolutions are counted; with
        it is also checked that the small network says the same, unless it has jumps, where
        rounding may tip a unit over

    Raises
    ------
    ValueError
        If it does not.
    """
    try:
        made = copy.deepcopy(model)
    except RuntimeError as error:  # weights that are made of others
        raise ValueError(
            f"the model can't be copied ({error}). Weights that torch.nn.utils.prune has masked "
            "are plain again after prune.remove(layer, 'weight')."
        ) from error
    names = {module: name for name, module in made.named_modules()}
    uses = Counter(p for _, p in made.named_parameters(remove_duplicate=False))
    shared = {p for p, n in uses.items() if n > 1}
    removed: dict[str, int] = {}
    sequences = [module for module in made.modules() if isinstance(module, nn.Sequential)]
    before = -1
    while before != sum(removed.values()):  # what goes may leave others with nothing above them
        before = sum(removed.values())
        for sequence in sequences:
            for below, between, above in _pairs(sequence, shared):
                if count := _remove(below, between, above):
                    removed[names[below]] = removed.get(names[below], 0) + count
    ranks: dict[str, int] = {}
    for name, module in list(made.named_modules()):
        owner_name, _, last = name.rpartition(".")
        owner = made.get_submodule(owner_name)
        plain = type(module) is nn.Linear and _is_plain(module) and _calls(owner)
        if not plain or shared.intersection(module.parameters()):
            continue
        assert isinstance(module, nn.Linear)
        if (split := _split(module)) is not None:
            ranks[name] = split[0].out_features  # type: ignore[assignment]
            if name:
                setattr(owner, last, split)
            else:
                made = split
    if example is not None and not any(map(_jumps, model.modules())):
        _check_same(model, made, example)
    return made, Report(size(model, example), size(made, example), removed, ranks)


def _check_same(model: nn.Module, made: nn.Module, example: Tensor) -> None:
    with evaluating(model), evaluating(made):
        wanted, found = model(example), made(example)
    apart, largest = float((found - wanted).abs().max()), float(wanted.abs().max())
    if not apart <= 1e4 * torch.finfo(wanted.dtype).eps * max(largest, 1.0):
        raise ValueError(
            f"the small network would say something else (by {apart:.3g} on the example): the "
            "model does more with its layers than to call them one after the other. Compact the "
            "sequences in it one by one."
        )


def _jumps(module: nn.Module) -> bool:
    return isinstance(module, Elementwise) and module.activation.jumps


def _is_plain(layer: nn.Module) -> bool:
    """Whether it does what torch's class does, with weights of its own, and nobody listens."""
    own = "weight" in layer._parameters
    return own and not (layer._forward_hooks or layer._forward_pre_hooks)


def _calls(owner: nn.Module) -> bool:
    """Whether a module calls its layers; torch's own read their weights here and there."""
    inside = type(owner).__module__.startswith("torch.nn")
    return not inside or isinstance(
        owner, nn.Linear | nn.Sequential | nn.ModuleList | nn.ModuleDict
    )


def size(model: nn.Module, example: Tensor | None = None) -> Size:
    """Count a network's parameters, their bytes, and the products that one sample takes."""
    parameters = list(model.parameters())
    count = sum(p.numel() for p in parameters)
    bytes_ = sum(p.numel() * p.element_size() for p in parameters)
    return Size(count, bytes_, _multiplications(model, example))


def _multiplications(model: nn.Module, example: Tensor | None) -> int | None:
    layers = [module for module in model.modules() if isinstance(module, _Layer)]
    if example is None:
        known = not any(isinstance(layer, nn.Conv2d) for layer in layers)
        return sum(layer.weight.numel() for layer in layers) if known else None
    counts: list[int] = []

    def count(layer: nn.Module, _: object, output: Tensor) -> None:
        assert isinstance(layer, _Layer)
        places = output.numel() // len(output) // layer.weight.shape[0]
        counts.append(places * layer.weight.numel())

    with ExitStack() as hooks, evaluating(model):
        for layer in layers:
            hooks.callback(layer.register_forward_hook(count).remove)
        model(example[:1])
    return sum(counts)


def _pairs(
    sequence: nn.Sequential, shared: set[nn.Parameter]
) -> Iterator[tuple[_Layer, list[nn.Module], _Layer]]:
    """Two layers with nothing between them but what treats units one by one."""
    below: _Layer | None = None
    between: list[nn.Module] = []
    for module in sequence:
        if shared.intersection(module.parameters()):
            below = None
        elif (
            type(module) in (nn.Linear, nn.Conv2d)
            and _is_plain(module)
            and getattr(module, "groups", 1) == 1
        ):
            assert isinstance(module, _Layer)
            if below is not None and _is_pair(below, between, module):
                yield below, between, module
            below, between = module, []
        elif below is not None and _unitwise(module):
            between.append(module)
        else:
            below = None


def _is_pair(below: _Layer, between: list[nn.Module], above: _Layer) -> bool:
    """Whether the units of one are those that the other reads, each with all its places."""
    n, read, flat = below.weight.shape[0], above.weight.shape[1], False
    for module in between:
        flat = flat or isinstance(module, nn.Flatten)
        norm = isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d)
        if norm and module.num_features != (read if flat else n):  # of tokens
            return False
    if isinstance(below, nn.Conv2d) and isinstance(above, nn.Linear):
        return flat and read % n == 0
    return read == n  # not tokens that flattening put beside each other


def _unitwise(module: nn.Module) -> bool:
    if isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d):
        return module.running_mean is not None
    if isinstance(module, nn.Flatten):
        return (module.start_dim, module.end_dim) == (1, -1)
    if isinstance(module, nn.AvgPool2d):
        plain = module.padding in (0, (0, 0)) and not module.ceil_mode
        return plain and module.divisor_override is None
    if isinstance(module, _PASSING):
        return True
    try:
        return is_activation(module) and from_module(module).elementwise
    except ValueError:  # known, but not monotone: GELU, SiLU
        return False


def _remove(below: _Layer, between: list[nn.Module], above: _Layer) -> int:
    """Take the dead units between two layers out, in place; how many there were."""
    n = below.weight.shape[0]
    silent = below.weight.flatten(1).abs().amax(1) == 0
    times = above.weight.shape[1] // n  # places of a channel that flattening made units
    unread = above.weight.movedim(1, 0).reshape(n, -1).abs().amax(1) == 0
    said = _constants(below, between, times)
    padded = isinstance(above, nn.Conv2d) and above.padding not in (0, (0, 0), "valid")
    if padded:  # a constant is none where the padding begins
        silent &= said.reshape(n, times).abs().amax(1) == 0
    gone = silent | unread
    if bool(gone.all()):
        gone[0] = False  # a layer of nothing is none
    if not bool(gone.any()):
        return 0
    folded = (gone & ~unread).repeat_interleave(times)
    _fold(above, torch.where(folded, said, 0))
    kept = ~gone
    below.weight = nn.Parameter(below.weight[kept], below.weight.requires_grad)
    if below.bias is not None:
        below.bias = nn.Parameter(below.bias[kept], below.bias.requires_grad)
    for module in between:
        if isinstance(module, nn.Flatten):
            kept = kept.repeat_interleave(times)
        elif isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d):
            _thin(module, kept)
    kept = (~gone).repeat_interleave(times)
    above.weight = nn.Parameter(above.weight[:, kept], above.weight.requires_grad)
    _set_sizes(below)
    _set_sizes(above)
    return int(gone.sum())


def _constants(below: _Layer, between: list[nn.Module], times: int) -> Tensor:
    """What every unit above says if nothing but its bias comes in."""
    said = below.weight.new_zeros(below.weight.shape[0]) if below.bias is None else below.bias
    for module in between:
        if isinstance(module, nn.Flatten):
            said = said.repeat_interleave(times)
        elif isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d):
            assert module.running_mean is not None and module.running_var is not None
            said = (said - module.running_mean) / (module.running_var + module.eps).sqrt()
            if module.weight is not None:
                said = said * module.weight + module.bias
        elif is_activation(module):
            said = module(said[None])[0]
    return said


def _fold(above: _Layer, constants: Tensor) -> None:
    """Add what constant inputs bring to the bias of a layer."""
    share = above.weight.flatten(2).sum(2) if isinstance(above, nn.Conv2d) else above.weight
    change = share @ constants
    if above.bias is not None:
        above.bias.add_(change)
    elif bool((change != 0).any()):
        above.bias = nn.Parameter(change)


def _thin(norm: nn.BatchNorm1d | nn.BatchNorm2d, kept: Tensor) -> None:
    norm.num_features = int(kept.sum())
    if norm.weight is not None:
        norm.weight = nn.Parameter(norm.weight[kept], norm.weight.requires_grad)
        norm.bias = nn.Parameter(norm.bias[kept], norm.bias.requires_grad)
    assert norm.running_mean is not None and norm.running_var is not None
    norm.running_mean, norm.running_var = norm.running_mean[kept], norm.running_var[kept]


def _set_sizes(layer: _Layer) -> None:
    outputs, inputs = layer.weight.shape[:2]
    if isinstance(layer, nn.Linear):
        layer.out_features, layer.in_features = outputs, inputs
    else:
        layer.out_channels, layer.in_channels = outputs, inputs


def _split(layer: nn.Linear) -> nn.Sequential | None:
    """Two layers in place of one of low rank, if they hold fewer weights than it has."""
    W = layer.weight
    U, S, V = torch.linalg.svd(W.double(), full_matrices=False)
    rounding = 10 * max(W.shape) * torch.finfo(W.dtype).eps * S[0]
    rank = max(int((rounding < S).sum()), 1)
    if rank * sum(W.shape) >= int(torch.count_nonzero(W)):
        return None
    options: dict[str, Any] = {"dtype": W.dtype, "device": W.device}
    lower = nn.Linear(layer.in_features, rank, bias=False, **options)
    upper = nn.Linear(rank, layer.out_features, layer.bias is not None, **options)
    root = S[:rank].sqrt()
    lower.weight.copy_(root[:, None] * V[:rank])
    upper.weight.copy_(U[:, :rank] * root)
    if layer.bias is not None:
        upper.bias.copy_(layer.bias)
    return nn.Sequential(lower, upper).train(layer.training)
