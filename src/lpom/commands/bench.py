"""``lpom bench``: what things cost on this machine, as ratios within one run."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from typing import Annotated, Any, TypeAlias

import torch
import torch.distributed as dist
import typer
from rich.console import Console
from rich.table import Table
from torch import nn

from lpom import networks
from lpom.commands import options
from lpom.experiments.bench import fits, steps, weights
from lpom.experiments.bench.contest import Report, Row
from lpom.experiments.bench.parallel import bench_parallel
from lpom.experiments.bench.parallel import predict as predict_ranks
from lpom.experiments.schedules import Wire
from lpom.networks.mlp import mlp
from lpom.parallel import launch, own_cores

_RANKS = "2,4,8,16,32,64,128,256,512,1024"

_Sizes: TypeAlias = Annotated[
    str, typer.Option(help="Widths of all layers, inputs and outputs included.")
]
_Network: TypeAlias = Annotated[
    str, typer.Option(help="A known network in their place, NAME or path.py:make.")
]
_InputShape: TypeAlias = Annotated[str, typer.Option(help="Shape of that network's samples.")]
_NetworkOption: TypeAlias = Annotated[
    list[str] | None,
    typer.Option(help="NAME=VALUE of that network, e.g. width=0.25; may be repeated."),
]
_Contestants: TypeAlias = Annotated[
    list[str] | None,
    typer.Option(
        "--method",
        help=f"Who takes part: a method, {', '.join(map(repr, steps.CONTESTANTS))}, or 'lpom' or a "
        f"method of back-propagation and {steps.COMPILED!r}, or any and {steps.ROUNDED!r}; may be "
        "repeated.",
    ),
]
_Baseline: TypeAlias = Annotated[str, typer.Option(help="Method the ratios refer to.")]
_BatchSize: TypeAlias = Annotated[int, typer.Option(help="Rows of the batch.", min=1)]
_Rounds: TypeAlias = Annotated[int, typer.Option(help="Turns of each contestant.", min=1)]
_Json: TypeAlias = Annotated[
    Path | None,
    typer.Option("--json", help="A file for the same with versions and processor, as JSON."),
]

_DEEP = "784,2048,2048,2048,10"

app = typer.Typer(help="Measure what a method costs on this machine.", no_args_is_help=True)


@app.callback()
def _bench() -> None:
    """Measure what a method costs on this machine."""


@app.command()
def step(
    sizes: _Sizes = _DEEP,
    network: _Network = "",
    input_shape: _InputShape = "3,32,32",
    network_option: _NetworkOption = None,
    method: _Contestants = None,
    baseline: _Baseline = "adam",
    batch_size: _BatchSize = 100,
    rounds: _Rounds = 20,
    threads: options.Threads = None,
    json: _Json = None,
) -> None:
    """Time one training step of each method, taking turns, beside back-propagation's."""
    _use(threads)
    net = _net(sizes, network, input_shape, network_option)
    chosen = method or ["lpom"]
    rows = steps.step(net, chosen, baseline=baseline, batch_size=batch_size, rounds=rounds)
    _show("step", rows, json, network=net.name, batch_size=batch_size, rounds=rounds)


@app.command()
def memory(
    sizes: _Sizes = _DEEP,
    network: _Network = "",
    input_shape: _InputShape = "3,32,32",
    network_option: _NetworkOption = None,
    method: _Contestants = None,
    baseline: _Baseline = "adam",
    batch_size: _BatchSize = 100,
    json: _Json = None,
) -> None:
    """Count the bytes of the tensors that a step makes, at the moment when most are alive."""
    net = _net(sizes, network, input_shape, network_option)
    rows = steps.memory(net, method or ["lpom"], baseline=baseline, batch_size=batch_size)
    _show("memory", rows, json, network=net.name, batch_size=batch_size)


@app.command()
def limit(
    sizes: _Sizes = _DEEP,
    network: _Network = "",
    input_shape: _InputShape = "3,32,32",
    network_option: _NetworkOption = None,
    method: _Contestants = None,
    batch_size: _BatchSize = 100,
    rounds: _Rounds = 20,
    threads: options.Threads = None,
    json: _Json = None,
) -> None:
    """Time a step beside its own matrix products and convolutions, done again by themselves."""
    _use(threads)
    net = _net(sizes, network, input_shape, network_option)
    rows = steps.limit(net, method or ["lpom"], batch_size=batch_size, rounds=rounds)
    _show("limit", rows, json, network=net.name, batch_size=batch_size, rounds=rounds)


@app.command()
def scaling(
    largest: Annotated[int, typer.Option(help="Largest batch and width.", min=32)] = 1024,
    method: _Contestants = None,
    rounds: _Rounds = 10,
    threads: options.Threads = None,
    json: _Json = None,
) -> None:
    """How a step grows with batch, width, depth and the length of sequences."""
    _use(threads)
    chosen = method or ["adam", "lpom"]
    rows = steps.scaling(chosen, rounds=rounds, largest=largest)
    _show("scaling", rows, json, largest=largest, rounds=rounds)


@app.command()
def sklearn(
    table: Annotated[
        list[str] | None,
        typer.Option(help=f"digits, {', '.join(fits.TABLES)} (all); may be repeated."),
    ] = None,
    hidden: Annotated[
        list[str] | None, typer.Option(help="Widths of hidden layers (100 and 300,100).")
    ] = None,
    batch_size: _BatchSize = 100,
    rounds: _Rounds = 5,
    threads: options.Threads = None,
    json: _Json = None,
) -> None:
    """Time fit beside scikit-learn's MLPClassifier: same network, batches and epochs."""
    _use(threads)
    units = [options.numbers("--hidden", text, int) for text in hidden or ["100", "300,100"]]
    names = table or ["digits", *fits.TABLES]
    unknown = set(names) - {"digits", *fits.TABLES}
    if unknown:
        known = ", ".join(["digits", *fits.TABLES])
        raise ValueError(f"--table takes {known}; got {unknown.pop()!r}.")
    rows = fits.against_sklearn(
        names, [tuple(widths) for widths in units], batch_size=batch_size, rounds=rounds
    )
    _show("sklearn", rows, json, batch_size=batch_size, rounds=rounds)


@app.command()
def exact(
    batch_size: _BatchSize = 100,
    inputs: Annotated[int, typer.Option(help="Width below.", min=1)] = 2048,
    outputs: Annotated[int, typer.Option(help="Width above.", min=1)] = 2048,
    iterations: Annotated[int, typer.Option(help="Of Algorithm 2.", min=1)] = 5,
    rounds: _Rounds = 10,
    threads: options.Threads = None,
    json: _Json = None,
) -> None:
    """Time the exact weight step beside the literal one, with the paper's pseudo-inverse."""
    _use(threads)
    rows = weights.exact(
        batch_size=batch_size, inputs=inputs, outputs=outputs, iterations=iterations, rounds=rounds
    )
    _show("exact", rows, json, rounds=rounds)


@app.command()
def to_accuracy(
    method: Annotated[
        list[str] | None,
        typer.Option(
            help=f"{', '.join(map(repr, weights.PLANS))} (all) or {weights.SKLEARN!r}; may be "
            "repeated, the first is what ratios refer to."
        ),
    ] = None,
    seeds: Annotated[str, typer.Option(help="A run each.")] = "0,1,2",
    rows: Annotated[int | None, typer.Option(help="So many rows of MNIST alone.", min=100)] = None,
    threads: options.Threads = None,
    json: _Json = None,
) -> None:
    """Seconds of training until 97, 98 and 98.4 % of held-out MNIST, 784-300-100-10."""
    _use(threads)
    names = method or [*weights.PLANS, weights.SKLEARN]
    unknown = set(names) - {*weights.PLANS, weights.SKLEARN}
    if unknown:
        known = ", ".join(map(repr, [*weights.PLANS, weights.SKLEARN]))
        raise ValueError(f"--method takes {known}; got {unknown.pop()!r}.")
    found = weights.to_accuracy(names, seeds=options.numbers("--seeds", seeds, int), rows=rows)
    _show("to-accuracy", found, json, seeds=seeds, of_mnist=rows or "all")


@app.command()
def data(
    batch_size: _BatchSize = 100,
    rounds: _Rounds = 10,
    threads: options.Threads = None,
    json: _Json = None,
) -> None:
    """Rows a second from arrays, maps, sparse rows and loaders, nothing being done with them."""
    _use(threads)
    rows = fits.data(batch_size=batch_size, rounds=rounds)
    _show("data", rows, json, batch_size=batch_size, rounds=rounds)


@app.command()
def predict(rounds: _Rounds = 10, threads: options.Threads = None, json: _Json = None) -> None:
    """Rows a second of predict, beside scikit-learn's."""
    _use(threads)
    _show("predict", fits.predict(rounds=rounds), json, rounds=rounds)


def _use(threads: int | None) -> None:
    if threads is not None:
        torch.set_num_threads(threads)


def _net(sizes: str, network: str, input_shape: str, network_option: list[str] | None) -> steps.Net:
    if not network:
        return steps.Net.of_sizes(options.numbers("--sizes", sizes, int))
    chosen = options.pairs("--network-option", "width=0.25", network_option)
    settings = {name: options.value(text) for name, text in chosen.items()}
    return steps.Net.known(network, options.numbers("--input-shape", input_shape, int), settings)


def _show(part: str, rows: list[Row], path: Path | None, **settings: Any) -> None:
    """Print the table of a part, and write it down where asked."""
    report = Report(part, settings, rows)
    about = report.as_dict()
    said = ", ".join(f"{key.replace('_', ' ')} {value}" for key, value in settings.items())
    where = about["machine"]
    table = Table(
        caption=f"{said}; ratios to the first of each case, median and quartiles; threads "
        f"{where['threads']}, clock of the {about['clock']}; torch {where['torch']}, "
        f"{where['processor']}",
        caption_justify="left",
    )
    for column in ("case", "contestant", "amount", "ratio", "quartiles"):
        table.add_column(column, justify="left" if column in ("case", "contestant") else "right")
    last = None
    for row in rows:
        amount = "never" if row.amount is None else f"{_short(row.amount)} {row.unit}"
        table.add_row(
            "" if row.case == last else row.case,
            row.contestant,
            f"{amount} ({row.note})" if row.note and row.amount is not None else amount,
            "" if row.ratio is None else f"{row.ratio:.2f}",
            "" if row.low is None or row.high is None else f"{row.low:.2f} - {row.high:.2f}",
        )
        last = row.case
    Console(highlight=False).print(table)
    if path is not None:
        path.write_text(json.dumps({"command": _command()} | about, indent=1) + "\n")


def _command() -> str:
    """What was typed, without where it is written down."""
    given = sys.argv[1:]
    place = given.index("--json") if "--json" in given else len(given)
    return shlex.join(["lpom", *given[:place], *given[place + 2 :]])


def _short(amount: float) -> str:
    return f"{amount:,.0f}" if amount >= 1000 else f"{amount:.3g}"


def _part() -> None:
    """End together: a process that ends takes the other with it."""
    dist.barrier()
    dist.destroy_process_group()


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
        _part()
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
    found = predict_ranks(mlp(widths, seed=0), widths[:1], counts, wire, batch_size=batch_size)
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
    _part()
