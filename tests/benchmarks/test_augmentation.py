"""Flips and crops against a loop over single pictures, and what the generator rules."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch
from scipy import ndimage
from torch import Tensor

from data.augmentation import augmented_loader, turned

N = 30
X = torch.rand(N, 2, 5, 4, generator=torch.Generator().manual_seed(0))
Y = torch.arange(N)


def literally(picture: Tensor, mirrored: bool, top: int, left: int, crop: int) -> Tensor:
    """One pixel after the other: the crop that begins at (top, left) of the padded picture."""
    n_channels, n_rows, n_columns = picture.shape
    out = torch.zeros_like(picture)
    for channel in range(n_channels):
        for row in range(n_rows):
            for column in range(n_columns):
                i, j = row + top - crop, column + left - crop
                if 0 <= i < n_rows and 0 <= j < n_columns:
                    j = n_columns - 1 - j if mirrored else j
                    out[channel, row, column] = picture[channel, i, j]
    return out


@pytest.mark.parametrize(("flip", "crop"), [(True, 1), (True, 0), (False, 1), (False, 0)])
def test_every_picture_is_one_of_its_variants_and_every_variant_comes(
    flip: bool, crop: int
) -> None:
    ways = [
        (mirrored, top, left)
        for mirrored in ((False, True) if flip else (False,))
        for top in range(2 * crop + 1)
        for left in range(2 * crop + 1)
    ]
    variants = [
        torch.stack([literally(picture, *way, crop) for way in ways]) for picture in X
    ]  # (ways, channels, rows, columns) each
    loader = augmented_loader(X, Y, 8, flip=flip, crop=crop)
    seen: Counter[int] = Counter()
    n_epochs = 40
    for _ in range(n_epochs):
        for pictures, rows in loader:
            for picture, row in zip(pictures, rows, strict=True):
                same = (variants[row] == picture).flatten(1).all(dim=1)
                assert same.sum() == 1
                seen[int(same.nonzero())] += 1
    counts = np.array([seen[k] for k in range(len(ways))])
    expected = n_epochs * N / len(ways)
    assert (np.abs(counts - expected) <= 5 * np.sqrt(expected)).all()


def test_every_row_comes_once_per_epoch_in_an_order_of_its_own() -> None:
    loader = augmented_loader(X, Y, 8)
    first, second = ([rows for _, rows in loader] for _ in range(2))
    assert len(loader) == 4 and [len(rows) for rows in first] == [8, 8, 8, 6]
    for epoch in (first, second):
        assert torch.equal(torch.cat(epoch).sort().values, Y)
    assert not torch.equal(torch.cat(first), torch.cat(second))


def epochs(loader: object, n: int) -> list[Tensor]:
    return [torch.cat([pictures for pictures, _ in loader]) for _ in range(n)]  # type: ignore[attr-defined]


def test_the_seed_rules_every_epoch_and_nothing_else_does() -> None:
    torch.manual_seed(1)
    before = torch.random.get_rng_state()
    first = epochs(augmented_loader(X, Y, 8, seed=3), 3)
    assert torch.equal(torch.random.get_rng_state(), before)
    torch.manual_seed(2)
    again = epochs(augmented_loader(X, Y, 8, seed=3), 3)
    given = epochs(augmented_loader(X, Y, 8, generator=torch.Generator().manual_seed(3)), 3)
    other = epochs(augmented_loader(X, Y, 8, seed=4), 3)
    for k in range(3):
        assert torch.equal(first[k], again[k]) and torch.equal(first[k], given[k])
        assert not torch.equal(first[k], other[k])


@pytest.mark.parametrize(
    ("pictures", "settings", "message"),
    [
        (X.flatten(1), {}, r"got X of shape \(30, 40\).*\.pictures\(\)"),
        (X[:4], {}, r"got X of shape \(4, 2, 5, 4\) and y of shape \(30,\)"),
        (X, {"batch_size": 0}, "batch_size must be an integer above 0"),
        (X, {"crop": -1}, "crop must be an integer of at least 0"),
    ],
    ids=["flat", "lengths", "batch size", "crop"],
)
def test_what_is_refused(pictures: Tensor, settings: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        augmented_loader(pictures, Y, **{"batch_size": 8, **settings})


def test_pictures_are_turned_and_stretched_as_scipy_does_it() -> None:
    generator = torch.Generator().manual_seed(0)
    pictures = torch.rand(6, 2, 9, 7, generator=generator, dtype=torch.float64)
    angles = torch.rand(6, generator=generator) - 0.5
    sides = 1 + 0.4 * (torch.rand(2, 6, generator=generator) - 0.5)
    found = turned(pictures, angles, sides)
    centre = np.array([4.0, 3.0])
    for k in range(6):
        a = float(angles[k])
        back = np.array([[np.cos(a), np.sin(a)], [-np.sin(a), np.cos(a)]])  # (row, column)
        back = np.diag(1 / sides[:, k].double().numpy()) @ back
        for channel in range(2):
            expected = ndimage.affine_transform(
                np.pad(pictures[k, channel].numpy(), 3),
                back,
                centre + 3 - back @ (centre + 3),
                order=1,
            )[3:-3, 3:-3]
            np.testing.assert_allclose(found[k, channel], expected, atol=1e-6)


def test_pictures_are_bent_as_scipy_does_it() -> None:
    generator = torch.Generator().manual_seed(0)
    pictures = torch.rand(4, 2, 9, 7, generator=generator, dtype=torch.float64)
    moves = torch.randn(4, 2, 9, 7, generator=generator, dtype=torch.float64)
    found = turned(pictures, torch.zeros(4), torch.ones(2, 4), moves)
    places = np.stack(np.meshgrid(np.arange(9.0), np.arange(7.0), indexing="ij"))
    for k in range(4):
        for channel in range(2):
            padded = np.pad(pictures[k, channel].numpy(), 9)
            expected = ndimage.map_coordinates(padded, places + 9 + moves[k].numpy(), order=1)
            np.testing.assert_allclose(found[k, channel], expected, atol=1e-6)


def test_a_quarter_turn_goes_against_the_clock() -> None:
    pictures = torch.rand(3, 1, 6, 6, dtype=torch.float64)
    quarter = turned(pictures, torch.full((3,), torch.pi / 2), torch.ones(2, 3))
    torch.testing.assert_close(quarter, pictures.rot90(1, (2, 3)), atol=1e-6, rtol=0)
