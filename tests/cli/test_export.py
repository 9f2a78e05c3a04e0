"""``lpom export``, and what ``lpom info`` says of a network that penalties have made smaller."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits
from typer.testing import CliRunner

import lpom
from lpom.cli.app import app


def call(*arguments, code=0):
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == code, result.output + repr(result.exception)
    return result.output


@pytest.fixture(scope="module")
def sparse(tmp_path_factory):
    """A run of steps with a tenth of its weights."""
    folder = tmp_path_factory.mktemp("sparse") / "run"
    penalties = "penalties={'l1': {'keep': 0.1, 'lazy': True}}"
    options = ["--activation", "step", "--hidden", "32,16", "--epochs", 3, "--set", penalties]
    call("train", "digits", *options, "--no-early-stopping", "--out", folder, "--quiet")
    return folder


def expected(run):
    """Inputs of the network and its outputs."""
    encoder, estimator = lpom.load(run)
    inputs = encoder.transform(load_digits().data[:50].astype(np.float32))
    with torch.no_grad():
        return inputs, estimator.to_torch()(torch.from_numpy(inputs)).numpy()


def test_info_says_what_is_left(sparse):
    shown = " ".join(call("info", sparse).split())
    model = lpom.load(sparse)[-1].to_torch()
    total = sum(p.numel() for p in model.parameters())
    nonzero = sum(int(torch.count_nonzero(p)) for p in model.parameters())
    assert f"{total:,} weights" in shown
    assert f"{nonzero:,} weights are not zero" in shown and nonzero < 0.2 * total


@pytest.mark.parametrize("more", [(), ("--compact",)])
def test_onnx_from_the_shell(sparse, more, tmp_path):
    onnxruntime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    path = tmp_path / "net.onnx"
    said = call("export", sparse, "--to", "onnx", "--out", path, *more)
    assert f"onnx: {path}" in said and ("units removed" in said) == bool(more)
    inputs, wanted = expected(sparse)
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    (found,) = session.run(None, {"inputs": inputs})
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("neurons", ["threshold", "if"])
def test_nir_from_the_shell(sparse, neurons, tmp_path):
    nir = pytest.importorskip("nir")
    path = tmp_path / "net.nir"
    call("export", sparse, "--to", "nir", "--neurons", neurons, "--out", path)
    kinds = [type(node).__name__ for node in nir.read(path).nodes.values()]
    assert kinds.count("Affine") == 3 and kinds.count({"if": "IF"}.get(neurons, "Threshold")) == 2


def test_mistakes_are_sentences(sparse, tmp_path):
    assert "Known: nir, onnx" in call("export", sparse, "--to", "tflite", code=2)
    (tmp_path / "there").write_text("x")
    said = call("export", sparse, "--to", "nir", "--out", tmp_path / "there", code=2)
    assert "is there already. Name another file, or use --force." in said
    assert "expected the folder of a run" in call("export", tmp_path / "nowhere", code=2)
