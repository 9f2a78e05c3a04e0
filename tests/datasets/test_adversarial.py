"""Rows moved to where the network errs: the direction, its length, and what the generator rules."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lpom
from lpom.datasets import adversarial_loader
from lpom.datasets.adversarial import worst_direction
from lpom.training.history import Epoch

N = 40
DRAW = torch.Generator().manual_seed(0)
X = torch.randn(N, 6, generator=DRAW, dtype=torch.float64)
Y = torch.randint(3, (N,), generator=DRAW)


def network(activation: str = "tanh") -> nn.Module:
    return lpom.mlp([6, 8, 3], activation=activation, seed=0, dtype=torch.float64)


def test_direction_is_that_of_each_rows_own_loss() -> None:
    model = network()
    found = worst_direction(model, X, Y, F.cross_entropy)
    for k in range(N):
        x = X[k : k + 1].clone().requires_grad_()
        F.cross_entropy(model(x), Y[k : k + 1]).backward()
        torch.testing.assert_close(found[k], (x.grad / x.grad.norm())[0])


def test_of_linear_networks_the_direction_is_known() -> None:
    """The loss w x - t squared grows along w, to the side on which the output is too large."""
    layer = nn.Linear(6, 1, bias=False, dtype=torch.float64)
    target = torch.zeros(N, 1, dtype=torch.float64)
    found = worst_direction(layer, X, target, F.mse_loss)
    w = layer.weight.detach()
    torch.testing.assert_close(found, torch.sign(X @ w.T) * w / w.norm())


def test_lifted_the_direction_is_the_pull_on_the_data() -> None:
    r"""One layer of phi under a sum: g = W^T mu (phi(z) - phi(z - v / mu)), by hand."""
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 1, bias=False)).double()
    lifted = lpom.lift(model, mu=0.7, reduction="sum")
    found = worst_direction(lifted, X, Y, lambda outputs, y: outputs.sum())
    first, last = model[0], model[2]
    with torch.no_grad():
        z, v = first(X), last.weight
        g = 0.7 * (torch.tanh(z) - torch.tanh(z - v / 0.7)) @ first.weight
    torch.testing.assert_close(found, F.normalize(g))
    plain = worst_direction(model, X, Y, lambda outputs, y: outputs.sum())
    assert (found - plain).norm(dim=1).max() > 0.1


def test_jumps_have_a_direction_where_they_are_lifted() -> None:
    model = nn.Sequential(*network("step"))
    torch.testing.assert_close(
        worst_direction(lpom.lift(model), X, Y, F.cross_entropy).norm(dim=1),
        torch.ones(N, dtype=torch.float64),
    )


@pytest.mark.parametrize("scale", [1e-300, 1.0, 1e150])
def test_directions_have_length_one_however_small_or_large_the_slope_is(scale: float) -> None:
    layer = nn.Linear(6, 1, dtype=torch.float64)
    found = worst_direction(layer, X, Y, lambda outputs, y: scale * outputs.sum())
    torch.testing.assert_close(found.norm(dim=1), torch.ones(N, dtype=torch.float64))


def test_a_row_on_which_the_loss_is_flat_stays_where_it_is() -> None:
    layer = nn.Linear(6, 1, dtype=torch.float64)
    found = worst_direction(layer, X, Y, lambda outputs, y: 0.0 * outputs.sum())
    assert bool((found == 0).all())


def moves(loader: torch.utils.data.DataLoader) -> tuple[Tensor, Tensor]:
    """Length of each row's move and by how much its own loss grew, in one epoch."""
    model, lengths, grown = loader.dataset.model, [], []
    for rows, numbers in loader:
        lengths.append((rows - X[numbers]).norm(dim=1))
        with torch.no_grad():
            before, after = (
                F.cross_entropy(model(x), Y[numbers], reduction="none") for x in (X[numbers], rows)
            )
        grown.append(after - before)
    return torch.cat(lengths), torch.cat(grown)


def by_number(outputs: Tensor, numbers: Tensor) -> Tensor:
    return F.cross_entropy(outputs, Y[numbers])


def test_rows_are_moved_by_a_share_of_the_size_and_their_loss_grows() -> None:
    loader = adversarial_loader(network(), X, torch.arange(N), 16, size=0.2, loss=by_number)
    found = [moves(loader) for _ in range(25)]
    lengths, grown = (torch.cat(parts) for parts in zip(*found, strict=True))
    assert float(lengths.max()) <= 0.2
    # uniform between zero and the size, whose mean has a standard error of size / sqrt(12 n)
    assert abs(float(lengths.mean()) - 0.1) < 5 * 0.2 / math.sqrt(12 * len(lengths))
    assert bool((grown > 0).all())


def test_the_generator_decides_order_and_lengths() -> None:
    def epoch(**given: int) -> Tensor:
        return torch.cat([rows for rows, _ in adversarial_loader(network(), X, Y, 16, **given)])

    assert torch.equal(epoch(size=0.1, seed=3), epoch(size=0.1, seed=3))
    assert not torch.equal(epoch(size=0.1, seed=3), epoch(size=0.1, seed=4))
    still = epoch(size=0)
    assert sorted(still.tolist()) == sorted(X.tolist())


def test_the_model_is_left_as_it_was() -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.5)).double()
    model[1].eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    modes = [module.training for module in model.modules()]
    worst_direction(model, X, Y, F.cross_entropy)
    assert modes == [module.training for module in model.modules()]
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_networks_that_learn_from_it_are_harder_to_fool() -> None:
    digits = lpom.datasets.load("digits")
    rows, labels = torch.from_numpy(digits.x_train) / 16, torch.from_numpy(digits.y_train)
    unseen = torch.from_numpy(digits.x_test) / 16, torch.from_numpy(digits.y_test)

    def right(size: float) -> float:
        model = lpom.mlp([64, 64, 10], seed=0)
        loader = adversarial_loader(lpom.lift(model), rows, labels, 100, size=size)
        lpom.fit(model, loader, epochs=40, seed=0, progress=False)
        away = worst_direction(model, *unseen, F.cross_entropy)
        return lpom.evaluate(model, unseen[0] + 0.5 * away, unseen[1])[1]

    assert right(1.0) > right(0.0) + 0.05


def test_a_run_that_was_cut_goes_on_with_the_same_rows(tmp_path: Path) -> None:
    def run(folder: str, cut: int | None = None) -> nn.Module:
        def told(epoch: Epoch) -> None:
            if epoch.epoch == cut:
                raise KeyboardInterrupt

        model = network()
        loader = adversarial_loader(lpom.lift(model), X, Y, 16, size=0.3)
        settings = {"epochs": 5, "seed": 0, "checkpoint": tmp_path / folder, "callbacks": told}
        lpom.fit(model, loader, progress=False, **settings)
        return model

    with pytest.warns(UserWarning, match="interrupted"):
        run("cut", 2)
    for a, b in zip(run("whole").parameters(), run("cut").parameters(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"X": X[:, 0]}, "rows X of floating-point numbers"),
        ({"X": Y[:, None]}, "torch.int64"),
        ({"y": Y[:5]}, "as many targets"),
        ({"size": -1.0}, "size"),
        ({"batch_size": 0}, "batch_size"),
        ({"precision": "fp8"}, "precision"),
    ],
)
def test_what_can_not_be_is_said(given: dict, said: str) -> None:
    settings = {"X": X, "y": Y, "batch_size": 8, "size": 0.1} | given
    with pytest.raises(ValueError, match=said):
        adversarial_loader(network(), **settings)
