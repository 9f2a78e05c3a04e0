"""``lpom tune``: settings that suit a table, by scikit-learn's successive halving."""

from __future__ import annotations

import math
import shlex
import warnings
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import numpy as np
import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from sklearn.experimental import enable_halving_search_cv  # noqa: F401
from sklearn.model_selection import HalvingGridSearchCV, ParameterSampler

from lpom import methods
from lpom.checks import check_number
from lpom.cli import options
from lpom.cli.options import TRAINING, option
from lpom.cli.settings import Settings
from lpom.estimators.data import split_rows

FACTOR = 3  # candidates are divided, and epochs multiplied by it, from round to round
VALIDATION_SHARE = 0.2  # of the training rows
_OWN = ("--candidates", "--vary", "--epochs", "DATA")  # not for `lpom train`
_ESTIMATORS = {"hidden": "hidden_layer_sizes", "learning_rate": "learning_rate_init"}
_OF_TRAINING = ("hidden", "activation", "learning_rate", "alpha", "batch_size", "mu")


def tune(
    context: typer.Context,
    data: options.Table,
    target: options.TargetColumn = None,
    task: options.TaskName = None,
    ignore: options.Ignored = None,
    kinds: options.Kinds = None,
    encoding: options.Encoding = None,
    separator: options.Separator = None,
    decimal: options.Decimal = None,
    thousands: options.Thousands = None,
    date_order: options.DateOrder = None,
    test_fraction: options.TestFraction = None,
    candidates: Annotated[
        int,
        option(TRAINING, "N", "Sets of settings to begin with, the defaults among them."),
    ] = 27,
    vary: Annotated[
        list[str] | None,
        option(
            TRAINING,
            "NAME=A/B/...",
            "Values of a setting to choose among, in place of those it has by itself, e.g. "
            "hidden=50/300,100, alpha=0.1 or states.max_sweeps=1/3; may be repeated.",
        ),
    ] = None,
    method: options.MethodName = "lpom",
    loss: options.LossName = "auto",
    class_weight: options.ClassWeight = None,
    epochs: Annotated[
        int | None,
        option(TRAINING, "N", "Of the last round (else as the size of the data asks for)."),
    ] = None,
    seed: options.Seed = 0,
    device: options.Device = "auto",
) -> None:
    """Find settings for a table by successive halving, on its training rows alone.

    Many candidates train for a few epochs, the better third of them three times as long, and so
    on. A fifth of the training rows judges them, by their loss; the test rows are not touched.
    Ends with the command that trains with what won.

    Examples:

        lpom tune flats.csv --target rent
        lpom tune flats.csv --target rent --candidates 9 --vary hidden=50/300,100 --vary alpha=0.1/1
    """
    check_number("--candidates", candidates, low=1, strict=False, whole=True)
    settings = Settings(
        method=method,
        loss=loss,
        class_weight=options.class_weight(class_weight),
        epochs=epochs,
        seed=seed,
        device=device,
        early_stopping=False,
    )
    space = {**_space(settings), **_varied(vary or ())}
    table_read = options.read_data(context, seed)
    target_read, (rows, y) = table_read.target, table_read.train
    X = table_read.encoder.transform(rows)
    is_classes = target_read.task == "classification" and y.ndim == 1
    strata = np.unique(y, return_inverse=True)[1] if is_classes else None
    kept, held = split_rows(len(X), VALIDATION_SHARE, np.random.default_rng(seed), strata)
    most = settings.planned(len(kept))[1]
    sampled = min(candidates - 1, math.prod(map(len, space.values())))
    drawn = [
        {},
        *ParameterSampler({k: list(v) for k, v in space.items()}, sampled, random_state=seed),
    ]
    estimator = settings.estimator(target_read, len(kept))
    rounds = 1 + int(math.log(len(drawn), FACTOR) + 1e-9)
    search = HalvingGridSearchCV(
        estimator,
        [_grid(candidate, estimator) for candidate in drawn],
        factor=FACTOR,
        resource="max_iter",
        max_resources=most,
        min_resources=max(1, most // FACTOR ** (rounds - 1)),
        cv=[(kept, held)],
        scoring=_minus_loss,
        refit=False,
        random_state=seed,
        error_score=-math.inf,
    )
    console = Console(highlight=False)
    for name, values in space.items():
        console.print(escape(f"{name:14} {' / '.join(map(_text, values))}"), soft_wrap=True)
    console.print(
        f"{len(drawn)} candidates; {len(kept):,} rows to train on, {len(held):,} to judge by",
        soft_wrap=True,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        search.fit(X, y)
    results = search.cv_results_
    if not np.isfinite(results["mean_test_score"]).any():
        raise ValueError("no candidate could be trained; try `lpom train` for the reason.")
    last: dict[int, int] = {}  # the latest trial of each candidate
    grids = [_grid(candidate, estimator) for candidate in drawn]
    for trial, params in enumerate(results["params"]):
        last[grids.index({k: [v] for k, v in params.items() if k != "max_iter"})] = trial
    ranked = sorted(
        last, key=lambda k: (-results["iter"][last[k]], -results["mean_test_score"][last[k]])
    )
    table = Table(caption="best first, by the loss on held-out training rows; – is the default")
    for name in (*space, "epochs", "loss"):
        table.add_column(name.replace("_", "\n"), justify="right", overflow="fold")
    for k in ranked[:10]:
        trial = last[k]
        cells = [_text(drawn[k][name]) if name in drawn[k] else "–" for name in space]
        table.add_row(
            *map(escape, cells),
            str(results["n_resources"][trial]),
            f"{-results['mean_test_score'][trial]:.4g}",
            style="bold" if k == ranked[0] else None,
        )
    console.print(table)
    n_epochs = settings.planned(len(X))[1]
    typer.echo(f"next: {shlex.join(_command(context, data, drawn[ranked[0]], n_epochs))}")


def _minus_loss(estimator: Any, X: Any, y: Any) -> float:
    return -float(estimator.evaluate(X, y)[0])


def _grid(candidate: Mapping[str, Any], estimator: Any) -> dict[str, list[Any]]:
    """A candidate by the names of the estimator, as a grid of one point."""
    if not candidate:
        return {"alpha": [estimator.alpha]}  # the defaults
    return {_parameter(name): [value] for name, value in candidate.items()}


def _parameter(name: str) -> str:
    if name in _ESTIMATORS or name in _OF_TRAINING and name != "mu":
        return _ESTIMATORS.get(name, name)
    return f"method__{name.replace('.', '__')}"


def _space(settings: Settings) -> dict[str, Sequence[Any]]:
    """What is worth trying for a method on a table."""
    method = methods.get(settings.method)
    space: dict[str, Sequence[Any]] = {
        "hidden": ((50,), (100,), (300,), (100, 50), (300, 100)),
        "activation": ("relu", "tanh"),
    }
    if any(name.endswith("learning_rate") for name in method.get_params()):
        space["learning_rate"] = (0.0005, 0.001, 0.002, 0.005, 0.01)
        space["alpha"] = (0.001, 0.01, 0.1, 1.0, 10.0)
    if not method.full_batch:
        space["batch_size"] = (32, 100)
    return space


def _varied(texts: Sequence[str]) -> dict[str, tuple[Any, ...]]:
    varied = {}
    for name, values in options.pairs("--vary", "alpha=0.1/1", texts).items():
        name = name.replace("-", "_")
        read = options.widths if name == "hidden" else options.value
        varied[name] = tuple(read(value) for value in values.split("/"))
    return varied


def _text(value: Any) -> str:
    if isinstance(value, tuple):
        return ",".join(map(str, value)) or "none"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _command(
    context: typer.Context, data: str, candidate: Mapping[str, Any], epochs: int
) -> list[str]:
    """The words that train with the chosen settings, and all else as it was given here."""
    words = ["lpom", "train", data]
    for given, value in options.given(context).items():
        if given not in _OWN:
            many = value if isinstance(value, list) else [value]
            words += [word for one in many for word in (given, str(one))]
    for name, value in candidate.items():
        if name in _OF_TRAINING:
            words += [f"--{name.replace('_', '-')}", _text(value)]
        else:
            words += ["--set", f"{name}={_text(value)}"]
    return [*words, "--epochs", str(epochs)]
