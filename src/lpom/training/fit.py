"""fit() and evaluate(): what users call, checked and turned into a run of the training loop."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from lpom import methods
from lpom.checks import as_device, check_number
from lpom.exceptions import UntrainableError
from lpom.graph.tracing import unwrapped
from lpom.methods import Method, Problem, State
from lpom.methods.optimizers import OptimizerState
from lpom.parallel import Parallel, Pipeline, Ranks, own_cores
from lpom.training.callbacks import Callback, EarlyStopping, Signals
from lpom.training.checkpoint import Checkpoint, RunFolder, encode
from lpom.training.compile import check_runner
from lpom.training.data import Arrays, Loader, Source, to_measure
from lpom.training.history import Result
from lpom.training.interface import Interface, n_rows
from lpom.training.randomness import Generators, as_seed, seeded
from lpom.training.resuming import check_same, copied, resume, state_dict
from lpom.training.score import (
    check_no_targets,
    from_first_batch,
    interface_of,
    place_of,
    problem_of,
)
from lpom.training.task import FunctionLoss, LossLike, Task
from lpom.training.trainer import Trainer

_DEFAULT_ROWS = 100  # of a batch

#: Multiplications of a batch on its way up, below which one thread is faster than several.
_SMALL = 2**24


def fit(
    model: nn.Module,
    X: Any,
    y: Any = None,
    *,
    method: str | Method[Any] = "lpom",
    loss: LossLike = "auto",
    epochs: int = 10,
    batch_size: int | None = None,
    validation_data: Any = None,
    sample_weight: Any = None,
    weight_decay: float = 0.0,
    averaging: float = 0.0,
    seed: int | None = None,
    device: str | torch.device | None = None,
    callbacks: Callback | Iterable[Callback] = (),
    early_stopping: EarlyStopping | bool = False,
    progress: bool | None = None,
    state: State | None = None,
    endless: bool = False,
    checkpoint: str | Path | Checkpoint | None = None,
    parallel: Parallel | None = None,
    precision: str | None = None,
    compile: bool = False,
    diagnostics: bool | None = None,
) -> Result:
    r"""Train ``model`` in place.

    Parameters
    ----------
    model : a torch module
    X, y : tensors or arrays; or a ``DataLoader`` as X alone
        Whole numbers in a vector are classes, in a 0/1 matrix labels, floats are numbers. X may be
        a tuple or a dictionary of arrays, the arguments of the model. A ``DataLoader`` yields
        ``(X, y)``, ``(X, y, weight)``, or dictionaries of the model's arguments with the targets
        as "labels", as models of transformers take them.
    method : name or Method
    loss : name, Loss, function, or "model"
        "auto" follows y, see :meth:`lpom.training.task.Task.infer`, or is the model's own where it
        is given dictionaries with labels and its outputs have a ``loss``. A function
        ``loss(outputs, target)`` gives one mean over the batch, as those of
        ``torch.nn.functional`` do, or a value for each row.
    batch_size : rows per step, by default 100 or all if there are fewer (one or a few more where
        batch norm would else meet a single last row); full-batch methods take all in any case
    validation_data : ``(X, y)``, ``(X, y, weight)`` or a ``DataLoader``, measured after each epoch
    weight_decay : float
        Strength c of a penalty :math:`\frac{c}{2} \|W\|^2` on matrices and kernels beside the mean
        loss, by its gradient. Methods that solve for their weights do not read it: they have a
        ridge, or ``penalties``
    averaging : decay, e.g. 0.999, of a running mean of the weights, with which validation data is
        measured and the model ends: over about a thousand steps, or a tenth of those so far
    seed : fixes all that is drawn: the order of the batches, also of a ``DataLoader``, whose
        generators it seeds, and what torch's global generator gives during the run (dropout).
        That generator goes on afterwards as if nothing had been drawn. Without a seed, one is
        drawn from it
    device : where to move the model, as "cuda" or "auto", a GPU if there is one; by default it
        stays where it is
    callbacks : called with each :class:`~lpom.Epoch`; one that returns ``True`` stops the run
    early_stopping : True, or an :class:`EarlyStopping` with its own patience
    progress : whether to draw a bar; by default on a terminal
    state : of an earlier run of the same method, to begin with: the memory of an optimiser of
        the same kind and options, variables of the same rows. What does not fit other settings
        starts anew; ``state`` itself stays as it is
    checkpoint : a folder for this one run, or a :class:`Checkpoint` with one
        There the run is kept, every minute by default, and from there the same call goes on,
        after whatever has ended the process, to the result it would have had: the same weights
        and history, bit for bit, with the same number of threads. Called once more after the end,
        it returns that result. The data, and what a ``DataLoader`` makes of the same states of
        its generators and of torch's, must be the same. SIGTERM and Ctrl-C let the step
        end and write a checkpoint; after SIGTERM the program then exits with 143
    endless : whether this is a piece of a stream, so that there is no plan which schedules could
        follow: they stay at their start
    parallel : a :class:`~lpom.Parallel`, in each process of a ``torchrun``, all of which make the
        same call. Consecutive modules of an ``nn.Sequential`` or rows of each batch, for methods
        whose step runs the model
        The result, and at the end the model, are the same on every rank. ``callbacks`` run on the
        first; its checkpoints are written between epochs, and go on with any number of ranks. A
        ``DataLoader`` gives each rank rows of its own
    precision : "bf16" for steps under ``torch.autocast``, whose products round their factors to
        bfloat16. That takes about half the time where layers are wide and the processor has
        instructions for it. Weights, losses and all that is measured stay in float32
    compile : whether the model, with the rule of the method, goes through ``torch.compile`` in a
        step, which takes from seconds to minutes at the first one and a compiler for C++; where
        that fails, a warning says why and steps are made without. It pays for attention and
        batch norm, less for convolutions alone
    diagnostics : whether the history has the objective, gaps and contraction rates after every
        epoch, which take about as long as two or three steps. They need a model that torch.fx can
        follow. By default it has them where the method works on the graph of the model

    Returns
    -------
    Result

    Notes
    -----
    Two settings of the process are others during a run, and what they were afterwards. Fully
    connected networks whose batch takes fewer than 2**24 multiplications on its way up are trained
    with one thread, as several would wait for each other: 64-100-10 takes 0.6 of the time of two.
    Numbers below 1e-38 count as zero, as products with them are slow on many processors.
    """
    method = methods.get(method)
    check_number("epochs", epochs, whole=True)
    check_number("weight_decay", weight_decay, strict=False)
    _check_averaging(averaging, method, parallel)
    if (compile or precision is not None) and parallel is not None and parallel.size > 1:
        raise ValueError(
            "compile and precision are for steps of one process; leave them or parallel out."
        )
    stopper = EarlyStopping() if early_stopping is True else early_stopping or None
    if stopper is not None and not isinstance(stopper, EarlyStopping):
        raise TypeError(
            f"early_stopping must be True, False or an EarlyStopping, got {early_stopping!r}; for "
            "example early_stopping=lpom.EarlyStopping(patience=3)."
        )
    if checkpoint is not None and not isinstance(checkpoint, Checkpoint):
        checkpoint = Checkpoint(checkpoint)
    if device is not None:
        model.to(as_device(device))
    place = place_of(model)
    with ExitStack() as stack:
        stack.enter_context(without_denormals())
        keep_freed_memory()
        ranks = None
        if parallel is not None and parallel.size > 1:
            stack.callback(torch.set_num_threads, torch.get_num_threads())
            torch.set_num_threads(parallel.threads)
            if place.type == "cpu":
                stack.enter_context(own_cores(parallel.threads))
            ranks = Ranks(parallel, place)
            stack.enter_context(ranks.watched())
        folder = None
        signals = Signals()  # of other ranks: the first one tells them to stop, when it has written
        if checkpoint is not None and (ranks is None or ranks.first):
            folder = stack.enter_context(RunFolder(checkpoint))
        elif checkpoint is not None:
            stack.enter_context(signals)
        saved = None if folder is None else folder.newest()
        if ranks is not None:
            saved = ranks.of_first(saved)
        if seed is None and saved is not None:
            seed = saved["run"]["seed"]
        known = as_seed(seed)
        if ranks is not None and seed is None:
            known = ranks.of_first(known)
        stack.enter_context(seeded(known + (0 if ranks is None else ranks.rank), place))
        model = unwrapped(model)
        if isinstance(X, DataLoader):
            loader = _from_loader(X, y, method, batch_size, sample_weight, ranks)
            for generator in loader.generators if seed is not None else ():
                generator.manual_seed(known)
            generators = Generators(place, loader.generators)
            interface, task = from_first_batch(model, loader, loss)
            train: Source = loader
        else:
            _check_rows(X)
            X, y, interface = interface_of(model, X, y, loss)
            task = Task.of(interface, y, loss)
            order = torch.Generator().manual_seed(known)
            generators = Generators(place, [order])
            train = Arrays(
                X,
                y,
                task,
                interface,
                batch_size=_rows_per_step(X, method, batch_size, model),
                weight=sample_weight,
                generator=order,
                ranks=ranks,
            )
        first = train.probe()
        targets = train.target if isinstance(train, Arrays) else first.target
        task.check_range(targets, interface.output_activation)
        if isinstance(task.loss, FunctionLoss) and first.weight is not None:
            task.loss.check_weighable(interface.outputs, first.target[:2])
        problem = problem_of(interface, task, compile and method.runs_model, precision)
        if place.type == "cpu" and _is_small(model, len(first)):
            stack.callback(torch.set_num_threads, torch.get_num_threads())
            torch.set_num_threads(1)
        check_runner(compile, precision, method, [p.detach() for p in model.parameters()])
        begun = _state(method, problem, weight_decay, state)
        if diagnostics:
            problem.graph  # noqa: B018 - which raises where there is none
        _check_hooks(problem, method)
        team = None if ranks is None else Pipeline(method, problem, begun, ranks)
        trainer = Trainer(
            problem,
            task,
            method,
            begun,
            train,
            _validation_source(validation_data, task, interface, ranks),
            epochs=int(epochs),
            seed=known,
            generators=generators,
            early_stopping=stopper,
            callbacks=(callbacks,) if callable(callbacks) else tuple(callbacks),
            endless=endless,
            folder=folder,
            team=team,
            precision=precision,
            compile=compile,
            averaging=averaging,
            diagnostics=diagnostics,
        )
        if ranks is not None:
            check_same(trainer, ranks)
        if saved is not None:
            resume(trainer, saved, checkpoint and checkpoint.folder)
            if ranks is not None and not ranks.first:  # the first one's generators are restored
                torch.manual_seed(known + ranks.rank + len(trainer.history) * ranks.size)
        elif folder is not None and ranks is None:
            encode(state_dict(trainer))  # a state that can't be written is found now, not later
        if team is not None:
            team.take_own()
        result = trainer.run(progress)
        signals.heeded = result.status == "interrupted"
        if ranks is not None and team is not None and result.status != "interrupted":
            team.give_back()
            ranks.close()
        return result


def keep_freed_memory() -> None:
    """Have glibc's malloc keep what one step frees for the next one, for the rest of the process.

    It gives memory back to the system otherwise, and to get its pages again took 10 to 25 % of a
    step (ResNet-20, transformer, 784-2048x3-10).
    """
    with suppress(AttributeError, OSError, TypeError):  # another system's
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(-3, 2**25)  # M_MMAP_THRESHOLD, the most it takes
        mallopt(-1, -1)  # M_TRIM_THRESHOLD: never


@contextmanager
def without_denormals() -> Iterator[None]:
    """Let numbers below 1e-38 count as zero, in this thread and until the end of the run.

    They come by themselves, where a softmax is sure and in the memory of an optimiser, and on many
    processors of Intel a product with them takes a hundred times as long. Others don't mind.
    """
    before = bool(torch.tensor(1e-40) == 0)  # torch tells nobody how it is set
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(before)


def _check_averaging(decay: float, method: Method[Any], parallel: Parallel | None) -> None:
    check_number("averaging", decay, strict=False)
    if decay >= 1:
        raise ValueError(
            f"averaging is the decay of a running mean, from 0 (none) to below 1, got {decay!r}; "
            "0.999 averages over about the last thousand steps."
        )
    if decay and getattr(method, "penalties", None) is not None:
        raise ValueError(
            "averaging would take the weights off the zeros and levels that penalties put them "
            "on; leave one of the two out."
        )
    if decay and parallel is not None and parallel.layers > 1:
        raise ValueError(
            "averaging needs all weights after every step, but ranks that share the layers have "
            "only their own; leave it out, or take layers=1."
        )


def _is_small(model: nn.Module, rows: int) -> bool:
    """Whether threads would cost more than they bring."""
    owners = [m for m in model.modules() if next(m.parameters(recurse=False), None) is not None]
    linear = [m for m in owners if isinstance(m, nn.Linear)]
    products = rows * sum(m.in_features * m.out_features for m in linear)
    return all(isinstance(m, nn.Linear) for m in owners) and products < _SMALL


def _from_loader(
    loader: DataLoader[Any],
    y: Any,
    method: Method[Any],
    batch_size: int | None,
    weight: Any,
    ranks: Ranks | None,
) -> Loader:
    check_no_targets(y)
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
    if ranks is not None and ranks.parallel.layers > 1:
        raise ValueError(
            "ranks that share the layers must see the same rows, which DataLoaders of several "
            "processes do not promise. Give X and y as arrays (a memory map stays on disk), or "
            "take layers=1."
        )
    return Loader(loader, ranks=ranks)


def _rows_per_step(
    X: Any, method: Method[Any], batch_size: int | None, model: nn.Module
) -> int | None:
    if method.full_batch:
        return None
    if batch_size is not None:
        return batch_size
    n = n_rows(X)
    size = min(_DEFAULT_ROWS, n)
    if any(isinstance(module, nn.BatchNorm1d) for module in model.modules()):
        while 1 < size < n and n % size == 1:  # a last row by itself would have no variance
            size += 1
    return size or None


def _check_rows(X: Any) -> None:
    """Batches by any other name than a DataLoader's are not taken for rows."""
    pairs = isinstance(X, list) and len(X) > 0 and isinstance(X[0], tuple | list)
    batches = pairs and all(isinstance(part, Tensor) and part.ndim > 0 for part in X[0])
    if batches or isinstance(X, Dataset) or hasattr(X, "__next__"):
        raise TypeError(
            f"X must be an array of rows or a DataLoader, got {type(X).__name__}. Batches come "
            "from a loader: lpom.fit(model, DataLoader(dataset, batch_size=100, shuffle=True))."
        )


def _check_hooks(problem: Problem, method: Method[Any]) -> None:
    if method.runs_model:
        return
    for name, parameter in problem.model.named_parameters():
        if parameter._backward_hooks:
            raise UntrainableError(
                f"{name} has a hook on its gradient (register_hook), which {method.name!r} would "
                "pass over: only autograd calls it. Remove it, freeze what is not to move with "
                "requires_grad_(False), or train with lpom.lift(model) in a loop of your own."
            )


def _validation_source(
    data: Any, task: Task, interface: Interface, ranks: Ranks | None
) -> Source | None:
    if data is None:
        return None
    if isinstance(data, DataLoader):
        return to_measure(data, None, task, interface)
    if not isinstance(data, tuple | list) or len(data) not in (2, 3):
        raise TypeError("validation_data must be (X, y), (X, y, weight) or a DataLoader.")
    X, y, *weight = data
    return to_measure(X, y, task, interface, weight=weight[0] if weight else None, ranks=ranks)


def _state(
    method: Method[Any], problem: Problem, weight_decay: float, given: State | None
) -> State:
    """A new state, with what it can take from the given one."""
    state: State = method.init(problem)
    state.method = method.name
    if isinstance(state, OptimizerState):
        state.weight_decay = weight_decay
    if given is None:
        return state
    if type(given) is not type(state) or given.method != method.name:
        name = f"one of {given.method!r} " if isinstance(given, State) else ""
        raise TypeError(
            f"state should come from a run of method {method.name!r} ({type(state).__name__}), "
            f"got {name}({type(given).__name__}). Leave it out to start again."
        )
    state.load_state_dict(copied(given.state_dict(), problem.parameters[0].device))
    return state
