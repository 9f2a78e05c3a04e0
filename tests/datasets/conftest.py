"""Keeps the tests away from the user's data and cache, and finds the real files where they are."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
PLACES = [
    Path(place)
    for place in (os.environ.get("LPOM_DATA"), REPOSITORY.parent / "shared" / "data")
    if place
]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of this test's own, no data folder, and no proxy on the loopback."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("LPOM_CACHE", str(folder))
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.delenv("LPOM_DATA", raising=False)
    return folder


@pytest.fixture
def real_data() -> Callable[[str], Path]:
    """The data folder that holds ``folder`` with the real files; skips where there is none."""

    def find(folder: str) -> Path:
        for place in PLACES:
            if (place / folder).is_dir():
                return place
        pytest.skip(f"no real files: {folder}/ is neither in LPOM_DATA nor in ../shared/data")

    return find
