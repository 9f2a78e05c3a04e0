"""``lpom tune``: settings for a table, by successive halving on a part of its training rows.

Many candidates train for a few epochs, the better third of them three times as long, and so on
until at most three have had all epochs. Each trains from its beginning as ``lpom train`` would, on
four fifths of the training rows, and is judged by its loss on the last fifth. Test rows are not
touched. ``tuning.json`` has every finished trial: called again, a search goes on from there.
"""

from __future__ import annotations

import hashlib
import json
import math
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from lpom import methods, runs
from lpom.checks import check_number
from lpom.estimators.splits import split_rows
from lpom.exceptions import DataError, LPOMError
from lpom.experiments.table import aligned
from lpom.files import write_atomically
from lpom.preparation import Prepared
from lpom.runs import Settings
from lpom.tables import Classes
from lpom.training.history import Epoch

SEARCH, TABLE = "tuning.json", "tuning.md"
FACTOR = 3  # candidates are divided, and epochs multiplied by it, from round to round
VALIDATION_SHARE = 0.2  # of the training rows
LEGEND = "Best first, by the loss on held-out training rows; – is the default."
_UNFINISHED = "unfinished"
_AS_SETTINGS = ("hidden", "activation", "learning_rate", "alpha", "batch_size")

#: Values to choose among by the name of a setting: of training, or of its method (``states.max_sweeps``).
Space: TypeAlias = Mapping[str, Sequence[Any]]
Candidate: TypeAlias = dict[str, Any]


def space_for(settings: Settings) -> dict[str, Sequence[Any]]:
    """What is worth trying for a method on a table."""
    method = methods.get(settings.method)
    space: dict[str, Sequence[Any]] = {
        "hidden": ((50,), (100,), (300,), (100, 50), (300, 100)),
        "activation": ("relu", "tanh"),
    }
    if any(name.endswith("learning_rate") for name in method.get_params()):
        space["learning_rate"] = (0.0005, 0.001, 0.002, 0.005, 0.01)
        space["alpha"] = (0.001, 0.01, 0.1, 1.0, 10.0)
    if not method.full_batch:
        space["batch_size"] = (32, 100)
    if "mu" in method.get_params(deep=False):
        space["mu"] = (5.0, 20.0, 100.0)
    return space


@dataclass(frozen=True)
class Search:
    """What is searched: ``n_candidates`` of a space, the first of them the defaults."""

    settings: Settings
    space: Space
    n_candidates: int = 27

    def __post_init__(self) -> None:
        check_number("the number of candidates", self.n_candidates, whole=True)

    def candidates(self) -> list[Candidate]:
        """The defaults, and different points of the space, drawn from the seed of the settings."""
        sizes = [len(values) for values in self.space.values()]
        points = math.prod(sizes)
        drawn = np.random.default_rng(self.settings.seed).choice(
            points, size=min(points, self.n_candidates - 1), replace=False
        )
        places = [np.unravel_index(point, sizes) for point in drawn] if sizes else []
        return [{}] + [
            {name: values[k] for (name, values), k in zip(self.space.items(), place, strict=True)}
            for place in places
        ]

    def with_candidate(self, candidate: Candidate, epochs: int | None = None) -> Settings:
        """Settings of training with those of a candidate."""
        own = {name: value for name, value in candidate.items() if name in _AS_SETTINGS}
        of_method = {
            name.replace(".", "__"): value
            for name, value in candidate.items()
            if name not in _AS_SETTINGS
        }
        every = {**self.settings.method_settings, **of_method}
        epochs = self.settings.epochs if epochs is None else epochs
        return replace(self.settings, **own, method_settings=every, epochs=epochs)

    def rounds(self, epochs: int) -> list[tuple[int, int]]:
        """How many candidates train in each round, and for how many epochs."""
        return halving(len(self.candidates()), epochs)


def halving(n_candidates: int, epochs: int) -> list[tuple[int, int]]:
    """How many candidates train in each round, and for how many epochs, the last for all.

    >>> halving(27, 90)
    [(27, 10), (9, 30), (3, 90)]
    """
    counts = [n_candidates]
    while counts[-1] > FACTOR:
        counts.append(math.ceil(counts[-1] / FACTOR))
    shares = [FACTOR**k for k in reversed(range(len(counts)))]
    return [
        (count, max(1, round(epochs / share))) for count, share in zip(counts, shares, strict=True)
    ]


@dataclass
class Trials:
    """The trials of a search so far, kept in a file; ``of`` says which search it is."""

    path: Path
    of: dict[str, Any]
    done: list[dict[str, Any]] = field(default_factory=list)

    @classmethod
    def begun(cls, folder: Path, of: dict[str, Any], *, anew: bool = False) -> Trials:
        """Those that are in a folder, if they are of this very search."""
        made = cls(folder / SEARCH, json.loads(json.dumps(of)))
        if anew or not made.path.exists():
            shutil.rmtree(folder / _UNFINISHED, ignore_errors=True)
            return made
        try:
            there = json.loads(made.path.read_text(encoding="utf-8"))
            made.done = list(there["trials"])
            before = there["search"]
        except (ValueError, KeyError, TypeError) as error:
            raise LPOMError(
                f"{made.path} is damaged ({error}). Name another folder, or use --force to start "
                "anew."
            ) from error
        differing = [name for name in made.of if before.get(name) != made.of[name]]
        if differing:
            raise ValueError(
                f"{folder} holds another search: another {' and another '.join(differing)}. Name "
                "another folder, or use --force to start anew."
            )
        return made

    def find(self, candidate: int, epochs: int) -> dict[str, Any] | None:
        wanted = (candidate, epochs)
        return next((t for t in self.done if (t["candidate"], t["epochs"]) == wanted), None)

    def add(self, trial: dict[str, Any]) -> None:
        self.done.append(trial)
        whole = {"search": self.of, "trials": self.done}
        text = json.dumps(whole, indent=1, ensure_ascii=False, allow_nan=False)
        write_atomically(self.path, f"{text}\n".encode())


def for_tuning(data: Prepared) -> Prepared:
    """The training rows alone, a fifth of them in the place of the test rows."""
    X, y = data.train
    strata = y if isinstance(data.target, Classes) else None
    kept, held = split_rows(len(X), VALIDATION_SHARE, np.random.default_rng(0), strata)
    if not len(held) or len(kept) < 2:
        raise DataError(
            f"{data.name} has {len(X)} rows to train on, too few to hold some out for tuning."
        )
    return replace(data, train=(X[kept], y[kept]), test=(X[held], y[held]), tested=None)


def describe(search: Search, rows: Prepared, epochs: int) -> dict[str, Any]:
    """What makes a search the same when it is called again."""
    digest = hashlib.sha256()
    for array in (*rows.train, *rows.test):
        digest.update(np.ascontiguousarray(array).tobytes())
    method = search.with_candidate({}).estimator(rows).method
    return {
        "data": f"{rows.name}, {rows.target.task} of {rows.target.name}, {digest.hexdigest()[:12]}",
        "method": {"name": methods.get(method).name, **methods.get(method).plain()},
        "loss": search.settings.loss,
        "class weight": search.settings.class_weight,
        "seed": search.settings.seed,
        "space": {name: list(values) for name, values in search.space.items()},
        "candidates": search.n_candidates,
        "rounds": search.rounds(epochs),
    }


def tune(
    search: Search,
    data: Prepared,
    folder: Path,
    *,
    anew: bool = False,
    on_epoch: Callable[[int, int, Epoch], None] = lambda round, candidate, epoch: None,
    on_trial: Callable[[int, dict[str, Any]], None] = lambda round, trial: None,
) -> list[dict[str, Any]]:
    """Run what is missing in ``folder``; all trials of the last round first, best first.

    Ctrl-C raises ``KeyboardInterrupt`` when what was reached is kept.
    """
    rows = for_tuning(data)
    epochs = search.settings.planned(len(rows.train[0]))[1]
    candidates = search.candidates()
    for candidate in candidates:
        runs.rehearse(rows, search.with_candidate(candidate))
    folder.mkdir(parents=True, exist_ok=True)
    trials = Trials.begun(folder, describe(search, rows, epochs), anew=anew)
    left = list(range(len(candidates)))
    rounds: list[list[dict[str, Any]]] = []
    for number, (count, budget) in enumerate(search.rounds(epochs)):
        found = []
        for k in left[:count]:
            trial = trials.find(k, budget)
            if trial is None:
                settings = search.with_candidate(candidates[k], budget)

                def follow(epoch: Epoch, number: int = number, k: int = k) -> None:
                    on_epoch(number, k, epoch)

                trial = {"candidate": k, "settings": candidates[k], "epochs": budget}
                trial |= _train(rows, settings, folder / _UNFINISHED, follow)
                trials.add(trial)
            on_trial(number, trial)
            found.append(trial)
        found.sort(key=_place)
        rounds.append(found)
        left = [trial["candidate"] for trial in found]
    ranked, seen = [], set()
    for trial in (trial for found in reversed(rounds) for trial in found):
        if trial["candidate"] not in seen:
            seen.add(trial["candidate"])
            ranked.append(trial)
    return ranked


def _train(
    rows: Prepared, settings: Settings, unfinished: Path, follow: Callable[[Epoch], None]
) -> dict[str, Any]:
    """Loss and score on the held-out rows, or the reason why there are none."""
    try:
        run = runs.train(rows, settings, progress=False, callbacks=[follow], checkpoint=unfinished)
    except ArithmeticError as error:  # it diverged
        shutil.rmtree(unfinished, ignore_errors=True)
        return {"loss": None, "score": None, "reason": str(error)}
    if run.config["status"] == "interrupted":
        raise KeyboardInterrupt
    shutil.rmtree(unfinished, ignore_errors=True)
    if run.config["status"] == "diverged":
        return {"loss": None, "score": None, "reason": run.config["diverged"]}
    held_out = run.config["results"]["test"]
    loss = held_out["loss"] if math.isfinite(held_out["loss"]) else None
    return {
        "loss": loss,
        "score": held_out["score"],
        "seconds": run.config["timing"]["training_seconds"],
    }


def _place(trial: dict[str, Any]) -> float:
    return math.inf if trial["loss"] is None else float(trial["loss"])


def table(space: Space, ranked: list[dict[str, Any]], metric: str) -> list[list[str]]:
    """A head, and a line for each candidate: its settings (– for defaults), and what it reached."""
    head = ["", *space, "epochs", "loss", metric]
    lines = []
    for place, trial in enumerate(ranked, 1):
        settings = trial["settings"]
        lines.append(
            [
                str(place),
                *(text(settings[name]) if settings else "–" for name in space),
                str(trial["epochs"]),
                trial.get("reason", "–") if trial["loss"] is None else f"{trial['loss']:.4g}",
                _score(trial["score"], metric),
            ]
        )
    return [head, *lines]


def text(value: Any) -> str:
    """The value of a setting as an option takes it."""
    if isinstance(value, list | tuple):
        return ",".join(map(text, value)) or "none"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _score(value: float | None, metric: str) -> str:
    if value is None:
        return "–"
    return f"{value:.4f}" if metric == "R²" else f"{100 * value:.2f} %"


def markdown(title: str, lines: list[list[str]], command: str) -> str:
    """The page that is kept: the table, and what trains with the best settings."""
    head, *body = lines
    return f"# {title}\n\n{aligned(head, body)}\n\n{LEGEND}\n\n```sh\n{command}\n```\n"
