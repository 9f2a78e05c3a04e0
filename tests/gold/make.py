"""Write gold.safetensors again: what version 0.1.0 computed before its core was rebuilt.

The numbers are those of the library at commit 4d0e0f4. To make them again, check that commit out,
put this folder into its tests, and run ``python -m tests.gold.make`` from its root.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from . import settings

COMMIT = "4d0e0f4"
PATH = Path(__file__).with_name("gold.safetensors")


def main() -> None:
    torch.set_num_threads(1)
    tensors, refused = {}, {}
    for network, setting in settings.cases():
        case = f"{network}/{setting}"
        try:
            measured = settings.measure(network, setting)
        except ValueError as error:
            refused[case] = str(error)
            continue
        tensors |= {f"{case}/{name}": value.contiguous() for name, value in measured.items()}
    metadata = {"commit": COMMIT, "refused": json.dumps(refused)}
    save_file(tensors, PATH, metadata=metadata)
    print(f"{len(tensors)} tensors, {PATH.stat().st_size / 2**20:.2f} MB")
    for case, reason in refused.items():
        print(f"refused: {case}: {reason}")


if __name__ == "__main__":
    main()
