"""The page as a file: what it holds, that it needs nothing else, that no text can break out."""

from __future__ import annotations

import base64
import hashlib
import io
import json
import math
import re
import webbrowser
from copy import deepcopy
from dataclasses import replace
from html.parser import HTMLParser
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image
from sklearn import metrics
from sklearn.inspection import permutation_importance
from sklearn.metrics import confusion_matrix, recall_score
from typer.testing import CliRunner

import lpom
from lpom import datasets
from lpom.cli import app
from lpom.exceptions import DataError, ModelFileError
from lpom.preparation import prepare
from lpom.report import write_report
from lpom.report.classes import calibration, threshold_curves
from lpom.report.content import columns, settings
from lpom.report.importance import importances
from lpom.report.judging import HeldBack
from lpom.report.numbers import errors
from lpom.report.page import page
from lpom.report.pictures import first_layer, png
from lpom.tables import Features
from lpom.training.history import Epoch, History


class Parsed(HTMLParser):
    """Every tag with its attributes, and the text inside each kind of tag."""

    def __init__(self, path):
        super().__init__()
        self.tags, self.text, self.open = [], {}, []
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag, attributes):
        name = f"{tag}#{dict(attributes)['id']}" if "id" in dict(attributes) else tag
        self.tags.append((tag, dict(attributes)))
        self.open.append(name)

    def handle_endtag(self, tag):
        while self.open and self.open.pop().partition("#")[0] != tag:
            pass

    def handle_data(self, data):
        if self.open:
            self.text[self.open[-1]] = self.text.get(self.open[-1], "") + data

    @property
    def runs(self):
        return json.loads(self.text["script#data"])["runs"]


def report(folders, path, **options):
    write_report(folders, path, **options)
    return Parsed(path)


@pytest.fixture(scope="module")
def told(digits, tmp_path_factory):
    """The page about the run on digits, parsed."""
    return report([digits[0]], tmp_path_factory.mktemp("page") / "report.html")


def pixels(uri):
    kind, _, data = uri.partition(",")
    assert kind == "data:image/png;base64"
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(data))))


def call(*arguments, code=0):
    result = CliRunner().invoke(app, ["report", *map(str, arguments)])
    assert result.exit_code == code, result.output
    return result


def test_the_page_fetches_nothing_and_allows_no_other_script(told):
    addresses = [
        attributes[name]
        for _, attributes in told.tags
        for name in ("src", "href")
        if name in attributes
    ]
    assert addresses and all(a.startswith(("data:", "#")) for a in addresses)
    assert "url(" not in told.text["style"] and "@import" not in told.text["style"]
    policy = next(a["content"] for _, a in told.tags if "http-equiv" in a)
    assert "default-src 'none'" in policy
    for kind in ("style", "script"):
        digest = base64.b64encode(hashlib.sha256(told.text[kind].encode()).digest()).decode()
        assert f"{kind}-src 'sha256-{digest}'" in policy


def test_curves_are_those_of_the_history(digits, told):
    history, drawn = digits[1].history, told.runs[0]["history"]
    assert drawn["epoch"] == [1, 2, 3, 4]
    for name in ("loss", "score", "validation_loss", "validation_score", "objective"):
        np.testing.assert_allclose(drawn[name], history.column(name), rtol=1e-5)
    np.testing.assert_allclose(drawn["elapsed"], np.cumsum(history.column("seconds")), rtol=1e-5)
    np.testing.assert_allclose(np.transpose(drawn["gaps"]), history.column("gaps"), rtol=1e-5)
    np.testing.assert_allclose(np.transpose(drawn["rates"]), history.column("rates"), rtol=1e-5)


def test_what_is_not_finite_becomes_a_hole():
    epoch = Epoch(1, 0.5, 10.0, math.inf, math.nan, 0.5, gaps=(math.nan, 2.0))
    drawn = columns(History("accuracy", [epoch]))
    assert drawn["objective"] == drawn["loss"] == drawn["validation_loss"] == [None]
    assert drawn["gaps"] == [[None], [2.0]] and drawn["rates"] == []
    json.dumps(drawn, allow_nan=False)


def test_confusion_matrix_agrees_with_scikit_learn(digits, told):
    data, test = datasets.load("digits"), told.runs[0]["test"]
    frame = pd.DataFrame(data.x_test, columns=list(data.feature_names))
    said = digits[1].predictor.predict(frame).astype(int)
    counts = np.array(test["counts"])
    np.testing.assert_array_equal(counts, confusion_matrix(data.y_test, said))
    recall = counts.diagonal() / counts.sum(1)
    np.testing.assert_allclose(recall, recall_score(data.y_test, said, average=None))
    assert test["n"] == len(data.y_test) and test["n_wrong"] == np.sum(said != data.y_test)


def test_mistakes_are_the_most_confident_wrong_answers_with_their_pictures(digits, told):
    data, shown = datasets.load("digits"), told.runs[0]["test"]["mistakes"]
    frame = pd.DataFrame(data.x_test, columns=list(data.feature_names))
    said = digits[1].predictor.predict(frame).astype(int)
    shares = digits[1].predictor.predict_proba(frame).max(1)
    wrong = shares[said != data.y_test]
    np.testing.assert_allclose(
        [mistake["share"] for mistake in shown], sorted(wrong, reverse=True)[: len(shown)]
    )
    assert len(shown) == min(len(wrong), 24) > 0
    for mistake in shown:
        k = mistake["row"]
        assert (mistake["truth"], mistake["said"]) == (data.y_test[k], said[k])
        grey = pixels(mistake["picture"])
        np.testing.assert_allclose(grey / 255, data.picture(data.x_test[k]), atol=1 / 255)


def test_a_weight_is_red_or_blue_where_its_pixel_is_and_grey_where_none_is():
    data = replace(datasets.load("digits"), image_shape=(2, 2), feature_names=("a", "b", "c", "d"))
    model = one_layer([[3.0, -3.0, 0.0]])
    rows = pd.DataFrame(np.zeros((2, 3)), columns=["d", "a", "b"])
    predictor = SimpleNamespace(model=model, features=Features.fit(rows, scale=False))
    made = first_layer(predictor, data)
    (unit,) = made["units"]
    (top_left, top_right), (bottom_left, bottom_right) = pixels(unit["picture"]).astype(int)
    assert bottom_right[0] > bottom_right[2] + 50  # 3: red
    assert top_left[2] > top_left[0] + 50  # -3: blue
    assert top_right.min() > 230  # 0: white
    assert np.ptp(bottom_left) == 0 and 100 < bottom_left[0] < 150  # no weight: grey
    assert made["count"] == 1 and made["limit"] == pytest.approx(3.0)


def one_layer(weight):
    linear = torch.nn.Linear(len(weight[0]), len(weight))
    linear.weight.data = torch.tensor(weight)
    return torch.nn.Sequential(linear)


def test_pictures_in_colour_keep_their_channels():
    colours = np.random.default_rng(0).random((3, 2, 3))
    np.testing.assert_allclose(pixels(png(colours)) / 255, colours, atol=1 / 255)


def test_names_of_classes_and_runs_are_text_and_nothing_else(hostile, tmp_path):
    folder, run = hostile
    parsed = report([folder], tmp_path / "page.html")
    assert sum("<" in name for name in run.predictor.target.classes) == 3
    assert sorted(parsed.runs[0]["test"]["classes"]) == sorted(run.predictor.target.classes)
    assert parsed.text["title"] == f"lpom: {folder.name}"
    assert [tag for tag, _ in parsed.tags].count("script") == 2
    assert "img" not in [tag for tag, _ in parsed.tags]
    assert "<" not in parsed.text["script#data"]


def test_a_file_is_split_again_as_it_was(tmp_path, train):
    frame = datasets.load("wine")
    table = pd.DataFrame(frame.x_train, columns=list(frame.feature_names))
    path = tmp_path / "wine.csv"
    table.assign(kind=frame.y_train, row=range(len(table))).to_csv(path, index=False)
    run = train(tmp_path / "run", path, target="kind", ignore=("row",), seed=3)

    test = report([tmp_path / "run"], tmp_path / "page.html").runs[0]["test"]
    right = np.trace(test["counts"]) / test["n"]
    assert test["n"] == run.config["data"]["rows"]["test"]
    assert right == pytest.approx(run.config["results"]["test"]["score"])
    assert all(mistake["picture"] is None for mistake in test["mistakes"])

    table.iloc[::-1].assign(kind=frame.y_train, row=0).to_csv(path, index=False)
    (changed,) = report([tmp_path / "run"], tmp_path / "page.html").runs
    assert "changed since the run" in changed["test"]["note"]
    assert "cannot be shown" in changed["weights"]["note"]

    path.unlink()
    (gone,) = report([tmp_path / "run"], tmp_path / "page.html").runs
    assert "wine.csv is gone" in gone["test"]["note"]
    assert str(tmp_path) not in (tmp_path / "page.html").read_text()


def test_rows_that_are_judged_otherwise_are_not_those_of_the_run(digits, tmp_path, monkeypatch):
    data = datasets.load("digits")
    other = replace(data, y_test=(data.y_test + 1) % 10)
    monkeypatch.setattr(datasets, "load", lambda name, data_dir=None: other)
    (run,) = report([digits[0]], tmp_path / "page.html").runs
    assert "other rows" in run["test"]["note"]


def test_without_its_data_set_a_page_says_so(digits, tmp_path, monkeypatch):
    def offline(name, data_dir=None):
        raise DataError(f"{name} cannot be fetched into {data_dir}.")

    monkeypatch.setattr(datasets, "load", offline)
    (run,) = report([digits[0]], tmp_path / "page.html", data_dir="nowhere").runs
    assert run["test"]["note"].endswith("digits cannot be fetched into nowhere.")
    assert run["history"]["score"] and "note" in run["weights"]


def test_data_are_looked_for_where_they_were(tmp_path, train, monkeypatch):
    """A folder that was named in training need not be named again, nor an absolute path."""
    asked = []
    run = train(tmp_path / "run")
    run.config["data"]["source"]["data_dir"] = "/some/where"
    run.write(tmp_path / "run")
    load = datasets.load
    monkeypatch.setattr(
        datasets, "load", lambda name, data_dir=None: (asked.append(data_dir), load(name))[1]
    )
    report([tmp_path / "run"], tmp_path / "a.html")
    report([tmp_path / "run"], tmp_path / "b.html", data_dir="/else/where")
    assert asked == ["/some/where", "/else/where"]


def test_a_run_cut_in_its_first_epoch_keeps_its_metric(tmp_path, train):
    run = train(tmp_path / "run", "diabetes", epochs=1)
    (tmp_path / "run" / "history.jsonl").write_text("")
    assert run.config["metric"] == "r2"
    page = report([tmp_path / "run"], tmp_path / "page.html")
    assert page.runs[0]["metric"] == "r2" and page.runs[0]["history"]["epoch"] == []


def test_a_regression_tells_its_errors_and_the_worst_rows(flats, tmp_path):
    folder, run, frame = flats
    (told,) = report([folder], tmp_path / "page.html").runs
    assert told["metric"] == "r2" and told["weights"] is None
    test = told["test"]
    (target,) = test["targets"]
    rows = frame.iloc[[mistake["number"] - 1 for mistake in target["mistakes"]]]
    np.testing.assert_allclose([m["truth"] for m in target["mistakes"]], rows["rent"])
    said = run.predictor.predict(rows)
    np.testing.assert_allclose([m["said"] for m in target["mistakes"]], said, rtol=1e-5)
    sizes = np.abs(said - rows["rent"])
    assert (np.diff(sizes) <= 1e-6).all()
    assert sizes.iloc[0] == pytest.approx(target["errors"]["largest error"], rel=1e-5)
    for mistake, (_, row) in zip(target["mistakes"], rows.iterrows(), strict=True):
        cells = dict(zip(test["columns"], mistake["cells"], strict=True))
        assert cells["district"] == row["district"] and float(cells["area"]) == row["area"]
    scored = run.config["results"]["test"]
    assert target["errors"]["mean absolute error"] == pytest.approx(scored["MAE"])
    assert target["errors"]["root mean squared error"] == pytest.approx(scored["RMSE"])
    assert len(target["truth"]) == len(target["said"]) == scored_rows(run)


def scored_rows(run):
    return run.config["data"]["rows"]["test"]


def test_errors_are_those_of_scikit_learn():
    rng = np.random.default_rng(0)
    truth, said = rng.normal(size=(2, 50))
    told = errors(truth, said)
    assert told["mean absolute error"] == pytest.approx(metrics.mean_absolute_error(truth, said))
    assert told["median absolute error"] == pytest.approx(
        metrics.median_absolute_error(truth, said)
    )
    assert told["largest error"] == pytest.approx(metrics.max_error(truth, said))
    assert told["mean error (predicted - true)"] == pytest.approx((said - truth).mean())
    assert (np.abs(said - truth) < told["90% of the errors are below"]).mean() == 0.9


def test_importance_is_that_of_scikit_learn_and_nothing_for_a_column_without_weight(
    flats, tmp_path
):
    folder, run, frame = flats
    (told,) = report([folder], tmp_path / "page.html").runs
    lost = {column["name"]: column["lost"] for column in told["test"]["importances"]}
    assert list(lost)[:2] == ["area", "district"] and set(lost) == {"area", "district", "floor"}
    assert told["test"]["columns"] == list(lost)
    features, rows = run.predictor.features, frame.iloc[-60:]
    X, y = features.encode(rows), rows["rent"].to_numpy()
    held = HeldBack(X, y, rows)
    ours = {c["name"]: c for c in importances(run.predictor, held)}
    places = features.inputs_of
    assert sorted(sum(places.values(), [])) == list(range(features.n_inputs))
    theirs = permutation_importance(
        run.predictor.estimator, X, y, scoring="r2", n_repeats=20, random_state=0
    )
    (k,) = places["area"]
    assert ours["area"]["lost"] == pytest.approx(theirs.importances_mean[k], rel=0.2)
    assert len(places["district"]) == 3

    blind = deepcopy(run.predictor)
    with torch.no_grad():
        blind.estimator._model[0].weight[:, places["district"]] = 0
    (found,) = [c for c in importances(blind, held) if c["name"] == "district"]
    assert found["lost"] == found["spread"] == 0


def test_curves_of_thresholds_are_those_of_scikit_learn():
    rng = np.random.default_rng(0)
    truth = rng.integers(0, 3, 400)
    shares = rng.dirichlet(np.ones(3), 400) + 0.3 * np.eye(3)[truth]
    shares /= shares.sum(1, keepdims=True)
    made = threshold_curves(truth, shares, ("a", "b", "c"))
    assert [curve["class"] for curve in made] == [0, 1, 2]
    for k, curve in enumerate(made):
        is_k = truth == k
        assert curve["auc"] == pytest.approx(metrics.roc_auc_score(is_k, shares[:, k]))
        assert curve["average_precision"] == pytest.approx(
            metrics.average_precision_score(is_k, shares[:, k])
        )
        for name in ("roc", "precision_recall"):
            assert np.diff(curve[name]["x"]).min() >= 0 and len(curve[name]["x"]) <= 100
        assert np.trapezoid(curve["roc"]["y"], curve["roc"]["x"]) == pytest.approx(
            curve["auc"], abs=0.02
        )
    (second,) = threshold_curves(truth % 2, shares[:, :2], ("a", "b"))
    assert second["class"] == 1
    assert threshold_curves(np.zeros(5, int), np.ones((5, 2)), ("a", "b")) == []


def test_calibration_is_the_share_of_right_answers_among_those_equally_sure():
    sure = np.array([0.95, 0.95, 0.95, 0.95, 0.62, 0.68, 1.0])
    right = np.array([1, 1, 1, 0, 0, 1, 1])
    told = calibration(sure, right.astype(bool))
    assert told["counts"] == [2, 5]
    np.testing.assert_allclose(told["sure"], [0.65, 0.96])
    np.testing.assert_allclose(told["right"], [0.5, 0.8])
    assert told["error"] == pytest.approx((2 * 0.15 + 5 * 0.16) / 7)


def test_wrong_rows_of_a_table_are_shown_with_their_contents(tmp_path, train):
    rng = np.random.default_rng(0)
    frame = pd.DataFrame({"x": rng.normal(size=300).round(3), "note": rng.choice(["p", "q"], 300)})
    frame["kind"] = np.where(frame["x"] + rng.normal(size=300) > 0, "up", "down")
    frame.to_csv(tmp_path / "t.csv", index=False)
    train(tmp_path / "run", tmp_path / "t.csv", target="kind", epochs=10)
    test = report([tmp_path / "run"], tmp_path / "page.html").runs[0]["test"]
    assert test["n_wrong"] > 3 and sorted(test["columns"]) == ["note", "x"]
    for mistake in test["mistakes"]:
        row = frame.iloc[mistake["number"] - 1]
        cells = dict(zip(test["columns"], mistake["cells"], strict=True))
        assert (float(cells["x"]), cells["note"]) == (row["x"], row["note"])
        assert test["classes"][mistake["truth"]] == row["kind"]


def test_several_labels_have_a_line_each(tmp_path, train):
    rng = np.random.default_rng(0)
    frame = pd.DataFrame(rng.normal(size=(200, 3)), columns=list("abc"))
    frame["up"] = np.where(frame["a"] > 0, "yes", "no")
    frame["down"] = np.where(frame["b"] > 0, "yes", "no")
    frame.to_csv(tmp_path / "t.csv", index=False)
    run = train(tmp_path / "run", tmp_path / "t.csv", target=("up", "down"), epochs=20)
    test = report([tmp_path / "run"], tmp_path / "page.html").runs[0]["test"]
    X, truth = prepare(str(tmp_path / "t.csv"), target=("up", "down")).test
    said = run.predictor.estimator.predict(X)
    assert [label["name"] for label in test["labels"]] == ["up", "down"]
    for j, label in enumerate(test["labels"]):
        assert label["rows"] == truth[:, j].sum()
        assert label["recall"] == pytest.approx(recall_score(truth[:, j], said[:, j]))
        assert label["precision"] == pytest.approx(metrics.precision_score(truth[:, j], said[:, j]))


def test_settings_are_grouped_and_complete(digits):
    groups = settings(digits[1].config)
    assert groups["network"]["sizes"] == "60, 16, 10"
    assert groups["method"]["name"] == "lpom" and groups["method"]["mu"] == "20"
    assert groups["training"]["epochs"] == "4" and groups["training"]["seed"] == "0"
    assert not {"results", "timing", "versions"} & set(groups)


def test_runs_of_the_same_name_go_by_their_paths(digits, deep, tmp_path):
    for place in ("a", "b"):
        (tmp_path / place).mkdir()
        (tmp_path / place / "run").symlink_to(digits[0])
    linked = [tmp_path / "a" / "run", tmp_path / "b" / "run"]
    named = report([*linked, deep[0]], tmp_path / "page.html").runs
    assert [run["name"] for run in named] == [*map(str, linked), "deep"]


def test_the_command_writes_into_the_run_or_beside(digits, deep, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    opened = []
    monkeypatch.setattr(webbrowser, "open", lambda address: opened.append(address) or True)
    assert call(digits[0]).stdout == f"report: {digits[0] / 'report.html'}\n"
    (digits[0] / "report.html").unlink()
    assert not opened
    call(digits[0], deep[0], "--open")
    assert opened == [(tmp_path / "report.html").resolve().as_uri()]
    assert len(Parsed(tmp_path / "report.html").runs) == 2


def test_the_command_takes_the_newest_run(deep, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert "which run?" in call(code=2).stderr
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "deep-1").symlink_to(deep[0])
    call("--out", "page.html")
    assert "page.html" in {path.name for path in tmp_path.iterdir()}


def test_what_is_no_run_leaves_the_old_page_as_it_was(digits, tmp_path):
    path = tmp_path / "page.html"
    path.write_text("old")
    message = call(tmp_path / "nothing", "--out", path, "--force", code=2).stderr
    assert re.match(r"error: .*nothing does not exist; expected the folder of a run", message)
    lpom.save(one_layer([[1.0]]), tmp_path / "model.safetensors")
    with pytest.raises(ModelFileError, match="not a whole run"):
        write_report([digits[0], tmp_path], path)
    assert path.read_text() == "old"


def test_a_config_without_results_is_named(digits, tmp_path):
    folder, run = digits
    config = {key: value for key, value in run.config.items() if key != "results"}
    (tmp_path / "run").mkdir()
    replace(run, config=config).write(tmp_path / "run")
    with pytest.raises(ModelFileError, match=r"config.json lacks .*results"):
        write_report([tmp_path / "run"], tmp_path / "page.html")


def test_nan_is_refused_rather_than_written():
    with pytest.raises(ValueError, match="JSON"):
        page("t", {"runs": [{"loss": math.nan}]})
