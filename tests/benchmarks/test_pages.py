"""Pages are what their records say, and are refused without them."""

from __future__ import annotations

import json
import re
import statistics
from pathlib import Path

import pytest

import pages
from lpom.activations import get
from pages import NoDataError, Page
from records import RESULTS, Store, Trial, text


@pytest.mark.parametrize("name", pages.names())
def test_stored_pages_are_made_from_stored_records_byte_for_byte(name: str, folder: Path) -> None:
    """Text to the byte; pictures by their numbers, since their shape depends on fonts."""
    made = Page(name, pages=folder).write()
    assert made.read_bytes() == (pages.PAGES / made.name).read_bytes()
    for picture in folder.glob("*.svg"):
        stored = (pages.PAGES / picture.name).read_text()
        numbers = [
            re.findall(r">([^<>]*\d[^<>]*)<", page) for page in (picture.read_text(), stored)
        ]
        assert numbers[0] == numbers[1]


@pytest.mark.parametrize("name", pages.names())
def test_nothing_is_concluded_without_data(name: str, folder: Path) -> None:
    with pytest.raises(NoDataError, match="records"):
        Page(name, results=folder, pages=folder).text()


@pytest.mark.parametrize("path", sorted(RESULTS.glob("*.jsonl")), ids=lambda path: path.stem)
def test_every_record_has_an_id_of_its_own(path: Path) -> None:
    ids = [record["id"] for record in Store(path)]
    assert len(ids) == len(set(ids)) > 0


def test_results_and_pages_are_small() -> None:
    files = [*RESULTS.iterdir(), *pages.PAGES.iterdir()]
    assert sum(path.stat().st_size for path in files) < 2.5e6


def test_a_cell_is_mean_and_spread_of_its_seeds() -> None:
    finals = Store(RESULTS / "table2.jsonl").select(kind="final", row="300", column="paper")
    scores = [100 * record["score"] for record in finals]
    expected = f"{statistics.mean(scores):.2f} ± {statistics.stdev(scores):.2f} ({len(scores)})"
    assert pages.cell(finals) == expected
    row = next(
        x for x in Page("experiments").scores("table2").split("\n") if x.startswith("| 300 |")
    )
    assert f"| {expected} |" in row
    assert pages.cell([*finals, {"reason": "diverged"}]).endswith(f"({len(scores)}, 1 failed)")


def test_a_mark_that_nobody_knows_is_refused() -> None:
    with pytest.raises(ValueError, match="unknown mark"):
        Page("experiments").fill("scoers", "table2")


def test_a_store_keeps_records_and_passes_over_a_line_that_was_cut(folder: Path) -> None:
    store = Store(folder / "x.jsonl")
    first = store.add({"kind": "final", "seed": 0})
    store.add({"kind": "final", "seed": 1})
    assert len({record["id"] for record in store}) == 2
    with store.path.open("a") as file:
        file.write('{"kind": "fin')
    assert store.select(seed=0) == [first]
    store.add({"kind": "final", "seed": 2})
    with pytest.raises(ValueError, match="line 3"):
        list(store)
    assert json.loads(store.path.read_text().split("\n")[3])["seed"] == 2


def test_other_settings_are_not_taken_for_these(folder: Path) -> None:
    store = Store(folder / "x.jsonl")
    trial = Trial("iris", (8,), "adam", {"learning_rate": 0.01})
    about = {"kind": "final", "row": "8", "column": "adam", "seed": 0, "epochs": 3}
    record = store.add(about | trial.texts())
    assert store.find(about | trial.texts()) == record
    assert store.find(about | {"seed": 1} | trial.texts()) is None
    with pytest.raises(ValueError, match="settings"):
        store.find(about | Trial("iris", (8,), "adam", {"learning_rate": 0.02}).texts())


def test_settings_are_told_in_words() -> None:
    trial = Trial(
        "mnist",
        (),
        "lpom",
        {"weights": {"exact": {"ridge": (1.0, 1000.0)}}, "mu": 20.0},
        network="mlp",
        options={"norm": True, "hidden": [300, 100]},
        weight_decay=1e-4,
    )
    words = trial.texts({"hidden": [300, 100]})
    assert words["network"] == "mlp, hidden 300-100"
    assert words["settings"] == "mu 20, weights exact, ridge 1 to 1000"
    assert words["more"] == "norm True, weight_decay 0.0001"
    assert text({"jumps": "continuation"}) == "jumps continuation"
    assert get(trial.output).lipschitz == 1
