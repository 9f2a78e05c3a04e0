"""Other people's loops train lifted models: the real libraries, each equal to a plain loop.

Every client makes a few steps of SGD on the same batches as `looped`, from the same weights.
"""

import copy
import os
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import lpom

MU, RATE = 2.0, 0.2


def make_model():
    torch.manual_seed(0)
    layers = [nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 2)]
    return nn.Sequential(*layers)


def make_data(n=64):
    x = torch.randn(n, 4, generator=torch.Generator().manual_seed(1))
    return x, (x[:, 0] * x[:, 1] > 0).long()


def looped(model, batches, run=None):
    """The hand-written loop: the losses; the model's weights move."""
    run = lpom.lift(model, MU) if run is None else run
    optimizer = torch.optim.SGD(model.parameters(), RATE)
    losses = []
    for x, y in batches:
        optimizer.zero_grad()
        loss = F.cross_entropy(run(x), y)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def batches(n_epochs=10):
    x, y = make_data()
    return [*zip(x.split(16), y.split(16), strict=True)] * n_epochs


def check_equal(model, other):
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@pytest.fixture
def expected():
    """The model after the plain loop, whose loss falls, and which is not back-propagation's."""
    model, plain = make_model(), make_model()
    losses = looped(model, batches())
    assert sum(losses[-4:]) < 0.9 * sum(losses[:4])
    looped(plain, batches(), run=plain)
    assert not torch.allclose(plain[0].weight, model[0].weight, rtol=1e-3, atol=1e-4)
    return model


def loader():
    x, y = make_data()
    data = torch.utils.data.TensorDataset(x, y)
    return torch.utils.data.DataLoader(data, batch_size=16, shuffle=False)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # its own
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_torch_compile(expected, backend):
    model = make_model()
    compiled = torch.compile(lpom.lift(model, MU), backend=backend, fullgraph=True)
    looped(model, batches(), run=compiled)
    check_equal(model, expected)


def test_lightning(expected, tmp_path):
    lightning = pytest.importorskip("lightning", reason="pip install lightning")

    class Classifier(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = lpom.lift(make_model(), MU)

        def training_step(self, batch, index):
            x, y = batch
            return F.cross_entropy(self.net(x), y)

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), RATE)

    module = Classifier()
    trainer = lightning.Trainer(
        max_epochs=10,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=tmp_path,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about workers of the loader
        trainer.fit(module, loader())
    check_equal(lpom.unlift(module.net), expected)


def test_skorch(expected):
    skorch = pytest.importorskip("skorch", reason="pip install skorch")
    x, y = make_data()
    net = skorch.NeuralNetClassifier(
        lpom.lift(make_model(), MU),
        criterion=nn.CrossEntropyLoss,
        optimizer=torch.optim.SGD,
        lr=RATE,
        max_epochs=10,
        batch_size=16,
        iterator_train__shuffle=False,
        train_split=None,
        verbose=0,
    )
    net.fit(x.numpy(), y.numpy())
    check_equal(lpom.unlift(net.module_), expected)
    assert net.score(x.numpy(), y.numpy()) > 0.5


def test_accelerate(expected):
    accelerate = pytest.importorskip("accelerate", reason="pip install accelerate")
    accelerator = accelerate.Accelerator(cpu=True)
    lifted = lpom.lift(make_model(), MU)
    optimizer = torch.optim.SGD(lifted.parameters(), RATE)
    run, optimizer, data = accelerator.prepare(lifted, optimizer, loader())
    for _ in range(10):
        for x, y in data:
            optimizer.zero_grad()
            accelerator.backward(F.cross_entropy(run(x), y))
            optimizer.step()
    check_equal(lpom.unlift(accelerator.unwrap_model(run)), expected)


def _distributed(rank, folder):
    """One of two processes; it runs this very file, see its end."""
    torch.set_num_threads(1)
    meeting = (folder / "meeting").as_uri()  # a file outlives the process that ends first
    torch.distributed.init_process_group("gloo", init_method=meeting, rank=rank, world_size=2)
    model = make_model()
    run = nn.parallel.DistributedDataParallel(lpom.lift(model, MU))
    own = [(x[rank::2], y[rank::2]) for x, y in batches()]
    looped(model, own, run=run)
    if rank == 0:
        np.savez(folder / "weights.npz", *[p.detach().numpy() for p in model.parameters()])
    torch.distributed.barrier()
    os._exit(0)  # what torch's threads do at the end of Python is not ours to test


def test_distributed_data_parallel(expected, tmp_path):
    """Two processes, each with half of every batch, make the steps of one."""
    ranks = [
        subprocess.Popen([sys.executable, __file__, str(rank), str(tmp_path)]) for rank in (0, 1)
    ]
    assert [rank.wait(timeout=120) for rank in ranks] == [0, 0]
    with np.load(tmp_path / "weights.npz") as found:
        for a, b in zip(found.values(), expected.parameters(), strict=True):
            torch.testing.assert_close(torch.from_numpy(a), b.detach(), rtol=1e-5, atol=1e-6)


def language_model(attention="sdpa"):
    transformers = pytest.importorskip("transformers", reason="pip install transformers")
    config = transformers.OPTConfig(
        vocab_size=20,
        hidden_size=16,
        num_hidden_layers=2,
        ffn_dim=32,
        num_attention_heads=2,
        max_position_embeddings=16,
        word_embed_proj_dim=16,
        dropout=0.0,
        attention_dropout=0.0,
        activation_function="relu",
        attn_implementation=attention,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    torch.manual_seed(0)
    return transformers.OPTForCausalLM(config).double()


def test_a_language_model_of_transformers():
    model = language_model()
    by_hand = copy.deepcopy(language_model("eager"))
    by_hand.load_state_dict(model.state_dict())
    lifted, eager = (lpom.lift(m, MU, batch_dims=2) for m in (model, by_hand))
    tokens = torch.arange(3, 19).repeat(4, 1).roll(1, 1)
    losses = []
    optimizers = [torch.optim.SGD(m.parameters(), 0.5) for m in (model, by_hand)]
    for _ in range(8):
        # the model's own loss; and torch's on its logits, with attention written out by hand
        first = lifted(input_ids=tokens, labels=tokens).loss
        logits = eager(input_ids=tokens).logits[:, :-1].flatten(0, 1)
        second = F.cross_entropy(logits, tokens[:, 1:].flatten())
        torch.testing.assert_close(first, second, check_dtype=False, rtol=1e-6, atol=1e-6)
        for loss, optimizer in zip((first, second), optimizers, strict=True):
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        losses.append(float(first.detach()))
    assert losses[-1] < 0.8 * losses[0]
    report = lifted.report()
    assert "relu (2)" in report and "softmax (2)" in report and "layer_norm (5)" in report
    assert "kept" not in report
    assert lifted.config is model.config  # attributes are the model's


if __name__ == "__main__":
    _distributed(int(sys.argv[1]), Path(sys.argv[2]))
