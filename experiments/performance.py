"""The tables of docs/performance.md, from what ``lpom bench PART --json`` wrote.

    lpom bench sklearn --threads 1 --json experiments/bench/sklearn.json
    python experiments/performance.py

Each file of the folder becomes a table between the marks of its part on the page.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from lpom.files import write_atomically

HERE = Path(__file__).parent
PAGE = HERE.parent / "docs" / "performance.md"
END = "<!-- end of tables -->"


def main() -> None:
    page = PAGE.read_text()
    found: dict[str, list[dict[str, Any]]] = {}
    for path in sorted((HERE / "bench").glob("*.json")):
        about = json.loads(path.read_text())
        found.setdefault(about["part"], []).append(about)
    for part, runs in found.items():
        begin = f"<!-- tables of {part} -->"
        before, _, rest = page.partition(begin)
        _, mark, after = rest.partition(END)
        if not mark:
            raise SystemExit(f"{PAGE.name} has no {begin} ... {END}; put them where it belongs.")
        tables = "\n\n".join(table(about) for about in runs)
        page = f"{before}{begin}\n\n{tables}\n\n{END}{after}"
    write_atomically(PAGE, page.encode())
    print(f"wrote {PAGE.name}: {', '.join(found)}")


def table(about: dict[str, Any]) -> str:
    """One run: its command, its rows, and where it was made."""
    lines = [f"`{about['command']}`", "", "| case | contestant | amount | ratio | quartiles |"]
    lines.append("|---|---|---:|---:|---:|")
    last = None
    for row in about["rows"]:
        case, last = ("" if row["case"] == last else row["case"]), row["case"]
        lines.append(
            f"| {case} | {row['contestant']} | {amount(row)} | {number(row['ratio'])} | "
            f"{number(row['low'], ' - ' + number(row['high']))} |"
        )
    where = about["machine"]
    return "\n".join(
        [
            *lines,
            "",
            f"Threads {where['threads']}, clock of the {about['clock']}; lpom {where['lpom']}, "
            f"torch {where['torch']}, Python {where['python']}; {where['processor']}, "
            f"{where['date']}.",
        ]
    )


def amount(row: dict[str, Any]) -> str:
    value = row["amount"]
    if value is None:
        return "never"
    said = f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"
    return f"{said} {row['unit']}" + (f" ({row['note']})" if row["note"] else "")


def number(value: float | None, more: str = "") -> str:
    return "" if value is None else f"{value:.2f}{more}"


if __name__ == "__main__":
    main()
