"""fit(): what it records, how it stops, what it refuses, what it leaves behind."""

from __future__ import annotations

import pickle
import warnings
from copy import deepcopy
from functools import partial

import numpy as np
import pytest
import torch
from sklearn.datasets import load_diabetes, load_digits
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import lpom
from lpom import LPOM, Adaptive, ConvergenceWarning, DivergenceError, EarlyStopping, Exact, Sweeps


@pytest.fixture(scope="module")
def digits():
    X, y = load_digits(return_X_y=True)
    X = torch.tensor(X / 16, dtype=torch.float32)
    y = torch.tensor(y)
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(0))
    X, y = X[order], y[order]
    return (X[:1400], y[:1400]), (X[1400:], y[1400:])


def weights(model):
    return [p.detach().clone() for p in model.parameters()]


def test_history_holds_what_is_promised(digits):
    train, test = digits
    model = lpom.mlp([64, 30, 20, 10], seed=0)
    result = lpom.fit(model, *train, epochs=3, validation_data=test, seed=0, diagnostics=True)
    assert result.status == "finished" and len(result.history) == 3
    last = result.history[-1]
    assert last.epoch == 3 and last.seconds > 0
    assert last.samples_per_second == pytest.approx(1400 / last.seconds)
    assert len(last.gaps) == len(last.rates) == 3
    assert last.objective > 0 and all(gap >= 0 for gap in last.gaps)
    again = lpom.mlp([64, 30, 20, 10], seed=0)
    plain = lpom.fit(again, *train, epochs=3, seed=0).history[-1]  # which asks for no graph
    assert (plain.objective, plain.gaps, plain.rates) == (None, (), ())
    assert plain.loss == last.loss
    assert result.history.metric == "accuracy"
    loss, score = lpom.evaluate(model, *test)
    assert (last.validation_loss, last.validation_score) == pytest.approx((loss, score))
    assert result.seconds >= result.training_seconds > 0
    assert result.history.column("loss")[0] > last.loss


def test_measured_loss_and_accuracy_are_those_of_torch(digits):
    _, (X, y) = digits
    model = lpom.mlp([64, 30, 10], seed=0)
    loss, accuracy = lpom.evaluate(model, X, y)
    outputs = model(X).detach()
    assert loss == pytest.approx(float(nn.functional.cross_entropy(outputs, y)), rel=1e-5)
    assert accuracy == pytest.approx(float((outputs.argmax(1) == y).double().mean()))


@pytest.mark.parametrize(
    "method",
    [
        LPOM(weights=Adaptive(optimizer="sgd", learning_rate=0.1)),
        "sgd",
        lpom.methods.get("mac", weights="adaptive", optimizer="sgd", learning_rate=0.1),
    ],
    ids=["lpom", "sgd", "mac"],
)
def test_weight_decay_is_the_gradient_of_half_the_square_on_matrices_alone(digits, method):
    """One step of an optimiser without memory: c W is added to the gradients of matrices."""
    (X, y), _ = digits
    method = lpom.methods.get(method)
    rate = method.get_params().get("learning_rate") or method.weights.learning_rate
    start = lpom.mlp([64, 30, 10], "tanh", seed=0)
    steps = []
    for decay in (0.0, 0.5):
        model = deepcopy(start)
        lpom.fit(
            model,
            X[:50],
            y[:50],
            method=method,
            epochs=1,
            batch_size=50,
            weight_decay=decay,
            seed=0,
        )
        steps.append(weights(model))
    for before, free, held in zip(weights(start), *steps, strict=True):
        expected = -rate * 0.5 * before if before.ndim == 2 else torch.zeros_like(before)
        torch.testing.assert_close(held - free, expected, atol=2e-6, rtol=1e-4)
    with pytest.raises(ValueError, match="weight_decay must be a number of at least 0"):
        lpom.fit(start, X[:50], y[:50], weight_decay=-1.0)


@pytest.mark.parametrize("method", ["lpom", "adam"])
def test_averaging_ends_with_the_running_mean_of_the_weights(digits, method, monkeypatch):
    """M_t = M_{t-1} + max(1 - d, 10 / (9 + t)) (W_t - M_{t-1}), literally; batch norm's too."""
    (X, y), test = digits
    kind, seen = type(lpom.methods.get(method)), []
    whole = kind.step

    def step(self, problem, batch, state):
        outputs = whole(self, problem, batch, state)
        seen.append([t.detach().double() for t in problem.model.state_dict().values()])
        return outputs

    monkeypatch.setattr(kind, "step", step)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 20), nn.BatchNorm1d(20), nn.ReLU(), nn.Linear(20, 10))
    options = {"method": method, "epochs": 2, "batch_size": 100, "seed": 0, "averaging": 0.6}
    result = lpom.fit(model, X, y, validation_data=test, **options)
    mean = seen[0]
    for t, after in enumerate(seen[1:], 2):
        share = max(0.4, 10 / (9 + t))
        mean = [(1 - share) * m + share * w for m, w in zip(mean, after, strict=True)]
    for (name, found), expected in zip(model.state_dict().items(), mean, strict=True):
        if found.is_floating_point():
            torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-6, msg=name)
    assert result.history[-1].validation_score == lpom.evaluate(model, *test)[1]


def test_printed_a_result_is_one_line(digits):
    result = lpom.fit(lpom.mlp([64, 5, 10], seed=0), *digits[1], epochs=2, seed=0)
    assert repr(result).startswith("<Result: finished after ") and len(repr(result)) < 120


def test_prediction_is_a_plain_forward_pass(digits):
    """The trained weights in a network made of torch alone say the same: no label takes part."""
    train, (X, _) = digits
    model = nn.Sequential(nn.Linear(64, 30), nn.ReLU(), nn.Linear(30, 10))
    lpom.fit(model, *train, epochs=1, seed=0)
    assert [type(m) for m in model] == [nn.Linear, nn.ReLU, nn.Linear]
    bare = nn.Sequential(nn.Linear(64, 30), nn.ReLU(), nn.Linear(30, 10))
    bare.load_state_dict(model.state_dict())
    torch.testing.assert_close(bare(X), model(X), rtol=0, atol=0)
    one_by_one = torch.cat([model(row[None]) for row in X[:20]])
    torch.testing.assert_close(one_by_one, model(X[:20]))


def test_same_seed_same_weights(digits):
    train, _ = digits
    runs = []
    for seed in (0, 0, 1):
        model = lpom.mlp([64, 20, 10], seed=0)
        lpom.fit(model, *train, epochs=1, seed=seed)
        runs.append(weights(model))
    assert all(torch.equal(a, b) for a, b in zip(runs[0], runs[1], strict=True))
    assert not torch.equal(runs[0][0], runs[2][0])


def test_arrays_sparse_rows_and_loaders_train_alike(digits):
    from scipy import sparse

    (X, y), _ = digits
    given = [
        (X, y),
        (X.numpy(), y.numpy()),
        (sparse.csr_matrix(X.numpy()), y.numpy()),
        (DataLoader(TensorDataset(X, y), batch_size=len(X)), None),
    ]
    trained = []
    for inputs, targets in given:
        model = lpom.mlp([64, 20, 10], seed=0)
        size = None if targets is None else len(X)
        lpom.fit(model, inputs, targets, epochs=3, batch_size=size, seed=0)
        trained.append(weights(model))
    for other in trained[1:]:
        for a, b in zip(trained[0], other, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


def test_dtype_follows_the_module(digits):
    (X, y), _ = digits
    model = lpom.mlp([64, 20, 10], seed=0, dtype=torch.float64)
    lpom.fit(model, X, y, epochs=1, seed=0)
    assert all(p.dtype == torch.float64 for p in model.parameters())


def test_regression_reports_r2():
    X, y = load_diabetes(return_X_y=True)
    X = X / X.std(0)
    y = (y - y.mean()) / y.std()
    model = lpom.mlp([10, 20, 1], seed=0, dtype=torch.float64)
    result = lpom.fit(
        model, X, y, method=LPOM(weights=Adaptive(learning_rate=0.01)), epochs=60, seed=0
    )
    assert result.history.metric == "r2"
    _, r2 = lpom.evaluate(model, X, y)
    outputs = model(torch.tensor(X)).detach().numpy()[:, 0]
    assert r2 == pytest.approx(1 - ((outputs - y) ** 2).sum() / ((y - y.mean()) ** 2).sum())
    assert r2 > 0.5


def test_sample_weights_count_like_repeated_rows(digits):
    (X, y), _ = digits
    X, y = X[:60], y[:60]
    counts = torch.arange(60) % 3
    again = torch.repeat_interleave(torch.arange(60), counts)
    for method in (LPOM(), LPOM(weights="exact"), LPOM(states=Sweeps("top-down", max_sweeps=2))):
        a, b = (lpom.mlp([64, 12, 10], seed=0, dtype=torch.float64) for _ in range(2))
        options = {"method": method, "epochs": 3, "seed": 0}
        lpom.fit(a, X, y, sample_weight=counts, batch_size=60, **options)
        lpom.fit(b, X[again], y[again], batch_size=len(again), **options)
        for p, q in zip(a.parameters(), b.parameters(), strict=True):
            torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-8)


def test_a_callback_stops_the_run(digits):
    train, _ = digits
    seen = []
    result = lpom.fit(
        lpom.mlp([64, 10], seed=0),
        *train,
        epochs=9,
        seed=0,
        callbacks=[lambda epoch: bool(seen.append(epoch.epoch)) or len(seen) == 2],
    )
    assert seen == [1, 2] and result.status == "stopped"


def test_ctrl_c_leaves_a_usable_model(digits):
    train, test = digits
    model = lpom.mlp([64, 30, 10], seed=0)

    def interrupt(epoch):
        if epoch.epoch == 4:
            raise KeyboardInterrupt

    with pytest.warns(UserWarning, match="interrupted"):
        result = lpom.fit(model, *train, epochs=50, seed=0, callbacks=[interrupt])
    assert result.status == "interrupted" and len(result.history) == 4
    assert lpom.evaluate(model, *test)[1] > 0.5


def test_going_on_from_a_state_is_one_long_run(digits):
    (X, y), _ = digits
    whole, halves = lpom.mlp([64, 20, 10], seed=0), lpom.mlp([64, 20, 10], seed=0)
    full = {"batch_size": len(X), "seed": 0, "endless": True}
    lpom.fit(whole, X, y, epochs=4, **full)
    first = lpom.fit(halves, X, y, epochs=2, **full)
    lpom.fit(halves, X, y, epochs=2, state=first.state, **full)
    for a, b in zip(whole.parameters(), halves.parameters(), strict=True):
        assert torch.equal(a, b)


def test_divergence_puts_the_last_good_weights_back(digits):
    train, _ = digits
    model = lpom.mlp([64, 20, 10], seed=0)
    kept = []

    class Exploding(LPOM.__mro__[1]):  # a Method whose third epoch breaks the weights
        name, equation, costs = "exploding", "", ""

        def init(self, problem):
            self.steps = 0
            return lpom.methods.State()

        def step(self, problem, batch, state):
            self.steps += 1
            with torch.no_grad():
                problem.graph.parameters[0].add_(float("nan") if self.steps > 28 else 0.01)

        def objective(self, problem, batch, state):
            kept.append(weights(model))
            return lpom.objective(model, batch.inputs, batch.target)

    with pytest.raises(DivergenceError, match=r"epoch 3.*end of epoch 2 were restored"):
        lpom.fit(model, *train, epochs=9, method=Exploding(), seed=0, diagnostics=True)
    assert len(kept) == 2
    for a, b in zip(model.parameters(), kept[-1], strict=True):
        assert torch.equal(a, b)


def test_a_dead_class_is_said_once(digits):
    train, _ = digits
    model = lpom.mlp([64, 20, 10], output="relu", seed=0)
    with torch.no_grad():
        model[2].bias[3] = -100.0  # output 3 says zero whatever comes
    with pytest.warns(ConvergenceWarning, match="output 3 .* dead") as caught:
        lpom.fit(model, *train, loss="squared", epochs=3, seed=0)
    assert len(caught) == 1 and caught[0].filename == __file__  # the line that called fit


def test_a_diverging_sweep_is_said(digits):
    train, _ = digits
    model = lpom.mlp([64, *[32] * 6, 10], "tanh", seed=0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3)
    method = LPOM(mu=1.0, states=Sweeps("top-down", max_sweeps=6, rule="plain"))
    with pytest.warns(ConvergenceWarning, match="sweeps over the states diverge"):
        lpom.fit(model, *train, method=method, epochs=1, seed=0)


def test_a_rank_deficient_exact_step_is_said(digits):
    (X, y), _ = digits
    X = torch.cat([X, X], 1)
    method = LPOM(weights=Exact(ridge=0.0))
    with pytest.warns(ConvergenceWarning, match="rank-deficient"):
        lpom.fit(lpom.mlp([128, 20, 10], seed=0), X, y, method=method, epochs=1, batch_size=400)


BAD = {
    "wrong width": (
        lambda X, y: (X[:, :5], y),
        ValueError,
        r"shape \(n_samples, 64\).*\(n_samples, 5\)",
    ),
    "nan in X": (lambda X, y: (X.where(X < 1, np.nan), y), ValueError, "X holds NaN"),
    "no rows": (lambda X, y: (X[:0], y[:0]), ValueError, "no rows"),
    "lengths": (lambda X, y: (X, y[:-1]), ValueError, "X has 90, y has 89"),
    "class 10": (lambda X, y: (X, y + 1), ValueError, r"0\.\.9.*1\.\.10"),
    "nan in y": (lambda X, y: (X, y.float().where(y > 0, np.nan)), ValueError, "y holds NaN"),
    "strings": (lambda X, y: (X, np.array(["a"] * 90)), TypeError, "MLPClassifier"),
    "no y": (lambda X, y: (X, None), TypeError, "y is missing"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_data_gets_a_sentence_and_changes_nothing(name, digits):
    (X, y), _ = digits
    spoil, error, sentence = BAD[name]
    inputs, targets = spoil(X[:90].clone(), y[:90].clone())
    model = lpom.mlp([64, 20, 10], seed=0)
    before = weights(model)
    with pytest.raises(error, match=sentence):
        lpom.fit(model, inputs, targets, epochs=1)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


SETTINGS = {
    "mu length": ({"method": LPOM(mu=[1.0, 2.0, 3.0])}, "mu needs one value per weight layer.*2"),
    "mu sign": ({"method": LPOM(mu=-1.0)}, "mu must be positive"),
    "method": ({"method": "lpmo"}, "did you mean 'lpom'"),
    "loss": ({"loss": "squard"}, "squared"),
    "epochs": ({"epochs": 0}, "epochs must be an integer"),
    "batch": ({"batch_size": 91}, "between 1 and the number of samples, 90; got 91"),
    "weight": ({"sample_weight": torch.zeros(90)}, "zero for every sample"),
    "weights": ({"sample_weight": torch.ones(3)}, r"shape \(90,\)"),
    "averaging": ({"averaging": 1.0}, "from 0 .none. to below 1, got 1.0"),
    "averaged penalties": (
        {"averaging": 0.9, "method": LPOM(penalties=lpom.penalties.L1(1e-4))},
        "off the zeros and levels",
    ),
    "averaged layers": (
        {"averaging": 0.9, "parallel": lpom.Parallel(layers=2)},
        "all weights after every step",
    ),
    "rate": (
        {"method": LPOM(weights=Adaptive(learning_rate=0.0))},
        "learning_rate must be a number above 0",
    ),
    "weights too large": ({"sample_weight": np.full(90, 1e38)}, "adds up to 9.*mean"),
    "no validation": (
        {"validation_data": DataLoader(TensorDataset(torch.ones(0, 64), torch.ones(0).long()))},
        "validation_data gave no batch",
    ),
    "early stopping": ({"early_stopping": 3}, "got 3; for example .*patience=3"),
    "state": ({"state": 5}, r"of method 'lpom' \(LPOMState\), got \(int\)"),
    **{f"seed {seed}": ({"seed": seed}, "integer from 0") for seed in (-1, 1.5, "a", 2**63)},
}


@pytest.mark.parametrize("name", SETTINGS)
def test_bad_settings_get_a_sentence(name, digits):
    (X, y), _ = digits
    settings, sentence = SETTINGS[name]
    with pytest.raises((ValueError, TypeError), match=sentence):
        lpom.fit(lpom.mlp([64, 20, 10], seed=0), X[:90], y[:90], **settings)


@pytest.mark.parametrize(
    ("loss", "sentence"),
    [
        ("cross-entropy", "probabilities that sum to one"),
        ("binary-cross-entropy", "between 0 and 1"),
        ("hinge", "targets -1 and"),
    ],
)
def test_a_loss_for_classes_refuses_other_numbers(loss, sentence):
    X, y = torch.randn(20, 3), 5 * torch.randn(20, 2)
    with pytest.raises(ValueError, match=sentence):
        lpom.fit(lpom.mlp([3, 2], seed=0), X, y, loss=loss, epochs=1)


def test_soft_labels_are_targets_too():
    X, y = torch.randn(50, 3), torch.softmax(torch.randn(50, 4), 1)
    model = lpom.mlp([3, 8, 4], seed=0)
    before, _ = lpom.evaluate(model, X, y, loss="cross-entropy")
    lpom.fit(model, X, y, loss="cross-entropy", epochs=30, batch_size=10, seed=0)
    assert lpom.evaluate(model, X, y, loss="cross-entropy")[0] < before


def test_a_full_batch_method_refuses_a_loader(digits):
    (X, y), _ = digits
    loader = DataLoader(TensorDataset(X, y), batch_size=50)
    with pytest.raises(ValueError, match="needs all rows at once"):
        lpom.fit(lpom.mlp([64, 10], seed=0), loader, method="admm", epochs=1)


def test_a_loader_brings_its_own_batches_and_weights(digits):
    (X, y), _ = digits
    loader = DataLoader(TensorDataset(X, y), batch_size=50)
    for given in ({"batch_size": 20}, {"sample_weight": torch.ones(len(X))}):
        with pytest.raises(TypeError, match="leave batch_size and sample_weight out"):
            lpom.fit(lpom.mlp([64, 10], seed=0), loader, epochs=1, **given)


def test_a_batch_of_a_loader_may_count_for_nothing(digits):
    (X, y), _ = digits
    X, y, weight = X[:200], y[:200], torch.ones(200)
    weight[50:100] = 0.0
    method = lpom.methods.get("sgd").with_params(schedule="constant")
    models = [lpom.mlp([64, 10], seed=0) for _ in range(2)]
    rows = TensorDataset(X, y, weight), TensorDataset(X[weight > 0], y[weight > 0])
    for model, data in zip(models, rows, strict=True):
        lpom.fit(model, DataLoader(data, batch_size=50), method=method, epochs=1)
    torch.testing.assert_close(models[0][0].weight, models[1][0].weight)
    nothing = DataLoader(TensorDataset(X, y, torch.zeros(200)), batch_size=50)
    with pytest.raises(ValueError, match="zero for every sample"):
        lpom.fit(models[0], nothing, epochs=1)


def test_rows_that_come_once_are_all_trained_on(digits):
    (X, y), _ = digits

    class Once(IterableDataset):
        rows = iter(list(zip(X[:300], y[:300], strict=True)))

        def __iter__(self):
            return self.rows

    seen = lpom.fit(lpom.mlp([64, 10], seed=0), DataLoader(Once(), batch_size=100), epochs=1)
    assert seen.history[-1].samples_per_second * seen.history[-1].seconds == pytest.approx(300)


def test_a_layer_frozen_after_training_stays(digits):
    train, _ = digits
    model = lpom.mlp([64, 20, 10], seed=0)
    lpom.fit(model, *train, epochs=1, seed=0)
    assert all(parameter.grad is None for parameter in model.parameters())
    model[0].requires_grad_(False)
    model[0].weight.grad = torch.ones_like(model[0].weight)  # of someone's own making
    before = weights(model)
    lpom.fit(model, *train, epochs=1, seed=0)
    after = weights(model)
    assert all(torch.equal(a, b) for a, b in zip(before[:2], after[:2], strict=True))
    assert not torch.equal(before[2], after[2])


@pytest.mark.parametrize("method", [LPOM(), LPOM(states=Sweeps(max_sweeps=2)), "adam", "mac"])
def test_a_state_goes_on_with_a_copy_of_the_model(method, digits):
    """As from a checkpoint: the copy learns what the model itself would have learnt."""
    train, _ = digits
    model = lpom.mlp([64, 20, 10], seed=0)
    first = lpom.fit(model, *train, method=method, epochs=1, seed=0)
    other, state = deepcopy(model), pickle.loads(pickle.dumps(first.state))
    third, untouched = deepcopy(model), weights(model)
    lpom.fit(third, *train, method=method, epochs=1, seed=1, state=first.state)
    assert all(torch.equal(a, b) for a, b in zip(untouched, model.parameters(), strict=True))
    lpom.fit(other, *train, method=method, epochs=1, seed=1, state=state)
    lpom.fit(model, *train, method=method, epochs=1, seed=1, state=first.state)
    for a, b, c in zip(model.parameters(), other.parameters(), third.parameters(), strict=True):
        torch.testing.assert_close(a, b)
        torch.testing.assert_close(a, c)


def test_numbers_of_numpy_are_numbers(digits):
    (X, y), _ = digits
    results = []
    for mu, epochs in ((20, 2), (np.int64(20), np.int64(2)), (np.float32(20), 2)):
        model = lpom.mlp([64, 20, 10], seed=0)
        lpom.fit(model, X, y, method=LPOM(mu=mu), epochs=epochs, seed=0)
        results.append(torch.nn.utils.parameters_to_vector(model.parameters()))
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])


def test_callbacks_see_the_epoch_that_stops_early(digits):
    (X, y), _ = digits
    seen = []
    stop = lpom.EarlyStopping(patience=1, min_delta=10.0)
    result = lpom.fit(
        lpom.mlp([64, 10], seed=0),
        X,
        y,
        epochs=9,
        early_stopping=stop,
        callbacks=lambda epoch: seen.append(epoch.epoch),  # one by itself will do
    )
    assert result.status == "stopped-early"
    assert seen == result.history.column("epoch")


def test_dead_classes_are_counted_in_rows_not_in_weight(digits):
    (X, y), _ = digits
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        lpom.fit(lpom.mlp([64, 10], seed=0), X[:1], y[:1], sample_weight=[3.0], epochs=1)
    model = lpom.mlp([64, 10], output="relu", seed=0)
    with torch.no_grad():
        model[0].bias[3] = -1e3
    with pytest.warns(lpom.ConvergenceWarning, match="output 3"):
        lpom.fit(model, X[:90], y[:90], sample_weight=torch.full((90,), 0.01), epochs=1)


def test_a_model_that_flattens_takes_samples_of_any_shape(digits):
    (X, y), _ = digits
    flat, deep = lpom.mlp([64, 10], seed=0), nn.Sequential(nn.Flatten(), lpom.mlp([64, 10], seed=0))
    lpom.fit(flat, X, y, epochs=2, seed=0)
    pictures = X.reshape(-1, 1, 8, 8)
    lpom.fit(deep, pictures, y, epochs=2, seed=0)
    torch.testing.assert_close(flat[0].weight, deep[1][0].weight)  # swept in two ways
    deep.load_state_dict({f"1.{name}": value for name, value in flat.state_dict().items()})
    assert lpom.evaluate(deep, pictures, y) == lpom.evaluate(flat, X, y)
    loader = DataLoader(TensorDataset(pictures, y), batch_size=50)
    assert lpom.evaluate(deep, loader) == pytest.approx(lpom.evaluate(flat, X, y))
    assert lpom.objective(deep, pictures, y).total == lpom.objective(flat, X, y).total
    with pytest.raises(ValueError, match="to match the first Linear layer"):
        lpom.fit(flat, pictures, y)


def test_data_in_a_graph_gets_no_gradient(digits):
    (X, y), _ = digits
    X = X.clone().requires_grad_()
    lpom.fit(lpom.mlp([64, 10], seed=0), X, y, epochs=1, method="adam")
    assert X.grad is None


@pytest.mark.parametrize(
    ("items", "sentence"),
    [([{"x": 1}], "got x"), ([(torch.ones(2, 64),)], "got list of 1")],
)
def test_a_loader_of_something_else_gets_a_sentence(items, sentence):
    loader = DataLoader(items, batch_size=None)
    with pytest.raises(TypeError, match=f"DataLoader must .*{sentence}"):
        lpom.fit(lpom.mlp([64, 10]), loader)


def test_a_stream_read_once_cannot_be_measured_again(digits):
    (X, y), _ = digits

    class Once(IterableDataset):
        rows = iter(zip(X, y, strict=True))

        def __iter__(self):
            return self.rows

    with pytest.raises(ValueError, match="second pass"):
        lpom.fit(
            lpom.mlp([64, 8, 10], "step"),
            DataLoader(Once(), batch_size=100),
            method=LPOM(jumps="continuation"),
            epochs=1,
        )


def test_a_frozen_model_has_nothing_to_train(digits):
    (X, y), _ = digits
    model = lpom.mlp([64, 10]).requires_grad_(False)
    with pytest.raises(ValueError, match="every layer of the model is frozen"):
        lpom.fit(model, X, y, method="adam")


def test_an_optimizer_class_gets_the_learning_rate(digits):
    (X, y), _ = digits

    def trained(optimizer, **settings):
        model = lpom.mlp([64, 10], seed=0)
        lpom.fit(
            model, X, y, epochs=1, seed=0, method=LPOM(weights=Adaptive(optimizer, **settings))
        )
        return model[0].weight

    by_name = trained("sgd", learning_rate=0.3)
    assert torch.equal(by_name, trained(torch.optim.SGD, learning_rate=0.3))
    own = trained(lambda parameters: torch.optim.SGD(parameters, lr=0.3), learning_rate=7.0)
    assert torch.equal(by_name, own)
    with pytest.raises(TypeError, match="got an instance of SGD; give the class itself"):
        trained(torch.optim.SGD([torch.zeros(1)]))


def test_a_sigmoid_output_learns(digits):
    """Its values are no logits: the loss that goes with it is the squared one."""
    (X, y), _ = digits
    model = nn.Sequential(nn.Linear(64, 1), nn.Sigmoid())
    torch.manual_seed(0)
    method = LPOM(weights=Adaptive(learning_rate=0.05))
    result = lpom.fit(model, X, (y == 3).long(), method=method, epochs=30, seed=0)
    assert result.task.loss.name == "squared" and result.history[-1].score > 0.95
    with pytest.raises(ValueError, match="needs outputs of either sign and any size"):
        lpom.fit(model, X, (y == 3).long(), loss="bce")


def test_a_state_is_cast_to_the_model_it_is_given_to(digits):
    (X, y), _ = digits
    model = lpom.mlp([64, 20, 10], seed=0)
    for method in ("lpom", LPOM(states=Sweeps("top-down")), "adam"):
        result = lpom.fit(model, X, y, epochs=1, method=method)
        lpom.fit(deepcopy(model).double(), X, y, epochs=1, method=method, state=result.state)


def test_an_infinite_loss_is_said():
    X, y = torch.randn(50, 3), 1e30 * torch.randn(50)
    with pytest.warns(ConvergenceWarning, match="the loss is inf although.*Standardise"):
        lpom.fit(lpom.mlp([3, 1], seed=0), X, y, epochs=1)


def test_early_stopping_puts_the_best_epoch_back_whatever_the_tolerance(digits):
    (X, y), held_out = digits
    model = lpom.mlp([64, 10], seed=0)
    kept = []
    result = lpom.fit(
        model,
        X,
        y,
        validation_data=held_out,
        epochs=6,
        early_stopping=EarlyStopping(patience=6, min_delta=0.5),
        callbacks=lambda epoch: kept.append(weights(model)),
        seed=0,
    )
    scores = result.history.column("validation_score")
    assert lpom.evaluate(model, *held_out)[1] == pytest.approx(max(scores))
    best = kept[scores.index(max(scores))]
    assert all(torch.equal(a, b) for a, b in zip(best, model.parameters(), strict=True))


def test_a_state_goes_on_with_settings_that_changed(digits):
    (X, y), _ = digits
    model = lpom.mlp([64, 20, 10], seed=0)
    result = lpom.fit(model, X, y, epochs=1, method=LPOM(mu=20.0), seed=0)
    changed = [
        LPOM(mu=5.0, weights=Adaptive(learning_rate=1e-5)),
        LPOM(states=Sweeps(max_sweeps=3)),
        LPOM(weights="exact"),
        LPOM(weights=Adaptive("sgd")),
    ]
    for method in changed:
        after = lpom.fit(model, X, y, epochs=1, method=method, state=result.state, seed=0)
        assert after.state is not result.state
        assert method.mu is None or after.state.mu[1:] == [method.mu] * 2
        assert (after.state.optimizer is None) == (isinstance(method.weights, Exact))
        again = lpom.fit(model, X, y, epochs=1, method=LPOM(), state=after.state, seed=0)
        assert again.state.optimizer.param_groups[0]["initial_lr"] == LPOM().weights.learning_rate
    lpom.fit(model.double(), X, y, epochs=1, method=LPOM(), state=again.state)
    adam = lpom.fit(model, X, y, epochs=1, method="adam")
    with pytest.raises(TypeError, match="method 'sgd' .*got one of 'adam'"):
        lpom.fit(model, X, y, epochs=1, method="sgd", state=adam.state)


class Viewed(nn.Module):
    """A network with ``view`` where only rows that follow each other will do."""

    def __init__(self):
        super().__init__()
        self.features = nn.Conv2d(3, 4, 3)
        self.classifier = nn.Linear(4 * 36, 2)

    def forward(self, x):
        return self.classifier(torch.relu(self.features(x)).view(x.size(0), -1))


@pytest.mark.parametrize("method", ["lpom", "adam"])
def test_pictures_stay_as_they_are_for_networks_that_view_them(method):
    torch.manual_seed(0)
    X, y = torch.randn(60, 3, 8, 8), torch.arange(60) % 2
    result = lpom.fit(Viewed(), X, y, method=method, epochs=60, seed=0, progress=False)
    assert result.history[-1].loss < 0.7 * result.history[0].loss


@pytest.mark.parametrize("method", ["lpom", "adam"])
def test_a_run_that_made_things_worse_says_so(digits, method):
    (X, y), _ = digits
    wild = lpom.methods.get(method).with_learning_rate(1000.0)
    with pytest.warns(ConvergenceWarning, match=r"has learnt nothing.*a smaller learning_rate"):
        lpom.fit(lpom.mlp([64, 10, 10], seed=0), X, y, method=wild, epochs=1, progress=False)


def test_a_run_that_made_things_worse_says_so_when_it_stops_early_too(digits):
    (X, y), _ = digits
    wild = lpom.methods.get("sgd").with_learning_rate(1000.0)
    options = {"method": wild, "epochs": 30, "seed": 0, "progress": False}
    with pytest.warns(ConvergenceWarning, match="has learnt nothing"):
        result = lpom.fit(
            lpom.mlp([64, 10, 10], seed=0),
            X[:200],
            y[:200],
            early_stopping=lpom.EarlyStopping(patience=1),
            **options,
        )
    assert result.status == "stopped-early"


@pytest.mark.parametrize("loaded", [False, True])
def test_targets_that_no_output_reaches_are_said(loaded):
    X, y = torch.linspace(-1, 1, 40)[:, None], torch.linspace(0, 1, 40)[:, None]

    def fit(targets):
        data = (X, targets)
        if loaded:
            data = (DataLoader(TensorDataset(*data), batch_size=40),)
        lpom.fit(lpom.mlp([1, 4, 1], "relu", "sigmoid", seed=0), *data, epochs=1, seed=0)

    fit(y)
    with pytest.warns(UserWarning, match="numbers such as -1, and .* sigmoid gives .* from 0 to 1"):
        fit(2 * y - 1)


def test_a_model_without_values_is_refused(digits):
    (X, y), _ = digits
    with pytest.raises(ValueError, match=r"meta device.*to_empty"):
        lpom.fit(torch.nn.Sequential(torch.nn.Linear(64, 10, device="meta")), X, y)


def test_numbers_that_no_network_learns_from_are_named(digits):
    (X, y), _ = digits
    with pytest.warns(UserWarning, match=r"values up to 1e\+20.*Standardise"):
        lpom.fit(lpom.mlp([64, 10, 10], seed=0), X * 1e20, y, epochs=1, progress=False)


@pytest.mark.parametrize("order", ["paper", "parallel"])
def test_one_sweep_that_leaves_the_hidden_layers_alone_is_said(digits, order):
    (X, y), _ = digits
    model = lpom.mlp([64, 10, 10], seed=0)
    before = model[0].weight.clone()
    with pytest.warns(ConvergenceWarning, match=f"{order}.*only the last weights learn"):
        lpom.fit(model, X, y, method=LPOM(states=Sweeps(order=order)), epochs=1, progress=False)
    assert torch.equal(model[0].weight, before)


def test_exact_weights_in_half_precision_are_refused(digits):
    (X, y), _ = digits
    model = lpom.mlp([64, 10], seed=0, dtype=torch.float16)
    with pytest.raises(TypeError, match=r"float16.*model\.float\(\)"):
        lpom.fit(model, X, y, method=LPOM(weights="exact"), progress=False)


@pytest.mark.parametrize(("width", "threads"), [(20, 1), (3000, 2)])
def test_small_networks_take_one_thread(width, threads):
    """Several would wait for each other; what the user has set is there again afterwards."""
    X, y = torch.randn(100, 60), torch.arange(100) % 2
    seen, before = [], torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        lpom.fit(
            lpom.mlp([60, width, 2]),
            X,
            y,
            epochs=1,
            progress=False,
            callbacks=lambda _: seen.append(torch.get_num_threads()),
        )
        assert (seen, torch.get_num_threads()) == ([threads], 2)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("before", [False, True])
def test_denormal_numbers_do_not_slow_a_run_down(before):
    """Products with them take a hundred times as long; what the user has set is there again."""
    seen = []
    is_zero = partial(torch.eq, torch.tensor(1e-40), 0)
    torch.set_flush_denormal(before)
    try:
        lpom.fit(
            lpom.mlp([4, 3, 2]),
            torch.randn(10, 4),
            torch.arange(10) % 2,
            epochs=1,
            progress=False,
            callbacks=lambda _: seen.append(bool(is_zero())),
        )
        assert seen == [True]
        assert bool(is_zero()) is before
    finally:
        torch.set_flush_denormal(False)
