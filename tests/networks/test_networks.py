"""Known networks: what they compute, how many weights they have, and what the seed rules."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lpom import activations, networks
from lpom.networks.layers import gain

#: All but the one for texts.
NETWORKS = [name for name in networks.names() if name != "char-transformer"]
PICTURES = [(1, 28, 28), (3, 32, 32), (1, 8, 8), (2, 33, 47)]


def n_weights(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("shape", PICTURES, ids=str)
@pytest.mark.parametrize("name", NETWORKS)
def test_every_network_takes_pictures_of_any_size(name: str, shape: tuple[int, ...]) -> None:
    model = networks.get(name, shape, n_outputs=7)
    assert model(torch.rand(3, *shape)).shape == (3, 7)


@pytest.mark.parametrize(
    ("name", "shape", "options", "published"),
    [
        ("lenet5", (1, 28, 28), {}, 61_706),
        ("lenet5", (1, 32, 32), {"pool": "avg"}, 61_706),
        # 3x3 convolutions of 3-128-256-512-512 channels, then 512-10
        ("vgg5", (3, 32, 32), {}, 3_584 + 295_168 + 1_180_160 + 2_359_808 + 5_130),
        ("vgg5", (3, 32, 32), {"width": 0.25}, 896 + 18_496 + 73_856 + 147_584 + 1_290),
        # MLPerf Tiny: 78,666, of which 480 are running statistics and 336 biases below a norm;
        # it does not normalise the two shortcuts
        ("resnet8", (3, 32, 32), {}, 78_666 - 480 - 336 + 2 * (32 + 64)),
        # 269,722 with shortcuts that have no weights (option A of He et al.); these have 1x1
        # convolutions and norms
        ("resnet20", (3, 32, 32), {}, 269_722 + 16 * 32 + 32 * 64 + 2 * (32 + 64)),
        ("mlp", (1, 28, 28), {}, 266_610),
    ],
)
def test_numbers_of_weights(
    name: str, shape: tuple[int, ...], options: dict[str, object], published: int
) -> None:
    assert n_weights(networks.get(name, shape, **options)) == published


@pytest.mark.parametrize("name", NETWORKS)
def test_the_seed_rules_and_the_global_generator_is_left_alone(name: str) -> None:
    torch.manual_seed(1)
    before = torch.random.get_rng_state()
    first = networks.get(name, (3, 16, 16), seed=5).state_dict()
    assert torch.equal(torch.random.get_rng_state(), before)
    torch.manual_seed(2)
    again = networks.get(name, (3, 16, 16), seed=5).state_dict()
    other = networks.get(name, (3, 16, 16), seed=6).state_dict()
    assert all(torch.equal(first[key], again[key]) for key in first)
    drawn = [key for key, value in first.items() if value.ndim > 1]
    assert drawn and not any(torch.equal(first[key], other[key]) for key in drawn)


@pytest.mark.parametrize("name", NETWORKS)
def test_a_traced_network_computes_the_same(name: str) -> None:
    model = networks.get(name, (3, 16, 16)).eval()
    X = torch.rand(4, 3, 16, 16)
    torch.testing.assert_close(torch.fx.symbolic_trace(model)(X), model(X), rtol=0, atol=0)


@pytest.mark.parametrize("name", NETWORKS)
def test_no_layer_starts_dead_and_signals_keep_their_size(name: str) -> None:
    X = torch.randn(64, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    model = networks.get(name, (3, 32, 32), **({"width": 0.25} if name == "vgg5" else {}))
    outputs = model(X)
    assert 0.2 < outputs.std() < 5
    F.cross_entropy(outputs, torch.arange(64) % 10).backward()
    assert all((parameter.grad != 0).any() for parameter in model.parameters())


def test_lenet5_is_what_its_picture_shows() -> None:
    model = networks.get("lenet5", (1, 28, 28), pool="avg", activation="tanh")
    w = list(model.parameters())
    X = torch.rand(5, 1, 28, 28)
    maps = F.avg_pool2d(torch.tanh(F.conv2d(F.pad(X, (2, 2, 2, 2)), w[0], w[1])), 2)
    maps = F.avg_pool2d(torch.tanh(F.conv2d(maps, w[2], w[3])), 2)
    assert maps.shape == (5, 16, 5, 5)
    hidden = torch.tanh(torch.tanh(maps.flatten(1) @ w[4].T + w[5]) @ w[6].T + w[7])
    torch.testing.assert_close(model(X), hidden @ w[8].T + w[9])


@pytest.mark.parametrize("activation", [nn.Tanh(), activations.Tanh(), "tanh"], ids=str)
def test_an_activation_is_a_name_a_module_or_an_activation(activation: object) -> None:
    model = networks.get("lenet5", (1, 28, 28), activation=activation)
    assert [type(module) for module in model].count(nn.Tanh) == 4


def test_a_residual_layer_adds_to_its_input() -> None:
    model = networks.get("residual20", (3, 32, 32))
    assert len(model.layers) == 20
    assert [layer.conv.out_channels for layer in model.layers] == [16] * 7 + [32] * 7 + [64] * 6
    layer = model.layers[1]
    X = torch.rand(2, 16, 16, 16)
    inner = F.conv2d(X, layer.conv.weight, layer.conv.bias, padding=1)
    torch.testing.assert_close(layer(X), (X + inner / math.sqrt(20)).clamp(min=0))


def test_states_of_20_residual_layers_neither_fade_nor_explode() -> None:
    model = networks.get("residual20", (3, 32, 32))
    sizes: list[float] = []

    def note(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        sizes.append(float(output.detach().square().mean().sqrt()))

    for layer in model.layers:
        layer.register_forward_hook(note)
    model(torch.randn(32, 3, 32, 32, generator=torch.Generator().manual_seed(0)))
    assert len(sizes) == 20 and 0.5 < min(sizes) and max(sizes) < 2.0


def test_a_batch_norm_block_is_the_formula() -> None:
    block = networks.get("resnet8", (3, 32, 32)).blocks[1].eval()
    X = torch.rand(2, 16, 8, 8)
    scale = 1 / math.sqrt(1 + 1e-5)  # running statistics 0 and 1
    inner = F.conv2d(X, block.conv1.weight, stride=2, padding=1).mul(scale).clamp(min=0)
    branch = F.conv2d(inner, block.conv2.weight, padding=1) * scale
    shortcut = F.conv2d(X, block.shortcut[0].weight, stride=2) * scale
    torch.testing.assert_close(block(X), (branch + shortcut).clamp(min=0))


@pytest.mark.parametrize(
    ("activation", "expected"),
    [
        (activations.ReLU(), math.sqrt(2)),
        (activations.LeakyReLU(0.5), math.sqrt(2 / 1.25)),  # He et al. (2015), eq. 15
        (activations.Identity(), 1.0),
        (activations.Sign(), 1.0),
    ],
    ids=str,
)
def test_gain_of_known_activations(activation: activations.Activation, expected: float) -> None:
    assert gain(activation) == pytest.approx(expected, rel=1e-3)


def test_gain_keeps_the_size_of_a_signal() -> None:
    z = torch.randn(10**6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    moved = gain(activations.Sigmoid()) * (torch.sigmoid(z) - 0.5)
    assert float(moved.std()) == pytest.approx(1.0, rel=5e-3)


@pytest.mark.parametrize("name", NETWORKS)
def test_every_network_is_described_in_one_line(name: str) -> None:
    assert networks.describe(name).endswith(".")


def test_names_are_read_kindly() -> None:
    assert n_weights(networks.get("ResNet-8", (3, 32, 32))) == 78_042
    with pytest.raises(ValueError, match="unknown network 'lenet'; did you mean 'lenet5'"):
        networks.get("lenet", (1, 28, 28))


def test_what_is_refused() -> None:
    with pytest.raises(ValueError, match=r"vgg5 takes pictures.*e\.g\. \(3, 32, 32\), got \(64,\)"):
        networks.get("vgg5", (64,))
    with pytest.raises(ValueError, match="unexpected keyword argument 'widht'.*options are width"):
        networks.get("vgg5", (3, 32, 32), widht=2)
    with pytest.raises(ValueError, match="width must be a number above 0, got 0"):
        networks.get("vgg5", (3, 32, 32), width=0)
    with pytest.raises(ValueError, match="unknown pool 'mean'.*Known: avg, max"):
        networks.get("lenet5", (1, 28, 28), pool="mean")


def test_mlp_takes_tables_and_pictures() -> None:
    table = networks.get("mlp", (4,), n_outputs=3, hidden=[8], activation="tanh")
    assert table(torch.rand(2, 4)).shape == (2, 3)
    assert [type(module).__name__ for module in table] == ["Flatten", "Linear", "Tanh", "Linear"]


OWN = """
from __future__ import annotations
from dataclasses import dataclass
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self, n_outputs):
        super().__init__()
        self.last = nn.Linear(4, n_outputs)
    def forward(self, x):
        return self.last(x)

@dataclass
class Sizes:
    hidden: int = 3

def make(input_shape, *, seed, hidden=3):
    return nn.Sequential(nn.Linear(input_shape[0], Sizes(hidden).hidden), nn.Linear(hidden, seed))

def everything(**given):
    return nn.Linear(given["input_shape"][0], given["n_outputs"])

def demanding(depth):
    return nn.Identity()

def forgetful(n_outputs):
    nn.Linear(2, n_outputs)
"""


@pytest.fixture
def own(tmp_path: Path) -> Path:
    path = tmp_path / "own.py"
    path.write_text(OWN)
    return path


def test_a_network_from_a_file(own: Path) -> None:
    made = networks.from_file(f"{own}:make", (4,), 2, seed=6, hidden=5)
    assert [layer.weight.shape for layer in made] == [(5, 4), (6, 5)]
    assert networks.from_file(f"{own}:Net", (4,), 2)(torch.rand(3, 4)).shape == (3, 2)
    assert networks.get(f"{own}:everything", (4,), 2).weight.shape == (2, 4)


def test_the_seed_rules_a_network_from_a_file(own: Path) -> None:
    before = torch.random.get_rng_state()
    first, again, other = (
        networks.from_file(f"{own}:Net", (4,), 2, seed=seed).last.weight for seed in (0, 0, 1)
    )
    assert torch.equal(first, again) and not torch.equal(first, other)
    assert torch.equal(torch.random.get_rng_state(), before)


@pytest.mark.parametrize(
    ("where", "error", "message"),
    [
        ("own.py", ValueError, r"e\.g\. 'path\.py:make', got 'own\.py'"),
        ("nothing.py:make", ValueError, r"there is no file nothing\.py"),
        ("own.py:mke", ValueError, r"own\.py: unknown function 'mke'; did you mean 'make'"),
        ("own.py:demanding", ValueError, "missing a required argument: 'depth'"),
        ("own.py:forgetful", TypeError, r"should return a torch\.nn\.Module, got NoneType"),
    ],
)
def test_what_is_wrong_with_a_file_is_said(
    where: str, error: type[Exception], message: str, own: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(own.parent)
    with pytest.raises(error, match=message):
        networks.from_file(where, (4,), 2)


def test_an_error_in_a_file_passes_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("import torch\n1 / 0\n")
    with pytest.raises(ZeroDivisionError):
        networks.from_file(f"{tmp_path}/broken.py:make", (4,), 2)
