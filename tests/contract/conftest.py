"""The command, called in this process, and tables to call it with."""

from __future__ import annotations

import signal
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from runpy import run_module

import numpy as np
import pandas as pd
import pytest

SHORT = ("--hidden", "8", "--epochs", "3")


@dataclass
class Outcome:
    code: int
    out: str
    err: str


def run(capture: pytest.CaptureFixture[str], *arguments: object) -> Outcome:
    """What `lpom <arguments>` prints and its exit code."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    argv, sys.argv = sys.argv, ["lpom", *map(str, arguments)]
    code: object = 0
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("default")  # which the command prints
            run_module("lpom", run_name="__main__")
    except SystemExit as end:
        code = end.code
    finally:
        sys.argv = argv
        for number, handler in handlers.items():
            signal.signal(number, handler)
    printed = capture.readouterr()
    return Outcome(code if isinstance(code, int) else int(bool(code)), printed.out, printed.err)


@pytest.fixture
def lpom_command(capsys: pytest.CaptureFixture[str]) -> Callable[..., Outcome]:
    """Calls the command; expects exit code 0, or ``code``."""

    def call(*arguments: object, code: int = 0) -> Outcome:
        outcome = run(capsys, *arguments)
        assert outcome.code == code, outcome
        assert "Traceback" not in outcome.err
        return outcome

    return call


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    yield tmp_path


def people(n: int = 80) -> pd.DataFrame:
    """Rows with a number, a category, a date, missing values, and two targets."""
    rng = np.random.default_rng(0)
    frame = pd.DataFrame(
        {
            "age": rng.integers(20, 80, n).astype(float),
            "colour": rng.choice(["red", "green", "blue"], n),
            "since": pd.to_datetime("2020-01-01") + pd.to_timedelta(rng.integers(0, 999, n), "D"),
            "member": rng.choice(["yes", "no"], n),
        }
    )
    frame["drink"] = np.where((frame["age"] > 50) ^ (frame["colour"] == "red"), "tea", "coffee")
    frame["cups"] = (frame["age"] / 10 + rng.normal(0, 0.3, n)).round(2)
    frame.loc[::11, "age"] = np.nan
    return frame


@pytest.fixture
def table(here: Path) -> Path:
    people().to_csv("people.csv", index=False)
    return Path("people.csv")


@pytest.fixture
def trained(table: Path, lpom_command: Callable[..., Outcome]) -> Path:
    """A run of classification in ``runs/people-1``."""
    lpom_command("train", table, "--target", "drink", "--ignore", "cups", *SHORT, "--quiet")
    return Path("runs/people-1")
