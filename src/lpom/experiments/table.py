"""Results of a comparison as a table: means and spreads over seeds, and why not."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from lpom import methods
from lpom.settings import settings_text


@dataclass(frozen=True)
class Row:
    """All records of one method."""

    method: str
    records: list[dict[str, Any]]

    @property
    def finished(self) -> list[dict[str, Any]]:
        return [record for record in self.records if "reason" not in record]

    @property
    def full_batch(self) -> bool:
        return methods.METHODS[self.method].full_batch

    def values(self, key: str) -> list[float]:
        return [record[key] for record in self.finished]

    def at_end(self, key: str) -> list[float]:
        return [record["curve"][-1][key] for record in self.finished]

    def seconds(self) -> list[float]:
        return [epoch["seconds"] for record in self.finished for epoch in record["curve"]]

    def settings(self) -> str:
        params: dict[str, Any] = next(
            (record["params"] for record in self.records if "params" in record), {}
        )
        return settings_text(params)

    def remarks(self) -> list[str]:
        """Why it failed, and what it said, each sentence once."""
        said = [record["reason"] for record in self.records if "reason" in record]
        said += [remark for record in self.records for remark in record.get("remarks", ())]
        return list(dict.fromkeys(said))


@dataclass(frozen=True)
class Summary:
    """What was run, a table, best method first, and what its columns mean; as a text, Markdown."""

    about: str
    head: list[str]
    body: list[list[str]]
    notes: str

    def __str__(self) -> str:
        body = [[cell.replace("|", "\\|") for cell in line] for line in self.body]
        return f"{self.about}\n\n{aligned(self.head, body)}\n\n{self.notes}"


def summary(about: str, rows: Sequence[Row], n_seeds: int, score: str) -> Summary:
    """Time and memory stand beside how many times those of the first row they are."""
    done = [row for row in rows if row.finished]
    done.sort(key=lambda row: -statistics.fmean(row.values("score")))
    rest = [row for row in rows if not row.finished]
    head = [
        "method",
        f"test {score}",
        f"training {score}",
        "seconds per epoch",
        "peak memory",
        "objective",
        "epochs",
        "batches",
        "remarks",
    ]
    first = next((row for row in rows if row.finished), None)
    body = [_cells(row, first, n_seeds, score) for row in (*done, *rest)]
    settings = "\n".join(f"- {row.method}: {row.settings()}" for row in rows if row.settings())
    legend = _legend(rows, first, n_seeds, score)
    return Summary(about, head, body, f"{legend}\n\n{settings}")


def _cells(row: Row, first: Row | None, n_seeds: int, score: str) -> list[str]:
    remarks = row.remarks()
    if len(row.records) < n_seeds:
        remarks.insert(0, f"{len(row.records)} of {n_seeds} seeds run so far")
    elif row.finished and len(row.finished) < n_seeds:
        remarks.insert(0, f"{n_seeds - len(row.finished)} of {n_seeds} seeds failed")
    last = " ".join(f"{remark.rstrip('.')}." for remark in remarks)
    batches = "full" if row.full_batch else "mini"
    if not row.finished or first is None:
        return [row.method, *["–"] * 6, batches, last]
    show: Callable[[float], str] = _number if score == "R²" else _percent
    return [
        row.method,
        _mean_and_spread(row.values("score"), show),
        show(statistics.fmean(row.values("train_score"))),
        f"{_time(row):.3g} ({_ratio(_time(row), _time(first))})",
        f"{_memory(_peak(row))} ({_ratio(_peak(row), _peak(first))})",
        _objective(row),
        str(row.finished[0]["epochs"]),
        batches,
        last,
    ]


def _objective(row: Row) -> str:
    """Its mean, where the history of the runs has one."""
    values = [value for value in row.at_end("objective") if value is not None]
    return f"{statistics.fmean(values):.3g}" if values else "–"


def _mean_and_spread(values: Sequence[float], show: Callable[[float], str]) -> str:
    mean = show(statistics.fmean(values))
    if len(values) < 2:
        return mean
    return f"{mean.removesuffix(' %')} ± {show(statistics.stdev(values))}"


def _time(row: Row) -> float:
    return statistics.median(row.seconds())


def _peak(row: Row) -> float:
    return max(row.values("peak_bytes"))


def _ratio(value: float, base: float) -> str:
    times = value / base
    return f"{times:.2g}×" if times < 10 else f"{times:,.0f}×"


def _percent(value: float) -> str:
    return f"{100 * value:.2f} %"


def _memory(count: float) -> str:
    mebibytes = count / 2**20
    return f"{mebibytes:.3g} MiB" if mebibytes < 100 else f"{mebibytes:,.0f} MiB"


def _number(value: float) -> str:
    return f"{value:.4f}"


def aligned(head: list[str], body: list[list[str]]) -> str:
    """Columns of equal width, all but the last, which may be long."""
    widths = [max(map(len, column)) for column in zip(head, *body, strict=True)][:-1] + [0]
    lines = [head, ["-" * max(width, 3) for width in widths], *body]
    return "\n".join(
        ("| " + " | ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True))).rstrip()
        + " |"
        for line in lines
    )


def _legend(rows: Sequence[Row], first: Row | None, n_seeds: int, score: str) -> str:
    sentences = [
        f"Test {score} after the last epoch"
        + (", mean ± standard deviation over seeds." if n_seeds > 1 else "."),
        "Peak memory: most bytes of tensors alive in a step, beyond data and weights.",
        "Objective: the method's own, per sample, on a fixed batch; not comparable between "
        "methods.",
    ]
    if first is not None and len(rows) > 1:
        sentences.insert(1, f"In brackets: times that of {first.method}.")
    if any(row.full_batch for row in rows):
        sentences.append(
            "An epoch is one pass over the data: many steps of a mini-batch method, one step of a "
            "full-batch method."
        )
    machines = [record["machine"] for row in rows for record in row.records if "machine" in record]
    if machines:
        m = machines[-1]
        sentences.append(
            f"lpom {m['lpom']}, torch {m['torch']}, {m['processor']}, threads: {m['threads']}."
        )
    sentences.append("Settings, as the methods come or as given, none tuned here:")
    return " ".join(sentences)
