"""What a torch module does, as torch.fx follows it, with the sizes of a first batch."""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import linecache
import operator
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn.parameter import UninitializedParameter

from lpom import activations
from lpom.exceptions import UntrainableError
from lpom.graph.operations import SHAPES, call_name, module_name
from lpom.graph.proxies import ShapedProxy
from lpom.graph.rewriting import as_values
from lpom.graph.simpler import simpler_function, simpler_module
from lpom.modes import evaluating, keeping_modes, training

_HERE = str(Path(__file__).parent)
_TORCH = str(Path(torch.__file__).parent)
_PLAIN = nn.Module.__call__, nn.Module.__getattr__
#: Functions that make tensors of a size, which torch.fx does not see by itself.
_FACTORIES = ("zeros", "ones", "full", "empty", "arange", "eye")
#: Those that draw.
_DRAWN = ("rand", "randn", "randint", "randperm", "bernoulli", "normal", "multinomial")


def traced(model: nn.Module, example: Tensor | None = None) -> tuple[fx.Graph, dict[fx.Node, str]]:
    """All that the module does, before it is cut into states, and the line where each thing stands.

    What does not reach the output is left out; what is made of several activations is written out
    as `lpom.graph.simpler` says.
    """
    for name, parameter in model.named_parameters():
        if isinstance(parameter, UninitializedParameter):
            raise UntrainableError(
                f"the layer of {name} is lazy and has no weights yet; call the model once on a "
                "batch of data first."
            )
    if isinstance(model, torch.jit.ScriptModule):
        raise UntrainableError(
            "a scripted or jit-traced module shows nothing of what it does; give the module that "
            "it was made of."
        )
    if model._forward_hooks or model._forward_pre_hooks:
        raise UntrainableError(
            "the model itself has forward hooks, which tracing would pass over; give "
            "nn.Sequential(model), which calls it with them, or remove them."
        )
    plain = _in_a_row(model)
    if plain is not None:
        return plain, {}
    inputs = _inputs(model)
    if len(inputs) > 1:
        raise UntrainableError(
            f"the model takes {len(inputs)} inputs ({', '.join(inputs)}); give it one tensor "
            "for what needs a graph; the default step takes tuples and dictionaries."
        )
    tracer = _Tracer(example)
    try:
        graph = tracer.in_both_modes(model)
    except (fx.proxy.TraceError, TypeError, NameError) as error:
        raise UntrainableError(
            f"torch.fx cannot follow {type(model).__name__}: {error} "
            f"({tracer.line or 'line unknown'}). The model's Python may not depend on values of "
            "tensors or on the size of the batch. The default step of lpom.fit needs no graph."
        ) from error
    as_values(graph, model.get_submodule, tracer.lines)
    leave_out_unused(graph)
    return graph, tracer.lines


def _inputs(model: nn.Module) -> list[str]:
    """The names of what must be given to a model: all else has a value by itself."""
    given = inspect.signature(model.forward).parameters.values()
    more = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [p.name for p in given if p.default is p.empty and p.kind not in more]


def _in_a_row(model: nn.Module) -> fx.Graph | None:
    """The graph of torch's modules one after the other: they say what they do.

    Tracing, which puts its hands on all of torch, takes as long as an epoch of a small network.
    """
    if type(model) is not nn.Sequential:
        return None
    names = {module: name for name, module in reversed(model._modules.items())}
    for module in names:
        simple = module_name(module) is not None or activations.is_activation(module)
        if not simple or simpler_module(module) is not None:
            return None
    graph = fx.Graph()
    value = graph.placeholder("input")
    for module in model._modules.values():
        value = graph.call_module(names[module], (value,))
    graph.output(value)
    return graph


def leave_out_unused(graph: fx.Graph) -> None:
    """Leave out what does not reach the output."""
    for node in reversed(list(graph.nodes)):
        if not node.users and node.op not in ("placeholder", "output"):
            graph.erase_node(node)


@contextlib.contextmanager
def left_as_it_was(model: nn.Module) -> Iterator[None]:
    """Without the attributes where torch.fx puts tensors that the model makes on its way."""
    before = set(vars(model))
    try:
        yield
    finally:
        for name in set(vars(model)) - before:
            delattr(model, name)


def unwrapped(model: nn.Module) -> nn.Module:
    """The module inside the wrapper of torch.compile, `lpom.lift` or data-parallel training.

    It has the same weights.
    """
    inner = getattr(model, "_orig_mod", None)
    if isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel):
        inner = model.module
    return unwrapped(inner) if isinstance(inner, nn.Module) else model


class _Tracer(fx.Tracer):
    """torch.fx's tracer; sizes of tensors are numbers, except those that follow the batch."""

    def __init__(self, example: Tensor | None) -> None:
        super().__init__()
        self.example = example
        self.lines: dict[fx.Node, str] = {}
        self.line = ""
        self._known: dict[fx.Node, tuple[Any, Any]] = {}
        self._learns = torch.is_grad_enabled()
        self._without_grad: set[fx.Node] = set()

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        if isinstance(m, activations.Elementwise):
            return True
        return super().is_leaf_module(m, module_qualified_name)

    def get_fresh_qualname(self, prefix: str) -> str:
        """The first free name, so that every trace of a model has the same ones."""
        names = (f"{prefix}{k}" for k in itertools.count())
        return next(name for name in names if not hasattr(self.root, name))

    def create_args_for_root(
        self, root_fn: Callable[..., Any], is_module: bool, concrete_args: Any = None
    ) -> tuple[Callable[..., Any], list[Any]]:
        """The data alone: other arguments have the values that they have by themselves."""
        given = inspect.signature(self.root.forward).parameters
        name = next(iter(_inputs(self.root)), next(iter(given), "input"))
        data = self.create_proxy("placeholder", name, (), {})
        named = name in given and given[name].kind is inspect.Parameter.KEYWORD_ONLY
        call = functools.partial(root_fn, **{name: data}) if named else root_fn
        return call, [self.root] if named else [self.root, data]

    def in_both_modes(self, model: nn.Module) -> fx.Graph:
        """What the model does in training; a flag that is another in evaluation stays a question.

        So ``F.dropout(x, training=self.training)`` follows the model's mode at every call.
        """
        with keeping_modes(model), self._factories_traced():
            train = training(model)
            model.eval()
            before = {name: (b._version, b.clone()) for name, b in model.named_buffers()}
            with left_as_it_was(model):
                evaluated = self.trace(model)
            self.lines.clear()
            self._known.clear()
            self._without_grad.clear()
            train()
            traced = self.trace(model)
        for name, buffer in model.named_buffers():
            version, value = before.get(name, (buffer._version, buffer))
            if buffer._version != version:
                with torch.no_grad():
                    buffer.copy_(value)
                raise UntrainableError(
                    f"the model's forward changes its buffer {name!r} by itself, which steps would "
                    "not do. Leave that out; the default step of lpom.fit needs no graph."
                )
        pairs = list(zip(traced.nodes, evaluated.nodes, strict=False))
        if len(traced.nodes) != len(evaluated.nodes) or any(
            (a.op, call_name(a.target)) != (b.op, call_name(b.target)) for a, b in pairs
        ):
            raise fx.proxy.TraceError(
                "it does other operations in training than in evaluation (a branch on "
                "self.training); modules such as nn.Dropout may differ, the path may not."
            )
        for node, other in pairs:
            self._follow_mode(traced, node, other)
        self._detach(traced)
        return traced

    def _detach(self, traced: fx.Graph) -> None:
        """Nothing is pulled through what the model does in ``with torch.no_grad()``."""
        for node in list(traced.nodes):
            if node not in self._without_grad:
                continue
            picks = [user for user in node.users if user.target is operator.getitem]
            self._without_grad.update(picks)  # of several tensors, or of one: cut off above them
            users = [user for user in node.users if user not in self._without_grad]
            if users and self._is_tensor(node):
                with traced.inserting_after(node):
                    ended = traced.call_method("detach", (node,))
                self.lines[ended] = self.lines.get(node, "")
                for user in users:
                    user.replace_input_with(node, ended)

    def _is_tensor(self, node: fx.Node) -> bool:
        if self.example is None:
            return call_name(node.target) not in SHAPES
        return isinstance(self._value(node, 0), Tensor)

    def _follow_mode(self, traced: fx.Graph, node: fx.Node, other: fx.Node) -> None:
        """Put the model's own flag where the two traces have True and False."""

        def chosen(training: Any, evaluating: Any) -> Any:
            if not (training is True and evaluating is False):
                return training
            with traced.inserting_before(node):
                flag = traced.get_attr("training", type_expr=bool)
            self.lines[flag] = self.lines.get(node, "")
            return flag

        node.args = tuple(map(chosen, node.args, other.args))
        node.kwargs = {k: chosen(v, other.kwargs.get(k)) for k, v in node.kwargs.items()}

    def call_module(
        self,
        m: nn.Module,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        simpler = simpler_module(m)
        if simpler is not None:
            if m._forward_hooks or m._forward_pre_hooks:
                raise UntrainableError(
                    f"{self.path_of_module(m)} ({type(m).__name__}) can't be trained: it has "
                    "forward hooks, which would be passed over."
                )
            return simpler(m, *args, **kwargs)
        try:
            self.path_of_module(m)
        except NameError:  # made inside of forward, as nn.ReLU()(x): what it calls is seen
            return forward(*args, **kwargs)
        return super().call_module(m, forward, args, kwargs)

    def create_proxy(
        self, kind: str, target: Any, args: Any, kwargs: Any, *more: Any, **named: Any
    ) -> Any:
        if kind == "call_function":
            simpler = simpler_function(target, args, kwargs)
            if simpler is not None:
                return simpler(*args, **kwargs)
        return super().create_proxy(kind, target, args, kwargs, *more, **named)

    def create_node(self, *args: Any, **kwargs: Any) -> fx.Node:
        node = super().create_node(*args, **kwargs)
        self.line = _user_line() or self.line
        self.lines[node] = self.line
        if self._learns and not torch.is_grad_enabled() and node.op.startswith("call"):
            self._without_grad.add(node)
        return node

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return ShapedProxy(node, self)

    @contextlib.contextmanager
    def _factories_traced(self) -> Iterator[None]:
        """Let torch.zeros(x.shape[0], ...) and its like be seen where a size is a proxy.

        And all that is drawn: else one draw would stand for all.
        """
        originals = {name: getattr(torch, name) for name in (*_FACTORIES, *_DRAWN)}

        def seen(original: Callable[..., Any], always: bool) -> Callable[..., Any]:
            def call(*args: Any, **kwargs: Any) -> Any:
                proxies: list[fx.Proxy] = []
                fx.node.map_aggregate(
                    (args, kwargs), lambda a: proxies.append(a) if isinstance(a, fx.Proxy) else a
                )
                if proxies or always:
                    return self.create_proxy("call_function", original, args, kwargs)
                return original(*args, **kwargs)

            return call

        for name, original in originals.items():
            setattr(torch, name, seen(original, name in _DRAWN))
        try:
            yield
        finally:
            for name, original in originals.items():
                setattr(torch, name, original)

    def sizes(self, node: fx.Node) -> tuple[Any, ...] | None:
        """Sizes of a value for batches of two and of three rows, as pairs; None if unknown."""
        if self.example is None:
            return None
        two, three = (self._value(node, k) for k in (0, 1))
        if not (isinstance(two, Tensor) and isinstance(three, Tensor)):
            return None
        return tuple(zip(two.shape, three.shape, strict=True))

    def parts(self, node: fx.Node) -> int | None:
        """How many tensors a value consists of, None if that is unknown or it is one."""
        value = None if self.example is None else self._value(node, 0)
        return len(value) if isinstance(value, tuple | list) else None

    def _value(self, node: fx.Node, k: int) -> Any:
        """What the node gives for the first two (k = 0) or three rows of the example."""
        for earlier in self.graph.nodes:
            if earlier not in self._known and earlier.op != "output":
                self._known[earlier] = (self._run(earlier, 0), self._run(earlier, 1))
            if earlier is node:
                break
        return self._known[node][k]

    @torch.no_grad()
    def _run(self, node: fx.Node, k: int) -> Any:
        assert self.example is not None
        if node.op == "placeholder":
            rows = torch.cat([self.example] * 3) if len(self.example) < 3 else self.example
            return rows[: 2 + k]
        args: Any = fx.node.map_arg(node.args, lambda n: self._known[n][k])
        kwargs: Any = fx.node.map_arg(node.kwargs, lambda n: self._known[n][k])
        if node.op == "get_attr":
            with _untraced():
                return operator.attrgetter(str(node.target))(self.root)
        if node.op == "call_module":
            module = self.root.get_submodule(str(node.target))
            with evaluating(module), _untraced():  # statistics and masks stay as they are
                return module(*args, **kwargs)
        if node.op == "call_method":
            return getattr(args[0], str(node.target))(*args[1:], **kwargs)
        return node.target(*args, **kwargs)  # type: ignore[operator]


@torch.no_grad()
def check_outputs(model: nn.Module, run: Callable[[Tensor], Tensor], example: Tensor) -> None:
    """Raise where ``run``, made of a trace, does not do what the model itself does.

    Layers one after the other are what they are, and a model that draws never says the same.
    """
    if type(model) is nn.Sequential and not any(any(m.children()) for m in model):
        return
    generator = torch.Generator(example.device).manual_seed(0)
    rows = example
    if example.is_floating_point():
        rows = torch.rand(example.shape, generator=generator, device=example.device).to(example)
    with evaluating(model), torch.random.fork_rng(devices=[]):
        try:
            wanted, again = model(rows), model(rows)
        except (RuntimeError, IndexError, TypeError, ValueError):  # values that mean something
            return
        traced = run(rows).reshape(wanted.shape)
    size = float(wanted.abs().max())
    same = torch.allclose(traced, wanted, rtol=0.0, atol=0.01 * size + 1e-6)
    if torch.equal(wanted, again) and not same:
        raise UntrainableError(
            f"what torch.fx has seen of {type(model).__name__} gives other outputs than the model "
            "itself: it does something that can't be seen (tensors changed through another name, "
            "numbers read out of tensors). The default step of lpom.fit needs no graph."
        )


@contextlib.contextmanager
def _untraced() -> Iterator[None]:
    """Run modules as they are, while torch.fx has its own hands on their calls and attributes."""
    patched = nn.Module.__call__, nn.Module.__getattr__
    nn.Module.__call__, nn.Module.__getattr__ = _PLAIN  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.__call__, nn.Module.__getattr__ = patched  # type: ignore[method-assign]


def _user_line() -> str:
    """The line of the user's own model that is running."""
    frame = sys._getframe(2)
    while frame is not None:
        file = frame.f_code.co_filename
        if file == __file__ and frame.f_code.co_name == "traced":
            return ""  # beyond it stands who asked for the trace
        if not file.startswith((_TORCH, _HERE)) and not file.startswith("<"):
            code = linecache.getline(file, frame.f_lineno).strip()
            return f"line {frame.f_lineno} of {Path(file).name}: {code}"
        frame = frame.f_back  # type: ignore[assignment]
    return ""
