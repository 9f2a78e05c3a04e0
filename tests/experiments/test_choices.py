"""The script that measures what the paper left open, on data that takes a second."""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from lpom import datasets, methods
from lpom.experiments.records import Store


@pytest.fixture(scope="module")
def choices():
    path = Path(__file__).parents[2] / "experiments" / "choices.py"
    spec = importlib.util.spec_from_file_location("choices", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules["choices"] = module  # where dataclasses look for annotations
    spec.loader.exec_module(module)
    yield module
    del sys.modules["choices"]


def test_every_variant_is_held_out_and_takes_known_parameters(choices):
    for choice in choices.CHOICES:
        keys = set()
        for label in choice.variants:
            for trial in choices.trials(choice, label, 1, [0]):
                assert trial.part == "validation"
                methods.get(trial.method).set_params(**trial.params)
                keys.add(trial.key)
        assert len(keys) == len(choice.variants), f"{choice.title}: two variants are the same"


def test_a_table_has_a_row_per_variant(choices, tmp_path):
    choice = choices.CHOICES[3]
    small = replace(choice, base=replace(choice.base, dataset="iris", hidden=(8,)))
    text = choices.table(small, 1, [0, 1], datasets.load("iris"), Store(tmp_path / "c.jsonl"))
    rows = [line for line in text.splitlines() if line.startswith("| ")]
    assert len(rows) == 1 + len(choice.variants)
    assert all("±" in row for row in rows[1:])
