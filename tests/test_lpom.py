"""What sets the method apart, shown on digits: jumps train, depth is safe, orders agree."""

from __future__ import annotations

import pytest
import torch
from sklearn.datasets import load_digits

import lpom
from lpom import LPOM, Adaptive, Continuation, ConvergenceWarning, Exact, Sweeps
from lpom.losses import Squared
from lpom.methods import Batch, Problem
from lpom.methods.backprop import Adam


@pytest.fixture(scope="module")
def digits():
    X, y = load_digits(return_X_y=True)
    X, y = torch.tensor(X / 16, dtype=torch.float32), torch.tensor(y)
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(1))
    X, y = X[order], y[order]
    return (X[:1400], y[:1400]), (X[1400:], y[1400:])


def accuracy(digits, sizes, activation, method, epochs=12, seed=0, **options):
    train, test = digits
    model = lpom.mlp([64, *sizes, 10], activation, seed=seed)
    lpom.fit(model, *train, method=method, epochs=epochs, seed=seed, batch_size=50, **options)
    return lpom.evaluate(model, *test)[1], model


@pytest.mark.parametrize("activation", ["step", "sign", "staircase"])
def test_networks_without_any_derivative_train_and_back_propagation_does_not(digits, activation):
    ours, model = accuracy(digits, (100, 50), activation, LPOM())
    assert ours > 0.9
    assert model[1].activation.jumps  # the network handed out has the true function
    with pytest.warns(ConvergenceWarning, match="only the last layer learns"):
        theirs, _ = accuracy(digits, (100, 50), activation, Adam())
    assert theirs < ours - 0.1


def test_the_lower_layers_of_a_step_network_move(digits):
    train, _ = digits
    model = lpom.mlp([64, 30, 20, 10], "step", seed=0)
    before = [p.detach().clone() for p in model.parameters()]
    lpom.fit(model, *train, epochs=1, seed=0)
    for old, new in zip(before, model.parameters(), strict=True):
        assert not torch.equal(old, new)


def test_jumps_train_by_ramps_that_shrink_as_well(digits):
    ramps, model = accuracy(digits, (100, 50), "step", LPOM(jumps="continuation"))
    assert ramps > 0.9
    assert model[1].activation.jumps


@pytest.mark.parametrize("progress, ridge", [(0.0, 0.2), (0.5, 1.0), (1.0, 5.0)])
def test_a_pair_of_ridges_grows_by_equal_factors_over_the_run(digits, progress, ridge):
    (X, y), _ = digits
    batch = Batch(X[:40], torch.nn.functional.one_hot(y[:40]).float())

    def stepped(ridge):
        model = lpom.mlp([64, 20, 10], seed=0)
        method = LPOM(weights=Exact(ridge=ridge))
        problem = Problem(model, Squared())
        state = method.init(problem)
        state.progress = progress
        method.step(problem, batch, state)
        return torch.nn.utils.parameters_to_vector(model.parameters())

    torch.testing.assert_close(stepped((0.2, 5.0)), stepped(ridge))
    assert not torch.allclose(stepped((0.2, 5.0)), stepped(2 * ridge), rtol=0.0, atol=1e-6)


@pytest.mark.parametrize(
    "pair, said", [((1.0,), "a pair"), ((0.0, 1.0), "first"), ((1.0, -1), "last")]
)
def test_a_pair_that_is_none_is_refused(pair, said):
    with pytest.raises(ValueError, match=f"ridge.*{said}"):
        Exact(ridge=pair)


def test_settings_are_checked_when_they_are_written_down():
    with pytest.raises(ValueError, match="width's last number"):
        Continuation(1.0, 0.0)
    with pytest.raises(ValueError, match="order.*top-down"):
        Sweeps("topdown")
    with pytest.raises(ValueError, match="rule"):
        Sweeps(rule="sfae")
    with pytest.raises(ValueError, match="jumps should be StraightThrough or Continuation.*got 3"):
        LPOM(jumps=3)


def test_top_down_falls_to_chance_with_the_plain_iteration_and_not_with_the_safe_step(digits):
    """A deep tanh network lies past the bound of Theorem 2 from the start."""

    def score(rule):
        method = LPOM(mu=0.3, states=Sweeps("top-down", max_sweeps=3, rule=rule))
        return accuracy(digits, (32,) * 8, "tanh", method, epochs=6)[0]

    with pytest.warns(ConvergenceWarning, match="diverge"):
        plain = score("plain")
    safe = score("safe")
    assert plain < 0.3
    assert safe > 0.85


@pytest.mark.parametrize("order", ["interleaved", "top-down", "paper", "parallel"])
def test_every_order_learns(digits, order):
    sweeps = 1 if order == "interleaved" else 3
    score, _ = accuracy(
        digits, (60, 30), "relu", LPOM(states=Sweeps(order, max_sweeps=sweeps)), epochs=8
    )
    assert score > 0.9


@pytest.mark.parametrize("activation", lpom.activations.names())
def test_every_activation_trains(digits, activation):
    score, _ = accuracy(digits, (60,), activation, LPOM(), epochs=8)
    assert score > 0.85


@pytest.mark.parametrize(
    ("loss", "output"),
    [
        ("squared", "identity"),
        ("squared", "leaky_relu"),
        ("cross-entropy", "identity"),
        ("binary-cross-entropy", "identity"),
        ("hinge", "identity"),
        ("huber", "identity"),
    ],
)
def test_every_loss_trains(digits, loss, output):
    train, test = digits
    model = lpom.mlp([64, 60, 10], output=output, seed=0)
    lpom.fit(model, *train, loss=loss, epochs=12, seed=0, batch_size=50)
    assert lpom.evaluate(model, *test, loss=loss)[1] > 0.9


def test_exact_weights_train_a_deep_network(digits):
    score, model = accuracy(digits, (60, 40, 30, 20), "relu", LPOM(weights="exact"), epochs=6)
    assert score > 0.9
    assert all(bool(torch.isfinite(p).all()) for p in model.parameters())


def test_sweeping_stops_when_states_settle(digits):
    """With a tolerance, many allowed sweeps end where few do, and the states are settled."""
    train, _ = digits
    model = lpom.mlp([64, 30, 20, 10], "tanh", seed=0)
    settled = LPOM(states=Sweeps("top-down", max_sweeps=500, tolerance=1e-4))
    residuals = [
        layer.state_residual for layer in lpom.diagnose(model, *train, method=settled).layers
    ]
    once = LPOM(states=Sweeps("top-down"))
    rough = [layer.state_residual for layer in lpom.diagnose(model, *train, method=once).layers]
    assert max(residuals) < 2e-4
    assert max(rough) > 10 * max(residuals)


def test_mu_per_layer_and_for_the_output(digits):
    (X, y), _ = digits
    runs = []
    for mu in ([20.0, 20.0, 5.0], {"output": 5.0, "*": 20.0}, 20.0):
        model = lpom.mlp([64, 30, 20, 10], seed=0, output="tanh")
        lpom.fit(model, X, y, method=LPOM(mu=mu), epochs=1, seed=0)
        runs.append(model[0].weight.detach())
    assert torch.equal(runs[0], runs[1]) and not torch.equal(runs[0], runs[2])


def test_frozen_parameters_stay(digits):
    train, _ = digits
    for method in (LPOM(), LPOM(weights="exact")):
        model = lpom.mlp([64, 30, 10], seed=0)
        model[0].requires_grad_(False)
        frozen, free = model[0].weight.clone(), model[2].weight.detach().clone()
        lpom.fit(model, *train, method=method, epochs=1, seed=0)
        assert torch.equal(model[0].weight, frozen)
        assert not torch.equal(model[2].weight, free)


def test_any_torch_optimiser_serves(digits):
    method = LPOM(weights=Adaptive(lambda p: torch.optim.AdamW(p, lr=2e-3, weight_decay=0.01)))
    score, _ = accuracy(digits, (60,), "relu", method, epochs=8)
    assert score > 0.9


def test_torch_s_schedulers_take_a_step_after_every_epoch(digits):
    def halved(optimizer):
        return torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)

    method = LPOM(weights=Adaptive("sgd", learning_rate=0.8, schedule=halved))
    model = lpom.mlp([64, 10], seed=0)
    result = lpom.fit(model, *digits[0], method=method, epochs=3, seed=0)
    assert result.state.optimizer.param_groups[0]["lr"] == pytest.approx(0.1)


def test_lbfgs_is_refused_with_the_reason(digits):
    method = LPOM(weights=Adaptive(torch.optim.LBFGS))
    with pytest.raises(ValueError, match="evaluates the loss several times"):
        lpom.fit(lpom.mlp([64, 10], seed=0), *digits[0], method=method, epochs=1)


def test_muon_for_matrices_beside_adam_for_the_rest(digits, tmp_path):
    """One optimiser: it learns, is kept in a checkpoint, and its memory is carried on."""
    method = LPOM(weights=Adaptive("muon", learning_rate=0.01))
    score, model = accuracy(digits, (60,), "relu", method, epochs=6)
    assert score > 0.9
    (X, y), kept = digits[0], {"epochs": 2, "seed": 0, "endless": True, "batch_size": 1400}
    whole, halves = (lpom.mlp([64, 20, 10], seed=0) for _ in range(2))
    lpom.fit(whole, X, y, method=method, **kept | {"epochs": 4})
    first = lpom.fit(halves, X, y, method=method, checkpoint=tmp_path, **kept)
    lpom.fit(halves, X, y, method=method, state=first.state, **kept)
    for a, b in zip(whole.parameters(), halves.parameters(), strict=True):
        assert torch.equal(a, b)


def test_methods_are_their_settings():
    """Equal when these are; names stand for defaults; settings within are reached by name."""
    assert LPOM() == LPOM(states=Sweeps(), weights=Adaptive(), jumps="straight-through")
    assert LPOM() != LPOM(mu=5.0)
    assert LPOM(weights="exact") == LPOM(weights=Exact()) != LPOM()
    assert LPOM(weights={"exact": {"ridge": 1.0}}).weights.ridge == 1.0
    assert LPOM().with_params(mu=5.0, weights__learning_rate=0.1) == LPOM(
        mu=5.0, weights=Adaptive(learning_rate=0.1)
    )
    assert LPOM(weights="exact").with_params(weights__ridge=3.0).weights == Exact(ridge=3.0)
    both = {"weights__ridge": 3.0, "weights": "exact"}  # in either order
    assert LPOM().with_params(**both) == LPOM(weights=Exact(ridge=3.0))
    assert LPOM().get_params()["states__order"] == "interleaved"
    with pytest.raises(ValueError, match="LPOM has no setting 'weights__ridge'|no setting 'ridge'"):
        LPOM().with_params(weights__ridge=1.0)
    with pytest.raises(AttributeError):
        LPOM().mu = 3.0


@pytest.mark.parametrize("name", ["learning_rate", "optimizer", "schedule", "max_sweeps"])
def test_a_setting_of_a_part_is_pointed_to_where_it_is(name):
    part = "Sweeps" if name == "max_sweeps" else "Adaptive"
    with pytest.raises(TypeError, match=part):
        LPOM(**{name: 1})
    with pytest.raises(ValueError, match=part):
        lpom.methods.get("lpom", **{name: 1})


def test_exact_weights_have_no_learning_rate():
    with pytest.raises(ValueError, match="exact weights have no learning rate"):
        LPOM(weights="exact").with_learning_rate(0.1)
    assert LPOM().with_learning_rate(0.1).weights.learning_rate == 0.1


@pytest.mark.parametrize("weights", [Adaptive(learning_rate=0.02), Exact()], ids=repr)
@pytest.mark.parametrize("order", ["interleaved", "top-down", "paper", "parallel"])
def test_layers_that_share_a_weight_train_together(digits, order, weights):
    """In every order and with both weight steps: the loss falls, and the weight stays one."""
    (X, y), _ = digits
    torch.manual_seed(0)
    shared = torch.nn.Linear(64, 64)
    tied = torch.nn.Linear(64, 64)
    tied.weight = shared.weight
    model = torch.nn.Sequential(
        shared, torch.nn.Tanh(), tied, torch.nn.Tanh(), torch.nn.Linear(64, 10)
    )
    X, y = X[:500], y[:500]
    before, _ = lpom.evaluate(model, X, y)
    method = LPOM(mu=5.0, states=Sweeps(order, max_sweeps=2), weights=weights)
    lpom.fit(model, X, y, method=method, epochs=2, seed=0)
    assert tied.weight is shared.weight
    assert lpom.evaluate(model, X, y)[0] < 0.8 * before


@pytest.mark.parametrize("order", ["interleaved", "top-down", "paper", "parallel"])
def test_no_activation_is_evaluated_under_autograd(digits, order, monkeypatch):
    """Every call during a fit is watched: no gradients, and no graph comes in or goes out."""
    from lpom.activations import ReLU, Tanh

    watched = []

    def seen(whole):
        def phi(self, z, *args, **kwargs):
            x = whole(self, z, *args, **kwargs)
            watched.append((torch.is_grad_enabled(), z.requires_grad, x.requires_grad))
            return x

        return phi

    for kind in (ReLU, Tanh):
        for name in ("phi", "response"):
            monkeypatch.setattr(kind, name, seen(getattr(kind, name)))
    model = torch.nn.Sequential(
        torch.nn.Unflatten(1, (1, 8, 8)),
        torch.nn.Conv2d(1, 4, 3),
        torch.nn.ReLU(),
        torch.nn.Flatten(),
        torch.nn.Linear(144, 20),
        torch.nn.Tanh(),
        torch.nn.Linear(20, 10),
    )
    (X, y), _ = digits
    lpom.fit(model, X[:200], y[:200], method=LPOM(states=Sweeps(order, max_sweeps=2)), epochs=1)
    lpom.fit(model, X[:200], y[:200], method=LPOM(), epochs=1)
    assert watched and set(watched) == {(False, False, False)}


def test_the_paper_s_algorithm_is_one_line():
    method = LPOM.paper()
    assert (method.states.order, method.states.max_sweeps, method.states.rule) == (
        "paper",
        5,
        "plain",
    )
    assert method.mu == 20 and method.weights == lpom.Exact(iterations=1, ridge=0.0, rtol=0.03)
    generator = torch.Generator().manual_seed(0)
    X = torch.randn(60, 12, generator=generator)
    y = (X[:, :3].argmax(1)).numpy()
    model = lpom.mlp([12, 10, 3], "relu", "relu", seed=0)
    before = lpom.evaluate(model, X, y, loss="squared")[0]
    lpom.fit(model, X, y, method=method, loss="squared", epochs=3, batch_size=20, seed=0)
    assert lpom.evaluate(model, X, y, loss="squared")[0] < before
