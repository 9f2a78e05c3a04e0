"""Where batches come from: what is copied, what is found to be no number, odd arrays."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import sparse
from torch.utils.data import DataLoader, TensorDataset

import lpom
from lpom import checks as room
from lpom.training.data import Arrays
from lpom.training.interface import Interface, check_inputs
from lpom.training.task import Task
from measuring import LiveTensors

N, WIDTH = 20_000, 50


def source(X, y, dtype=torch.float32, **options):
    takes = Interface.of(lpom.mlp([X.shape[1], 3], seed=0, dtype=dtype), X)
    return Arrays(X, y, Task.infer(y, 3), takes, **options)


@pytest.fixture
def rows():
    rng = np.random.default_rng(0)
    return rng.standard_normal((N, WIDTH)).astype(np.float32), np.arange(N) % 3


def peak(X, y):
    """Bytes of tensors alive at once beyond X and the targets, in one epoch of batches."""
    live = LiveTensors()
    with live:
        made = source(X, y, batch_size=100, generator=torch.Generator().manual_seed(0))
        for _ in made.epoch():
            pass
    return live.peak - made.target.nbytes


def test_x_is_not_copied_if_it_fits(rows):
    X, y = rows
    made = source(torch.from_numpy(X), torch.from_numpy(y), batch_size=100)
    assert made.X.data_ptr() == torch.from_numpy(X).data_ptr()
    assert source(X, y).whole.inputs.data_ptr() == X.ctypes.data
    assert peak(X, torch.from_numpy(y)) < X.nbytes


LAYOUTS = {
    "float64": lambda X: X.astype(np.float64),
    "columns first": np.asfortranarray,
    "both": lambda X: np.asfortranarray(X.astype(np.float64)),
    "every second": lambda X: np.repeat(X, 2, 0)[::2],
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_x_is_copied_once_if_it_does_not(name, rows):
    X, y = rows
    given = torch.from_numpy(LAYOUTS[name](X))
    assert X.nbytes <= peak(given, torch.from_numpy(y)) < 1.8 * X.nbytes
    made = source(given, y)
    torch.testing.assert_close(made.whole.inputs, torch.from_numpy(X), rtol=0, atol=0)
    assert made.whole.inputs.is_contiguous()


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.uint8, ">f4"])
def test_a_memory_map_stays_on_disk(dtype, rows, tmp_path):
    X, y = rows
    X = (10 * X).astype(dtype)
    np.save(tmp_path / "X.npy", X)
    mapped = np.load(tmp_path / "X.npy", mmap_mode="r")
    made = source(mapped, y, batch_size=100, generator=torch.Generator().manual_seed(0))
    assert not isinstance(made.X, torch.Tensor) or np.dtype(dtype).byteorder == ">"
    order = torch.randperm(N, generator=torch.Generator().manual_seed(0))
    for k, batch in enumerate(made.epoch(skip=7), 7):
        expected = X[order[100 * k : 100 * k + 100].numpy()].astype(np.float32)
        np.testing.assert_array_equal(batch.inputs.numpy(), expected)
        assert batch.inputs.dtype == torch.float32
    assert k == 199


def test_a_model_learns_alike_from_a_map_and_from_memory(tmp_path):
    X, y = np.random.default_rng(0).standard_normal((90, 5)), np.arange(90) % 3
    np.save(tmp_path / "X.npy", X)
    trained = []
    for given in (X, np.load(tmp_path / "X.npy", mmap_mode="r"), sparse.csr_matrix(X)):
        model = lpom.mlp([5, 6, 3], seed=0)
        lpom.fit(model, given, y, epochs=2, batch_size=20, seed=0)
        trained.append([p.tolist() for p in model.parameters()])
    assert trained[0] == trained[1] == trained[2]


@pytest.mark.parametrize("row", [0, 130, 199])
@pytest.mark.parametrize("kind", ["array", "tensor", "loader"])
def test_numbers_are_checked_in_chunks_and_the_row_is_named(row, kind, monkeypatch):
    monkeypatch.setattr(room, "_CHUNK", 60)  # 30 rows of two
    for bad, sentence in (
        (np.nan, f"X holds NaN or infinity, first in row {row}"),
        (1e300, rf"up to 1e\+300, beyond the range .* float32, first in row {row}. Scale X"),
    ):
        X = np.ones((200, 2))
        X[row, 1] = X[199, 0] = bad
        y = np.arange(200) % 3
        if kind != "array":
            X, y = torch.from_numpy(X), torch.from_numpy(y)
        model = lpom.mlp([2, 3], seed=0)
        with pytest.raises(ValueError, match=sentence):
            if kind == "loader":
                lpom.fit(model, DataLoader(TensorDataset(X, y), batch_size=200), epochs=1)
            else:
                lpom.fit(model, X, y, epochs=1)
    wide = Interface.of(lpom.mlp([2, 3], seed=0, dtype=torch.float64), X)
    with pytest.warns(UserWarning, match=r"values up to 1e\+300"):
        assert check_inputs(X, wide).shape == (200, 2)


def test_targets_and_weights_beyond_the_range_are_found_too():
    X = np.ones((20, 2))
    with pytest.raises(ValueError, match="y holds values up to 1e.300, beyond the range"):
        lpom.fit(lpom.mlp([2, 1]), X, np.full(20, 1e300))
    with pytest.raises(ValueError, match="sample_weight must be finite"):
        lpom.fit(lpom.mlp([2, 1]), X, np.ones(20), sample_weight=np.full(20, 1e300))


ODD = {
    "complex array": (np.ones((4, 2), complex), TypeError, "X must hold numbers, got complex128"),
    "complex": (torch.ones(4, 2, dtype=torch.complex64), TypeError, "real numbers, got a complex"),
    "sparse": (torch.ones(4, 2).to_sparse(), TypeError, "got a sparse one"),
    "meta": (torch.ones(4, 2, device="meta"), TypeError, "got a meta one"),
    "masked": (np.ma.masked_greater(np.eye(4, 2), 0.5), ValueError, "X has masked values"),
    "words": (np.array([["a", "b"]]), TypeError, "X must hold numbers, got <U1"),
}


@pytest.mark.parametrize("name", ODD)
def test_what_is_no_matrix_of_numbers_gets_a_sentence(name):
    X, error, sentence = ODD[name]
    with pytest.raises(error, match=sentence):
        lpom.fit(lpom.mlp([2, 3]), X, [0, 1, 2, 0])


@pytest.mark.filterwarnings("ignore:.*quantize_per_tensor")
@pytest.mark.parametrize("kind", ["complex", "meta", "quantised"])
def test_odd_targets_and_weights_get_a_sentence(kind):
    def odd():
        match kind:
            case "complex":
                return torch.ones(4, dtype=torch.complex64)
            case "meta":
                return torch.ones(4, device="meta")
        return torch.quantize_per_tensor(torch.ones(4), 1.0, 0, torch.qint8)

    X = np.eye(4, 2)
    with pytest.raises(TypeError, match=f"y must be .* real numbers, got a {kind} one"):
        lpom.fit(lpom.mlp([2, 1]), X, odd())
    with pytest.raises(TypeError, match=f"sample_weight must be .* got a {kind} one"):
        lpom.fit(lpom.mlp([2, 3]), X, [0, 1, 2, 0], sample_weight=odd())


@pytest.mark.parametrize(
    "X",
    [
        np.arange(8.0).reshape(4, 2).astype(">f8"),
        np.arange(8.0).reshape(4, 2)[::-1],
        np.arange(8.0).reshape(4, 2).astype(np.longdouble),
        np.ones(4, dtype=[("a", "i1"), ("X", "f8", 2)])["X"],
        np.ma.masked_array(np.eye(4, 2)),
        [[0, 1], [2, 3]],
    ],
)
def test_odd_arrays_of_numbers_are_read(X):
    found = check_inputs(X, Interface.of(lpom.mlp([2, 3], seed=0), X))
    np.testing.assert_array_equal(np.asarray(found), np.asarray(X, dtype=np.float64))


def test_a_loss_of_ones_own_is_scored_by_what_it_says_of_itself():
    """Soft targets of exclusive classes: the largest output decides, whatever the loss's name."""
    from lpom.losses import CrossEntropy, Loss

    known = CrossEntropy()

    class Own(Loss):
        name, threshold, lipschitz = "own", 0.0, 0.5
        logits = classifies = exclusive = True
        value, gradient, probabilities = known.value, known.gradient, known.probabilities

    generator = torch.Generator().manual_seed(0)
    X, target = torch.randn(60, 4, generator=generator), torch.randn(60, 3, generator=generator)
    target = torch.softmax(target, 1)
    model = lpom.mlp([4, 3], seed=0)
    found = lpom.evaluate(model, X, target, loss=Own())
    assert found == lpom.evaluate(model, X, target, loss="cross-entropy")
    assert found[1] == pytest.approx(
        float((model(X).argmax(1) == target.argmax(1)).double().mean())
    )
