"""Bad input of every kind ends in one of our errors or in a plain sentence, never deep inside.

Each test draws cases with hypothesis and hands them to one door of the library. A case passes if
the call succeeds, or raises an error of ours, or a ValueError, TypeError or OSError that was raised
with a sentence in our own code, or by scikit-learn's validation of what estimators are given;
anything else, a hang included, is a fault. ``--long`` draws many
more; how many cases were run, and in what time, is printed at the end.
"""

from __future__ import annotations

import gzip
import io
import json
import signal
import struct
import tempfile
import time
import traceback
import warnings
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import scipy.sparse
import sklearn
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, TensorDataset
from typer.testing import CliRunner

import lpom
from lpom import activations, losses, methods, saving
from lpom.cli.app import app
from lpom.exceptions import LPOMError
from lpom.methods import METHODS
from lpom.tables.reading import read_table
from lpom.training.checkpoint import Checkpoint, RunFolder, checksum

pytestmark = pytest.mark.faults

PACKAGE = str(Path(lpom.__file__).parent)
SKLEARN = str(Path(sklearn.__file__).parent / "utils")
HANGS = 120  # seconds; a case takes far less
#: Cases of each test in the long form and in the short one.
CASES = {
    "fit": (4500, 25),
    "settings": (2500, 20),
    "estimators": (2500, 12),
    "text tables": (3500, 20),
    "damaged tables": (2500, 15),
    "data sets": (2500, 15),
    "model files": (1500, 12),
    "checkpoints": (1000, 8),
    "command line": (1500, 8),
}
done = {}


class Hung(BaseException):
    """Not an Exception: nothing may catch it."""


@contextmanager
def door(name):
    """What may come out of a call with bad input."""

    def hung(*_):
        raise Hung

    before = signal.signal(signal.SIGALRM, hung)
    signal.alarm(HANGS)
    start = time.monotonic()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    except LPOMError as error:
        assert len(str(error)) > 15, repr(error)
    except (ValueError, TypeError, OSError) as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        own = last.filename.startswith((PACKAGE, SKLEARN))
        assert own and len(str(error)) > 15, f"{error!r} from {last.filename}:{last.lineno}"
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
        count, seconds = done.get(name, (0, 0.0))
        done[name] = count + 1, seconds + time.monotonic() - start


def fuzz(name, /, **strategies):
    """Run a test with as many drawn cases as its door has in this form."""

    def decorate(test):
        def run(request, tmp_path):
            most = CASES[name][0 if request.config.getoption("--long") else 1]
            given_cases = given(**strategies)(lambda **drawn: test(tmp_path, **drawn))
            checks = [HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large]
            settings(max_examples=most, suppress_health_check=checks)(given_cases)()

        run.__name__, run.__doc__ = test.__name__, test.__doc__
        return run

    return decorate


# What people hand over

numbers = st.one_of(
    st.integers(-3, 3),
    st.floats(allow_nan=True, allow_infinity=True),
    st.sampled_from([0.0, -0.0, 1e-45, 5e-324, 3e38, 1e39, 1e300, -1e300]),
)
odd = st.one_of(
    numbers,
    st.none(),
    st.booleans(),
    st.text(max_size=6),
    st.binary(max_size=4),
    st.just([]),
    st.just({}),
    st.just(()),
    st.just(object),
    st.just(np.int64(3)),
    st.just(np.float32(0.5)),
    st.just(np.array([1, 2])),
    st.just(torch.tensor(2)),
    st.just(lambda *_: None),
)
DTYPES = ["f2", "f4", "f8", ">f4", ">i8", "i1", "i8", "u1", "u8", "?", "c8", "O", "U3", "M8[s]"]
shapes = st.sampled_from(
    [(), (0,), (12,), (12, 4), (12, 4, 1), (0, 4), (12, 0), (1, 4), (12, 5), (2, 4), (12, 2, 2)]
)


@st.composite
def arrays(draw):
    """An array of an odd type, shape, content, order or kind."""
    shape = draw(shapes) if draw(st.booleans()) else draw(st.sampled_from([(12, 4), (12,)]))
    values = np.random.default_rng(draw(st.integers(0, 9))).integers(0, 3, shape)
    made = np.asarray(values + draw(st.sampled_from([0, 0.5]))).astype(
        np.dtype(draw(st.sampled_from(DTYPES)))
    )
    if draw(st.booleans()) and made.size and made.dtype.kind == "f":
        with np.errstate(over="ignore"):
            made.flat[draw(st.integers(0, made.size - 1))] = draw(numbers)
    kind = draw(
        st.sampled_from(
            "array list tensor frame masked sparse fortran loader coo meta graph".split()
        )
    )
    parts = draw(st.integers(1, 4))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's on complex numbers comes but once
            return _as(kind, made, parts)
    except (TypeError, ValueError, RuntimeError, IndexError):  # there is no such thing
        return made


def _as(kind, made, parts):
    match kind:
        case "list":
            return made.tolist()
        case "tensor":
            return torch.from_numpy(made)
        case "coo":
            return torch.from_numpy(made).to_sparse()
        case "meta":
            return torch.from_numpy(made).to("meta")
        case "graph":
            return torch.from_numpy(made).float().requires_grad_()
        case "frame":
            return pd.DataFrame(made) if made.ndim == 2 else pd.Series(made)
        case "masked":
            return np.ma.masked_array(made, made == made.flat[0])
        case "sparse":
            return scipy.sparse.csr_matrix(made)
        case "fortran":
            return np.asfortranarray(made)
        case "loader":
            return DataLoader(TensorDataset(*[torch.from_numpy(made)] * parts), batch_size=5)
    return made


X = np.random.default_rng(0).normal(size=(12, 4)).astype(np.float32)
Y = np.arange(12) % 2
targets = st.one_of(arrays(), st.just(Y), st.just(Y), st.none(), odd)
inputs = st.one_of(arrays(), st.just(X), st.just(X), odd)
SETTINGS = {
    "method": st.one_of(st.sampled_from([*METHODS, "lmop", ""]), odd),
    "loss": st.one_of(st.sampled_from([*losses.names(), "nonsense"]), odd),
    "epochs": odd.filter(lambda n: not isinstance(n, (int, np.int64)) or n < 4),
    "batch_size": odd,
    "seed": odd,
    "device": odd,
    "sample_weight": st.one_of(arrays(), odd),
    "validation_data": st.one_of(st.tuples(inputs, targets), arrays(), odd),
    "early_stopping": odd,
    "callbacks": odd,
    "state": odd,
    "progress": st.just(False),
}


def some_of(options, most=2):
    """A dictionary of a few of the options, each drawn from its strategy."""
    chosen = st.lists(st.sampled_from(sorted(options)), max_size=most, unique=True)
    return chosen.flatmap(lambda names: st.fixed_dictionaries({n: options[n] for n in names}))


@fuzz("fit", x=inputs, y=targets, options=some_of(SETTINGS))
def test_fit(tmp_path, x, y, options):
    with door("fit"):
        lpom.fit(lpom.mlp([4, 3, 2], seed=0), x, y, **{"epochs": 1, "progress": False} | options)


nested = st.recursive(
    odd, lambda inner: st.dictionaries(st.text(max_size=8), inner, max_size=2), max_leaves=3
)
METHOD_SETTINGS = {
    name: st.one_of(odd, nested, st.sampled_from(["auto", "exact", "adaptive", "safe"]))
    for name in "mu states weights jumps penalties learning_rate schedule ridge nonsense".split()
}
ACTIVATION_SETTINGS = {
    name: odd for name in "negative_slope alpha beta levels min_val max_val dim k".split()
}


@fuzz(
    "settings",
    kind=st.sampled_from(["method", "activation", "loss", "mlp", "sweeps", "table"]),
    name=st.one_of(st.sampled_from([*METHODS, *activations.names(), *losses.names()]), odd),
    own=some_of(METHOD_SETTINGS),
    other=some_of(ACTIVATION_SETTINGS),
    values=st.lists(odd, max_size=4),
)
def test_settings(tmp_path, kind, name, own, other, values):
    with door("settings"):
        match kind:
            case "method":
                method = methods.get(name, **own)
                lpom.fit(lpom.mlp([4, 3, 2], seed=0), X, Y, method=method, epochs=1, progress=False)
            case "activation":
                activations.get(name, **other)
            case "loss":
                losses.get(name, **other)
            case "mlp":
                lpom.mlp(values, name)
            case "sweeps":
                lpom.Sweeps(
                    **dict(zip(("order", "max_sweeps", "rule", "tolerance"), values, strict=False))
                )
            case "table":
                activations.from_table(*values[:2]) if len(values) > 1 else None


PARAMETERS = {
    name: odd.filter(lambda v: not isinstance(v, (int, np.int64)) or v < 20)
    for name in (
        "hidden_layer_sizes activation output_activation method loss alpha batch_size "
        "learning_rate_init max_iter early_stopping n_iter_no_change validation_fraction "
        "random_state device verbose"
    ).split()
}


@fuzz(
    "estimators",
    kind=st.sampled_from([lpom.MLPClassifier, lpom.MLPRegressor]),
    x=inputs,
    y=targets,
    options=some_of(PARAMETERS),
    other=inputs,
)
def test_estimators(tmp_path, kind, x, y, options, other):
    if isinstance(x, DataLoader) or isinstance(other, DataLoader):
        return
    with door("estimators"):
        model = kind(**{"max_iter": 1, "hidden_layer_sizes": (3,)} | options)
        model.fit(x, y)
        model.predict(other)


# Files

cells = st.one_of(
    st.text(max_size=8),
    st.sampled_from(
        ["", "1", "2,5", "3,200.5", "NA", "?", "1e999", "nan", "2024-01-31", '"', "€5"]
    ),
    st.integers(-(2**70), 2**70).map(str),
)


@fuzz(
    "text tables",
    rows=st.lists(st.lists(cells, min_size=1, max_size=5), max_size=8),
    separator=st.sampled_from([",", ";", "\t", "|", " "]),
    end=st.sampled_from(["\n", "\r\n", "\r"]),
    encoding=st.sampled_from(["utf-8", "utf-16", "cp1252", "utf-8-sig"]),
    options=some_of({"encoding": odd, "separator": odd}, 1),
    name=st.sampled_from(
        ["t.csv", "t.tsv", "t.csv.gz", "t.xlsx", "t.npz", "t.parquet", "t", "t.xyz"]
    ),
)
def test_text_tables(tmp_path, rows, separator, end, encoding, options, name):
    path = tmp_path / name
    content = end.join(separator.join(row) for row in rows).encode(encoding, "replace")
    path.write_bytes(gzip.compress(content) if name.endswith("gz") else content)
    with door("text tables"):
        read_table(path, **options)


@st.composite
def damages(draw):
    """Ways to change bytes: cut, flip, insert, repeat, overwrite."""
    kind = draw(st.sampled_from(["cut", "flip", "insert", "repeat", "zero", "none"]))
    return (
        kind,
        draw(st.floats(0, 1)),
        draw(st.floats(0, 1)),
        draw(st.binary(min_size=1, max_size=9)),
    )


def damaged(content, damage):
    kind, where, size, extra = damage
    at = int(where * max(len(content) - 1, 0))
    length = int(size * 40) + 1
    match kind:
        case "cut":
            return content[:at]
        case "flip":
            flipped = bytes(b ^ extra[0] for b in content[at : at + length])
            return content[:at] + flipped + content[at + length :]
        case "insert":
            return content[:at] + extra + content[at:]
        case "repeat":
            return content[:at] + content[at : at + length] * 3 + content[at + length :]
        case "zero":
            return content[:at] + bytes(length) + content[at + length :]
    return content


FRAME = pd.DataFrame({"a": [1.5, 2, 3], "b": ["x", "y", None], "c": [True, False, True]})


def table_bytes(ending):
    made = io.BytesIO()
    match ending:
        case ".parquet":
            FRAME.to_parquet(made)
        case ".xlsx":
            FRAME.to_excel(made, index=False)
        case ".npz":
            np.savez_compressed(made, X=np.eye(3), y=np.arange(3))
        case ".csv.gz":
            made.write(gzip.compress(FRAME.to_csv(index=False).encode()))
    return made.getvalue()


TABLES = {ending: table_bytes(ending) for ending in (".parquet", ".xlsx", ".npz", ".csv.gz")}


@fuzz(
    "damaged tables",
    ending=st.sampled_from(sorted(TABLES)),
    damage=damages(),
    again=damages(),
)
def test_damaged_tables(tmp_path, ending, damage, again):
    path = tmp_path / f"t{ending}"
    path.write_bytes(damaged(damaged(TABLES[ending], damage), again))
    with door("damaged tables"):
        read_table(path)


def model_bytes():
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "model.safetensors")
        saving.save(lpom.mlp([4, 3, 2], seed=0), path)
        return path.read_bytes()


json_values = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-(2**70), 2**70), st.text(max_size=5)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=5,
)


@st.composite
def headers(draw, content):
    """A model file with a value somewhere in its header replaced by another."""
    length = struct.unpack("<Q", content[:8])[0]
    header = json.loads(content[8 : 8 + length])
    texts = header["__metadata__"]
    name = draw(st.sampled_from(sorted(texts)))
    try:
        place = inside = json.loads(texts[name])
    except ValueError:
        place = inside = None
    if isinstance(inside, (dict, list)) and draw(st.integers(0, 4)):
        for _ in range(draw(st.integers(0, 4))):
            keys = sorted(place) if isinstance(place, dict) else range(len(place))
            deeper = [k for k in keys if isinstance(place[k], (dict, list)) and place[k]]
            if not deeper:
                break
            place = place[draw(st.sampled_from(deeper))]
        keys = sorted(place) if isinstance(place, dict) else range(len(place))
        place[draw(st.sampled_from(list(keys)))] = draw(json_values)
        texts[name] = json.dumps(inside)
    else:
        texts[name] = draw(st.one_of(st.text(max_size=9), st.just("[" * 5000)))
    written = json.dumps(header).encode()
    return struct.pack("<Q", len(written)) + written + content[8 + length :]


MODEL = model_bytes()


@fuzz(
    "model files",
    content=st.one_of(headers(MODEL), damages().map(lambda damage: damaged(MODEL, damage))),
    into=st.booleans(),
)
def test_model_files(tmp_path, content, into):
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    with door("model files"), pytest.MonkeyPatch.context() as patched:
        patched.setattr(saving, "_checksum", lambda *_: _claimed(content))  # as a forger would
        saving.load(path, **{"into": lpom.mlp([4, 3, 2], seed=0)} if into else {})


def _claimed(content):
    try:
        length = struct.unpack("<Q", content[:8])[0]
        return json.loads(content[8 : 8 + length])["__metadata__"]["sha256"]
    except Exception:
        return ""


def checkpoint_bytes():
    with tempfile.TemporaryDirectory() as folder:
        plan = Checkpoint(folder, every_epochs=1)
        lpom.fit(lpom.mlp([4, 2], seed=0), X, Y, epochs=3, seed=0, checkpoint=plan, progress=False)
        with RunFolder(plan) as kept:
            assert kept.newest() is not None
        return max(Path(folder).glob("*.pt")).read_bytes()


CHECKPOINT = checkpoint_bytes()


@fuzz("checkpoints", damage=damages(), again=damages())
def test_checkpoints(tmp_path, damage, again):
    content = damaged(damaged(CHECKPOINT, damage), again)
    for name in ("00000001-0123.pt", f"00000002-{checksum(content)}.pt"):  # that is made to fit
        (tmp_path / name).write_bytes(content)
    with door("checkpoints"), RunFolder(Checkpoint(tmp_path)) as kept:
        kept.newest()


words = st.one_of(
    st.sampled_from(
        "train predict info report compare bench methods activations networks --help table.csv run "
        "--target y --epochs 1 --hidden 3 --seed -1 --method lpom adam --set mu=1 mu --out out "
        "--force --loss squared --hidden 8 --test-fraction 0.5 2 --batch-size 0 --device "
        "nowhere --class-weight balanced --ignore a --threads 1 --resume nothing --methods".split()
    ),
    st.text("abc=.,-1 ", min_size=1, max_size=8),  # no path leaves the folder
)


@fuzz(
    "command line",
    command=st.sampled_from(["train", "predict", "info", "report", "compare", ""]),
    data=st.sampled_from(["table.csv", "missing.csv", "run", "digits"]),
    rest=st.lists(words, max_size=5),
)
def test_command_line(tmp_path, command, data, rest):
    table = pd.DataFrame({"a": X[:, 0], "b": X[:, 1], "y": Y})
    table.to_csv(tmp_path / "table.csv", index=False)
    arguments = [command, data, *rest, *(["--epochs", "1"] if command == "train" else [])]
    if command == "compare":
        arguments = [command, "missing.csv", *rest]  # which takes long where it succeeds
    with door("command line"), pytest.MonkeyPatch.context() as patched:
        patched.chdir(tmp_path)
        result = CliRunner().invoke(app, [word for word in arguments if word])
        expected = result.exception is None or isinstance(result.exception, SystemExit)
        if not expected:
            raise AssertionError((arguments, result.output)) from result.exception
        assert "Traceback" not in result.output, (arguments, result.output)


def test_the_number_of_cases_is_printed(request):
    """Last, so that all have been counted (``pytest -s`` shows it; so does a failure)."""
    total = sum(count for count, _ in done.values())
    for name, (count, seconds) in done.items():
        print(f"{name}: {count} cases in {seconds:.0f} s")
    print(f"{total} cases, none uncaught")
    wanted = sum(most[0 if request.config.getoption("--long") else 1] for most in CASES.values())
    assert total >= 0.9 * wanted or len(done) < len(CASES)
