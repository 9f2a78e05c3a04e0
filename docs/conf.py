"""The documentation site: pip install '.[docs]' && sphinx-build -W docs site."""

from __future__ import annotations

import importlib
import inspect
from contextlib import suppress
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.util import logging

import lpom

project, author, copyright = "lpom", "The lpom authors", "The lpom authors, MIT licence"
version = release = lpom.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "numpydoc"]
myst_enable_extensions = ["dollarmath", "deflist"]
myst_heading_anchors = 3
suppress_warnings = ["myst.header"]  # generated pages are included below a heading of their own

default_role = "py:obj"
autodoc_member_order = "bysource"
autodoc_typehints = "none"
numpydoc_show_class_members = False
numpydoc_class_members_toctree = False

html_math_renderer = "mathjax"  # which the browser fetches
with suppress(ImportError):
    import latex2mathml.converter

    html_math_renderer = "mathml"

html_theme = "furo"
html_title = f"lpom {version}"
html_show_sphinx = False

#: Packages all of whose public names must be in the reference.
PUBLIC = ("lpom", "lpom.activations", "lpom.losses", "lpom.methods")
PUBLIC += ("lpom.saving", "lpom.graph", "lpom.training", "lpom.objectives")


def missing_names(app: Sphinx, env: BuildEnvironment) -> None:
    """Warn of public names that the reference leaves out, and so fail the build."""
    documented = set(env.domains["py"].objects)  # type: ignore[attr-defined]
    for package in PUBLIC:
        module = importlib.import_module(package)
        names = getattr(module, "__all__", None) or [
            name
            for name, thing in vars(module).items()
            if not name.startswith("_") and getattr(thing, "__module__", None) == package
        ]
        for name in names:
            thing = getattr(module, name)
            places = {f"{package}.{name}", getattr(thing, "__name__", "")}
            if home := getattr(thing, "__module__", None):
                places.add(f"{home}.{name}")
            if getattr(lpom, name, None) is thing:
                places.add(f"lpom.{name}")
            if not places & documented and not _constant(thing):
                logging.getLogger(__name__).warning(f"{package}.{name} is not in the reference")


def _constant(thing: object) -> bool:
    """Tables and shorthands for types, which Sphinx lists under the module that makes them."""
    return not (inspect.isclass(thing) or inspect.isroutine(thing) or inspect.ismodule(thing))


def formula(translator: Any, node: nodes.Element) -> None:
    """TeX as MathML, which browsers draw by themselves: the pages fetch nothing."""
    block = isinstance(node, nodes.math_block)
    made = latex2mathml.converter.convert(node.astext(), display="block" if block else "inline")
    translator.body.append(f'<div class="math">{made}</div>' if block else made)
    raise nodes.SkipNode


def setup(app: Sphinx) -> None:
    if html_math_renderer == "mathml":
        app.add_html_math_renderer("mathml", (formula, None), (formula, None))
    app.connect("env-check-consistency", missing_names)
