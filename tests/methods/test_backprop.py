"""Back-propagation: step by step what a plain torch loop does, and honest about jumps."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.nn import functional

import lpom
from lpom.methods import SGD, Adagrad, Adam, Nesterov, RMSprop

PLAIN = [
    (SGD, lambda p: torch.optim.SGD(p, lr=0.1)),
    (Nesterov, lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True)),
    (Adagrad, lambda p: torch.optim.Adagrad(p, lr=0.1)),
    (RMSprop, lambda p: torch.optim.RMSprop(p, lr=0.1)),
    (Adam, lambda p: torch.optim.Adam(p, lr=0.1)),
]
TORCH_LOSS = {
    "squared": lambda x, t: ((x - functional.one_hot(t, 3)) ** 2).sum(1) / 2,
    "cross-entropy": lambda x, t: functional.cross_entropy(x, t, reduction="none"),
    "binary-cross-entropy": lambda x, t: functional.binary_cross_entropy_with_logits(
        x, functional.one_hot(t, 3).double(), reduction="none"
    ).sum(1),
}


@pytest.fixture
def data():
    generator = torch.Generator().manual_seed(0)
    X = torch.randn(40, 5, generator=generator, dtype=torch.float64)
    return X, torch.randint(0, 3, (40,), generator=generator)


def weights_after_each_step(model, X, y, method, **options):
    """Full-batch epochs are single steps: a callback sees every one of them."""
    seen = []
    lpom.fit(
        model,
        X,
        y,
        method=method,
        batch_size=len(X),
        progress=False,
        callbacks=[lambda epoch: seen.append([p.detach().clone() for p in model.parameters()])],
        **options,
    )
    return seen


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("loss", TORCH_LOSS)
@pytest.mark.parametrize("made, plain", PLAIN, ids=lambda m: getattr(m, "name", ""))
@pytest.mark.filterwarnings("ignore:the network ends with a loss")
def test_each_step_is_that_of_a_plain_torch_loop(made, plain, loss, weighted, data):
    X, y = data
    weight = torch.linspace(0, 3, len(X), dtype=X.dtype) if weighted else None
    model = lpom.mlp([5, 7, 6, 3], "tanh", "leaky_relu", seed=1, dtype=X.dtype)
    twin = copy.deepcopy(model)
    seen = weights_after_each_step(
        model,
        X,
        y,
        made(learning_rate=0.1, schedule="constant"),
        loss=loss,
        epochs=4,
        sample_weight=weight,
    )

    optimizer = plain(twin.parameters())
    mass = torch.ones(len(X), dtype=X.dtype) if weight is None else weight
    for step in seen:
        optimizer.zero_grad()
        ((TORCH_LOSS[loss](twin(X), y) * mass).sum() / mass.sum()).backward()
        optimizer.step()
        for ours, theirs in zip(step, twin.parameters(), strict=True):
            torch.testing.assert_close(ours, theirs.detach(), rtol=1e-9, atol=1e-12)


def test_the_linear_schedule_scales_each_step(data):
    X, y = data
    model = lpom.mlp([5, 4, 3], "relu", seed=1, dtype=X.dtype)
    twin = copy.deepcopy(model)
    method = SGD(learning_rate=0.5)
    seen = weights_after_each_step(model, X, y, method, loss="cross-entropy", epochs=4)
    for k, step in enumerate(seen):
        functional.cross_entropy(twin(X), y).backward()
        with torch.no_grad():
            for parameter, expected in zip(twin.parameters(), step, strict=True):
                parameter -= 0.5 * (1 - k / 4) * parameter.grad
                parameter.grad = None
                torch.testing.assert_close(parameter.detach(), expected)


def test_objective_is_the_weighted_loss_alone(data):
    X, y = data
    weight = torch.arange(40.0, dtype=X.dtype)
    model = lpom.mlp([5, 4, 3], seed=1, dtype=X.dtype)
    result = lpom.fit(
        model, X, y, method="adam", epochs=1, batch_size=40, sample_weight=weight, progress=False
    )
    with torch.no_grad():
        loss = TORCH_LOSS["cross-entropy"](model(X), y) @ weight / weight.sum()
    assert result.history[-1].objective == pytest.approx(float(loss), rel=1e-12)
    assert result.history[-1].gaps == ()


def test_frozen_layers_stay(data):
    X, y = data
    model = lpom.mlp([5, 4, 3], seed=1, dtype=X.dtype)
    model[0].requires_grad_(False)
    before = copy.deepcopy(model)
    lpom.fit(model, X, y, method="adam", epochs=2, seed=0, progress=False)
    assert torch.equal(model[0].weight, before[0].weight)
    assert not torch.equal(model[2].weight, before[2].weight)


def test_warm_start_goes_on_where_it_was(data):
    X, y = data
    model = lpom.mlp([5, 4, 3], seed=1, dtype=X.dtype)
    twin = copy.deepcopy(model)
    options = {"method": "adam", "batch_size": 40, "progress": False, "endless": True}
    lpom.fit(model, X, y, epochs=6, **options)
    first = lpom.fit(twin, X, y, epochs=3, **options)
    lpom.fit(twin, X, y, epochs=3, state=first.state, **options)
    for a, b in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-9)  # rows are summed in another order


@pytest.mark.parametrize("activation", ["step", "sign", "staircase"])
def test_behind_a_jump_only_the_last_layer_learns_and_it_says_so(activation, data):
    X, y = data
    model = lpom.mlp([5, 6, 4, 3], activation, seed=1, dtype=X.dtype)
    before = copy.deepcopy(model)
    with pytest.warns(lpom.ConvergenceWarning, match=activation):
        lpom.fit(model, X, y, method="adam", epochs=3, seed=0, progress=False)
    for i in (0, 2):
        assert torch.equal(model[i].weight, before[i].weight)
    assert not torch.equal(model[4].weight, before[4].weight)


@pytest.mark.parametrize(
    "activation, output, what",
    [("step", "sign", "no layer"), ("sign", "identity", "last layer")],
)
def test_which_layers_learn_depends_on_the_last_jump(activation, output, what, data):
    X, y = data
    model = lpom.mlp([5, 4, 3], activation, output, seed=1, dtype=X.dtype)
    with pytest.warns(lpom.ConvergenceWarning) as caught:
        lpom.fit(model, X, y, method="sgd", epochs=1, progress=False)
    assert any(what in str(warning.message) for warning in caught)


def test_a_jump_further_down_names_the_layers_that_learn(data):
    X, y = data
    model = torch.nn.Sequential(
        *lpom.mlp([5, 4, 4], "step", "step", seed=1, dtype=X.dtype),
        *lpom.mlp([4, 4, 3], "relu", seed=2, dtype=X.dtype),
    )
    with pytest.warns(lpom.ConvergenceWarning, match="2 layers"):
        lpom.fit(model, X, y, method="sgd", epochs=1, progress=False)


def test_bad_hyperparameters_are_named(data):
    X, y = data
    model = lpom.mlp([5, 4, 3], dtype=X.dtype)
    with pytest.raises(ValueError, match="learning_rate"):
        lpom.fit(model, X, y, method=SGD(learning_rate=-1.0))
    with pytest.raises(ValueError, match="schedule.*linear"):
        lpom.fit(model, X, y, method=SGD(schedule="liner"))
