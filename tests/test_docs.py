"""Examples in docstrings, and in the README, run."""

from __future__ import annotations

import doctest
import importlib
import pkgutil
import re
from pathlib import Path

import pytest

import lpom

MODULES = [lpom.__name__, *(m.name for m in pkgutil.walk_packages(lpom.__path__, "lpom."))]
README = Path(__file__).parents[1] / "README.md"


@pytest.mark.parametrize("name", MODULES)
def test_docstring_examples(name):
    result = doctest.testmod(importlib.import_module(name))
    assert result.failed == 0


def test_docstrings_have_examples_at_all():
    finder = doctest.DocTestFinder(exclude_empty=True)
    found = [test for name in MODULES for test in finder.find(importlib.import_module(name))]
    assert any(test.examples for test in found)


@pytest.mark.parametrize("block", re.findall(r"```python\n(.*?)```", README.read_text(), re.S))
def test_readme_examples(block, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    exec(compile(block, "README.md", "exec"), {"__name__": "__readme__"})


def test_readme_has_examples():
    assert "```python" in README.read_text()


def test_readme_starts_with_the_two_commands():
    commands = re.findall(r"```sh\n(.*?)```", README.read_text(), re.S)[0]
    assert "pip install -c constraints.txt . && lpom train digits" in commands
    assert "pip install -c constraints.txt '.[test]' && pytest" in commands
