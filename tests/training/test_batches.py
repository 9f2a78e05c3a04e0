"""What fit() takes beside rows and targets: tuples, dictionaries, losses of one's own."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lpom

X = torch.randn(60, 6, generator=torch.Generator().manual_seed(0))
Y = (X[:, 0] > 0).long() + (X[:, 1] > 0).long()


class Two(nn.Module):
    """A model of two arguments; numbers of the second count where they are not masked."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x, mask):
        x = torch.relu(self.first(x * mask))
        return {"logits": self.last(x)}


def net(kind=Two):
    torch.manual_seed(0)
    return kind()


def plain():
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))


def vector(model):
    return nn.utils.parameters_to_vector(model.parameters()).detach()


@pytest.mark.parametrize("kind", ["tuple", "dict"])
def test_several_arguments_train_as_one_does(kind):
    mask = torch.ones_like(X, dtype=torch.bool)
    rows = (X, mask) if kind == "tuple" else {"x": X, "mask": mask}
    single, several = net(plain), net()
    assert torch.equal(vector(single), vector(several))
    options = {"method": "adam", "epochs": 3, "batch_size": 20, "seed": 0}
    lpom.fit(single, X, Y, **options)
    result = lpom.fit(several, rows, Y, **options)
    torch.testing.assert_close(vector(single), vector(several))
    assert result.history[-1].gaps == ()
    assert lpom.evaluate(several, rows, Y) == pytest.approx(lpom.evaluate(single, X, Y))
    with pytest.raises(lpom.UntrainableError, match="several inputs"):
        lpom.fit(several, rows, Y, diagnostics=True, method="adam")


@pytest.mark.parametrize("kind", ["pairs", "dictionaries"])
def test_loaders_of_several_arguments(kind):
    mask = torch.ones_like(X, dtype=torch.bool)

    def collate(items):
        x, m, y = map(torch.stack, zip(*items, strict=True))
        return ((x, m), y) if kind == "pairs" else {"x": x, "mask": m, "labels": y}

    loader = DataLoader(TensorDataset(X, mask, Y), batch_size=20, collate_fn=collate)
    model, same = net(), net()
    lpom.fit(model, loader, method="adam", epochs=2, seed=0, validation_data=loader)
    for _ in range(2):  # in order, as the loader is
        for k in range(0, 60, 20):
            assert torch.isfinite(same(X[k : k + 20], mask[k : k + 20])["logits"]).all()
    assert lpom.evaluate(model, loader)[0] < lpom.evaluate(same, loader)[0]


def smoothed(outputs, target):
    return F.cross_entropy(outputs, target, label_smoothing=0.1)


LOSSES = {
    "a function": (smoothed, smoothed),
    "rows": (lambda o, t: F.cross_entropy(o, t, reduction="none"), F.cross_entropy),
    "a module": (nn.CrossEntropyLoss(), F.cross_entropy),
}


@pytest.mark.parametrize("name", LOSSES)
def test_a_function_as_the_loss_is_that_of_a_loop_of_torch(name):
    loss, reference = LOSSES[name]
    model, loop = net(plain).double(), net(plain).double()
    result = lpom.fit(
        model, X, Y, method=lpom.methods.get("sgd", learning_rate=0.1, schedule="constant"),
        loss=loss, epochs=5, batch_size=60, seed=0,
    )  # fmt: skip
    values = []
    for _ in range(5):
        value = reference(loop(X.double()), Y)
        values.append(value.item())
        loop.zero_grad()
        value.backward()
        with torch.no_grad():
            for parameter in loop.parameters():
                parameter -= 0.1 * parameter.grad
    torch.testing.assert_close(vector(model), vector(loop))
    assert result.history.column("loss") == pytest.approx(values)
    right = float((loop(X.double()).argmax(1) == Y).double().mean())
    assert lpom.evaluate(model, X, Y, loss=loss)[1] == pytest.approx(right)


def test_weights_of_samples_need_a_loss_of_each_row():
    weight = torch.rand(60)
    rows = LOSSES["rows"][0]
    model, known = net(plain), net(plain)
    options = {"method": "adam", "epochs": 2, "sample_weight": weight, "seed": 0}
    lpom.fit(model, X, Y, loss=rows, **options)
    lpom.fit(known, X, Y, loss="cross-entropy", **options)
    torch.testing.assert_close(vector(model), vector(known))
    with pytest.raises(ValueError, match="sample_weight"):
        lpom.fit(model, X, Y, loss=F.cross_entropy, **options)


def test_outputs_of_any_shape_with_a_function():
    """Segmentation: a class for every pixel, accuracy as the share of pixels."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 2, 1))
    pictures = torch.randn(30, 1, 6, 6)
    y = (pictures[:, 0] > 0).long()
    with pytest.raises(ValueError, match="loss as a function"):
        lpom.fit(model, pictures, y)
    options = {"method": "adam", "epochs": 40, "batch_size": 10, "seed": 0}
    result = lpom.fit(model, pictures, y, loss=F.cross_entropy, **options)
    share = float((model(pictures).argmax(1) == y).double().mean())
    assert lpom.evaluate(model, pictures, y, loss=F.cross_entropy)[1] == pytest.approx(share)
    assert result.history.metric == "accuracy" and share > 0.8


def test_a_score_that_no_one_can_tell_is_the_loss():
    def far(outputs, target):
        return (outputs.sum(1) - target).square()

    result = lpom.fit(net(plain), X, X[:, 0], loss=far, method="adam", epochs=2, seed=0)
    assert result.history.metric == "-loss"
    assert result.history[-1].score == -result.history[-1].loss


def test_a_loss_of_a_shape_of_its_own_is_refused():
    with pytest.raises(ValueError, match="one number for the batch"):
        lpom.fit(net(plain), X, Y, loss=lambda o, t: o[:7], method="adam")


@pytest.fixture(scope="module")
def tiny():
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=11, hidden_size=16, intermediate_size=24, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=16,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def sentences():
    """Counting upwards from anywhere, padded on the left."""
    rows = []
    for start in range(40):
        pad = start % 3
        ids = [0] * pad + [(start + k) % 11 for k in range(8 - pad)]
        mask = [0] * pad + [1] * (8 - pad)
        labels = [-100] * pad + ids[pad:]
        rows.append(
            {
                "input_ids": torch.tensor(ids),
                "attention_mask": torch.tensor(mask),
                "labels": torch.tensor(labels),
            }
        )
    return rows


@pytest.mark.parametrize("method", ["adam", "lpom"])
def test_a_model_of_transformers_trains_on_its_dictionaries(tiny, method, tmp_path):
    from copy import deepcopy

    loader = DataLoader(sentences(), batch_size=10, shuffle=True)
    whole, cut = deepcopy(tiny), deepcopy(tiny)
    options = {"method": method, "epochs": 6, "seed": 0, "validation_data": loader}
    before = lpom.evaluate(whole, loader)
    result = lpom.fit(whole, loader, **options)
    assert result.history.metric == "-loss" and result.task.loss.name == "model"
    assert result.history[-1].loss < 0.9 * before[0]

    def crash(epoch):
        if epoch.epoch == 3:
            raise ArithmeticError

    plan = lpom.Checkpoint(tmp_path, every_epochs=1)
    with pytest.raises(ArithmeticError):
        lpom.fit(cut, loader, checkpoint=plan, callbacks=crash, **options)
    lpom.fit(cut, loader, checkpoint=plan, **options)
    assert torch.equal(vector(whole), vector(cut))


def test_the_gradient_of_a_models_own_loss_is_that_of_a_plain_loop(tiny):
    from copy import deepcopy

    model, loop = deepcopy(tiny), deepcopy(tiny)
    batch = {name: torch.stack([row[name] for row in sentences()]) for name in sentences()[0]}
    method = lpom.methods.get("sgd", learning_rate=0.1, schedule="constant")
    lpom.fit(model, batch, method=method, epochs=1, batch_size=40, seed=0, loss="model")
    loop.train()
    loop(**batch).loss.backward()
    with torch.no_grad():
        for parameter in loop.parameters():
            parameter -= 0.1 * parameter.grad
    torch.testing.assert_close(vector(model), vector(loop), rtol=1e-5, atol=1e-6)


def test_a_model_without_a_loss_of_its_own_is_told_so():
    with pytest.raises(ValueError, match="loss='model'"):
        lpom.fit(net(plain), X, Y, loss="model")
