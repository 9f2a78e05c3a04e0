"""Networks on pictures from the shell, and runs that go on after whatever stopped them."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from typer.testing import CliRunner

import lpom
from lpom import datasets, networks
from lpom.cli import _COMMANDS, _loaded, app
from lpom.estimators.splits import split_rows
from lpom.files import write_atomically
from lpom.folders import FILES, begun
from lpom.pictures import Pixels, prepare_pictures
from lpom.runs import Run, Settings, again, notes_to_resume
from lpom.training.checkpoints import hold

SMALL = ("--network", "mlp", "--network-option", "hidden=[8]")


def call(*arguments, code=0):
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == code, result.output + repr(result.exception)
    return result.stdout


def fail(*arguments):
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == 2, result.output + repr(result.exception)
    assert result.stderr.startswith("error: ") and result.stderr.count("\n") == 1
    return result.stderr


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("LPOM_DEBUG", raising=False)


@pytest.fixture(scope="module")
def lenet(tmp_path_factory):
    """A run of a network with convolutions."""
    folder = tmp_path_factory.mktemp("lenet") / "run"
    call("train", "digits", "--network", "lenet5", "--epochs", 2, "--out", folder, "--quiet")
    return folder


# Pictures


def test_a_run_of_a_known_network_is_that_of_python(lenet):
    """The same by hand: a tenth watched, the weights of the lowest loss on it kept."""
    assert sorted(path.name for path in lenet.iterdir()) == sorted(FILES)
    data = datasets.load("digits").pictures()
    X, y = data.x_train, data.y_train
    kept, watched = split_rows(len(X), 0.1, np.random.default_rng(0), y)
    expected = networks.get("lenet5", (1, 8, 8), 10, seed=0)
    lpom.fit(
        expected,
        X[kept],
        y[kept],
        validation_data=(X[watched], y[watched]),
        epochs=2,
        batch_size=100,
        seed=0,
        early_stopping=lpom.EarlyStopping(watch="loss"),
    )
    expected.eval()
    predictor = lpom.load(lenet)
    model = predictor.estimator.to_torch()
    x = torch.from_numpy(data.x_test)
    torch.testing.assert_close(model(x), expected(x))
    run = Run.read(lenet)
    right = (expected(x).argmax(1).numpy() == data.y_test).mean()
    assert run.config["results"]["test"]["score"] == pytest.approx(right)
    assert right > 0.5 and run.history[-1].validation_score is not None
    assert predictor.estimator.network == "lenet5"


def test_info_and_report_of_a_network(lenet):
    shown = " ".join(call("info", lenet).split())
    assert "lenet5, pictures of 1x8x8; 61,706 weights" in shown and "2 of 2 epochs" in shown
    call("report", lenet, "--out", "page.html")
    page = Path("page.html").read_text()
    assert "lenet5, pictures of 1x8x8" in page and "The first layer is a convolution" in page
    assert "could not be loaded again" not in page
    assert "page.html is there already" in fail("report", lenet, "--out", "page.html")
    call("report", lenet, "--out", "page.html", "--force")


def test_pictures_are_predicted_flat_or_not(lenet):
    data = datasets.load("digits")
    np.savez("flat.npz", X=data.x_test, y=data.y_test)
    np.savez("pictures.npz", X=data.pictures().x_test)
    pd.DataFrame(data.x_test, columns=data.feature_names).to_csv("flat.csv", index=False)
    result = CliRunner().invoke(app, ["predict", str(lenet), "flat.npz"])
    answers = pd.read_csv(io.StringIO(result.stdout))["prediction"]
    right = (answers == data.y_test).mean()
    assert right == pytest.approx(Run.read(lenet).config["results"]["test"]["score"])
    assert f"accuracy {100 * right:.2f} %, " in result.stderr
    assert call("predict", lenet, "pictures.npz") == result.stdout
    assert call("predict", lenet, "flat.csv") == result.stdout
    shares = pd.read_csv(io.StringIO(call("predict", lenet, "pictures.npz", "--proba")))
    assert shares.filter(like="probability_").sum(axis=1).to_numpy() == pytest.approx(1)
    np.savez("cut.npz", X=data.pictures().x_test[:, :, :5])
    assert "(n, 64) or (n, 1, 8, 8), got one of shape (360, 1, 5, 8)" in fail(
        "predict", lenet, "cut.npz"
    )
    np.savez("named.npz", pictures=data.x_test)
    assert "should hold an array X of pictures" in fail("predict", lenet, "named.npz")
    Path("few.csv").write_text("a,b\n1,2\n")
    assert "the table lacks 'pixel_0_0'" in fail("predict", lenet, "few.csv")


def test_colours_become_channels_and_back():
    pixels = Pixels((2, 2, 3), (1.0, 2.0, 4.0))
    rows = np.arange(24, dtype=np.float32).reshape(2, 12)  # red, green, blue of each pixel
    frame = pd.DataFrame(rows, columns=list(pixels.columns))
    X = pixels.encode(frame)
    for row, column, channel in np.ndindex(2, 2, 3):
        flat = rows[:, 6 * row + 3 * column + channel]
        np.testing.assert_allclose(X[:, channel, row, column], flat / (1, 2, 4)[channel])
    place = {name: k for k, name in enumerate(pixels.columns)}
    order = [place[name] for name in pixels.names]
    np.testing.assert_allclose(X.reshape(2, -1) * np.repeat([1, 2, 4], 4), rows[:, order])
    np.savez("colours.npz", X=X)
    target = prepare_pictures("digits").target
    np.testing.assert_allclose(pixels.table(Path("colours.npz"), target), rows)
    assert Pixels.from_json(json.loads(json.dumps(pixels.to_json()))) == pixels


def test_a_network_of_ones_own_file():
    Path("net.py").write_text(
        "from torch import nn\n"
        "def make(input_shape, n_outputs, width=4):\n"
        "    return nn.Sequential(nn.Conv2d(1, width, 3), nn.ReLU(), nn.Flatten(),\n"
        "                         nn.Linear(36 * width, n_outputs))\n"
    )
    own = ("digits", "--network", "net.py:make", "--network-option", "width=3")
    shown = call("train", *own, "--epochs", 1, "--augment", "--out", "run")
    assert "network  net.py:make (width=3), pictures of 1x8x8, flipped and cropped" in shown
    Path("net.py").unlink()
    np.savez("new.npz", X=datasets.load("digits").x_test)
    assert call("predict", "run", "new.npz").count("\n") == 361  # the file holds all of it


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (("iris", "--network", "lenet5"), "iris has no pictures"),
        (("digits", "--network", "lenet"), "unknown network 'lenet'; did you mean 'lenet5'"),
        (("digits", "--network", "lenet5", "--network-option", "wide=2"), "Its options are pool"),
        (("digits", "--network", "no.py:make"), "there is no file no.py"),
        (("digits", "--network", "lenet5", "--hidden", "5"), "hidden is for fully connected"),
        (("digits", "--network", "lenet5", "--alpha", 1), "alpha is for fully connected"),
        (("digits", "--network", "lenet5", "--target", "y"), "--target is for tables"),
        (("digits", "--augment"), "augment goes with --network"),
        (("table.csv", "--network", "lenet5"), "pictures of a data set with a name"),
        (("digits", "--network", "lenet5", "--method", "bcd"), "chains of Linear layers"),
    ],
)
def test_what_does_not_go_with_a_network(options, sentence):
    assert sentence in fail("train", *options)
    assert not Path("runs").exists()


def test_known_networks_are_listed():
    shown = call("networks")
    assert all(name in shown for name in networks.names())


def test_photographs_are_flipped_and_cropped_unless_asked_not_to():
    assert Settings(network="vgg5").augments("cifar-10")
    assert not Settings(network="vgg5", augment=False).augments("cifar-10")
    assert not Settings(network="lenet5").augments("mnist")


# The command


def test_the_list_of_commands_says_what_they_say_themselves():
    for name, (_, sentence) in _COMMANDS.items():
        assert (_loaded(name).help or "").partition("\n\n")[0].replace("\n", " ") == sentence


def test_help_loads_nothing_but_the_library():
    script = (
        "import sys\nfrom lpom.cli import app\n"
        "app(['--help'], standalone_mode=False)\n"
        "heavy = {'sklearn', 'scipy', 'pandas', 'matplotlib', 'pyarrow'}\n"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, env=_environment())


# Runs that go on


def _environment():
    return {
        **os.environ,
        "PYTHONPATH": str(Path(lpom.__file__).parents[1]),
        "OMP_NUM_THREADS": "1",
        "COLUMNS": "120",
    }


def _start(*arguments, script="from lpom.shell import main; main()"):
    return subprocess.Popen(
        [sys.executable, "-c", script, *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=_environment(),
    )


#: Checkpoints after every step, and slow steps: there is time to be stopped between two of them.
SLOW = """
import time
from lpom import runs
from lpom.methods import LPOM
from lpom.training import Checkpoint
runs.Checkpoint = lambda folder: Checkpoint(folder, every_minutes=0)
step = LPOM.step
def slowly(*given):
    time.sleep(0.02)
    return step(*given)
LPOM.step = slowly
from lpom.shell import main
main()
"""


def _stopped(number, *arguments):
    """Start a run, send the signal when it has a few checkpoints; exit code and what it said."""
    with _start("train", *arguments, script=SLOW) as process:
        checkpoint = Path("run/checkpoint")
        while not list(checkpoint.glob("0000000[5-9]-*.safetensors")):
            assert process.poll() is None, process.stderr.read()
            time.sleep(0.02)
        process.send_signal(number)
        _, said = process.communicate(timeout=120)
    return process.returncode, said


@pytest.fixture(scope="module")
def people(tmp_path_factory):
    folder = tmp_path_factory.mktemp("people")
    rng = np.random.default_rng(0)
    frame = pd.DataFrame(rng.normal(size=(300, 3)), columns=list("abc"))
    frame.assign(y=np.where(frame["a"] * frame["b"] > 0, "p", "q")).to_csv(
        folder / "people.csv", index=False
    )
    command = ("train", folder / "people.csv", "--target", "y", "--hidden", "6", "--epochs", 12)
    call(*command, "--out", folder / "whole", "--quiet")
    return folder, command[1:]


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGKILL, -9), (signal.SIGTERM, 143), (signal.SIGINT, 130)]
)
def test_a_stopped_run_goes_on_to_the_same_model(people, number, code):
    folder, command = people
    ended, said = _stopped(number, *command, "--out", "run")
    assert ended == code and begun(Path("run"))
    if number != signal.SIGKILL:
        assert said.splitlines()[-1] == "stopped; go on with: lpom train --resume run"
        assert "Traceback" not in said
    shown = call("info", "run")
    assert "lpom train --resume run" in shown
    if number == signal.SIGINT:  # what is there so far can be used
        call("predict", "run", folder / "people.csv")
    else:
        assert "stopped before its end" in shown and "3-6-1, relu" in shown
        assert "has no model yet; `lpom train --resume run`" in fail("predict", "run", "x.csv")
    assert "already holds a run that has not come to its end" in fail(
        "train", *command, "--out", "run"
    )
    call("train", "--resume", "run", "--quiet")
    assert sorted(path.name for path in Path("run").iterdir()) == sorted(FILES)
    whole = folder / "whole"
    assert Path("run/model.safetensors").read_bytes() == (whole / FILES[0]).read_bytes()
    resumed, expected = Run.read(Path("run")), Run.read(whole)
    assert resumed.history.column("loss") == expected.history.column("loss")
    assert resumed.config["results"] == expected.config["results"]
    assert "run has no run to go on with: it is finished" in fail("train", "--resume", "run")


def test_a_stopped_network_with_augmentation_goes_on_to_the_same_model():
    command = ("digits", *SMALL, "--augment", "--epochs", 2, "--batch-size", 50)
    call("train", *command, "--out", "whole", "--quiet")
    ended, _ = _stopped(signal.SIGTERM, *command, "--out", "run")
    assert ended == 143
    call("train", "--resume", "run", "--quiet")
    models = [Path(run, "model.safetensors").read_bytes() for run in ("run", "whole")]
    assert models[0] == models[1]


def test_ctrl_c_while_starting_is_one_line():
    script = "print('here', flush=True); from lpom.shell import main; main()"
    with _start("train", "digits", script=script) as process:
        process.stdout.readline()
        time.sleep(0.3)  # torch takes longer to load
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=120)
    assert process.returncode == 130
    assert said == "interrupted\n"
    assert not Path("runs").exists()


def _begin(people, run="run"):
    """A run as it is after its process was killed before the first checkpoint."""
    _, command = people
    path = Path("people.csv")
    path.write_bytes((people[0] / "people.csv").read_bytes())
    data = lpom.runs.prepare(str(path), target="y")
    notes = notes_to_resume(data, Settings(hidden=(6,), epochs=12))
    Path(run, "checkpoint").mkdir(parents=True)
    write_atomically(
        Path(run, "checkpoint", "run.json"), json.dumps({**notes, "tensorboard": False}).encode()
    )


def test_killed_before_the_first_checkpoint(people):
    _begin(people)
    call("train", "--resume", "run", "--quiet")
    loss = [Run.read(run).history.column("loss") for run in (Path("run"), people[0] / "whole")]
    assert loss[0] == loss[1]


def test_data_that_changed_or_is_gone(people):
    _begin(people)
    text = Path("people.csv").read_text()
    Path("people.csv").write_text(text.replace("p\n", "q\n", 1))
    assert "people.csv has changed since the run was begun" in fail("train", "--resume", "run")
    Path("people.csv").unlink()
    assert "people.csv, which is gone" in fail("train", "--resume", "run")
    assert begun(Path("run"))  # put back, it goes on
    Path("people.csv").write_text(text)
    call("train", "--resume", "run", "--quiet")


def test_settings_survive_json():
    settings = Settings(network="mlp", network_options={"hidden": [8]}, learning_rate=0.1, seed=4)
    data = prepare_pictures("digits")
    found, again_settings = again(json.loads(json.dumps(notes_to_resume(data, settings))))
    assert again_settings == settings and found.describe() == data.describe()


def test_what_can_not_be_resumed(people):
    assert "there is no folder nowhere" in fail("train", "--resume", "nowhere")
    Path("empty").mkdir()
    assert "was never begun there" in fail("train", "--resume", "empty")
    _begin(people)
    sentence = fail("train", "--resume", "run", "--epochs", 3)
    assert "takes all settings from the run itself. Leave --epochs out" in sentence
    Path("run/checkpoint/run.json").write_text("[")
    assert "run.json is damaged" in fail("train", "--resume", "run")
    Path("run/checkpoint/run.json").write_text("{}")
    assert "lacks what `lpom train` writes" in fail("train", "--resume", "run")


def test_a_second_process_is_refused(people):
    _begin(people)
    with hold(Path("run/checkpoint"), "run.lock"):
        assert "another process is training in run" in fail("train", "--resume", "run")
        assert "another process is training in run" in fail(
            "train", *people[1], "--out", "run", "--force"
        )
        assert "training now" in call("info", "run")
    call("train", *people[1], "--out", "run", "--force", "--quiet")
    assert not begun(Path("run"))


def test_files_of_two_runs_are_told_from_a_whole_one(people):
    for name in ("a", "b"):
        seed = ("--seed", 1) if name == "b" else ()
        call("train", *people[1], "--out", name, "--quiet", *seed, "--epochs", 1)
    Path("a/model.safetensors").write_bytes(Path("b/model.safetensors").read_bytes())
    assert "a holds files of two runs" in fail("info", "a")


def test_a_full_disk_at_the_end_keeps_the_run(people, monkeypatch):
    def fill(self, path):
        raise OSError(28, "No space left on device", str(path))

    with monkeypatch.context() as patched:
        patched.setattr("lpom.predictor.Predictor.save", fill)
        result = CliRunner().invoke(app, ["train", *map(str, people[1]), "--out", "run"])
    assert result.exit_code == 2 and result.stderr == (
        "stopped; go on with: lpom train --resume run\n"
        "error: run/model.safetensors: No space left on device.\n"
    )
    assert begun(Path("run"))
    call("train", "--resume", "run", "--quiet")
    whole = people[0] / "whole" / "model.safetensors"
    assert Path("run/model.safetensors").read_bytes() == whole.read_bytes()
