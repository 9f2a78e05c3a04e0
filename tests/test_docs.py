"""Examples in docstrings, in the README and in the guide, run."""

from __future__ import annotations

import doctest
import importlib
import re
from pathlib import Path

import pytest

import lpom

# examples are short, and a run that is cut short says so
pytestmark = pytest.mark.filterwarnings("ignore:training ended after max_iter")

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
PACKAGE = Path(lpom.__file__).parent
WITH_EXAMPLES = [
    ".".join(("lpom", *path.relative_to(PACKAGE).with_suffix("").parts)).removesuffix(".__init__")
    for path in sorted(PACKAGE.rglob("*.py"))
    if ">>> " in path.read_text()
]


def blocks(language):
    """Code of one language in the documents, each piece with a name."""
    for path in (README, ROOT / "docs" / "guide.md"):
        found = re.findall(rf"```{language}\n(.*?)```", path.read_text(), re.S)
        yield from (pytest.param(code, id=f"{path.name}-{k}") for k, code in enumerate(found))


@pytest.mark.parametrize("name", WITH_EXAMPLES)
def test_docstring_examples(name):
    result = doctest.testmod(importlib.import_module(name))
    assert result.attempted > 0 and result.failed == 0


@pytest.mark.parametrize("code", list(blocks("python")))
def test_examples_in_documents(code, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    exec(compile(code, "example", "exec"), {"__name__": "__example__"})


def test_documents_have_examples():
    assert len(list(blocks("python"))) > 5


def test_readme_starts_with_the_two_commands():
    commands = re.findall(r"```sh\n(.*?)```", README.read_text(), re.S)[0]
    assert "pip install -c constraints.txt . && lpom train digits" in commands
    assert "pip install -c constraints.txt '.[test]' && pytest" in commands
