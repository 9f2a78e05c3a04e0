"""Objects as JSON and tensors, and back: the classes listed here are made, and no others.

A class joins by a line in `KNOWN`, or from outside of the package by :func:`register`. Of an object
is stored

- what its ``_to_saved()`` returns, a dictionary of plain values, arrays, tensors, modules and
  objects of other known classes; the class method ``_from_saved(saved)`` makes the object again;
- without these two: the fields of a dataclass, or the parameters and the fitted attributes of a
  scikit-learn estimator.

In JSON, numbers, texts, booleans, None and lists stand for themselves; anything else is an object
with one key, its kind: ``{"tuple": [1, 2]}``.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
from collections.abc import Mapping
from importlib import import_module
from pathlib import PurePath
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from lpom import activations, layers, losses, methods
from lpom.activations import Activation
from lpom.exceptions import ModelFileError, unknown_name
from lpom.layers import join
from lpom.losses import Loss
from lpom.methods import Method

C = TypeVar("C", bound=type)

#: Known classes by the module that has them.
KNOWN: dict[str, str] = {
    "lpom": "Adaptive Continuation Epoch Exact History MLPClassifier MLPRegressor Result "
    "StraightThrough Sweeps",
    "lpom.estimators.fitted": "Design",
    "lpom.methods": "State",
    "lpom.penalties": "Binary Box GroupL1 L1 Levels NuclearNorm Ternary",
    "lpom.tables": "TableEncoder Target",
    "lpom.tables.columns": "Category Date Dropped Number Text YesNo",
    "lpom.tables.dates": "DateFormat",
    "lpom.tables.encodings": "Pieces Scaling",
    "lpom.tables.numbers": "NumberFormat",
    "lpom.training.task": "Task",
    "sklearn.compose": "ColumnTransformer TransformedTargetRegressor",
    "sklearn.decomposition": "PCA TruncatedSVD",
    "sklearn.feature_extraction.text": "CountVectorizer HashingVectorizer TfidfTransformer "
    "TfidfVectorizer",
    "sklearn.feature_selection": "VarianceThreshold",
    "sklearn.impute": "MissingIndicator SimpleImputer",
    "sklearn.pipeline": "FeatureUnion Pipeline",
    "sklearn.preprocessing": "KBinsDiscretizer LabelBinarizer LabelEncoder MaxAbsScaler "
    "MinMaxScaler MultiLabelBinarizer Normalizer OneHotEncoder OrdinalEncoder PolynomialFeatures "
    "PowerTransformer QuantileTransformer RobustScaler StandardScaler TargetEncoder",
}
_MODULE_OF = {name: module for module, names in KNOWN.items() for name in names.split()}
_REGISTERED: dict[str, type] = {}
_REGISTRIES = {"activation": activations, "loss": losses, "method": methods}
_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        *(torch.float32, torch.float64, torch.bfloat16, torch.float16),
        *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
    )
}
_DEPTH = 64  # of values within values


def register(cls: C) -> C:
    """Let :func:`lpom.save` and :func:`lpom.load` know a class of yours; a decorator.

    It has ``_to_saved`` and ``_from_saved``, or is a dataclass or a scikit-learn estimator.
    Of a module this makes "a name and its options" what is written:

    >>> @register
    ... class Scaled(torch.nn.Module):
    ...     def __init__(self, size):
    ...         super().__init__()
    ...         self.scale = torch.nn.Parameter(torch.ones(size))
    ...
    ...     def _to_saved(self):
    ...         return {"size": len(self.scale), "weights": self.state_dict()}
    ...
    ...     @classmethod
    ...     def _from_saved(cls, saved):
    ...         made = cls(saved["size"])
    ...         made.load_state_dict(saved["weights"])
    ...         return made
    """
    if cls.__name__ in _MODULE_OF:
        raise ValueError(f"the name {cls.__name__} is taken by {_MODULE_OF[cls.__name__]}.")
    _REGISTERED[cls.__name__] = cls
    return cls


def known_class(name: str) -> type:
    """The class of this name, if it is among the known ones."""
    if name in _REGISTERED:
        return _REGISTERED[name]
    if name not in _MODULE_OF:
        raise ValueError(unknown_name("class", name, [*_MODULE_OF, *_REGISTERED]))
    found: type = getattr(import_module(_MODULE_OF[name]), name)
    return found


def encode(value: Any) -> tuple[Any, dict[str, Tensor]]:
    """JSON and named tensors that :func:`decode` makes the value of again."""
    tensors: dict[str, Tensor] = {}
    return _Encoder(tensors).value(value, ""), tensors


class _Encoder:
    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self.tensors = tensors

    def value(self, value: Any, at: str) -> Any:
        if at.count(".") > _DEPTH:
            raise ModelFileError(
                f"{at[:80]}... nests deeper than {_DEPTH} levels: is it in itself?"
            )
        if type(value) in _REGISTERED.values():
            return self.object(value, at)
        match value:
            case bool() | int() | None if type(value) in (bool, int, type(None)):
                return value
            case float() if type(value) is float:
                return value if math.isfinite(value) else {"float": str(value)}
            case str() if type(value) is str:
                return value
            case list() if type(value) is list:
                return self.items(value, at)
            case slice():
                return {"slice": self.items((value.start, value.stop, value.step), at)}
            case np.ndarray():
                return self.array(value, at)
            case np.generic():
                return {"scalar": self.array(np.asarray(value), at)}
            case np.dtype():
                return {"dtype": value.str}
            case type() if issubclass(value, np.generic):
                return {"number": value.__name__}
            case np.random.RandomState():
                return {"random": self.items(value.get_state(), at)}
            case torch.dtype():
                return {"torch": str(value).removeprefix("torch.")}
            case torch.device():
                return {"device": str(value)}
            case PurePath():
                return str(value)
            case nn.Module():
                return {"module": layers.describe(value, at, self, decode)}
            case Tensor():
                return {"tensor": self.store(at, value)}
            case Activation() | Loss() | Method():
                return self.named(value, at)
        if type(value) in (tuple, set, frozenset):
            inner: Any = value
            inner = inner if type(value) is tuple else sorted(inner, key=repr)
            return {type(value).__name__: self.items(inner, at)}
        if isinstance(value, dict) and not hasattr(value, "_to_saved"):
            if all(type(key) is str for key in value):
                return {"dict": {k: self.value(v, join(at, k)) for k, v in value.items()}}
            keys = [self.value(key, join(at, str(k))) for k, key in enumerate(value)]
            return {"items": [keys, self.items(value.values(), at)]}
        return self.object(value, at)

    def items(self, values: Any, at: str) -> list[Any]:
        return [self.value(value, join(at, str(k))) for k, value in enumerate(values)]

    def store(self, at: str, tensor: Tensor) -> str:
        name = at or "tensor"
        while name in self.tensors:  # as two keys may read the same
            name += "~"
        if tensor.dtype not in _DTYPES.values():
            raise ModelFileError(
                f"{name} is of {tensor.dtype}, which a file can't hold; it holds "
                f"{', '.join(_DTYPES)}."
            )
        if tensor.is_meta or is_lazy(tensor):
            raise ModelFileError(
                f"{name} has no values yet, so there is nothing to save; call the model once on a "
                "batch of data first."
            )
        # each has memory of its own
        self.tensors[name] = tensor.detach().cpu().clone(memory_format=torch.contiguous_format)
        return name

    def array(self, array: np.ndarray[Any, Any], at: str) -> Any:
        dtype = array.dtype
        if type(array) is not np.ndarray:
            raise self.unknown(array, at)
        if str(dtype) in _DTYPES:
            return {"array": self.store(at, torch.tensor(array))}
        if dtype.kind in "uU":  # unsigned integers of more than 8 bits, and texts
            return {"list": [dtype.str, array.tolist()]}
        if dtype.kind in "mM":
            return {"times": [dtype.str, array.astype(np.int64).tolist()]}
        if dtype.kind == "O":
            return {"objects": [list(array.shape), self.items(array.ravel(), at)]}
        raise self.unknown(array, at)

    def named(self, value: Activation | Loss | Method[Any], at: str) -> Any:
        """What is found by its name, with its parameters."""
        if isinstance(value, Method):
            kind, params = "method", value.get_params(deep=False)
        else:
            kind = "activation" if isinstance(value, Activation) else "loss"
            try:
                params = value.params()
            except TypeError as error:
                raise ModelFileError(f"{at or 'it'}: {error}") from error
        entry = {kind: [value.name, {k: self.value(v, join(at, k)) for k, v in params.items()}]}
        try:
            if decode(entry, self.tensors) == value:
                return entry
        except (ModelFileError, ValueError, TypeError):
            pass
        raise self.unknown(value, at)

    def object(self, value: Any, at: str) -> Any:
        cls = type(value)
        name = cls.__name__
        if not (name in _REGISTERED or name in _MODULE_OF) or known_class(name) is not cls:
            if isinstance(value, methods.State):  # as what a method begins with
                return self.object(methods.State(), at)
            raise self.unknown(value, at)
        if hasattr(cls, "_to_saved"):
            state = value._to_saved()
        elif dataclasses.is_dataclass(cls):
            state = {f.name: getattr(value, f.name) for f in dataclasses.fields(cls) if f.init}
        elif hasattr(cls, "_fields"):  # a named tuple
            state = value._asdict()
        else:
            state = {**value.get_params(deep=False), **vars(value)}
        return {"object": [name, {k: self.value(v, join(at, k)) for k, v in state.items()}]}

    def unknown(self, value: Any, at: str) -> ModelFileError:
        kind = value if isinstance(value, type) else type(value)
        what = getattr(value, "__qualname__", None) or kind.__qualname__
        return ModelFileError(
            f"{at or 'the object'} is {what} ({kind.__module__}), which can't be saved: files hold "
            "plain values, arrays, torch modules and objects of known classes. Use pickle, or let "
            "lpom.saving.register know the class."
        )


def decode(tree: Any, tensors: Mapping[str, Tensor]) -> Any:
    """The value that :func:`encode` told of; ValueError or the like where there is none."""
    if isinstance(tree, list):
        return [decode(item, tensors) for item in tree]
    if not isinstance(tree, dict):
        return tree
    if len(tree) != 1:
        raise ValueError(f"an object with one key was expected, got {str(list(tree))[:80]}")
    ((kind, inner),) = tree.items()

    def items(values: Any = inner) -> list[Any]:
        if not isinstance(values, list):
            raise ValueError(f"a {kind} needs a list, got {str(values)[:80]}")
        return [decode(value, tensors) for value in values]

    def entries(values: Any = inner) -> dict[str, Any]:
        if not isinstance(values, dict):
            raise ValueError(f"a {kind} needs an object, got {str(values)[:80]}")
        return {key: decode(value, tensors) for key, value in values.items()}

    match kind:
        case "float" if inner in ("inf", "-inf", "nan"):
            return float(inner)
        case "tuple":
            return tuple(items())
        case "set":
            return set(items())
        case "frozenset":
            return frozenset(items())
        case "slice":
            return slice(*items())
        case "dict":
            return entries()
        case "items":
            keys, values = inner
            return dict(zip(items(keys), items(values), strict=True))
        case "tensor":
            return tensors[inner]
        case "array":
            return tensors[inner].numpy()
        case "scalar":
            return decode(inner, tensors)[()]
        case "list" if str(inner[0])[1:2] in ("u", "U"):  # texts as wide as the widest: no wider
            return np.array(inner[1], dtype=str if "U" in inner[0] else inner[0])
        case "times":
            return np.array(inner[1], dtype=np.int64).astype(inner[0])
        case "objects":
            array = np.empty(len(inner[1]), dtype=object)
            array[:] = items(inner[1])
            return array.reshape(inner[0])
        case "dtype":
            return np.dtype(str(inner))
        case "number" if issubclass(np.dtype(str(inner)).type, np.generic):
            return np.dtype(inner).type
        case "torch":
            return _DTYPES[inner]
        case "device":
            return torch.device(inner)
        case "random":
            generator = np.random.RandomState()
            generator.set_state(tuple(items()))
            return generator
        case "module":
            return layers.build(inner, tensors, decode)
        case "activation" | "loss" | "method":
            name, params = inner
            return _REGISTRIES[kind].get(str(name), **entries(params))
        case "object":
            name, state = inner
            return _made(known_class(name), entries(state))
    raise ValueError(f"{str(tree)[:80]} is of no kind that is known")


def _made(cls: type[Any], state: dict[str, Any]) -> Any:
    """An object of a known class from what was stored of it."""
    if hasattr(cls, "_from_saved"):
        return cls._from_saved(state)
    if not hasattr(cls, "_get_param_names"):
        return cls(**state)
    params = cls._get_param_names()  # of a scikit-learn estimator
    made = cls(**{name: value for name, value in state.items() if name in params})
    for name, value in state.items():
        if name not in params:
            place = inspect.getattr_static(cls, name, None)  # no method, and no property
            if not name.isidentifier() or name.startswith("__") or hasattr(place, "__get__"):
                raise ValueError(f"{cls.__name__} has no attribute {name[:80]!r} to be set")
            setattr(made, name, value)
    return made
