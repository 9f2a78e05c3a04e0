"""Imports point one way, and what is heavy loads where it is used."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import lpom

PACKAGE = Path(lpom.__file__).parent

#: From the bottom up. A room imports rooms below it and itself, at the top of a file or within.
ROOMS = [
    {"exceptions", "checks", "registry", "settings", "files", "modes"},
    {"activations", "losses", "penalties"},
    {"graph"},
    {"weights"},
    {
        *("rule", "rows", "mode", "written", "bending", "audit", "attention", "spiking"),
        *("recurrent", "stack", "states", "objectives", "lifting"),
    },
    {"methods"},
    {"parallel"},
    {"training", "compacting"},
    {"comparison"},
    {"diagnostics"},
    {"networks"},
    {"layers", "encoding", "saving", "export", "terms", "inversion"},
    {"estimators", "tables"},
    {"cli", "__main__"},
]
LEVEL = {room: level for level, rooms in enumerate(ROOMS) for room in rooms}
HEAVY = {"sklearn", "pandas", "matplotlib", "rich", "typer", "scipy"}
#: Rooms that load heavy libraries with themselves: those that people ask for by name.
MAY_BE_HEAVY = LEVEL["estimators"]


def files():
    return sorted(path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py")


def room(path):
    return path.relative_to(PACKAGE).with_suffix("").parts[0]


def imports(tree):
    """Dotted names that a tree imports, each with its line."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            if node.module == "lpom":
                yield from ((f"lpom.{alias.name}", node.lineno) for alias in node.names)
            else:
                yield node.module, node.lineno


def at_the_top(tree):
    """What runs when the file is imported: not functions, not what only type checkers read."""
    kept = [
        node
        for node in tree.body
        if not isinstance(node, ast.FunctionDef | ast.ClassDef)
        and not (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test))
    ]
    return ast.Module(kept, [])


def test_every_room_has_its_place():
    assert {room(path) for path in files()} <= LEVEL.keys()


@pytest.mark.parametrize("path", files(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_point_one_way(path):
    own = LEVEL[room(path)]
    for name, line in imports(ast.parse(path.read_text())):
        if name.startswith("lpom."):
            below = name.split(".")[1]
            if below in LEVEL:  # else a name of the package itself
                assert LEVEL[below] <= own, f"line {line} imports {name}, which stands above it"


def test_no_method_imports_another():
    from lpom.methods import METHODS

    of_a_method = {method.__module__ for method in METHODS.values()}
    for name in of_a_method:
        tree = ast.parse((PACKAGE.parent / f"{name.replace('.', '/')}.py").read_text())
        others = {imported for imported, _ in imports(tree)} & (of_a_method - {name})
        assert not others, f"{name} imports {others}; what two methods share moves down"


@pytest.mark.parametrize(
    "path",
    [path for path in files() if LEVEL[room(path)] < MAY_BE_HEAVY],
    ids=lambda path: str(path.relative_to(PACKAGE)),
)
def test_heavy_libraries_are_imported_where_they_are_used(path):
    found = {
        name.split(".")[0]: line for name, line in imports(at_the_top(ast.parse(path.read_text())))
    }
    assert not HEAVY & found.keys(), f"import {HEAVY & found.keys()} inside of a function"


def test_neither_importing_lpom_nor_training_a_module_loads_anything_heavy():
    code = f"""
import sys
import torch
import lpom
show = lambda: print(*({HEAVY!r} & sys.modules.keys()))
show()
X, y = torch.randn(20, 3), torch.randint(2, (20,))
lpom.fit(lpom.mlp([3, 4, 2], seed=0), X, y, epochs=1, progress=False)
show()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "\n\n"


def test_one_batch_of_fit_visits_few_files(monkeypatch):
    """Trainer, score, method, stack of layers, activation, loss, Adam: from step 4 to step 5.

    Rows are brought for several steps at a time, so their source is not among them.
    """
    visited, steps, whole = set(), [], lpom.LPOM.step

    def watch(frame, event, arg):
        if event == "call" and frame.f_code.co_filename.startswith(f"{PACKAGE}/"):
            visited.add(Path(frame.f_code.co_filename).relative_to(PACKAGE).as_posix())

    def step(self, *args):
        steps.append(sys.setprofile(watch if len(steps) == 3 else None))
        return whole(self, *args)

    monkeypatch.setattr(lpom.LPOM, "step", step)
    X, y = torch.randn(200, 5), torch.arange(200) % 3
    lpom.fit(lpom.mlp([5, 6, 6, 3], seed=0), X, y, epochs=1, batch_size=20, progress=False)
    assert {"methods/lpom.py", "stack.py", "weights/adam.py"} <= visited
    assert len(visited) <= 12, visited


def test_all_names_are_there():
    for name in lpom.__all__:
        assert getattr(lpom, name) is not None
        # importing a file of that name would put it in the place of what is meant
        assert name not in lpom._ROOM_OF or not (PACKAGE / name).exists()
        assert name not in lpom._ROOM_OF or not (PACKAGE / f"{name}.py").exists()
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        getattr(lpom, "nonsense")  # noqa: B009
