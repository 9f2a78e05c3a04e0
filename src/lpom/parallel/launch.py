"""Start the processes of one machine, as ``torchrun --standalone`` does."""

from __future__ import annotations

import os
import signal
import sys
import uuid
from collections.abc import Sequence


def rank() -> int | None:
    """The place of this process among those that were started together; None if there are none."""
    return int(os.environ["RANK"]) if "RANK" in os.environ else None


def launch(module: str, arguments: Sequence[str], processes: int) -> int:
    """Run ``python -m module arguments`` in so many processes; the exit code of the first to fail.

    When one of them fails, torch ends the others.
    """
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    os.environ.setdefault("OMP_NUM_THREADS", "1")  # or each takes every core
    plan = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=processes,
        run_id=str(uuid.uuid4()),
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
    )
    names = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT")  # of which some systems lack some
    kinds = [getattr(signal, name) for name in names if hasattr(signal, name)]
    handlers = {kind: signal.getsignal(kind) for kind in kinds}
    try:
        elastic_launch(plan, sys.executable)("-m", module, *arguments)
    except ChildFailedError as error:
        place, failure = error.get_first_failure()
        code = int(failure.exitcode)
        if code > 0:
            return code
        name = signal.Signals(-code).name  # who is killed says nothing
        print(
            f"error: rank {place} (process {failure.pid}) was ended by {name}, and the others were "
            "stopped.",
            file=sys.stderr,
        )
        return 128 - code
    except SignalException as error:
        return 128 + int(error.sigval)
    finally:  # torch puts its own in their place
        for kind, handler in handlers.items():
            signal.signal(kind, handler)
    return 0
