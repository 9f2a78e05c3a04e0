"""Training methods beside each other: the same model, weights, batches and loss for all."""

from __future__ import annotations

import copy
import statistics
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, final

from torch import nn

from lpom import methods as methods_
from lpom.exceptions import ConvergenceWarning, LPOMError
from lpom.losses import Loss
from lpom.methods import Method
from lpom.training import evaluate, fit
from lpom.training.history import Epoch


@final
@dataclass(frozen=True)
class Trial:
    """One method from one start.

    Attributes
    ----------
    metric : what the score is, accuracy or r2
    score, loss : on the validation data, or on the training data where there are none
    seconds : of training alone
    curve : an `Epoch` each
    reason : why the method could not train this model; then all numbers are NaN
    """

    method: str
    seed: int
    metric: str = "accuracy"
    score: float = float("nan")
    loss: float = float("nan")
    train_score: float = float("nan")
    seconds: float = float("nan")
    curve: tuple[Epoch, ...] = ()
    remarks: tuple[str, ...] = ()
    reason: str = ""

    def to_record(self) -> dict[str, Any]:
        """Plain values, for a line of JSON."""
        return asdict(self)

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> Trial:
        curve = tuple(map(Epoch.of, record["curve"]))
        return cls(**{**record, "curve": curve, "remarks": tuple(record["remarks"])})


@final
class Comparison(Sequence[Trial]):
    """Finished trials; as a text a table in Markdown, best method first."""

    def __init__(self, trials: Iterable[Trial]) -> None:
        self.trials = list(trials)

    def __getitem__(self, k: Any) -> Any:
        return self.trials[k]

    def __len__(self) -> int:
        return len(self.trials)

    def rows(self) -> list[tuple[str, ...]]:
        """The head of the table, and a row for each method."""
        metric = next((trial.metric for trial in self.trials if not trial.reason), "accuracy")
        shown = "R²" if metric == "r2" else metric
        head = ("method", shown, f"training {shown}", "loss", "seconds", "epochs", "remarks")
        by_method: dict[str, list[Trial]] = {}
        for trial in self.trials:
            by_method.setdefault(trial.method, []).append(trial)
        lines = []
        for name, trials in by_method.items():
            done = [trial for trial in trials if not trial.reason]
            remarks = dict.fromkeys(t.reason for t in trials if t.reason)
            remarks |= dict.fromkeys(remark for t in done for remark in t.remarks)
            if not done:
                lines.append((-float("inf"), (name, *["–"] * 5, " ".join(remarks))))
                continue
            scores = [trial.score for trial in done]
            row = (
                name,
                _with_spread(scores, metric),
                _shown(statistics.fmean(trial.train_score for trial in done), metric),
                f"{statistics.fmean(trial.loss for trial in done):.4g}",
                f"{statistics.fmean(trial.seconds for trial in done):.3g}",
                str(len(done[0].curve)),
                " ".join(remarks),
            )
            lines.append((statistics.fmean(scores), row))
        lines.sort(key=lambda line: -line[0])
        return [head, *(row for _, row in lines)]

    def __str__(self) -> str:
        head, *body = self.rows()
        lines = [head, tuple("---" for _ in head), *body]
        return "\n".join(
            f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |" for line in lines
        )


def _shown(score: float, metric: str) -> str:
    return f"{score:.4f}" if metric == "r2" else f"{100 * score:.2f} %"


def _with_spread(scores: Sequence[float], metric: str) -> str:
    if len(scores) < 2:
        return _shown(scores[0], metric)
    mean, spread = (_shown(f(scores), metric) for f in (statistics.fmean, statistics.stdev))
    return f"{mean.removesuffix(' %')} ± {spread}"


def compare(
    model: nn.Module | Callable[[int], nn.Module],
    X: Any,
    y: Any = None,
    *,
    methods: Sequence[str | Method[Any]] = ("lpom", "adam", "sgd"),
    seeds: Sequence[int] = (0,),
    epochs: int | Mapping[str, int] = 10,
    validation_data: Any = None,
    loss: str | Loss = "auto",
    **settings: Any,
) -> Comparison:
    """Train copies of a model by several methods, from the same weights and on the same batches.

    Parameters
    ----------
    model : a module, which stays as it is, or a function that makes one for a seed
    X, y : as `fit` takes them
    methods : names, instances or "package.module:Class"
    seeds : of the batches, and of the model if it is a function
    epochs : for all, or by the name of a method; ``{"default": 10, "admm": 50}``
    validation_data : on which methods are compared, (X, y); else the training data
    settings : anything else that `fit` takes, as ``batch_size``

    Returns
    -------
    Comparison : a `Trial` for each method and seed
        A method that cannot train the model has the reason in place of numbers.

    >>> import torch
    >>> import lpom
    >>> X, y = torch.randn(200, 4), torch.randint(2, (200,))
    >>> found = lpom.compare(lpom.mlp([4, 8, 2], seed=0), X, y, methods=["lpom", "adam"], epochs=2)
    >>> [trial.method for trial in found]
    ['lpom', 'adam']
    """
    return Comparison(
        each_trial(
            model,
            X,
            y,
            methods=methods,
            seeds=seeds,
            epochs=epochs,
            validation_data=validation_data,
            loss=loss,
            **settings,
        )
    )


def each_trial(
    model: nn.Module | Callable[[int], nn.Module],
    X: Any,
    y: Any,
    *,
    methods: Sequence[str | Method[Any]],
    seeds: Sequence[int],
    epochs: int | Mapping[str, int] = 10,
    validation_data: Any = None,
    **settings: Any,
) -> Iterator[Trial]:
    """The trials of `compare`, one by one as they are finished."""
    chosen = [methods_.get(method) for method in methods]
    names = [method.name for method in chosen]
    for what, values in (("methods", names), ("seeds", list(seeds))):
        if not values or len(set(values)) < len(values):
            raise ValueError(f"{what} must be one or more, each once, got {values}.")
    numbers = epochs if isinstance(epochs, Mapping) else {"default": epochs}
    for name in numbers.keys() - {"default"} - set(names):
        raise ValueError(f"{name!r} has epochs but is not compared; methods are {names}.")
    for seed in seeds:
        start = model if isinstance(model, nn.Module) else model(seed)
        for method in chosen:
            count = numbers.get(method.name, numbers.get("default", 10))
            yield _trial(copy.deepcopy(start), X, y, method, seed, count, validation_data, settings)


def _trial(
    model: nn.Module,
    X: Any,
    y: Any,
    method: Method[Any],
    seed: int,
    epochs: int,
    validation_data: Any,
    settings: Mapping[str, Any],
) -> Trial:
    loss = settings.get("loss", "auto")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # the remarks say it
        try:
            result = fit(model, X, y, method=method, epochs=epochs, seed=seed, **settings)
            measured = (X, y) if validation_data is None else validation_data
            value, score = evaluate(model, *measured, loss=loss)
            train_score = evaluate(model, X, y, loss=loss)[1]
        except (ValueError, LPOMError, RuntimeError) as error:  # RuntimeError: a factor that failed
            return Trial(method.name, seed, reason=" ".join(str(error).split()))
    if result.status == "interrupted":
        raise KeyboardInterrupt
    return Trial(
        method.name,
        seed,
        result.history.metric,
        score,
        value,
        train_score,
        result.training_seconds,
        tuple(result.history),
        tuple(result.state.remarks.values()),
    )
