"""Runs pytest on one source tree after another: ``python forked.py < jobs.json``.

Each job is ``{"source": folder, "tests": [...]}``; its exit code is printed, one a line. A job is a
fork of this process, which has loaded what takes seconds to load and nothing of the library.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import traceback

import pytest
import scipy.optimize  # noqa: F401
import torch
import torch._dynamo  # noqa: F401  # what torch.optim and torch.testing pull in
import torch.fx  # noqa: F401
from hypothesis import Phase, settings

CRASHED = 70  # not one of pytest's own: a run that broke down is not a test that failed


def run(source: str, tests: list[str]) -> int:
    """Pytest's exit code with the library of this folder; failures are not made small."""
    assert "lpom" not in sys.modules
    sys.path.insert(0, source)
    settings.register_profile("as found", phases=[Phase.explicit, Phase.generate])
    settings.load_profile("as found")
    known = "ignore:Module already imported:pytest.PytestAssertRewriteWarning"
    with contextlib.redirect_stdout(sys.stderr):
        return int(
            pytest.main(
                ["-x", "-n", "0", "--tb=short", "-p", "no:cacheprovider", "-W", known, *tests]
            )
        )


if __name__ == "__main__":
    torch.set_num_threads(1)
    for job in json.load(sys.stdin):
        child = os.fork()
        if child == 0:
            try:
                os._exit(run(job["source"], job["tests"]))
            except BaseException:
                traceback.print_exc()
                os._exit(CRASHED)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
