"""Twelve networks of many kinds trained with AdamW, by back-propagation and by `lpom.lift`.

    python benchmarks/trained.py runs.jsonl                # all networks, the default, 3 seeds
    python benchmarks/trained.py runs.jsonl --networks vit llama --rules plain '{"sides": 1}'
    python benchmarks/trained.py runs.jsonl --table        # what the stored runs say

Both sides have the same start, batches, rate and steps. A run is one line of the file, with its
settings; finished ones are not made again. Settings are chosen by the held-out part; the test part
is read by ``--table --test`` alone.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sysconfig
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lpom

Data = tuple[Tensor, Tensor]


# Data: (training, held out, test)


def digits(side: int = 8, channels: int = 1) -> list[Data]:
    from sklearn.datasets import load_digits

    X, y = load_digits(return_X_y=True)
    X = torch.tensor(X / 16 - 0.3, dtype=torch.float32).view(-1, 1, 8, 8)
    X = F.interpolate(X, size=side).expand(-1, channels, -1, -1).contiguous()
    order = torch.randperm(len(X), generator=torch.Generator().manual_seed(0))
    parts = order.split([1197, 300, 300])
    return [(X[part], torch.tensor(y)[part]) for part in parts]


def mnist() -> list[Data]:
    import gzip

    folder = Path(os.environ["LPOM_DATA"]) / "mnist"

    def read(name: str, start: int) -> Tensor:
        content = gzip.open(folder / f"{name}-ubyte.gz").read()
        return torch.tensor(np.frombuffer(content, np.uint8, offset=start).copy())

    X = read("train-images-idx3", 16).view(-1, 28, 28) / 255.0
    y = read("train-labels-idx1", 8).long()
    test = read("t10k-images-idx3", 16).view(-1, 28, 28) / 255.0
    labels = read("t10k-labels-idx1", 8).long()
    return [(X[:8000], y[:8000]), (X[50000:53000], y[50000:53000]), (test, labels)]


def text(length: int = 128) -> list[Data]:
    """The standard library's text, whole files, in characters."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    files = sorted(folder.glob("*.py"))[:150]
    whole = "".join(f.read_text(errors="ignore") for f in files)[:2_000_000]
    codes = torch.tensor([min(ord(c), 127) for c in whole])
    rows = codes[: len(codes) // length * length].view(-1, length)
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))
    held, test, train = order[:300], order[300:600], order[600:]
    return [(rows[part], rows[part]) for part in (train, held, test)]


# Networks


class WaveNet(nn.Module):
    """Gated dilated convolutions over the pixels: tanh times sigmoid of halves of a layer."""

    def __init__(self, width: int = 32, depth: int = 6) -> None:
        super().__init__()
        self.first = nn.Conv1d(1, width, 1)
        self.gates = nn.ModuleList(
            nn.Conv1d(width, 2 * width, 2, padding=2**k, dilation=2**k) for k in range(depth)
        )
        self.mixes = nn.ModuleList(nn.Conv1d(width, width, 1) for _ in range(depth))
        self.last = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x.flatten(2))
        for gate, mix in zip(self.gates, self.mixes, strict=True):
            p, q = gate(x)[..., : x.shape[-1]].chunk(2, 1)
            x = x + mix(torch.tanh(p) * torch.sigmoid(q))
        return self.last(x.relu().mean(-1))  # type: ignore[no-any-return]


class Block(nn.Module):
    def __init__(self, n_in: int, n_out: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(n_in, n_out, 3, stride, 1, bias=False),
            nn.BatchNorm2d(n_out),
            nn.ReLU(),
            nn.Conv2d(n_out, n_out, 3, 1, 1, bias=False),
            nn.BatchNorm2d(n_out),
        )
        self.jump = nn.Conv2d(n_in, n_out, 1, stride) if n_in != n_out else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.body(x) + self.jump(x))


class Rows(nn.Module):
    """A recurrent layer or a transformer over the rows of pictures."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        width = 64 if kind == "transformer" else 128
        self.kind = kind
        if kind == "transformer":
            layer = nn.TransformerEncoderLayer(64, 4, 128, 0.0, batch_first=True, norm_first=True)
            self.below: nn.Module = nn.Linear(28, 64)
            self.body: nn.Module = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
            self.place = nn.Parameter(0.02 * torch.randn(28, 64))
        else:
            self.body = getattr(nn, kind.upper())(28, width, batch_first=True)
        self.last = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "transformer":
            h = self.body(self.below(x) + self.place).mean(1)
        else:
            h = self.body(x)[0][:, -1]
        return self.last(h)  # type: ignore[no-any-return]


def lenet5() -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(1, (1, 28)),
        *(nn.Conv2d(1, 6, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()),
        *(nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 10)),
    )


def resnet8() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(1, 16, 3, 1, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU()),
        *(Block(16, 16, 1), Block(16, 32, 2), Block(32, 64, 2)),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10)),
    )


class Logits(nn.Module):
    """The logits of a model of `transformers`."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x).logits  # type: ignore[no-any-return]


def transformer(kind: str) -> nn.Module:
    import transformers as T

    T.logging.set_verbosity_error()
    size = {"num_hidden_layers": 4, "num_attention_heads": 4, "hidden_size": 64}
    if kind in ("vit", "deit"):
        name = {"vit": "ViT", "deit": "DeiT"}[kind]
        config = getattr(T, f"{name}Config")(
            **size, intermediate_size=128, image_size=8, patch_size=2, num_channels=1, num_labels=10
        )
        return Logits(getattr(T, f"{name}ForImageClassification")(config))
    if kind == "convnext":
        config = T.ConvNextConfig(
            num_channels=1, patch_size=2, hidden_sizes=[16, 32, 64], depths=[2, 2, 2],
            num_stages=3, num_labels=10, image_size=16,
        )  # fmt: skip
        return Logits(T.ConvNextForImageClassification(config))
    if kind == "mobilenet":
        config = T.MobileNetV2Config(
            num_channels=1, image_size=32, depth_multiplier=0.25, num_labels=10, output_stride=8
        )
        return Logits(T.MobileNetV2ForImageClassification(config))
    if kind == "llama":
        config = T.LlamaConfig(
            vocab_size=128, hidden_size=64, intermediate_size=172, num_hidden_layers=2,
            num_attention_heads=4, max_position_embeddings=128, bos_token_id=1, eos_token_id=2,
        )  # fmt: skip
        return Logits(T.LlamaForCausalLM(config))
    config = T.GPT2Config(
        vocab_size=128, n_positions=128, n_embd=64, n_layer=2, n_head=4, bos_token_id=1,
        eos_token_id=2,
    )  # fmt: skip
    return Logits(T.GPT2LMHeadModel(config))


#: What is trained: network, data, steps, rows of a batch, learning rate.
NETWORKS: dict[str, tuple[Callable[[], nn.Module], Callable[[], list[Data]], int, int, float]] = {
    "vit": (lambda: transformer("vit"), digits, 400, 50, 1e-3),
    "deit": (lambda: transformer("deit"), digits, 600, 50, 1e-3),
    "convnext": (lambda: transformer("convnext"), lambda: digits(16), 300, 50, 2e-3),
    "mobilenet": (lambda: transformer("mobilenet"), lambda: digits(32), 250, 50, 2e-3),
    "wavenet": (WaveNet, digits, 400, 50, 3e-3),
    "llama": (lambda: transformer("llama"), text, 400, 16, 4e-3),
    "gpt2": (lambda: transformer("gpt2"), text, 400, 16, 4e-3),
    "lenet5": (lenet5, mnist, 400, 50, 2e-3),
    "resnet8": (resnet8, lambda: digits(16), 250, 50, 3e-3),
    "rnn": (lambda: Rows("rnn"), mnist, 500, 50, 1e-3),
    "lstm": (lambda: Rows("lstm"), mnist, 500, 50, 2e-3),
    "transformer": (lambda: Rows("transformer"), mnist, 500, 50, 2e-3),
}


def batches(data: Data, size: int, steps: int, seed: int) -> Iterator[Data]:
    generator, X, y = torch.Generator().manual_seed(seed), *data
    done = 0
    while True:
        for rows in torch.randperm(len(X), generator=generator).split(size):
            if len(rows) < size:
                break
            if done == steps:
                return
            done += 1
            yield X[rows], y[rows]


def loss_of(logits: Tensor, y: Tensor) -> Tensor:
    if logits.ndim == 3:  # each character is followed by the next
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), y[:, 1:].flatten())
    return F.cross_entropy(logits, y)


@torch.no_grad()
def measure(model: nn.Module, data: Data) -> tuple[float, float]:
    """Mean loss and accuracy."""
    model.eval()
    losses, right, n = 0.0, 0.0, 0
    for X, y in zip(*(part.split(100) for part in data), strict=True):
        logits = model(X)
        losses += float(loss_of(logits, y)) * len(X)
        guess, truth = logits.argmax(-1), y
        if logits.ndim == 3:
            guess, truth = guess[:, :-1], y[:, 1:]
        right += float((guess == truth).double().mean()) * len(X)
        n += len(X)
    model.train()
    return losses / n, right / n


def train(name: str, rule: str, seed: int) -> dict[str, Any]:
    make, load, steps, size, rate = NETWORKS[name]
    data = load()
    torch.manual_seed(seed)
    model = make().train()
    run = model if rule == "plain" else lpom.lift(model, **json.loads(rule))
    optimizer = torch.optim.AdamW(model.parameters(), rate)
    warm = max(1, steps // 10)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda t: min((t + 1) / warm, 0.5 * (1 + math.cos(math.pi * t / steps))),
    )
    start = time.process_time()
    for X, y in batches(data[0], size, steps, seed):
        optimizer.zero_grad()
        loss_of(run(X), y).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        schedule.step()
    seconds = time.process_time() - start
    held, test = measure(model, data[1]), measure(model, data[2])
    return {
        "id": f"{name} {rule} {seed}", "network": name, "rule": rule, "seed": seed,
        "steps": steps, "batch": size, "rate": rate, "optimizer": "AdamW, warm-up and cosine",
        "held_out_loss": held[0], "held_out_accuracy": held[1],
        "test_loss": test[0], "test_accuracy": test[1], "seconds": seconds,
    }  # fmt: skip


def table(path: Path, part: str) -> str:
    """Mean and standard deviation over the seeds: accuracies in per cent, losses of text."""
    runs = [json.loads(line) for line in path.read_text().splitlines()]
    rules = list(dict.fromkeys(run["rule"] for run in runs))
    names = [{"plain": "AdamW", "{}": "AdamW on `lift(model)`"}.get(rule, rule) for rule in rules]
    lines = ["| network | " + " | ".join(names) + " |", "|---" * (1 + len(rules)) + "|"]
    for name in dict.fromkeys(run["network"] for run in runs):
        cells = []
        for rule in rules:
            chosen = [r for r in runs if (r["network"], r["rule"]) == (name, rule)]
            of_text = name in ("llama", "gpt2")
            key = f"{part}_loss" if of_text else f"{part}_accuracy"
            values = np.array([run[key] for run in chosen]) * (1 if of_text else 100)
            digits = 3 if of_text else 2
            spread = values.std(ddof=1) if len(values) > 1 else 0.0
            cell = f"{values.mean():.{digits}f} ± {spread:.{digits}f}" if len(values) else ""
            cells.append(cell)
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("file", type=Path)
    parser.add_argument("--networks", nargs="+", default=list(NETWORKS), choices=list(NETWORKS))
    parser.add_argument("--rules", nargs="+", default=["plain", "{}"])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--test", action="store_true")
    options = parser.parse_args()
    if options.table:
        print(table(options.file, "test" if options.test else "held_out"))
        return
    torch.set_num_threads(1)
    done = set()
    if options.file.exists():
        done = {json.loads(line)["id"] for line in options.file.read_text().splitlines()}
    for seed in options.seeds:
        for name in options.networks:
            for rule in options.rules:
                if f"{name} {rule} {seed}" in done:
                    continue
                run = train(name, rule, seed)
                with options.file.open("a") as file:
                    file.write(json.dumps(run) + "\n")
                print(run["id"], run["held_out_loss"], run["held_out_accuracy"], flush=True)


if __name__ == "__main__":
    main()
