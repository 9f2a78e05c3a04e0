"""Trained networks for other programs: ONNX for any network, NIR for networks of steps."""

from __future__ import annotations

import math
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lpom.activations import Identity, Sign, Step, from_module, is_activation
from lpom.checks import check_choice, require
from lpom.exceptions import LPOMError
from lpom.graph.tracing import unwrapped
from lpom.modes import evaluating

_ONNX = "onnx onnxruntime onnxscript"  # to install

#: Rows that may differ from torch's where a jump turns rounding into another state.
TURNED = 0.01


class ExportError(LPOMError, ValueError):
    """A file that cannot be written, or that does not say what the network says."""


def to_onnx(model: Any, path: str | Path, example: Any) -> Path:
    """Write a network as ONNX, for batches of any size, and run it to see that it is the same.

    Outputs for ``example`` must be torch's to rounding, by onnxruntime on the processor; of a
    network with jumps one row in a hundred may fall on the other side of one. Weights that are
    whole numbers times a scale of their channel, as `lpom.penalties` of few levels leave them, are
    written as 8-bit integers and scales.

    Parameters
    ----------
    model : a module, one of `lpom.lift` too, or a trained estimator
    example : a batch of inputs
    """
    model, path, example = _given(model, path, example)
    require("onnxscript", "writing ONNX", _ONNX)
    onnx = require("onnx", "writing ONNX", _ONNX)
    runtime = require("onnxruntime", "checking an ONNX file", _ONNX)
    with evaluating(model):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of torch's exporter, on its own doings
            torch.onnx.export(
                model,
                (example,),
                path,
                dynamo=True,
                external_data=False,
                input_names=["inputs"],
                output_names=["outputs"],
                dynamic_shapes=({0: torch.export.Dim("rows", min=1)},),
                verbose=False,
            )
        _write_integers(onnx, path)
        with torch.no_grad():
            wanted = model(example).cpu().numpy()
    session = runtime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    (found,) = session.run(None, {"inputs": example.detach().cpu().numpy()})
    apart = ~np.isclose(found, wanted, rtol=1e-3, atol=1e-4 * max(float(abs(wanted).max()), 1e-6))
    share = float(apart.reshape(len(apart), -1).any(axis=1).mean())
    if share > TURNED:
        raise ExportError(
            f"{path} was written, but onnxruntime gives other outputs than torch for {share:.1%} "
            "of the rows of the example; do not use it."
        )
    return path


def _given(model: Any, path: Any, example: Any) -> tuple[nn.Module, Path, Tensor]:
    """A plain module, a path and a batch in the module's dtype."""
    found = model.to_torch() if hasattr(model, "to_torch") else model
    if not isinstance(found, nn.Module) or not isinstance(path, str | Path):
        raise TypeError(
            "expected a torch module or a trained estimator, then a path, then a batch of inputs; "
            f"got {type(model).__name__}, {type(path).__name__} and {type(example).__name__}."
        )
    found = unwrapped(found)
    like = next(found.parameters(), torch.empty(0))
    batch = torch.as_tensor(example).to(like.device)
    return found, Path(path), batch.to(like.dtype) if batch.is_floating_point() else batch


def _write_integers(onnx: Any, path: Path) -> None:
    """Put integers and scales in place of the weights of few levels in an ONNX file."""
    model = onnx.load(path)
    graph, nodes = model.graph, []
    for tensor in list(graph.initializer):
        weights = onnx.numpy_helper.to_array(tensor)
        found = _integers(weights) if weights.dtype == np.float32 and weights.ndim > 1 else None
        if found is None:
            continue
        names = [f"{tensor.name}.integers", f"{tensor.name}.scales"]
        graph.initializer.remove(tensor)
        graph.initializer.extend(
            onnx.numpy_helper.from_array(array, name)
            for array, name in zip(found, names, strict=True)
        )
        nodes.append(onnx.helper.make_node("DequantizeLinear", names, [tensor.name], axis=0))
    if nodes:
        after = list(graph.node)
        del graph.node[:]
        graph.node.extend(nodes + after)
        onnx.save(model, path)


def _integers(weights: Any) -> tuple[Any, Any] | None:
    """Whole numbers and a scale for each channel whose products are the weights; None if none are.

    The largest weight of a channel is 1 (binary, ternary), 3, 7, ... or 127 scales.
    """
    rows = weights.reshape(len(weights), -1).astype(np.float64)
    largest = abs(rows).max(axis=1, keepdims=True)
    for most in (2**bits - 1 for bits in range(1, 8)):
        scales = np.where(largest > 0, largest / most, 1.0)
        integers = np.rint(rows / scales)
        if np.allclose(integers, rows / scales, rtol=0, atol=1e-4):
            whole = integers.reshape(weights.shape).astype(np.int8)
            return whole, scales[:, 0].astype(np.float32)
    return None


def to_nir(model: Any, path: str | Path, example: Any, neurons: str = "threshold") -> Path:
    r"""Write a network of steps in NIR, the format of neuromorphic hardware and its simulators.

    The network is a Sequential of Linear, Conv2d, Flatten and batch norm, with step or sign between
    them. Batch norm goes into the layer below. A step is one node; so is a sign, as
    :math:`2 s - 1` with the step s, whose factor and shift go into the layer above.

    Parameters
    ----------
    example : a batch of inputs, for the shapes of the nodes
    neurons : {"threshold", "if"}
        What a step becomes: a Threshold node, which is exactly that; or an integrate-and-fire
        neuron, to be run for one time step from rest, which is what simulators read. It fires above
        one, so the layer below has its weights times a power of two, such that no input of up to
        twice the size of the example's brings two spikes, and its bias plus one.
    """
    check_choice("neurons", neurons, ("threshold", "if"))
    model, path, example = _given(model, path, example)
    nir = require("nir", "writing NIR")
    if not isinstance(model, nn.Sequential):
        raise ExportError(f"NIR is written of an nn.Sequential, not of {type(model).__name__}.")
    values, shapes = example[:1], [tuple(example.shape[1:])]
    nodes: list[Any] = [nir.Input({"input": np.array(shapes[0])})]
    layer: tuple[nn.Module, Tensor, Tensor] | None = None  # one that is not written yet
    signed = False  # whether its inputs are those of a sign
    largest = 2 * float(example.abs().max())  # of its inputs

    def written() -> None:
        nonlocal layer
        if layer is not None:
            nodes.append(_node(nir, *layer, shapes[-2]))
            layer = None

    with evaluating(model), torch.no_grad():
        for name, module in zip(model._modules, model, strict=True):  # one may stand twice
            values = module(values)
            match module:
                case nn.Linear() | nn.Conv2d():
                    written()
                    shapes.append(tuple(values.shape[1:]))
                    layer = module, *_weights(module, signed, name)
                    signed = False
                case nn.BatchNorm1d() | nn.BatchNorm2d() if layer is not None:
                    layer = layer[0], *_normalised(module, layer[1], layer[2])
                case nn.Flatten():
                    written()
                    kind = {"input": np.array(shapes[-1])}
                    nodes.append(nir.Flatten(kind, start_dim=0, end_dim=-1))
                    shapes.append(tuple(values.shape[1:]))
                case nn.Dropout() | nn.Identity():
                    pass
                case _:
                    signed = _is_sign(module, name)
                    if neurons == "if":
                        if layer is None:
                            raise ExportError(f"{name} has no layer below to fire it.")
                        layer = layer[0], *_firing(layer[1], layer[2], largest)
                    written()
                    nodes.append(_step_node(nir, neurons, tuple(values.shape[1:])))
                    largest = 1.0
        written()
    if signed:
        raise ExportError("the outputs of the network are signs, which NIR has not; leave it out.")
    nodes.append(nir.Output({"output": np.array(values.shape[1:])}))
    nir.write(path, nir.NIRGraph.from_list(*nodes))
    return Path(path)


def _step_node(nir: Any, neurons: str, shape: tuple[int, ...]) -> Any:
    if neurons == "if":
        one = np.ones(shape, np.float32)
        return nir.IF(r=one, v_threshold=one, v_reset=0 * one)
    least = np.nextafter(np.float32(0), np.float32(-1))  # NIR's is passed, ours is reached
    return nir.Threshold(np.full(shape, least))


def _firing(weight: Tensor, bias: Tensor, largest: float) -> tuple[Tensor, Tensor]:
    """Weights and bias of a layer whose states are above one, and below two, where they were
    not negative; ``largest`` is the size of its inputs.
    """
    bound = float((weight.flatten(1).abs().sum(1) * largest + bias.abs()).max())
    share = 2.0 ** -(math.floor(math.log2(max(bound, 1e-30))) + 1)
    above = 1 + 2.0**-20  # more than rounding: neurons fire above one, and a step at zero is one
    return share * weight, share * bias + above


def _is_sign(module: nn.Module, name: str) -> bool:
    activation = from_module(module) if is_activation(module) else None
    if activation not in (Step(), Sign()):
        raise ExportError(
            f"NIR files are written of networks of steps and signs, Linear, Conv2d, Flatten and "
            f"batch norm; {name} is {type(module).__name__}"
            + (f" of {activation}." if activation not in (None, Identity()) else ".")
        )
    return activation == Sign()


def _weights(layer: nn.Linear | nn.Conv2d, signed: bool, name: str) -> tuple[Tensor, Tensor]:
    """Weights and bias; for inputs ``2 s - 1`` those that take ``s``."""
    weight = layer.weight.detach()
    bias = weight.new_zeros(len(weight)) if layer.bias is None else layer.bias.detach()
    if not signed:
        return weight, bias
    if isinstance(layer, nn.Conv2d) and layer.padding not in (0, (0, 0), "valid"):
        raise ExportError(
            f"{name} pads the signs below it with zeros, and of steps these would be minus ones; "
            "use step in place of sign, or no padding."
        )
    return 2 * weight, bias - weight.flatten(1).sum(1)


def _normalised(
    norm: nn.BatchNorm1d | nn.BatchNorm2d, weight: Tensor, bias: Tensor
) -> tuple[Tensor, Tensor]:
    if norm.running_mean is None or norm.running_var is None:
        raise ExportError("batch norm without running statistics has no fixed weights to write.")
    factor = 1 / (norm.running_var + norm.eps).sqrt()
    shift = bias - norm.running_mean
    if norm.weight is not None:
        factor = factor * norm.weight
        return weight * _per_output(factor, weight), shift * factor + norm.bias
    return weight * _per_output(factor, weight), shift * factor


def _per_output(factor: Tensor, weight: Tensor) -> Tensor:
    return factor.view(-1, *[1] * (weight.ndim - 1))


def _node(nir: Any, layer: nn.Module, weight: Tensor, bias: Tensor, shape: tuple[int, ...]) -> Any:
    matrix, shift = weight.cpu().numpy(), bias.cpu().numpy()
    if isinstance(layer, nn.Linear):
        return nir.Affine(matrix, shift)
    assert isinstance(layer, nn.Conv2d)
    options = layer.stride, layer.padding, layer.dilation, layer.groups
    return nir.Conv2d(shape[-2:], matrix, *options, shift)
