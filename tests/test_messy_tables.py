"""Tables as they come: from a file to predictions, beside a pipeline made by hand.

Each case writes a file, says what the plan must be, and gives the numbers that a careful person
would have made of it for scikit-learn: the score on the same test rows may not be much lower.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pandas as pd
import pytest
from sklearn.linear_model import Ridge
from sklearn.neural_network import MLPClassifier
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

import lpom
from lpom.estimators.data import split_rows
from lpom.tables import TableEncoder, Target
from lpom.tables.reading import read_table

TESTED = 0.5  # of the rows, so that one of them counts for little
BELOW = 0.02  # how far the score may lie below that of the pipeline made by hand


@dataclass
class Case:
    """``text`` is the file; ``clean`` what a person makes of its columns, ``y`` of its target."""

    text: str | bytes
    plan: dict[str, str]
    clean: pd.DataFrame
    y: np.ndarray
    target: str = "y"
    options: dict[str, Any] = field(default_factory=dict)  # of the encoder
    suffix: str = ".csv"
    notes: str = ""
    encoding: str | None = None
    train: dict[str, Any] = field(default_factory=dict)
    below: float = BELOW


CASES: dict[str, Callable[[], Case]] = {}


def case(function: Callable[[], Case]) -> Callable[[], Case]:
    CASES[function.__name__] = function
    return function


def basis(n: int = 400, seed: int = 0) -> tuple[np.random.Generator, pd.DataFrame, np.ndarray]:
    """Two numbers, and two classes that they tell apart."""
    rng = np.random.default_rng(seed)
    frame = pd.DataFrame({"a": rng.normal(size=n).round(4), "b": rng.normal(size=n).round(4)})
    y = np.where(frame["a"] + frame["b"] + 0.3 * rng.normal(size=n) > 0, "yes", "no")
    return rng, frame, y


def one_hot(column: Any) -> pd.DataFrame:
    return pd.get_dummies(pd.Series(column), dtype=float)


def csv(frame: pd.DataFrame, **options: Any) -> str:
    return frame.to_csv(index=False, **options)


@case
def plain_numbers() -> Case:
    _, x, y = basis()
    return Case(csv(x.assign(y=y)), {"a": "number", "b": "number"}, x, y)


@case
def a_number_to_predict() -> Case:
    rng, x, _ = basis()
    y = (1e5 + 2000 * x["a"] - 500 * x["b"] + 50 * rng.normal(size=len(x))).to_numpy().round(1)
    return Case(csv(x.assign(y=y)), {"a": "number", "b": "number"}, x, y)


@case
def thousands_with_commas() -> Case:
    rng, x, _ = basis()
    pay = rng.uniform(500, 90_000, len(x)).round()
    y = np.where(pay > 40_000, "rich", "poor")
    texts = [f"{value:,.0f}" for value in pay]
    return Case(
        csv(x.assign(pay=texts, y=y)),
        {"a": "number", "b": "number", "pay": "number"},
        x.assign(pay=pay),
        y,
        options={"thousands": ","},
        notes="thousands ','",
    )


@case
def currency_and_per_cent() -> Case:
    rng, x, _ = basis(500)
    price, share = rng.uniform(1, 9000, len(x)).round(2), rng.uniform(0, 100, len(x)).round(1)
    y = np.where(price * share > 200_000, "much", "little")
    texts = {"price": [f"€{p:,.2f}" for p in price], "share": [f"{s} %" for s in share]}
    return Case(
        csv(x.assign(**texts, y=y)),
        {"a": "number", "b": "number", "price": "number", "share": "number"},
        x.assign(price=price, share=share),
        y,
    )


@case
def german_locale() -> Case:
    rng, x, y = basis()
    cost = rng.uniform(10, 9000, len(x)).round(2)
    german = [f"{c:,.2f}".translate(str.maketrans(",.", ".,")) for c in cost]
    texts = x.map(lambda value: str(value).replace(".", ","))
    text = csv(texts.assign(Größe=german, y=y), sep=";")
    return Case(
        text.encode("cp1252"),
        {"a": "number", "b": "number", "Größe": "number"},
        x.assign(cost=cost),
        y,
        encoding="cp1252",
        notes="decimal ',', thousands '.'",
    )


@case
def swiss_and_french_thousands() -> Case:
    rng, x, y = basis()
    swiss, french = rng.integers(1000, 900_000, (2, len(x)))
    frame = x.assign(
        swiss=[f"{v:,}".replace(",", "’") for v in swiss],
        french=[f"{v:,}".replace(",", "\u202f") for v in french],
        y=y,
    )
    plan = {"a": "number", "b": "number", "swiss": "number", "french": "number"}
    return Case(csv(frame), plan, x.assign(s=swiss, f=french), y)


@case
def questions_among_numbers() -> Case:
    rng, x, y = basis()
    gaps = rng.random(len(x)) < 0.15
    texts = x["a"].astype(str).mask(gaps, "?")
    clean = x.assign(a=x["a"].mask(gaps, x["a"][~gaps].median()), gap=gaps.astype(float))
    return Case(
        csv(x.assign(a=texts, y=y)),
        {"a": "number", "b": "number"},
        clean,
        y,
        notes="'?' taken as missing",
    )


@case
def holes_everywhere() -> Case:
    rng, x, y = basis(300)
    holes = x.assign(kind=rng.choice(["p", "q", "r"], len(x))).mask(rng.random((len(x), 3)) < 0.1)
    clean = holes[["a", "b"]].fillna(0.0).join(one_hot(holes["kind"].fillna("none")))
    plan = {"a": "number", "b": "number", "kind": "category"}
    return Case(csv(holes.assign(y=y)), plan, clean, y, notes="missing in")


@case
def rows_without_a_target() -> Case:
    _, x, y = basis(300)
    unlabelled = np.arange(300) % 10 == 0
    text = csv(x.assign(y=pd.Series(y).mask(unlabelled, "")))
    return Case(
        text,
        {"a": "number", "b": "number"},
        x[~unlabelled].reset_index(drop=True),
        y[~unlabelled],
        notes="30 rows without a target left out",
    )


@case
def categories_and_flags() -> Case:
    rng, x, _ = basis()
    colour = rng.choice(["red", "green", "blue"], len(x))
    member = rng.choice(["Yes", "No"], len(x))
    y = np.where((colour == "red") | (member == "Yes") & (x["a"] > 0), "tea", "coffee")
    yes = pd.Series(member == "Yes", dtype=float)
    clean = x.join(one_hot(colour)).assign(member=yes)
    plan = {"a": "number", "b": "number", "colour": "category", "member": "yes/no"}
    return Case(csv(x.assign(colour=colour, member=member, y=y)), plan, clean, y)


@case
def iso_dates() -> Case:
    rng, x, _ = basis()
    days = pd.Timestamp("2020-01-01") + pd.to_timedelta(rng.integers(0, 1400, len(x)), unit="D")
    late = days > pd.Timestamp("2022-01-01")
    y = np.where(late, "late", "early")
    clean = x.assign(days=(days - days.min()).days)
    plan = {"a": "number", "b": "number", "when": "date"}
    return Case(csv(x.assign(when=days.strftime("%Y-%m-%d"), y=y)), plan, clean, y)


@case
def weekends_in_days_first_dates() -> Case:
    rng, x, _ = basis(400)
    days = pd.Timestamp("2020-01-01") + pd.to_timedelta(rng.integers(0, 1400, len(x)), unit="D")
    y = np.where(days.day_of_week >= 5, "weekend", "work")
    plan = {"a": "number", "b": "number", "when": "date"}
    clean = one_hot(days.day_of_week)
    frame = x.assign(when=days.strftime("%d/%m/%Y"), y=y)
    return Case(csv(frame), plan, clean, y, notes="place in the year, week")


@case
def american_dates_and_times() -> Case:
    rng, x, _ = basis(300)
    hours = rng.integers(0, 24 * 500, len(x))
    moments = pd.Timestamp("2021-01-01") + pd.to_timedelta(hours, unit="h")
    y = np.where((moments.hour >= 8) & (moments.hour < 20), "open", "closed")
    angle = 2 * np.pi * moments.hour / 24
    clean = pd.DataFrame({"s": np.sin(angle), "c": np.cos(angle)})
    frame = x.assign(at=moments.strftime("%m/%d/%Y %H:%M"), y=y)
    plan = {"a": "number", "b": "number", "at": "date"}
    return Case(csv(frame), plan, clean, y, notes="day")


@case
def identifiers_and_constants() -> Case:
    rng, x, y = basis()
    frame = pd.DataFrame(
        {
            "row": range(1, len(x) + 1),
            "customer_id": rng.permutation(100_000)[: len(x)],
            "uuid": [f"{v:032x}" for v in rng.integers(1, 2**62, len(x))],
            "a": x["a"],
            "country": "NL",
            "nothing": None,
            "b": x["b"],
            "remarks": [f"called about order {k} and was happy" for k in range(len(x))],
            "y": y,
        }
    )
    plan = dict.fromkeys(frame.columns[:-1], "dropped") | {"a": "number", "b": "number"}
    return Case(csv(frame), plan, x, y, notes="counts the rows")


@case
def rare_class() -> Case:
    rng = np.random.default_rng(0)
    rare = np.arange(400) % 16 == 0
    x = pd.DataFrame(rng.normal(size=(400, 3)) + 2.5 * rare[:, None], columns=list("abc"))
    y = np.where(rare, "fraud", "fine")
    plan = dict.fromkeys("abc", "number")
    return Case(csv(x.assign(y=y)), plan, x, y, train={"class_weight": "balanced"})


@case
def many_categories() -> Case:
    rng, x, _ = basis(600)
    shops = rng.choice([f"shop {k}" for k in range(12)], len(x))
    seldom = rng.random(len(x)) < 0.3
    shops = np.where(seldom, [f"stall {k}" for k in rng.integers(0, 150, len(x))], shops)
    good = pd.Series(shops).str.contains("stall|shop [0-3]$").to_numpy()
    y = np.where(good, "good", "bad")
    clean = one_hot(pd.Series(shops).where(~seldom, "stall"))
    plan = {"a": "number", "b": "number", "shop": "category"}
    return Case(csv(x.assign(shop=shops, y=y)), plan, clean, y, notes="the others as one")


@case
def wide() -> Case:
    rng = np.random.default_rng(0)
    x = pd.DataFrame(rng.normal(size=(400, 100)), columns=[f"f{k}" for k in range(100)])
    y = np.where(x.iloc[:, :12].sum(axis=1) > 0, "up", "down")
    plan = dict.fromkeys(x.columns, "number")
    return Case(csv(x.round(5).assign(y=y)), plan, x, y)


@case
def long() -> Case:
    _, x, y = basis(6000)
    return Case(csv(x.assign(y=y)), {"a": "number", "b": "number"}, x, y, train={"max_iter": 4})


@case
def unicode_names_and_classes() -> Case:
    rng, x, _ = basis()
    fruit = rng.choice(["Äpfel", "桃子", "🍌"], len(x))
    y = np.where(fruit == "桃子", "да", np.where(x["a"] > 0, "nö", "ναι"))
    frame = x.rename(columns={"a": "größe 📏", "b": "重さ"}).assign(фрукт=fruit, y=y)
    plan = {"größe 📏": "number", "重さ": "number", "фрукт": "category"}
    return Case(csv(frame), plan, x.join(one_hot(fruit)), y)


@case
def repeated_column_names() -> Case:
    _, x, y = basis()
    text = csv(x.assign(y=y)).replace("a,b,y", "value,value,y", 1)
    plan = {"value": "number", "value (2)": "number"}
    return Case(text, plan, x, y, notes="the second column 'value' is called 'value (2)'")


@case
def header_lines_inside() -> Case:
    _, x, y = basis()
    lines = csv(x.assign(y=y)).splitlines()
    lines[100:100] = lines[50:50] = [lines[0]]  # three files pasted together
    text = "\n".join(lines)
    plan = {"a": "number", "b": "number"}
    return Case(text, plan, x, y, notes="2 lines repeating the names left out")


@case
def tabs_pipes_and_quotes() -> Case:
    _, x, y = basis()
    frame = x.assign(said=np.where(x["a"] > 0, 'so "big" | fine', "a, b"), y=y)
    text = csv(frame, sep="\t", quoting=2)
    plan = {"a": "number", "b": "number", "said": "category"}
    return Case(text, plan, x, y, suffix=".tsv")


@case
def utf_16_from_a_spreadsheet() -> Case:
    _, x, y = basis()
    plan = {"Länge": "number", "b": "number"}
    text = csv(x.rename(columns={"a": "Länge"}).assign(y=y), sep="\t").encode("utf-16")
    return Case(text, plan, x, y)


@case
def codes_with_leading_zeros() -> Case:
    rng, x, _ = basis()
    codes = rng.choice(["01067", "10115", "80331", "04109"], len(x))
    y = np.where(pd.Series(codes).str.startswith("0"), "east", "other")
    plan = {"a": "number", "b": "number", "zip": "category"}
    return Case(csv(x.assign(zip=codes, y=y)), plan, x.join(one_hot(codes)), y)


@case
def numbers_that_are_names() -> Case:
    rng, x, _ = basis()
    ward = rng.integers(1, 9, len(x))
    y = np.where(np.isin(ward, [2, 3, 5, 7]), "prime", "not")
    plan = {"a": "number", "b": "number", "ward": "category"}
    options = {"kinds": {"ward": "category"}}
    return Case(csv(x.assign(ward=ward, y=y)), plan, x.join(one_hot(ward)), y, options=options)


@case
def excel_with_everything() -> Case:
    rng, x, _ = basis()
    days = pd.Timestamp("2020-01-01") + pd.to_timedelta(rng.integers(0, 900, len(x)), unit="D")
    colour = rng.choice(["red", "blue"], len(x))
    y = np.where((days < pd.Timestamp("2021-03-01")) ^ (colour == "red"), 1, 0)
    clean = one_hot(colour).assign(days=(days - days.min()).days)
    file = io.BytesIO()
    x.assign(day=days, colour=colour, y=y).to_excel(file, index=False)
    plan = {"a": "number", "b": "number", "day": "date", "colour": "category"}
    return Case(file.getvalue(), plan, clean, y, suffix=".xlsx")


@case
def parquet_with_types() -> Case:
    rng, x, _ = basis()
    flag = pd.array(rng.random(len(x)) < 0.5, dtype="boolean")
    grade = pd.Categorical(rng.choice(["low", "mid", "high"], len(x)))
    count = pd.array(rng.integers(0, 50, len(x)), dtype="Int64")
    count[rng.random(len(x)) < 0.1] = pd.NA
    y = np.where((grade == "low") | (np.asarray(flag, bool) & (x["a"] > 0)), "p", "q")
    clean = x.join(one_hot(grade)).assign(flag=np.asarray(flag, float))
    file = io.BytesIO()
    x.assign(flag=flag, grade=grade, count=count, y=y).to_parquet(file)
    plan = {"a": "number", "b": "number", "flag": "yes/no", "grade": "category", "count": "number"}
    return Case(file.getvalue(), plan, clean, y, suffix=".parquet")


@case
def prices_to_predict() -> Case:
    rng, x, _ = basis()
    y = (3000 + 900 * x["a"] + 400 * x["b"] + 20 * rng.normal(size=len(x))).round(2).to_numpy()
    texts = [f"${value:,.2f}" for value in y]
    return Case(csv(x.assign(y=texts)), {"a": "number", "b": "number"}, x, y)


def by_hand(made: Case) -> float:
    """The score of scikit-learn's network on the same rows to test with."""
    numbers = made.y.dtype.kind == "f"
    kept, tested = halves(made.y)
    network = MLPClassifier((50,), learning_rate_init=0.01, max_iter=60, random_state=0)
    model = make_pipeline(StandardScaler(), Ridge() if numbers else network)
    x = made.clean.to_numpy(float)
    return model.fit(x[kept], made.y[kept]).score(x[tested], made.y[tested])


def halves(y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    strata = None if y.dtype.kind == "f" else np.unique(y, return_inverse=True)[1]
    return split_rows(len(y), TESTED, np.random.default_rng(0), strata)


def test_there_are_enough():
    assert len(CASES) >= 28


@pytest.mark.filterwarnings("ignore:Stochastic Optimizer")  # of the one made by hand
@pytest.mark.filterwarnings("ignore:training ended after max_iter")
@pytest.mark.filterwarnings("ignore:unlike in training")  # of rare categories
@pytest.mark.parametrize("name", CASES)
def test_messy_table(name, tmp_path):
    made = CASES[name]()
    path = tmp_path / f"table{made.suffix}"
    path.write_bytes(made.text.encode() if isinstance(made.text, str) else made.text)
    table = read_table(path, encoding=made.encoding)
    signs = {k: v for k, v in made.options.items() if k in ("decimal", "thousands")}
    target = Target.fit(table.frame, made.target, **signs)
    y, known = target.read(table.frame)
    frame = table.frame[known].drop(columns=made.target)
    numbers = target.task == "regression"
    kept, tested = halves(y)

    kind = lpom.MLPRegressor if numbers else lpom.MLPClassifier
    network = kind(alpha=1.0, learning_rate_init=0.006, max_iter=100, random_state=0).set_params(
        **made.train
    )
    model = make_pipeline(TableEncoder(**made.options), network)
    model.fit(frame.iloc[kept], y[kept])
    encoder = model[0]
    assert {name: kind for name, kind, _ in encoder.plan()} == made.plan
    remarks = "; ".join(remark for *_, remark in encoder.plan())
    left_out = f"; {int((~known).sum())} rows without a target left out"
    assert made.notes in remarks + "; ".join(table.notes) + left_out
    assert model.score(frame.iloc[tested], y[tested]) >= by_hand(made) - made.below

    lpom.save(model, tmp_path / "model.safetensors")
    again = lpom.load(tmp_path / "model.safetensors")
    np.testing.assert_array_equal(again.predict(frame), model.predict(frame))
