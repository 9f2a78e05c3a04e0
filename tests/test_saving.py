"""Model files: what is saved comes back, and whatever was done to a file is noticed."""

from __future__ import annotations

import json

import pytest
import safetensors.torch
import torch
from torch import nn

import lpom
from lpom import activations, saving
from lpom.exceptions import ModelFileError

METADATA = {"classes": ["ä", "b"], "mean": [0.1, 1e-300], "nested": {"none": None}}


@pytest.fixture
def path(tmp_path):
    return tmp_path / "model.safetensors"


@pytest.fixture
def saved(path):
    saving.save(path, lpom.mlp([3, 5, 2], "tanh", seed=0), metadata=METADATA)
    return path


def parts(path):
    content = path.read_bytes()
    size = int.from_bytes(content[:8], "little")
    metadata = json.loads(content[8 : 8 + size])["__metadata__"]
    return safetensors.torch.load(content), json.loads(metadata["lpom"])


def rewrite(path, tensors=None, sign=True, **changes):
    """Change a file as somebody who knows the format could, checksum included."""
    old, header = parts(path)
    tensors = old if tensors is None else tensors
    header = {k: v for k, v in {**header, **changes}.items() if v is not None}
    if sign:
        header["sha256"] = saving._checksum(tensors, header)
    path.write_bytes(safetensors.torch.save(tensors, metadata={"lpom": json.dumps(header)}))


def edit_layer(path, i, **changes):
    architecture = parts(path)[1]["architecture"]
    architecture[i].update(changes)
    rewrite(path, architecture=architecture)


@pytest.mark.parametrize("name", activations.names())
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_model_comes_back_to_the_last_bit(path, name, dtype):
    model = lpom.mlp([4, 6, 5, 3], name, seed=1).to(dtype)
    saving.save(path, model, metadata=METADATA)
    loaded, metadata = saving.load(path)
    X = torch.randn(7, 4, generator=torch.Generator().manual_seed(0)).to(dtype)
    assert torch.equal(loaded(X), model(X))
    assert metadata == METADATA
    assert list(loaded.state_dict()) == list(model.state_dict())
    assert all(p.dtype == dtype and p.requires_grad for p in loaded.parameters())


def test_parameters_of_activations_and_missing_biases_are_kept(path):
    model = nn.Sequential(
        nn.Linear(2, 4, bias=False),
        nn.LeakyReLU(0.3),
        nn.Sequential(nn.Linear(4, 3), activations.Staircase(levels=7, step=0.5).to_module()),
    )
    saving.save(path, model)
    loaded, metadata = saving.load(path)
    assert metadata == {}
    assert loaded[0].bias is None and loaded[1].negative_slope == 0.3
    assert loaded[3].activation == activations.Staircase(levels=7, step=0.5)


def test_a_loaded_model_trains_on(saved):
    model, _ = saving.load(saved)
    X, y = torch.randn(20, 3), torch.arange(20) % 2
    before = [p.clone() for p in model.parameters()]
    lpom.fit(model, X, y, epochs=1, seed=0)
    assert all(not torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))


def test_the_same_model_makes_the_same_file_and_loading_draws_no_random_number(saved, tmp_path):
    state = torch.get_rng_state()
    model, metadata = saving.load(saved)
    assert torch.equal(torch.get_rng_state(), state)
    saving.save(tmp_path / "again", model, metadata=metadata)
    assert (tmp_path / "again").read_bytes() == saved.read_bytes()


@pytest.mark.parametrize("keep", [0, 5, 8, 9, 100, -1])
def test_a_file_cut_off_anywhere(saved, keep):
    saved.write_bytes(saved.read_bytes()[:keep])
    with pytest.raises(ModelFileError, match="is cut off or damaged|is not a safetensors file"):
        saving.load(saved)


def test_a_file_of_another_kind(saved):
    torch.save({"weight": torch.ones(2)}, saved)
    with pytest.raises(ModelFileError, match="is not a safetensors file"):
        saving.load(saved)


def test_a_changed_byte_is_noticed_wherever_it_is(saved):
    content = saved.read_bytes()
    for k in range(0, len(content), 5):
        changed = bytearray(content)
        changed[k] ^= 1
        saved.write_bytes(changed)
        with pytest.raises(ModelFileError):
            saving.load(saved)


def test_a_changed_weight_fails_the_checksum(saved):
    tensors, _ = parts(saved)
    tensors["layers.0.weight"][0, 0] += 1
    rewrite(saved, tensors, sign=False)
    with pytest.raises(ModelFileError, match="was changed after it was written.*checksum"):
        saving.load(saved)


def test_changed_metadata_fails_the_checksum(saved):
    rewrite(saved, sign=False, metadata={**METADATA, "classes": ["b", "ä"]})
    with pytest.raises(ModelFileError, match="checksum does not match"):
        saving.load(saved)


def test_missing_metadata(saved):
    rewrite(saved, architecture=None)
    with pytest.raises(ModelFileError, match="lacks 'architecture', a JSON list, in its"):
        saving.load(saved)
    saved.write_bytes(safetensors.torch.save({"weight": torch.ones(2)}))
    with pytest.raises(ModelFileError, match="not an lpom model"):
        saving.load(saved)


def test_an_unknown_version(saved):
    rewrite(saved, format_version=99, lpom_version="7.0")
    with pytest.raises(ModelFileError, match="format version 99.*reads version 1.*lpom 7.0"):
        saving.load(saved)


@pytest.mark.parametrize(
    ("i", "changes", "sentence"),
    [
        (0, {"outputs": 6}, r"layers.0.weight should have shape \(6, 3\).*got \(5, 3\)"),
        (1, {"inputs": 6}, "layer 1 with 6 inputs.*below it has 5 outputs"),
        (1, {"bias": False}, "no place for layers.1.bias"),
        (0, {"dtype": "float64"}, "should have shape .* of torch.float64, got .*float32"),
        (0, {"dtype": "int64"}, "an invalid description of layer 0: 'int64'"),
        (0, {"activation": "rleu"}, "unknown activation 'rleu'; did you mean 'relu'"),
        (0, {"parameters": {"slope": 2}}, "'tanh' has no setting 'slope'"),
        (0, {"kind": "convolution"}, "kind 'convolution'"),
        (0, {"inputs": -3}, "an invalid description of layer 0"),
        (0, {"inputs": "3"}, "an invalid description of layer 0"),
    ],
)
def test_an_architecture_that_does_not_fit(saved, i, changes, sentence):
    edit_layer(saved, i, **changes)
    with pytest.raises(ModelFileError, match=sentence):
        saving.load(saved)


def test_layers_missing_or_too_many(saved):
    architecture = parts(saved)[1]["architecture"]
    rewrite(saved, architecture=architecture[:1])
    with pytest.raises(ModelFileError, match="1 layers, and no place for layers.1"):
        saving.load(saved)
    rewrite(saved, architecture=[*architecture, architecture[1]])
    with pytest.raises(ModelFileError, match="layer 2 with 5 inputs"):
        saving.load(saved)
    rewrite(saved, architecture=[])
    with pytest.raises(ModelFileError, match="0 layers"):
        saving.load(saved)


@pytest.mark.parametrize("text", ["[", "3"])
def test_metadata_that_are_no_json(saved, text):
    tensors, _ = parts(saved)
    saved.write_bytes(safetensors.torch.save(tensors, metadata={"lpom": text}))
    with pytest.raises(ModelFileError, match="metadata that is not valid JSON"):
        saving.load(saved)


def test_nan_is_neither_saved_nor_loaded(saved):
    tensors, _ = parts(saved)
    tensors["layers.1.bias"][1] = torch.nan
    rewrite(saved, tensors)
    with pytest.raises(ModelFileError, match="NaN or infinity in layers.1.bias"):
        saving.load(saved)
    before = saved.read_bytes()
    model = lpom.mlp([3, 2], seed=0)
    nn.init.constant_(model[0].weight, torch.inf)
    with pytest.raises(ModelFileError, match="NaN or infinity in layers.0.weight"):
        saving.save(saved, model)
    assert saved.read_bytes() == before


def test_a_missing_file(path):
    with pytest.raises(ModelFileError, match="there is no model file"):
        saving.load(path)


def test_what_cannot_be_saved_leaves_the_old_file(saved):
    before = saved.read_bytes()
    softsign = activations.from_function(nn.functional.softsign, lipschitz=1.0, name="softsign")
    with pytest.raises(TypeError, match="'softsign' was made by from_function"):
        saving.save(saved, lpom.mlp([3, 4, 2], softsign, seed=0))
    with pytest.raises(TypeError, match="not JSON serializable"):
        saving.save(saved, lpom.mlp([3, 2], seed=0), metadata={"x": torch.ones(1)})
    with pytest.raises(ValueError, match="GELU is not monotone"):
        saving.save(saved, nn.Sequential(nn.Linear(2, 2), nn.GELU()))
    assert saved.read_bytes() == before
    assert [file.name for file in saved.parent.iterdir()] == [saved.name]


def test_pickle_is_never_loaded(saved, monkeypatch):
    def refuse(*_, **__):
        raise AssertionError("unpickled something")

    monkeypatch.setattr("pickle.loads", refuse)
    monkeypatch.setattr("pickle.load", refuse)
    monkeypatch.setattr(torch, "load", refuse)
    saving.load(saved)


def test_a_model_that_flattens_comes_back_so(tmp_path):
    model = nn.Sequential(nn.Flatten(), lpom.mlp([12, 5, 2], seed=0))
    saving.save(tmp_path / "m.safetensors", model)
    again, _ = saving.load(tmp_path / "m.safetensors")
    images = torch.randn(3, 1, 3, 4)
    assert torch.equal(again(images), model(images))
