"""What targets mean, and how outputs are judged: against scikit-learn."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sklearn.metrics import accuracy_score, r2_score

from lpom import activations
from lpom.training.score import Score
from lpom.training.task import Task


@pytest.mark.parametrize(
    ("y", "n_outputs", "kind", "loss"),
    [
        ([0, 1, 2], 3, "classes", "cross-entropy"),
        ([0, 1, 1], 1, "classes", "binary-cross-entropy"),
        ([True, False], 2, "classes", "cross-entropy"),
        ([[0, 1], [1, 1]], 2, "labels", "binary-cross-entropy"),
        ([0.5, 1.0], 1, "numbers", "squared"),
    ],
)
def test_the_task_follows_the_targets(y, n_outputs, kind, loss):
    task = Task.infer(y, n_outputs)
    assert (task.kind, task.loss.name) == (kind, loss)
    assert task.target(y).shape == (len(y), n_outputs)


@pytest.mark.parametrize("weighted", [False, True])
def test_scores_are_scikit_learns(weighted):
    rng = np.random.default_rng(0)
    weight = rng.integers(1, 4, 60).astype(float) if weighted else None
    y, x = rng.integers(0, 3, 60), rng.standard_normal((60, 3))
    assert measured(Task.infer(y, 3), x, y, weight).score == pytest.approx(
        accuracy_score(y, x.argmax(1), sample_weight=weight)
    )
    Y = rng.integers(0, 2, (60, 3))
    assert measured(Task.infer(Y, 3), x, Y, weight).score == pytest.approx(
        accuracy_score(Y, x > 0, sample_weight=weight)
    )
    T = rng.standard_normal((60, 3))
    assert measured(Task.infer(T, 3), T + 0.3 * x, T, weight).score == pytest.approx(
        r2_score(T, T + 0.3 * x, sample_weight=weight)
    )


def measured(task, x, y, weight=None):
    """In three batches, as the loop does it."""
    score, target = Score(task), task.target(y).double()
    for rows in np.array_split(np.arange(len(x)), 3):
        part = None if weight is None else torch.as_tensor(weight[rows])
        score.add(torch.as_tensor(x[rows]), target[rows], part)
    score.settle()
    return score


def test_constant_outputs_are_found():
    task = Task.infer([0, 1], 2)
    score = Score(task)
    score.add(torch.tensor([[0.0, 1.0], [0.0, 2.0]]), task.target([0, 1]))
    score.settle()
    assert score.constant_outputs() == [0]


def test_labels_must_be_zero_or_one():
    with pytest.raises(ValueError, match="must be 0 or 1"):
        Task.infer([[0, 2]], 2).target([[0, 2]])


@pytest.mark.parametrize("mean", [1e4, 1e6])
def test_r2_of_numbers_far_from_zero(mean):
    y = torch.as_tensor(mean + np.random.default_rng(0).standard_normal((1000, 1))).float()
    score = Score(Task.infer(y, 1))
    guess = y.double().mean().float().expand_as(y)
    score.add(guess, y)
    score.settle()
    assert score.score == pytest.approx(r2_score(y.double(), guess.double()), abs=1e-3)


@pytest.mark.parametrize(
    ("output", "n_outputs", "y", "loss"),
    [
        ("sigmoid", 1, [0, 1], "squared"),
        ("sigmoid", 3, [0, 1, 2], "squared"),
        ("relu", 1, [0, 1], "squared"),
        ("relu", 3, [0, 1, 2], "cross-entropy"),  # a softmax of numbers of one sign will do
        ("relu", 2, [[0, 1]], "squared"),
        ("leaky_relu", 1, [0, 1], "binary-cross-entropy"),
        ("identity", 2, [[0, 1]], "binary-cross-entropy"),
        ("tanh", 1, [0.5, 0.1], "squared"),
    ],
)
def test_the_loss_goes_with_the_output_activation(output, n_outputs, y, loss):
    activation = activations.get(output)
    assert Task.infer(y, n_outputs, output=activation).loss.name == loss
    if loss == "squared" and not isinstance(y[0], float):
        with pytest.raises(ValueError, match=f"either sign.*{output} gives.*loss='squared'"):
            Task.infer(y, n_outputs, "bce", activation)


def test_each_loss_asks_its_own_of_the_output():
    relu, sigmoid, tanh = map(activations.get, ("relu", "sigmoid", "tanh"))
    Task.infer([[0.3, 0.7]], 2, "cross-entropy", relu)
    Task.infer([0, 1], 1, "hinge", tanh)
    for loss, output in (("bce", relu), ("hinge", sigmoid), ("cross-entropy", tanh)):
        with pytest.raises(ValueError, match="needs outputs of either sign"):
            Task.infer([0, 1, 2], 3, loss, output)


@pytest.mark.parametrize(
    ("loss", "y", "outputs"),
    [
        ("bce", [0.0, 1.0, 1.0, 0.0], [[-1.0], [2.0], [-0.5], [0.1]]),
        ("bce", [0.1, 0.9, 0.6, 0.4], [[-1.0], [2.0], [-0.5], [0.1]]),
        ("hinge", [-1.0, 1.0, 1.0, -1.0], [[-1.0], [2.0], [-0.5], [0.1]]),
        (
            "cross-entropy",
            [[1.0, 0.0], [0.3, 0.7], [0.0, 1.0], [0.6, 0.4]],
            [[2.0, 1.0], [0.0, 3.0], [1.0, 0.0], [0.0, 1.0]],
        ),
    ],
)
def test_floats_for_a_loss_of_classes_are_scored_by_accuracy(loss, y, outputs):
    task = Task.infer(torch.tensor(y), len(outputs[0]), loss)
    assert (task.kind, task.metric) == ("coded", "accuracy")
    assert measured(task, torch.tensor(outputs), torch.tensor(y)).score == 0.5


@pytest.mark.parametrize("y", [[0, 2, 1, 0], [[0.5], [2.0], [-1.0], [0.1]]])
def test_a_score_goes_on_from_what_it_wrote(y):
    """Bit for bit: a checkpoint between two batches must change nothing."""
    outputs = torch.randn(4, 3 if isinstance(y[0], int) else 1)
    task = Task.infer(torch.tensor(y), outputs.shape[1])
    target, weight = task.target(torch.tensor(y)), torch.rand(4)
    whole, begun, rest = Score(task), Score(task), Score(task)
    for score, rows in ((whole, slice(0, 3)), (begun, slice(0, 3))):
        score.add(outputs[rows], target[rows], weight[rows])
    rest.load_state_dict(begun.state_dict())
    for score in (whole, rest):
        score.add(outputs[3:], target[3:])
        score.settle()
    assert (whole.loss, whole.score) == (rest.loss, rest.score)
