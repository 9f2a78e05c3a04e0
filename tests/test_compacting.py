"""compact(): the same predictions from fewer units, channels and ranks."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn.utils import prune

import lpom
from lpom.activations import Elementwise, Sign
from lpom.compacting import compact, size


def drawn(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def seeded(*layers):
    """Layers with weights that are not those of any initialisation, statistics included."""
    model = nn.Sequential(*layers).double().eval()
    generator = torch.Generator().manual_seed(0)
    for tensor in model.state_dict().values():
        if tensor.is_floating_point():
            tensor.copy_(torch.rand(tensor.shape, generator=generator, dtype=tensor.dtype) + 0.1)
    for parameter in model.parameters():
        noise = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
        parameter.data.copy_(noise)
    return model


def same(model, X):
    before = copy.deepcopy(model.state_dict())
    made, report = compact(model, X)
    torch.testing.assert_close(made(X), model(X), rtol=1e-9, atol=1e-9)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name])
    assert report.after == size(made, X)
    return made, report


@pytest.mark.parametrize("activation", [nn.ReLU(), nn.Sigmoid(), Elementwise(Sign())])
def test_silent_and_unread_units_go(activation):
    model = seeded(
        nn.Linear(6, 8), activation, nn.Linear(8, 7, bias=False), nn.Tanh(), nn.Linear(7, 3)
    )
    with torch.no_grad():
        model[0].weight[[1, 4]] = 0  # they say phi(b) always
        model[2].weight[:, [2, 4]] = 0  # nobody reads them
        model[2].weight[5] = 0
    made, report = same(model, drawn(9, 6))
    assert report.removed == {"0": 3, "2": 1}
    assert made[0].weight.shape == (5, 6) and made[2].weight.shape == (6, 5)
    assert made[2].bias is not None  # for what was folded
    assert report.before.weights == 6 * 8 + 8 + 56 + 7 * 3 + 3
    assert report.after.multiplications == 5 * 6 + 6 * 5 + 6 * 3
    assert report.after.bytes == 8 * report.after.weights


def test_removal_goes_on_where_it_leaves_nothing_above():
    model = seeded(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 5), nn.ReLU(), nn.Linear(5, 2))
    with torch.no_grad():
        model[4].weight[:, 1:] = 0  # one unit is read
        model[2].weight[0, 2:] = 0  # which itself reads two
    made, report = same(model, drawn(9, 4))
    assert [tuple(made[i].weight.shape) for i in (0, 2, 4)] == [(2, 4), (1, 2), (2, 1)]
    assert report.removed == {"0": 3, "2": 4}


def test_channels_with_batch_norm_pooling_and_flattening():
    model = seeded(
        nn.Conv2d(2, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(6, 5, 2),
        nn.Tanh(), nn.AvgPool2d(2), nn.Flatten(), nn.BatchNorm1d(20), nn.Dropout(0.5),
        nn.Linear(20, 3),
    )  # fmt: skip
    with torch.no_grad():
        model[0].weight[[0, 3]] = 0
        model[4].weight[2] = 0
        model[10].weight[:, 4:8] = 0  # channel 1, all its places
    made, report = same(model, drawn(4, 2, 12, 12))
    assert report.removed == {"0": 2, "4": 2}
    assert made[1].num_features == 4 and made[8].num_features == 12
    assert made[10].in_features == 12
    assert report.before.multiplications == 100 * 6 * 18 + 16 * 5 * 24 + 60
    assert compact(model)[1].after.multiplications is None  # places are not known


def test_a_constant_under_padding_stays_unless_it_is_zero():
    model = seeded(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Conv2d(4, 2, 3, padding=1))
    with torch.no_grad():
        model[0].weight[[1, 2]] = 0
        model[0].bias[[1, 2]] = torch.tensor([-1.0, 1.0], dtype=torch.float64)
    made, report = same(model, drawn(3, 1, 7, 7))
    assert report.removed == {"0": 1}


def test_low_rank_becomes_two_layers_where_that_saves_weights():
    model = seeded(nn.Linear(30, 20), nn.Tanh(), nn.Linear(20, 2))
    with torch.no_grad():
        model[0].weight.copy_(drawn(20, 3) @ drawn(3, 30))
    _, report = same(model, drawn(5, 30))
    assert report.ranks == {"0": 3}
    assert report.after.weights == 3 * 50 + 20 + 42
    assert "split at rank 3" in str(report) and "weights: 662 -> 212" in str(report)


def test_all_dead_leaves_one_unit():
    model = seeded(nn.Linear(4, 5), nn.Sigmoid(), nn.Linear(5, 2))
    with torch.no_grad():
        model[0].weight.zero_()
    made, _ = same(model, drawn(3, 4))
    assert made[0].out_features == 1


def test_what_group_sparsity_leaves_is_smaller_and_trains_on():
    X, y = drawn(200, 6), torch.arange(200) % 2
    X[:, 0] += 3 * y
    model = lpom.mlp([6, 12, 2], "relu", seed=0, dtype=torch.float64)
    penalty = {"0.weight": lpom.penalties.GroupL1(keep=0.25)}
    lpom.fit(model, X, y, method=lpom.LPOM(penalties=penalty), epochs=20, progress=False)
    made, report = same(model, X)
    assert report.removed == {"0": 9}
    lpom.fit(made, X, y, epochs=1, progress=False)


class Doubled(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


def low_rank(layer):
    with torch.no_grad():
        layer.weight.copy_(torch.outer(*(drawn(size) for size in layer.weight.shape)))
    return layer


def silenced(*modules):
    """A network whose first layer has a unit that says the same to all."""
    model = seeded(*modules)
    with torch.no_grad():
        model[0].weight[1] = 0
        model[0].bias[1] = 0.7
    return model


TWICE = nn.Linear(4, 4)
LEFT_ALONE = {
    "tokens beside each other": (silenced(
        nn.Linear(6, 4), nn.ReLU(), nn.Flatten(), nn.Linear(20, 3)), (7, 5, 6)),
    "norms of tokens": (silenced(
        nn.Linear(6, 4), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(4, 3)), (7, 5, 6)),
    "columns of pictures": (silenced(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Linear(6, 3)), (7, 1, 8, 8)),
    "sums in place of means": (silenced(
        nn.Conv2d(1, 4, 3), nn.ReLU(), nn.AvgPool2d(2, divisor_override=1), nn.Flatten(),
        nn.Linear(36, 3)), (7, 1, 8, 8)),
    "rows by softmax": (silenced(nn.Linear(4, 5), nn.Softmax(-1), nn.Linear(5, 2)), (3, 4)),
    "rows by their norm": (silenced(nn.Linear(4, 5), nn.LayerNorm(5), nn.Linear(5, 2)), (3, 4)),
    "a class of one's own": (seeded(low_rank(Doubled(8, 8)), nn.ReLU(), nn.Linear(8, 3)), (7, 8)),
    "computed": (nn.Sequential(
        nn.utils.parametrizations.weight_norm(nn.Linear(4, 6)), nn.Linear(6, 3)).double(), (7, 4)),
    "one layer twice": (silenced(TWICE, nn.ReLU(), TWICE, nn.ReLU(), nn.Linear(4, 2)), (3, 4)),
}  # fmt: skip


@pytest.mark.parametrize("name", LEFT_ALONE)
def test_what_is_not_unit_by_unit_is_left_alone(name):
    model, shape = LEFT_ALONE[name]
    made, report = same(model, drawn(*shape))
    assert not report.removed and not report.ranks


@pytest.mark.parametrize("inner", ["self_attn.out_proj", "linear1"])
def test_layers_inside_of_modules_of_torch_are_not_split(inner):
    model = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).double()
    low_rank(model.get_submodule(inner))
    made, report = compact(model.eval())
    assert not report.ranks
    torch.testing.assert_close(made(drawn(2, 5, 8)), model(drawn(2, 5, 8)))


def test_masked_weights_are_to_be_made_plain_first():
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3))
    prune.l1_unstructured(model[0], "weight", 0.5)
    with pytest.raises(ValueError, match="after prune.remove"):
        compact(model)
    prune.remove(model[0], "weight")
    assert compact(model)[1].before.weights == 51


def test_a_network_that_would_say_something_else_is_not_given():
    class Reads(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = silenced(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3))

        def forward(self, x):
            return self.body(x) + self.body[1](self.body[0](x))[:, 2:5]

    with pytest.raises(ValueError, match="would say something else"):
        compact(Reads(), drawn(5, 4))


def test_a_unit_that_rounding_tips_over_is_no_reason_to_refuse():
    model = seeded(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3), Elementwise(Sign())).float()
    with torch.no_grad():
        model[0].weight[1] = 0
        model[2].bias.zero_()
        model[2].weight[0] = torch.tensor(
            [1e8, 0.3, -1e8, 0, 0, 0]
        )  # a sum of nothing but rounding
        model[0].weight[2], model[0].bias[2] = model[0].weight[0], model[0].bias[0]
    made, report = compact(model, drawn(200, 4).float())
    assert report.removed["0"] >= 1
