"""Tables of ``experiments/README.md``, made from the results: no number is typed by hand."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, cast

from lpom import methods
from lpom.experiments.beyond import PAST, TABLES
from lpom.experiments.paper import EXPERIMENTS, Experiment, Long, Role, rate_of
from lpom.experiments.plots import draw_curves, draw_points
from lpom.experiments.records import Store, Trial
from lpom.experiments.reproduce import chosen_rate, long_run, tuning_trials, watched
from lpom.experiments.rows import cell, rows_section
from lpom.experiments.tried import others, output_text, params_text, tried
from lpom.files import write_atomically

HEAD = """# The paper's experiments

{picture}**The paper claims** that layers can be trained without derivatives of the activations,
by solving for states and weights in turn, and that this is more accurate than SGD and than other
lifted methods.

**To the letter**, Algorithm 1 does learn, but it is not steady. From feed-forward states its
first pass, from the bottom up, sends no signal down: with one iteration only the last weights
learn. With several, the plain iteration of eq. 25 does not contract for weights of the usual size
(Theorem 2 asks for more than they give), and without a ridge the pseudo-inverse of rank-deficient
states throws the weights far. One network of Table 2, 500-200-100, passes the printed number with
every seed, and the best run of the shallowest comes near it; others lose in later epochs what they
had learned, end far below, or diverge, as their columns and crosses show. The wide networks of
Figure 1 learn steadily for as long as they were watched, but that of CIFAR-10 has all that it ever
has on held-out images after its third epoch.

**What makes it hold** is an order from the output down that shares one residual between states
and weights, a ridge, biases and an output that can't die: *as in the paper* then meets or beats
every number that the paper printed for LPOM (on SVHN with an eighth of its data), with its
objective, networks, mu, loss and exact weight step.

**What is gained beyond back-propagation, and what is not:** with these smooth and piecewise
linear activations nothing in accuracy: *best* gives the same residuals to Adam, and is where
matched Adam is, within the noise of the seeds. With batch norm, dropout and label smoothing for
all of them both go far past the paper, Adam a little further (*Past the paper's numbers*, below).
What LPOM adds is elsewhere: activations without a derivative, penalties and few-bit weights
(below), layers at the same time
([docs/parallel.md](../docs/parallel.md)).

Made by `lpom reproduce`, from the lines of `results/`; do not edit. Test accuracy in per cent,
mean ± standard deviation over seeds (their number in brackets). "printed" columns are the paper's
own numbers.

- *LPOM, to the letter* is Algorithm 1 as printed: K1 times the hidden states from the bottom up
  and the output, then K2 iterations of Algorithm 2 with the pseudo-inverse; ReLU everywhere, no
  bias, no ridge. K1 and K2 were chosen on held-out digits among those that can be unfolded below
  Table 2.
- *LPOM, as in the paper* has the paper's objective, networks, mu, squared loss and exact weight
  step (Algorithm 2). It differs from Algorithm 1 in what the paper leaves open or what
  [docs/reproduction.md](../docs/reproduction.md) shows to matter: one interleaved sweep from the
  output down updates states and weights together, the output is a leaky ReLU where the paper has
  a ReLU, layers have biases, and the weight step has a ridge.
- *LPOM, best* gives the same gradients of the weights to Adam in place of the exact step.
  *Adam* and *SGD* (without momentum) are back-propagation with the same initial weights, batches,
  loss, output and epochs. All three let the learning rate fall linearly to zero.
- Learning rates with a grid were chosen on a sixth of the training data, held out, on the first
  network of the experiment. Losses, outputs and other settings were chosen for LPOM and then given
  to Adam and SGD; what was tried can be unfolded below each table.
- Each run measures the test set once, after its last epoch. Where other settings were measured on
  it as well, nearly all of them before, those runs can be unfolded too.
- Runs made with the *earlier core* are older than the graphs of states: their settings are written
  in the names of today, their figures are as they were measured.
- Times are from a machine that did other work as well and are not comparable; `lpom bench step`
  compares time and memory.
"""

BEYOND = """<!-- beyond the paper -->
What follows is not of the paper: networks without derivatives, of few bits and of few weights, in
the same form. Networks, epochs, batches, loss and penalties are those of the row in every column;
learning rates and other settings were chosen on held-out training data, see
[docs/discrete.md](../docs/discrete.md). "reached" compares the means of LPOM with what was wanted
and with the best rival.
"""


def write_summary(folder: Path) -> Path:
    """Write the README beside ``folder``, the results."""
    path = summary_path(folder)
    sections = [section(experiment, folder) for experiment in EXPERIMENTS.values()]
    sections.append(rows_section(PAST, folder))
    further = (table for table in TABLES.values() if table is not PAST)
    beyond = [s for table in further if (s := rows_section(table, folder))]
    parts = [HEAD.format(picture=_overview(folder)), *(s for s in sections if s)]
    parts += [*[BEYOND] * bool(beyond), *beyond]
    write_atomically(path, "\n".join(parts).encode())
    return path


def summary_path(folder: Path) -> Path:
    """Where the tables of ``folder`` go; a README that is not ours is not written over."""
    path = folder.parent / "README.md"
    if path.exists() and not path.read_text().startswith(HEAD.splitlines()[0]):
        raise ValueError(
            f"the tables would be written over {path}, which is about something else. Name "
            "another folder for the results, e.g. --out experiments/results."
        )
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
            cell([r for r in found if tuple(r["hidden"]) == hidden]) for found in shown.values()
        ]
        rows.append(row)
    lines = [f"## {experiment.title}", "", f"`lpom reproduce {experiment.name}`", ""]
    lines += ["| " + " | ".join(row) + " |" for row in rows]
    if experiment.curves:
        lines += _pictures(experiment, shown, records, folder.parent)
    lines += ["", *(f"- {sentence}" for sentence in _facts(experiment, shown, records))]
    for more in (others(experiment.name, folder), tried(experiment.name, folder)):
        lines += ["", *more] if more else []
    return "\n".join([*lines, ""])


def _overview(folder: Path) -> str:
    """The first experiment as a picture, if it was run: every run of every network and role."""
    experiment = next(iter(EXPERIMENTS.values()))
    records = list(Store(folder / f"{experiment.name}.jsonl"))
    scores: dict[str, list[list[float]]] = {
        f"printed: {name}": [[number / 100] for number in numbers]
        for name, numbers in experiment.printed.items()
    }
    for role in experiment.roles.values():
        runs = _final_runs(experiment, role, records)
        if runs:
            scores[role.title] = [
                [r.get("score", 0.0) for r in runs if tuple(r["hidden"]) == hidden]
                for hidden in experiment.networks
            ]
    if len(scores) == len(experiment.printed):
        return ""
    path = folder.parent / f"{experiment.name}.png"
    networks = ["-".join(map(str, hidden)) for hidden in experiment.networks]
    draw_points(scores, networks, path, experiment.title)
    return f"![{experiment.title}]({path.name})\n\n"


def _pictures(
    experiment: Experiment,
    shown: dict[str, list[dict[str, Any]]],
    records: Sequence[dict[str, Any]],
    folder: Path,
) -> list[str]:
    """Draw the curves of finished runs, on training and on held-out data, beside the README."""
    known = {record["key"]: record for record in records}
    titles = {name: experiment.roles[name].title for name in shown}
    finished = {titles[name]: [r for r in found if "score" in r] for name, found in shown.items()}

    def those(names: Iterable[str], of: Callable[[Role, Trial], Trial]) -> dict[str, list[Any]]:
        """Watched runs that belong to the finished ones, by the title of their role."""
        keys = {
            name: [of(experiment.roles[name], _trial(r)).key for r in shown[name]] for name in names
        }
        return {
            titles[name]: [known[k] for k in found if _was_watched(known.get(k, {}))]
            for name, found in keys.items()
        }

    held_out = those(shown, lambda role, trial: watched(trial))
    with_long = [name for name in shown if experiment.roles[name].long is not None]
    long = those(with_long, lambda role, trial: long_run(cast(Long, role.long), trial))
    lines = []
    for name, runs, what, column in (
        ("training", finished, "training accuracy", "score"),
        ("held-out", held_out, "accuracy on held-out training data", "validation_score"),
        ("long-training", long, "training accuracy of long runs", "score"),
        ("long-held-out", long, "held-out training data, long runs", "validation_score"),
    ):
        if any(runs.values()):
            title, path = f"{experiment.title}: {what}", folder / f"{experiment.name}-{name}.png"
            draw_curves(runs, path, title, column)
            lines += ["", f"![{title}]({path.name})"]
    return lines


def _was_watched(record: dict[str, Any]) -> bool:
    """Not if it failed, or was a tuning run of the same length, measured only at its end."""
    curve = record.get("curve", [])
    return bool(curve) and curve[-1]["validation_score"] is not None


def _trial(record: dict[str, Any]) -> Trial:
    return Trial(**{name: record[name] for name in Trial.__dataclass_fields__ if name in record})


def _tuning(
    experiment: Experiment, role: Role, records: Sequence[dict[str, Any]], epochs: int
) -> list[dict[str, Any]]:
    """The runs that chose the learning rate, in the order of the grid."""
    known = {record["key"]: record for record in records}
    trials = tuning_trials(experiment, role, epochs)
    return [known[trial.key] for trial in trials if trial.key in known]


def _final_runs(
    experiment: Experiment, role: Role, records: Sequence[dict[str, Any]]
) -> list[dict[str, Any]]:
    """The runs with the learning rate that was chosen, of the role's own length or the longest."""
    own = role.epochs or experiment.epochs
    for epochs in sorted({r["epochs"] for r in records}, key=lambda n: (n != own, -n)):
        rate = chosen_rate(_tuning(experiment, role, records, epochs))
        found = [
            r
            for r in records
            if r["key"] == experiment.trial(role, r["hidden"], r["seed"], epochs, rate).key
        ]
        if found:
            return found
    return []


def _facts(
    experiment: Experiment, shown: dict[str, list[dict[str, Any]]], records: list[dict[str, Any]]
) -> list[str]:
    """What was run, in sentences: epochs, settings, learning rates, time, machine."""
    sentences = [*experiment.notes]
    if experiment.paper_epochs:
        sentences.append(f"The paper's runs have {experiment.paper_epochs} epochs.")
    if experiment.curves:
        sentences.append(
            "The number of epochs here was set by the machine. In place of the paper's curves on "
            "the test set, which is measured only once, a further run of each was watched on "
            "held-out training data: those curves tell how far they had flattened."
        )
    longs = {
        experiment.roles[name].title: long
        for name in shown
        if (long := experiment.roles[name].long) is not None
    }
    if longs:
        listed = "; ".join(
            f"{title} {long.epochs}{' (products in bfloat16)' if long.precision else ''}"
            for title, long in longs.items()
        )
        sentences.append(
            f"Long runs are of one seed, on held-out training data, with these epochs: {listed}. "
            "Learning rates fall to zero at their end."
        )
    for name, found in shown.items():
        role, first = experiment.roles[name], found[0]
        params = params_text(first["params"])
        sentence = (
            f"{role.title}: {first['epochs']} epochs, {_batch(first)}, loss "
            f"{first['loss']}, output {output_text(first)}{', ' if params else ''}{params}"
        )
        seconds = [r["seconds"] / r["epochs"] for r in found if "seconds" in r]
        if seconds:
            threads = first["machine"]["threads"]
            sentence += f"; {statistics.mean(seconds):.1f} s an epoch on {threads} thread(s)"
        planned = role.epochs or experiment.epochs
        if first["epochs"] < planned:
            sentence += f"; not finished, {planned} epochs are planned"
        sentence += "." + _choice(_tuning(experiment, role, records, first["epochs"]))
        remarks = {remark for r in found for remark in r.get("remarks", ())}
        sentences.append(" ".join([sentence, *sorted(remarks)]))
    versions = sorted(
        {
            f"lpom {r['machine']['lpom']}{_core(r)}, torch {r['machine']['torch']}"
            for found in shown.values()
            for r in found
        }
    )
    return [*sentences, f"Made with {'; '.join(versions)}."]


def _core(record: dict[str, Any]) -> str:
    core = record["machine"].get("core")
    return f" ({core})" if core else ""


def _batch(record: dict[str, Any]) -> str:
    whole = methods.METHODS[record["method"]].full_batch
    return "all rows at once" if whole else f"batch {record['batch_size']}"


def _choice(tuning: Sequence[dict[str, Any]]) -> str:
    """What the grid of learning rates gave, and whether its best one is at its edge."""
    if not tuning:
        return ""
    scores = [f"{100 * r['score']:.2f}" if "score" in r else "failed" for r in tuning]
    rates = [rate_of(r) for r in tuning]
    shown = ", ".join(f"{rate:g}: {score}" for rate, score in zip(rates, scores, strict=True))
    chosen = chosen_rate(tuning)
    edge = f" {chosen:g} is at the edge of the grid." if chosen in (min(rates), max(rates)) else ""
    return f" Held-out accuracy by learning rate after {tuning[0]['epochs']}: {shown}.{edge}"
