"""fit() and evaluate(): what users call, checked and turned into a run of the training loop."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from lpom import methods
from lpom.checks import as_device, check_number
from lpom.data import Arrays, Loader, Source, first_targets, n_rows, to_measure
from lpom.loop import Callback, EarlyStopping, Result, TrainingRun, measure
from lpom.losses import Loss
from lpom.methods import Method, Problem, State
from lpom.network import Lifted
from lpom.tasks import Task

_DEFAULT_ROWS = 100  # of a batch


def fit(
    model: nn.Module,
    X: Any,
    y: Any = None,
    *,
    method: str | Method[Any] = "lpom",
    loss: str | Loss = "auto",
    epochs: int = 10,
    batch_size: int | None = None,
    validation_data: Any = None,
    sample_weight: Any = None,
    seed: int | None = None,
    device: str | torch.device | None = None,
    callbacks: Callback | Iterable[Callback] = (),
    early_stopping: EarlyStopping | bool = False,
    progress: bool | None = None,
    state: State | None = None,
    span: tuple[float, float] = (0.0, 1.0),
) -> Result:
    """Train ``model`` in place.

    Parameters
    ----------
    model : torch.nn.Sequential of Linear layers, each followed by at most one activation
    X, y : tensors or arrays; or a ``DataLoader`` as X alone
        Whole numbers in a vector are classes, in a 0/1 matrix labels, floats are numbers.
    method : name or Method
    loss : name or Loss; "auto" follows y, see :meth:`lpom.tasks.Task.infer`
    batch_size : rows per step, by default 100 or all if there are fewer; full-batch methods take
        all in any case
    validation_data : ``(X, y)``, ``(X, y, weight)`` or a ``DataLoader``, measured after each epoch
    seed : fixes the order of the batches
    device : where to move the model; by default it stays where it is
    callbacks : called with each :class:`~lpom.history.Epoch`; a true answer stops the run
    early_stopping : True, or an :class:`EarlyStopping` with its own patience
    progress : whether to draw a bar; by default on a terminal
    state, span : the state to go on from, and the share of the whole plan this call covers, e.g.
        (0.5, 1.0) for the second half: learning-rate schedules follow it

    Returns
    -------
    Result
    """
    method = methods.get(method)
    check_number("epochs", epochs, whole=True)
    stopper = EarlyStopping() if early_stopping is True else early_stopping or None
    if stopper is not None and not isinstance(stopper, EarlyStopping):
        raise TypeError(
            f"early_stopping must be True, False or an EarlyStopping, got {early_stopping!r}; for "
            "example early_stopping=lpom.EarlyStopping(patience=3)."
        )
    if callable(callbacks):
        callbacks = [callbacks]
    if device is not None:
        model.to(as_device(device))
    network = Lifted.from_module(model)
    if not any(parameter.requires_grad for parameter in network.parameters):
        raise ValueError(
            "every layer of the model is frozen, so there is nothing to train; set "
            "requires_grad=True on the weights that should move."
        )
    targets, begun = first_targets(X, y)
    task = Task.infer(targets, network.n_outputs, loss, network[-1].activation)
    train = _training_source(X, y, begun, task, network, method, batch_size, sample_weight, seed)
    validation = _validation_source(validation_data, task, network)
    problem = Problem(network, task.loss)
    state = method.init(problem) if state is None else _bound(state, method, problem)
    state.parameters, state.setup = network.parameters, _setup(method, problem)
    run = TrainingRun(
        model, problem, task, method, state, train, validation, stopper, tuple(callbacks)
    )
    return run.go(int(epochs), span, progress)


def evaluate(
    model: nn.Module, X: Any, y: Any = None, *, loss: str | Loss = "auto"
) -> tuple[float, float]:
    """Mean loss, and accuracy or R2, of a plain forward pass."""
    network = Lifted.from_module(model)
    targets, begun = first_targets(X, y)
    task = Task.infer(targets, network.n_outputs, loss, network[-1].activation)
    measured = measure(model, to_measure(X, y, task, network, begun=begun), task)
    return measured.loss, measured.score


def _training_source(
    X: Any,
    y: Any,
    begun: Any,
    task: Task,
    network: Lifted,
    method: Method[Any],
    batch_size: int | None,
    weight: Any,
    seed: int | None,
) -> Source:
    if isinstance(X, DataLoader):
        if method.full_batch:
            raise ValueError(
                f"method {method.name!r} keeps variables for every sample and needs all rows at "
                "once; give X and y as arrays in place of the DataLoader."
            )
        if batch_size is not None or weight is not None:
            raise TypeError(
                "a DataLoader brings its own batches, of (X, y) or (X, y, weight); leave "
                "batch_size and sample_weight out."
            )
        return Loader(X, task, network, begun)
    if method.full_batch:
        batch_size = None
    elif batch_size is None:
        batch_size = min(_DEFAULT_ROWS, n_rows(X)) or None
    order = torch.Generator()
    order.manual_seed(seed) if seed is not None else order.seed()
    return Arrays(X, y, task, network, batch_size=batch_size, weight=weight, generator=order)


def _validation_source(data: Any, task: Task, network: Lifted) -> Source | None:
    if data is None:
        return None
    if isinstance(data, DataLoader):
        return to_measure(data, None, task, network)
    if not isinstance(data, tuple | list) or len(data) not in (2, 3):
        raise TypeError("validation_data must be (X, y), (X, y, weight) or a DataLoader.")
    X, y, *weight = data
    return to_measure(X, y, task, network, weight=weight[0] if weight else None)


def _bound(state: State, method: Method[Any], problem: Problem) -> State:
    """The state, or a copy for this network and these settings if it was made for others."""
    if state.serves(problem) and state.setup == _setup(method, problem):
        return state
    fresh = method.init(problem)
    name = state.setup.partition("(")[0] or method.name
    if name != method.name or type(state) is not type(fresh):
        raise TypeError(
            f"state should come from a run of method {method.name!r} ({type(fresh).__name__}), "
            f"got one of {name!r} ({type(state).__name__}). Leave it out to start again."
        )
    tensors = state.tensors()
    if tensors is None:
        raise ValueError(
            "the state belongs to another model or other settings and can't be carried over; "
            "leave it out to start again."
        )
    fresh.load_tensors({name: tensor.clone() for name, tensor in tensors.items()})
    fresh.remarks, fresh.said = dict(state.remarks), set(state.said)
    return fresh


def _setup(method: Method[Any], problem: Problem) -> str:
    """The method, all its settings, and the kind of numbers it works with."""
    like = problem.network.parameters[0]
    return f"{method.name}({method.get_params()}, {like.dtype}, {like.device})"
