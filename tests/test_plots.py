"""The picture of a run is a readable PNG, made without touching pyplot."""

from __future__ import annotations

import struct

import matplotlib
import pytest
from matplotlib import pyplot

from lpom import plots
from lpom.training.history import Epoch, History


def history(n, metric="accuracy", gaps=(0.1, 0.02), validated=True):
    return History(
        metric,
        [
            Epoch(
                epoch=k + 1,
                seconds=1.0,
                samples_per_second=10.0,
                objective=1.0,
                loss=1 / (k + 1) ** 2,
                score=1 - 0.5 / (k + 1),
                validation_loss=1.2 / (k + 1) if validated else None,
                validation_score=0.9 - 0.5 / (k + 1) if validated else None,
                gaps=tuple(gap / (k + 1) for gap in gaps),
            )
            for k in range(n)
        ],
    )


def size(path):
    content = path.read_bytes()
    assert content[:8] == b"\x89PNG\r\n\x1a\n"
    return struct.unpack(">II", content[16:24])


@pytest.mark.parametrize("n", [0, 1, 30])
@pytest.mark.parametrize("metric", ["accuracy", "r2"])
def test_any_history_is_drawn(tmp_path, n, metric):
    plots.curves(history(n, metric, validated=n != 30), tmp_path / "curves.png")
    width, height = size(tmp_path / "curves.png")
    assert width > height > 400
    assert [file.name for file in tmp_path.iterdir()] == ["curves.png"]


def test_there_is_a_panel_for_gaps_only_if_there_are_gaps(tmp_path):
    plots.curves(history(3), tmp_path / "with.png")
    plots.curves(history(3, gaps=()), tmp_path / "without.png")
    assert size(tmp_path / "with.png")[0] * 2 == size(tmp_path / "without.png")[0] * 3


def test_a_gap_of_zero_does_not_matter(tmp_path):
    plots.curves(history(4, gaps=(0.1, 0.0)), tmp_path / "curves.png")
    size(tmp_path / "curves.png")


def test_what_is_shown(monkeypatch, tmp_path):
    figures = []
    saved = plots.Figure.savefig
    monkeypatch.setattr(
        plots.Figure, "savefig", lambda self, *a, **k: (figures.append(self), saved(self, *a, **k))
    )
    plots.curves(history(30), tmp_path / "curves.png")
    loss, score, gaps = figures[0].axes
    assert [axes.get_title(loc="left") for axes in (loss, score, gaps)] == [
        "loss per sample",
        "accuracy",
        "gap per sample",
    ]
    assert [line.get_label() for line in loss.get_lines()] == ["training", "validation"]
    assert list(score.get_lines()[0].get_ydata()) == history(30).column("score")
    assert [line.get_label() for line in gaps.get_lines()] == ["layer 1", "layer 2 (output)"]
    assert gaps.get_yscale() == loss.get_yscale() == "log" and score.get_yscale() == "linear"


def test_pyplot_is_left_alone(tmp_path):
    before = dict(matplotlib.rcParams), pyplot.get_fignums()
    plots.curves(history(2), tmp_path / "curves.png")
    assert (dict(matplotlib.rcParams), pyplot.get_fignums()) == before
