"""Pages out of records: ``templates/NAME.md`` becomes ``pages/NAME.md``.

A template is prose with marks, each on a line of its own: ``{{scores table2}}`` stands for a table
of the records in ``results/table2.jsonl``. Conclusions are prose, so they stand in templates; a
mark whose records are missing refuses the page, so that nothing is concluded without data.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path

import pictures
from beyond import TABLES, Row, Table
from experiments import EXPERIMENTS, Experiment
from lpom.files import write_atomically
from records import RESULTS, Record, Store

HERE = Path(__file__).parent
TEMPLATES, PAGES = HERE / "templates", HERE / "pages"

_MARK = re.compile(r"^\{\{(\w+) (.+)\}\}$", re.MULTILINE)
_KINDS = {"tried": "Tried on held-out data", "other": "Other settings, on the test set"}


class NoDataError(LookupError):
    """A template speaks of results that are not there."""


class Page:
    """One page, made from the records of a folder."""

    def __init__(self, name: str, results: Path = RESULTS, pages: Path = PAGES) -> None:
        self.name, self.results, self.pages = name, results, pages
        self.marks: dict[str, Callable[[str], str]] = {
            "overview": self.overview,
            "scores": self.scores,
            "curves": self.curves,
            "facts": self.facts,
            "left": self.left,
            "tried": lambda name: self.fold(name, "tried"),
            "other": lambda name: self.fold(name, "other"),
            "grid": self.grid,
            "choice": self.choice,
            "cosines": self.cosines,
            "costs": self.costs,
        }

    def text(self) -> str:
        """The template with its marks filled in."""
        template = (TEMPLATES / f"{self.name}.md").read_text(encoding="utf-8")
        return _MARK.sub(lambda mark: self.fill(mark[1], mark[2]), template)

    def write(self) -> Path:
        self.pages.mkdir(parents=True, exist_ok=True)
        path = self.pages / f"{self.name}.md"
        write_atomically(path, self.text().encode())
        return path

    def fill(self, mark: str, name: str) -> str:
        if mark not in self.marks:
            known = ", ".join(self.marks)
            raise ValueError(f"{self.name}.md has an unknown mark {mark!r}; the marks are {known}.")
        return self.marks[mark](name)

    def records(self, name: str, **fields: object) -> list[Record]:
        found = Store(self.results / f"{name}.jsonl").select(**fields)
        if not found:
            wanted = ", ".join(f"{field} {value}" for field, value in fields.items())
            raise NoDataError(
                f"{self.name}.md needs records of {name} ({wanted}), but {self.results} has none. "
                f"Run `python benchmarks/paper.py {name}` first."
            )
        return found

    def scores(self, name: str) -> str:
        """Rows and columns of an experiment, with what was printed or wanted."""
        finals = self.records(name, kind="final")
        if name in TABLES:
            return _rows_table(TABLES[name], finals)
        experiment = EXPERIMENTS[name]
        shown = {c: role for c, role in experiment.roles.items() if _of(finals, column=c)}
        heads = ["hidden layers", *(f"printed: {column}" for column in experiment.printed)]
        rows = []
        for k, hidden in enumerate(experiment.networks):
            row = "-".join(map(str, hidden))
            printed = [f"{numbers[k]:.1f}" for numbers in experiment.printed.values()]
            cells = [cell(_of(finals, row=row, column=column)) for column in shown]
            rows.append([row, *printed, *cells])
        return table([*heads, *(role.title for role in shown.values())], rows)

    def facts(self, name: str) -> str:
        """What was run, in sentences: epochs, settings, learning rates, time."""
        finals = self.records(name, kind="final")
        if name in TABLES:
            sentences = [_row_fact(TABLES[name], row, finals) for row in TABLES[name].rows]
        else:
            experiment = EXPERIMENTS[name]
            tuning = Store(self.results / f"{name}.jsonl").select(kind="tuning")
            sentences = [
                _role_fact(experiment, column, found, _of(tuning, column=column))
                for column in experiment.roles
                if (found := _of(finals, column=column))
            ]
        versions = sorted({record["made"] for record in finals})
        return "\n".join(f"- {s}" for s in [*sentences, f"Made with {'; '.join(versions)}."])

    def left(self, name: str) -> str:
        """What is left of each network that LPOM made smaller, in per cent of the whole one."""
        shares = {
            "nonzero": "weights that are not zero",
            "weights": "compacted: weights",
            "bytes": "bytes of the file",
            "time": "time",
        }
        rows = []
        for row in TABLES[name].rows:
            runs = self.records(name, kind="final", row=row.name, column="lpom")
            rest = [r["remains"] for r in runs if "remains" in r]
            means = [100 * statistics.mean(share[key] for share in rest) for key in shares]
            rows.append([row.title, *(f"{mean:.1f}" for mean in means)])
        return table(["left of LPOM's networks, per cent", *shares.values()], rows)

    def fold(self, name: str, kind: str) -> str:
        """Runs beside those that are shown: a table to unfold, best first, seeds averaged."""
        records = self.records(name, kind=kind)
        groups: dict[tuple[str, ...], list[Record]] = {}
        for r in records:
            settings = [r["settings"], f"output {r['output']}", r["more"]]
            line = (r["data"], r["method"], r["network"], str(r["epochs"]), r["loss"])
            groups.setdefault((*line, ", ".join(filter(None, settings))), []).append(r)
        ranked = sorted(groups.items(), key=lambda group: -_mean(group[1], "score"))
        rows = [
            [_average(runs, "score"), _average(runs, "train_score"), *line] for line, runs in ranked
        ]
        heads = ["held out" if kind == "tried" else "test", "training", "data", "method"]
        made = table([*heads, "network", "epochs", "loss", "settings"], rows)
        title = f"{_KINDS[kind]}: {len(records)} runs"
        return f"<details><summary>{title}</summary>\n\n{made}\n\n</details>"

    def grid(self, name: str) -> str:
        """Every row and column that there is: mean and spread of held-out accuracy."""
        records = self.records(name, kind="held out")
        columns = list(dict.fromkeys(r["column"] for r in records))
        rows = [
            [row, *(spread(_of(records, row=row, column=column), "score") for column in columns)]
            for row in dict.fromkeys(r["row"] for r in records)
        ]
        return table(["", *columns], rows)

    def choice(self, name: str) -> str:
        """The variants of one choice that the paper leaves open."""
        records = self.records("choices", row=name)
        rows = []
        for label in dict.fromkeys(r["column"] for r in records):
            runs = _of(records, column=label)
            said = sorted({remark.split(":")[0] for r in runs for remark in r.get("remarks", ())})
            said += sorted({r["reason"] for r in runs if "reason" in r})
            done = [r for r in runs if "score" in r]
            cells = [spread(done, key) for key in ("score", "train_score")]
            rows.append([label, *cells, "; ".join(said)])
        return table(["variant", "held out", "training", "remarks"], rows)

    def cosines(self, name: str) -> str:
        """Means over the seeds, and the least of all."""
        records = self.records(name)
        columns = list(dict.fromkeys(r["column"] for r in records))
        rows = []
        for row, epochs in dict.fromkeys((r["row"], r["epochs"]) for r in records):
            runs = [
                [r["cosine"] for r in _of(records, row=row, epochs=epochs, column=column)]
                for column in columns
            ]
            cells = [f"{statistics.mean(values):.4f} (least {min(values):.4f})" for values in runs]
            rows.append([row, str(epochs), *cells])
        return table(["activation", "epochs trained", *columns], rows)

    def costs(self, part: str) -> str:
        """Tables of `speed.py`, each with its command and where it was made."""
        return "\n\n".join(costs(about) for about in self.records("speed", part=part))

    def overview(self, name: str) -> str:
        """An experiment as a picture: every run of every network and role."""
        experiment, finals = EXPERIMENTS[name], self.records(name, kind="final")
        rows = ["-".join(map(str, hidden)) for hidden in experiment.networks]
        scores: dict[str, list[list[float]]] = {
            f"printed: {column}": [[number / 100] for number in numbers]
            for column, numbers in experiment.printed.items()
        }
        for column, role in experiment.roles.items():
            if runs := _of(finals, column=column):
                scores[role.title] = [
                    [r.get("score", 0.0) for r in _of(runs, row=row)] for row in rows
                ]
        path = self.pages / f"{name}{pictures.ENDING}"
        pictures.draw_points(scores, rows, path, experiment.title)
        return f"![{experiment.title}]({path.name})"

    def curves(self, name: str) -> str:
        """Training and held-out accuracy over the epochs, and those of long runs."""
        finals = self.records(name, kind="final")
        if name in TABLES:
            return "\n\n".join(
                self._curves_of(TABLES[name], row, finals) for row in TABLES[name].rows
            )
        experiment = EXPERIMENTS[name]
        store = Store(self.results / f"{name}.jsonl")
        shown = [column for column in experiment.roles if _of(finals, column=column)]
        longs = [column for column in shown if experiment.roles[column].long is not None]
        lines = []
        for what, kind, columns, key, title in (
            ("training", "final", shown, "score", "training accuracy"),
            ("held-out", "watched", shown, _HELD, "accuracy on held-out training data"),
            ("long-training", "long", longs, "score", "training accuracy of long runs"),
            ("long-held-out", "long", longs, _HELD, "held-out training data, long runs"),
        ):
            runs = {
                experiment.roles[c].title: [
                    r["curve"][key] for r in store.select(kind=kind, column=c) if "curve" in r
                ]
                for c in columns
            }
            if any(runs.values()):
                path = self.pages / f"{name}-{what}{pictures.ENDING}"
                pictures.draw_curves(runs, path, f"{experiment.title}: {title}")
                lines.append(f"![{experiment.title}: {title}]({path.name})")
        return "\n\n".join(lines)

    def _curves_of(self, found: Table, row: Row, finals: Sequence[Record]) -> str:
        runs = {
            found.columns[column]: [
                r["curve"][_HELD] for r in _of(finals, row=row.name, column=column) if "curve" in r
            ]
            for column in row.rates
        }
        path = self.pages / f"{row.name}{pictures.ENDING}"
        pictures.draw_curves(runs, path, f"{row.title}: test accuracy")
        return f"![{row.title}: test accuracy]({path.name})"


_HELD = "validation_score"


def names() -> list[str]:
    """Pages that there are templates for."""
    return sorted(path.stem for path in TEMPLATES.glob("*.md"))


def table(heads: Sequence[str], rows: Sequence[Sequence[str]], numbers: int = 0) -> str:
    """A table in Markdown; its last ``numbers`` columns stand at the right."""
    rule = "|" + "---|" * (len(heads) - numbers) + "---:|" * numbers
    return "\n".join([_line(heads), rule, *map(_line, rows)])


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _of(records: Sequence[Record], **fields: object) -> list[Record]:
    return [r for r in records if all(r.get(name) == value for name, value in fields.items())]


def _mean(records: Sequence[Record], key: str) -> float:
    return statistics.mean(100 * float(r.get(key, 0.0)) for r in records)


def _average(records: Sequence[Record], key: str) -> str:
    if any(key not in r for r in records):
        return "failed"
    several = f" ({len(records)})" if len(records) > 1 else ""
    return f"{_mean(records, key):.2f}{several}"


def spread(records: Sequence[Record], key: str) -> str:
    """Mean and standard deviation in per cent; a run that came to nothing counts as 0."""
    values = [100 * r.get(key, 0.0) for r in records]
    if not values:
        return ""
    deviation = f" ± {statistics.stdev(values):.2f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.2f}{deviation}"


def cell(records: Sequence[Record]) -> str:
    """Mean, spread and number of seeds; a seed that came to nothing is said too."""
    done = [r for r in records if "score" in r]
    if not done:
        return f"failed: {records[0]['reason']}" if records else ""
    failed = f", {len(records) - len(done)} failed" if len(done) < len(records) else ""
    return f"{spread(done, 'score')} ({len(done)}{failed})"


def _role_fact(
    experiment: Experiment, column: str, runs: list[Record], tuning: list[Record]
) -> str:
    role, first = experiment.roles[column], runs[0]
    parts = [f"loss {first['loss']}", f"output {first['output']}", first["settings"]]
    said = ", ".join(filter(None, [f"{first['epochs']} epochs", first["batch"], *parts]))
    sentence = f"{role.title}: {said}"
    seconds = [r["seconds"] / r["epochs"] for r in runs if "seconds" in r]
    if seconds:
        threads = first["threads"]
        sentence += f"; {statistics.mean(seconds):.1f} s an epoch on {threads} thread(s)"
    planned = role.epochs or experiment.epochs
    if first["epochs"] < planned:
        sentence += f"; not finished, {planned} epochs are planned"
    remarks = {remark for r in runs for remark in r.get("remarks", ())}
    return " ".join([f"{sentence}.{_tuned(tuning)}", *sorted(remarks)])


def _tuned(tuning: Sequence[Record]) -> str:
    """What the grid of learning rates gave, and whether its best one is at its edge."""
    if not tuning:
        return ""
    rates = [r["rate"] for r in tuning]
    shown = ", ".join(f"{r['rate']:g}: {_average([r], 'score')}" for r in tuning)
    best = max(tuning, key=lambda r: float(r.get("score", 0.0)))["rate"]
    edge = f" {best:g} is at the edge of the grid." if best in (min(rates), max(rates)) else ""
    return f" Held-out accuracy by learning rate after {tuning[0]['epochs']}: {shown}.{edge}"


def _rows_table(found: Table, finals: Sequence[Record]) -> str:
    rows = []
    for row in found.rows:
        runs = {column: _of(finals, row=row.name, column=column) for column in row.rates}
        wanted = "-" if row.least is None else f"{row.least:.1f}"
        cells = [cell(runs.get(column, [])) or "-" for column in found.columns]
        rows.append([row.title, wanted, *cells, _verdict(row, runs), row.published])
    heads = ["network", "wanted", *found.columns.values(), "reached", "published"]
    shown = [k for k in range(len(heads)) if any(row[k] not in ("", "-") for row in rows)]
    return table([heads[k] for k in shown], [[row[k] for k in shown] for row in rows])


def _verdict(row: Row, runs: dict[str, list[Record]]) -> str:
    """Whether LPOM's mean is as high as it is to be, and how far it is from the best rival."""
    means = {
        column: _mean(done, "score")
        for column, found in runs.items()
        if (done := [r for r in found if "score" in r])
    }
    if "lpom" not in means:
        return "not run"
    own = means.pop("lpom")
    words = [] if row.least is None else ["yes" if own >= row.least else "no"]
    if means:
        ahead = own - max(means.values())
        within = row.margin is None or ahead >= -row.margin
        words.append(f"{ahead:+.2f} to the rival{'' if within else ', too far below'}")
    epochs = runs["lpom"][0]["epochs"]
    if epochs != row.trial.epochs:
        words.append(f"after {epochs} epochs only")
    return "; ".join(words) or "-"


def _row_fact(found: Table, row: Row, finals: Sequence[Record]) -> str:
    firsts = [runs[0] for c in row.rates if (runs := _of(finals, row=row.name, column=c))]
    if not firsts:
        return f"{row.title}: not run; `python benchmarks/paper.py {found.name} --rows {row.name}`."
    first = firsts[0]
    common = [f"{first['epochs']} epochs", first["batch"], f"loss {first['loss']}"]
    common += [] if row.helps else [first["more"]]
    each = [
        ", ".join(filter(None, [r["settings"], r["more"] if row.helps else ""])) for r in firsts
    ]
    said = (f"{found.columns[r['column']]} {text}" for r, text in zip(firsts, each, strict=True))
    return f"{row.title}: {first['network']}; {', '.join(filter(None, common))}; {'; '.join(said)}."


def costs(about: Record) -> str:
    rows, last = [], None
    for row in about["rows"]:
        case, last = ("" if row["case"] == last else row["case"]), row["case"]
        rows.append([case, row["contestant"], amount(row), number(row["ratio"]), quartiles(row)])
    heads = ["case", "contestant", "amount", "ratio", "quartiles"]
    where = (
        f"Threads {about['threads']}, clock of the {about['clock']}; {about['made']}, "
        f"Python {about['python']}; {about['processor']}, {about['date']}."
    )
    return f"`{about['command']}`\n\n{table(heads, rows, numbers=3)}\n\n{where}"


def amount(row: Record) -> str:
    value = row["amount"]
    if value is None:
        return "never"
    said = f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"
    return f"{said} {row['unit']}" + (f" ({row['note']})" if row["note"] else "")


def number(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def quartiles(row: Record) -> str:
    return "" if row["low"] is None else f"{row['low']:.2f} - {row['high']:.2f}"
