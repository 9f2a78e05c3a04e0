"""Run the tables of `lpom.experiments.beyond`, and lay them out."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from lpom import datasets
from lpom.experiments.beyond import TABLES, Row, Table
from lpom.experiments.records import Store
from lpom.experiments.reproduce import Say, follow, outcome
from lpom.experiments.trials import run
from lpom.experiments.tried import network_text, options_text, others, params_text, tried, unusual

#: Names of what `remains` measures, as the table has them.
SHARES = {
    "nonzero": "weights that are not zero",
    "weights": "compacted: weights",
    "bytes": "bytes of the file",
    "time": "time",
}


def reproduce_rows(
    name: str,
    *,
    folder: Path,
    seeds: Sequence[int] = (0, 1, 2),
    epochs: int | None = None,
    columns: Sequence[str] | None = None,
    rows: Sequence[str] | None = None,
    data_dir: str | None = None,
    say: Say = lambda sentence: None,
) -> list[dict[str, Any]]:
    """All records of a table, running what is missing. Cut, it goes on where it was.

    Of ``columns`` and ``rows`` those count that the table has.
    """
    table, loaded = TABLES[name], {}
    store = Store(folder / f"{name}.jsonl")
    records = []
    for row in table.rows:
        if rows is not None and row.name not in rows:
            continue
        dataset = row.trial.dataset
        if dataset not in loaded:
            loaded[dataset] = datasets.load(dataset, data_dir)
        for column in row.rates:
            if columns is not None and column not in columns:
                continue
            for trial in row.trials(column, tuple(seeds), epochs):
                record = run(trial, loaded[dataset], store, on_epoch=follow(trial, row.name, say))
                title = table.columns[column]
                say(f"{title}, {row.title}, seed {trial.seed}: {outcome(record)}")
                records.append(record)
    return records


def rows_section(table: Table, folder: Path) -> str:
    """A table as Markdown; empty if nothing of it was run."""
    records = list(Store(folder / f"{table.name}.jsonl"))
    found = {
        row.name: {column: _runs(table, row, column, records) for column in row.rates}
        for row in table.rows
    }
    if not any(runs for columns in found.values() for runs in columns.values()):
        return ""
    heads = ["network", "wanted", *table.columns.values(), "reached", "published"]
    lines = [f"## {table.title}", "", f"`lpom reproduce {table.name}`", "", _line(heads)]
    lines.append(_line(["---"] * len(heads)))
    for row in table.rows:
        columns = found[row.name]
        cells = [cell(columns.get(column, [])) or "-" for column in table.columns]
        wanted = "-" if row.least is None else f"{row.least:.1f}"
        lines.append(_line([row.title, wanted, *cells, _verdict(row, columns), row.published]))
    lines += _remains(table, found)
    lines += ["", *(f"- {sentence}" for sentence in _facts(table, found))]
    for more in (others(table.name, folder), tried(table.name, folder)):
        lines += ["", *more] if more else []
    return "\n".join([*lines, ""])


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _runs(
    table: Table, row: Row, column: str, records: Sequence[dict[str, Any]]
) -> list[dict[str, Any]]:
    """The runs of the row's own length, else the longest there are that are no other row's."""
    seeds = tuple(sorted({r["seed"] for r in records}))
    others = {
        trial.key
        for other in table.rows
        if other is not row and column in other.rates
        for trial in other.trials(column, seeds, None)
    }
    for epochs in sorted({r["epochs"] for r in records}, key=lambda n: (n != row.trial.epochs, -n)):
        keys = {trial.key for trial in row.trials(column, seeds, epochs)} - others
        found = [r for r in records if r["key"] in keys]
        if found:
            return found
    return []


def cell(records: Sequence[dict[str, Any]]) -> str:
    """Mean, spread and number of seeds; a seed that came to nothing is said too."""
    scores = [100 * r["score"] for r in records if "score" in r]
    failed = f", {len(records) - len(scores)} failed" if len(scores) < len(records) else ""
    if not scores:
        return f"failed: {records[0]['reason']}" if records else ""
    spread = f" ± {statistics.stdev(scores):.2f}" if len(scores) > 1 else ""
    return f"{statistics.mean(scores):.2f}{spread} ({len(scores)}{failed})"


def _mean(records: Sequence[dict[str, Any]]) -> float | None:
    scores = [100 * r["score"] for r in records if "score" in r]
    return statistics.mean(scores) if scores else None


def _verdict(row: Row, columns: dict[str, list[dict[str, Any]]]) -> str:
    """Whether LPOM's mean is as high as it is to be, and how far it is from the best rival."""
    own = _mean(columns.get("lpom", []))
    if own is None:
        return "not run"
    words = [] if row.least is None else ["yes" if own >= row.least else "no"]
    rivals = [_mean(runs) for column, runs in columns.items() if column != "lpom"]
    known = [rival for rival in rivals if rival is not None]
    if known:
        ahead = own - max(known)
        within = row.margin is None or ahead >= -row.margin
        words.append(f"{ahead:+.2f} to the rival{'' if within else ', too far below'}")
    if any(r["epochs"] != row.trial.epochs for r in columns["lpom"]):
        words.append(f"after {columns['lpom'][0]['epochs']} epochs only")
    return "; ".join(words) or "-"


def _remains(table: Table, found: dict[str, dict[str, list[dict[str, Any]]]]) -> list[str]:
    """What is left of each network that LPOM made smaller, in per cent of the whole one."""
    rows = []
    for row in table.rows:
        measured = [r["remains"] for r in found[row.name].get("lpom", []) if "remains" in r]
        if measured:
            cells = [f"{100 * statistics.mean(m[name] for m in measured):.1f}" for name in SHARES]
            rows.append(_line([row.title, *cells]))
    if not rows:
        return []
    heads = ["left of LPOM's networks, per cent", *SHARES.values()]
    return ["", _line(heads), _line(["---"] * len(heads)), *rows]


def _facts(table: Table, found: dict[str, dict[str, list[dict[str, Any]]]]) -> Iterator[str]:
    """What was run, in sentences: networks, settings, time."""
    yield from table.notes
    for row in table.rows:
        runs = {column: records for column, records in found[row.name].items() if records}
        if not runs:
            yield f"{row.title}: not run; `lpom reproduce {table.name} --rows {row.name}`."
            continue
        first = next(iter(runs.values()))[0]
        help = "" if row.helps else params_text(unusual(first))
        settings = "; ".join(
            f"{table.columns[column]} {_settings(row, records[0])}"
            for column, records in runs.items()
        )
        network = network_text(first | ({"options": row.trial.options} if row.helps else {}))
        yield (
            f"{row.title}: {network}; {first['epochs']} epochs, batch "
            f"{first['batch_size']}, loss {first['loss']}{', ' if help else ''}{help}; {settings}."
        )
    versions = {
        f"lpom {r['machine']['lpom']}, torch {r['machine']['torch']}"
        for columns in found.values()
        for records in columns.values()
        for r in records
    }
    yield f"Made with {'; '.join(sorted(versions))}."


def _settings(row: Row, record: dict[str, Any]) -> str:
    """Those of the method, with the help that it has for itself."""
    texts = [params_text(record["params"])]
    if row.helps:
        options, common = record["options"], row.trial.options
        own = {name: value for name, value in options.items() if name not in common}
        texts += [*options_text(own), params_text(unusual(record))]
    return ", ".join(text for text in texts if text)
