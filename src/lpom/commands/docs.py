"""``lpom docs``: the documentation, in the browser or on the terminal."""

from __future__ import annotations

import re
import webbrowser
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markdown import Markdown

import lpom
from lpom.commands.options import completing
from lpom.exceptions import LPOMError, unknown_name

_PACKAGE = Path(lpom.__file__).parent
_CHECKOUT = _PACKAGE.parents[1]
_PAGES = (_PACKAGE / "docs", _CHECKOUT / "docs")  # installed, or beside the source
_SITES = (_CHECKOUT / "site", _CHECKOUT / "docs" / "_build" / "html")  # if it was built


def docs(
    page: Annotated[
        str,
        typer.Argument(
            help="start, tables, methods, ...", autocompletion=completing(lambda: _known(_folder()))
        ),
    ] = "index",
    where: Annotated[
        bool, typer.Option("--where", help="Print where the page is, and open nothing.")
    ] = False,
) -> None:
    """Open the documentation: the built site in the browser, else a page on the terminal.

    The pages come with the package and need no network.
    """
    folder = _folder()
    if page not in _known(folder):
        raise ValueError(unknown_name("page", page, _known(folder)))
    built = [site / f"{page}.html" for site in _SITES if (site / f"{page}.html").is_file()]
    if where:
        typer.echo(built[0] if built else folder / f"{page}.md")
    elif not (built and webbrowser.open(built[0].as_uri())):
        console = Console()
        shown = Markdown(readable(folder, page))
        if console.is_terminal:
            with console.pager(styles=True):
                console.print(shown)
        else:
            console.print(shown)


def _folder() -> Path:
    """Where the pages are."""
    for folder in _PAGES:
        if (folder / "index.md").is_file():
            return folder
    raise LPOMError(
        f"the pages of the documentation are missing from {_PAGES[0]}. Install lpom again."
    )


def _known(folder: Path) -> list[str]:
    return sorted(path.stem for path in folder.glob("*.md"))


def readable(folder: Path, page: str) -> str:
    """A page as plain Markdown: included files in their places, contents as names to ask for."""

    def plain(found: re.Match[str]) -> str:
        kind, argument, body = found.groups()
        if kind == "include":
            part = folder / argument
            missing = f"(`{argument}` is part of the source.)"
            return part.read_text(encoding="utf-8") if part.is_file() else missing
        names = [line for line in body.split("\n") if re.fullmatch("[a-z]+", line)]
        caption = re.search(r":caption: (.*)", body)
        title = caption[1] if caption else "Pages"
        listed = ", ".join(f"`lpom docs {name}`" for name in names)
        return f"**{title}**: {listed}" if listed else ""

    text = (folder / f"{page}.md").read_text(encoding="utf-8")
    return re.sub(r"^```\{(\w+)\} ?(.*?)\n(.*?)^```$", plain, text, flags=re.S | re.M)
