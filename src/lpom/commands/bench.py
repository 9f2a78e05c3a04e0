"""``lpom bench``: what things cost on this machine."""

from __future__ import annotations

import sys
from typing import Annotated, TypeAlias

import torch
import typer
from rich.console import Console
from rich.table import Table
from torch import nn

from lpom import networks
from lpom.commands import options
from lpom.experiments.bench import bench_step
from lpom.experiments.bench_parallel import bench_parallel, predict
from lpom.experiments.schedules import Wire
from lpom.networks.mlp import mlp
from lpom.parallel import launch, own_cores

_RANKS = "2,4,8,16,32,64,128,256,512,1024"

_Sizes: TypeAlias = Annotated[
    str, typer.Option(help="Widths of all layers, inputs and outputs included.")
]
_InputShape: TypeAlias = Annotated[str, typer.Option(help="Shape of that network's samples.")]
_NetworkOption: TypeAlias = Annotated[
    list[str] | None,
    typer.Option(help="NAME=VALUE of that network, e.g. width=0.25; may be repeated."),
]

app = typer.Typer(help="Measure what a method costs on this machine.", no_args_is_help=True)


@app.callback()
def _bench() -> None:
    """Measure what a method costs on this machine."""


@app.command()
def step(
    sizes: _Sizes = "784,2048,2048,2048,10",
    network: Annotated[
        str, typer.Option(help="A known network in their place, NAME or path.py:make.")
    ] = "",
    input_shape: _InputShape = "3,32,32",
    network_option: _NetworkOption = None,
    method: Annotated[
        list[str] | None, typer.Option(help="Method to time (lpom); may be repeated.")
    ] = None,
    baseline: Annotated[str, typer.Option(help="Method the ratios refer to.")] = "adam",
    batch_size: Annotated[int, typer.Option(help="Rows of the batch.", min=1)] = 100,
    rounds: Annotated[int, typer.Option(help="Timed steps of each method.", min=1)] = 20,
    threads: options.Threads = None,
) -> None:
    """Time one training step of each method, taking turns, beside back-propagation's.

    Ratios are medians over the rounds; memory is that of the tensors a step makes, at the moment
    when most are alive.
    """
    if threads is not None:
        torch.set_num_threads(threads)
    chosen = options.pairs("--network-option", "width=0.25", network_option)
    costs = bench_step(
        options.numbers("--sizes", sizes, int),
        network=network,
        input_shape=options.numbers("--input-shape", input_shape, int),
        options={name: options.value(text) for name, text in chosen.items()},
        contenders=method or ["lpom"],
        baseline=baseline,
        batch_size=batch_size,
        rounds=rounds,
    )
    table = Table(
        caption=f"{network or sizes.replace(',', '-')}, batches of {batch_size}, {rounds} rounds, "
        f"threads: {torch.get_num_threads()}",
        caption_justify="left",
    )
    for column in ("method", "step", f"to {baseline}", "peak memory", f"to {baseline}"):
        table.add_column(column, justify="left" if column == "method" else "right")
    for cost in costs:
        table.add_row(
            cost.method,
            f"{1e3 * cost.seconds:.2f} ms",
            f"{cost.time_ratio:.2f}",
            f"{cost.bytes / 2**20:.1f} MiB",
            f"{cost.memory_ratio:.2f}",
        )
    Console(highlight=False).print(table)


@app.command()
def parallel(
    sizes: _Sizes = "784,1024,1024,1024,1024,10",
    network: Annotated[
        str, typer.Option(help="A known network in their place whose layers follow one another.")
    ] = "",
    input_shape: _InputShape = "3,32,32",
    network_option: _NetworkOption = None,
    batch_size: Annotated[int, typer.Option(help="Rows of the batch.", min=4)] = 100,
    steps: Annotated[int, typer.Option(help="Steps of each turn.", min=1)] = 40,
    rounds: Annotated[int, typer.Option(help="Timed turns of each way.", min=1)] = 5,
    deep: Annotated[
        str, typer.Option(help="Widths of the network in the model of more ranks.")
    ] = "784," + "1024," * 31 + "10",
    ranks: Annotated[str, typer.Option(help="How many ranks the model is asked about.")] = _RANKS,
    bandwidth: Annotated[float, typer.Option(help="Between them, in Gbit/s.")] = 100.0,
    latency: Annotated[float, typer.Option(help="Of a message, in microseconds.")] = 5.0,
) -> None:
    """Time two ranks beside one, and say what a model makes of more.

    Measured: LPOM with its layers or its rows on two processes of this machine, beside one rank
    and beside back-propagation with DistributedDataParallel and torch's pipelines. The model takes
    the times of each layer, measured here, and those of the wire; for two ranks both are shown.
    """
    if launch.rank() is None:
        raise typer.Exit(launch.launch("lpom.cli", sys.argv[1:], 2))
    if network:
        shape = options.numbers("--input-shape", input_shape, int)
        chosen = options.pairs("--network-option", "width=0.25", network_option)
        settings = {name: options.value(text) for name, text in chosen.items()}
        model = networks.get(network, shape, 10, 0, **settings)
        if not isinstance(model, nn.Sequential):
            raise ValueError(
                f"torch's pipelines are given parts of an nn.Sequential, which {network} is not; "
                "vgg5, lenet5 and mlp are."
            )
    else:
        widths = options.numbers("--sizes", sizes, int)
        shape, model = widths[:1], mlp(widths, seed=0)
    with own_cores(1):
        measured = bench_parallel(model, shape, batch_size=batch_size, steps=steps, rounds=rounds)
    if launch.rank():
        return
    table = Table(
        caption=f"{network or sizes.replace(',', '-')}, batches of {batch_size}, {rounds} turns of "
        f"{steps} steps; speeds against one rank of the same method",
        caption_justify="left",
    )
    for column in ("way to train", "ranks", "step", "speed", "step in the model", "error"):
        table.add_column(column, justify="left" if column == "way to train" else "right")
    for way in measured:
        said = ("", "")
        if way.predicted is not None:
            off = 100 * (way.predicted / way.seconds - 1)
            said = (f"{1e3 * way.predicted:.2f} ms", f"{off:+.0f} %")
        time = f"{1e3 * way.seconds:.2f} ms"
        table.add_row(way.name, str(way.ranks), time, f"{way.speed:.2f}", *said)
    console = Console(highlight=False)
    console.print(table)
    widths = options.numbers("--deep", deep, int)
    wire = Wire(latency * 1e-6, bandwidth * 1e9 / 8)
    counts = options.numbers("--ranks", ranks, int)
    found = predict(mlp(widths, seed=0), widths[:1], counts, wire, batch_size=batch_size)
    names = list(found[0].efficiency)
    table = Table(
        caption=f"in the model: efficiency (speed per rank) with {len(widths) - 1} layers, batches "
        f"of {batch_size}, {bandwidth:g} Gbit/s, {latency:g} us",
        caption_justify="left",
    )
    for column in ("ranks", "share the layers", *names):
        table.add_column(column, justify="right")
    for row in found:
        shares = (f"{100 * row.efficiency[name]:.0f} %" for name in names)
        table.add_row(str(row.ranks), str(row.layers), *shares)
    console.print(table)
