"""Character models: what they learn from a text, and what they draw."""

import math

import pytest
import torch

from lpom import networks
from lpom.experiments.text import Pieces, Text, train_text

SMALL = {"width": 32, "blocks": 1, "heads": 2}


@pytest.fixture
def poem(tmp_path):
    """A text whose next character is known from the last two."""
    path = tmp_path / "poem.txt"
    path.write_text("abcabd" * 700)
    return path


@pytest.mark.parametrize("method", ["lpom", "adam"])
def test_a_model_learns_a_text_and_writes_on(poem, method):
    trained = train_text(
        poem, method=method, epochs=6, length=24, batch_size=8, options=SMALL, progress=False
    )
    assert trained.characters == "abcd"
    # an order of one character leaves half a bit: c or d after ab; two thirds of the time none
    assert trained.bits < 0.2 < math.log2(4)
    written = trained.sample(60, start="abcab", seed=1)
    pairs = [a + b for a, b in zip("b" + written, written, strict=False)]
    assert sum(pair in ("ab", "bc", "bd", "ca", "da") for pair in pairs) > 50
    assert trained.sample(20, seed=2) == trained.sample(20, seed=2)


def test_characters_see_only_what_is_before_them():
    model = networks.get("char-transformer", (10,), 5, seed=0, **SMALL).eval()
    x = torch.randint(0, 5, (2, 10), generator=torch.Generator().manual_seed(0))
    other = x.clone()
    other[:, 6:] = (other[:, 6:] + 1) % 5
    a, b = model(x), model(other)
    assert a.shape == (2, 10, 5)
    torch.testing.assert_close(a[:, :6], b[:, :6], rtol=0, atol=0)
    assert not torch.allclose(a[:, 6:], b[:, 6:])


def test_pieces_are_followed_by_their_next_characters():
    pieces = Pieces(torch.arange(11), 3, 3)
    assert len(pieces) == 3
    x, y = pieces[2]
    assert x.tolist() == [6, 7, 8] and y.tolist() == [7, 8, 9]


def test_texts_that_are_too_short(tmp_path):
    path = tmp_path / "short.txt"
    path.write_text("ab" * 20)
    with pytest.raises(ValueError, match="too few to hold out a piece of 128"):
        train_text(path)
    with pytest.raises(ValueError, match="two different characters"):
        Text.of("aaaa")


def test_the_network_for_texts_says_what_it_takes():
    with pytest.raises(ValueError, match="takes texts"):
        networks.get("char-transformer", (1, 28, 28))
