"""Gradients of convex functions, each with its primitive, conjugate and Fenchel-Young gap.

>>> get("leaky_relu", negative_slope=0.1)
LeakyReLU(negative_slope=0.1)

`Activation` is what a training method sees. `get` finds one by name, `from_module` and `from_call`
recognise torch's own, `from_function` takes a function of the user's and `from_table` measured
values.
"""

from lpom.activations.base import Activation, Elementwise, apply
from lpom.activations.custom import Custom, CustomVector, from_function
from lpom.activations.device import Measured, calibrated, measured
from lpom.activations.jumps import Hardshrink, Sign, Staircase, Step, Threshold
from lpom.activations.known import (
    UNSUPPORTED,
    examples,
    from_call,
    from_module,
    get,
    is_activation,
    names,
    vector_names,
)
from lpom.activations.numerical import (
    GELU,
    Absolute,
    Cosine,
    Gaussian,
    Hardswish,
    Mish,
    Raised,
    SiLU,
    Sine,
    split,
)
from lpom.activations.scalar import (
    CELU,
    ELU,
    SELU,
    Clamp,
    Hardsigmoid,
    Hardtanh,
    Identity,
    LeakyReLU,
    LogSigmoid,
    ReLU,
    ReLU6,
    Sigmoid,
    Softplus,
    Softshrink,
    Softsign,
    Tanh,
)
from lpom.activations.solver import Solver, from_solver
from lpom.activations.table import Table, from_table
from lpom.activations.vector import (
    GroupNorm,
    L2Normalize,
    LayerNorm,
    OneHot,
    RMSNorm,
    Softmax,
    Sparsemax,
    TopK,
)

__all__ = ["Absolute", "Activation", "CELU", "Clamp", "Cosine", "Custom", "CustomVector", "ELU"]
__all__ += ["Elementwise", "GELU", "Gaussian", "GroupNorm", "Hardshrink", "Hardsigmoid"]
__all__ += ["Hardswish", "Hardtanh", "Identity", "L2Normalize", "LayerNorm", "LeakyReLU"]
__all__ += ["LogSigmoid", "Measured", "Mish", "OneHot", "RMSNorm", "Raised", "ReLU", "ReLU6"]
__all__ += ["SELU", "SiLU", "Sigmoid", "Sign", "Sine", "Softmax", "Softplus", "Softshrink"]
__all__ += ["Softsign", "Solver", "Sparsemax", "Staircase", "Step", "Table", "Tanh", "Threshold"]
__all__ += ["TopK", "UNSUPPORTED", "apply", "calibrated", "examples", "from_call", "from_function"]
__all__ += ["from_module", "from_solver", "from_table", "get", "is_activation", "measured", "names"]
__all__ += ["split", "vector_names"]
