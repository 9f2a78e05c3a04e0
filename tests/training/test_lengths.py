"""Models that pack their sequences: ``fit`` takes x and lengths, or packed sequences."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import rnn
from torch.nn.utils.rnn import pack_padded_sequence, pack_sequence, pad_packed_sequence
from torch.utils.data import DataLoader

import lpom
from lpom.exceptions import DataError, UntrainableError
from lpom.methods import Problem
from lpom.states import States
from lpom.training.signature import Signature
from lpom.training.sources import Arrays
from lpom.training.tasks import Task

LENGTHS = (2, 4, 1, 3)
LAYERS = [
    pytest.param(
        kind,
        {
            "bidirectional": both,
            "num_layers": 1 + (both and kind is nn.LSTM),
            "batch_first": not both,
        },
    )
    for kind, both in itertools.product((nn.RNN, nn.LSTM, nn.GRU), (False, True))
]


class Reader(nn.Module):
    """A class for a sequence, from what is left at its end, or one at every step."""

    def __init__(self, kind: type[nn.RNNBase], every_step: bool, **options: Any) -> None:
        super().__init__()
        self.every_step, self.both = every_step, options.get("bidirectional", False)
        self.read, self.say = kind(3, 5, **options), nn.Linear(5 * (1 + self.both), 4)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        return self.tell(
            pack_padded_sequence(x, lengths.cpu(), batch_first=True, enforce_sorted=False)
        )

    def tell(self, packed: Any) -> Tensor:
        outputs, end = self.read(packed)
        if self.every_step:
            return self.say(pad_packed_sequence(outputs, batch_first=True)[0])
        end = end[0] if isinstance(end, tuple) else end
        return self.say(torch.cat([end[-2], end[-1]], -1) if self.both else end[-1])


class OfPacked(Reader):
    def forward(self, packed: Any) -> Tensor:
        return self.tell(packed)


def method(**options: Any) -> lpom.LPOM:
    weights = lpom.Adaptive(optimizer="sgd", learning_rate=0.1, schedule="constant")
    return lpom.LPOM(mu=2.0, weights=weights, **options)


def data(every_step: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Sequences with something after their ends, lengths, and classes; -100 after the ends."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(4, 4, 3, generator=generator, dtype=torch.float64)
    lengths = torch.tensor(LENGTHS)
    y = torch.randint(0, 4, (4, 4) if every_step else (4,), generator=generator)
    if every_step:
        y[torch.arange(4) >= lengths[:, None]] = -100
    return x, lengths, y


def moved(model: nn.Module, *given: Any, by: Any = None, **options: Any) -> list[Tensor]:
    """How far one epoch takes each weight."""
    trained = copy.deepcopy(model)
    lpom.fit(trained, *given, method=by or method(), epochs=1, seed=0, progress=False, **options)
    pairs = zip(trained.parameters(), model.parameters(), strict=True)
    return [(a - b).detach() for a, b in pairs]


def stepped(model: nn.Module, X: Any, y: Tensor, by: lpom.LPOM) -> list[Tensor]:
    """The same with all rows in one step, and nothing measured."""
    trained = copy.deepcopy(model)
    takes = Signature.of(trained, X)
    task = Task.infer(y, takes.n_outputs, n_steps=takes.n_steps)
    problem = Problem.on(takes.graph, task.loss, takes.model)
    (batch,) = Arrays(X, y, task, takes).epoch()
    with torch.no_grad():
        by.step(problem, batch, by.init(problem))
    pairs = zip(trained.parameters(), model.parameters(), strict=True)
    return [(a - b).detach() for a, b in pairs]


def by_hand(model: nn.Module, batches: list[tuple[Tensor, Tensor, Tensor]]) -> list[Tensor]:
    """The same by steps of the lifted module with torch's own loss."""
    trained = copy.deepcopy(model)
    optimizer = torch.optim.SGD(trained.parameters(), 0.1)
    for x, lengths, y in batches:
        lifted = lpom.lift(trained, mu=2.0, batch_dims=y.ndim)
        lifted.scale = x[..., 0].numel() / int((y != -100).sum()) if y.ndim == 2 else 1.0
        optimizer.zero_grad()
        outputs = lifted(x, lengths)
        F.cross_entropy(outputs.flatten(0, -2), y.flatten()).backward()
        optimizer.step()
    pairs = zip(trained.parameters(), model.parameters(), strict=True)
    return [(a - b).detach() for a, b in pairs]


def assert_same(found: list[Tensor], expected: list[Tensor]) -> None:
    assert max(float(step.abs().max()) for step in expected) > 1e-3
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("every_step", [False, True])
@pytest.mark.parametrize(("kind", "options"), LAYERS)
def test_a_step_of_fit_is_a_step_of_a_loop_of_ones_own(kind, options, every_step):
    torch.manual_seed(0)
    model = Reader(kind, every_step, **options).double()
    x, lengths, y = data(every_step)
    assert_same(moved(model, (x, lengths), y), by_hand(model, [(x, lengths, y)]))


@pytest.mark.parametrize(
    ("kind", "options", "sweeps"),
    [
        *(pytest.param(*case.values, 1) for case in LAYERS),
        *(pytest.param(*case.values, 3) for case in LAYERS if case.values[0] is nn.RNN),
    ],
)
@pytest.mark.parametrize("every_step", [False, True])
def test_a_batch_is_the_mean_of_its_rows_at_their_own_lengths(kind, options, every_step, sweeps):
    """With more sweeps where a shorter sequence has the same states: a tanh at every step."""
    torch.manual_seed(0)
    model = Reader(kind, every_step, **options).double()
    rows = [k for k, n in enumerate(LENGTHS) if n > 1 or sweeps == 1]
    x, lengths, y = (part[rows] for part in data(every_step))
    states = lpom.Sweeps("top-down", max_sweeps=sweeps, rule="plain") if sweeps > 1 else lpom.Sweeps()
    alone = []
    for k, n in enumerate(lengths.tolist()):
        row = slice(k, k + 1)
        target = y[row, :n] if every_step else y[row]
        alone.append(stepped(model, (x[row, :n], lengths[row]), target, method(states=states)))
    shares = lengths.tolist() if every_step else [1] * len(rows)
    expected = [
        sum(n * step for n, step in zip(shares, steps, strict=True)) / sum(shares)
        for steps in zip(*alone, strict=True)
    ]
    assert_same(stepped(model, (x, lengths), y, method(states=states)), expected)


@pytest.mark.parametrize("every_step", [False, True])
@pytest.mark.parametrize(("kind", "options"), LAYERS)
def test_layers_swept_as_a_whole_are_those_written_out(kind, options, every_step):
    torch.manual_seed(0)
    model = Reader(kind, every_step, **options).double()
    x, lengths, _ = data(every_step)
    takes = Signature.of(model, (x, lengths))
    X, found = takes.joined((x, lengths)), []
    for graph in (takes.graph, takes.graph.swept):
        for parameter in graph.parameters:
            parameter.grad = None
        with torch.no_grad():
            states = States(graph, X, [3.0] * (len(graph) + 1), once=True)
            outputs = states.outputs.clone()
            there = torch.ones(4, 1) if not every_step else takes.there(X)[..., None]
            states.pull(graph[graph.output], 0.3 * outputs.sin() * there)
            for node in reversed(graph.nodes):
                states.carry_back(node, states.move(node), None, 7.0)
        found.append([outputs, *(p.grad for p in model.parameters())])
    torch.testing.assert_close(*found, rtol=1e-11, atol=1e-13)
    expected = model(x, lengths)
    if every_step:
        expected, found[0][0] = expected[takes.there(X)], found[0][0][takes.there(X)]
    torch.testing.assert_close(found[0][0], expected, rtol=1e-12, atol=1e-12)


class Batches(list):
    """Batches as a loader's collate function makes them, each padded by itself."""

    def __init__(self, every_step: bool) -> None:
        x, lengths, y = data(every_step)
        for rows in ([0, 2], [1, 3], [2, 3]):  # up to 2, 4 and 3 steps
            steps = int(lengths[rows].max())
            targets = y[rows][:, :steps] if every_step else y[rows]
            self.append((x[rows][:, :steps], lengths[rows], targets))

    @property
    def loader(self) -> DataLoader[Any]:
        return DataLoader([((x, n), y) for x, n, y in self], batch_size=None)


@pytest.mark.parametrize("every_step", [False, True])
@pytest.mark.parametrize("kind", [nn.RNN, nn.LSTM, nn.GRU])
def test_batches_of_a_loader_may_have_steps_of_their_own(kind, every_step):
    torch.manual_seed(0)
    model = Reader(kind, every_step, batch_first=True, bidirectional=True).double()
    batches = Batches(every_step)
    assert_same(moved(model, batches.loader), by_hand(model, list(batches)))
    loss, score = lpom.evaluate(model, batches.loader)
    outputs = [(model(x, n).detach().flatten(0, -2), y.flatten()) for x, n, y in batches]
    outputs, y = (torch.cat(parts) for parts in zip(*outputs, strict=True))
    assert loss == pytest.approx(float(F.cross_entropy(outputs, y)))
    assert score == pytest.approx(float((outputs.argmax(1) == y)[y != -100].double().mean()))


def test_what_is_written_out_step_by_step_is_as_long_as_the_first_batch():
    model = Reader(nn.RNN, False, batch_first=True).double()
    with pytest.raises(DataError, match="4 steps has come.* the 2 of the first batch; pad the x"):
        moved(model, Batches(False).loader, by=method(states=lpom.Sweeps(max_sweeps=2)))
    x, lengths, y = data(False)
    padded = DataLoader([((x[:1], lengths[:1]), y[:1]), ((x, lengths), y)], batch_size=None)
    moved(model, padded, by=method(states=lpom.Sweeps(max_sweeps=2)))


@pytest.mark.parametrize("every_step", [False, True])
def test_a_model_may_take_packed_sequences(every_step):
    torch.manual_seed(0)
    model = Reader(nn.LSTM, every_step).double()
    same = OfPacked(nn.LSTM, every_step).double()
    same.load_state_dict(model.state_dict())
    x, lengths, y = data(every_step)
    packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
    assert_same(moved(same, packed, y), moved(model, (x, lengths), y))


class Tokens(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.read = nn.Embedding(9, 4, padding_idx=0), nn.GRU(4, 5, batch_first=True)
        self.say = nn.Linear(5, 2)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        packed = rnn.pack_padded_sequence(
            self.embed(x), lengths, enforce_sorted=False, batch_first=True
        )
        outputs, _ = rnn.pad_packed_sequence(self.read(packed)[0], batch_first=True)
        return self.say(outputs.sum(1) / lengths.unsqueeze(-1))


@pytest.mark.parametrize("name", ["lpom", "adam"])
def test_words_in_arrays_with_any_method(name):
    """A mean over the steps that are there, and data that is held out."""
    rng = np.random.default_rng(0)
    x, lengths = rng.integers(1, 9, (60, 4)), rng.integers(1, 5, 60)
    y = (x[:, 0] > 4).astype(int)
    torch.manual_seed(0)
    model = Tokens()
    held_out = (x[:20], lengths[:20]), y[:20]
    history = lpom.fit(
        model,
        (x, lengths),
        y,
        method=name,
        epochs=3,
        batch_size=20,
        seed=0,
        validation_data=held_out,
        progress=False,
    ).history
    assert history[-1].loss < history[0].loss
    said = model(torch.as_tensor(x), torch.as_tensor(lengths)).argmax(1).numpy()
    assert lpom.evaluate(model, (x, lengths), y)[1] == pytest.approx((said == y).mean())
    loss = lpom.evaluate(model, (x, lengths), y)[0]
    assert lpom.objective(model, (x, lengths), y).total / 60 == pytest.approx(loss, rel=1e-5)
    assert lpom.diagnose(model, (x, lengths), y).loss < loss


def test_the_model_itself_stays_as_it_was():
    model = Reader(nn.RNN, False, batch_first=True).double()
    before = set(vars(model))
    model.eval()
    x, lengths, y = data(False)
    lpom.fit(model, (x, lengths), y, epochs=1, progress=False)
    assert type(model) is Reader and set(vars(model)) == before and not model.training


class Mistaken(Reader):
    def __init__(self, tell: Any) -> None:
        super().__init__(nn.RNN, True, batch_first=True)
        self.said = tell

    def tell(self, packed: Any) -> Tensor:
        return self.said(self, packed)


MISTAKES = {
    "mean": lambda m, p: m.say(pad_packed_sequence(m.read(p)[0], batch_first=True)[0].mean(1)),
    "data": lambda m, p: m.say(p.data),
    "length": lambda m, p: m.say(pad_packed_sequence(m.read(p)[0], True, total_length=9)[0].sum(1)),
}


@pytest.mark.parametrize(
    ("mistake", "said"),
    [
        ("mean", "change with how many steps.*divide a sum by the lengths"),
        ("data", "asks a packed sequence for its data; recurrent layers"),
        ("length", r"to 9 steps, where x has 4; write total_length=x\.shape\[1\]"),
    ],
)
def test_models_that_cannot_be_followed_are_refused(mistake, said):
    x, lengths, y = data(False)
    with pytest.raises(UntrainableError, match=said):
        moved(Mistaken(MISTAKES[mistake]).double(), (x, lengths), y)


def test_mistakes_are_explained():
    x, lengths, y = data(False)
    model = Reader(nn.RNN, False, batch_first=True).double()
    with pytest.raises(
        UntrainableError, match=r"X is \(x, lengths\), which OfPacked does not take"
    ):
        moved(OfPacked(nn.RNN, False).double(), (x, lengths), y)
    with pytest.raises(UntrainableError, match=r"takes 2 inputs \(x, lengths\)"):
        moved(model, x, y)
    with pytest.raises(
        DataError, match="lengths must lie between 1 and the 4 steps of x, got 0..4"
    ):
        moved(model, (x, lengths - 1 + (lengths == 4)), y)
    with pytest.raises(DataError, match="a whole number for each sample"):
        moved(model, (x, lengths.double()), y)
    with pytest.raises(DataError, match="all X must be alike"):
        moved(model, (x, lengths), y, validation_data=(x, y))
    x, lengths, y = data(True)
    model = Reader(nn.RNN, True, batch_first=True).double()
    with pytest.raises(ValueError, match="each of the 4 steps of the longest sequence"):
        moved(model, (x, lengths), y[:, :3])
    with pytest.raises(DataError, match="squared can't leave predictions out.*'cross-entropy'"):
        moved(model, (x, lengths), torch.zeros(4, 4, 4, dtype=torch.float64))
    sequences = pack_sequence([x[0, :2], x[1, :1]])
    with pytest.raises(UntrainableError, match="X is a PackedSequence"):
        moved(model, sequences, y[:2])
