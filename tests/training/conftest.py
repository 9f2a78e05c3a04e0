"""Shared by the tests of training: data that train in milliseconds, and a cut at any step."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture
def blobs():
    """Three clouds of points in five dimensions, 50 rows, float32."""
    generator = torch.Generator().manual_seed(0)
    y = torch.arange(50) % 3
    centres = 2 * torch.randn(3, 5, generator=generator)
    return centres[y] + torch.randn(50, 5, generator=generator), y


@pytest.fixture
def cut_at(monkeypatch):
    """``cut_at(method_class, n)``: the n-th step from now is cut by Ctrl-C, later ones not."""

    def arrange(method, n):
        whole, calls = method.step, 0

        def step(self, *args):
            nonlocal calls
            calls += 1
            if calls == n:
                raise KeyboardInterrupt
            return whole(self, *args)

        monkeypatch.setattr(method, "step", step)

    return arrange
