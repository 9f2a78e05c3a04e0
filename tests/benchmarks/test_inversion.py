"""The benchmark of inversion, in small."""

from __future__ import annotations

import pytest

import inversion


@pytest.mark.filterwarnings("ignore::lpom.ConvergenceWarning")
def test_the_gap_is_ahead_on_every_row():
    relu = inversion.relu(0, 4.0, rivals=False)
    assert relu["gap"] < inversion.EXACT
    bits = inversion.two_bits(0, 16.0, rivals=False)
    assert bits["gap"] < bits["least squares"] / 3
    clipped = inversion.clip(0, 6.0, rivals=False)
    assert clipped["gap"] < inversion.EXACT
    signs = inversion.one_bit(0, 10.0, n=40, count=4)
    assert signs["gap, on BIHT's support"] < 2 * signs["BIHT"] + 0.02 < signs["matched filter"]


def test_names_of_rows_and_pictures(monkeypatch, capsys):
    monkeypatch.setitem(inversion.ROWS, "relu", (lambda seed: {"gap": 1e-6 * seed}, "ReLU"))
    inversion.main(["relu", "--trials", "3"])
    assert "exact  100%" in capsys.readouterr().out.replace("exact 100%", "exact  100%")
    with pytest.raises(SystemExit):
        inversion.main(["nothing"])
