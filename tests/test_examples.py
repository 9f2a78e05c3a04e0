"""The scripts in examples/ run and draw their picture."""

from __future__ import annotations

import runpy
from pathlib import Path

import matplotlib as mpl
import pytest

SCRIPTS = sorted((Path(__file__).parents[1] / "examples").glob("*.py"))


@pytest.mark.filterwarnings("ignore:training ended after max_iter")
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_an_example_draws_its_picture(script, tmp_path, monkeypatch):
    mpl.use("Agg")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", [script.name])
    runpy.run_path(str(script), run_name="__main__")
    assert (tmp_path / f"{script.stem}.svg").stat().st_size > 10_000
