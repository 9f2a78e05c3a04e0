"""A folder of its own for every test of the shell."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("LPOM_DEBUG", raising=False)
