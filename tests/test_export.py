"""Exported files, run by programs that know nothing of torch."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

import lpom
from lpom.activations import Elementwise, Sign, Staircase, Step
from lpom.export import ExportError, to_nir, to_onnx
from lpom.penalties import Binary, Levels, Ternary


def drawn(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))


def lenet(activation, padding=0):
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 3, 3, padding=padding, stride=2), nn.BatchNorm2d(3), activation,
        nn.Conv2d(3, 4, 3, bias=False), activation, nn.Flatten(),
        nn.Linear(4 * (16 if padding else 4), 10), nn.BatchNorm1d(10), nn.Dropout(0.5), activation,
        nn.Linear(10, 3),
    )  # fmt: skip
    for _ in range(5):  # statistics that are not those of the start
        model(drawn(20, 1, 10 + padding, 10 + padding))
    return model


@pytest.mark.parametrize(
    "model, shape",
    [
        (lpom.mlp([5, 8, 3], "tanh", seed=0), (5,)),
        (lpom.mlp([5, 8, 3], Staircase(3, 0.5), seed=0), (5,)),
        (lenet(Elementwise(Sign())), (1, 10, 10)),
    ],
)
def test_onnx_says_what_torch_says_for_any_number_of_rows(model, shape, tmp_path):
    onnxruntime = pytest.importorskip("onnxruntime")
    model.train()
    path = to_onnx(model, tmp_path / "model.onnx", drawn(4, *shape))
    assert model.training
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    for rows in (1, 7):
        X = drawn(rows, *shape)
        (found,) = session.run(None, {"inputs": X.numpy()})
        np.testing.assert_allclose(found, model.eval()(X).detach(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("grid", [Binary(), Ternary(), Levels(bits=4), Levels(bits=8)], ids=repr)
def test_weights_of_few_levels_are_integers_in_onnx(grid, tmp_path):
    onnx = pytest.importorskip("onnx")
    onnxruntime = pytest.importorskip("onnxruntime")
    model = lenet(nn.Tanh()).eval()  # without jumps, which rounding may turn
    with torch.no_grad():
        for layer in (model[3], model[6]):
            layer.weight.copy_(grid.nearest(layer.weight))
    X = drawn(20, 1, 10, 10)
    path = to_onnx(model, tmp_path / "model.onnx", X)
    stored = {t.name: onnx.numpy_helper.to_array(t) for t in onnx.load(path).graph.initializer}
    for name, layer in (("3.weight", model[3]), ("6.weight", model[6])):
        integers = stored[f"{name}.integers"]
        assert integers.dtype == np.int8 and name not in stored
        scale = grid.scale(layer.weight.detach())
        np.testing.assert_array_equal(integers, grid.integers(layer.weight.detach(), scale))
    assert "0.weight" in stored or "10.weight" in stored  # of real numbers, as they were
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    (found,) = session.run(None, {"inputs": X.numpy()})
    np.testing.assert_allclose(found, model(X).detach(), rtol=1e-4, atol=1e-4)


def test_a_file_that_says_something_else_is_refused(tmp_path, monkeypatch):
    onnxruntime = pytest.importorskip("onnxruntime")

    class Other:
        def __init__(self, *args, **kwargs): ...

        def run(self, names, inputs):
            return (np.zeros((4, 3), np.float32),)

    monkeypatch.setattr(onnxruntime, "InferenceSession", Other)
    with pytest.raises(ExportError, match="other outputs than torch for 100.0%"):
        to_onnx(lpom.mlp([5, 8, 3], "tanh", seed=0), tmp_path / "model.onnx", drawn(4, 5))


def simulated(graph, X):
    """A chain of NIR nodes by numpy, one sample at a time, as the format defines them."""
    after = dict(graph.edges)
    found = []
    for x in X:
        name = after["input"]
        while name != "output":
            node = graph.nodes[name]
            match type(node).__name__:
                case "Affine":
                    x = node.weight @ x + node.bias
                case "Threshold":
                    x = np.where(x > node.threshold, 1.0, 0.0).astype(np.float32)
                case "Flatten":
                    x = x.reshape(-1)
                case "Conv2d":
                    x = convolved(node, x)
            name = after[name]
        found.append(x)
    return np.stack(found)


def convolved(node, x):
    (p, q), (s, t) = np.broadcast_to(node.padding, 2), np.broadcast_to(node.stride, 2)
    x = np.pad(x, ((0, 0), (p, p), (q, q)))
    kh, kw = node.weight.shape[2:]
    rows, columns = (x.shape[1] - kh) // s + 1, (x.shape[2] - kw) // t + 1
    out = np.empty((len(node.weight), rows, columns), np.float32)
    for i in range(rows):
        for j in range(columns):
            part = x[:, i * s : i * s + kh, j * t : j * t + kw]
            out[:, i, j] = np.tensordot(node.weight, part, 3) + node.bias
    return out


@pytest.mark.parametrize(
    "model, shape",
    [
        (lpom.mlp([5, 8, 6, 3], "step", seed=0), (5,)),
        (lpom.mlp([5, 8, 6, 3], "sign", seed=0), (5,)),
        (lenet(Elementwise(Sign())), (1, 10, 10)),
        (lenet(Elementwise(Step()), padding=1), (1, 11, 11)),
    ],
)
def test_nir_nodes_say_what_torch_says(model, shape, tmp_path):
    nir = pytest.importorskip("nir")
    X = drawn(30, *shape)
    graph = nir.read(to_nir(model, tmp_path / "model.nir", X))
    found = simulated(graph, X.numpy())
    np.testing.assert_allclose(found, model.eval()(X).detach(), rtol=1e-4, atol=1e-5)


def test_a_step_is_taken_at_zero_itself(tmp_path):
    nir = pytest.importorskip("nir")
    model = lpom.mlp([1, 1, 1], "step", seed=0)
    nn.init.zeros_(model[0].weight)
    nn.init.zeros_(model[0].bias)
    graph = nir.read(to_nir(model, tmp_path / "model.nir", drawn(1, 1)))
    assert simulated(graph, np.ones((1, 1), np.float32)) == model(torch.ones(1, 1)).item()


@pytest.mark.parametrize(
    "model, message",
    [
        (lpom.mlp([5, 8, 3], "tanh", seed=0), "1 is Tanh"),
        (lpom.mlp([5, 8, 3], "sign", "sign", seed=0), "outputs of the network are signs"),
        (nn.Linear(5, 3), "nn.Sequential, not of Linear"),
    ],
)
def test_what_nir_has_no_nodes_for_is_refused(model, message, tmp_path):
    pytest.importorskip("nir")
    with pytest.raises(ExportError, match=message):
        to_nir(model, tmp_path / "model.nir", drawn(2, 5))
    signs = nn.Sequential(nn.Conv2d(1, 2, 3), Elementwise(Sign()), nn.Conv2d(2, 2, 3, padding=1))
    with pytest.raises(ExportError, match="2 pads the signs"):
        to_nir(signs, tmp_path / "model.nir", drawn(2, 1, 6, 6))


# simulators that read NIR, which nothing but these tests asks for


def by_snntorch(graph):
    """Its importer forgets to say that neurons tell their spikes alone."""
    simulator = pytest.importorskip("snntorch.import_nir", reason="snnTorch is not installed")
    network = simulator.import_from_nir(graph)
    for module in network.modules():
        if type(module).__name__ == "Leaky":
            module.register_forward_hook(lambda module, inputs, outputs: outputs[0])
    return lambda x: network(x)[0]


def by_norse(graph):
    norse = pytest.importorskip("norse.torch", reason="Norse is not installed")
    network = norse.from_nir(graph, dt=1.0)
    return lambda x: network(x)[0]


def by_sinabs(graph):
    sinabs = pytest.importorskip("sinabs.nir", reason="Sinabs is not installed")
    network = sinabs.from_nir(graph, batch_size=1, num_timesteps=1)
    return lambda x: network(x[None])[0][0]


@pytest.mark.filterwarnings("ignore")  # of their own doings
@pytest.mark.parametrize("simulate", [by_snntorch, by_norse, by_sinabs])
@pytest.mark.parametrize(
    "model, shape",
    [
        (lpom.mlp([5, 8, 6, 3], "step", seed=0), (5,)),
        (lpom.mlp([5, 8, 6, 3], "sign", seed=0), (5,)),
        (lenet(Elementwise(Step()), padding=1), (1, 11, 11)),
    ],
    ids=["step", "sign", "convolutions"],
)
def test_simulators_say_what_torch_says(simulate, model, shape, tmp_path):
    nir = pytest.importorskip("nir")
    X = drawn(20, *shape)
    path = to_nir(model, tmp_path / "model.nir", X, neurons="if")
    # one time step from rest: they remember the sample before
    found = torch.stack([simulate(nir.read(path))(x).detach() for x in X])
    torch.testing.assert_close(found, model.eval()(X).detach(), rtol=1e-4, atol=1e-5)


def test_an_integrating_neuron_fires_once_and_at_zero(tmp_path):
    nir = pytest.importorskip("nir")
    model = lpom.mlp([3, 4, 2], "step", seed=0)
    with torch.no_grad():
        model[0].weight.copy_(torch.tensor([[1.0, -1, 0], [9, 9, 9], [-9, -9, -9], [0, 0, 0]]))
        model[0].bias.zero_()
    X = torch.tensor([[1.0, 1.0, 5.0], [-1.0, 2.0, 3.0]])
    graph = nir.read(to_nir(model, tmp_path / "model.nir", X, neurons="if"))
    layer, neuron = (graph.nodes[name] for name in ("affine", "if"))
    v = 2 * X.numpy() @ layer.weight.T + layer.bias  # the largest inputs that are allowed for
    assert (neuron.v_threshold == 1).all() and v.max() < 2
    np.testing.assert_array_equal(v > 1, model[1](model[0](2 * X)).detach() == 1)


def test_neurons_that_nir_has_not(tmp_path):
    pytest.importorskip("nir")
    model = lpom.mlp([3, 4, 2], "step", seed=0)
    with pytest.raises(ValueError, match="neurons.*'spiking'"):
        to_nir(model, tmp_path / "model.nir", torch.zeros(1, 3), neurons="spiking")
    with pytest.raises(ExportError, match="no layer below"):
        to_nir(model[1:], tmp_path / "model.nir", torch.zeros(1, 4), neurons="if")


def test_estimators_lifted_models_and_arrays_are_taken(tmp_path):
    pytest.importorskip("onnxruntime")
    X, y = np.random.default_rng(0).normal(size=(40, 5)), np.arange(40) % 3
    estimator = lpom.MLPClassifier((4,), tol=1.0, random_state=0).fit(X, y)
    for k, model in enumerate((estimator, lpom.lift(estimator.to_torch()))):
        assert to_onnx(model, tmp_path / f"{k}.onnx", X[:7]).exists()


@pytest.mark.parametrize("write", [to_onnx, to_nir])
def test_arguments_in_another_order_are_told(write, tmp_path):
    with pytest.raises(TypeError, match="module or a trained estimator, then a path"):
        write(tmp_path / "a", nn.Linear(2, 3), drawn(4, 2))
    with pytest.raises(TypeError, match="an object and then a path"):
        lpom.save(tmp_path / "a", nn.Linear(2, 3))
