"""Losses: values against torch, gradients against autograd, Lipschitz constants, codings."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lpom import losses
from lpom.exceptions import DataError
from lpom.losses import BinaryCrossEntropy, CrossEntropy, Hinge, Huber, Loss, Squared

CASES = [
    *map(losses.get, losses.names()),
    *(CrossEntropy(label_smoothing=0.1), Hinge(0.0), Hinge(0.1), Hinge(2.0), Huber(0.3)),
]
SMOOTH = [case for case in CASES if math.isfinite(case.lipschitz)]


def each(cases: list[Loss]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("loss", cases, ids=repr)


def sample(loss: Loss, seed: int, m: int = 20, k: int = 4) -> tuple[Tensor, Tensor, Tensor]:
    """Two batches of outputs and a target, soft where the loss allows it."""
    generator = torch.Generator().manual_seed(seed)
    x, y = 2 * torch.randn(2, m, k, generator=generator, dtype=torch.float64)
    labels = torch.randint(0, k, (m,), generator=generator)
    target = loss.encode(labels, k, k, torch.float64)
    if isinstance(loss, CrossEntropy | BinaryCrossEntropy):
        target[::2] = torch.rand(target[::2].shape, generator=generator, dtype=torch.float64)
        target[::2] /= target[::2].sum(1, keepdim=True)
    return x, y, target


seeds = st.integers(0, 2**31)


@each(CASES)
@given(seed=seeds)
@settings(max_examples=12, deadline=None)
def test_gradient_is_that_of_autograd(loss, seed):
    x, _, target = sample(loss, seed)
    x.requires_grad_()
    value = loss.value(x, target)
    assert value.shape == (20,)
    (expected,) = torch.autograd.grad(value.sum(), x)
    torch.testing.assert_close(loss.gradient(x, target), expected)


@each(CASES)
@given(seed=seeds, t=st.floats(0, 1))
@settings(max_examples=12, deadline=None)
def test_loss_is_convex(loss, seed, t):
    x, y, target = sample(loss, seed)
    middle = loss.value(t * x + (1 - t) * y, target)
    chord = t * loss.value(x, target) + (1 - t) * loss.value(y, target)
    assert (middle <= chord + 1e-12).all()
    tangent = loss.value(x, target) + (loss.gradient(x, target) * (y - x)).sum(1)
    assert (loss.value(y, target) >= tangent - 1e-12).all()


def hessian(loss: Loss, x: Tensor, target: Tensor) -> Tensor:
    return torch.autograd.functional.hessian(
        lambda row: loss.value(row[None], target[None]).sum(), x
    )


@each(SMOOTH)
@given(seed=seeds)
@settings(max_examples=8, deadline=None)
def test_lipschitz_bounds_the_hessian(loss, seed):
    x, _, target = sample(loss, seed, m=2)
    for row, wanted in zip(x, target, strict=True):
        H = hessian(loss, row, wanted)
        assert torch.linalg.matrix_norm(H, 2) <= loss.lipschitz * (1 + 1e-9)
        assert H.abs().sum(1).max() <= loss.lipschitz * (1 + 1e-9)


@each(SMOOTH)
def test_lipschitz_is_attained(loss):
    # Undecided between two outputs; for the hinge, half-way up its rounded corner.
    x = torch.tensor([0.0, 0.0, -30.0], dtype=torch.float64)
    target = loss.encode(torch.tensor([0]), 3, 3, torch.float64)[0]
    if isinstance(loss, Hinge):
        x[0] = 1 - loss.smoothing / 2
    if isinstance(loss, Huber):
        x[0] = 1 - loss.delta / 2
    H = hessian(loss, x, target)
    assert torch.linalg.matrix_norm(H, 2) == pytest.approx(loss.lipschitz, rel=1e-6)
    assert H.abs().sum(1).max() == pytest.approx(loss.lipschitz, rel=1e-6)


@each(SMOOTH)
@given(seed=seeds)
@settings(max_examples=12, deadline=None)
def test_gradient_is_lipschitz(loss, seed):
    x, y, target = sample(loss, seed)
    moved = (loss.gradient(x, target) - loss.gradient(y, target)).norm(dim=1)
    assert (moved <= loss.lipschitz * (x - y).norm(dim=1) + 1e-12).all()


def test_values_are_those_of_torch():
    none = {"reduction": "none"}
    for loss, expected in [
        (Squared(), lambda x, t: F.mse_loss(x, t, reduction="none").sum(1) / 2),
        (CrossEntropy(), lambda x, t: F.cross_entropy(x, t, reduction="none")),
        (CrossEntropy(0.2), lambda x, t: F.cross_entropy(x, t, label_smoothing=0.2, **none)),
        (
            BinaryCrossEntropy(),
            lambda x, t: F.binary_cross_entropy_with_logits(x, t, **none).sum(1),
        ),
        (Huber(0.3), lambda x, t: F.huber_loss(x, t, reduction="none", delta=0.3).sum(1)),
        (Hinge(0.0), lambda x, t: F.relu(1 - t * x).sum(1)),
    ]:
        x, _, target = sample(loss, seed=1)
        torch.testing.assert_close(loss.value(x, target), expected(x, target))


@pytest.mark.parametrize("classes", [2, 15, 16, 40])
def test_cross_entropy_of_few_and_many_classes(classes):
    """Few classes take another way through the memory."""
    generator = torch.Generator().manual_seed(classes)
    x = torch.randn(9, classes, generator=generator, dtype=torch.float64).requires_grad_()
    labels = torch.randint(0, classes, (9,), generator=generator)
    loss = CrossEntropy()
    target = loss.encode(labels, classes, classes, torch.float64)
    expected = F.cross_entropy(x, labels, reduction="none")
    (gradient,) = torch.autograd.grad(expected.sum(), x)
    torch.testing.assert_close(loss.value(x, target), expected, atol=1e-14, rtol=1e-14)
    torch.testing.assert_close(loss.gradient(x, target), gradient, atol=1e-14, rtol=1e-14)


@pytest.mark.parametrize("loss", [CrossEntropy(), BinaryCrossEntropy()], ids=repr)
def test_large_logits_do_not_overflow(loss):
    x, target = torch.tensor([[1e4, -1e4]]), torch.tensor([[0.0, 1.0]])
    assert float(loss.value(x, target)) == 2e4
    assert loss.gradient(x, target).tolist() == [[1, -1]]


@given(seed=seeds, s=st.floats(1e-6, 1.0))
@settings(max_examples=12, deadline=None)
def test_smoothed_hinge_tends_to_the_hinge(seed, s):
    x, _, target = sample(Hinge(), seed)
    lost = Hinge(0.0).value(x, target) - Hinge(s).value(x, target)
    assert (lost >= -1e-12).all() and (lost <= 4 * s / 2 + 1e-12).all()  # s / 2 an output


def test_values_of_the_smoothed_hinge():
    x = torch.tensor([[2.0], [1.0], [0.75], [0.5], [0.0]])
    value = Hinge(0.5).value(x, torch.ones_like(x))
    assert value.tolist() == [0, 0, 0.0625, 0.25, 0.75]


def test_one_hot_and_signed_codings():
    labels = torch.tensor([2, 0])
    for loss in (Squared(), Huber(), CrossEntropy(), BinaryCrossEntropy()):
        assert loss.encode(labels, 3, 3).tolist() == [[0, 0, 1], [1, 0, 0]]
    assert Hinge().encode(labels, 3, 3).tolist() == [[-1, -1, 1], [1, -1, -1]]
    assert Squared().encode(labels, 3, 3).dtype == torch.get_default_dtype()
    assert Squared().encode(labels, 3, 3, torch.float64).dtype == torch.float64


def test_two_classes_on_one_output():
    labels = torch.tensor([1, 0])
    for loss in (Squared(), Huber(), BinaryCrossEntropy()):
        assert loss.encode(labels, 2, 1).tolist() == [[1], [0]]
    assert Hinge().encode(labels, 2, 1).tolist() == [[1], [-1]]
    with pytest.raises(DataError, match="binary-cross-entropy"):
        CrossEntropy().encode(labels, 2, 1)


def test_multi_label_codings():
    Y = torch.tensor([[1, 1, 0], [0, 0, 0]])
    assert BinaryCrossEntropy().encode_indicator(Y).tolist() == [[1, 1, 0], [0, 0, 0]]
    assert Hinge().encode_indicator(Y.bool()).tolist() == [[1, 1, -1], [-1, -1, -1]]
    with pytest.raises(DataError, match="multi-label.*'binary-cross-entropy'"):
        CrossEntropy().encode_indicator(Y)
    with pytest.raises(DataError, match="zeros and ones"):
        Squared().encode_indicator(2 * Y)


@pytest.mark.parametrize(
    ("labels", "n_classes", "n_outputs", "message"),
    [
        ([0, 3], 3, 3, r"0 \.\. 2, got 0 \.\. 3"),
        ([-1, 1], 3, 3, r"got -1 \.\. 1"),
        ([0.0, 1.0], 2, 2, "integers"),
        ([[0, 1]], 2, 2, r"shape \(1, 2\)"),
        ([0, 1], 3, 1, "3 classes need 3 outputs, got 1"),
        ([0, 1], 2, 3, r"2 classes need 2 \(or 1\) outputs, got 3"),
    ],
)
def test_bad_labels_are_refused(labels, n_classes, n_outputs, message):
    with pytest.raises(DataError, match=message):
        Squared().encode(torch.tensor(labels), n_classes, n_outputs)


@each(CASES)
def test_the_threshold_parts_yes_from_no(loss):
    """On one output for two classes, both answers cost the same exactly at the threshold."""
    if isinstance(loss, CrossEntropy):
        pytest.skip("needs one output per class")
    no, yes = loss.encode(torch.tensor([0, 1]), 2, 1, torch.float64)[:, None]
    x = torch.tensor([[loss.threshold]], dtype=torch.float64)
    torch.testing.assert_close(loss.value(x, yes), loss.value(x, no))
    assert loss.value(x + 0.1, yes) < loss.value(x + 0.1, no)
    assert loss.probabilities(x).item() == 0.5


def test_probabilities():
    x = torch.tensor([[-3.0, 0.25, 3.0]])
    assert Squared().probabilities(x).tolist() == [[0, 0.25, 1]]
    assert Huber().probabilities(x).tolist() == [[0, 0.25, 1]]
    assert Hinge().probabilities(x).tolist() == [[0, 0.625, 1]]
    torch.testing.assert_close(BinaryCrossEntropy().probabilities(x), torch.sigmoid(x))
    torch.testing.assert_close(CrossEntropy().probabilities(x), F.softmax(x, 1))


@each(CASES)
def test_params_round_trip(loss):
    again = losses.get(loss.name, **loss.params())
    assert again == loss and hash(again) == hash(loss)
    assert losses.get(loss) is loss


def test_get_knows_aliases_and_helps_with_a_wrong_name():
    assert losses.get("mse") == losses.get("squared_error") == Squared()
    assert losses.get("log_loss") == losses.get("cross_entropy") == CrossEntropy()
    assert losses.get("bce") == losses.get("Binary_Cross_Entropy") == BinaryCrossEntropy()
    with pytest.raises(ValueError, match="unknown loss 'hubber'; did you mean 'huber'"):
        losses.get("hubber")
    with pytest.raises(ValueError, match="'huber' has no setting 'width'; it has delta"):
        losses.get("huber", width=1)
    with pytest.raises(TypeError, match="already has its own"):
        losses.get(Huber(), delta=2.0)
    with pytest.raises(TypeError, match="name or an instance of Loss"):
        losses.get(3)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "params"),
    [("hinge", {"smoothing": -1.0}), ("huber", {"delta": 0.0}), ("huber", {"delta": math.nan})],
)
def test_bad_parameters_are_refused(name, params):
    with pytest.raises(ValueError, match=f"{name} must be"):
        losses.get(name, **params)


@pytest.mark.parametrize("strength", [1e-4, 1e-2, 1.0, 100.0])
@pytest.mark.parametrize("lower", [-math.inf, 0.0])
@pytest.mark.parametrize("name", ["cross-entropy", "binary-cross-entropy", "huber", "squared"])
def test_the_proximal_step_meets_its_optimality_condition(name, lower, strength):
    loss = losses.get(name)
    torch.manual_seed(0)
    v = 3 * torch.randn(20, 5, dtype=torch.float64)
    target = torch.nn.functional.one_hot(torch.arange(20) % 5).double()
    x = loss.prox(v, target, strength, lower)
    slope = loss.gradient(x, target) + strength * (x - v)
    assert bool((x >= lower).all())
    assert slope[x > lower].abs().max() < 1e-12 * max(1.0, strength)
    assert slope.min() > -1e-12 * max(1.0, strength)  # at the bound it points outwards


def test_steps_that_do_not_count_are_not_smoothed():
    loss = CrossEntropy(label_smoothing=0.3)
    x = torch.randn(2, 3, 4, dtype=torch.float64)
    labels = torch.tensor([[0, 1, -100], [3, -100, -100]])
    flat = labels.flatten().clamp(min=0)
    target = loss.left_out(loss.encode(flat, 4, 4, torch.float64), labels.flatten() < 0)
    target = target.unflatten(0, (2, 3))
    expected = F.cross_entropy(
        x.transpose(1, 2), labels, reduction="none", label_smoothing=0.3, ignore_index=-100
    )
    torch.testing.assert_close(loss.value(x, target), expected)
    assert (loss.gradient(x, target)[labels < 0] == 0).all()


def test_a_share_of_labels_that_is_none_is_refused():
    with pytest.raises(ValueError, match="share from 0 to below 1, got 1.5"):
        CrossEntropy(label_smoothing=1.5)
