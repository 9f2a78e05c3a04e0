"""Packed tensors come back to the last bit, and take the bytes that they should."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import lpom
from lpom import packing, saving
from lpom.exceptions import ModelFileError
from lpom.penalties import Binary, Levels, Ternary


def drawn(*shape, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0)).to(dtype)


def thinned(W, keep=0.05):
    return W * (W.abs() > W.abs().flatten().quantile(1 - keep))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16])
@pytest.mark.parametrize("shape", [(7, 301), (5, 4, 9, 9)])
@pytest.mark.parametrize(
    "grid, bits",
    [(Binary(), 1), (Ternary(), 2), (Levels(bits=3), 4), (Levels(bits=4), 4), (Levels(bits=8), 8)],
    ids=repr,
)
def test_levels_take_as_many_bits_as_they_need(grid, bits, shape, dtype):
    W = grid.nearest(drawn(*shape, dtype=dtype))
    parts, note = packing.pack(W) or pytest.skip("8 bits and their levels are no less than these")
    assert note == {"kind": "levels", "bits": bits, "shape": list(shape)}
    assert len(parts["codes"]) == -(-W.numel() * bits // 8)
    assert torch.equal(packing.unpack(parts, note), W)


def test_codes_are_packed_from_the_highest_bits_on():
    W = torch.tensor([[-1.0, 3.0, 3.0, -1.0] * 8, [2.0, 2.0, 5.0, 2.0] * 8])
    parts, _ = packing.pack(W)
    assert parts["codes"].tolist() == [0b01100110] * 4 + [0b00100010] * 4
    assert parts["levels"].tolist() == [[-1.0, 3.0], [2.0, 5.0]]


@pytest.mark.parametrize("shape", [(300, 784), (20, 3, 5, 5), (13, 77)])
def test_few_weights_are_a_mask_and_values(shape):
    W = thinned(drawn(*shape))
    parts, note = packing.pack(W)
    assert note == {"kind": "sparse", "shape": list(shape)}
    assert packing.n_bytes(parts) == -(-W.numel() // 8) + 4 * int(torch.count_nonzero(W))
    assert torch.equal(packing.unpack(parts, note), W)


def test_other_tensors_stay_as_they_are():
    for W in (drawn(20, 30), drawn(400), torch.ones(3, 4).int(), torch.zeros(0, 3)):
        assert packing.pack(W) is None


def test_a_model_file_of_one_bit_weights(tmp_path):
    model = lpom.mlp([784, 256, 256, 10], "sign", seed=0)
    whole = tmp_path / "whole.safetensors"
    saving.save(whole, model)
    with torch.no_grad():
        for layer in (model[0], model[2]):
            layer.weight.copy_(Binary().nearest(layer.weight))
        model[4].weight.copy_(thinned(model[4].weight))
    path = tmp_path / "model.safetensors"
    saving.save(path, model, metadata={"a": 1})
    assert path.stat().st_size < 0.05 * whole.stat().st_size
    loaded, metadata = saving.load(path)
    assert metadata == {"a": 1}
    for name, tensor in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor)
    into, _ = saving.load(path, into=lpom.mlp([784, 256, 256, 10], "sign", seed=1))
    assert torch.equal(into[2].weight, model[2].weight)


NOTE = {"kind": "levels", "bits": 1, "shape": [2, 32]}


@pytest.mark.parametrize(
    "change, sentence",
    [
        ({"bits": 3}, "1, 2, 4, 8 bits, got 3"),
        ({"bits": 2}, "8 bytes for 64 codes of 2 bits"),
        ({"shape": [2, 10**12]}, "bytes for"),
        ({"shape": [2, -32]}, "no empty side"),
        ({"shape": "2"}, "whole numbers, got '2'"),
        ({"shape": [3, 8]}, "are not those of"),
        ({"kind": "sparse"}, "are not the parts of a 'sparse'"),
        ({"kind": []}, "are not the parts"),
    ],
)
def test_notes_that_do_not_fit(change, sentence):
    W = Binary().nearest(drawn(2, 32))
    parts, note = packing.pack(W)
    assert note == NOTE
    with pytest.raises(ValueError, match=sentence):
        packing.unpack(parts, NOTE | change)


def test_parts_that_do_not_fit():
    parts, note = packing.pack(Binary().nearest(drawn(2, 32)))
    with pytest.raises(ValueError, match="code 1 of 1 levels"):
        packing.unpack(parts | {"levels": parts["levels"][:, :1]}, note)
    parts, note = packing.pack(thinned(drawn(9, 90)))
    with pytest.raises(ValueError, match="values for"):
        packing.unpack(parts | {"values": parts["values"][1:]}, note)


def test_a_changed_note_is_one_sentence(tmp_path, monkeypatch):
    path = tmp_path / "model.safetensors"
    layer = nn.Linear(64, 8)
    layer.weight.data = Binary().nearest(layer.weight.data)
    pack = packing.pack
    monkeypatch.setattr(packing, "pack", lambda t: (p := pack(t)) and (p[0], p[1] | {"bits": 7}))
    saving.save(path, nn.Sequential(layer))
    with pytest.raises(ModelFileError, match="a packed tensor that can't be: a code has"):
        saving.load(path)
