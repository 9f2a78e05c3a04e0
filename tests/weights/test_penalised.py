"""Penalties at work: steps of optimisers, exact steps, targets, optimality conditions."""

from __future__ import annotations

import copy
import math
from dataclasses import replace

import pytest
import torch
from sklearn.linear_model import Lasso
from torch import nn

import lpom
from lpom import LPOM, Adaptive, Exact
from lpom.graph import trace
from lpom.methods import Batch, Problem
from lpom.methods.discrete import StraightThrough
from lpom.methods.optimizers import advance
from lpom.objectives import adjoint, evaluate, kkt_residuals, per_node
from lpom.penalties import L1, Binary, Box, GroupL1, Levels, NuclearNorm, Ternary
from lpom.states import States
from lpom.weights.blocks import blocks
from lpom.weights.exact import next_theta, penalised_step
from lpom.weights.gram import Columns, IndependentRows, Rows, gram
from lpom.weights.penalised import Penalised

SQUARED = lpom.losses.get("squared")


def numbers(n=60, n_in=8, n_out=2, seed=0):
    generator = torch.Generator().manual_seed(seed)
    X = torch.randn(n, n_in, generator=generator, dtype=torch.float64)
    W = torch.randn(n_out, n_in, generator=generator, dtype=torch.float64)
    W[:, ::2] = 0
    noise = torch.randn(n, n_out, generator=generator, dtype=torch.float64)
    return X, X @ W.T + 0.7 + 0.3 * noise


def steps(model, X, target, method, count, weight=None):
    """That many steps on all rows; the state."""
    problem = Problem(model, SQUARED)
    state = method.init(problem)
    for k in range(count):
        advance(state, k / count)
        method.step(problem, Batch(X, target, weight), state)
    return state


# the step of an optimiser


def test_after_adam_every_weight_is_thresholded_by_its_own_step():
    X, target = numbers()
    model = lpom.mlp([8, 5, 2], "tanh", seed=0, dtype=X.dtype)
    plain, s, rate = copy.deepcopy(model), 0.5, 0.01
    weights = Adaptive(learning_rate=rate, schedule="constant")
    steps(plain, X, target, LPOM(weights=weights), 1)
    steps(model, X, target, LPOM(weights=weights, penalties={"0.weight": L1(s)}), 1)
    # in Adam's first step v-hat is the squared gradient, and the step its sign
    start = lpom.mlp([8, 5, 2], "tanh", seed=0, dtype=X.dtype)
    state = steps(start, X, target, LPOM(weights=weights), 1)
    v = state.optimizer.state[start[0].weight]["exp_avg_sq"] / (1 - 0.999)
    threshold = s * rate / (v.sqrt() + 1e-8)
    W = plain[0].weight.detach()
    expected = W.sign() * (W.abs() - threshold).clamp(min=0)
    torch.testing.assert_close(model[0].weight.detach(), expected, rtol=1e-10, atol=1e-12)
    assert 0 < int((expected == 0).sum()) < expected.numel()
    for name in ("0.bias", "2.weight", "2.bias"):
        torch.testing.assert_close(model.state_dict()[name], plain.state_dict()[name])


@pytest.mark.parametrize(
    "optimizer, size",
    [
        (lambda p: torch.optim.SGD(p, lr=0.1), lambda g: 0.1),
        (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.75), lambda g: 0.4),
        (lambda p: torch.optim.RMSprop(p, lr=0.1, alpha=0.75), lambda g: 0.1 / (0.5 * g + 1e-8)),
        (lambda p: torch.optim.Adagrad(p, lr=0.1), lambda g: 0.1 / (g + 1e-10)),
        (lambda p: torch.optim.AdamW(p, lr=0.1), lambda g: 0.1 / (g + 1e-8)),
    ],
)
def test_the_metric_of_each_optimiser(optimizer, size):
    X, target = numbers()
    model = nn.Sequential(nn.Linear(8, 2, dtype=X.dtype))
    by = Penalised(L1(0.01), trace(model).parameter_names)
    made = optimizer(model.parameters())
    plain = copy.deepcopy(model)
    alone = optimizer(plain.parameters())
    for each in (model, plain):
        SQUARED.value(each(X), target).mean().backward()
    alone.step()
    moved, g = plain[0].weight.detach(), plain[0].weight.grad.abs()
    by.step(made)
    torch.testing.assert_close(model[0].weight.detach(), L1().prox(moved, 0.01 * size(g)))


@pytest.mark.parametrize("penalty", [L1(0.05), GroupL1(0.02), NuclearNorm(0.05)], ids=repr)
def test_a_proximal_gradient_step_never_raises_the_objective(penalty):
    X0, target = numbers()
    model = lpom.mlp([8, 6, 2], "tanh", seed=0, dtype=X0.dtype)
    graph = trace(model)
    mu, by = per_node(2.0, graph), Penalised(penalty, graph.parameter_names)
    _, X = graph.feed_forward(X0)
    X = [X[0], 0.9 * X[1], 0.5 * X[2] + 0.5 * target]  # some states that are not feed-forward

    def F():
        return evaluate(graph, SQUARED, X, target, mu, penalty=by.value()).total

    for _ in range(10):
        for node in graph:
            before = F()
            W = node.edge.parameters[0]
            with torch.no_grad():
                Z = node.edge([X[s] for s in node.sources])
            residual = node.activation.phi(Z) - X[node.index]
            gradient = mu[node.index] * adjoint(node, X, residual, "weights")[0] / len(X0)
            A = torch.cat([X[node.index - 1], torch.ones(len(X0), 1)], 1)
            step = len(X0) / (mu[node.index] * float(torch.linalg.matrix_norm(A, 2)) ** 2)
            with torch.no_grad():
                W.copy_(by.prox(W, W - step * gradient, step))
            assert F() <= before + 1e-12 * abs(before)
            assert F() < before or torch.equal(W, by.prox(W, W - step * gradient, step))


# exact steps


@pytest.mark.parametrize("tall", [True, False])
def test_every_form_inverts_with_the_factor_it_has(tall):
    A = numbers(*((20, 6) if tall else (6, 20)))[0]
    B = numbers(A.shape[1], 3, seed=1)[0]
    for ridge, kind in ((0.3, Columns if tall else Rows), (0.0, Columns if tall else None)):
        form = gram(A, ridge)
        assert isinstance(form, kind or IndependentRows)
        matrix = A.T @ A + form.ridge * torch.eye(A.shape[1], dtype=A.dtype)
        torch.testing.assert_close(form.invert(B), torch.linalg.pinv(matrix, rtol=1e-10) @ B)


@pytest.mark.parametrize("method", ["exact", "adaptive"])
def test_one_layer_with_l1_is_the_lasso(method):
    X, target = numbers()
    expected = Lasso(alpha=0.2, tol=1e-12, max_iter=100000).fit(X.numpy(), target.numpy())
    model = nn.Sequential(nn.Linear(8, 2, dtype=X.dtype))
    if method == "exact":
        by, count = LPOM(mu=1.0, weights=Exact(iterations=5, ridge=0.1), penalties=L1(0.2)), 100
    else:
        weights = Adaptive("sgd", learning_rate=0.2, schedule="constant")
        by, count = LPOM(mu=1.0, weights=weights, penalties=L1(0.2)), 500
    steps(model, X, target, by, count)
    W, b = model[0].weight.detach(), model[0].bias.detach()
    torch.testing.assert_close(W, torch.from_numpy(expected.coef_), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(b, torch.from_numpy(expected.intercept_), rtol=1e-6, atol=1e-6)
    assert torch.equal(W == 0, torch.from_numpy(expected.coef_ == 0))
    assert 0 < int((W == 0).sum()) < W.numel()


def test_the_conditions_of_optimality_hold_where_f_is_least():
    """F of one layer, its state eliminated, is mu / (1 + mu) times the squared loss, plus h."""
    X, target = numbers()
    mu, s = 3.0, 0.15
    best = Lasso(alpha=s * (1 + mu) / mu, tol=1e-14, max_iter=100000)
    best.fit(X.numpy(), target.numpy())
    model = nn.Sequential(nn.Linear(8, 2, dtype=X.dtype))
    model[0].weight.data = torch.from_numpy(best.coef_).clone()
    model[0].bias.data = torch.from_numpy(best.intercept_).clone()
    graph = trace(model)
    by = Penalised(L1(s), graph.parameter_names)

    def residuals():
        Z = model(X).detach()
        state = (target + mu * Z) / (1 + mu)
        found = kkt_residuals(graph, SQUARED, [X, state], target, per_node(mu, graph), prox=by.prox)
        return max(found[0]), found[1]

    states, weights = residuals()
    assert states < 1e-9 and max(weights) < 1e-9
    with torch.no_grad():
        model[0].weight[0, 0] += 0.01
    assert residuals()[1][0] > 1e-4


@pytest.mark.parametrize("conv", [False, True])
@pytest.mark.parametrize("penalty", [L1(0.05), GroupL1(0.02), NuclearNorm(0.05), Box(-0.2, 0.2)])
def test_an_exact_step_solved_through_minimises_the_block(penalty, conv):
    """Many iterations end where a proximal step, which knows no splitting, stands still."""
    generator = torch.Generator().manual_seed(0)
    X = torch.randn(30, 2, 4, 4, generator=generator, dtype=torch.float64)
    layers = [nn.Conv2d(2, 3, 3)] if conv else [nn.Flatten(), nn.Linear(32, 3)]
    torch.manual_seed(0)
    model = nn.Sequential(*layers, nn.Tanh()).double()
    X = X if conv else X.flatten(1)
    if not conv:
        model = model[1:]
    graph = trace(model, X)
    goal = torch.rand(model(X).shape, generator=generator, dtype=X.dtype) - 0.5
    (block,), by = blocks(graph), Penalised(penalty, graph.parameter_names)
    for _ in range(20):
        states = States(graph, X, goal, SQUARED, [1.0, 1.0])
        states.X[1] = goal
        use = states.use(graph[1], None, 1.0, fresh=False)
        weight = float(len(X))
        penalised_step(block, [use], by, weight=weight, iterations=10, ridge=0.1, inner=20)
    residual = graph[1].activation.phi(graph.feed_forward(X)[0][1]) - goal
    for parameter, gradient in zip(
        graph[1].edge.parameters, adjoint(graph[1], [X, goal], residual, "weights"), strict=True
    ):
        W = parameter.detach()
        moved = by.prox(parameter, W - gradient / len(X), 1.0)
        torch.testing.assert_close(moved, W, rtol=0, atol=1e-5)


@pytest.mark.parametrize("activation", ["relu", "tanh", "sigmoid"])
@pytest.mark.parametrize("penalty", [L1(0.02), GroupL1(0.01)], ids=repr)
def test_theorem_4_with_a_penalty(penalty, activation):
    """The bound of Theorem 4 and its recursion, F with h, in the metric of the states."""
    X, _ = numbers(25, 6)
    model = lpom.mlp([6, 3], activation, activation, seed=3, dtype=X.dtype)
    graph = trace(model)
    node, (block,) = graph[1], blocks(graph)
    gamma, K, ridge = node.activation.lipschitz, 10, 0.1
    generator = torch.Generator().manual_seed(1)
    goal = node.activation.phi(torch.randn(25, 3, generator=generator, dtype=X.dtype))
    start = copy.deepcopy(model.state_dict())
    by = Penalised(penalty, graph.parameter_names)
    A = torch.cat([X, torch.ones(25, 1, dtype=X.dtype)], 1)
    metric = A.T @ A + ridge * A.square().sum() / 7 * torch.eye(7, dtype=X.dtype)

    def after(iterations):
        """The matrix and F after so many iterations from the start."""
        model.load_state_dict(start)
        if iterations:
            states = States(graph, X, goal, SQUARED, [1.0, 1.0])
            states.X[1] = goal
            use = states.use(node, None, 1.0, fresh=False)
            options = {"iterations": iterations, "ridge": ridge, "inner": 100}
            penalised_step(block, [use], by, weight=float(len(X)), **options)
        Z = graph.feed_forward(X)[0][1]
        F = float((node.activation.primitive(Z) - goal * Z).sum()) + len(X) * by.value()
        W = torch.cat([model[0].weight, model[0].bias[:, None]], 1).detach()
        return W.clone(), F

    best, lowest = after(80)
    theta = [0.0]
    for _ in range(K):
        theta.append(next_theta(theta[-1]))
    x = [after(0)] + [after(k) for k in range(K + 1)]  # x_0 = x_1

    def energy(k):
        v = theta[k - 1] * x[k - 1][0] - x[k][0] + (1 - theta[k - 1]) * best
        return x[k][1] - lowest + gamma / 2 * float(((v @ metric) * v).sum())

    rounding = 1e-6 * (1 + energy(1))
    for k in range(1, K + 2):
        assert energy(k) <= 4 / k**2 * energy(1) + rounding
        if k <= K:
            assert energy(k + 1) <= theta[k] * energy(k) + rounding


# over a run


@pytest.mark.parametrize("weights", ["adaptive", "exact"])
@pytest.mark.parametrize(
    "penalty, count, expected",
    [
        (L1(keep=0.2), lambda W: torch.count_nonzero(W), 16),
        (GroupL1(keep=0.4), lambda W: torch.count_nonzero(W.abs().sum(1)), 4),
        (NuclearNorm(keep=0.25, every=2), lambda W: torch.linalg.matrix_rank(W), 2),
        (NuclearNorm(keep=0.25, every=7), lambda W: torch.linalg.matrix_rank(W), 2),
        (L1(keep=0.2, lazy=True), lambda W: torch.count_nonzero(W), 16),
        (GroupL1(keep=0.4, lazy=True), lambda W: torch.count_nonzero(W.abs().sum(1)), 4),
    ],
    ids=["weights", "units", "rank", "rank, between two looks", "lazy weights", "lazy units"],
)
def test_a_target_is_reached_by_the_end(penalty, count, expected, weights):
    if penalty.lazy and weights == "exact":
        pytest.skip("exact weights have no optimiser")
    X, target = numbers()
    model = lpom.mlp([8, 10, 2], "tanh", seed=0, dtype=X.dtype)
    chosen = Adaptive(learning_rate=0.02) if weights == "adaptive" else Exact()
    method = LPOM(weights=chosen, penalties={"0.weight": penalty})
    before = float(SQUARED.value(model(X).detach(), target).mean())
    steps(model, X, target, method, 300)
    assert int(count(model[0].weight.detach())) == expected
    assert float(SQUARED.value(model(X).detach(), target).mean()) < 0.5 * before


@pytest.mark.parametrize("penalty", [L1(keep=0.2), NuclearNorm(keep=0.2)], ids=repr)
def test_a_target_empties_no_weight(penalty):
    """A layer whose weights are small beside the others' would cut the network in two."""
    X, target = numbers()
    model = lpom.mlp([8, 10, 10, 2], "tanh", seed=0, dtype=X.dtype)
    model[4].weight.data *= 1e-3
    steps(model, X, target, LPOM(weights=Adaptive(learning_rate=1e-6), penalties=penalty), 20)
    assert [bool(model[k].weight.any()) for k in (0, 2, 4)] == [True] * 3


@pytest.mark.parametrize("penalty", [Binary(), Ternary(), Levels(bits=3)], ids=repr)
@pytest.mark.parametrize("weights", ["adaptive", "exact"])
def test_a_run_ends_on_the_levels(penalty, weights):
    X, target = numbers()
    model = lpom.mlp([8, 10, 2], "tanh", seed=0, dtype=X.dtype)
    state = steps(model, X, target, LPOM(weights=weights, penalties=penalty), 100)
    for layer in (model[0], model[2]):
        W = layer.weight.detach()
        torch.testing.assert_close(W, penalty.nearest(W), rtol=1e-12, atol=1e-12)
    assert state.penalised.value() == 0


@pytest.mark.parametrize("bound", [None, 0.3])
@pytest.mark.parametrize("method", [LPOM(mu=1e8), StraightThrough(learning_rate=2e-3)], ids=repr)
def test_lazy_levels_are_binaryconnect(method, bound):
    """As Courbariaux et al. (2015) have it: gradients at Q(V) move V, by autograd and Adam."""
    X, target = numbers()
    penalty = Binary(lazy=True, bound=bound)
    model = lpom.mlp([8, 6, 2], "tanh", seed=0, dtype=X.dtype)
    V = copy.deepcopy(model)
    steps(model, X, target, replace(method, penalties=penalty), 30)

    optimizer = torch.optim.Adam(V.parameters())
    shown = copy.deepcopy(V)  # weights are not on the levels before the first step
    for k in range(30):
        optimizer.param_groups[0]["lr"] = 2e-3 * (1 - k / 30)
        SQUARED.value(shown(X), target).mean().backward()
        for real, seen in zip(V.parameters(), shown.parameters(), strict=True):
            real.grad, seen.grad = seen.grad, None
        optimizer.step()
        for layer in (V[0], V[2]):
            if bound is not None:
                layer.weight.data.clamp_(-bound, bound)
        shown.load_state_dict(V.state_dict())
        for layer in (shown[0], shown[2]):
            layer.weight.data = penalty.nearest(layer.weight.data)
    for found, wanted in zip(model.parameters(), shown.parameters(), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)


def test_lazy_penalties_need_an_optimiser_and_a_target():
    with pytest.raises(ValueError, match="weights='adaptive', or lazy=False"):
        LPOM(weights="exact", penalties={"0.weight": Binary(lazy=True)})
    with pytest.raises(ValueError, match="keep=0.02"):
        L1(lazy=True)


def test_penalties_add_to_the_objective_of_a_sample():
    X, target = numbers()
    model = lpom.mlp([8, 5, 2], "tanh", seed=0, dtype=X.dtype)
    problem, weight = Problem(model, SQUARED), torch.linspace(0, 2, len(X), dtype=X.dtype)
    values = []
    for penalties in (None, {"0.*": L1(0.3), "*.weight": GroupL1((0.2, 0.4))}):
        method = LPOM(penalties=penalties)
        values.append(method.objective(problem, Batch(X, target, weight), method.init(problem)))
    weight_of = {name: p.detach() for name, p in model.named_parameters()}
    h = 0.3 * float(weight_of["0.weight"].abs().sum() + weight_of["0.bias"].abs().sum())
    h += 0.2 * math.sqrt(5) * float(weight_of["2.weight"].norm(dim=1).sum())
    assert values[1].total - values[0].total == pytest.approx(float(weight.sum()) * h)


def test_one_penalty_is_for_matrices_and_kernels_and_frozen_weights_have_none():
    model = lpom.mlp([8, 5, 2], "tanh", seed=0)
    model[2].weight.requires_grad_(False)
    by = Penalised(L1(), trace(model).parameter_names)
    assert [list(term.weights) for term in by.terms] == [["0.weight"]]


@pytest.mark.parametrize(
    "penalties, message",
    [
        ({"3.weight": L1()}, "no '3.weight' among 0.weight, 0.bias"),
        ({"*": GroupL1()}, "0.bias has one dimension"),
    ],
)
def test_what_fits_no_weight_is_refused(penalties, message):
    model = lpom.mlp([8, 5, 2], "tanh", seed=0)
    with pytest.raises(ValueError, match=message):
        Penalised(penalties, trace(model).parameter_names)


def test_exact_weights_with_a_penalty_need_a_ridge():
    X, target = numbers()
    model = lpom.mlp([8, 5, 2], "tanh", seed=0, dtype=X.dtype)
    with pytest.raises(ValueError, match="ridge above 0"):
        steps(model, X, target, LPOM(weights=Exact(ridge=0.0), penalties=L1()), 1)


@pytest.mark.parametrize("cut", [20, 90])
def test_a_run_goes_on_from_its_state(cut):
    X, target = numbers()
    penalties = {
        "0.weight": L1(keep=0.3),
        "2.weight": NuclearNorm(0.01, every=3),
        "4.weight": L1(keep=0.3, lazy=True),
        "6.weight": Ternary(lazy=True),
    }
    method = LPOM(penalties=penalties)
    sizes = [8, 6, 5, 4, 2]
    models = [lpom.mlp(sizes, "tanh", seed=0, dtype=X.dtype) for _ in range(2)]
    problems = [Problem(model, SQUARED) for model in models]
    batch, states = Batch(X, target), [method.init(problem) for problem in problems]
    for k in range(100):
        if k == cut:
            kept = copy.deepcopy(states[1].state_dict())
            states[1] = method.init(problems[1])
            states[1].load_state_dict(kept)
        for problem, state in zip(problems, states, strict=True):
            advance(state, k / 100)
            method.step(problem, batch, state)
    for a, b in zip(*(model.parameters() for model in models), strict=True):
        assert torch.equal(a, b)


def _levels(model) -> list[int]:
    """How many sizes the weights of each unit have, at most."""
    layers = [module for module in model.modules() if isinstance(module, nn.Linear)]
    sizes = [layer.weight.detach().abs() for layer in layers]
    return [max(len(row.unique()) for row in W) for W in sizes]


class TestWhatIsChosen:
    """Early stopping waits for the penalties, and the weights it chooses obey them."""

    X = torch.randn(120, 6, generator=torch.Generator().manual_seed(0))
    y = (X[:, 0] > 0).long()

    def fitted(self, penalty, **options):
        model = lpom.mlp([6, 8, 2], seed=0)
        method = LPOM(penalties=penalty)
        return model, lpom.fit(model, self.X, self.y, method=method, seed=0, **options)

    @pytest.mark.parametrize("penalty", [Binary(), L1(keep=0.25)])
    def test_the_best_epoch_is_one_that_obeys(self, penalty):
        stopping = lpom.EarlyStopping(patience=2, watch="loss")
        held_out = (self.X[:30], self.y[:30])
        model, result = self.fitted(
            penalty, epochs=20, early_stopping=stopping, validation_data=held_out
        )
        assert len(result.history) > 15
        if isinstance(penalty, Binary):
            assert _levels(model) == [1, 1]
        else:
            left = sum(int((p != 0).sum()) for p in model.parameters() if p.ndim > 1)
            assert left <= 0.25 * (48 + 16) + 2

    @pytest.mark.parametrize("penalty", [Binary(), L1(keep=0.25), L1(keep=0.25, lazy=True)])
    def test_a_run_that_ends_before_they_hold_says_so(self, penalty):
        with pytest.warns(lpom.ConvergenceWarning, match="penalties hold once"):
            self.fitted(penalty, epochs=20, callbacks=lambda epoch: epoch.epoch == 3)

    @pytest.mark.parametrize("penalty", [Box(-1, 1), Binary(lazy=True), L1(1e-4), None])
    def test_others_hold_from_the_start(self, penalty, recwarn):
        self.fitted(penalty, epochs=20, callbacks=lambda epoch: epoch.epoch == 3)
        assert not [w for w in recwarn if "penalties" in str(w.message)]

    def test_estimators_leave_the_columns_alone_where_weights_are_bound(self):
        X = (1e-3 * self.X).double().numpy()
        method = LPOM(penalties=Box(-1, 1))
        found = lpom.MLPClassifier((8,), max_iter=5, tol=0, method=method, random_state=0)
        with pytest.warns(lpom.ConvergenceWarning):
            found.fit(X, self.y.numpy())
        assert max(abs(W).max() for W in found.coefs_) <= 1
