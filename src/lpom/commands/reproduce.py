"""``lpom reproduce``: the paper's tables and figures."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import torch
import typer

from lpom.commands import options
from lpom.exceptions import unknown_name
from lpom.experiments.paper import EXPERIMENTS
from lpom.experiments.reproduce import reproduce as run_experiment
from lpom.experiments.summary import write_summary


def reproduce(
    name: Annotated[str, typer.Argument(help=f"{', '.join(EXPERIMENTS)}, or all.")],
    seeds: Annotated[str, typer.Option(help="Seeds, separated by commas.")] = "0,1,2",
    epochs: Annotated[int | None, typer.Option(help="In place of the experiment's own.")] = None,
    roles: Annotated[
        str | None, typer.Option(help="Only these columns, e.g. paper,best,adam,sgd.")
    ] = None,
    networks: Annotated[
        str | None, typer.Option(help="Only these networks, e.g. '300 300,100'.")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="One seed, one epoch.")] = False,
    threads: options.Threads = None,
    data_dir: options.DataDir = None,
    out: Annotated[Path, typer.Option(help="Folder of the results.")] = Path("experiments/results"),
) -> None:
    """Run an experiment of the paper; what is finished already is not run again.

    Writes JSON lines, and the tables of a README beside the results made from them.
    """
    if name != "all" and name not in EXPERIMENTS:
        raise ValueError(unknown_name("experiment", name, [*EXPERIMENTS, "all"]))
    if threads is not None:
        torch.set_num_threads(threads)
    chosen = [name] if name != "all" else list(EXPERIMENTS)
    if quick:
        seeds, epochs = seeds.split(",")[0], 1
        out = out.parent / "quick" / out.name  # its README stands apart too
    for experiment in chosen:
        run_experiment(
            experiment,
            folder=out,
            seeds=options.numbers("--seeds", seeds, int),
            epochs=epochs,
            roles=None if roles is None else _known_roles(experiment, roles),
            networks=None if networks is None else [options.widths(n) for n in networks.split()],
            data_dir=None if data_dir is None else str(data_dir),
            say=typer.echo,
        )
        typer.echo(f"tables: {write_summary(out)}")


def _known_roles(experiment: str, text: str) -> list[str]:
    known = EXPERIMENTS[experiment].roles
    for role in text.split(","):
        if role not in known:
            raise ValueError(unknown_name("role", role, known))
    return text.split(",")
