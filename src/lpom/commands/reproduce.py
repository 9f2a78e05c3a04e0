"""``lpom reproduce``: the paper's tables and figures, and those beyond it."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from lpom.commands import options
from lpom.exceptions import unknown_name
from lpom.experiments.beyond import TABLES
from lpom.experiments.paper import EXPERIMENTS
from lpom.experiments.reproduce import reproduce as run_experiment
from lpom.experiments.rows import reproduce_rows
from lpom.experiments.summary import summary_path, write_summary
from lpom.files import check_writable

_LISTED = ", ".join(TABLES)


def reproduce(
    name: Annotated[str, typer.Argument(help=f"{', '.join([*EXPERIMENTS, *TABLES])}, or all.")],
    seeds: Annotated[str, typer.Option(help="Comma-separated seeds.")] = "0,1,2",
    epochs: Annotated[
        int | None, typer.Option(help="In place of the experiment's own.", min=1)
    ] = None,
    roles: Annotated[
        str | None, typer.Option(help="Only these columns, e.g. paper,best,adam,sgd, or lpom.")
    ] = None,
    networks: Annotated[
        str | None, typer.Option(help="Only these networks, e.g. '300 300,100'.")
    ] = None,
    rows: Annotated[
        str | None, typer.Option(help=f"Only these rows of {_LISTED}, e.g. step-5.")
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="One seed, one epoch, in a folder of its own.")
    ] = False,
    tables: Annotated[
        bool, typer.Option("--tables", help="Run nothing, only write the tables of the results.")
    ] = False,
    threads: options.Threads = None,
    data_dir: options.DataDir = None,
    out: Annotated[Path, typer.Option(help="Folder of the results.")] = Path("experiments/results"),
) -> None:
    """Run an experiment of the paper, or beyond it; what is finished already is not run again.

    Writes JSON lines, and the tables of a README beside the results made from them.
    """
    known = [*EXPERIMENTS, *TABLES]
    if name != "all" and name not in known:
        raise ValueError(unknown_name("experiment", name, [*known, "all"]))
    if threads is not None:
        torch.set_num_threads(threads)
    chosen = [name] if name != "all" else known
    if quick:
        seeds, epochs = seeds.split(",")[0], 1
        out = out.parent / "quick" / out.name  # its README stands apart too
    summary_path(out)  # says now, not after hours, that it would be written over something else
    wanted_seeds = options.numbers("--seeds", seeds, int)
    wanted_roles = _roles(chosen, roles)
    wanted_networks = _networks(chosen, networks)
    wanted_rows = _rows(chosen, rows)
    out.mkdir(parents=True, exist_ok=True)
    check_writable(out)
    if tables:
        typer.echo(f"tables: {write_summary(out)}")
        return
    for experiment in chosen:
        every: dict[str, Any] = {
            "folder": out,
            "seeds": wanted_seeds,
            "epochs": epochs,
            "data_dir": None if data_dir is None else str(data_dir),
            "say": typer.echo,
        }
        try:
            if experiment in TABLES:
                reproduce_rows(experiment, columns=wanted_roles, rows=wanted_rows, **every)
            else:
                run_experiment(experiment, roles=wanted_roles, networks=wanted_networks, **every)
        except KeyboardInterrupt:
            typer.echo(f"interrupted; the same command continues. tables: {write_summary(out)}")
            raise typer.Exit(130) from None
        typer.echo(f"tables: {write_summary(out)}")


def _roles(experiments: Sequence[str], text: str | None) -> list[str] | None:
    known = {role for name in experiments for role in _columns(name)}
    return None if text is None else _checked("role", text.split(","), known)


def _columns(experiment: str) -> Collection[str]:
    """Those of a table, or the roles of an experiment of the paper."""
    if experiment in TABLES:
        return TABLES[experiment].columns.keys()
    return EXPERIMENTS[experiment].roles.keys()


def _rows(experiments: Sequence[str], text: str | None) -> list[str] | None:
    known = [row.name for name in experiments if name in TABLES for row in TABLES[name].rows]
    return None if text is None else _checked("row", text.split(","), known)


def _networks(experiments: Sequence[str], text: str | None) -> list[tuple[int, ...]] | None:
    known = {
        ",".join(map(str, hidden)): hidden
        for name in experiments
        if name in EXPERIMENTS
        for hidden in EXPERIMENTS[name].networks
    }
    if text is None:
        return None
    return [known[name] for name in _checked("network", text.split() or [text], known)]


def _checked(kind: str, names: list[str], known: Collection[str]) -> list[str]:
    for name in names:
        if name not in known:
            raise ValueError(unknown_name(kind, name, known))
    return names
