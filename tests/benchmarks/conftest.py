"""Keeps the tests away from the user's data and cache, and finds the real files where they are."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
PLACES = [os.environ.get("LPOM_DATA"), REPOSITORY.parent / "shared" / "data"]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A data folder and a cache of this test's own, both empty; no proxy on the loopback."""
    monkeypatch.setenv("LPOM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("LPOM_DATA", str(tmp_path))
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    return tmp_path


@pytest.fixture
def real_data(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Reads real files: those of the folder that has ``name``; skips where there is none."""

    def find(name: str) -> None:
        for place in filter(None, PLACES):
            if (Path(place) / name).is_dir():
                monkeypatch.setenv("LPOM_DATA", str(place))
                return
        pytest.skip(f"no real files: {name}/ is neither in LPOM_DATA nor in ../shared/data")

    return find
