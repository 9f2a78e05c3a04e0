"""What two processes are worth: samples a second of `lpom.fit`, beside one process.

    python benchmarks/ranks.py [--sizes 784,1024,1024,1024,1024,10] [--rounds 5] [--keep]

Consecutive layers on each process, rows on each process, and one process alone take turns in one
run; a ratio is how many times as fast it is. Each process has one thread. On a machine that does
other work too the ratios say little.
"""

from __future__ import annotations

import argparse
import os
import socket
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import lpom
import pages
from measuring import line, spread
from records import RESULTS, Store, machine
from speed import keep

WAYS = {
    "one process": None,
    "layers": lpom.Parallel(layers=2),
    "rows": lpom.Parallel(data=2),
}


def seconds(sizes: list[int], rows: int, parallel: lpom.Parallel | None) -> float:
    """Of an epoch of LPOM, after another one."""
    generator = torch.Generator().manual_seed(0)
    X = torch.rand(rows, sizes[0], generator=generator)
    y = torch.randint(sizes[-1], (rows,), generator=generator)
    model = lpom.mlp(sizes, seed=0)
    result = lpom.fit(
        model, X, y, epochs=2, batch_size=100, seed=0, parallel=parallel, progress=False
    )
    return float(result.history[-1].seconds)


def work(rank: int, port: int, sizes: list[int], rows: int, rounds: int, path: str) -> None:
    """One process: takes part in each way, or waits while the first one is alone."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    times: dict[str, list[float]] = {way: [] for way in WAYS}
    for _ in range(rounds):
        for way, parallel in WAYS.items():
            dist.barrier()
            if parallel is not None or rank == 0:
                times[way].append(seconds(sizes, rows, parallel))
    dist.barrier()
    if rank == 0:
        torch.save(times, path)
    dist.destroy_process_group()


def measure(sizes: list[int], rows: int, rounds: int) -> dict[str, list[float]]:
    """Seconds of an epoch in each way and round."""
    with socket.socket() as free, TemporaryDirectory() as folder:
        free.bind(("127.0.0.1", 0))
        port, path = free.getsockname()[1], Path(folder) / "times.pt"
        free.close()
        mp.spawn(work, (port, sizes, rows, rounds, str(path)), nprocs=2)
        times: dict[str, list[float]] = torch.load(path)
    return times


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sizes", default="784,1024,1024,1024,1024,10")
    parser.add_argument("--rows", type=int, default=10_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--keep", action="store_true", help="put it into results/speed.jsonl")
    given = parser.parse_args()
    sizes = [int(width) for width in given.sizes.split(",")]
    times = measure(sizes, given.rows, given.rounds)
    alone = times["one process"]
    case = "-".join(map(str, sizes))
    rates = {way: given.rows / sorted(taken)[len(taken) // 2] for way, taken in times.items()}
    rows = [
        line(case, way, rates[way], "rows/s", *spread(alone, taken)) for way, taken in times.items()
    ]
    command = "python benchmarks/ranks.py"
    about = {"part": "ranks", "command": command, "clock": "wall", **machine(), "rows": rows}
    about["threads"] = 1
    print(pages.costs(about))
    if given.keep:
        keep(Store(RESULTS / "speed.jsonl"), about)


if __name__ == "__main__":
    main()
