"""What there is of a run between two steps: as tensors and plain values, and put back."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from lpom.exceptions import CheckpointError, warn
from lpom.methods import Method, State
from lpom.methods.base import fingerprint
from lpom.methods.optimizers import SCHEDULED, OptimizerState
from lpom.parallel import Ranks
from lpom.training.data import Arrays
from lpom.training.history import Epoch, History

if TYPE_CHECKING:
    from lpom.training.trainer import Trainer

_AVERAGED = 10  # steps count with this over their number until the decay says less


def describe(trainer: Trainer) -> dict[str, Any]:
    """What must be the same for a run to go on, in plain values."""
    watch = trainer.watch
    return {
        "method": settings_of(trainer.method),
        "optimizer": optimizer_of(trainer.state),
        "loss": repr(trainer.task.loss),
        "weight decay": getattr(trainer.state, "weight_decay", 0.0),
        "task": trainer.task.kind,
        "precision": trainer.precision,
        "compile": trainer.compile or None,
        "averaging": trainer.averaging or None,
        "epochs": trainer.epochs,
        "seed": trainer.seed,
        "endless": trainer.endless,
        "early stopping": None if watch is None else repr(watch.rule),
        "data": trainer.train.describe(),
        "validation data": None if trainer.validation is None else trainer.validation.describe(),
        "model": {
            name: f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
            for name, tensor in named_tensors(trainer.model)
        },
    }


def state_dict(trainer: Trainer) -> dict[str, Any]:
    """The whole run between two steps; tensors are not copied."""
    return {
        "run": describe(trainer),
        "status": trainer.status,
        "model": dict(named_tensors(trainer.model)),
        "method": trainer.team.memory(trainer.state.state_dict()),
        "generators": {
            "start": trainer.generators.start,
            "epoch": trainer.drawn_from,
            "now": trainer.generators.states(),
        },
        "batches done": trainer.steps_done,
        "samples seen": trainer.rows_seen,
        "first targets": _first_targets(trainer),
        "measured": trainer.measured.state_dict(),
        "history": [asdict(epoch) for epoch in trainer.history],
        "early stopping": None if trainer.watch is None else trainer.watch.state_dict(),
        "good": trainer.good,
        "best": trainer.best,
        "average": None if trainer.average is None else trainer.average.state_dict(),
        "seconds": [trainer.elapsed(), trainer.training_seconds, trainer.epoch_seconds],
    }


def _first_targets(trainer: Trainer) -> str | None:
    """Of a loader, which tells nothing of its rows; None where each process has its own."""
    return fingerprint(trainer.probe.target) if trainer.team.size == 1 else None


def load_state_dict(trainer: Trainer, saved: dict[str, Any]) -> None:
    """Go on from what `state_dict` gave, bit for bit; nothing of it is kept but copied.

    The data must be the same, and a ``DataLoader`` give the same batches from the same
    states of its generator and of torch's.
    """
    before, now = saved["run"], describe(trainer)
    differing = [name for name in now if before.get(name) != now[name]]
    if differing:
        listed = (f"{name} {before.get(name)} there, {now[name]} here" for name in differing)
        raise ValueError(f"this is not the run that was begun: {'; '.join(listed)}.")
    saved = copied(saved, trainer.problem.parameters[0].device)
    drawn = saved["generators"]
    trainer.history = History(trainer.task.metric, [Epoch.of(epoch) for epoch in saved["history"]])
    if not all(map(torch.equal, drawn["start"], trainer.generators.start)):
        trainer.generators.restore(drawn["start"])
        trainer.generators.start = drawn["start"]
        trainer.train.rewind()
        trainer.probe = trainer.train.probe()
    if saved["first targets"] not in (None, _first_targets(trainer)):
        warn(
            "the DataLoader begins with other targets than when this run was begun. If its "
            "rows are others, stop, and start again in another folder: the run goes on from "
            "the old ones. (A sampler that draws from elsewhere than torch gives another "
            "order, and this warning.)",
            UserWarning,
        )
    trainer.begin_epoch(drawn["epoch"])
    trainer.status = saved["status"]
    if trainer.history:
        trainer.train.rewind(len(trainer.history))
    if trainer.status == "running" and saved["batches done"]:  # else the order is still to draw
        if trainer.history:
            trainer.generators.restore(drawn["epoch"])
        trainer.batches = trainer.train.epoch(skip=saved["batches done"])
    trainer.generators.restore(drawn["now"])
    put_back(trainer.model, saved["model"])
    trainer.state.load_state_dict(saved["method"])
    trainer.steps_done, trainer.rows_seen = saved["batches done"], saved["samples seen"]
    trainer.measured.load_state_dict(saved["measured"])
    if trainer.watch is not None:
        trainer.watch.load_state_dict(saved["early stopping"])
    trainer.good, trainer.best = saved["good"], saved["best"]
    if trainer.average is not None:
        trainer.average.load_state_dict(saved["average"])
    trainer.seconds, trainer.training_seconds, trainer.epoch_seconds = saved["seconds"]


def check_same(trainer: Trainer, ranks: Ranks) -> None:
    """All ranks must have been given the same; but each loader has rows of its own."""
    import lpom

    shared = isinstance(trainer.train, Arrays)
    rows = trainer.train.probe().fingerprint
    if shared:
        rows = str(trainer.train.describe())
    known = describe(trainer) | {
        "versions": f"torch {torch.__version__}, lpom {lpom.__version__}",
        "parallel": repr(ranks.parallel),
        "weights of the model": fingerprint(*trainer.model.state_dict().values()),
        "rows of X, y": rows if shared else "",
    }
    found = ranks.gather(known)
    for name, other in zip(ranks.names, found, strict=True):
        differing = [what for what in known if found[0][what] != other[what]]
        if differing:
            listed = "; ".join(f"{what}: {found[0][what]} and {other[what]}" for what in differing)
            raise ValueError(
                f"all ranks must make the same call, but {ranks.names[0]} and {name} differ in "
                f"{listed}. Give all of them the same settings, data and seeds."
            )
    others = ranks.gather(rows)
    if not shared and len(set(others)) < ranks.size:
        raise ValueError(
            "the DataLoaders of several ranks give the same rows. Give each its own: "
            "sampler=DistributedSampler(dataset), or a part of the files."
        )


def resume(trainer: Trainer, saved: dict[str, Any], folder: Any) -> None:
    try:
        load_state_dict(trainer, saved)
    except (LookupError, TypeError, ValueError, RuntimeError) as error:
        reason = f"it has no {error}." if isinstance(error, KeyError) else error
        raise CheckpointError(
            f"the run kept in {folder} can't go on: {reason} Make the call that began it with the "
            "lpom that began it, or use another folder."
        ) from error


def settings_of(method: Method[Any]) -> str:
    """The method and all its settings, the same in every process."""
    return re.sub(r" at 0x[0-9a-f]+", "", f"{method.name}({method.get_params()})")


def optimizer_of(state: State) -> list[str]:
    """The optimiser's own settings, which a function that makes it does not tell."""
    if not isinstance(state, OptimizerState) or state.optimizer is None:
        return []
    optimizer, found = state.optimizer, []
    for group in optimizer.param_groups:
        known = group | {"lr": group.get("initial_lr", group["lr"])}  # before any schedule
        if state.scheduler is not None:
            known = {k: v for k, v in known.items() if k not in SCHEDULED}
        plain = {k: v for k, v in known.items() if isinstance(v, int | float | str | tuple)}
        found.append(f"{type(optimizer).__name__}({plain})")
    return found


def copied(value: Any, device: torch.device) -> Any:
    """Copies of all tensors, on this device but for the bytes of generators."""
    match value:
        case Tensor():
            place = torch.device("cpu") if value.dtype == torch.uint8 else device
            return value.detach().to(place, copy=True)
        case dict():
            return {name: copied(inner, device) for name, inner in value.items()}
        case list() | tuple():
            return [copied(inner, device) for inner in value]
    return value


def named_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """All parameters and buffers, those too that ``state_dict`` leaves out."""
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        yield name, tensor.detach()


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in named_tensors(model)}


def put_back(model: nn.Module, weights: dict[str, Tensor]) -> None:
    for name, tensor in named_tensors(model):
        tensor.copy_(weights[name])


def averaged(model: nn.Module, decay: float) -> AveragedModel:
    r"""A copy of ``model`` whose ``update_parameters(model)`` after step t makes it the mean

    .. math:: M_t = M_{t-1} + w_t (W_t - M_{t-1}), \quad w_t = \max(1 - d, 10 / (9 + t)),

    of weights and buffers, d the ``decay``: over about the last tenth of the steps, and over
    :math:`1 / (1 - d)` of them once that is less, so that short runs don't end with their start.
    """

    @torch.no_grad()
    def move(means: Any, now: Any, before: Tensor | int) -> None:
        if means[0].is_floating_point():
            weight = max(1 - decay, _AVERAGED / (_AVERAGED + int(before)))
            torch._foreach_lerp_(means, now, weight)
        else:  # counters
            torch._foreach_copy_(means, now)

    return AveragedModel(model, multi_avg_fn=move, use_buffers=True)
