"""``lpom report``: a page to look at."""

from __future__ import annotations

import webbrowser
from pathlib import Path
from typing import Annotated

import typer

from lpom.commands import options
from lpom.folders import MODEL, REPORT
from lpom.report import write_report


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
    data_dir: options.DataDir = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite the file in --out.")] = False,
    show: Annotated[bool, typer.Option("--open", help="Open it in the browser.")] = False,
) -> None:
    """Write one HTML file about runs: curves, layers, mistakes, weights, settings.

    It holds all it needs and fetches nothing. Several runs are drawn over each other.

    Examples:

        lpom report runs/flats-1 --open
        lpom report runs/flats-1 runs/flats-2 --out both.html
    """
    if data_dir is not None and not data_dir.is_dir():
        raise ValueError(f"--data-dir: there is no folder {data_dir}.")
    if out is not None and out.exists() and not force:
        raise ValueError(f"{out} is there already. Name another file, or use --force.")
    folders = runs or [_newest(Path("runs"))]
    path = out or (folders[0] / REPORT if len(folders) == 1 else Path(REPORT))
    write_report(folders, path, data_dir=data_dir)
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
