"""``lpom docs`` opens the built site, or shows a page on the terminal; no browser is needed."""

from __future__ import annotations

import webbrowser
from pathlib import Path

import pytest
from typer.testing import CliRunner

from lpom.cli import app
from lpom.commands import docs

PAGES = Path(__file__).parents[1] / "docs"


@pytest.fixture
def opened(monkeypatch):
    addresses = []
    monkeypatch.setattr(webbrowser, "open", lambda address: addresses.append(address) or True)
    return addresses


@pytest.fixture(autouse=True)
def no_site(monkeypatch):
    monkeypatch.setattr(docs, "_SITES", ())


def call(*words, code=0):
    result = CliRunner().invoke(app, ["docs", *map(str, words)])
    assert result.exit_code == code, result.output
    return result


def test_the_first_page_names_the_others(opened):
    shown = call().stdout
    assert "Train neural networks without back-propagation" in shown
    for page in ("start", "tables", "mathematics", "changelog"):
        assert f"lpom docs {page}" in " ".join(shown.split())
    assert "toctree" not in shown and not opened


@pytest.mark.parametrize("page", sorted(path.stem for path in PAGES.glob("*.md")))
def test_every_page_is_plain_markdown(page):
    text = docs.readable(PAGES, page)
    assert "```{" not in text and len(text) > 200


def test_included_files_stand_in_their_places_if_they_are_there(tmp_path):
    (tmp_path / "a.md").write_text("# A\n\n```{include} b.md\n```\n\n```{include} ../c.md\n```\n")
    (tmp_path / "b.md").write_text("text of b\n")
    shown = docs.readable(tmp_path, "a")
    assert "text of b" in shown and "`../c.md` is part of the source" in shown


def test_a_built_site_is_opened(tmp_path, monkeypatch, opened):
    (tmp_path / "tables.html").write_text("<p>built")
    monkeypatch.setattr(docs, "_SITES", (tmp_path,))
    assert call("tables").stdout == ""
    assert opened == [(tmp_path / "tables.html").as_uri()]
    assert call("tables", "--where").stdout.strip() == str(tmp_path / "tables.html")
    assert len(opened) == 1
    monkeypatch.setattr(webbrowser, "open", lambda address: False)  # there is no browser
    assert "What is done with each column" in call("tables").stdout


def test_where_a_page_is_and_which_there_are():
    where = Path(call("start", "--where").stdout.strip())
    assert where.name == "start.md" and where.read_text() == (PAGES / "start.md").read_text()
    assert "did you mean 'tables'" in call("tabels", code=2).stderr


def test_an_installation_without_pages_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(docs, "_PAGES", (tmp_path / "nowhere",))
    assert "are missing" in call(code=2).stderr
