"""Tables of ``experiments/README.md``, made from the results: no number is typed by hand."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lpom.experiments.paper import EXPERIMENTS, Experiment, Role
from lpom.experiments.plots import draw_training
from lpom.experiments.reproduce import tuning_trials
from lpom.experiments.trials import Store
from lpom.files import write_atomically

HEAD = """# The paper's experiments

Made by `lpom reproduce`, from the lines of `results/`; do not edit. Test accuracy in per cent,
mean ± standard deviation over seeds; the test set is measured once, after the last epoch.
Learning rates with a grid were chosen on a sixth of the training data, held out, on the first
network of the experiment. "printed" columns are the paper's own numbers.
"""


def write_summary(folder: Path) -> Path:
    """Write the README beside ``folder``, the results."""
    sections = [section(experiment, folder) for experiment in EXPERIMENTS.values()]
    path = folder.parent / "README.md"
    write_atomically(path, "\n".join([HEAD, *(s for s in sections if s)]).encode())
    return path


def section(experiment: Experiment, folder: Path) -> str:
    """One experiment as Markdown; empty if nothing of it was run."""
    records = list(Store(folder / f"{experiment.name}.jsonl"))
    columns = {
        name: _final_runs(experiment, role, records) for name, role in experiment.roles.items()
    }
    shown = {name: found for name, found in columns.items() if found}
    if not shown:
        return ""
    printed = [f"printed: {column}" for column in experiment.printed]
    heads = ["hidden layers", *printed, *(experiment.roles[name].title for name in shown)]
    rows = [heads, ["---"] * len(heads)]
    for k, hidden in enumerate(experiment.networks):
        row = ["-".join(map(str, hidden))]
        row += [f"{numbers[k]:.1f}" for numbers in experiment.printed.values()]
        row += [
            _cell([r for r in found if tuple(r["hidden"]) == hidden]) for found in shown.values()
        ]
        rows.append(row)
    lines = [f"## {experiment.title}", "", f"`lpom reproduce {experiment.name}`", ""]
    lines += ["| " + " | ".join(row) + " |" for row in rows]
    if experiment.curves:
        lines += ["", f"![{experiment.title}]({_picture(experiment, shown, folder).name})"]
    lines += ["", *(f"- {sentence}" for sentence in _facts(experiment, shown, records))]
    return "\n".join([*lines, ""])


def _picture(experiment: Experiment, shown: dict[str, list[dict[str, Any]]], folder: Path) -> Path:
    """Draw the training curves beside the README."""
    finished = {
        experiment.roles[name].title: runs
        for name, found in shown.items()
        if (runs := [r for r in found if "score" in r])
    }
    path = folder.parent / f"{experiment.name}.png"
    if finished:
        draw_training(finished, path, experiment.title)
    return path


def _tuning(
    experiment: Experiment, role: Role, records: Sequence[dict[str, Any]], epochs: int
) -> list[dict[str, Any]]:
    """The runs that chose the learning rate, best first."""
    keys = {trial.key for trial in tuning_trials(experiment, role, epochs)}
    return sorted((r for r in records if r["key"] in keys), key=lambda r: -r.get("score", 0.0))


def _final_runs(
    experiment: Experiment, role: Role, records: Sequence[dict[str, Any]]
) -> list[dict[str, Any]]:
    """The runs with the learning rate that was chosen, of the role's own length or the longest."""
    own = role.epochs or experiment.epochs
    for epochs in sorted({r["epochs"] for r in records}, key=lambda n: (n != own, -n)):
        tuning = _tuning(experiment, role, records, epochs)
        rate = {"learning_rate": tuning[0]["params"]["learning_rate"]} if tuning else {}
        found = [
            r
            for r in records
            if r["key"] == experiment.trial(role, r["hidden"], r["seed"], epochs, **rate).key
        ]
        if found:
            return found
    return []


def _cell(records: Sequence[dict[str, Any]]) -> str:
    scores = [100 * r["score"] for r in records if "score" in r]
    if not scores:
        return records[0]["reason"] if records else ""
    spread = f" ± {statistics.stdev(scores):.2f}" if len(scores) > 1 else ""
    return f"{statistics.mean(scores):.2f}{spread} ({len(scores)})"


def _facts(
    experiment: Experiment, shown: dict[str, list[dict[str, Any]]], records: list[dict[str, Any]]
) -> list[str]:
    """What was run, in sentences: epochs, settings, learning rates, time, machine."""
    sentences = [*experiment.notes, "Number of seeds in brackets."]
    if experiment.paper_epochs:
        sentences.append(f"The paper's runs have {experiment.paper_epochs} epochs.")
    for name, found in shown.items():
        role, first = experiment.roles[name], found[0]
        params = ", ".join(
            f"{key} {value:g}" if isinstance(value, float) else f"{key} {value}"
            for key, value in first["params"].items()
        )
        seconds = statistics.mean(r["seconds"] / r["epochs"] for r in found if "seconds" in r)
        sentence = (
            f"{role.title}: {first['epochs']} epochs, batch {first['batch_size']}, loss "
            f"{first['loss']}, output {first['output']}{', ' if params else ''}{params}; "
            f"{seconds:.1f} s an epoch on {first['machine']['threads']} thread(s)."
        )
        tuned = _tuning(experiment, role, records, first["epochs"])
        if tuned:
            grid = ", ".join(
                f"{r['params']['learning_rate']:g}: {100 * r['score']:.2f}" for r in tuned
            )
            sentence += f" Held-out accuracy by learning rate after {tuned[0]['epochs']}: {grid}."
        sentences.append(sentence)
    versions = sorted(
        {
            f"lpom {r['machine']['lpom']}, torch {r['machine']['torch']}"
            for found in shown.values()
            for r in found
        }
    )
    return [*sentences, f"Made with {'; '.join(versions)}."]
