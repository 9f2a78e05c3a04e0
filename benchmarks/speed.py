"""What things cost on this machine, as ratios within one run.

    python benchmarks/speed.py step [CASE ...]       # time of a step
    python benchmarks/speed.py compiled [CASE ...]   # the same through torch's compiler
    python benchmarks/speed.py memory [CASE ...]     # bytes of tensors at the worst moment
    python benchmarks/speed.py attention             # of 1,024 steps: time and memory
    python benchmarks/speed.py fit                   # beside scikit-learn's MLP
    python benchmarks/speed.py exact                 # the exact weight step, and eq. 35
    python benchmarks/speed.py accuracy              # seconds to an accuracy on MNIST

The table is printed; with ``--keep`` its cases are also put into the table of that part in
``results/speed.jsonl``, of which ``python benchmarks/paper.py --pages`` makes a page.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import statistics
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import data
import lpom
import networks
import pages
from lpom import losses, methods
from lpom.files import write_atomically
from lpom.methods import LPOM, Batch, Method, Problem
from measuring import LiveTensors, clock_name, contest, counted, line, spread
from records import RESULTS, Record, Store, machine

RATE = 2e-3
Turn = Callable[[], object]


@dataclass(frozen=True)
class Case:
    """A network with one random batch, and how often it is timed.

    ``inputs`` are arguments of the model by position or by name, ``target`` class indices of its
    outputs (whose rows are the batch and, where it predicts at every step, the steps).
    """

    model: nn.Module
    inputs: tuple[Tensor, ...] | dict[str, Tensor]
    target: Tensor
    rounds: int


def _known(network: str, shape: tuple[int, ...], rounds: int, **options: Any) -> Case:
    X = torch.rand(100, *shape, generator=_drawn())
    model = networks.get(network, shape, 10, **options)
    return Case(model, (X,), torch.randint(10, (100,), generator=_drawn()), rounds)


def _mlp(sizes: Sequence[int], rounds: int) -> Case:
    X = torch.rand(100, sizes[0], generator=_drawn())
    y = torch.randint(sizes[-1], (100,), generator=_drawn())
    return Case(lpom.mlp(sizes, seed=0), (X,), y, rounds)


def _language(kind: str) -> Case:
    """Four layers of width 256 over 128 steps, sixteen pieces of text of 512 different words."""
    transformers: Any = import_module("transformers")
    if kind == "llama":
        config = transformers.LlamaConfig(
            vocab_size=512,
            hidden_size=256,
            intermediate_size=688,
            num_hidden_layers=4,
            num_attention_heads=8,
            max_position_embeddings=128,
            use_cache=False,
        )
        model = transformers.LlamaForCausalLM(config)
    else:
        config = transformers.GPT2Config(
            vocab_size=512,
            n_positions=128,
            n_embd=256,
            n_layer=4,
            n_head=8,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            use_cache=False,
        )
        model = transformers.GPT2LMHeadModel(config)
    words = torch.randint(512, (16, 128), generator=_drawn())
    return Case(model, {"input_ids": words}, words.roll(-1, 1), 5)


def _vit() -> Case:
    """Four layers of width 256 over 128 patches and the class token."""
    transformers: Any = import_module("transformers")
    config = transformers.ViTConfig(
        image_size=(64, 128),
        patch_size=8,
        num_channels=3,
        hidden_size=256,
        num_hidden_layers=4,
        num_attention_heads=8,
        intermediate_size=1024,
        num_labels=10,
    )
    model = transformers.ViTForImageClassification(config)
    pictures = torch.rand(16, 3, 64, 128, generator=_drawn())
    return Case(model, {"pixel_values": pictures}, torch.arange(16) % 10, 5)


def _drawn() -> torch.Generator:
    return torch.Generator().manual_seed(0)


_ROWS, _COLOURS = (1, 28, 28), (3, 32, 32)
CASES: dict[str, Callable[[], Case]] = {
    "784-2048x3-10": lambda: _mlp((784, 2048, 2048, 2048, 10), 12),
    "64-100-10": lambda: _mlp((64, 100, 10), 200),
    "lenet5": lambda: _known("lenet5", _ROWS, 40),
    "vgg5": lambda: _known("vgg5", _COLOURS, 10, width=0.25),
    "resnet20": lambda: _known("resnet20", _COLOURS, 5),
    "transformer": lambda: _known("transformer", _ROWS, 20),
    "rnn": lambda: _known("rnn", _ROWS, 40),
    "lstm": lambda: _known("lstm", _ROWS, 30),
    "llama": lambda: _language("llama"),
    "gpt2": lambda: _language("gpt2"),
    "vit": _vit,
}
#: The cases of a part, unless others are named.
SHOWN = {
    "step": tuple(CASES),
    "compiled": ("transformer", "resnet20", "lenet5"),
    "memory": ("784-2048x3-10", "resnet20", "transformer"),
}


def contestants() -> dict[str, Method[Any]]:
    return {"Adam": methods.Adam(RATE), "LPOM": LPOM(), "LPOM, mu 20": LPOM(mu=20.0)}


class Steps:
    """One method on its own copy of a network: a call is a step on always the same batch.

    Models that take several arguments or names are run by a loop of one's own: what `lpom.lift`
    makes of them, in place of the model.
    """

    def __init__(self, case: Case, method: Method[Any], *, compile: bool = False) -> None:
        self.case, self.method = case, method
        self.model = copy.deepcopy(case.model).train()
        self.turn = self._loop(compile) if compile or isinstance(case.inputs, dict) else self._fit()

    def __call__(self) -> object:
        return self.turn()

    def _fit(self) -> Turn:
        loss, (X,), y = losses.get("cross-entropy"), self.case.inputs, self.case.target
        problem, width = Problem(self.model, loss, X[:2]), int(self.model(X[:2]).shape[-1])
        batch = Batch(X, loss.encode(y, width, width))
        state = self.method.init(problem)
        return lambda: self.method.step(problem, batch, state)

    def _loop(self, compile: bool) -> Turn:
        model: Any = self.model
        if isinstance(self.method, LPOM):
            model = lpom.lift(model) if self.method.mu is None else lpom.lift(model, mu=20.0)
        model = torch.compile(model) if compile else model
        optimizer = torch.optim.Adam(self.model.parameters(), RATE)
        inputs, y = self.case.inputs, self.case.target

        def turn() -> None:
            outputs = model(**inputs) if isinstance(inputs, dict) else model(*inputs)
            outputs = getattr(outputs, "logits", outputs)
            loss: Any = F.cross_entropy(outputs.flatten(0, -2), y.flatten())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

        return turn

    def peak_bytes(self) -> int:
        """Most bytes of tensors made by a step alive at once, gradients from before freed."""
        self.turn()
        for parameter in self.model.parameters():
            parameter.grad = None
        live = LiveTensors()
        with live:
            self.turn()
        return live.peak


def step(names: Sequence[str], rounds: int | None = None, *, compile: bool = False) -> list[Record]:
    rows = []
    for name in names:
        case = CASES[name]()
        turns = {who: Steps(case, how, compile=compile) for who, how in contestants().items()}
        rows += contest(name, turns, rounds=rounds or case.rounds, warmup=3)
    return rows


def memory(names: Sequence[str]) -> list[Record]:
    rows = []
    for name in names:
        case = CASES[name]()
        peaks = {who: Steps(case, m).peak_bytes() / 2**20 for who, m in contestants().items()}
        rows += counted(name, peaks, "MiB")
    return rows


class Attention(nn.Module):
    """Four heads of width 32."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v)


def attention(length: int = 1024, rounds: int = 10) -> list[Record]:
    """torch's attention forward and back, and LPOM's: time, and memory beyond what is given."""
    given = [torch.randn(1, 4, length, 32, generator=_drawn()).requires_grad_() for _ in range(3)]
    models: dict[str, nn.Module] = {"torch": Attention(), "LPOM": lpom.lift(Attention())}
    models["LPOM, mu 20"] = lpom.lift(Attention(), mu=20.0)

    def turn(model: nn.Module) -> Turn:
        return lambda: torch.autograd.grad(model(*given).sum(), given)

    turns = {name: turn(model) for name, model in models.items()}
    rows = contest(f"{length:,} steps, time", turns, rounds=rounds, warmup=2)
    peaks = {}
    for name, run in turns.items():
        live = LiveTensors()
        with live:
            run()
        peaks[name] = live.peak / 2**20
    return rows + counted(f"{length:,} steps, memory", peaks, "MiB")


def fit(rounds: int = 5, rows: int = 40_000) -> list[Record]:
    """``fit`` of the classifiers: same network, batches and epochs, about so many rows a turn."""
    from sklearn.datasets import load_digits
    from sklearn.neural_network import MLPClassifier

    drawn = np.random.default_rng(0)
    X = drawn.standard_normal((20_000, 50))
    tables = {
        "digits": load_digits(return_X_y=True),
        "20,000 x 50": (X, (X @ drawn.standard_normal((50, 5))).argmax(1)),
    }
    found = []
    for name, (X, y) in tables.items():
        epochs = max(1, rows // len(X))
        settings: dict[str, Any] = {"max_iter": epochs, "batch_size": 100, "random_state": 0}
        settings["n_iter_no_change"] = epochs + 1
        for dtype in ("float32", "float64"):
            for hidden in ((100,), (300, 100)):
                table = X.astype(dtype), y
                turns: dict[str, Turn] = {
                    "scikit-learn": partial(_fit, MLPClassifier(hidden, **settings), *table),
                    "lpom": partial(_fit, lpom.MLPClassifier(hidden, **settings), *table),
                }
                case = f"{name}, {dtype}, {'-'.join(map(str, hidden))}, {epochs} epochs"
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # both say that they might go on
                    found += contest(case, turns, rounds=rounds)
    return found


def _fit(estimator: Any, X: Any, y: Any) -> object:
    return estimator.fit(X, y)


def exact(inputs: int = 2048, outputs: int = 2048, rounds: int = 10) -> list[Record]:
    """Algorithm 2 as it is here, beside eq. 35 written down with its pseudo-inverse."""
    from lpom.graph import trace
    from lpom.weights.blocks import Use, blocks
    from lpom.weights.exact import exact_step

    X = torch.relu(torch.randn(100, inputs, generator=_drawn()))
    goal = torch.relu(torch.randn(100, outputs, generator=_drawn()))
    model = lpom.mlp((inputs, outputs), "relu", "relu", bias=False, seed=0)
    graph = trace(model, X)
    (block,) = blocks(graph)
    W = next(model.parameters()).detach().clone()
    use = Use(graph[1], (X,), goal, known=X @ W.T)  # as a step begins
    turns: dict[str, Turn] = {
        "literal": lambda: literal(W, X, goal, 5),
        "lpom": lambda: exact_step(block, [use], iterations=5),
    }
    return contest(f"X 100 x {inputs}, {outputs} outputs, 5 iterations", turns, rounds=rounds)


@torch.no_grad()
def literal(W: Tensor, X: Tensor, goal: Tensor, iterations: int) -> Tensor:
    r""":math:`W \leftarrow Y - (X^+ (\phi(X Y^T) - X_{next}))^T` (Algorithm 2, eq. 35), ReLU."""
    from lpom.weights.exact import next_theta

    inverse, theta_old, W_old = torch.linalg.pinv(X), 0.0, W
    for _ in range(iterations):
        theta = next_theta(theta_old)
        Y = theta * W - math.sqrt(theta) * (theta_old * W_old - W)
        W_old, W = W, Y - (inverse @ (torch.relu(X @ Y.T) - goal)).T
        theta_old = theta
    return W


#: Method, rows of a batch, epochs. The first three were tuned for time to 98 % on held-out rows,
#: with seeds that are not reported; the others were not.
PLANS: dict[str, tuple[Method[Any], int, int]] = {
    "Adam": (methods.Adam(4e-3), 100, 5),
    "LPOM, Adam": (LPOM(weights=lpom.Adaptive(learning_rate=4e-3)), 100, 5),
    "LPOM, factored": (LPOM(weights=lpom.Adaptive("factored", learning_rate=7e-4)), 200, 3),
    "LPOM, exact": (LPOM(mu=20.0, weights=lpom.Exact(ridge=(1.0, 100.0))), 100, 4),
}


def accuracy(seeds: Sequence[int] = (0, 1, 2), rows: int | None = None) -> list[Record]:
    """Seconds of training until an accuracy on held-out MNIST, 784-300-100-10, turn by turn."""
    known = data.load("mnist").held_out()
    train = known.x_train[:rows], known.y_train[:rows]
    held = known.x_test, known.y_test
    curves: dict[str, list[list[tuple[float, float]]]] = {name: [] for name in PLANS}
    for seed in (-1, *seeds):  # what is loaded at first use is nobody's time
        for name, (method, size, epochs) in PLANS.items():
            result = lpom.fit(
                lpom.mlp((784, 300, 100, 10), seed=max(seed, 0)),
                *(part[: 1000 if seed < 0 else None] for part in train),
                method=method,
                batch_size=size,
                epochs=epochs,
                seed=max(seed, 0),
                validation_data=held,
                progress=False,
            )
            ends = np.cumsum([epoch.seconds for epoch in result.history])
            scores = [epoch.validation_score or 0.0 for epoch in result.history]
            if seed >= 0:
                curves[name].append(list(zip(ends.tolist(), scores, strict=True)))
    return [row for level in (0.97, 0.98) for row in reached(level, curves)]


def reached(level: float, curves: dict[str, list[list[tuple[float, float]]]]) -> list[Record]:
    """When each contestant was there, the median over seeds; never, if half of them were not."""
    rows, case = [], f"{100 * level:g} %"
    times = {
        name: [next((s for s, score in c if score >= level), math.inf) for c in found]
        for name, found in curves.items()
    }
    first = next(iter(times.values()))
    for name, taken in times.items():
        seconds, there = statistics.median(taken), sum(map(math.isfinite, taken))
        note = "" if there == len(taken) else f"{there} of {len(taken)} seeds"
        if math.isinf(seconds):
            rows.append(line(case, name, None, "s"))
        elif math.inf in first + taken:
            base = statistics.median(first)
            rows.append(line(case, name, seconds, "s", seconds / base or None, note=note))
        else:
            rows.append(line(case, name, seconds, "s", *spread(taken, first)))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parts = (*SHOWN, "attention", "fit", "exact", "accuracy")
    parser.add_argument("part", choices=parts)
    parser.add_argument("cases", nargs="*", metavar="CASE", help=", ".join(CASES))
    parser.add_argument("--rounds", type=int, help="turns of each contestant")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--keep", action="store_true", help="put it into results/speed.jsonl")
    given = parser.parse_args()
    if unknown := [name for name in given.cases if name not in CASES]:
        parser.error(f"unknown case {unknown[0]!r}; there are {', '.join(CASES)}.")
    torch.set_num_threads(given.threads)
    names = given.cases or SHOWN.get(given.part, ())
    rounds = {} if given.rounds is None else {"rounds": given.rounds}
    parts_by_name: dict[str, Callable[[], list[Record]]] = {
        "step": lambda: step(names, **rounds),
        "compiled": lambda: step(names, compile=True, **rounds),
        "memory": lambda: memory(names),
        "attention": lambda: attention(**rounds),
        "fit": lambda: fit(**rounds),
        "exact": lambda: exact(**rounds),
        "accuracy": accuracy,
    }
    command = f"python benchmarks/speed.py {given.part}"
    about = {"part": given.part, "command": command, "clock": clock_name(), **machine()}
    about["rows"] = parts_by_name[given.part]()
    print(pages.costs(about))
    if given.keep:
        keep(Store(RESULTS / "speed.jsonl"), about)


def keep(store: Store, about: Record) -> None:
    """Put a table into the file: beside other cases measured with the same, else in their place."""
    others = [record for record in store if record["part"] != about["part"]]
    for before in store.select(**{name: about[name] for name in _SAME}):
        cases = {row["case"] for row in about["rows"]}
        about["rows"] = [r for r in before["rows"] if r["case"] not in cases] + about["rows"]
    lines = [json.dumps(record, sort_keys=True) for record in others]
    write_atomically(store.path, "".join(f"{text}\n" for text in lines).encode())
    store.add(about)


_SAME = ("part", "made", "processor", "threads", "date")


if __name__ == "__main__":
    main()
