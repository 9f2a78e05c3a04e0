"""Calls of fit() that look right: taken as they are meant, or refused with what to do."""

from __future__ import annotations

import copy
import math

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lpom

X = torch.randn(201, 6, generator=torch.Generator().manual_seed(0))
Y = torch.randint(3, (201,), generator=torch.Generator().manual_seed(1))


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 3))


def test_a_last_row_by_itself_is_no_batch_for_batch_norm():
    assert lpom.fit(net(), X, Y, epochs=1, seed=0).status == "finished"
    with pytest.raises(ValueError, match="single row.*Take another batch_size"):
        lpom.fit(net(), X, Y, epochs=1, batch_size=50, seed=0)
    loader = DataLoader(TensorDataset(X, Y), batch_size=50)
    with pytest.raises(ValueError, match="drop_last=True"):
        lpom.fit(net(), loader, epochs=1, seed=0)


@pytest.mark.parametrize("given", ["a data set", "a list of batches", "a generator"])
def test_batches_come_from_a_loader(given):
    rows = TensorDataset(X, Y)
    batches = {
        "a data set": rows,
        "a list of batches": list(DataLoader(rows, batch_size=50)),
        "a generator": (batch for batch in DataLoader(rows, batch_size=50)),
    }[given]
    with pytest.raises(TypeError, match="lpom.fit\\(model, DataLoader"):
        lpom.fit(net(), batches, epochs=1)


def test_hooks_on_gradients_are_not_passed_over():
    model = net()
    model[0].weight.register_hook(lambda gradient: 0 * gradient)
    with pytest.raises(lpom.UntrainableError, match="0.weight has a hook"):
        lpom.fit(model, X, Y, epochs=1, method=lpom.LPOM(mu=20.0))
    stack = lpom.mlp([6, 5, 3], seed=0)
    stack[0].weight.register_hook(lambda gradient: 0 * gradient)
    for each in (model, stack):
        for method in ("adam", "lpom"):
            before = each[0].weight.clone()
            lpom.fit(each, X, Y, method=method, epochs=1, seed=0)
            assert torch.equal(each[0].weight, before)


@pytest.mark.parametrize("yes", [True, np.bool_(True), torch.tensor(True)])
@pytest.mark.parametrize("no", [1, "stop", np.bool_(False), torch.tensor([True, True])])
def test_what_stops_a_run(yes, no):
    stopped = lpom.fit(net(), X, Y, epochs=3, callbacks=lambda e: yes)
    assert stopped.status == "stopped" and len(stopped.history) == 1
    assert lpom.fit(net(), X, Y, epochs=2, callbacks=lambda e: no).status == ("finished")


def test_models_of_half_precision_have_a_history_too():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3)).bfloat16()
    (epoch,) = lpom.fit(model, X, Y, epochs=1, seed=0, diagnostics=True).history
    assert math.isfinite(epoch.objective) and len(epoch.rates) == 2


@pytest.mark.parametrize("wrap", [lpom.lift, nn.DataParallel])
def test_wrapped_models_train_as_what_is_inside(wrap):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3))
    same = copy.deepcopy(model)
    for one in (model, wrap(same)):
        lpom.fit(one, X, Y, epochs=1, seed=0)
    assert all(map(torch.equal, model.parameters(), same.parameters()))
