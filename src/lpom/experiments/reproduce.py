"""Run an experiment of the paper, role by role and seed by seed; what is finished is kept."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from lpom import datasets
from lpom.experiments.paper import EXPERIMENTS, Experiment, Long, Role, rate_of
from lpom.experiments.records import Store, Trial
from lpom.experiments.trials import run
from lpom.training.history import Epoch

#: Told about every epoch and every finished trial: a sentence for the user.
Say = Callable[[str], None]


def reproduce(
    name: str,
    *,
    folder: Path,
    seeds: Sequence[int] = (0, 1, 2),
    epochs: int | None = None,
    roles: Sequence[str] | None = None,
    networks: Sequence[tuple[int, ...]] | None = None,
    data_dir: str | None = None,
    say: Say = lambda sentence: None,
) -> list[dict[str, Any]]:
    """All records of an experiment, running what is missing. Cut, it goes on where it was.

    Of ``roles`` and ``networks`` those count that the experiment has. An experiment with curves
    has one more run of each, with a sixth of the training data held out and watched, and perhaps a
    long one.
    """
    experiment = EXPERIMENTS[name]
    store = Store(folder / f"{name}.jsonl")
    data = datasets.load(experiment.dataset, data_dir)
    records = []
    for role_name, role in experiment.roles.items():
        if roles is not None and role_name not in roles:
            continue
        rate = tune(experiment, role, data, store, epochs, say)
        for hidden in experiment.networks:
            if networks is not None and hidden not in networks:
                continue
            for seed in seeds:
                trial = experiment.trial(role, hidden, seed, epochs, rate)
                record = run(
                    trial, data, store, on_epoch=follow(trial, _network(trial.hidden), say)
                )
                say(f"{role.title}, {_network(hidden)}, seed {seed}: {outcome(record)}")
                records.append(record)
            first = experiment.trial(role, hidden, seeds[0], epochs, rate)
            for trial in watched_trials(experiment, role, first, short=epochs is not None):
                record = run(
                    trial,
                    data,
                    store,
                    on_epoch=follow(trial, _network(trial.hidden), say),
                    closely=True,
                )
                say(
                    f"{role.title}, {_network(hidden)}, held out, {trial.epochs} epochs: "
                    f"{outcome(record)}"
                )
    return records


def watched(trial: Trial) -> Trial:
    """The same run on the rest of the training data, a part of which is held out."""
    return replace(trial, part="validation")


def watched_trials(
    experiment: Experiment, role: Role, trial: Trial, *, short: bool = False
) -> Iterator[Trial]:
    """Runs for curves on held-out data: of the trial's own length, and a long one."""
    if experiment.curves:
        yield watched(trial)
    if role.long is not None and not short:
        yield long_run(role.long, trial)


def long_run(long: Long, trial: Trial) -> Trial:
    return replace(watched(trial), epochs=long.epochs, precision=long.precision)


def tune(
    experiment: Experiment,
    role: Role,
    data: datasets.Dataset,
    store: Store,
    epochs: int | None = None,
    say: Say = lambda sentence: None,
) -> float | None:
    """The learning rate that does best on held-out training data; none if there is no grid."""
    records = [
        run(trial, data, store, on_epoch=follow(trial, _network(trial.hidden), say))
        for trial in tuning_trials(experiment, role, epochs)
    ]
    rate = chosen_rate(records)
    if rate is not None:
        shown = ", ".join(f"{rate_of(r):g}: {outcome(r)}" for r in records)
        say(f"{role.title}: learning rate {rate:g} chosen on held-out training data ({shown})")
    return rate


def chosen_rate(tuning: Sequence[dict[str, Any]]) -> float | None:
    """The learning rate of the best of these runs, the first of equals; none if there are none."""
    if not tuning:
        return None
    return rate_of(max(tuning, key=lambda record: record.get("score", 0.0)))


def tuning_trials(experiment: Experiment, role: Role, epochs: int | None = None) -> Iterator[Trial]:
    """One short run per learning rate of the grid, measured on held-out training data."""
    length = min(experiment.tuning_epochs, epochs or experiment.tuning_epochs)
    for rate in role.grid:
        trial = experiment.trial(role, experiment.networks[0], 0, length, rate)
        yield watched(trial)


def follow(trial: Trial, network: str, say: Say) -> Callable[[Epoch], None]:
    """Says after every epoch how far a trial is."""

    def told(epoch: Epoch) -> None:
        say(
            f"  {trial.method} {network} seed {trial.seed} epoch {epoch.epoch}/"
            f"{trial.epochs}: training {epoch.score:.2%}, loss {epoch.loss:.4f}, "
            f"{epoch.seconds:.1f} s"
        )

    return told


def _network(hidden: Sequence[int]) -> str:
    return "-".join(str(width) for width in hidden)


def outcome(record: dict[str, Any]) -> str:
    """What came of a trial, in a few words."""
    if "reason" in record:
        return f"not possible: {record['reason']}"
    return f"{record['score']:.2%} ({record['seconds']:.0f} s)"
