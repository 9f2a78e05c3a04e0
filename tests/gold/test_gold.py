"""The library answers as version 0.1.0 did, to rounding; `make.py` wrote those answers down."""

from __future__ import annotations

import functools

import pytest
import torch
from safetensors import safe_open

from . import make, networks, settings


@functools.cache
def gold() -> dict[str, dict[str, torch.Tensor]]:
    """What is held of each case, by "network/setting"."""
    cases: dict[str, dict[str, torch.Tensor]] = {}
    with safe_open(make.PATH, "pt") as file:
        for key in file.keys():  # noqa: SIM118
            network, setting, name = key.split("/", 2)
            cases.setdefault(f"{network}/{setting}", {})[name] = file.get_tensor(key)
    return cases


def tolerance(network: str, name: str) -> float:
    """Gaps may be computed in another way than they were; power iteration goes another way."""
    if name.startswith(("objective", "diagnosis/gap")):
        return 1e-8
    if name in ("rates", "diagnosis/rate", "diagnosis/norm"):
        return 1e-8
    return 1e-10 if networks.NETWORKS[network].recurrent else 1e-12


def check(network, measured, expected):
    assert measured.keys() == expected.keys()
    for name, value in expected.items():
        close = tolerance(network, name)
        torch.testing.assert_close(
            measured[name],
            value,
            rtol=close,
            atol=close,
            equal_nan=True,
            msg=lambda m: f"{name}: {m}",  # noqa: B023
        )


@pytest.mark.parametrize("case", sorted(gold()))
def test_a_step_and_all_that_is_measured_are_as_they_were(case):
    network, setting = case.split("/")
    check(network, settings.measure(network, setting), gold()[case])


@pytest.mark.parametrize("setting", sorted(settings.LIFTED))
@pytest.mark.parametrize("network", sorted(set(networks.NETWORKS) - settings.JUMPING))
def test_a_lifted_module_has_the_gradient_of_a_step(network, setting):
    before = dict(networks.model(network).named_parameters())
    after = gold()[f"{network}/{setting}"]
    for name, gradient in settings.lifted_gradients(network, setting).items():
        close = tolerance(network, "after")
        expected = before[name].detach() - after[f"after/{name}"]
        torch.testing.assert_close(gradient, expected, rtol=close, atol=close)
