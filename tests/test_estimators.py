"""The estimators are scikit-learn estimators, and do what this library adds to that."""

from __future__ import annotations

import pickle
import warnings
from copy import deepcopy

import numpy as np
import pandas as pd
import pytest
import torch
from scipy import sparse
from sklearn.base import clone
from sklearn.compose import (
    TransformedTargetRegressor,
    make_column_selector,
    make_column_transformer,
)
from sklearn.datasets import (
    load_breast_cancer,
    load_diabetes,
    load_digits,
    load_iris,
    load_wine,
    make_classification,
    make_friedman1,
    make_friedman2,
    make_moons,
    make_multilabel_classification,
    make_regression,
)
from sklearn.dummy import DummyRegressor
from sklearn.exceptions import ConvergenceWarning, NotFittedError
from sklearn.metrics import balanced_accuracy_score, log_loss
from sklearn.model_selection import (
    GridSearchCV,
    RepeatedKFold,
    StratifiedKFold,
    cross_val_score,
    cross_validate,
    train_test_split,
)
from sklearn.neural_network import MLPClassifier as BackpropClassifier
from sklearn.neural_network import MLPRegressor as Backprop
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import OneHotEncoder, StandardScaler
from sklearn.utils.estimator_checks import parametrize_with_checks

import lpom
from lpom import MLPClassifier, MLPRegressor

# short runs are enough here; one test looks at the warning itself
pytestmark = pytest.mark.filterwarnings("ignore:training ended after max_iter")


@parametrize_with_checks([MLPClassifier(max_iter=40), MLPRegressor(max_iter=40)])
def test_scikit_learn_checks(estimator, check):
    check(estimator)


@pytest.fixture(scope="module")
def digits():
    X, y = load_digits(return_X_y=True)
    return train_test_split(X / 16, y, test_size=0.25, random_state=0, stratify=y)


@pytest.fixture(scope="module")
def blobs():
    """Three overlapping classes with names, 240 rows of 6 columns."""
    rng = np.random.default_rng(0)
    codes = np.arange(240) % 3
    X = rng.normal(size=(240, 6)) + 1.5 * np.eye(6)[codes]
    return X, np.array(["ash", "birch", "cedar"])[codes]


@pytest.fixture(scope="module")
def numbers():
    X, y = make_regression(400, 5, n_targets=2, noise=1.0, random_state=0)
    return X, y / y.std(0)


def small(kind=MLPClassifier, **params):
    return kind(**{"hidden_layer_sizes": (16,), "max_iter": 20, "random_state": 0} | params)


# -- quality ----------------------------------------------------------------------------------


def test_digits_beside_scikit_learns_own(digits):
    X_train, X_test, y_train, y_test = digits
    ours = MLPClassifier(random_state=0).fit(X_train, y_train).score(X_test, y_test)
    theirs = BackpropClassifier(random_state=0, max_iter=400).fit(X_train, y_train)
    assert ours >= 0.96
    assert ours >= theirs.score(X_test, y_test) - 0.015


def flats(n: int = 700) -> tuple[pd.DataFrame, np.ndarray]:
    """A data frame with words in it, and rents that depend on both kinds of columns."""
    rng = np.random.default_rng(2)
    frame = pd.DataFrame({"area": rng.gamma(8, 9, n), "floor": rng.integers(0, 9, n)})
    frame["town"] = rng.choice(["Ulm", "Köln", "Bonn", "Jena"], n, p=[0.1, 0.4, 0.3, 0.2])
    frame["heating"] = rng.choice(["gas", "oil", "heat pump"], n)
    price = frame["town"].map({"Ulm": 11, "Köln": 14, "Bonn": 12, "Jena": 8})
    rent = price * frame["area"] + 15 * frame["floor"] - 60 * (frame["heating"] == "oil")
    return frame, (rent + rng.normal(0, 60, n)).to_numpy()


def offers() -> tuple[pd.DataFrame, np.ndarray]:
    """Flats that are dear for their town; enough of them for half a point to be no chance."""
    frame, rent = flats(2000)
    usual = frame["town"].map({"Ulm": 11, "Köln": 15, "Bonn": 11, "Jena": 8})
    frame["rent"] = rent
    return frame, (rent / frame["area"] > usual).to_numpy().astype(int)


OF_CLASSES = {
    "iris": lambda: load_iris(return_X_y=True),
    "wine": lambda: load_wine(return_X_y=True),
    "breast cancer": lambda: load_breast_cancer(return_X_y=True),
    "digits": lambda: tuple(part[:800] for part in load_digits(return_X_y=True)),
    "moons": lambda: make_moons(600, noise=0.25, random_state=0),
    "two": lambda: make_classification(1000, 20, n_informative=8, flip_y=0.05, random_state=0),
    "four": lambda: make_classification(800, 12, n_informative=6, n_classes=4, random_state=1),
    "offers": offers,
}
OF_NUMBERS = {
    "diabetes": lambda: load_diabetes(return_X_y=True),
    "friedman1": lambda: make_friedman1(600, noise=1.0, random_state=0),
    "friedman2": lambda: make_friedman2(500, noise=50.0, random_state=0),
    "linear": lambda: make_regression(300, 10, noise=20.0, random_state=0),
    "flats": flats,
}


def beside_theirs(tables, folds, ours, theirs, scoring) -> pd.DataFrame:
    """Mean scores over the folds of each table: of our estimator, and of scikit-learn's."""
    rows = {}
    for name, make in tables.items():
        X, y = make()
        scale = StandardScaler()
        if isinstance(X, pd.DataFrame):
            words = make_column_selector(dtype_exclude="number")
            scale = make_column_transformer((OneHotEncoder(), words), remainder=scale)
        found = [
            cross_validate(make_pipeline(scale, model), X, y, cv=folds, scoring=scoring)
            for model in (ours, theirs)
        ]
        rows[name] = {
            f"{who}, {what}": scores[f"test_{what}"].mean()
            for what in scoring
            for who, scores in zip(("lpom", "scikit-learn"), found, strict=True)
        }
    table = pd.DataFrame(rows).T
    print(f"\n{ours}\n{table.round(4)}")  # seen with pytest -s
    return table


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Stochastic Optimizer")
@pytest.mark.parametrize("early_stopping", [False, True])
def test_no_classes_are_learned_worse_than_by_scikit_learns_own(early_stopping):
    """Five folds each: 0.5 points at most, and 5 % of log loss on average."""
    settings = dict(early_stopping=early_stopping, random_state=0)
    table = beside_theirs(
        OF_CLASSES,
        StratifiedKFold(5, shuffle=True, random_state=0),
        MLPClassifier(**settings),
        BackpropClassifier(**settings),
        ["accuracy", "neg_log_loss"],
    )
    below = table["scikit-learn, accuracy"] - table["lpom, accuracy"]
    ratios = table["lpom, neg_log_loss"] / table["scikit-learn, neg_log_loss"]
    print(f"worst {below.max():+.4f} below, log loss {ratios.mean():.3f} times theirs\n{ratios}")
    assert below.max() <= 0.005
    assert ratios.mean() <= 1.05


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Stochastic Optimizer")
@pytest.mark.parametrize("early_stopping", [False, True])
def test_no_numbers_are_learned_worse_than_by_scikit_learns_own(early_stopping):
    """Five folds each: 0.02 R2 at most.

    Theirs gets the target in a unit that suits it, which ours sees to by itself. The folds are
    those of three shufflings: R2 on the 88 rows of one fold swings by more than is allowed.
    """
    settings = dict(early_stopping=early_stopping, random_state=0)
    table = beside_theirs(
        OF_NUMBERS,
        RepeatedKFold(n_splits=5, n_repeats=3, random_state=0),
        MLPRegressor(**settings),
        TransformedTargetRegressor(Backprop(**settings), transformer=StandardScaler()),
        ["r2"],
    )
    below = table["scikit-learn, r2"] - table["lpom, r2"]
    print(f"worst {below.max():+.4f} below")
    assert below.max() <= 0.02


def test_several_outputs_are_learned(numbers):
    X, Y = numbers
    model = MLPRegressor(random_state=0).fit(X[:300], Y[:300])
    assert model.predict(X).shape == Y.shape
    assert model.n_outputs_ == 2
    dummy = DummyRegressor().fit(X[:300], Y[:300])
    error, chance = (((m.predict(X[300:]) - Y[300:]) ** 2).mean() for m in (model, dummy))
    assert error < 0.05 * chance


def test_several_labels_are_learned():
    X, Y = make_multilabel_classification(600, n_classes=4, random_state=0)
    X = StandardScaler().fit_transform(X)
    model = MLPClassifier(random_state=0, max_iter=50).fit(X[:450], Y[:450])
    assert model.predict_proba(X).shape == Y.shape
    assert set(np.unique(model.predict(X))) == {0, 1}
    right = (model.predict(X[450:]) == Y[450:]).mean()
    majority = np.maximum(Y[450:].mean(0), 1 - Y[450:].mean(0)).mean()
    assert right > majority + 0.1
    np.testing.assert_array_equal(model.predict(X), model.decision_function(X) > 0)


def test_a_stream_of_chunks_is_learned(digits):
    X_train, X_test, y_train, y_test = digits
    model = MLPClassifier(random_state=0)
    for _ in range(30):
        for rows in np.array_split(np.arange(len(X_train)), 10):
            model.partial_fit(X_train[rows], y_train[rows], classes=np.arange(10))
    assert model.score(X_test, y_test) > 0.95
    assert model.n_iter_ == 300
    assert model.t_ == 30 * len(X_train)
    rates = {group["lr"] for group in model.result_.state.optimizer.param_groups}
    assert rates == {lpom.Adaptive().learning_rate}


def test_balanced_weights_find_the_rare_class():
    rng = np.random.default_rng(0)
    y = np.arange(600) % 20 == 0
    X = rng.normal(size=(600, 4)) + 1.2 * y[:, None]
    plain, balanced = (
        balanced_accuracy_score(y, small(class_weight=w, max_iter=40).fit(X, y).predict(X))
        for w in (None, "balanced")
    )
    assert balanced > plain + 0.1


@pytest.mark.parametrize("alpha", [0.0, 20.0])
def test_alpha_is_that_of_scikit_learn(blobs, alpha):
    """Both end where the mean loss plus alpha / (2 n) times the squared weights is smallest."""
    X, y = blobs
    settings = dict(method="sgd", batch_size=len(X), max_iter=2000, tol=0, learning_rate_init=0.5)
    ours = MLPClassifier((), alpha=alpha, random_state=0, **settings).fit(X, y)
    theirs = BackpropClassifier((), alpha=alpha, solver="lbfgs", max_iter=2000, tol=1e-9).fit(X, y)
    np.testing.assert_allclose(ours.predict_proba(X), theirs.predict_proba(X), atol=2e-4)
    if alpha:
        np.testing.assert_allclose(ours.coefs_[0], theirs.coefs_[0], atol=2e-4)


def test_alpha_shrinks_weights_by_lpom_and_is_refused_where_there_is_no_gradient(blobs):
    settings = dict(max_iter=60, learning_rate_init=0.02)
    free, held = (small(alpha=alpha, **settings).fit(*blobs) for alpha in (0.0, 10.0))
    sizes = [[np.linalg.norm(W) for W in model.coefs_] for model in (free, held)]
    assert all(after < 0.7 * before for before, after in zip(*sizes, strict=True))
    with pytest.raises(ValueError, match="'bcd' .* no gradient .* Leave alpha out"):
        small(method="bcd", alpha=1.0).fit(*blobs)
    again = small(alpha=0.0, **settings).fit(*blobs)  # nothing of the penalty stays behind
    np.testing.assert_array_equal(again.coefs_[0], free.coefs_[0])


def test_a_regressor_does_not_care_for_the_units_of_its_target(numbers):
    X, Y = numbers
    units, start = np.array([1e6, 1e-4]), np.array([3e8, -5.0])
    plain, scaled = small(MLPRegressor).fit(X, Y), small(MLPRegressor).fit(X, start + units * Y)
    np.testing.assert_allclose(scaled.predict(X), start + units * plain.predict(X), rtol=1e-6)
    hidden = np.maximum(X @ scaled.coefs_[0] + scaled.intercepts_[0], 0)
    answers = hidden @ scaled.coefs_[1] + scaled.intercepts_[1]
    np.testing.assert_allclose(answers, scaled.predict(X), rtol=1e-9)
    np.testing.assert_allclose(plain.loss_curve_, scaled.loss_curve_, rtol=1e-6)


def test_a_stream_of_numbers_keeps_the_units_of_its_first_chunk(numbers):
    X, Y = numbers
    model = small(MLPRegressor, learning_rate_init=0.02)
    for _ in range(40):
        for rows in np.array_split(np.argsort(Y[:, 0]), 4):  # each chunk with a mean of its own
            model.partial_fit(X[rows], 1000 + Y[rows])
    assert model.score(X, 1000 + Y) > 0.9


def test_an_output_activation_says_what_range_the_target_has(numbers):
    X, Y = numbers
    positive = np.exp(Y[:, 0])
    model = small(MLPRegressor, output_activation="relu", max_iter=60).fit(X, positive)
    assert model.predict(X).min() >= 0
    module = model.to_torch()(torch.tensor(X)).detach().numpy()[:, 0]
    np.testing.assert_allclose(module, model.predict(X))
    with pytest.raises(ValueError, match="another unit"):
        small(MLPRegressor).fit(X, 1e200 * Y)


# -- outputs ----------------------------------------------------------------------------------


@pytest.mark.parametrize("loss", ["auto", "cross-entropy", "squared", "hinge", "huber"])
@pytest.mark.parametrize("n_classes", [2, 3])
def test_probabilities_sum_to_one_and_agree_with_predict(blobs, loss, n_classes):
    X, y = blobs
    X, y = X[y < "c"] if n_classes == 2 else X, y[y < "c"] if n_classes == 2 else y
    model = small(loss=loss).fit(X, y)
    assert model.n_outputs_ == (1 if n_classes == 2 and loss != "cross-entropy" else n_classes)
    p, scores = model.predict_proba(X), model.decision_function(X)
    np.testing.assert_allclose(p.sum(1), 1)
    assert p.min() >= 0
    # squeezed outputs may tie where the outputs themselves do not
    top = p[np.arange(len(X)), np.searchsorted(model.classes_, model.predict(X))]
    np.testing.assert_array_equal(top, p.max(1))
    chosen = (scores > 0).astype(int) if n_classes == 2 else scores.argmax(1)
    np.testing.assert_array_equal(model.classes_[chosen], model.predict(X))
    with np.errstate(divide="ignore"):
        np.testing.assert_array_equal(model.predict_log_proba(X), np.log(p))


def test_a_row_with_every_output_squeezed_to_zero_goes_to_the_largest(blobs):
    model = small(loss="squared").fit(*blobs)
    with torch.no_grad():
        model._model[-1].weight.zero_()
        model._model[-1].bias.copy_(torch.tensor([-3.0, -1.0, -2.0]))
    np.testing.assert_array_equal(model.predict_proba(blobs[0][:2]), [[0, 1, 0]] * 2)


@pytest.mark.parametrize("kind", [MLPClassifier, MLPRegressor])
def test_to_torch_is_the_same_function_and_a_copy(blobs, numbers, kind):
    X, y = blobs if kind is MLPClassifier else numbers
    model = small(kind).fit(X, y)
    ask = model.decision_function if kind is MLPClassifier else model.predict
    before, module = ask(X), model.to_torch()
    assert isinstance(module, torch.nn.Sequential)
    np.testing.assert_allclose(module(torch.tensor(X)).detach().numpy(), before, rtol=1e-9)
    with torch.no_grad():
        module[0].weight.zero_()
    np.testing.assert_array_equal(ask(X), before)


def test_fitted_attributes_describe_the_network(blobs):
    X, y = blobs
    model = small(hidden_layer_sizes=(7, 5), activation="logistic").fit(X, y)
    assert [W.shape for W in model.coefs_] == [(6, 7), (7, 5), (5, 3)]
    assert [b.shape for b in model.intercepts_] == [(7,), (5,), (3,)]
    assert (model.n_layers_, model.n_outputs_, model.out_activation_) == (4, 3, "softmax")
    assert model.n_iter_ == len(model.loss_curve_) == len(model.history_) == 20
    assert (model.t_, model.loss_) == (20 * 240, model.loss_curve_[-1])
    assert model.best_loss_ == min(model.loss_curve_)
    assert model.validation_scores_ is model.best_validation_score_ is None

    def squash(z):
        return 1 / (1 + np.exp(-z))

    hidden = X
    for W, b in zip(model.coefs_[:-1], model.intercepts_[:-1], strict=True):
        hidden = squash(hidden @ W + b)
    outputs = hidden @ model.coefs_[-1] + model.intercepts_[-1]
    np.testing.assert_allclose(outputs, model.decision_function(X), rtol=1e-12, atol=1e-12)
    with pytest.raises(ValueError, match="read-only"):
        model.coefs_[0][:] = 0


def test_float32_stays_float32(blobs, numbers):
    for kind, (X, y) in ((MLPClassifier, blobs), (MLPRegressor, numbers)):
        model = small(kind).fit(X.astype(np.float32), y)
        ask = model.predict_proba if kind is MLPClassifier else model.predict
        assert ask(X).dtype == ask(X.astype(np.float32)).dtype == model.coefs_[0].dtype
        assert model.coefs_[0].dtype == np.float32
        assert small(kind).fit(X, y).coefs_[0].dtype == np.float64


@pytest.mark.parametrize("container", [sparse.csr_array, sparse.csc_matrix, sparse.coo_array])
def test_sparse_data_gives_what_dense_data_gives(blobs, container):
    X, y = np.where(np.abs(blobs[0]) > 0.5, blobs[0], 0), blobs[1]
    dense, thin = small().fit(X, y), small().fit(container(X), y)
    np.testing.assert_allclose(thin.decision_function(container(X)), dense.decision_function(X))


def test_weights_are_repetitions_on_whole_batches(blobs):
    X, y = blobs[0][:40], blobs[1][:40]
    times = np.arange(40) % 4
    weighted = small(batch_size=40).fit(X, y, sample_weight=times)
    repeated = small(batch_size=int(times.sum())).fit(X.repeat(times, 0), y.repeat(times))
    np.testing.assert_allclose(
        weighted.decision_function(X), repeated.decision_function(X), rtol=1e-9
    )
    plain = small(batch_size=40).fit(X, y)
    assert np.abs(plain.decision_function(X) - weighted.decision_function(X)).max() > 1e-3


def test_class_weight_multiplies_sample_weight(blobs):
    X, y = blobs
    each = {"ash": 1.0, "birch": 3.0, "cedar": 0.5}
    by_row = np.array([each[name] for name in y])
    other = 1.0 + np.arange(len(y)) % 2
    for sample_weight in (None, other):
        mixed = small(class_weight=each).fit(X, y, sample_weight=sample_weight)
        product = by_row if sample_weight is None else by_row * other
        plain = small().fit(X, y, sample_weight=product)
        np.testing.assert_array_equal(mixed.predict_proba(X), plain.predict_proba(X))


# -- going on, stopping -------------------------------------------------------------------------


def test_warm_start_goes_on(digits):
    X, y = digits[0], digits[2]
    model = small(warm_start=True, max_iter=10, learning_rate_init=0.01).fit(X, y)
    first = model.loss_curve_
    model.fit(X, y)
    assert model.loss_curve_[:10] == first
    assert model.n_iter_ == 20
    assert model.loss_curve_[10] < 1.1 * first[-1] < 0.5 * first[0]
    assert model.loss_ < 0.9 * first[-1]
    assert [epoch.epoch for epoch in model.history_] == list(range(1, 21))
    with pytest.raises(ValueError, match="64-16-10.*64-8-10"):
        model.set_params(hidden_layer_sizes=8).fit(X, y)


def test_partial_fit_keeps_the_optimiser_even_through_pickle(blobs):
    X, y = blobs
    straight = small().partial_fit(X, y, classes=np.unique(y))
    broken = pickle.loads(pickle.dumps(straight))
    forgetful = deepcopy(straight)
    forgetful.result_.state = None
    for model in (straight, broken, forgetful):
        model.partial_fit(X[:60], y[:60])
    np.testing.assert_array_equal(straight.predict_proba(X), broken.predict_proba(X))
    assert np.abs(straight.predict_proba(X) - forgetful.predict_proba(X)).max() > 1e-6


def test_partial_fit_takes_up_a_changed_method(blobs):
    X, y = blobs
    model = small().partial_fit(X, y, classes=np.unique(y))
    model.set_params(method__weights__learning_rate=0.5).partial_fit(X, y)
    assert model.result_.state.optimizer.param_groups[0]["lr"] == 0.5
    model.set_params(learning_rate_init=0.25).partial_fit(X, y)
    assert model.result_.state.optimizer.param_groups[0]["lr"] == 0.25


def test_early_stopping_keeps_the_weights_with_the_lowest_held_out_loss(digits, monkeypatch):
    X, y = digits[0], digits[2]
    hold_out, parts = MLPClassifier._hold_out, []

    def seen(*args):
        parts.append(hold_out(*args))
        return parts[-1]

    monkeypatch.setattr(MLPClassifier, "_hold_out", seen)
    model = small(early_stopping=True, max_iter=200, n_iter_no_change=3, tol=1e-3).fit(X, y)
    (train, held_out), losses = parts[0], model.history_.column("validation_loss")
    assert model.result_.status == "stopped-early"
    assert model.n_iter_ == len(model.validation_scores_) < 200
    assert log_loss(held_out[1], model.predict_proba(held_out[0])) == pytest.approx(min(losses))
    right = model.score(held_out[0], held_out[1])
    assert right == pytest.approx(model.best_validation_score_)
    assert right == pytest.approx(model.validation_scores_[int(np.argmin(losses))])
    assert model.best_loss_ is None
    assert model.t_ == model.n_iter_ * len(train[0])


def test_training_loss_that_stands_still_ends_training(blobs):
    model = small(max_iter=500, tol=0.5, n_iter_no_change=4).fit(*blobs)
    assert model.result_.status == "stopped-early"
    assert 4 <= model.n_iter_ < 50


@pytest.mark.filterwarnings("default:training ended after max_iter")
def test_the_end_of_max_iter_is_a_warning_of_scikit_learns_kind(blobs):
    with pytest.warns(ConvergenceWarning, match="max_iter=3 epochs.* Raise max_iter"):
        small(max_iter=3).fit(*blobs)
    with warnings.catch_warnings(action="error"):
        small(max_iter=500, tol=0.5, n_iter_no_change=4).fit(*blobs)
        small().partial_fit(*blobs, classes=np.unique(blobs[1]))


def test_callbacks_see_every_epoch_and_may_stop(blobs):
    seen = []
    model = small().fit(*blobs, callbacks=[lambda e: seen.append(e.epoch), lambda e: e.epoch == 5])
    assert seen == [1, 2, 3, 4, 5] and model.n_iter_ == 5


def test_an_interrupted_fit_leaves_a_usable_model(blobs, monkeypatch):
    X, y = blobs
    step, calls = lpom.LPOM.step, []

    def interrupted(*args):
        calls.append(1)
        if len(calls) == 8:
            raise KeyboardInterrupt
        return step(*args)

    monkeypatch.setattr(lpom.LPOM, "step", interrupted)
    with pytest.warns(UserWarning, match="interrupted"):
        model = small().fit(X, y)
    assert model.result_.status == "interrupted"
    assert model.n_iter_ == 2
    assert model.predict(X).shape == y.shape


def test_verbose_prints_a_line_per_epoch(blobs, capsys):
    small(verbose=True, max_iter=3).fit(*blobs)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3
    assert lines[0].startswith("epoch 1: loss ")


# -- parameters ---------------------------------------------------------------------------------


def test_a_grid_search_reaches_the_method_and_the_layers(blobs):
    grid = {"method__mu": [0.01, 20.0], "hidden_layer_sizes": [(4,), 8]}
    search = GridSearchCV(small(max_iter=5), grid, cv=2).fit(*blobs)
    assert len(search.cv_results_["params"]) == 4
    assert search.best_estimator_.method.mu == search.best_params_["method__mu"]
    scores = search.cv_results_["mean_test_score"]
    assert len(set(scores)) > 1


def test_method_parameters_can_be_set_on_a_name():
    model = MLPClassifier()
    assert model.get_params()["method__mu"] == lpom.LPOM().mu
    assert "method__mu" not in model.get_params(deep=False)
    assert model.set_params(method__mu=3.0, max_iter=7).method.mu == 3.0
    assert (model.max_iter, model.get_params()["method__mu"]) == (7, 3.0)
    assert clone(model).method.mu == 3.0
    assert clone(model).method == model.method
    assert (
        model.set_params(method="lpom", method__states__max_sweeps=2).method.states.max_sweeps == 2
    )
    assert model.method.mu == lpom.LPOM().mu
    untouched = MLPClassifier()
    with pytest.raises(ValueError, match="no setting 'nu'"):
        untouched.set_params(method__nu=1)
    assert untouched.method == "lpom"


def test_pipelines_and_cross_validation(blobs):
    X, y = blobs
    pipeline = make_pipeline(StandardScaler(), small(max_iter=60, learning_rate_init=0.02))
    assert cross_val_score(pipeline, X, y, cv=3).mean() > 0.65  # chance is 1/3


def test_same_random_state_same_model_and_global_generators_are_left_alone(blobs):
    X, y = blobs
    torch.manual_seed(0)
    np.random.seed(0)
    before = torch.get_rng_state(), np.random.get_state()[1].copy()
    a, b, c = (small(random_state=seed).fit(X, y).predict_proba(X) for seed in (1, 1, 2))
    np.testing.assert_array_equal(a, b)
    assert np.abs(a - c).max() > 1e-3
    assert torch.equal(torch.get_rng_state(), before[0])
    np.testing.assert_array_equal(np.random.get_state()[1], before[1])


def test_names_of_columns_are_kept_and_checked(blobs):
    X, y = blobs
    table = pd.DataFrame(X, columns=list("abcdef"))
    model = small().fit(table, pd.Series(y))
    assert list(model.feature_names_in_) == list("abcdef")
    assert model.predict(table)[0] in y
    with pytest.raises(ValueError, match="feature names"):
        model.predict(table.rename(columns={"a": "z"}))


@pytest.mark.parametrize("method", lpom.methods.names())
def test_pickles_hold_no_data(blobs, method):
    X, y = np.tile(blobs[0], (40, 1)), np.tile(blobs[1], 40)
    model = small(method=method, max_iter=2, batch_size=len(X)).fit(X, y)
    back = pickle.loads(pickle.dumps(model))
    np.testing.assert_array_equal(back.predict_proba(X), model.predict_proba(X))
    assert len(pickle.dumps(model)) < X.nbytes / 2
    back.partial_fit(X, y)  # and goes on, with variables that start anew


def softsign(z):
    return z / (1 + z.abs())


def adam_with_decay(parameters):
    return torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.1)


@pytest.mark.parametrize(
    "params",
    [
        {"activation": lpom.activations.from_function(softsign, lipschitz=1.0)},
        {"method": lpom.LPOM(weights=lpom.Adaptive(optimizer=adam_with_decay))},
        {"method": lpom.LPOM(weights=lpom.Adaptive(optimizer=torch.optim.RMSprop))},
    ],
)
def test_pickles_hold_functions_of_the_user(blobs, params):
    X, y = blobs
    model = small(**params, max_iter=3).fit(X, y)
    back = pickle.loads(pickle.dumps(model))
    np.testing.assert_array_equal(back.predict_proba(X), model.predict_proba(X))
    np.testing.assert_array_equal(
        back.partial_fit(X, y).coefs_[0], model.partial_fit(X, y).coefs_[0]
    )


# -- bad input ----------------------------------------------------------------------------------


def with_nan(X):
    return np.where(np.arange(X.size).reshape(X.shape) == 5, np.nan, X)


BAD = {
    "NaN": (lambda X, y: (with_nan(X), y), {}, "NaN"),
    "no rows": (lambda X, y: (X[:0], y[:0]), {}, "0 sample"),
    "lengths": (lambda X, y: (X, y[:-1]), {}, "inconsistent numbers of samples"),
    "one class": (lambda X, y: (X, np.full(len(X), "ash")), {}, "one class only, 'ash'"),
    "numbers": (lambda X, y: (X, X[:, 0]), {}, "continuous"),
    "matrix": (lambda X, y: (X, np.arange(480).reshape(240, 2) % 3), {}, "MultiOutputClassifier"),
    "method": (None, {"method": "lpon"}, "did you mean 'lpom'"),
    "activation": (None, {"activation": "rleu"}, "did you mean 'relu'"),
    "loss": (None, {"loss": "hnige"}, "did you mean 'hinge'"),
    "sizes": (None, {"hidden_layer_sizes": (5, 0)}, "integers above 0"),
    "size": (None, {"hidden_layer_sizes": 10.5}, "integers above 0.*got 10.5"),
    "size word": (None, {"hidden_layer_sizes": "10"}, "integers above 0.*got '10'"),
    "rate": (None, {"method": "bcd", "learning_rate_init": 0.1}, "'bcd' has no learning rate"),
    "device": (None, {"device": "abacus"}, "there is no device 'abacus' here"),
    "batch": (None, {"batch_size": 0}, "batch_size, unless 'auto', must be an integer above 0"),
    "batch word": (None, {"batch_size": "all"}, "unless 'auto'"),
    "epochs": (None, {"max_iter": 0}, "max_iter must be an integer"),
    "mu": (None, {"method": lpom.LPOM(mu=-1.0)}, "mu"),
    "mu length": (None, {"method": lpom.LPOM(mu=[1.0])}, "mu"),
    "held out": (None, {"early_stopping": True, "validation_fraction": 0.0}, "between 0 and 1"),
    "diverging": (None, {"learning_rate_init": 1e200}, "NaN or infinite"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_gets_a_sentence_and_leaves_the_model_as_it_was(blobs, case):
    X, y = blobs
    change, params, sentence = BAD[case]
    table = pd.DataFrame(X, columns=list("abcdef"))
    model = small().fit(table, y)
    before, known = model.predict_proba(table), set(vars(model))
    model.set_params(**params)
    with pytest.raises((ValueError, TypeError, lpom.DivergenceError), match=sentence):
        model.fit(*(change(X, y) if change else (X, y)))
    assert set(vars(model)) == known
    np.testing.assert_array_equal(model.predict_proba(table), before)


def test_partial_fit_says_what_it_cannot_do(blobs):
    X, y = blobs
    with pytest.raises(ValueError, match="classes must be passed on the first call"):
        small().partial_fit(X, y)
    with pytest.raises(ValueError, match="cannot stop early"):
        small(early_stopping=True).partial_fit(X, y, classes=np.unique(y))
    with pytest.raises(ValueError, match="all data at once"):
        small(class_weight="balanced").partial_fit(X, y, classes=np.unique(y))
    model = small().partial_fit(X, y, classes=np.unique(y))
    before = model.predict_proba(X)
    with pytest.raises(ValueError, match="'oak'; those were 'ash', 'birch', 'cedar'"):
        model.partial_fit(X, np.where(y == "ash", "oak", y))
    with pytest.raises(ValueError, match="classes cannot change"):
        model.partial_fit(X, y, classes=["ash", "oak"])
    with pytest.raises(ValueError, match="one class label per row"):
        model.partial_fit(X, np.eye(3, dtype=int)[np.arange(240) % 3])
    with pytest.raises(lpom.DivergenceError):
        model.set_params(learning_rate_init=1e200).partial_fit(X, y)
    np.testing.assert_array_equal(model.predict_proba(X), before)
    model.set_params(learning_rate_init=None).partial_fit(X, y)
    assert np.isfinite(model.predict_proba(X)).all()


def test_a_chunk_that_diverges_leaves_weights_optimiser_and_batch_order(blobs, monkeypatch):
    X, y = blobs
    model = small().partial_fit(X, y, classes=np.unique(y))
    twin = deepcopy(model)
    step = lpom.LPOM.step

    def spoiled(self, problem, batch, state):
        outputs = step(self, problem, batch, state)
        problem.graph.parameters[0].data.fill_(torch.nan)
        return outputs

    with monkeypatch.context() as patch, pytest.raises(lpom.DivergenceError):
        patch.setattr(lpom.LPOM, "step", spoiled)
        model.partial_fit(X, y)
    np.testing.assert_array_equal(
        model.partial_fit(X, y).predict_proba(X), twin.partial_fit(X, y).predict_proba(X)
    )


def test_wrong_number_of_columns_and_unfitted(blobs):
    X, y = blobs
    with pytest.raises(NotFittedError):
        small().predict(X)
    with pytest.raises(NotFittedError):
        small().to_torch()
    with pytest.raises(ValueError, match="5 features.*expecting 6"):
        small().fit(X, y).predict(X[:, :5])


def test_balanced_weights_pass_over_a_class_of_weight_zero(blobs):
    X, y = blobs
    names = np.unique(y)
    weight = np.where(y == names[0], 0.0, 1.0)
    balanced = small(class_weight="balanced").fit(X, y, sample_weight=weight)
    plain = small().fit(X, y, sample_weight=weight)  # the other two are balanced as they come
    np.testing.assert_array_equal(balanced.predict_proba(X), plain.predict_proba(X))


@pytest.mark.parametrize("method", [name for name in lpom.methods.names() if name != "lifted"])
def test_partial_fit_on_the_same_data_is_one_run(blobs, method):
    """Variables that belong to the samples go on too, as they do within one call of fit."""
    X, y = blobs
    chosen = lpom.methods.get(method)
    for name in chosen.get_params():
        if name.split("__")[-1] == "schedule":
            chosen = chosen.with_params(**{name: "constant"})
    settings = dict(method=chosen, batch_size=len(X), n_iter_no_change=99)
    whole = small(max_iter=4, **settings).fit(X, y)
    pieces = small(**settings)
    for _ in range(4):
        pieces.partial_fit(X, y, classes=np.unique(y))
    np.testing.assert_allclose(pieces.coefs_[0], whole.coefs_[0], rtol=1e-6, atol=1e-8)


def test_a_failed_partial_fit_leaves_the_variables_of_the_samples(blobs):
    X, y = blobs
    model = small(method="admm").partial_fit(X, y, classes=np.unique(y))
    before = [x.clone() for x in model.result_.state.X]
    with pytest.raises(ValueError):
        model.partial_fit(with_nan(X), y)
    assert all(torch.equal(a, b) for a, b in zip(before, model.result_.state.X, strict=True))


def test_a_regressor_refuses_losses_for_classes(blobs):
    X, _ = blobs
    with pytest.raises(ValueError, match="loss='hinge' is for classes"):
        MLPRegressor(loss="hinge").fit(X, X[:, 0])


def test_a_stopped_fit_goes_on_from_its_checkpoint(blobs, tmp_path, monkeypatch):
    X, y = blobs
    whole = small(early_stopping=True).fit(X, y)
    plan = lpom.Checkpoint(tmp_path, every_minutes=0)
    step, calls = lpom.LPOM.step, []

    def cut(self, *args):
        calls.append(args)
        if len(calls) == 7:
            raise KeyboardInterrupt
        return step(self, *args)

    monkeypatch.setattr(lpom.LPOM, "step", cut)
    model = small(early_stopping=True, checkpoint=plan)
    with pytest.warns(UserWarning, match="interrupted"):
        model.fit(X, y)
    model = clone(model).fit(X, y)
    np.testing.assert_array_equal(model.predict_proba(X), whole.predict_proba(X))
    assert model.loss_curve_ == whole.loss_curve_
    with pytest.raises(ValueError, match="checkpoint needs an integer as random_state"):
        small(checkpoint=tmp_path, random_state=None).fit(X, y)


@pytest.mark.parametrize("name", ["X", "y", "sample_weight"])
def test_masked_values_are_refused(blobs, name):
    X, y = blobs
    given = {"X": X, "y": y, "sample_weight": np.ones(len(y))}
    given[name] = np.ma.masked_array(given[name], mask=np.arange(given[name].size) == 0)
    with pytest.raises(ValueError, match=f"{name} has masked values"):
        MLPClassifier(max_iter=1).fit(**given)


def test_two_classes_have_two_outputs_where_these_are_compared(blobs):
    X, y = blobs
    X, y = X[y != y[0]], y[y != y[0]]
    assert len(set(y)) == 2
    model = small(output_activation="softmax", max_iter=30).fit(X, y)
    assert model.n_outputs_ == 2
    assert model.score(X, y) > 0.75
    with pytest.raises(ValueError, match="one target has one; take 'identity'"):
        small(MLPRegressor, output_activation="softmax").fit(X, X[:, 0])


def test_predictions_far_from_zero_keep_their_digits():
    """float32 has steps of 128 there."""
    X = np.random.default_rng(0).normal(size=(300, 2)).astype(np.float32)
    y = X.astype(np.float64) @ [300.0, 100.0]
    near = small(MLPRegressor, max_iter=50, random_state=0).fit(X, y)
    far = small(MLPRegressor, max_iter=50, random_state=0).fit(X, y + 1.7e9)
    assert near.predict(X).dtype == np.float32
    np.testing.assert_allclose(far.predict(X) - 1.7e9, near.predict(X), atol=1.0)
    huge = small(MLPRegressor, max_iter=5, random_state=0).fit(X, y * 1e47)
    assert np.isfinite(huge.predict(X)).all()


def test_nothing_left_to_train_on_is_said(numbers):
    X, y = numbers
    with pytest.raises(ValueError, match="of 4 gives 4 and 0"):
        small(MLPRegressor, early_stopping=True, validation_fraction=0.9).fit(X[:4], y[:4])


def test_a_column_of_next_to_nothing_is_taken_as_it_is(numbers):
    X, y = numbers
    X = np.column_stack([X, np.full(len(X), 1e-40)]).astype(np.float32)
    X[::2, -1] = 0
    small(MLPRegressor, max_iter=2).fit(X, y)


# -- small tables, columns of any size, monotone functions ----------------------------------------


def test_alpha_is_chosen_by_rows_held_out():
    rng = np.random.default_rng(0)
    X = rng.normal(size=(120, 30))
    y = X[:, 0] + rng.normal(size=120)  # much noise: of 30 columns one tells anything
    plain, chosen = (MLPRegressor(alpha=a, random_state=0).fit(X, y) for a in (0.1, "auto"))
    X_test = rng.normal(size=(1000, 30))
    assert chosen.alpha_ > plain.alpha_ == 0.1
    assert chosen.score(X_test, X_test[:, 0]) > plain.score(X_test, X_test[:, 0])
    again = MLPRegressor(alpha="auto", random_state=0).fit(X, y)
    np.testing.assert_array_equal(again.predict(X), chosen.predict(X))
    one = small(alpha="auto").fit(X[:6], [0, 1, 0, 1, 0, 1])  # too few to choose by
    assert one.alpha_ == 0.1
    with pytest.raises(ValueError, match="alpha"):
        small(alpha="best").fit(X, y > 0)


def test_a_first_epoch_that_stays_the_best_is_said():
    rng = np.random.default_rng(0)
    X, y = rng.normal(size=(300, 40)), rng.normal(size=300)
    model = MLPRegressor(early_stopping=True, batch_size=1, random_state=0)
    with pytest.warns(lpom.ConvergenceWarning, match="first epoch"):
        model.fit(X, y)


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"hidden_layer_sizes": (20, 20), "activation": "tanh"},
        {"method": "straight-through"},
        {"method": lpom.LPOM(weights=lpom.Exact())},
    ],
)
def test_outputs_rise_and_fall_as_asked(params):
    rng = np.random.default_rng(0)
    X = rng.uniform(-2, 2, (300, 3))
    y = np.tanh(2 * X[:, 0]) - X[:, 1] + np.sin(3 * X[:, 2]) + rng.normal(size=300)
    model = small(MLPRegressor, monotonic_cst=[1, -1, 0], **params).fit(X, y)
    X_test = rng.uniform(-2, 2, (50, 3))
    for column, sign in ((0, 1), (1, -1)):
        path = []
        for value in np.linspace(-3, 3, 31):
            X_test[:, column] = value
            path.append(sign * model.predict(X_test))
        assert np.diff(path, axis=0).min() >= -1e-9
    again = pickle.loads(pickle.dumps(model))
    np.testing.assert_array_equal(again.predict(X), model.predict(X))


def test_monotone_functions_may_bend_both_ways_and_go_by_names():
    X = pd.DataFrame({"a": np.linspace(-2, 2, 400), "b": np.zeros(400)})
    y = np.tanh(3 * X["a"])
    model = MLPRegressor(monotonic_cst={"a": 1}, random_state=0).fit(X, y)
    assert model.score(X, y) > 0.9
    wrong = MLPRegressor(monotonic_cst={"a": -1}, random_state=0).fit(X, y)
    assert wrong.score(X, y) < 0.05
    two = small(monotonic_cst={"a": 1}).fit(X, y > 0)
    assert (np.diff(two.predict_proba(X)[:, 1]) >= -1e-9).all()
    for model, words in (
        (small(monotonic_cst=[1, 0]), "two classes"),
        (small(monotonic_cst=[1, 0], method="bcd"), "penalties"),
        (small(monotonic_cst=[2, 0]), "monotonic_cst"),
    ):
        target = np.arange(400) % 3 if words == "two classes" else np.arange(400) % 2
        with pytest.raises(ValueError, match=words):
            model.fit(X.to_numpy(), target)


def test_in_a_pipeline_of_skrub():
    skrub = pytest.importorskip("skrub")
    rng = np.random.default_rng(0)
    X = pd.DataFrame({"size": rng.normal(size=200), "kind": rng.choice(["a", "b"], 200)})
    y = (X["size"] > 0) ^ (X["kind"] == "a")
    model = skrub.tabular_pipeline(MLPClassifier(max_iter=60, learning_rate_init=0.01))
    assert model.fit(X, y).score(X, y) > 0.9
