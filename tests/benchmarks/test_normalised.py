"""The study of norms: same starts, the pull against the rule, halving that resumes, the page."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import lpom
import normalised
from normalised import Run, interval, page, stored, tuned
from norms import Pull, network, of_transformers
from records import Store


@pytest.mark.parametrize("make", [nn.LayerNorm, nn.RMSNorm])
def test_the_pull_is_the_first_order_of_one_side_across_a_row(make: type[nn.Module]) -> None:
    torch.manual_seed(0)
    norm = make(8, 1e-5).double()
    z = torch.randn(5, 8, dtype=torch.float64)
    z = z - z.mean(-1, keepdim=True)
    g = torch.randn(5, 8, dtype=torch.float64)
    g = g - g.mean(-1, keepdim=True)
    g = g - z * (g * z).sum(-1, keepdim=True) / z.square().sum(-1, keepdim=True)

    def gradient(model: nn.Module) -> Tensor:
        x = z.clone().requires_grad_()
        return torch.autograd.grad(model(x), x, g)[0]

    delta, plain = 1e-4, gradient(norm)
    pull, side = gradient(Pull(norm, delta)), gradient(lpom.lift(norm, displacement=delta, sides=1))
    torch.testing.assert_close(pull - plain, side - plain, rtol=1e-2, atol=1e-7)
    torch.testing.assert_close(gradient(Pull(norm, 0.0)), plain)


def test_norms_written_by_hand_are_replaced_and_nothing_else_changes() -> None:
    pytest.importorskip("transformers")
    torch.manual_seed(0)
    model = network("llama 2x64", 0.02)
    assert sum(isinstance(m, nn.RMSNorm) for m in model.modules()) == 5
    torch.manual_seed(0)
    X = torch.arange(12).view(2, 6)
    torch.testing.assert_close(model(X), of_transformers("llama", 2, 64, 0.02)(X))


def test_a_study_resumes_and_makes_its_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store(tmp_path / "normalised.jsonl")
    for side in ("plain", "one side"):
        winner = tuned(store, Run("resnet8", side, 6, batch=8), draws=3, rounds=1)
        for seed in (1, 2):
            stored(store, replace(winner, seed=seed))
    records = list(store)
    assert len(records) == 10 and len({r["id"] for r in records}) == 10
    assert all("test_loss" in r for r in records if r["stage"] == "seeds")
    assert not any("test_loss" in r for r in records if r["stage"] == "halving")
    with monkeypatch.context() as patch:  # nothing is trained twice
        patch.setattr(normalised, "train", None)
        tuned(store, Run("resnet8", "plain", 6, batch=8), draws=3, rounds=1)
    text = page(store)
    assert "open" in text and "resnet8" in text


def test_a_run_again_is_the_same_run() -> None:
    run = Run("resnet8", "one side", 3, batch=8)
    first, second = normalised.train(run), normalised.train(run)
    assert first["held_out_loss"] == second["held_out_loss"]


def test_an_interval_is_students() -> None:
    low, high = interval([1.0, 2.0, 3.0])
    assert low == pytest.approx(2 - 4.302653 / 3**0.5, rel=1e-5)
    assert high == pytest.approx(2 + 4.302653 / 3**0.5, rel=1e-5)
