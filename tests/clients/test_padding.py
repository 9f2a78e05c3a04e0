"""Language models of transformers on padded batches, given as dictionaries, in people's loops."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import lpom

transformers = pytest.importorskip("transformers")
SMALL = {"vocab_size": 40, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
LLAMA = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
}
KINDS = {
    "llama": lambda: transformers.LlamaConfig(**SMALL, **LLAMA),
    "mistral": lambda: transformers.MistralConfig(**SMALL, **LLAMA, sliding_window=4),
    "gpt2": lambda: transformers.GPT2Config(
        **SMALL, n_embd=32, n_layer=2, n_head=4, n_positions=32,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    ),
}  # fmt: skip


def make(kind: str, attention: str):
    torch.manual_seed(0)
    config = KINDS[kind]()
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    return model.train()


def batch(side: str) -> dict[str, torch.Tensor]:
    """Four sequences, of which two are short, and what the loss asks of them."""
    words = torch.randint(3, 40, (4, 8), generator=torch.Generator().manual_seed(1))
    seen = torch.ones(4, 8, dtype=torch.long)
    short = slice(0, 3) if side == "left" else slice(5, 8)
    seen[:2, short] = 0
    words = words.masked_fill(seen == 0, 0)
    return {
        "input_ids": words,
        "attention_mask": seen,
        "labels": words.masked_fill(seen == 0, -100),
    }


def gradient(model, run, batches, scale=1.0) -> torch.Tensor:
    model.zero_grad()
    for part in batches:
        (scale * run(**part).loss / len(batches)).backward()
    return torch.cat([p.grad.flatten() for p in model.parameters()]) / scale


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("kind", KINDS)
def test_padded_batches(kind, attention, side):
    model = make(kind, attention)
    lifted, inputs = lpom.lift(model), batch(side)
    with torch.no_grad():
        expected = model(**inputs)
    outputs = lifted(**inputs)
    torch.testing.assert_close(outputs.logits, expected.logits)
    torch.testing.assert_close(outputs.loss, expected.loss)
    found, plain = gradient(model, lifted, [inputs]), gradient(model, model, [inputs])
    assert bool(found.isfinite().all())
    assert float(F.cosine_similarity(found, plain, dim=0)) > 0.9999
    assert "own derivative" not in lifted.report()


def test_scaled_losses_and_accumulated_gradients_are_those_of_the_whole_batch():
    """A loss scale is nothing to a displacement; parts of a batch have nearly the same spread."""
    model = make("llama", "sdpa")
    lifted, inputs = lpom.lift(model), batch("right")
    inputs["attention_mask"].fill_(1)
    inputs["labels"] = inputs["input_ids"]
    whole = gradient(model, lifted, [inputs])
    scaled = gradient(model, lifted, [inputs], scale=2.0**16)
    torch.testing.assert_close(scaled, whole, rtol=1e-3, atol=1e-5 * float(whole.norm()))
    parts = [{key: x[rows] for key, x in inputs.items()} for rows in (slice(0, 2), slice(2, 4))]
    added = gradient(model, lifted, parts)
    assert float(F.cosine_similarity(added, whole, dim=0)) > 0.99999
    assert float((added - whole).norm() / whole.norm()) < 1e-3


def test_half_precision_is_close_to_the_gradient():
    model = make("llama", "sdpa")
    lifted, inputs = lpom.lift(model), batch("left")
    plain = gradient(model, model, [inputs])
    with torch.autocast("cpu", torch.bfloat16):
        found, half = gradient(model, lifted, [inputs]), gradient(model, model, [inputs])
    error = float((half - plain).norm() / plain.norm())
    assert float((found - plain).norm() / plain.norm()) < 2 * error
