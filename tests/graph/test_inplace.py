"""Models as people write them: options of forward, tensors changed in place, numbers drawn."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import lpom
from lpom import LPOM, Adaptive, UntrainableError
from lpom.exceptions import DataError
from lpom.graph import trace

X = torch.rand(40, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
Y = torch.arange(40) % 3


class Net(nn.Module):
    """Layers from 6 inputs over 5 units to 3 outputs, and one past them."""

    def __init__(self):
        super().__init__()
        self.a, self.inner, self.b, self.past = (
            nn.Linear(6, 5),
            nn.Linear(5, 5),
            nn.Linear(5, 3),
            nn.Linear(6, 3),
        )
        self.relu = nn.ReLU(inplace=True)
        self.register_buffer("mean", torch.zeros(5))


def net(forward):
    torch.manual_seed(0)
    return type("Net", (Net,), {"forward": forward})().double()


def step(model, X=X):
    """One full batch of gradient descent, which at this mu is that of back-propagation."""
    method = LPOM(mu=1e7, weights=Adaptive("sgd", 0.1, "constant"))
    lpom.fit(model, X, Y, method=method, epochs=1, batch_size=40, diagnostics=False, progress=False)


def check(model, X=X):
    reference = copy.deepcopy(model)
    step(model, X)
    F.cross_entropy(reference(X), Y).backward()
    torch.optim.SGD(reference.parameters(), 0.1).step()
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(tensor, reference.state_dict()[name], rtol=1e-6, atol=1e-8)


def an_option(self, x, noise=None):
    h = self.a(x)
    if noise is not None:
        h = 0 * h
    return self.b(torch.tanh(h))


def many_options(self, x, h=None, *more, mask=None, whole=False, **others):
    if h is None:
        h = x.new_zeros(x.shape[0], 5)
    h = torch.tanh(self.a(x) + h)
    if mask is not None:
        h = h.masked_fill(mask == 0, 0.0)
    return (self.b(h), h) if whole else self.b(h)


def by_name_only(self, *, x):
    return self.past(x)


def a_statement(self, x):
    h = self.a(x)
    h.add_(1.0)
    return self.b(torch.tanh(h))


def another_name(self, x):
    h = self.a(x)
    before = h
    h = self.relu(h)
    return self.b(torch.tanh(before + self.inner(h)))


def a_function(self, x):
    h = self.a(x)
    F.relu_(h)
    return self.b(self.inner(h).tanh_())


def a_fresh_tensor(self, x):
    h = self.a(x)
    return self.b(torch.tanh(h + 0 * h.new_empty(h.shape).normal_()))


def a_skip_from_the_data(self, x):
    return self.b(torch.relu(self.a(x))) + self.past(x)


def the_data_itself(self, x):
    return self.b(torch.relu(self.a(x))) + x[:, :3]


def a_square(self, x):
    h = self.a(x)
    return self.b(h * h)


FOLLOWED = [an_option, many_options, a_statement, another_name, a_function, a_fresh_tensor]
FOLLOWED += [a_skip_from_the_data, the_data_itself, a_square]


@pytest.mark.parametrize("forward", FOLLOWED, ids=lambda forward: forward.__name__)
def test_it_is_trained_as_by_back_propagation(forward):
    check(net(forward))


def test_what_has_a_name_only_is_given_by_it():
    model = net(by_name_only)
    _, states = (graph := trace(model, X)).feed_forward(X)
    torch.testing.assert_close(states[graph.output], model(x=X).detach())


def a_piece(self, x):
    h = self.a(x)
    h[:, :2].mul_(2)
    return self.b(torch.tanh(h))


def a_view_of_it(self, x):
    h = self.a(x)
    part = h[:, :3]
    h.mul_(2)
    return part + self.b(h)


def a_running_mean(self, x):
    h = self.a(x)
    with torch.no_grad():
        self.mean.add_(h.mean(0), alpha=0.1)
    return self.b(torch.tanh(h - self.mean))


def a_counter(self, x):
    self.mean += 1
    return self.past(x)


def an_addition_to_two_names(self, x):
    h = self.a(x)
    other = h
    h += 1
    return self.b(torch.tanh(other + h))


@pytest.mark.parametrize(
    ("forward", "sentence"),
    [
        (a_piece, "another view is read later"),
        (a_view_of_it, "another view is read later"),
        (a_running_mean, "changes a tensor of the model itself"),
        (a_counter, "changes its buffer 'mean' by itself"),
        (an_addition_to_two_names, "gives other outputs than the model itself"),
    ],
    ids=lambda case: getattr(case, "__name__", ""),
)
def test_what_can_not_be_followed_is_refused(forward, sentence):
    model = net(forward)
    with pytest.raises(UntrainableError, match=sentence):
        trace(model, X)
    assert not model.mean.any()


def test_what_is_drawn_is_drawn_at_every_step():
    """With one mask for all steps some columns would never move."""

    def masked(self, x):
        return self.past(x * torch.bernoulli(torch.full((6,), 0.5)))

    model = net(masked)
    before = model.past.weight.detach().clone()
    lpom.fit(model, X, Y, epochs=5, batch_size=4, seed=0, progress=False)
    assert (model.past.weight != before).any(0).all()


def test_layers_in_evaluation_stay_there():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 3)).double()
    model[1].requires_grad_(False).eval()
    with torch.no_grad():
        model[1].running_mean.uniform_()
    check(model)
    assert model.training and not model[1].training
    model.eval()  # of all: as after measuring, not a wish
    means = model[1].running_mean.clone()
    step(model)
    assert not torch.equal(model[1].running_mean, means)
    assert not model.training


class Mixed(nn.Module):
    """A category and numbers, in one table."""

    def __init__(self):
        super().__init__()
        self.kind, self.rest, self.out = nn.Embedding(9, 4), nn.Linear(5, 4), nn.Linear(8, 3)

    def forward(self, x):
        both = [self.kind(x[:, 5].long()), self.rest(x[:, :5])]
        return self.out(torch.relu(torch.cat(both, 1)))


def test_numbers_beside_an_embedding_keep_their_digits():
    torch.manual_seed(0)
    table = X.clone()
    table[:, 5] = torch.arange(40) % 9
    check(Mixed().double(), table)


def test_an_embedding_of_all_takes_whole_numbers():
    model = nn.Sequential(nn.Embedding(9, 4), nn.Flatten(), nn.Linear(24, 3))
    with pytest.raises(DataError, match=r"X must hold whole numbers; got 0\.\d+"):
        lpom.fit(model, X, Y, epochs=1, progress=False)
    lpom.fit(model, (8 * X).floor(), Y, epochs=1, progress=False)


def test_an_embedding_scaled_by_frequency():
    class Counted(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Embedding(9, 4, scale_grad_by_freq=True)
            self.out = nn.Linear(4, 3)

        def forward(self, x):
            return self.out(torch.tanh(self.table(x).sum(1)))

    torch.manual_seed(0)
    check(Counted().double(), (8 * X).floor().long())


def test_spectral_norm_moves_as_often_as_it_is_used():
    torch.manual_seed(0)
    layer = nn.utils.parametrizations.spectral_norm(nn.Linear(6, 5))
    model = nn.Sequential(layer, nn.Tanh(), nn.Linear(5, 3)).double()
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    lpom.evaluate(model, X, Y)
    for name, buffer in model.named_buffers():
        assert torch.equal(buffer, before[name])
    check(model)
