"""Is one side on the norms better than back-propagation? Both tuned alike, then seeds.

    python benchmarks/normalised.py --networks "llama 2x64" --draws 60 --steps 2000 --seeds 5
    python benchmarks/normalised.py --again ID    # makes the stored run of this id once more
    python benchmarks/normalised.py --page        # makes the page again from the stored runs

Every side has the same start and batches in a run of a seed, the same ``--draws`` settings out of
rate x weight decay x beta2 x clipping, and the same budget: successive halving on the held-out
loss, each round with a third of the settings and thrice the steps. The winner of each side is then
trained with every seed. A run is one line of results/normalised.jsonl; rerun to resume. The test
part is measured in the runs of the seeds, and stands on the page beside the held-out part.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import itertools
import json
import math
import random
import statistics
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from scipy import stats
from torch import Tensor, nn

import lpom
import trained
from norms import NETWORKS, Pull, network
from records import RESULTS, Store, machine

PAGE = Path(__file__).parent / "pages" / "normalised.md"
RATES, DECAYS, BETAS, CLIPS = (
    (5e-4, 1e-3, 2e-3, 4e-3, 8e-3),
    (0.0, 0.01, 0.1),
    (0.95, 0.999),
    (0, 1),
)
SIDES = ("plain", "one side", "two sides", "pull")
ENOUGH = 8, 5, 60  # networks, seeds and settings tried that a verdict needs


@dataclass(frozen=True)
class Run:
    """All settings of a run.

    Attributes
    ----------
    side : back-propagation ("plain"); `lpom.lift` with one side of ``delta`` on the norms, or with
        two sides everywhere; or back-propagation and the first-order "pull" of one side
    where : which functions or modules have one side, a pattern of `lpom.lift`
    variant : what a network has besides: "qk norm", "scaled" (what writes into the stream starts
        smaller by the root of twice the depth), or nothing
    start : the deviation of the initial weights; only networks of `transformers` read it
    """

    network: str
    side: str
    steps: int
    stage: str = "halving"
    rate: float = 2e-3
    decay: float = 0.01
    beta2: float = 0.999
    clip: float = 0
    seed: int = 0
    delta: float = 0.01
    where: str = "norm"
    variant: str = ""
    start: float = 0.02
    batch: int = 16
    schedule: str = "cosine"
    optimizer: str = "adamw"
    precision: str = "float32"

    @property
    def id(self) -> str:
        return hashlib.sha256(self.text.encode()).hexdigest()[:16]

    @property
    def text(self) -> str:
        return json.dumps(asdict(self), sort_keys=True)

    @property
    def recipe(self) -> str:
        """What is tuned."""
        return f"rate {self.rate:g}, decay {self.decay:g}, beta2 {self.beta2:g}, clip {self.clip:g}"


# A run


def optimizers(run: Run, model: nn.Module) -> list[torch.optim.Optimizer]:
    """AdamW; or Muon for matrices between layers, and AdamW for the rest."""
    chosen = dict(model.named_parameters())
    made: list[torch.optim.Optimizer] = []
    if run.optimizer == "muon":
        ends = ("embed", "wte", "wpe", "head", "classifier")
        inner = {n: p for n, p in chosen.items() if p.ndim == 2 and not any(e in n for e in ends)}
        kept = {"lr": run.rate, "weight_decay": run.decay, "adjust_lr_fn": "match_rms_adamw"}
        made.append(torch.optim.Muon(inner.values(), **kept))
        chosen = {n: p for n, p in chosen.items() if n not in inner}
    betas = (0.9, run.beta2)
    made.append(torch.optim.AdamW(chosen.values(), run.rate, betas, weight_decay=run.decay))
    return made


def factor(run: Run, t: int) -> float:
    """Of the rate: a warm-up over a tenth of the steps, then a cosine or a constant."""
    warm = min(1.0, (t + 1) / max(1, run.steps // 10))
    cosine = 0.5 * (1 + math.cos(math.pi * t / run.steps))
    return warm * (cosine if run.schedule == "cosine" else 1.0)


@torch.no_grad()
def stream(model: nn.Module, X: Tensor) -> float:
    """The root mean square of what comes into the norms, the mean over all norms."""
    sizes: list[float] = []
    kinds = nn.LayerNorm | nn.RMSNorm | nn.BatchNorm2d | Pull
    inner = {m.norm for m in model.modules() if isinstance(m, Pull)}
    modules = [m for m in model.modules() if isinstance(m, kinds) and m not in inner]

    def look(module: nn.Module, given: tuple[Tensor, ...]) -> None:
        sizes.append(float(given[0].square().mean().sqrt()))

    handles = [module.register_forward_pre_hook(look) for module in modules]
    model.eval()(X)
    model.train()
    for handle in handles:
        handle.remove()
    return statistics.fmean(sizes) if sizes else math.nan


@functools.cache
def parts(name: str) -> list[trained.Data]:
    return NETWORKS[name][1]()


def train(run: Run) -> dict[str, Any]:
    """What a run reaches, with a curve of (step, loss of training, size of the stream, seconds)."""
    dtype = getattr(torch, run.precision)
    split = [(X.to(dtype) if X.is_floating_point() else X, y) for X, y in parts(run.network)]
    torch.manual_seed(run.seed)
    pull = run.delta if run.side == "pull" else None
    model = network(run.network, run.start, run.variant, pull).to(dtype).train()
    lifts: dict[str, dict[str, Any]] = {
        "one side": {"displacement": {run.where: run.delta}, "sides": {run.where: 1}},
        "two sides": {},
    }
    lifted = lpom.lift(model, **lifts[run.side]) if run.side in lifts else model
    made = optimizers(run, model)
    every, losses, curve, used = max(1, run.steps // 10), [], [], 0.0
    for t, (X, y) in enumerate(trained.batches(split[0], run.batch, run.steps, run.seed)):
        begun = time.process_time()
        loss = trained.loss_of(lifted(X), y)
        model.zero_grad()
        loss.backward()
        if run.clip:
            nn.utils.clip_grad_norm_(model.parameters(), run.clip)
        for optimizer in made:
            for group in optimizer.param_groups:
                group["lr"] = run.rate * factor(run, t)
            optimizer.step()
        used += time.process_time() - begun
        losses.append(float(loss.detach()))
        if (t + 1) % every == 0:
            mean = statistics.fmean(losses[-every:])
            curve.append([t + 1, round(mean, 5), round(stream(model, X), 5), round(used, 2)])
    measured: dict[str, Any] = {}
    for name, part in zip(("held_out", "test"), split[1:], strict=True):
        if name == "held_out" or run.stage == "seeds":
            loss_there, accuracy = trained.measure(model, part)
            measured |= {f"{name}_loss": loss_there, f"{name}_accuracy": accuracy}
    n = sum(p.numel() for p in model.parameters())
    return measured | {"seconds": used, "parameters": n, "curve": curve}


def stored(store: Store, run: Run) -> dict[str, Any]:
    """The record of a run, which is made if it is not there."""
    for record in store.select(id=run.id):
        return record
    record = {"id": run.id, "settings": run.text, **asdict(run)} | train(run) | machine()
    print(run.network, run.side, run.stage, run.steps, run.recipe, run.seed,
          f"{record['held_out_loss']:.4f}, {record['seconds']:.0f} s", flush=True)  # fmt: skip
    return store.add(record)


def score(record: dict[str, Any]) -> float:
    loss = record["held_out_loss"]
    return loss if math.isfinite(loss) else math.inf


def tuned(store: Store, base: Run, draws: int, rounds: int) -> Run:
    """The winner of successive halving: the last round has a third of the steps of the seeds."""
    grid = list(itertools.product(DECAYS, BETAS, CLIPS))
    random.Random(0).shuffle(grid)  # draws take the rates in turn
    runs = [
        replace(base, rate=RATES[k % 5], decay=decay, beta2=beta2, clip=clip)
        for k in range(min(draws, 5 * len(grid)))
        for decay, beta2, clip in [grid[(k // 5 + k % 5 * 5) % len(grid)]]
    ]
    for left in reversed(range(rounds)):
        steps = max(1, base.steps // 3 ** (left + 1))
        runs.sort(key=lambda run: score(stored(store, replace(run, steps=steps))))
        runs = runs[: math.ceil(len(runs) / 3)] if left else runs[:1]
    return replace(runs[0], steps=base.steps, stage="seeds")


# The page

TUNED = ("rate", "decay", "beta2", "clip")
COLUMNS = (
    "network", "side", "settings tried", "winner", "seeds", "held-out loss", "test loss",
    "test accuracy, %", "test loss less plain's, 95 %", "seconds", "size of the stream",
)  # fmt: skip


def changes(record: dict[str, Any]) -> str:
    """What a run has other than a default run of its network."""
    usual, apart = asdict(Run("", "", 0)), {"network", "side", "steps", "stage", "seed", *TUNED}
    return ", ".join(f"{k} {record[k]}" for k in usual if k not in apart and record[k] != usual[k])


def interval(differences: list[float]) -> tuple[float, float]:
    """Of their mean, by Student's t at 95 %."""
    n = len(differences)
    half = stats.t.ppf(0.975, n - 1) * statistics.stdev(differences) / n**0.5
    return statistics.fmean(differences) - half, statistics.fmean(differences) + half


def spread(values: list[float], digits: int = 4) -> str:
    deviation = statistics.stdev(values) if len(values) > 1 else math.nan
    return f"{statistics.fmean(values):.{digits}f} ± {deviation:.{digits}f}"


def verdict(found: dict[str, tuple[float, float, bool]]) -> str:
    """In words, where there is data: by network an interval, and whether it has runs enough."""
    full = {name: low_high for name, (*low_high, enough) in found.items() if enough}
    if len(full) < ENOUGH[0]:
        return (
            f"**The question is open.** A verdict needs {ENOUGH[0]} networks with {ENOUGH[1]} "
            f"seeds a side, the best of {ENOUGH[2]} settings each; {len(full)} have them, and "
            f"{len(found)} have two seeds. Nothing here decides it; two sides stay the default."
        )
    better = sum(high < 0 for _, high in full.values())
    worse = sum(low > 0 for low, _ in full.values())
    holds = better > len(full) / 2 and not worse
    return (
        f"**One side on the norms {'is' if holds else 'is not shown to be'} better.** Of "
        f"{len(full)} networks it has a lower test loss on {better} and a higher one on {worse} "
        "(95 %). The verdict asks for more than half and none against."
    )


def page(store: Store) -> str:
    """Tables of all that is stored, and a verdict."""
    groups: dict[tuple[str, str, int], dict[str, dict[int, dict[str, Any]]]] = {}
    tried: dict[tuple[str, str, str], set[str]] = {}
    halving: dict[tuple[str, str], list[int]] = {}
    for r in store:
        recipe = tuple(r[k] for k in TUNED)
        if r["stage"] == "halving":
            tried.setdefault((r["network"], changes(r), r["side"]), set()).add(str(recipe))
            halving.setdefault((r["network"], r["side"]), []).append(r["steps"])
            continue
        sides = groups.setdefault((r["network"], changes(r), r["steps"]), {})
        seeds = sides.setdefault(r["side"], {})
        if any(tuple(old[k] for k in TUNED) != recipe for old in seeds.values()):
            seeds.clear()  # a later halving has another winner
        seeds[r["seed"]] = r
    lines = ["| " + " | ".join(COLUMNS) + " |", "|---" * len(COLUMNS) + "|"]
    found: dict[str, tuple[float, float, bool]] = {}
    for (name, other, steps), sides in groups.items():
        for side, seeds in sides.items():
            records, plain = list(seeds.values()), sides.get("plain", {})
            settings = {k: v for k, v in records[0].items() if k in Run.__dataclass_fields__}
            both = [seeds[s]["test_loss"] - plain[s]["test_loss"] for s in seeds if s in plain]
            difference, of_text = "", name.startswith(("llama", "gpt2"))
            if side != "plain" and len(both) > 1:
                low, high = interval(both)
                difference = f"{statistics.fmean(both):+.4f} ({low:+.4f} to {high:+.4f})"
                if side == "one side" and not other:
                    least = min(len(tried.get((name, other, s), ())) for s in ("plain", side))
                    found[name] = low, high, len(both) >= ENOUGH[1] and least >= ENOUGH[2]
            met = tried.get((name, other, side), set())
            chosen = str(tuple(records[0][k] for k in TUNED))
            cells = (
                f"{name}, {steps} steps" + f", {other}" * bool(other),
                side, len(met), Run(**settings).recipe + ", not tuned" * (chosen not in met),
                len(seeds),
                *(spread([r[f"{part}_loss"] for r in records]) for part in ("held_out", "test")),
                "" if of_text else spread([100 * r["test_accuracy"] for r in records], 2),
                difference, f"{statistics.fmean(r['seconds'] for r in records):.0f}",
                f"{statistics.fmean(r['curve'][-1][2] for r in records):.3f}",
            )  # fmt: skip
            lines.append("| " + " | ".join(map(str, cells)) + " |")
    begun = [f"{n} {s}: {len(v)} runs of up to {max(v)} steps" for (n, s), v in halving.items()]
    left = [name for name in NETWORKS if name not in {name for name, _ in halving}]
    return "\n".join([
        "# One side on the norms, against back-propagation", "", verdict(found), "",
        "Means and standard deviations over the seeds; a difference is paired by seed. Losses are "
        "in nats; seconds are of a processor, training alone: plain takes more steps in the same "
        "time, which the difference leaves out. `pull` is back-propagation with the first-order "
        "term that one side adds across a row (see the mathematics).", "", *lines, "",
        f"**How far it got.** Halving: {'; '.join(begun) or 'nothing'}. "
        f"Not begun: {', '.join(left) or 'nothing'}.", "",
        "**How it is made.**", "", (__doc__ or "").partition("\n\n")[2].rstrip(), "",
    ])  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--networks", nargs="*", default=[], choices=list(NETWORKS))
    parser.add_argument("--sides", nargs="+", default=["plain", "one side", "pull"], choices=SIDES)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--draws", type=int, default=60)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--set", nargs="*", default=[], help="other fields of Run, name=value")
    parser.add_argument("--again", help="id of a stored run")
    parser.add_argument("--page", action="store_true", help="write the page and nothing else")
    parser.add_argument("--out", type=Path, default=RESULTS)
    given = parser.parse_args()
    torch.set_num_threads(1)
    store = Store(given.out / "normalised.jsonl")
    if given.again:
        (record,) = store.select(id=given.again)
        print(record["held_out_loss"], train(Run(**json.loads(record["settings"]))))
        return
    usual, other = asdict(Run("", "", 0)), dict(field.split("=") for field in given.set)
    kept: dict[str, Any] = {name: type(usual[name])(value) for name, value in other.items()}
    for name in given.networks if not given.page else []:
        bases = [Run(name, side, given.steps, **kept) for side in given.sides]
        winners = [tuned(store, base, given.draws, given.rounds) for base in bases]
        for seed in range(1, 1 + given.seeds):  # halving has seed 0
            for winner in winners:
                stored(store, replace(winner, seed=seed))
    if given.out == RESULTS:
        PAGE.write_text(page(store), encoding="utf-8")


if __name__ == "__main__":
    main()
