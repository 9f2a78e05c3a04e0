"""``lpom train text.txt --network char-transformer``: a character model of any text."""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.markup import escape

import lpom
from lpom import methods, networks, plots, runs
from lpom.checks import as_device
from lpom.exceptions import ModelFileError
from lpom.experiments.text import HELD_OUT, Text, TextModel, train_text
from lpom.files import write_atomically
from lpom.folders import (
    CHECKPOINT,
    CONFIG,
    CURVES,
    HISTORY,
    MODEL,
    TENSORBOARD,
    begin,
    begun,
    forget_checkpoint,
)
from lpom.runs import Settings
from lpom.settings import settings_text
from lpom.tensorboard import TensorBoard
from lpom.training import Callback
from lpom.training.progress import epoch_lines

SAMPLES = "samples.txt"
#: Options of `lpom train` that a text has a use for.
OPTIONS = (
    *("DATA", "--network", "--network-option", "--method", "--mu", "--learning-rate", "--set"),
    *("--epochs", "--batch-size", "--seed", "--device", "--out", "--tensorboard", "--force"),
    "--quiet",
)
_EPOCHS, _BATCH, _LENGTH = 10, 32, 128
_N_SAMPLES, _SAMPLED = 3, 300


def is_for_texts(network: str | None) -> bool:
    """Whether a network of this name predicts the characters of a text."""
    return network is not None and networks.takes_texts(network)


def start(
    data: str, settings: Settings, folder: Path, console: Console, *, tensorboard: bool, quiet: bool
) -> None:
    """Train on a text file, and write the run to a folder."""
    path = Path(data).resolve()
    text = Text.read(path)
    config = _planned(path, text, settings)
    notes = {"text": str(path), "settings": asdict(settings), "config": config}
    begin(folder, {**notes, "files": runs.digests([str(path)]), "tensorboard": tensorboard})
    _train(text, settings, config, folder, console, tensorboard=tensorboard, quiet=quiet)


def resume(notes: Mapping[str, Any], folder: Path, console: Console, *, quiet: bool) -> None:
    """Go on with a run on a text that was stopped before its end."""
    runs.check_files(notes["files"])
    text, settings = Text.read(notes["text"]), Settings.of(notes["settings"])
    config, tensorboard = dict(notes["config"]), bool(notes["tensorboard"])
    _train(text, settings, config, folder, console, tensorboard=tensorboard, quiet=quiet)


def _train(
    text: Text,
    settings: Settings,
    config: dict[str, Any],
    folder: Path,
    console: Console,
    *,
    tensorboard: bool,
    quiet: bool,
) -> None:
    console.print(escape(_header(config)), soft_wrap=True)
    with ExitStack() as stack:
        log: list[Callback] = [] if quiet or sys.stderr.isatty() else [epoch_lines()]
        if tensorboard:
            log.append(stack.enter_context(TensorBoard(folder / TENSORBOARD)))
        stack.enter_context(warnings.catch_warnings())
        warnings.filterwarnings("ignore", message="training was interrupted")  # the status says it
        trained = train_text(
            text,
            network=str(settings.network),
            method=_method(settings),
            epochs=config["epochs"],
            length=config["network"]["length"],
            batch_size=config["batch_size"],
            seed=settings.seed,
            options=config["network"]["options"],
            device=config["device"],
            callbacks=log,
            progress=False if quiet else None,
            checkpoint=folder / CHECKPOINT,
        )
    samples = [trained.sample(_SAMPLED, seed=seed) for seed in range(_N_SAMPLES)]
    _write(trained, config, samples, folder)
    interrupted = config["status"] == "interrupted"
    console.print(escape(_bits(config["results"])), soft_wrap=True)
    if not interrupted:
        forget_checkpoint(folder)  # last: until then the run can go on
        console.print(escape(samples[0]), soft_wrap=True, style="dim")
    typer.echo(str(folder) if quiet else f"run: {folder}")
    if interrupted:
        if begun(folder):
            typer.echo(f"stopped; go on with: lpom train --resume {folder}", err=True)
        raise typer.Exit(130)


def _write(trained: TextModel, config: dict[str, Any], samples: list[str], folder: Path) -> None:
    """The files of the run, the config last."""
    assert trained.result is not None
    trained.save(folder / MODEL)
    trained.result.history.to_jsonl(folder / HISTORY)
    plots.curves(trained.result.history, folder / CURVES)
    write_atomically(folder / SAMPLES, "\n\n".join(samples).encode())
    config["status"] = trained.result.status
    config["results"] = {"bits per character": trained.bits, "by frequency": trained.baseline}
    config["timing"] = {"seconds": trained.result.seconds}
    config["model"] = runs.digests([str(folder / MODEL)]).popitem()[1]
    text = json.dumps(config, indent=2, ensure_ascii=False, default=str)
    write_atomically(folder / CONFIG, (text + "\n").encode())


def facts(folder: Path) -> dict[str, str] | None:
    """What ``lpom info`` shows of a finished run on a text; None if it is another run."""
    try:
        config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
        if "characters" not in config["data"]:
            return None
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None  # which is said by who reads other runs
    trained = TextModel.load(folder / MODEL)
    try:
        n_weights = sum(parameter.numel() for parameter in trained.model.parameters())
        method = dict(config["method"])
        name = method.pop("name")
        return {
            "data": f"{config['data']['name']} ({config['data']['notes']})",
            "network": f"{runs.network_text(config['network'])}; {n_weights:,} weights",
            "method": f"{name} ({settings_text(method)})",
            "training": f"{config['epochs']} epochs, batch size {config['batch_size']}, seed "
            f"{config['seed']}, on {config['device']}; {config['status']}",
            "held out": _bits(config["results"]),
            "samples": str(folder / SAMPLES),
        }
    except (KeyError, TypeError, AttributeError) as error:
        raise ModelFileError(
            f"{folder / CONFIG} lacks what `lpom train` writes ({error!r}). Train again."
        ) from error


def _planned(path: Path, text: Text, settings: Settings) -> dict[str, Any]:
    """The config of a run before it is trained."""
    options = dict(settings.network_options)
    method = _method(settings)
    return {
        "data": {
            "name": path.name,
            "notes": f"{len(text.indices):,} characters, {len(text.characters)} different, the "
            f"last {HELD_OUT:.0%} held out",
            "characters": len(text.indices),
        },
        "network": {
            "name": settings.network,
            "length": options.pop("length", _LENGTH),
            "options": options,
        },
        "method": {"name": method.name, **method.plain()},
        "epochs": settings.epochs or _EPOCHS,
        "batch_size": settings.batch_size or _BATCH,
        "seed": settings.seed,
        "device": str(as_device(settings.device)),
        "status": "running",
        "versions": {"lpom": lpom.__version__},
    }


def _method(settings: Settings) -> methods.Method[Any]:
    method = methods.get(settings.method)
    if settings.method_settings:
        method = method.with_params(**settings.method_settings)
    if settings.learning_rate is not None:
        method = method.with_learning_rate(settings.learning_rate)
    return method


def _header(config: Mapping[str, Any]) -> str:
    return (
        f"data     {config['data']['name']}: {config['data']['notes']}\n"
        f"network  {runs.network_text(config['network'])}\n"
        f"method   {config['method']['name']}, {config['epochs']} epochs, batches of "
        f"{config['batch_size']}"
    )


def _bits(results: Mapping[str, float]) -> str:
    return (
        f"{results['bits per character']:.3f} bits per character of the held-out end "
        f"({results['by frequency']:.3f} by the frequencies of characters alone)"
    )
