"""A character model of a text: the bits that it needs for a character it has not seen.

    apt-get install bible-kjv && echo | bible -f gen1:1-rev22:21 > kjv.txt
    python experiments/characters.py kjv.txt [--methods lpom,adam] [--seeds 0]

4 blocks of width 128 see 128 characters at once; the last tenth of the text is measured on, after
the last epoch alone. Rates are tried on the beginning of the text, with ``--share``; LPOM's mu is
where its step is back-propagation's on a trained model (``--cosine --share 0.2 --epochs 4``).
Finished runs are kept in results/characters.jsonl; one that was cut goes on.
"""

from __future__ import annotations

import argparse
import hashlib
import shutil
import statistics
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

import lpom
from lpom import methods
from lpom.experiments.paper import with_rate
from lpom.experiments.records import add_line, find_line, machine
from lpom.experiments.text import Pieces, Text, train_text
from lpom.training import Checkpoint

RESULTS = Path(__file__).parent / "results" / "characters.jsonl"


def bits(text: str, method: str, seed: int, options: argparse.Namespace) -> float:
    """Per held-out character; from the file if they are there."""
    settings = {
        "text": hashlib.sha256(text.encode()).hexdigest()[:16],
        "characters": len(text),
        "method": method,
        "learning_rate": options.rate,
        "epochs": options.epochs,
        "seed": seed,
    }
    params = with_rate(method, options.rate)
    if method == "lpom":
        settings["mu"] = params["mu"] = options.mu
    known = find_line(options.out, settings)
    if known is not None:
        return float(known["bits"])
    folder = options.out.parent / "unfinished" / "-".join(map(str, settings.values()))
    trained = train_text(
        Text.of(text),
        method=methods.get(method, **params),
        epochs=options.epochs,
        seed=seed,
        progress=options.progress,
        checkpoint=Checkpoint(folder, every_minutes=1.0),
    )
    assert trained.result is not None
    if trained.result.status == "interrupted":
        raise KeyboardInterrupt
    record = settings | {"bits": trained.bits, "by frequency": trained.baseline}
    record |= {"seconds": trained.result.training_seconds, "sample": trained.sample(400)}
    add_line(options.out, record | {"machine": machine()})
    shutil.rmtree(folder)
    return trained.bits


def print_cosines(text: str, options: argparse.Namespace) -> None:
    """Between gradients of LPOM and of back-propagation, of a batch and a model Adam trained."""
    known = Text.of(text)
    method = methods.get("adam", **with_rate("adam", options.rate))
    model = train_text(known, method=method, epochs=options.epochs).model
    pieces = Pieces(known.indices, 128, 128)
    x, y = next(iter(DataLoader(pieces, batch_size=32, shuffle=True)))

    def gradient(network: nn.Module) -> Tensor:
        loss = F.cross_entropy(network(x).flatten(0, 1), y.flatten())
        found = torch.autograd.grad(loss, list(model.parameters()))
        return nn.utils.parameters_to_vector(found)

    plain = gradient(model)
    for mu in (5.0, 20.0, 100.0, 500.0):
        lifted = gradient(lpom.lift(model, mu, batch_dims=2))
        print(f"mu = {mu:g}: cosine {torch.cosine_similarity(lifted, plain, dim=0):.4f}")


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
    parser.add_argument("--progress", action="store_true")
    parser.add_argument("--cosine", action="store_true", help="in place of runs")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    text = options.text.read_text(encoding="utf-8")
    text = text[: int(len(text) * options.share)]
    if options.cosine:
        print_cosines(text, options)
        return
    for method in options.methods.split(","):
        found = [bits(text, method, int(seed), options) for seed in options.seeds.split(",")]
        spread = f" ± {statistics.stdev(found):.4f}" if len(found) > 1 else ""
        print(f"{method}: {statistics.mean(found):.4f}{spread} bits a character", flush=True)


if __name__ == "__main__":
    main()
