"""``lpom bench``: what things cost on this machine."""

from __future__ import annotations

from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table

from lpom.commands import options
from lpom.experiments.bench import bench_step

app = typer.Typer(help="Measure what a method costs on this machine.", no_args_is_help=True)


@app.callback()
def _bench() -> None:
    """Measure what a method costs on this machine."""


@app.command()
def step(
    sizes: Annotated[
        str, typer.Option(help="Widths of all layers, inputs and outputs included.")
    ] = "784,2048,2048,2048,10",
    network: Annotated[
        str, typer.Option(help="A known network in their place, NAME or path.py:make.")
    ] = "",
    input_shape: Annotated[str, typer.Option(help="Shape of that network's samples.")] = "3,32,32",
    network_option: Annotated[
        list[str] | None,
        typer.Option(help="NAME=VALUE of that network, e.g. width=0.25; may be repeated."),
    ] = None,
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
