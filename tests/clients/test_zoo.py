"""A sample of the architectures of other libraries; ``benchmarks/zoo.py`` has them all."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
import torch

ZOO = Path(__file__).parents[2] / "benchmarks" / "zoo.py"
if not ZOO.exists():
    pytest.skip("the benchmarks are not here", allow_module_level=True)
spec = importlib.util.spec_from_file_location("zoo", ZOO)
zoo = importlib.util.module_from_spec(spec)
spec.loader.exec_module(zoo)

SAMPLE = [
    *(("transformers", name) for name in "llama gpt2 bert t5 vit mamba mixtral gemma2".split()),
    *(("transformers", name) for name in "convnextv2 mobilenet_v2 whisper swin rwkv".split()),
    ("timm", "convnext_atto"),
    ("timm", "mobilenetv3_small_050"),
    ("graphs", "GATv2Conv"),
]
NEEDS = {"transformers": ["transformers"], "timm": ["timm"], "graphs": ["torch_geometric"]}


@pytest.mark.filterwarnings("ignore")  # of other libraries
@pytest.mark.parametrize("library, name", SAMPLE)
def test_an_architecture_is_lifted_wholly(library, name):
    """Outputs equal, a gradient close to the plain one, nothing plain in autograd's graph, and the
    step of fit is that of lift."""
    for module in NEEDS[library]:
        pytest.importorskip(module)
    measured = zoo.measure(zoo.LIBRARIES[library]()[name])
    assert measured["forward"] < 1e-5
    assert measured["cosine"] > 0.99, measured["worst"]
    assert measured["plain"] == {}
    assert "own derivative" not in measured["report"]
    assert measured["fit"] < 1e-5


def test_a_model_that_keeps_a_derivative_is_caught_by_the_audit():
    class Own(torch.autograd.Function):
        @staticmethod
        def forward(ctx, z):
            return z.exp()

        @staticmethod
        def backward(ctx, g):
            return g

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = torch.nn.Linear(3, 4), torch.nn.Linear(4, 2)

        def forward(self, x):
            return self.last(torch.relu(Own.apply(self.first(x))))

    x = torch.randn(5, 3)
    measured = zoo.measure(lambda: (Model(), (x,)))
    assert measured["plain"] == {"Own": 1} and "Own" in measured["report"]
    plain = zoo.audit(Model(), (x,))  # lifted nowhere
    assert plain == {"Own": 1, "Relu": 1}


def test_results_are_resumed(tmp_path, monkeypatch, capsys):
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.GELU(), torch.nn.Linear(4, 2))
    entries = {"a": lambda: (model, (torch.randn(5, 3),)), "b": lambda: 1 / 0}
    monkeypatch.setattr(zoo, "LIBRARIES", {"mine": lambda: entries})
    for _ in range(2):
        monkeypatch.setattr("sys.argv", ["zoo.py", str(tmp_path), "--library", "mine"])
        zoo.main()
    lines = (tmp_path / "mine.jsonl").read_text().splitlines()
    assert [json.loads(line)["status"] for line in lines] == ["done", "unavailable"]
    assert "1 lifted" in capsys.readouterr().out
