"""Gradients of convex functions, each with its primitive, conjugate and Fenchel-Young gap.

>>> get("leaky_relu", negative_slope=0.1)
LeakyReLU(negative_slope=0.1)

`Activation` is what a training method sees. `get` finds one by name, `from_module` and `from_call`
recognise torch's own, `from_function` takes a function of the user's and `from_table` measured
values.
"""

from lpom.activations.base import Activation, Elementwise
from lpom.activations.custom import Custom, from_function
from lpom.activations.custom_vector import CustomVector
from lpom.activations.exponential import CELU, ELU, SELU
from lpom.activations.known import (
    NOT_MONOTONE,
    call_names,
    examples,
    from_call,
    from_module,
    get,
    is_activation,
    names,
    vector_names,
)
from lpom.activations.norms import GroupNorm, L2Normalize, LayerNorm, RMSNorm
from lpom.activations.piecewise import Identity, LeakyReLU, ReLU
from lpom.activations.ramps import Hardsigmoid, Hardtanh, ReLU6, Sign, Staircase, Step
from lpom.activations.smooth import LogSigmoid, Sigmoid, Softplus, Softsign, Tanh
from lpom.activations.table import Table, from_table
from lpom.activations.thresholds import Clamp, Hardshrink, Softshrink, Threshold
from lpom.activations.vector import OneHot, Softmax, Sparsemax, TopK

__all__ = [
    "CELU",
    "ELU",
    "NOT_MONOTONE",
    "SELU",
    "Activation",
    "Clamp",
    "Custom",
    "CustomVector",
    "Elementwise",
    "GroupNorm",
    "Hardshrink",
    "Hardsigmoid",
    "Hardtanh",
    "Identity",
    "L2Normalize",
    "LayerNorm",
    "LeakyReLU",
    "LogSigmoid",
    "OneHot",
    "RMSNorm",
    "ReLU",
    "ReLU6",
    "Sigmoid",
    "Sign",
    "Softmax",
    "Softplus",
    "Softshrink",
    "Softsign",
    "Sparsemax",
    "Staircase",
    "Step",
    "Table",
    "Tanh",
    "Threshold",
    "TopK",
    "call_names",
    "examples",
    "from_call",
    "from_function",
    "from_module",
    "from_table",
    "get",
    "is_activation",
    "names",
    "vector_names",
]
