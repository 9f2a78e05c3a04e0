"""Model files: what is saved comes back, and whatever was done to a file is noticed."""

from __future__ import annotations

import copy
import json
import math
import random
import tracemalloc

import pytest
import safetensors.torch
import torch
import torch.nn.functional as F
from torch import nn

import lpom
from lpom import activations, networks, saving
from lpom.exceptions import ModelFileError
from lpom.graph import rebuilding, trace
from lpom.graph.vocabulary import CLASSES

METADATA = {"classes": ["ä", "b"], "mean": [0.1, 1e-300], "nested": {"none": None}}


@pytest.fixture
def path(tmp_path):
    return tmp_path / "model.safetensors"


@pytest.fixture
def saved(path):
    saving.save(path, lpom.mlp([3, 5, 2], "tanh", seed=0), metadata=METADATA)
    return path


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


# networks of every kind


class Gated(nn.Module):
    def __init__(self):
        super().__init__()
        self.value, self.gate, self.out = nn.Linear(6, 8), nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x):
        return self.out(torch.tanh(self.value(x)) * torch.sigmoid(self.gate(x)))


class Recurrent(nn.Module):
    """Asks for the number of steps and for the size of the batch."""

    def __init__(self):
        super().__init__()
        self.inner, self.across, self.out = nn.Linear(2, 5), nn.Linear(5, 5), nn.Linear(5, 3)

    def forward(self, x):
        h = torch.zeros(x.shape[0], 5, device=x.device)
        for t in range(x.shape[1]):
            h = torch.tanh(self.inner(x[:, t]) + self.across(h))
        return self.out(h)


class Attention(nn.Module):
    """Causal attention with one head, a residual, a norm and the mean over places."""

    def __init__(self, width=8):
        super().__init__()
        self.embed = nn.Embedding(11, width)
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.norm = nn.LayerNorm(width)
        self.out = nn.Linear(width, 3)
        places = torch.full((4, 4), -math.inf).triu(1)
        self.register_buffer("mask", places, persistent=False)

    def forward(self, tokens):
        x = self.embed(tokens)
        scores = self.query(x) @ self.key(x).transpose(-2, -1) / math.sqrt(x.shape[-1])
        x = self.norm(x + torch.softmax(scores + self.mask, dim=-1) @ self.value(x))
        return self.out(x.mean(1))


class Tied(nn.Module):
    """One layer under two names, a weight under two more, a constant and a dropout by function."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.again = self.first
        self.third = nn.Linear(4, 4)
        self.third.weight = self.first.weight
        self.scale = nn.Parameter(torch.ones(4))
        self.register_buffer("shift", torch.arange(4.0))

    def forward(self, x, unused=None):
        x = torch.tanh(self.first(x)) * self.scale + self.shift * torch.full((4,), 0.5)
        x = F.dropout(torch.tanh(self.again(x)), 0.5, self.training)
        return F.linear(self.third(x), self.first.weight[:3])


def normed():
    return nn.Sequential(
        nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 8), nn.PReLU(8), nn.Linear(8, 3)
    )


class OwnForward(nn.Sequential):
    def forward(self, x):
        return 2 * super().forward(x)


NETWORKS = {
    "mlp": (lambda: lpom.mlp([6, 5, 3], "elu", seed=0), (6,)),
    "lenet5": (lambda: networks.get("lenet5", (1, 28, 28), 3, seed=0), (1, 28, 28)),
    "resnet8": (lambda: networks.get("resnet8", (3, 16, 16), 3, seed=0), (3, 16, 16)),
    "gated": (Gated, (6,)),
    "recurrent": (Recurrent, (7, 2)),
    "attention": (Attention, None),
    "tied": (Tied, (4,)),
    "norm and prelu": (normed, (6,)),
    "own forward": (
        lambda: OwnForward(nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 3)),
        (6,),
    ),
}


def inputs(shape, rows=24):
    if shape is None:
        return torch.randint(11, (rows, 4), generator=torch.Generator().manual_seed(1))
    return normal(rows, *shape, seed=1)


@pytest.mark.parametrize("name", NETWORKS)
def test_every_network_comes_back_and_trains_on(path, name):
    make, shape = NETWORKS[name]
    torch.manual_seed(0)
    model, X = make(), inputs(shape)
    lpom.fit(model, X, torch.arange(len(X)) % 3, epochs=1, batch_size=8, seed=0)
    saving.save(path, model, example=X, metadata=METADATA)
    loaded, metadata = saving.load(path)
    assert metadata == METADATA
    assert not any(module.training for module in loaded.modules())
    assert list(loaded.state_dict()) == list(model.state_dict())
    with torch.no_grad():
        assert torch.equal(loaded(X), model.eval()(X))

    graph, first = trace(loaded, X), trace(model, X)
    assert [node.name for node in graph.nodes] == [node.name for node in first.nodes]
    assert [node.edge.names for node in graph.nodes] == [node.edge.names for node in first.nodes]
    results = []
    for each in (model, loaded):
        lpom.fit(each.train(), X, torch.arange(len(X)) % 3, epochs=1, batch_size=8, seed=3)
        results.append(each.state_dict())
    for key in results[0]:
        torch.testing.assert_close(results[1][key], results[0][key], rtol=0, atol=0)


@pytest.mark.parametrize("name", ["lenet5", "resnet8", "recurrent", "attention", "tied"])
def test_a_loaded_network_can_be_exported_and_copied(path, name):
    make, shape = NETWORKS[name]
    X = inputs(shape, 3)
    saving.save(path, make(), example=X)
    loaded, _ = saving.load(path)
    program = torch.export.export(loaded, (X,))
    torch.testing.assert_close(program.module()(X), loaded(X))
    assert torch.equal(copy.deepcopy(loaded)(X), loaded(X))


def test_a_sequential_comes_back_as_one_with_the_names_of_its_children(path):
    model = nn.Sequential()
    model.add_module("body", nn.Sequential(nn.Linear(3, 4), nn.ReLU()))
    model.add_module("head-1", nn.Linear(4, 2))
    saving.save(path, model)
    loaded, _ = saving.load(path)
    assert str(loaded) == str(model) and type(loaded) is nn.Sequential
    saving.save(path, nn.Linear(3, 2))
    assert type(saving.load(path)[0]) is nn.Linear


def test_frozen_shared_and_constant_tensors_stay_so(path):
    model = Tied()
    model.third.bias.requires_grad_(False)
    model.double().train()
    saving.save(path, model)
    assert model.training and not [name for name in vars(model) if "constant" in name]
    loaded, _ = saving.load(path)
    assert loaded.first is loaded.again and loaded.third.weight is loaded.first.weight
    assert {n: p.requires_grad for n, p in loaded.named_parameters()} == {
        n: p.requires_grad for n, p in model.named_parameters()
    }
    assert all(p.dtype == torch.float64 for p in loaded.parameters())
    X = normal(5, 4).double()
    for each in (model, loaded):  # dropout is a matter of the mode, as in the model's own Python
        assert not torch.equal(each.train()(X), each(X))
        assert torch.equal(each.eval()(X), each(X))
    assert torch.equal(loaded(X), model(X))


@pytest.mark.parametrize("kind", CLASSES.values(), ids=lambda kind: kind.__name__)
def test_every_layer_comes_back_with_its_settings(path, kind):
    given = {
        "Linear": (3, 2, False),
        "Bilinear": (2, 3, 4),
        "Embedding": (5, 2, 1),
        "EmbeddingBag": (5, 2),
        "Unflatten": (1, (2, 3)),
        "Upsample": (None, 2.0, "bilinear", True),
        "UpsamplingNearest2d": (None, 2.0),
        "UpsamplingBilinear2d": (None, 3.0),
        "PixelShuffle": (2,),
        "PixelUnshuffle": (2,),
        "ChannelShuffle": (2,),
        "Unfold": (2, 1, 1, 2),
        "Fold": ((4, 4), 2, 1, 0, 2),
        "BatchNorm1d": (3, 1e-3, None, False),
        "LeakyReLU": (0.3, True),
        "Hardtanh": (-2.0, 3.0),
        "Threshold": (1.0, 0.5),
        "Softmax": (1,),
        "LayerNorm": ((3, 2), 1e-3),
        "RMSNorm": ((3, 2), 1e-3, False),
        "GroupNorm": (2, 4, 1e-3),
        "PReLU": (3,),
    }.get(kind.__name__)
    if given is None and "Conv" in kind.__name__:
        given = (4, 6, 3, 2, 1)
    elif given is None and "ConstantPad" in kind.__name__:
        given = (1, -math.inf)
    elif given is None and ("Pad" in kind.__name__ or "Pool" in kind.__name__):
        given = (2,)
    elif given is None and "BatchNorm" in kind.__name__:
        given = (3,)
    layer = kind(*(given or ()))
    model = nn.Sequential(layer, nn.Linear(2, 2))
    saving.save(path, model)
    loaded = saving.load(path)[0][0]
    assert type(loaded) is kind

    def settings(module):
        skipped = ("_parameters", "_buffers", "_modules", "training")
        return {key: value for key, value in vars(module).items() if key not in skipped}

    assert settings(loaded) == settings(layer)
    assert list(loaded.state_dict()) == list(layer.state_dict())


@pytest.mark.parametrize("name", activations.names())
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_an_mlp_comes_back_to_the_last_bit(path, name, dtype):
    model = lpom.mlp([4, 6, 5, 3], name, seed=1).to(dtype)
    saving.save(path, model)
    loaded, _ = saving.load(path)
    X = normal(7, 4).to(dtype)
    assert torch.equal(loaded(X), model(X))
    assert str(loaded) == str(model)
    assert all(p.dtype == dtype and p.requires_grad for p in loaded.parameters())


@pytest.mark.parametrize("example", activations.examples(), ids=lambda a: a.name)
def test_parameters_of_activations_are_kept(path, example):
    model = nn.Sequential(nn.Linear(8, 8), activations.Elementwise(example))
    saving.save(path, model)
    assert saving.load(path)[0][1].activation == example


def test_the_same_model_makes_the_same_file_and_loading_draws_no_random_number(path, tmp_path):
    for make, shape in (NETWORKS["tied"], NETWORKS["recurrent"], NETWORKS["lenet5"]):
        saving.save(path, make(), example=inputs(shape), metadata=METADATA)
        state = torch.get_rng_state()
        model, metadata = saving.load(path)
        assert torch.equal(torch.get_rng_state(), state)
        saving.save(tmp_path / "a", model, example=inputs(shape), metadata=metadata)
        saving.save(tmp_path / "b", model, example=inputs(shape), metadata=metadata)
        assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
        again, _ = saving.load(tmp_path / "a")
        assert torch.equal(again(inputs(shape)), model(inputs(shape)))


def test_saving_leaves_each_module_in_its_mode(path):
    model = networks.get("resnet8", (3, 16, 16), 3, seed=0).train()
    model.blocks[0].norm1.eval()
    modes = [module.training for module in model.modules()]
    before = copy.deepcopy(model.state_dict())
    saving.save(path, model, example=inputs((3, 16, 16)))
    assert [module.training for module in model.modules()] == modes
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())


def test_a_compiled_model_is_saved_as_what_it_compiles(path):
    model = lpom.mlp([3, 4, 2], seed=0)
    saving.save(path, torch.compile(model, backend="eager"))
    assert str(saving.load(path)[0]) == str(model)


# networks that need Python of their own


class Softsign(nn.Module):
    def __init__(self, width=4):
        super().__init__()
        self.body = nn.Linear(3, width)
        self.head = nn.Linear(width, 2)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        return self.head(torch.erf(self.body(x)))


@pytest.fixture
def weights_only(path):
    torch.manual_seed(3)
    model = Softsign()
    model.body.bias.requires_grad_(False)
    with pytest.warns(UserWarning, match="weights alone.*it calls erf.*into=model"):
        saving.save(path, model, metadata=METADATA)
    return path, model


def test_weights_alone_fill_a_model(weights_only):
    path, model = weights_only
    with pytest.raises(ModelFileError, match="weights alone.*erf.*load\\(path, into=model\\)"):
        saving.load(path)
    other = Softsign()
    loaded, metadata = saving.load(path, into=other)
    assert loaded is other and metadata == METADATA and not other.training
    assert torch.equal(other(normal(5, 3)), model(normal(5, 3)))
    assert [p.requires_grad for p in other.parameters()] == [True, False, True, True]


@pytest.mark.parametrize(
    ("model", "sentence"),
    [
        (Softsign(5), r"body.weight has shape \(5, 3\) of torch.float32 in the model, \(4, 3\)"),
        (Softsign().double(), "body.weight has .*float64 in the model.*float32 in the file"),
        (nn.Sequential(nn.Linear(3, 4)), "0.bias, 0.weight of the model is not in the file"),
        (nn.Sequential(nn.Linear(3, 4)), "body.bias.* and .* of the file is not in the model|body"),
    ],
)
def test_a_model_that_does_not_fit_stays_as_it_was(weights_only, model, sentence):
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ModelFileError, match=sentence):
        saving.load(weights_only[0], into=model)
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())


def test_a_described_file_fills_a_model_too_and_sharing_must_agree(path):
    torch.manual_seed(0)
    saving.save(path, Tied())
    other = Tied()
    saving.load(path, into=other)
    assert torch.equal(other(normal(2, 4)), saving.load(path)[0](normal(2, 4)))
    apart = Tied()
    apart.third.weight = nn.Parameter(torch.zeros(4, 4))
    saving.load(path, into=apart)
    assert torch.equal(apart.third.weight, other.third.weight)
    nn.init.ones_(apart.third.weight)
    saving.save(path, apart)
    with pytest.raises(ModelFileError, match="third.weight and first.weight are one tensor in the"):
        saving.load(path, into=other)


class AsksForValues(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, x):
        return self.layer(x) if x.sum() > 0 else self.layer(-x)


def hooked():
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    model[1].register_forward_hook(lambda module, args, out: 2 * out)
    return model


def parametrized():
    return nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(3, 2)))


def with_function():
    softsign = activations.from_function(nn.functional.softsign, lipschitz=1.0, name="softsign")
    return lpom.mlp([3, 4, 2], softsign, seed=0)


def with_extra_buffer():
    model = nn.Sequential(nn.Linear(3, 2))
    model[0].register_buffer("extra", torch.ones(1))
    return model


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (AsksForValues, "torch.fx cannot follow AsksForValues.*example="),
        (hooked, r"1 \(ReLU\) has forward hooks"),
        (parametrized, r"0 \(ParametrizedLinear\) is not among the layers"),
        (with_function, "'softsign' was made of a function"),
        (with_extra_buffer, "Linear has no place for 0.extra"),
    ],
)
def test_what_no_description_can_hold_is_said_and_its_weights_are_kept(path, make, reason):
    model, other = make(), make()
    with pytest.warns(UserWarning, match=f"weights alone.*{reason}"):
        saving.save(path, model)
    saving.load(path, into=other)
    assert torch.equal(other(normal(4, 3)), model.eval()(normal(4, 3)))


def test_a_loop_over_steps_needs_an_example(path):
    with pytest.warns(UserWarning, match="weights alone.*example=, a batch of its inputs"):
        saving.save(path, Recurrent())


def test_what_has_no_values_is_not_saved(path):
    with pytest.raises(ModelFileError, match="0.weight has no values yet"):
        saving.save(path, nn.Sequential(nn.LazyLinear(2)))
    with pytest.raises(ModelFileError, match="0.weight is of torch.complex64"):
        saving.save(path, nn.Sequential(nn.Linear(2, 2, dtype=torch.complex64)))
    assert not path.exists()


# files that were damaged or made by somebody else


def parts(path):
    content = path.read_bytes()
    size = int.from_bytes(content[:8], "little")
    metadata = json.loads(content[8 : 8 + size])["__metadata__"]
    return safetensors.torch.load(content), json.loads(metadata["lpom"])


def rewrite(path, stored=None, sign=True, **changes):
    """Change a file as somebody who knows the format could, checksum included."""
    old, header = parts(path)
    stored = old if stored is None else stored
    header = {k: v for k, v in {**header, **changes}.items() if v is not ...}
    if sign:
        header["sha256"] = saving._checksum(stored, header)
    path.write_bytes(safetensors.torch.save(stored, metadata={"lpom": json.dumps(header)}))


def edit(path, *keys, value):
    """Put a value somewhere into the description of the network."""
    network = parts(path)[1]["network"]
    place = network
    for key in keys[:-1]:
        place = place[key]
    place[keys[-1]] = value
    rewrite(path, network=network)


@pytest.mark.parametrize("keep", [0, 5, 8, 9, 100, -1])
def test_a_file_cut_off_anywhere(saved, keep):
    saved.write_bytes(saved.read_bytes()[:keep])
    with pytest.raises(ModelFileError, match="is cut off or damaged|is not a safetensors file"):
        saving.load(saved)


def test_a_file_of_another_kind(saved):
    torch.save({"weight": torch.ones(2)}, saved)
    with pytest.raises(ModelFileError, match="is not a safetensors file"):
        saving.load(saved)
    saved.write_bytes(safetensors.torch.save({"weight": torch.ones(2)}))
    with pytest.raises(ModelFileError, match="not an lpom model"):
        saving.load(saved)


def test_a_changed_byte_is_noticed_wherever_it_is(saved):
    content = saved.read_bytes()
    for k in range(0, len(content), 5):
        changed = bytearray(content)
        changed[k] ^= 1
        saved.write_bytes(changed)
        with pytest.raises(ModelFileError):
            saving.load(saved)


def test_changed_weights_and_metadata_fail_the_checksum(saved):
    before = saved.read_bytes()
    tensors, _ = parts(saved)
    tensors["0.weight"][0, 0] += 1
    rewrite(saved, tensors, sign=False)
    with pytest.raises(ModelFileError, match="was changed after it was written.*checksum"):
        saving.load(saved)
    saved.write_bytes(before)
    rewrite(saved, sign=False, metadata={**METADATA, "classes": ["b", "ä"]})
    with pytest.raises(ModelFileError, match="checksum does not match"):
        saving.load(saved)


@pytest.mark.parametrize("version", [1, 99, None, "2", [2]])
def test_another_version(saved, version):
    rewrite(saved, format_version=version, lpom_version="7.0")
    with pytest.raises(
        ModelFileError, match=r"format version .*reads version 2.*lpom 7.0: install"
    ):
        saving.load(saved)


@pytest.mark.parametrize("key", ["tensors", "shared", "metadata", "lpom_version", "network"])
@pytest.mark.parametrize("value", [..., None, 3, "text", [], [["a", 1]]])
def test_a_header_of_other_types(saved, key, value):
    if (key, value) == ("lpom_version", "text"):
        pytest.skip("a text is what it should be")
    rewrite(saved, **{key: value})
    with pytest.raises(ModelFileError, match=f"lacks {key!r}, a JSON|holds the weights alone"):
        saving.load(saved)


@pytest.mark.parametrize("text", ["[", "3", "null", "[" * 100_000, '{"a":' * 100_000, "{}"])
def test_metadata_that_are_no_json(saved, text):
    tensors, _ = parts(saved)
    saved.write_bytes(safetensors.torch.save(tensors, metadata={"lpom": text}))
    with pytest.raises(ModelFileError, match="metadata that is not valid JSON|format version None"):
        saving.load(saved)


HUGE = 2**40


@pytest.mark.parametrize(
    "outer",
    [
        {"a": {"dtype": "F32", "shape": [HUGE], "data_offsets": [0, 4 * HUGE]}},
        {"a": {"dtype": "F32", "shape": [HUGE, HUGE, HUGE], "data_offsets": [0, 8]}},
        {"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 8]}},
        {"a": {"dtype": "F32", "shape": [2], "data_offsets": [8, 0]}},
        {"a": {"dtype": "F32", "shape": [2]}},
        {"a": {"dtype": "NO", "shape": [2], "data_offsets": [0, 8]}},
        {"a": None},
        {"a": {"dtype": "F32", "shape": None, "data_offsets": [0, 8]}},
    ],
)
def test_a_header_that_claims_what_is_not_there(saved, outer):
    text = json.dumps({"__metadata__": {"lpom": json.dumps(parts(saved)[1])}, **outer}).encode()
    saved.write_bytes(len(text).to_bytes(8, "little") + text + bytes(8))
    tracemalloc.start()
    with pytest.raises(ModelFileError, match="is cut off or damaged"):
        saving.load(saved)
    assert tracemalloc.get_traced_memory()[1] < 10_000_000
    tracemalloc.stop()


def test_a_large_file_behind_a_small_header_is_not_read(saved):
    with saved.open("r+b") as file:
        file.truncate(2**40)  # a hole, which takes no place on disk
    with pytest.raises(ModelFileError, match="do not fill the 1099511627776 bytes"):
        saving.load(saved)
    with saved.open("r+b") as file:
        file.write((2**39).to_bytes(8, "little"))
    with pytest.raises(ModelFileError, match="a header of 549755813888 bytes"):
        saving.load(saved)


def test_tensors_missing_too_many_or_of_another_kind(saved):
    tensors, header = parts(saved)
    before = saved.read_bytes()
    for changed, sentence in [
        ({k: v for k, v in tensors.items() if k != "2.bias"}, "2.bias is missing"),
        ({**tensors, "../evil": torch.ones(1)}, "../evil is too many"),
        ({**tensors, "0.weight": torch.ones(6, 3)}, r"should have shape \(5, 3\), got \(6, 3\)"),
        ({**tensors, "0.weight": torch.ones(5, 3).long()}, "like torch.float32, got torch.int64"),
    ]:
        saved.write_bytes(before)
        rewrite(saved, changed)
        with pytest.raises(ModelFileError, match=sentence):
            saving.load(saved)
    for kind, sentence in [
        ("buffer", "Linear has no place for 0.weight"),
        ("code", "calls 0.weight a 'code', which is none of parameter"),
        (None, "calls 0.weight a None"),
    ]:
        saved.write_bytes(before)
        rewrite(saved, tensors={**header["tensors"], "0.weight": kind})
        with pytest.raises(ModelFileError, match=sentence):
            saving.load(saved)


@pytest.mark.parametrize(
    ("keys", "value", "sentence"),
    [
        (("modules", "0", "settings", "out_features"), 6, r"shape \(6, 3\), got \(5, 3\)"),
        (("modules", "0", "settings", "out_features"), HUGE, r"shape \(1099511627776, 3\)"),
        (("modules", "0", "settings", "out_features"), 10**30, "description of a network"),
        (("modules", "0", "settings", "out_features"), -3, "description of a network"),
        (("modules", "0", "settings", "out_features"), 0, r"shape \(0, 3\)"),
        (("modules", "0", "settings", "out_features"), "3", "description of a network"),
        (("modules", "0", "settings", "out_features"), None, "description of a network"),
        (("modules", "0", "settings", "out_features"), {"value": 0}, "is no constant"),
        (("modules", "0", "settings", "out_features"), {"tuple": 3}, "a tuple needs a list"),
        (("modules", "0", "settings", "out_features"), {"dtype": "evil"}, "'evil' is none of"),
        (("modules", "0", "settings", "bias"), False, "Linear has no place for 0.bias"),
        (("modules", "0", "settings", "device"), "cuda", "Linear has no setting 'device'"),
        (("modules", "0", "settings"), None, "settings should be an object, got NoneType"),
        (("modules", "0", "class"), "Liner", "unknown layer 'Liner'; did you mean 'Linear'"),
        (("modules", "0", "class"), "__import__('os').system", "unknown layer"),
        (("modules", "0", "class"), "Module", "settings should be|unknown layer"),
        (("modules", "0", "class"), None, "a name should be text, got NoneType"),
        (("modules", "1", "class"), "LSTM", "unknown layer 'LSTM'"),
        (("modules", "1", "class"), "Elementwise", "a name should be text"),
        (("modules", "0"), None, "module 0 is NoneType"),
        (("modules", "0"), {"same": ""}, "is said to be '', which is not there"),
        (("modules", "0"), {"same": "9"}, "is said to be '9', which is not there"),
        (("modules", "../evil"), {"class": "ReLU", "settings": {}}, "is no name of a module"),
        (("modules", "a/b"), {"class": "ReLU", "settings": {}}, "is no name of a module"),
        (("modules", "x.y"), {"class": "ReLU", "settings": {}}, "has nothing that could hold it"),
        (("modules", "0.y"), {"class": "ReLU", "settings": {}}, "has nothing that could hold it"),
        (("modules", "forward"), {"class": "ReLU", "settings": {}}, "forward"),
        (("modules", "__class__"), {"class": "ReLU", "settings": {}}, "__class__"),
        (("modules", "a." * 99 + "a"), {"class": "ReLU", "settings": {}}, "at most 64 parts"),
        (("modules",), {}, "it describes no module"),
        (("modules",), [], "modules should be an object, got list"),
    ],
)
def test_modules_that_can_not_be(saved, keys, value, sentence):
    edit(saved, *keys, value=value)
    with pytest.raises(ModelFileError, match=sentence):
        saving.load(saved)


def nested(depth):
    value = 1
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize(
    ("keys", "value", "sentence"),
    [
        (("target",), "torch.load", "asks for 'torch.load', which is not among"),
        (("target",), "os.system", "asks for 'os.system', which is not among"),
        (("target",), "eval", "asks for 'eval', which is not among"),
        (("target",), "torch.nn.functional.relu(__import__('os'))", "which is not among"),
        (("target",), None, "a name should be text"),
        (("op",), "exec", "has the operation 'exec'"),
        (("op",), ["call_function"], "has the operation"),
        (("op",), "call_method", "asks for 'torch.tanh', which is not among"),
        (("op",), "call_module", "asks for 'torch.tanh', which is not among"),
        (("op",), "get_attr", "asks for 'torch.tanh', which is not among"),
        (("args",), None, "arguments that are no list"),
        (("args",), [{"value": 99}], "no result of an earlier step"),
        (("args",), [{"value": -1}], "no result of an earlier step"),
        (("args",), [{"value": True}], "no result of an earlier step"),
        (("args",), [{"slice": [1]}], "a slice needs start, stop and step"),
        (("args",), [{"python": "1 + 1"}], "no result of an earlier step"),
        (("args",), [{"device": "cuda"}], "'cuda' is none of cpu"),
        (("args",), [nested(500)], "nests deeper than 64 levels"),
        (("kwargs",), [1], "kwargs should be an object"),
        (
            (),
            {"op": "call_function", "target": "getattr", "args": [{"value": 0}, "__class__"]},
            "asks for an attribute other than",
        ),
        (
            (),
            {"op": "call_method", "target": "__reduce_ex__", "args": [{"value": 0}, 2]},
            "asks for '__reduce_ex__', which is not among",
        ),
        (
            (),
            {"op": "call_method", "target": "split", "args": ["a b"]},
            "of something that is no tensor",
        ),
        ((), {"op": "get_attr", "target": "value.__class__"}, "which is not among"),
        ((), {"op": "call_module", "target": ""}, "which is not among"),
        ((), None, "step 2 is NoneType"),
    ],
)
def test_steps_that_are_never_taken(path, keys, value, sentence):
    saving.save(path, Gated())
    assert parts(path)[1]["network"]["steps"][1]["target"] == "torch.tanh"
    edit(path, "steps", 1, *keys, value=value)
    with pytest.raises(ModelFileError, match=sentence):
        saving.load(path)


@pytest.mark.parametrize(
    ("keys", "value", "sentence"),
    [
        (("steps",), None, "steps should be a list, got NoneType"),
        (("steps",), {}, "steps should be a list, got dict"),
        (("output",), 99, "no result of an earlier step"),
        (("output",), "0", "no result of an earlier step"),
        (("modules", "value"), {"class": "Module"}, "asks for 'value'"),
    ],
)
def test_programs_that_can_not_be(path, keys, value, sentence):
    saving.save(path, Gated())
    edit(path, *keys, value=value)
    with pytest.raises(ModelFileError, match=sentence):
        saving.load(path)


@pytest.mark.parametrize(
    ("shared", "sentence"),
    [
        ({"third.weight": "scale"}, "third.weight can't be scale, which has another shape"),
        ({"third.weight": "nothing"}, "third.weight is 'nothing', which it does not hold"),
        ({"third.weight": None}, "third.weight is None, which it does not hold"),
        ({"first.weight": "scale"}, "first.weight is 'scale', which it does not hold"),
        ({"third.more": "scale"}, "Linear has no place for third.more"),
        ({"forward": "scale"}, "forward is no name that a tensor can have"),
        ({"../x": "scale"}, "is no name of a module or tensor"),
        ({}, "there is no tensor third.weight"),
    ],
)
def test_sharing_that_can_not_be(path, shared, sentence):
    saving.save(path, Tied())
    whole = {k: v for k, v in parts(path)[1]["shared"].items() if k.startswith("again")}
    rewrite(path, shared={**whole, **shared})
    with pytest.raises(ModelFileError, match=sentence):
        saving.load(path)


def test_a_name_that_the_module_has_already(path):
    saving.save(path, Tied())
    tensors, header = parts(path)
    for name in ("forward", "training", "_parameters", "../x", "first.more", "nowhere.x"):
        kinds = {**header["tensors"], name: "parameter"}
        rewrite(path, {**tensors, name: torch.ones(2)}, tensors=kinds)
        with pytest.raises(ModelFileError, match="description of a network that can't be"):
            saving.load(path)


def test_nan_is_neither_saved_nor_loaded(saved):
    tensors, _ = parts(saved)
    tensors["2.bias"][1] = torch.nan
    rewrite(saved, tensors)
    with pytest.raises(ModelFileError, match="NaN or infinity in 2.bias"):
        saving.load(saved)
    before = saved.read_bytes()
    model = lpom.mlp([3, 2], seed=0)
    nn.init.constant_(model[0].weight, torch.inf)
    with pytest.raises(ModelFileError, match="NaN or infinity in 0.weight"):
        saving.save(saved, model)
    norm = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    norm[1].running_mean.fill_(torch.nan)
    with pytest.raises(ModelFileError, match="NaN or infinity in 1.running_mean"):
        saving.save(saved, norm)
    assert saved.read_bytes() == before


def test_a_missing_file(path):
    with pytest.raises(ModelFileError, match="there is no model file"):
        saving.load(path)


def test_what_cannot_be_saved_leaves_the_old_file(saved):
    before = saved.read_bytes()
    with pytest.raises(TypeError, match="not JSON serializable"):
        saving.save(saved, lpom.mlp([3, 2], seed=0), metadata={"x": torch.ones(1)})
    assert saved.read_bytes() == before
    assert [file.name for file in saved.parent.iterdir()] == [saved.name]


def test_nothing_of_a_file_is_run(path, monkeypatch):
    saving.save(path, Gated())

    def refuse(*_, **__):
        raise AssertionError("ran something")

    for name in ("pickle.loads", "pickle.load", "builtins.eval", "builtins.exec", "torch.load"):
        monkeypatch.setattr(name, refuse)
    monkeypatch.setattr(rebuilding.Described, "forward", refuse)
    saving.load(path)


HOSTILE = [
    *(None, True, False, 0, -1, 7, 2**63, 10**40, -0.5, 1e308, "", "x", "0", "../x", "a.b.c"),
    *("__class__", "torch.load", "Linear", "forward", "\x00", "ä", [], {}, [[]], {"value": 0}),
    *({"value": 5}, {"tuple": [1, 2]}, {"float": "inf"}, {"same": "0"}, {"class": "ReLU"}),
]


def places(value, at=()):
    """Every place in JSON data, by the keys that lead there."""
    inner = value.items() if isinstance(value, dict) else enumerate(value)
    for key, item in inner:
        yield (*at, key)
        if isinstance(item, dict | list):
            yield from places(item, (*at, key))


def harmed(header, generator):
    """A header with one to three things replaced, removed or renamed."""
    for _ in range(generator.randint(1, 3)):
        keys = generator.choice([p for p in places(header) if p[0] not in ("format_version",)])
        place = header
        for key in keys[:-1]:
            place = place[key]
        action = generator.randrange(3)
        if action == 0:
            place[keys[-1]] = copy.deepcopy(generator.choice(HOSTILE))
        elif action == 1 or isinstance(place, list):
            del place[keys[-1]]
        else:
            place[generator.choice([v for v in HOSTILE if isinstance(v, str)])] = place.pop(
                keys[-1]
            )
    return header


@pytest.mark.parametrize("name", ["mlp", "tied", "attention"])
def test_files_changed_at_random_load_or_are_refused(path, name, pytestconfig):
    make, shape = NETWORKS[name]
    saving.save(path, make(), example=inputs(shape))
    tensors, whole = parts(path)
    generator = random.Random(name)
    cases, refused = 4000 if pytestconfig.getoption("long") else 200, 0
    for _ in range(cases):
        header = harmed(copy.deepcopy(whole), generator)
        header["sha256"] = saving._checksum(tensors, header)
        path.write_bytes(safetensors.torch.save(tensors, metadata={"lpom": json.dumps(header)}))
        try:
            saving.load(path)
        except ModelFileError:
            refused += 1
    assert cases / 2 < refused < cases
