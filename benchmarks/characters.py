"""A character model of a text: the bits that it needs for a character it has not seen.

    apt-get install bible-kjv && echo | bible -f gen1:1-rev22:21 > kjv.txt
    python benchmarks/characters.py kjv.txt [--methods lpom,adam] [--seeds 0]

4 blocks of width 128 see 128 characters at once; the last tenth of the text is measured on, after
the last epoch alone. Rates are tried on the beginning of the text, with ``--share``. Finished runs
are lines of results/characters.jsonl; one that was cut goes on.
"""

from __future__ import annotations

import argparse
import hashlib
import math
import shutil
import statistics
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import networks
from experiments import with_rate
from lpom import methods
from lpom.training import Checkpoint, fit
from records import RESULTS, Record, Store, machine

HELD_OUT, LENGTH = 0.1, 128


class Pieces(Dataset[tuple[Tensor, Tensor]]):
    """Pieces of a text one after the other, each with the characters that come next."""

    def __init__(self, indices: Tensor, length: int = LENGTH) -> None:
        self.indices, self.length = indices, length

    def __len__(self) -> int:
        return (len(self.indices) - 1) // self.length

    def __getitem__(self, k: int) -> tuple[Tensor, Tensor]:
        piece = self.indices[k * self.length : (k + 1) * self.length + 1]
        return piece[:-1], piece[1:]


def coded(text: str) -> tuple[str, Tensor]:
    """The sorted characters of a text, and the text as indices into them."""
    characters = "".join(sorted(set(text)))
    places = {character: k for k, character in enumerate(characters)}
    return characters, torch.tensor([places[character] for character in text])


def by_frequency(train: Tensor, held_out: Tensor, n_characters: int) -> float:
    """Bits per held-out character if each were expected as often as it is in the rest.

    Every character is counted once more than it occurs, so that none is impossible.
    """
    counts = torch.bincount(train, minlength=n_characters).double() + 1
    return float(-torch.log2(counts / counts.sum())[held_out].mean())


@torch.no_grad()
def sample(model: nn.Module, characters: str, n: int = 400, seed: int = 0) -> str:
    """``n`` characters, each drawn from the softmax of the outputs at the last step."""
    generator = torch.Generator().manual_seed(seed)
    drawn = [max(characters.find("\n"), 0)]
    model.eval()
    for _ in range(n):
        window = drawn[-LENGTH:]
        padded = torch.tensor(window + [0] * (LENGTH - len(window)))
        expected = torch.softmax(model(padded[None])[0, len(window) - 1].double(), 0)
        drawn.append(int(torch.multinomial(expected, 1, generator=generator)))
    return "".join(characters[k] for k in drawn[1:])


def bits(text: str, about: Record, mu: float, store: Store) -> float:
    """Per held-out character; from the file if they are there."""
    record = store.find(about)
    if record is None:
        characters, indices = coded(text)
        cut = int(len(indices) * (1 - HELD_OUT))
        train, held_out = Pieces(indices[:cut]), Pieces(indices[cut:])
        seed, method = about["seed"], about["method"]
        params = with_rate(method, about["rate"])
        params |= {"mu": mu} if method == "lpom" else {}
        model = networks.get("char-transformer", (LENGTH,), len(characters), seed)
        order = torch.Generator().manual_seed(seed)
        folder = store.path.parent / "unfinished" / f"characters-{method}-{seed}"
        result = fit(
            model,
            DataLoader(train, batch_size=min(32, len(train)), shuffle=True, generator=order),
            method=methods.get(method, **params),
            epochs=about["epochs"],
            seed=seed,
            validation_data=DataLoader(held_out, batch_size=256),
            checkpoint=Checkpoint(folder, every_minutes=1.0),
        )
        if result.status == "interrupted":
            raise KeyboardInterrupt
        measured = (result.history[-1].validation_loss or math.nan) / math.log(2)
        baseline = by_frequency(indices[:cut], indices[cut:], len(characters))
        done = {"bits": measured, "by frequency": baseline, "seconds": result.training_seconds}
        record = store.add(about | done | {"sample": sample(model, characters)} | machine())
        shutil.rmtree(folder, ignore_errors=True)
    return float(record["bits"])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("text", type=Path)
    parser.add_argument("--methods", default="lpom,adam")
    parser.add_argument("--seeds", default="0")
    parser.add_argument("--rate", type=float, default=2e-3)
    parser.add_argument("--mu", type=float, default=500.0)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--share", type=float, default=1.0)
    parser.add_argument("--out", type=Path, default=RESULTS)
    given = parser.parse_args()
    text = given.text.read_text(encoding="utf-8")
    text = text[: int(len(text) * given.share)]
    digest = hashlib.sha256(text.encode()).hexdigest()[:16]
    for method in given.methods.split(","):
        column = f"lpom, mu {given.mu:g}" if method == "lpom" else method
        about = {"kind": "final", "row": digest, "column": column, "method": method}
        about |= {"rate": given.rate, "characters": len(text), "epochs": given.epochs}
        store = Store(given.out / "characters.jsonl")
        seeds = [int(seed) for seed in given.seeds.split(",")]
        runs = [bits(text, about | {"seed": seed}, given.mu, store) for seed in seeds]
        spread = f" ± {statistics.stdev(runs):.4f}" if len(runs) > 1 else ""
        print(f"{method}: {statistics.mean(runs):.4f}{spread} bits a character", flush=True)


if __name__ == "__main__":
    main()
