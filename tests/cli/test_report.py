"""The report: plots whose points stand where they should, and a page that is text and no script."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from sklearn.metrics import confusion_matrix
from typer.testing import CliRunner

from lpom.cli.app import app
from lpom.cli.report.page import page
from lpom.cli.report.plots import Axis, Series, bars, dots, lines, number
from lpom.cli.run import Run

HOSTILE = ("<script>alert(1)</script>", "</style><img src=x onerror=alert(1)>", "<!--<b>&amp;")
FAST = ("--hidden", "8", "--epochs", "4")


def call(*arguments):
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == 0, result.output + repr(result.exception)
    return result.stdout


def text_of(html):
    """The words of a page, and its tags."""
    words, tags = [], []

    class Reader(HTMLParser):
        def handle_data(self, data):
            words.append(data)

        def handle_starttag(self, tag, attributes):
            tags.append(tag)

    Reader().feed(html)
    return " ".join(words), tags


@pytest.fixture(scope="module")
def flats(tmp_path_factory):
    folder, rng = tmp_path_factory.mktemp("flats"), np.random.default_rng(0)
    frame = pd.DataFrame(
        {
            "area": rng.uniform(20, 120, 200).round(1),
            "district": rng.choice(["north", "south", "centre"], 200),
            "noise": rng.normal(size=200).round(3),
        }
    )
    frame["rent"] = (12 * frame["area"] + 300 * (frame["district"] == "centre")).round(2)
    frame.to_csv(folder / "flats.csv", index=False)
    call("train", folder / "flats.csv", "--target", "rent", "--epochs", 60, "--out", folder / "run")
    call("report", folder / "run")
    return Run.read(folder / "run"), (folder / "run" / "report.html").read_text(encoding="utf-8")


@pytest.mark.parametrize("log", [False, True])
def test_an_axis_maps_its_ends_and_marks_round_values(log):
    axis = Axis([0.001, 20.0], 0, 100, log)
    assert axis.place(0.001) == pytest.approx(0) and axis.place(20) == pytest.approx(100)
    marks = axis.marks()
    assert 2 <= len(marks) <= 7 and all(0 <= axis.place(mark) <= 100 for mark in marks)
    assert marks == ([0.001, 0.01, 0.1, 1.0, 10.0] if log else [5.0, 10.0, 15.0, 20.0])


def test_an_axis_of_one_value_or_none_has_a_width():
    for values in ([3.0], [0.0, 0.0], []):
        axis = Axis(values, 0, 100)
        assert axis.high > axis.low and axis.marks()


def test_lines_have_a_point_per_epoch_and_break_where_a_value_is_missing():
    drawn = lines("loss", [Series("training", [1, 2, 3, 4], [4.0, None, 2.0, 1.0])])
    assert drawn.count("<circle") == 3
    (path,) = re.findall(r'class="line s1" d="([^"]*)"', drawn)
    assert path.count("M") == 2 and path.count("L") == 1
    assert lines("loss", [Series("training", [1], [None])]) == ""


def test_equal_numbers_are_dots_on_the_line():
    drawn = dots("t", [1.0, 2.0, 5.0], [1.0, 2.0, 5.0], "actual", "predicted")
    (x1, y1, x2, y2) = map(float, re.search(
        r'class="equal" x1="([\d.]+)" y1="([\d.]+)" x2="([\d.]+)" y2="([\d.]+)"', drawn
    ).groups())  # fmt: skip
    for x, y in re.findall(r'class="dot" cx="([\d.]+)" cy="([\d.]+)"', drawn):
        share = (float(x) - x1) / (x2 - x1)
        assert y1 + share * (y2 - y1) == pytest.approx(float(y), abs=0.2)


def test_bars_are_as_long_as_their_values():
    drawn = bars("t", ["a", "b"], [2.0, 1.0], [0.0, 0.0])
    a, b = (float(width) for width in re.findall(r'width="([\d.]+)"', drawn))
    assert a == pytest.approx(2 * b, rel=0.01)


@pytest.mark.parametrize(
    ("value", "text"), [(0, "0"), (1234.5, "1,234"), (0.25, "0.25"), (1e-7, "1e-07"), (3, "3")]
)
def test_marks_are_short(value, text):
    assert number(value) == text


def test_the_page_fetches_nothing_and_runs_nothing(flats):
    _, html = flats
    _, tags = text_of(html)
    assert not {"script", "link", "img", "iframe"} & set(tags)
    assert "url(" not in html and "@import" not in html and "default-src 'none'" in html


def test_what_is_predicted_is_what_the_run_kept(flats):
    run, html = flats
    words, _ = text_of(html)
    assert html.count('class="dot"') == len(run.predictions["row"]) == 40
    error = np.abs(
        np.array(run.predictions["truth"], float) - np.array(run.predictions["prediction"], float)
    )
    worst = run.predictions["row"][int(error.argmax())]
    rows = re.findall(r'<td class="number">(\d+)</td>', html[html.index("Largest errors") :])
    assert rows[0] == worst and "area" in words
    assert run.settings["data"]["source"]["data"] not in words  # where the table lies


def test_columns_that_matter_come_first(flats):
    _, html = flats
    part = html[html.index("Which columns matter") :]
    places = {name: part.index(f">{name}<") for name in ("area", "district", "noise")}
    assert places["area"] < places["district"] < places["noise"]


def test_counts_agree_with_scikit_learn():
    call("train", "iris", *FAST, "--out", "run")
    call("report", "run")
    run = Run.read(Path("run"))
    html = Path("run/report.html").read_text(encoding="utf-8")
    part = html[html.index('class="matrix"') :]
    counts = [int(text or 0) for text in re.findall(r'<td class="[rw]\w+"[^>]*>(\d*)</td>', part)]
    expected = confusion_matrix(
        run.predictions["truth"], run.predictions["prediction"], labels=list(run.target.classes[0])
    )
    np.testing.assert_array_equal(np.reshape(counts, (3, 3)), expected)


def test_hostile_names_are_text_and_nothing_else():
    frame = pd.DataFrame(np.random.default_rng(0).normal(size=(90, 2)), columns=["x", "<i>"])
    frame["kind"] = np.array(HOSTILE)[np.arange(90) % 3]
    frame.to_csv("table.csv", index=False)
    folder = "<img onerror=alert(2)> & co"
    call("train", "table.csv", "--target", "kind", *FAST, "--out", folder)
    call("report", folder, "--out", "page.html")
    html = Path("page.html").read_text(encoding="utf-8")
    words, tags = text_of(html)
    assert not {"script", "img", "i", "b"} & set(tags) and HOSTILE[0] in words
    assert "<" not in page("<a>", "").split("<title>")[1].split("</title>")[0]


def test_runs_side_by_side_tell_what_differs():
    call("train", "iris", *FAST, "--out", "one/run")
    call("train", "iris", *FAST, "--out", "two/run", "--method", "adam", "--activation", "tanh")
    call("report", "one/run", "two/run", "--out", "both.html")
    words, _ = text_of(Path("both.html").read_text(encoding="utf-8"))
    part = words[words.index("Settings that differ") :]
    assert "one/run" in words and "two/run" in words and "2 runs compared" in words
    assert "tanh" in part and "adam" in part


def test_several_targets_have_a_part_each():
    rng = np.random.default_rng(0)
    frame = pd.DataFrame(rng.normal(size=(80, 2)), columns=["a", "b"])
    frame.assign(up=frame["a"] * 10, down=-frame["b"]).to_csv("t.csv", index=False)
    call("train", "t.csv", "--target", "up", "--target", "down", *FAST, "--out", "run")
    call("report", "run")
    words, _ = text_of(Path("run/report.html").read_text(encoding="utf-8"))
    assert "actual up" in words and "actual down" in words
