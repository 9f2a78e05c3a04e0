"""``lpom export``: a network for other programs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import torch
import typer
from torch import Tensor

from lpom.checks import check_choice
from lpom.compacting import compact
from lpom.export import to_nir, to_onnx
from lpom.predictor import Predictor
from lpom.runs import load

#: Rows on which the file is compared with the network.
ROWS = 64


def export(
    run: Annotated[Path, typer.Argument(help="Folder of a run, or a model file.")],
    to: Annotated[str, typer.Option(help="onnx, or nir for networks of steps and signs.")] = "onnx",
    out: Annotated[
        Path | None, typer.Option(help="File to write (else model.onnx or model.nir in the run).")
    ] = None,
    neurons: Annotated[
        str, typer.Option(help="Of NIR: threshold, or if, which its simulators read.")
    ] = "threshold",
    small: Annotated[
        bool, typer.Option("--compact", help="Without what penalties have emptied.")
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Overwrite the file.")] = False,
) -> None:
    """Write a run's network for other programs: ONNX, or NIR for networks of steps.

    The file takes the inputs of the network, as `lpom.load(run).encode(table)` makes them, and
    gives its outputs, one per class. ONNX is run by onnxruntime to see that it says the same.
    """
    check_choice("--to", to, ("onnx", "nir"))
    path = out or (run if run.is_dir() else run.parent) / f"model.{to}"
    if path.exists() and not force:
        raise ValueError(f"{path} is there already. Name another file, or use --force.")
    predictor = load(run)
    model, example = predictor.model, _example(predictor)
    if small:
        model, report = compact(model, example)
        typer.echo(str(report))
    if to == "onnx":
        to_onnx(model, path, example)
    else:
        to_nir(model, path, example, neurons)
    typer.echo(f"{to}: {path}")


def _example(predictor: Predictor) -> Tensor:
    """Inputs of the network's shape: any will do."""
    generator = torch.Generator().manual_seed(0)
    return torch.rand(ROWS, *predictor.features.input_shape, generator=generator)
