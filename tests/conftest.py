"""Shared by all tests: one thread (two pytest runs side by side do not fight), fixed examples."""

from __future__ import annotations

import sys

import pytest
import torch
from hypothesis import HealthCheck, settings

torch.set_num_threads(1)

settings.register_profile(
    "lpom",
    deadline=None,  # never assert a time
    derandomize=True,
    max_examples=30,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("lpom")


def pytest_addoption(parser):
    parser.addoption("--long", action="store_true", help="faults and fuzzing in their long form")


def pytest_collection_modifyitems(config, items):
    """Leave out slow and network tests unless a -m expression asks for something else."""
    if config.option.markexpr:
        return
    kept = [i for i in items if not i.get_closest_marker("slow")]
    kept = [i for i in kept if not i.get_closest_marker("network")]
    config.hook.pytest_deselected(items=[i for i in items if i not in kept])
    items[:] = kept


@pytest.fixture(autouse=True)
def _fresh_compiler(request):
    """The compiler counts, over all tests of a process, how often code is compiled."""
    if "compile" in request.node.nodeid and "torch._dynamo" in sys.modules:
        sys.modules["torch._dynamo"].reset()
