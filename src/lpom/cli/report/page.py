"""The page as one HTML file that needs nothing else: style, script and data are inside it."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import os
from collections import Counter
from collections.abc import Sequence
from datetime import datetime
from functools import cache
from importlib import resources
from pathlib import Path
from string import Template
from typing import Any

import lpom
from lpom import datasets
from lpom.cli.folder import CONFIG
from lpom.cli.report.content import describe
from lpom.cli.run import Run
from lpom.datasets.base import DataDir
from lpom.exceptions import ModelFileError
from lpom.files import write_atomically


def write_report(
    folders: Sequence[str | os.PathLike[str]],
    path: str | os.PathLike[str],
    *,
    data_dir: DataDir = None,
) -> None:
    """Write the page about the runs in ``folders`` to ``path``, whole or not at all.

    ``data_dir`` is where the files of their data sets are, as in :func:`lpom.datasets.load`, by
    default where they were in training; they are read again for the confusion matrix and the
    mistakes.
    """
    load = cache(lambda name, folder: datasets.load(name, data_dir or folder))
    runs = [
        _described(Path(folder), name, load)
        for folder, name in zip(folders, _names(folders), strict=True)
    ]
    title = runs[0]["name"] if len(runs) == 1 else f"{len(runs)} runs compared"
    write_atomically(Path(path), page(f"lpom: {title}", {"runs": runs}).encode())


def page(title: str, content: dict[str, Any]) -> str:
    """The HTML around ``content``, which the script of the page draws.

    Nothing in the content can leave its script element, since ``<`` never occurs in it; and a
    policy allows the browser no script but ours, and no address to fetch from.
    """
    style, script = _file("page.css"), _file("plot.js") + _file("page.js")
    policy = (
        "default-src 'none'; img-src data:; base-uri 'none'; form-action 'none'; "
        f"style-src {_fingerprint(style)}; script-src {_fingerprint(script)}"
    )
    return Template(_file("template.html")).substitute(
        policy=policy,
        title=html.escape(title),
        style=style,
        script=script,
        data=json.dumps(content, allow_nan=False).replace("<", "\\u003c"),
        version=html.escape(lpom.__version__),
        written=datetime.now().astimezone().strftime("%Y-%m-%d %H:%M"),
    )


def _described(folder: Path, name: str, load: Any) -> dict[str, Any]:
    run = Run.read(folder)
    try:
        return describe(name, run, load)
    except (KeyError, TypeError, AttributeError) as error:
        raise ModelFileError(
            f"{folder / CONFIG} lacks what `lpom train` writes ({error!r}). Train again."
        ) from error


def _names(folders: Sequence[str | os.PathLike[str]]) -> list[str]:
    """The last part of each path, or all of it where two share that."""
    short = [Path(folder).resolve().name for folder in folders]
    times = Counter(short)
    return [
        name if times[name] == 1 else os.fspath(folder)
        for name, folder in zip(short, folders, strict=True)
    ]


def _file(name: str) -> str:
    return resources.files("lpom.cli.report").joinpath(name).read_text(encoding="utf-8")


def _fingerprint(text: str) -> str:
    digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
    return f"'sha256-{digest}'"
