"""What works with the required packages alone, and what says which extra to install."""

from __future__ import annotations

import os
import subprocess
import sys

EXTRAS = (
    "pandas matplotlib rich typer click PIL pyarrow openpyxl polars onnx onnxruntime onnxscript "
    "nir tensorboard pooch lightning skorch accelerate transformers"
).split()

CLI = ("typer", "click", "rich", "pandas")  # the extra of the command

BLOCK = """
import sys
from importlib.machinery import PathFinder


class Others:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name.partition(".")[0] not in BLOCKED:
            return PathFinder.find_spec(name, path, target)


sys.meta_path[:] = [Others if finder is PathFinder else finder for finder in sys.meta_path]
"""


def run(code, *arguments, allowed=(), folder=None):
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    blocked = [name for name in EXTRAS if name not in allowed]
    return subprocess.run(
        [sys.executable, "-c", f"BLOCKED = {blocked!r}\n{BLOCK}{code}", *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        env=environment,
    )


def test_the_library_trains_with_the_four_required_packages():
    done = run(
        """
import numpy as np, torch, lpom
X = torch.randn(200, 5, generator=torch.Generator().manual_seed(0))
y = (X[:, 0] > 0).long()
model = lpom.mlp([5, 8, 2], seed=0)
result = lpom.fit(model, X, y, epochs=3, seed=0)
print(result.history[-1].loss, lpom.evaluate(model, X, y), lpom.diagnose(model, X, y))
lpom.lift(lpom.mlp([5, 8, 2], seed=0))(X).sum().backward()
classifier = lpom.MLPClassifier((8,), max_iter=200, random_state=0).fit(X.numpy(), y.numpy())
assert classifier.score(X.numpy(), y.numpy()) > 0.8
lpom.MLPRegressor((8,), max_iter=300, random_state=0).fit(X.numpy(), X[:, 0].numpy())
"""
    )
    assert done.returncode == 0, done.stderr


def test_the_command_says_which_extra_to_install():
    done = run("from runpy import run_module; run_module('lpom', run_name='__main__')", "train")
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert "lpom[cli]" in done.stderr and "typer" in done.stderr


def test_the_command_needs_its_extra_alone(tmp_path):
    code = "from lpom.cli import main; main()"
    for words in (("train", "digits", "--epochs", "2"), ("report",), ("info", "runs/digits-1")):
        done = run(code, *words, allowed=CLI, folder=tmp_path)
        assert done.returncode == 0, done.stderr


def test_training_from_the_shell_loads_no_compiler(tmp_path):
    heavy = ["torch._dynamo", "sympy", "matplotlib"]
    code = f"""
import atexit, sys
from lpom.cli import main
atexit.register(lambda: print([name for name in {heavy!r} if name in sys.modules]))
main()
"""
    done = run(code, "train", "digits", "--epochs", "2", "--quiet", allowed=CLI, folder=tmp_path)
    assert done.stdout.splitlines()[-1] == "[]", done.stdout


def test_the_command_is_a_module_too():
    done = subprocess.run(
        [sys.executable, "-m", "lpom", "--version"], capture_output=True, text=True
    )
    assert done.returncode == 0 and done.stdout.startswith("lpom ")
