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

from lpom import activations, methods
from lpom.checks import check_choice
from lpom.cli.data import BUNDLED
from lpom.cli.folder import (
    CHECKPOINT,
    METRICS,
    MODEL,
    REPORT,
    SETTINGS,
    as_written,
    begun,
    begun_folder,
    read_begun,
)
from lpom.cli.run import Run, network_text
from lpom.cli.tables import plan_table, results_table, scores_table, training_line
from lpom.exceptions import CheckpointError
from lpom.settings import settings_text

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

    The file takes the inputs of the network, as `lpom.load(run)[0].transform(table)` makes them,
    and gives its outputs, one per class. ONNX is run by onnxruntime to see that it says the same.
    """
    from lpom.compacting import compact
    from lpom.export import to_nir, to_onnx

    check_choice("--to", to, ("onnx", "nir"))
    path = out or (run if run.is_dir() else run.parent) / f"model.{to}"
    if path.exists() and not force:
        raise ValueError(f"{path} is there already. Name another file, or use --force.")
    kept = Run.read(run)
    model: Any = kept.estimator.to_torch()
    example = _example(kept.estimator.n_features_in_)
    if small:
        model, report = compact(model, example)
        typer.echo(str(report))
    if to == "onnx":
        to_onnx(model, path, example)
    else:
        to_nir(model, path, example, neurons)
    typer.echo(f"{to}: {path}")


def _example(n_inputs: int) -> Any:
    """Inputs of the network's shape: any will do."""
    import torch

    return torch.rand(ROWS, n_inputs, generator=torch.Generator().manual_seed(0))


def info(run: Annotated[Path, typer.Argument(help="Folder of a run.")]) -> None:
    """Show the network, data, method, settings and results of a run; checks its model file."""
    console = Console(highlight=False)
    if begun(run) and not (run / MODEL).is_file():
        _print(console, _begun_facts(run))
        return
    kept = Run.read(run)
    with as_written(f"{run / SETTINGS} or {METRICS}"):
        facts = _facts(kept, run)
        shown = results_table(kept), training_line(kept), scores_table(kept)
    if begun(run):
        facts["resume"] = f"lpom train --resume {run}"
    _print(console, facts)
    if kept.settings["data"]["name"] not in BUNDLED:
        console.print(plan_table(kept.encoder))
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
    with as_written(folder / CHECKPOINT):
        settings = notes["settings"]
        return {
            **_asked(settings),
            "training": f"{state}; {_training(settings)}",
            "resume": f"lpom train --resume {folder}",
        }


def _facts(run: Run, folder: Path) -> dict[str, str]:
    settings, metrics, target = run.settings, run.metrics, run.target
    asked = _asked(settings)
    n_classes = f", {len(target.classes[0])} classes" if target.classes else ""
    used = [column for column in run.encoder.columns_.values() if column.kind != "dropped"]
    versions = settings["versions"].items()
    return {
        "data": asked["data"],
        "inputs": f"{len(run.encoder.get_feature_names_out())}, from {len(used)} of "
        f"{settings['data']['columns']} columns",
        "target": f"{settings['data']['target']}: {target.task}{n_classes}",
        "network": f"{asked['network']}; {_size(run, folder)}",
        "method": asked["method"],
        "loss": metrics["loss"]["name"],
        "training": f"{len(run.history)} of {_training(settings)}; {metrics['status']}",
        "started": metrics["timing"]["started"],
        "versions": ", ".join(f"{name} {value}" for name, value in versions),
    }


def _asked(settings: Mapping[str, Any]) -> dict[str, str]:
    data, method = settings["data"], dict(settings["method"])
    return {
        "data": f"{data['name']} ({data['notes']})",
        "network": network_text(settings["network"]),
        "method": f"{method.pop('name')} ({settings_text(method)})",
    }


def _training(settings: Mapping[str, Any]) -> str:
    place = ", ".join(
        [
            str(settings["device"]),
            *([f"in {settings['precision']}"] if settings["precision"] else []),
            *(["compiled"] if settings["compile"] else []),
        ]
    )
    batch = settings["batch_size"] or "all"
    return f"{settings['epochs']} epochs, batch size {batch}, seed {settings['seed']}, on {place}"


def _size(run: Run, folder: Path) -> str:
    """Weights and their bytes, and how many a penalty has left."""
    weights = [parameter.detach() for parameter in run.estimator.to_torch().parameters()]
    number = sum(weight.numel() for weight in weights)
    written = (folder / MODEL).stat().st_size
    text = f"{number:,} weights, {written:,} bytes in the model file"
    if run.settings["method"].get("penalties"):
        text += f", {sum(int((weight != 0).sum()) for weight in weights):,} weights are not zero"
    return text


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
