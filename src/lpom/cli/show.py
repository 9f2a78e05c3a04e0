"""``lpom info``, ``report``, ``export``, ``methods`` and ``activations``: what there is to see."""

from __future__ import annotations

import webbrowser
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

import lpom
from lpom import activations, datasets, methods
from lpom.checks import check_choice
from lpom.cli.folder import CHECKPOINT, MODEL, REPORT, begun, begun_folder, read_begun
from lpom.cli.run import Run, network_text
from lpom.cli.tables import plan_table, results_table, scores_table, training_line
from lpom.exceptions import CheckpointError, ModelFileError
from lpom.predictor import Predictor
from lpom.settings import settings_text
from lpom.tables.old import Classes, Target

ROWS = 64  # on which an exported file is compared with the network

#: What each method is good for.
_GOOD_FOR = {
    "lpom": "any network, also of functions without a derivative; the default",
    "sgd": "a baseline; large networks with a tuned rate",
    "nesterov": "as sgd, faster where the loss is a narrow valley",
    "adagrad": "sparse inputs",
    "rmsprop": "recurrent networks, a baseline",
    "adam": "a baseline that needs little tuning",
    "straight-through": "the usual way for steps and signs; the rival of lpom there",
    "ramps": "steps and signs, by slopes that grow steeper",
    "mac": "few wide layers, weights solved exactly",
    "bcd": "small tables, every block in closed form",
    "admm": "small tables, constraints by multipliers",
    "admm-hashing": "codes of few bits",
    "tikhonov": "small ReLU networks, all rows at once",
    "lifted": "small ReLU networks, in batches",
}


def report(
    runs: Annotated[
        list[Path] | None, typer.Argument(help="Folders of runs (else the newest in runs/).")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help=f"HTML file to write (else {REPORT}, in the run if there is one only).",
        ),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite the file in --out.")] = False,
    show: Annotated[bool, typer.Option("--open", help="Open it in the browser.")] = False,
) -> None:
    """Write one HTML page about runs: curves, predictions, mistakes, settings.

    It holds all it needs and fetches nothing. Several runs are drawn over each other.

    Examples:

        lpom report runs/flats-1 --open
        lpom report runs/flats-1 runs/flats-2 --out both.html
    """
    from lpom.cli.report import write_report

    if out is not None and out.exists() and not force:
        raise ValueError(f"{out} is there already. Name another file, or use --force.")
    folders = runs or [_newest(Path("runs"))]
    path = out or (folders[0] / REPORT if len(folders) == 1 else Path(REPORT))
    write_report(folders, path)
    typer.echo(f"report: {path}")
    if show and not webbrowser.open(path.resolve().as_uri()):
        typer.echo("warning: found no browser to open it in.", err=True)


def _newest(folder: Path) -> Path:
    found = [model.parent for model in folder.glob(f"*/{MODEL}")]
    if not found:
        raise ValueError(
            f"which run? There is none in {folder}/ here; name its folder, as `lpom train` "
            "prints it."
        )
    return max(found, key=lambda run: (run / MODEL).stat().st_mtime)


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
    from lpom.compacting import compact
    from lpom.export import to_nir, to_onnx

    check_choice("--to", to, ("onnx", "nir"))
    path = out or (run if run.is_dir() else run.parent) / f"model.{to}"
    if path.exists() and not force:
        raise ValueError(f"{path} is there already. Name another file, or use --force.")
    predictor = lpom.load(run)
    model, example = predictor.model, _example(predictor)
    if small:
        model, report = compact(model, example)
        typer.echo(str(report))
    if to == "onnx":
        to_onnx(model, path, example)
    else:
        to_nir(model, path, example, neurons)
    typer.echo(f"{to}: {path}")


def _example(predictor: Predictor) -> Any:
    """Inputs of the network's shape: any will do."""
    import torch

    generator = torch.Generator().manual_seed(0)
    return torch.rand(ROWS, *predictor.features.input_shape, generator=generator)


def info(run: Annotated[Path, typer.Argument(help="Folder of a run.")]) -> None:
    """Show the network, data, method, settings and results of a run; checks its model file."""
    console = Console(highlight=False)
    if begun(run) and not (run / MODEL).is_file():
        _print(console, _begun_facts(run))
        return
    kept = Run.read(run)
    try:
        facts = _facts(kept, run)
        shown = results_table(kept.config), training_line(kept), scores_table(kept.config)
    except (KeyError, TypeError, AttributeError) as error:
        raise ModelFileError(
            f"{run / 'config.json'} lacks what `lpom train` writes ({error!r}). Train again."
        ) from error
    if begun(run):
        facts["resume"] = f"lpom train --resume {run}"
    _print(console, facts)
    if kept.config["data"]["name"] not in datasets.names():
        console.print(plan_table(kept.predictor.features.plan))
    for part in shown:
        console.print(part, soft_wrap=isinstance(part, str))


def _print(console: Console, facts: dict[str, str]) -> None:
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column()
    for name, value in facts.items():
        table.add_row(name, Text(value))
    console.print(table)


def _begun_facts(folder: Path) -> dict[str, str]:
    """Of a run that has not come to its end."""
    try:
        with begun_folder(folder) as notes:
            state = "stopped before its end"
    except CheckpointError:
        notes, state = read_begun(folder), "training now"
    try:
        config = notes["config"]
        data, method = config["data"], dict(config["method"])
        return {
            "data": f"{data['name']} ({data['notes']})",
            "network": network_text(config["network"]),
            "method": f"{method.pop('name')} ({settings_text(method)})",
            "training": f"{state}; {config['epochs']} epochs planned, batch size "
            f"{config['batch_size'] or 'all'}, seed {config['seed']}, on {_place(config)}",
            "resume": f"lpom train --resume {folder}",
        }
    except (KeyError, TypeError, AttributeError) as error:
        raise ModelFileError(
            f"{folder / CHECKPOINT} lacks what `lpom train` writes ({error!r}). Train again."
        ) from error


def _facts(run: Run, folder: Path) -> dict[str, str]:
    config, data = run.config, run.config["data"]
    target, features = run.predictor.target, run.predictor.features
    n_inputs, n_columns = features.n_inputs, len(features.names)
    method = dict(config["method"])
    timing, versions = config["timing"], config["versions"]
    return {
        "data": f"{data['name']} ({data['notes']})",
        "inputs": f"{n_inputs}, from {n_columns} of {data['columns']} columns",
        "target": f"{data['target']}: {target.task}{_classes(target)}",
        "network": f"{network_text(config['network'])}; {_size(run, folder)}",
        "method": f"{method.pop('name')} ({settings_text(method)})",
        "loss": config["loss"]["name"],
        "training": f"{len(run.history)} of {config['epochs']} epochs, batch size "
        f"{config['batch_size'] or 'all'}, seed {config['seed']}, on {_place(config)}; "
        f"{config['status']}",
        "started": timing["started"],
        "versions": ", ".join(f"{name} {value}" for name, value in versions.items()),
    }


def _place(config: Mapping[str, Any]) -> str:
    precision = config.get("precision")  # which older runs have not
    place = f"{config['device']} in {precision}" if precision else str(config["device"])
    return f"{place}, compiled" if config.get("compile") else place


def _size(run: Run, folder: Path) -> str:
    """Weights and their bytes, and how many a penalty has left."""
    weights = [parameter.detach() for parameter in run.predictor.model.parameters()]
    number = sum(weight.numel() for weight in weights)
    written = (folder / MODEL).stat().st_size
    text = f"{number:,} weights, {written:,} bytes in the model file"
    if run.config["method"].get("penalties"):
        text += f", {sum(int((weight != 0).sum()) for weight in weights):,} weights are not zero"
    return text


def _classes(target: Target) -> str:
    return f", {len(target.classes)} classes" if isinstance(target, Classes) else ""


def list_methods() -> None:
    """List the training methods: what each is good for, minimises and costs."""
    columns = ("method", "good for", "minimises", "a step costs", "a step takes")
    rows = []
    for name in methods.names():
        method = methods.get(name)
        good_for = _GOOD_FOR.get(name) or (method.__doc__ or "").partition("\n")[0]
        takes = "all rows" if method.full_batch else "mini-batch"
        rows.append((name, good_for, method.equation, method.costs, takes))
    _print_table(columns, rows)


def list_activations() -> None:
    """List the activations: formula, range, Lipschitz constant, and whether they jump."""
    rows = []
    for act in activations.examples():
        settings = ", ".join(f"{key} {value}" for key, value in act.params().items())
        formula = act.formula + (f"   ({settings})" if settings else "")
        bounds = f"{act.lower:.4g} to {act.upper:.4g}"
        rows.append((act.name, formula, bounds, f"{act.lipschitz:g}", "yes" if act.jumps else "no"))
    _print_table(("activation", "phi(z)", "range", "Lipschitz", "jumps"), rows)


def _print_table(columns: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> None:
    table = Table()
    for column in columns:
        table.add_column(column, no_wrap=column == columns[0])
    for row in rows:
        table.add_row(*map(Text, row))
    Console(highlight=False).print(table)
