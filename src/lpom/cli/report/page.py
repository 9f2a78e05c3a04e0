"""The page as one HTML file that needs nothing else: no script, and nothing to fetch."""

from __future__ import annotations

import os
import warnings
from collections import Counter
from collections.abc import Sequence
from datetime import datetime
from html import escape
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np

import lpom
from lpom.cli.folder import METRICS, SETTINGS, as_written
from lpom.cli.report.plots import Series, bars, dots, lines
from lpom.cli.run import Run, network_text
from lpom.cli.tables import written
from lpom.files import write_atomically
from lpom.tables.values import Array

WORST = 20  # rows
_MATRIX = 30  # classes of a confusion matrix
_SHOWN = 6  # columns of a row
_ROWS, _COLUMNS = 500, 60  # for importances
_LONGEST = 40  # characters of a cell
_COLOURS = 6
_GROUPS = ("network", "method", "training", "data", "result", "versions")


def write_report(folders: Sequence[str | os.PathLike[str]], path: str | os.PathLike[str]) -> None:
    """Write the page about the runs in ``folders`` to ``path``, whole or not at all."""
    runs = []
    for folder, name in zip(folders, _names(folders), strict=True):
        run = Run.read(Path(folder))
        with as_written(f"{Path(folder) / SETTINGS} or {METRICS}"):
            runs.append((name, run, _sections(name, run)))
    title = runs[0][0] if len(runs) == 1 else f"{len(runs)} runs compared"
    compared = _compared([(name, run) for name, run, _ in runs]) if len(runs) > 1 else ""
    body = compared + "".join(sections for _, _, sections in runs)
    write_atomically(Path(path), page(f"lpom: {title}", body).encode())


def page(title: str, body: str) -> str:
    """The HTML around a body; its policy allows no script and no address to fetch from."""
    style = resources.files("lpom.cli.report").joinpath("style.css").read_text(encoding="utf-8")
    policy = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
    when = datetime.now().astimezone().strftime("%Y-%m-%d %H:%M")
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        f"<title>{escape(title)}</title>\n<style>{style}</style>\n</head>\n<body>\n"
        f"<h1>{escape(title)}</h1>\n"
        f'<p class="quiet">Written by lpom {escape(lpom.__version__)} on {when}.</p>\n'
        f"<main>{body}</main>\n</body>\n</html>\n"
    )


def _compared(runs: Sequence[tuple[str, Run]]) -> str:
    """Results side by side, curves over each other, and the settings that differ."""
    results = [run.metrics["results"]["test"] for _, run in runs]
    scores = [
        k
        for k in results[0]
        if k not in ("baseline", "score") and all(k in result for result in results)
    ]
    head = ["", *(name for name, _ in runs)]
    body = [[k, *(written(k, result[k]) for result in results)] for k in scores]
    seconds = [run.metrics["timing"]["training_seconds"] for _, run in runs]
    body.append(["training", *(f"{value:.3g} s" for value in seconds)])
    flat = [_settings(run) for _, run in runs]
    differing = {
        (group, name): [settings.get(group, {}).get(name, "–") for settings in flat]
        for settings in flat
        for group, values in settings.items()
        if group not in ("result", "versions")
        for name in values
    }
    changed = [
        [f"{group}: {name}" if group != name else name, *values]
        for (group, name), values in differing.items()
        if len(set(values)) > 1
    ]
    plots = _curves(runs)
    text = f"<h2>Side by side</h2>{_table(head, body)}<h3>Curves</h3>{plots}"
    if changed:
        text += f"<h3>Settings that differ</h3>{_table(head, changed)}"
    return text


def _sections(name: str, run: Run) -> str:
    metrics, settings = run.metrics, run.settings
    data, test = settings["data"], metrics["results"]["test"]
    n, planned = len(run.history), settings["epochs"]
    epochs = f"{n} of {planned} epochs" if n != planned else f"{n} epochs"
    about = (
        f"{data['name']}, {data['target']} ({data['task']}); network "
        f"{network_text(settings['network'])}; method {settings['method']['name']}, {epochs} "
        f"({metrics['status']}) in {metrics['timing']['training_seconds']:.3g} s."
    )
    shown = [k for k in test["baseline"] if k != "answer"]
    head = ["", "this run", test["baseline"]["answer"]]
    body = [[k, written(k, test[k]), written(k, test["baseline"][k])] for k in shown]
    if "F1" in shown:
        about += " F1 is the mean over the classes, each as one against the rest."
    parts = [
        f"<h2>{escape(name)}</h2><p>{escape(about)}</p>",
        *(f"<p>Note: {escape(hint)}</p>" for hint in metrics["hints"]),
        f"<h3>Scores on the {data['rows']['test']:,} test rows</h3>{_table(head, body)}",
        f"<h3>Curves</h3>{_curves([('', run)])}" if n else "",
        _judged(run),
        _importances(run),
        f"<h3>Settings</h3>{_settings_tables(run)}",
    ]
    return "".join(parts)


def _curves(runs: Sequence[tuple[str, Run]]) -> str:
    """Loss and score over epochs."""
    metric = runs[0][1].metrics["metric"]
    plots = []
    for column, title in (("loss", "loss per sample"), ("score", _named(metric))):
        series = []
        for k, (name, run) in enumerate(runs):
            for key, what in ((column, "training"), (f"validation_{column}", "held out")):
                values = run.history.column(key)
                colour = k % _COLOURS + 1 if len(runs) > 1 else 1 + (what == "held out")
                label = f"{name}, {what}" if name else what
                dashed = what == "training" and len(runs) > 1
                series.append(Series(label, range(1, 1 + len(values)), values, colour, dashed))
        plots.append(lines(title, series, percent=column == "score" and metric != "r2"))
    return f'<div class="plots">{"".join(plots)}</div>'


def _judged(run: Run) -> str:
    """What was predicted beside what is, and the rows that are furthest off."""
    kept, target = run.predictions, run.target
    if not kept["row"]:
        return ""
    n, of = len(kept["row"]), run.settings["data"]["rows"]["test"]
    some = f" (of {of:,} test rows {n:,} are kept)" if n < of else ""
    if target.task == "regression":
        parts = []
        for name in target.names:
            ending = "" if len(target.names) == 1 else f"_{name}"
            truth, said = _floats(kept[f"truth{ending}"]), _floats(kept[f"prediction{ending}"])
            error = said - truth
            worst = np.argsort(-np.abs(error), kind="stable")[:WORST]
            parts.append(
                f"<h3>Predicted against actual {escape(name)}{some}</h3>"
                f'<div class="wide">{dots(name, list(truth), list(said), "actual", "predicted")}'
                f"</div><h3>Largest errors</h3>"
                + _rows(
                    run,
                    worst,
                    {"actual": truth[worst], "predicted": said[worst], "error": error[worst]},
                )
            )
        return "".join(parts)
    if len(target.names) > 1:
        body = []
        for name in target.names:
            truth, said = np.array(kept[f"truth_{name}"]), np.array(kept[f"prediction_{name}"])
            body.append([name, f"{100 * (truth == said).mean():.2f} %"])
        return f"<h3>Right for each target</h3>{_table(['target', 'right'], body)}"
    truth, said = np.array(kept["truth"]), np.array(kept["prediction"])
    sure = _floats(kept["probability"])
    wrong = np.flatnonzero(truth != said)
    worst = wrong[np.argsort(-sure[wrong], kind="stable")][:WORST]
    text = ""
    classes = [str(label) for label in target.classes[0]]
    if len(classes) <= _MATRIX:
        text = f"<h3>Predicted (columns) against actual (rows){some}</h3>" + _matrix(
            classes, truth, said
        )
    order = ", the surest first" if len(wrong) else ""
    text += f"<h3>Mistakes: {len(wrong):,} of {n:,} rows{order}</h3>"
    if len(worst):
        shown = {"actual": truth[worst], "predicted": said[worst]}
        text += _rows(run, worst, shown | {"probability": sure[worst]})
    return text


def _matrix(classes: Sequence[str], truth: Array, said: Array) -> str:
    places = {label: k for k, label in enumerate(classes)}
    counts = np.zeros((len(classes), len(classes)), dtype=int)
    for actual, predicted in zip(truth, said, strict=True):
        counts[places[actual], places[predicted]] += 1
    head = "".join(f'<th class="number">{escape(label)}</th>' for label in classes)
    body = []
    for i, label in enumerate(classes):
        total = max(counts[i].sum(), 1)
        cells = "".join(
            f'<td class="{"right" if i == j else "wrong"}" style="--share:{count / total:.3f}" '
            f'title="{escape(label)} predicted as {escape(classes[j])}">{count or ""}</td>'
            for j, count in enumerate(counts[i])
        )
        body.append(f"<tr><th>{escape(label)}</th>{cells}</tr>")
    return (
        f'<div class="scroll"><table class="matrix"><thead><tr><th></th>{head}</tr></thead>'
        f"<tbody>{''.join(body)}</tbody></table></div>"
    )


def _rows(run: Run, places: Array, values: dict[str, Array]) -> str:
    """Rows of the table, with what they hold in its first columns."""
    columns = [name for name in run.predictions if name.startswith("column ")][:_SHOWN]
    head = ["row", *values, *(name.removeprefix("column ") for name in columns)]
    texts = [_alike(column) for column in values.values()]
    body = [
        [
            run.predictions["row"][k],
            *(column[i] for column in texts),
            *(_cell(run.predictions[name][k]) for name in columns),
        ]
        for i, k in enumerate(places)
    ]
    return _table(head, body)


def _importances(run: Run) -> str:
    """What the score loses when a column is shuffled, by scikit-learn's permutation importance."""
    names = [name for name in run.predictions if name.startswith("column ")]
    several = len(run.target.names) > 1
    if several or not 1 < len(names) <= _COLUMNS or len(run.predictions["row"]) < 2:
        return ""
    import pandas as pd
    from sklearn.inspection import permutation_importance

    frame = pd.DataFrame({name.removeprefix("column "): run.predictions[name] for name in names})
    truth: Any = np.array(run.predictions["truth"])
    truth = _floats(truth) if run.target.task == "regression" else truth
    if run.target.classes and isinstance(run.target.classes[0][0], int):
        truth = truth.astype(int)
    frame, truth = frame.iloc[:_ROWS], truth[:_ROWS]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            lost = permutation_importance(run.model, frame, truth, n_repeats=5, random_state=0)
        except ValueError:  # columns of other kinds than texts of a file
            return ""
    order = np.argsort(-lost.importances_mean, kind="stable")[:WORST]
    score = _named(run.metrics["metric"])
    return (
        f"<h3>Which columns matter</h3><p>What {score} loses when a column is shuffled among "
        f'{len(truth):,} test rows, and the spread over five times.</p><div class="wide">'
        + bars(
            f"{score} lost",
            [str(frame.columns[k]) for k in order],
            [float(lost.importances_mean[k]) for k in order],
            [float(lost.importances_std[k]) for k in order],
        )
        + "</div>"
    )


def _settings(run: Run) -> dict[str, dict[str, str]]:
    """Name and value of every setting in groups."""
    groups: dict[str, dict[str, str]] = {group: {} for group in _GROUPS}
    for name, value in run.settings.items():
        parts = value if isinstance(value, dict) and name in groups else {name: value}
        group = name if isinstance(value, dict) and name in groups else "training"
        for part, inner in parts.items():
            if part != "source":  # a page goes to others: it names the table, not where it lies
                groups[group][part.replace("_", " ")] = _text(inner)
    timing = run.metrics["timing"]
    speed = timing["samples_per_second"]
    groups["result"] = {
        "status": run.metrics["status"],
        "weights": run.metrics["weights"],
        "loss": _text(run.metrics["loss"]),
        "started": timing["started"],
        "training": f"{timing['training_seconds']:.3g} s",
        "samples per second": "–" if speed is None else f"{speed:,.0f}",
    }
    return groups


def _settings_tables(run: Run) -> str:
    tables = []
    for group, values in _settings(run).items():
        rows = "".join(
            f"<tr><th>{escape(name)}</th><td>{escape(value)}</td></tr>"
            for name, value in values.items()
        )
        tables.append(
            f"<table><thead><tr><th colspan=2>{group}</th></tr></thead>"
            f"<tbody>{rows}</tbody></table>"
        )
    return f'<div class="settings">{"".join(tables)}</div>'


def _table(head: Sequence[str], body: Sequence[Sequence[Any]]) -> str:
    """Columns of numbers stand to the right."""
    numeric = [
        bool(body) and all(_is_number(str(line[k])) for line in body) for k in range(len(head))
    ]
    style = [' class="number"' if right else "" for right in numeric]
    top = "".join(f"<th{style[k]}>{escape(str(name))}</th>" for k, name in enumerate(head))
    rows = "".join(
        f"<tr>{''.join(f'<td{style[k]}>{escape(str(v))}</td>' for k, v in enumerate(line))}</tr>"
        for line in body
    )
    return (
        f'<div class="scroll"><table><thead><tr>{top}</tr></thead><tbody>{rows}</tbody>'
        "</table></div>"
    )


def _alike(values: Array) -> list[str]:
    """Numbers of a column with the same number of decimals."""
    if values.dtype.kind != "f":
        return [str(value) for value in values]
    largest = float(np.abs(values).max()) if len(values) else 0.0
    if not 1e-4 <= largest < 1e7:
        return [f"{value:.3e}" for value in values]
    decimals = max(0, 3 - int(np.floor(np.log10(largest))))
    return [f"{value:,.{decimals}f}" for value in values]


def _is_number(text: str) -> bool:
    text = text.removesuffix(" %").removesuffix(" s").replace(",", "")
    try:
        float(text)
    except ValueError:
        return text in ("–", "")
    return True


def _named(metric: str) -> str:
    return "R²" if metric == "r2" else metric


def _floats(values: Any) -> Array:
    return np.array([float(value) for value in values])


def _cell(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 1]}…"


def _text(value: Any) -> str:
    if value is None or value == [] or value == {}:
        return "–"
    if isinstance(value, dict):
        return ", ".join(f"{name}: {_text(inner)}" for name, inner in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(map(_text, value))
    return f"{value:g}" if isinstance(value, float) else str(value)


def _names(folders: Sequence[str | os.PathLike[str]]) -> list[str]:
    """The last part of each path, or all of it where two share that."""
    short = [Path(folder).resolve().name for folder in folders]
    times = Counter(short)
    return [
        name if times[name] == 1 else os.fspath(folder)
        for name, folder in zip(short, folders, strict=True)
    ]
