"""Examples in docstrings, in the README and on the pages of docs/, run."""

from __future__ import annotations

import doctest
import importlib
import importlib.util
import pkgutil
import re
import shlex
from pathlib import Path

import pytest

import lpom

# examples are short, and a run that is cut short says so
pytestmark = pytest.mark.filterwarnings("ignore:training ended after max_iter")

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
PAGES = [README, *sorted((ROOT / "docs").glob("*.md"))]


def blocks(page, language):
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.S | re.M)


def parametrized(pages, language):
    """Code of one language in the documents, each piece with a name."""
    return [
        pytest.param(code, id=f"{page.stem}-{k}")
        for page in pages
        for k, code in enumerate(blocks(page, language), 1)
    ]


def docstring_examples():
    """Every docstring that has an example, by its name."""
    finder = doctest.DocTestFinder(exclude_empty=True)
    modules = [lpom.__name__, *(m.name for m in pkgutil.walk_packages(lpom.__path__, "lpom."))]
    for name in modules:
        for test in finder.find(importlib.import_module(name)):
            if test.examples:
                yield pytest.param(test, id=test.name)


@pytest.mark.parametrize("test", list(docstring_examples()))
def test_docstring_examples(test):
    assert doctest.DocTestRunner().run(test).failed == 0


@pytest.mark.parametrize("code", parametrized(PAGES, "python"))
def test_examples_on_pages(code, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    exec(compile(code, "example", "exec", dont_inherit=True), {"__name__": "__example__"})


def commands(text):
    """Calls of lpom in a block of shell code, as lists of words."""
    for line in text.splitlines():
        for part in line.partition("#")[0].split("&&"):
            name, *words = shlex.split(part) or [""]
            if name == "lpom":
                yield words


@pytest.mark.parametrize("code", parametrized(PAGES, "sh"))
def test_commands_on_pages_have_options_that_exist(code):
    from lpom.cli.app import _COMMANDS, _loaded

    for words in commands(code):
        assert words[0] in _COMMANDS, words
        command, words = _loaded(words[0]), words[1:]
        while hasattr(command, "commands"):
            assert words[0] in command.commands, words
            command, words = command.commands[words[0]], words[1:]
        command.make_context("lpom", list(words))  # parses, and does not run


def test_readme_starts_with_the_two_commands():
    first = blocks(README, "sh")[0]
    assert "pip install -c constraints.txt '.[cli]' && lpom train digits" in first
    assert "pip install -c constraints.txt '.[test]' && pytest" in first


def test_every_page_is_in_the_table_of_contents():
    contents = (ROOT / "docs" / "index.md").read_text()
    named = set(re.findall(r"^([a-z/]+)$", contents, re.M))
    parts = {"index", "cosine"}  # the page itself, and part of another
    pages = {page.stem for page in PAGES if page != README} - parts
    assert pages == named - {"reference/index"}


@pytest.mark.parametrize(
    "page", [*PAGES, *sorted((ROOT / "benchmarks").rglob("*.md"))], ids=lambda page: page.stem
)
def test_links_to_files_lead_somewhere(page):
    links = re.findall(r"\]\(([^)#]+)\)", page.read_text())
    local = [link for link in links if not link.startswith("https://")]
    places = [page.parent, ROOT / "docs"]  # pages of results are included in those of docs/
    assert [link for link in local if not any((place / link).exists() for place in places)] == []


def test_pictures_are_those_that_the_script_draws(tmp_path, monkeypatch):
    """Each is on a page, and what its script draws today, as far as its words tell."""
    found = importlib.util.spec_from_file_location("draw", ROOT / "docs" / "draw.py")
    draw = importlib.util.module_from_spec(found)
    found.loader.exec_module(draw)
    monkeypatch.setattr(draw, "PICTURES", tmp_path)
    for drawn in (draw.overview, draw.gap, draw.answer):
        drawn()
    kept = {path.name for path in (ROOT / "docs" / "pictures").iterdir()}
    own = {path.name for path in tmp_path.iterdir()}  # the others are those of examples/
    assert own <= kept
    pages = "".join(page.read_text() for page in PAGES)
    assert all(f"pictures/{name})" in pages for name in kept)
    for name in own:
        assert words(tmp_path / name) == words(ROOT / "docs" / "pictures" / name)


def words(picture):
    """The texts of an SVG, which its comments have."""
    return re.findall(r"<!-- (.*?) -->", picture.read_text())
