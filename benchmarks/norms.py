"""Networks with norms, for the study `normalised`; every norm is a module of torch's own."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import trained


class Pulled(torch.autograd.Function):
    """Rows over their root mean square; backwards the derivative, and a pull along each row.

    ``delta / 2 |g| sqrt(D) / R`` along ``z / R``, for rows z of D entries, R^2 = |z|^2 + D eps.
    """

    @staticmethod
    def forward(ctx: Any, z: Tensor, eps: float, delta: float) -> Tensor:
        size = (z.square().sum(-1, keepdim=True) + z.shape[-1] * eps).sqrt()
        ctx.save_for_backward(z / size, size)
        ctx.delta = delta
        return z * (z.shape[-1] ** 0.5 / size)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (unit, size), (g,) = ctx.saved_tensors, grads
        length = torch.linalg.vector_norm(g, dim=-1, keepdim=True)
        along = (unit * g).sum(-1, keepdim=True) - ctx.delta / 2 * length
        return (g - unit * along) * (unit.shape[-1] ** 0.5 / size), None, None


class Pull(nn.Module):
    """A norm with the weights of another, differentiated with the `Pulled` rule."""

    def __init__(self, norm: nn.LayerNorm | nn.RMSNorm, delta: float) -> None:
        super().__init__()
        self.norm, self.delta = norm, delta

    def forward(self, z: Tensor) -> Tensor:
        bias = getattr(self.norm, "bias", None)
        if isinstance(self.norm, nn.LayerNorm):
            z = z - z.mean(-1, keepdim=True)
        eps = torch.finfo(z.dtype).eps if self.norm.eps is None else self.norm.eps
        x = Pulled.apply(z, eps, self.delta) * self.norm.weight
        return x if bias is None else x + bias


class QKNorm(nn.Module):
    """A layer whose outputs are queries or keys, normalised head by head."""

    def __init__(self, layer: nn.Module, width: int, heads: int) -> None:
        super().__init__()
        self.layer, self.heads = layer, heads
        self.norm = nn.RMSNorm(width // heads, 1e-6)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.layer(x).unflatten(-1, (self.heads, -1))).flatten(-2)


class NormedLSTM(nn.Module):
    """An LSTM over the rows of pictures; its gates are normalised before they bend."""

    def __init__(self, inputs: int = 28, width: int = 64) -> None:
        super().__init__()
        self.inputs, self.width = inputs, width
        self.below, self.back = nn.Linear(inputs, 4 * width), nn.Linear(width, 4 * width, False)
        self.norm, self.out = nn.LayerNorm(4 * width), nn.LayerNorm(width)
        self.last = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        h = c = x.new_zeros(len(x), self.width)
        for row in x.reshape(len(x), -1, self.inputs).unbind(1):
            i, f, o, u = self.norm(self.below(row) + self.back(h)).chunk(4, -1)
            c = torch.sigmoid(f + 1) * c + torch.sigmoid(i) * torch.tanh(u)
            h = torch.sigmoid(o) * torch.tanh(self.out(c))
        return self.last(h)


def of_transformers(kind: str, depth: int, width: int, start: float) -> nn.Module:
    import transformers as T

    T.logging.set_verbosity_error()
    common = {"vocab_size": 128, "bos_token_id": 1, "eos_token_id": 2, "initializer_range": start}
    if kind == "llama":
        config = T.LlamaConfig(
            **common, hidden_size=width, num_hidden_layers=depth, num_attention_heads=4,
            intermediate_size=width * 8 // 3 // 4 * 4, max_position_embeddings=128,
        )  # fmt: skip
        return trained.Logits(T.LlamaForCausalLM(config))
    if kind == "gpt2":
        drops = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
        config = T.GPT2Config(
            **common, **drops, n_positions=128, n_embd=width, n_layer=depth, n_head=4
        )
        return trained.Logits(T.GPT2LMHeadModel(config))
    side, patch, channels = (8, 2, 1) if kind == "vit digits" else (32, 4, 3)
    config = T.ViTConfig(
        hidden_size=width, num_hidden_layers=depth, num_attention_heads=4, num_labels=10,
        intermediate_size=2 * width, image_size=side, patch_size=patch, num_channels=channels,
        initializer_range=start,
    )  # fmt: skip
    return trained.Logits(T.ViTForImageClassification(config))


def cifar() -> list[trained.Data]:
    import data

    pictures = data.load("cifar-10").pictures()
    X, y = torch.tensor(pictures.x_train) * 4, torch.tensor(pictures.y_train)
    test = torch.tensor(pictures.x_test) * 4, torch.tensor(pictures.y_test)
    return [(X[:45000], y[:45000]), (X[45000:], y[45000:]), test]


Make = Callable[[float], nn.Module]
#: Network given the deviation of its start, and data.
NETWORKS: dict[str, tuple[Make, Callable[[], list[trained.Data]]]] = {
    "vit digits": (lambda start: of_transformers("vit digits", 4, 64, start), trained.digits),
    "vit cifar": (lambda start: of_transformers("vit cifar", 6, 96, start), cifar),
    "row transformer": (lambda start: trained.Rows("transformer"), trained.mnist),
    "lstm": (lambda start: NormedLSTM(), trained.mnist),
    "resnet8": (lambda start: trained.resnet8(), lambda: trained.digits(16)),
}
for _kind, (_depth, _width) in itertools.product(
    ("llama", "gpt2"), ((2, 64), (4, 128), (6, 192), (8, 64), (24, 64))
):
    _make = functools.partial(of_transformers, _kind, _depth, _width)
    NETWORKS[f"{_kind} {_depth}x{_width}"] = (_make, trained.text)
WRITERS = ("o_proj", "down_proj", "c_proj", "fc2", "out_proj", "linear2")


def network(name: str, start: float, variant: str = "", pull: float | None = None) -> nn.Module:
    """A network at its start.

    A norm written by hand is a root and a product to `lpom.lift`, which one side reads otherwise.
    With ``pull`` all norms have the rule `Pulled` of this displacement.
    """
    model = NETWORKS[name][0](start)
    depth = max((len(m) for m in model.modules() if isinstance(m, nn.ModuleList)), default=1)
    for path, module in list(model.named_modules()):
        above, last = model.get_submodule(path.rpartition(".")[0]), path.rpartition(".")[2]
        if type(module).__name__ == "LlamaRMSNorm":
            module, old = nn.RMSNorm(len(module.weight), module.variance_epsilon), module
            module.weight = old.weight
            setattr(above, last, module)
        if pull is not None and isinstance(module, nn.LayerNorm | nn.RMSNorm):
            setattr(above, last, Pull(module, pull))
        if variant == "qk norm" and last in ("q_proj", "k_proj"):
            setattr(above, last, QKNorm(module, module.out_features, 4))
        if variant == "scaled" and last in WRITERS:
            module.weight.data /= (2 * depth) ** 0.5
    return model
