"""Whole calls beside scikit-learn's: fit and predict; and rows that come from each kind of data."""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import DataLoader, TensorDataset

from lpom.experiments.bench.contest import Row, contest, rates
from lpom.networks.mlp import mlp
from lpom.training.data import Arrays, Loader, Source
from lpom.training.interface import Interface
from lpom.training.task import Task

#: Tables by name: rows, columns, classes, share of numbers that are not zero.
TABLES = {
    "20,000 x 50": (20_000, 50, 5, 1.0),
    "sparse, 5,000 x 2,000": (5_000, 2_000, 5, 0.01),
}
#: Rows that a contestant trains on in a turn, about.
_ROWS = 40_000


def table(name: str) -> tuple[Any, NDArray[np.int64]]:
    """Rows and classes of a table, in float64; a CSR matrix where most numbers are zero."""
    if name == "digits":
        from sklearn.datasets import load_digits

        X, y = load_digits(return_X_y=True)
        return X / 16, y
    from scipy import sparse

    n, columns, classes, share = TABLES[name]
    rng = np.random.default_rng(0)
    if share < 1:
        X = sparse.random(n, columns, share, format="csr", rng=rng)
    else:
        X = rng.standard_normal((n, columns))
    scores = X @ rng.standard_normal((columns, classes))
    return X, scores.argmax(1)


def against_sklearn(
    tables: Sequence[str] = ("digits", *TABLES),
    hidden: Sequence[tuple[int, ...]] = ((100,), (300, 100)),
    dtypes: Sequence[str] = ("float32", "float64"),
    *,
    batch_size: int = 100,
    rounds: int = 5,
) -> list[Row]:
    """``fit`` of the classifiers with the same network, batches and epochs."""
    rows = []
    for name in tables:
        X, y = table(name)
        epochs = max(1, _ROWS // X.shape[0])
        for dtype in dtypes:
            for units in hidden:
                case = f"{name}, {dtype}, {'-'.join(map(str, units))}, {epochs} epochs"
                turns = _fits(X.astype(dtype), y, units, epochs, batch_size)
                rows += contest(case, turns, rounds=rounds)
    return rows


def _fits(
    X: Any, y: NDArray[Any], hidden: tuple[int, ...], epochs: int, batch_size: int
) -> dict[str, Callable[[], object]]:
    from sklearn import neural_network

    from lpom.estimators import MLPClassifier

    settings: dict[str, Any] = {
        "max_iter": epochs,
        "batch_size": batch_size,
        "n_iter_no_change": epochs + 1,
        "random_state": 0,
    }

    def turn(made: Any) -> Callable[[], object]:
        def fit() -> object:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # both say that they might go on
                return made(hidden, **settings).fit(X, y)

        return fit

    return {"scikit-learn": turn(neural_network.MLPClassifier), "lpom": turn(MLPClassifier)}


def predict(
    hidden: Sequence[tuple[int, ...]] = ((100,), (300, 100)),
    *,
    name: str = "20,000 x 50",
    rounds: int = 10,
) -> list[Row]:
    """Rows a second of ``predict``, all at once and a hundred at a time."""
    X, y = table(name)
    X = X.astype("float32")
    rows = []
    for units in hidden:
        fits = _fits(X[:2000], y[:2000], units, 1, 100)
        fitted: dict[str, Any] = {who: fit() for who, fit in fits.items()}
        for size in (X.shape[0], 100):
            parts = [X[k : k + size] for k in range(0, X.shape[0], size)]
            turns = {who: _predicts(made, parts) for who, made in fitted.items()}
            case = f"{'-'.join(map(str, units))}, {size:,} rows a call"
            timed = contest(case, turns, rounds=rounds, unit="s", per=1.0)
            rows += rates(timed, X.shape[0], "rows/s")
    return rows


def _predicts(made: Any, parts: Sequence[Any]) -> Callable[[], object]:
    return lambda: [made.predict(part) for part in parts]


def data(*, name: str = "20,000 x 50", batch_size: int = 100, rounds: int = 10) -> list[Row]:
    """Rows a second that come out of an epoch of batches, nothing being done with them."""
    from scipy import sparse

    X, y = table(name)
    X = X.astype("float32")
    model = mlp((X.shape[1], 10, int(y.max()) + 1), seed=0)
    task, interface = Task.infer(y, int(y.max()) + 1), Interface.of(model, X)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows.npy"
        np.save(path, X)

        def arrays(rows: Any) -> Source:
            generator = torch.Generator().manual_seed(0)
            return Arrays(rows, y, task, interface, batch_size=batch_size, generator=generator)

        together = TensorDataset(torch.as_tensor(X), torch.as_tensor(y))
        loader = DataLoader(together, batch_size=batch_size, shuffle=True)
        sources: dict[str, Source] = {
            "array": arrays(X),
            "memory map": arrays(np.load(path, mmap_mode="r")),
            "sparse rows": arrays(sparse.csr_matrix(np.where(X > 1, X, 0))),
            "DataLoader": Loader(loader).of(interface, task),
        }
        turns = {kind: _reads(source) for kind, source in sources.items()}
        timed = contest(f"{name}, batch {batch_size}", turns, rounds=rounds, unit="s", per=1.0)
        sources.clear()
        turns.clear()  # the map is let go of before its file
    return rates(timed, X.shape[0], "rows/s")


def _reads(source: Source) -> Callable[[], object]:
    return lambda: sum(len(batch) for batch in source.epoch())
