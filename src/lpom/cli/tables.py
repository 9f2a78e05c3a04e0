"""Tables and sentences that more than one command prints."""

from __future__ import annotations

from pathlib import Path

from rich.table import Table
from rich.text import Text

from lpom.cli.run import OF_LOWEST_LOSS, Run
from lpom.tables import TableEncoder
from lpom.training.history import History

_MANY = 40  # columns; of more only those that are no plain numbers are listed
_PERCENT = ("accuracy", "balanced accuracy")
_BASELINE = "baseline"
_TOLD_APART = 0.7  # AUC from which on classes are told apart, whatever the accuracy
_MOST_ALIKE = 0.6  # share of one class from which on the others are rare


def plan_table(encoder: TableEncoder) -> Table:
    """What is done with each column."""
    rows = encoder.plan()
    plain = [row for row in rows if row[1:] == ("number", "")]
    table = Table()
    table.add_column("column")
    table.add_column("taken as", no_wrap=True)
    table.add_column("remarks")
    if len(rows) > _MANY:
        rows = [row for row in rows if row not in plain]
        table.caption = f"and {len(plain)} numbers without remarks"
        table.caption_justify = "left"
    for name, kind, why in rows:
        style = "dim" if kind == "dropped" else None
        table.add_row(Text(name), Text(kind), Text(why), style=style)
    return table


def results_table(run: Run) -> Table:
    """Loss and accuracy (or R2) of each part of the data."""
    metric = run.metrics["metric"]
    table = Table()
    for column in ("rows", "number", "loss", "R²" if metric == "r2" else metric):
        table.add_column(column, justify="left" if column == "rows" else "right")
    for part, values in run.metrics["results"].items():
        score = values["score"]
        shown = written("R²" if metric == "r2" else metric, score)
        style = "bold" if part == "test" else None
        number = f"{run.settings['data']['rows'][part]:,}"
        table.add_row(part, number, f"{values['loss']:.4g}", shown, style=style)
    return table


def training_line(run: Run) -> str:
    """Epochs, after which of them the weights were best, time and speed."""
    metrics, timing = run.metrics, run.metrics["timing"]
    parts = [f"{len(run.history)} epoch{'' if len(run.history) == 1 else 's'}"]
    losses = run.history.column("validation_loss")
    if metrics["weights"] == OF_LOWEST_LOSS and losses and None not in losses:
        best = 1 + losses.index(min(losses))
        parts.append(f"the weights are those of epoch {best}, the best on held-out rows")
    parts.append(f"{timing['training_seconds']:.1f} s of training")
    if (speed := timing["samples_per_second"]) is not None:
        parts.append(f"{speed:,.0f} samples/s")
    return "; ".join(parts)


def scores_table(run: Run) -> Table:
    """Every score on the test rows beside that of an answer which is always the same."""
    test = run.metrics["results"]["test"]
    baseline = test[_BASELINE]
    regression = run.metrics["metric"] == "r2"
    f1 = "; F1 is the mean over the classes, each as one against the rest" if "F1" in test else ""
    unit = f", in units of {run.settings['data']['target']}" if regression and "MAE" in test else ""
    table = Table(caption=f"on the test rows{unit}{f1}", caption_justify="left")
    table.add_column("score")
    table.add_column("this run", justify="right")
    table.add_column(Text(baseline["answer"]), justify="right")
    for name in baseline:
        if name != "answer":
            table.add_row(name, written(name, test[name]), written(name, baseline[name]))
    return table


def written(name: str, value: float) -> str:
    """A score with as many digits as make sense."""
    if name in _PERCENT:
        return f"{100 * value:.2f} %"
    if name in ("AUC", "F1", "R²") and abs(value) < 1e4:
        return f"{value:.4f}"
    return f"{value:,.0f}" if 1e3 <= abs(value) < 1e15 else f"{value:.4g}"


def advice(run: Run, folder: Path) -> list[str]:
    """What to do next."""
    metrics, history = run.metrics, run.history
    test, train = metrics["results"]["test"], metrics["results"]["train"]
    lines = [f"note: {hint}" for hint in metrics["hints"]]
    if said := no_better(run):
        lines.append(said)
    elif train["score"] - test["score"] > 0.1:
        lines.append(
            "much better on the training rows than on the test rows: try --alpha 1, a smaller "
            "--hidden, or more rows."
        )
    if metrics["status"] == "finished" and _falling(history):
        lines.append(
            f"the loss was still falling after {len(history)} epochs: try --epochs "
            f"{3 * len(history)}."
        )
    lines.append(f"next: lpom predict {folder} NEW.csv    lpom report {folder} --open")
    return lines


def no_better(run: Run) -> str:
    """What to do where an answer that is always the same is as good; nothing if it is not."""
    test = run.metrics["results"]["test"]
    weighted = run.settings["class_weight"] is not None
    name = (
        "R²" if run.metrics["metric"] == "r2" else "balanced accuracy" if weighted else "accuracy"
    )
    if name not in test or test[name] > test[_BASELINE][name]:
        return ""
    rare = test[_BASELINE].get("accuracy", 0.0) > _MOST_ALIKE  # others are
    if test.get("AUC", 0.0) > _TOLD_APART and rare and not weighted:
        return (
            f"no more rows are right than with an answer that is {test[_BASELINE]['answer']}, "
            f"although the classes are told apart (AUC {test['AUC']:.2f}): --class-weight balanced "
            "finds the rare ones."
        )
    return "no better than the constant baseline: more rows or other columns would help most."


def _falling(history: History) -> bool:
    """Whether the last tenth of the epochs brought the loss down by more than 2 %."""
    watched = history.column("validation_loss")
    losses = history.column("loss") if None in watched else watched
    end = len(losses) - max(1, len(losses) // 10)
    return end > 0 and min(losses[end:]) < 0.98 * min(losses[:end])
