"""Files: what is saved comes back, and whatever was done to a file is noticed."""

from __future__ import annotations

import copy
import io
import json
import math
import pickle
import random
import tracemalloc

import joblib
import numpy as np
import pytest
import safetensors.torch
import torch
from sklearn import compose, decomposition, impute, pipeline, preprocessing
from sklearn.datasets import load_diabetes, load_iris
from sklearn.feature_extraction import text
from torch import nn

import lpom
from lpom import LPOM, activations, encoding, saving
from lpom.exceptions import ModelFileError
from lpom.layers import LAYERS


@pytest.fixture
def path(tmp_path):
    return tmp_path / "model.safetensors"


@pytest.fixture
def saved(path):
    lpom.save(lpom.mlp([3, 5, 2], "tanh", seed=0), path)
    return path


def again(value, path):
    lpom.save(value, path)
    return lpom.load(path)


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


# networks


def convolutions():
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1, groups=2),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Sequential(nn.ConvTranspose2d(4, 3, 2), nn.LeakyReLU(0.3), nn.Dropout(0.2)),
        nn.Flatten(),
        nn.LayerNorm(75),
        nn.Linear(75, 3, bias=False),
    )


def test_a_network_of_known_layers_comes_back_and_trains_on(path):
    torch.manual_seed(0)
    model, X = convolutions(), normal(24, 2, 8, 8)
    y = torch.arange(24) % 3
    lpom.fit(model, X, y, epochs=1, batch_size=8, seed=0)
    state = torch.get_rng_state()
    loaded = again(model, path)
    assert torch.equal(torch.get_rng_state(), state)
    assert str(loaded) == str(model) and not any(m.training for m in loaded.modules())
    assert list(loaded.state_dict()) == list(model.state_dict())
    assert torch.equal(loaded(X), model.eval()(X))
    for each in (model, loaded):
        lpom.fit(each.train(), X, y, epochs=1, batch_size=8, seed=3)
    for key, value in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[key], value)
    first = path.read_bytes()
    lpom.save(lpom.load(path), path)
    assert path.read_bytes() == first


def test_names_of_children_and_a_single_layer(path):
    model = nn.Sequential()
    model.add_module("head-1", nn.Sequential(nn.Linear(4, 2), nn.ReLU()))
    assert str(again(torch.compile(model, backend="eager"), path)) == str(model)
    assert type(again(nn.Linear(3, 2), path)) is nn.Linear


def test_frozen_shared_and_double_tensors_stay_so(path):
    inner = nn.Linear(4, 4)
    model = nn.Sequential(inner, nn.Tanh(), inner, nn.Linear(4, 4)).double().train()
    model[3].weight = inner.weight
    model[3].bias.requires_grad_(False)
    loaded = again(model, path)
    assert model.training
    assert loaded[0] is loaded[2] and loaded[3].weight is loaded[0].weight
    frozen = [name for name, p in loaded.named_parameters() if not p.requires_grad]
    assert frozen == ["3.bias"] and loaded[0].weight.dtype == torch.float64
    assert torch.equal(loaded(normal(5, 4).double()), model.eval()(normal(5, 4).double()))


@pytest.mark.parametrize("name", LAYERS)
def test_every_layer_comes_back_with_its_settings(path, name):
    kind = getattr(nn, name)
    given = {
        "Linear": (3, 2, False), "Bilinear": (2, 3, 4), "Embedding": (5, 2, 1),
        "EmbeddingBag": (5, 2), "Unflatten": (1, (2, 3)), "Unfold": (2, 1, 1, 2),
        "Upsample": (None, 2.0, "bilinear", True), "UpsamplingNearest2d": (None, 2.0),
        "UpsamplingBilinear2d": (None, 3.0), "Fold": ((4, 4), 2, 1, 0, 2), "Softmax": (1,),
        "BatchNorm1d": (3, 1e-3, None, False), "LeakyReLU": (0.3, True), "Hardtanh": (-2.0, 3.0),
        "Threshold": (1.0, 0.5), "LayerNorm": ((3, 2), 1e-3), "RMSNorm": ((3, 2), 1e-3, False),
        "GroupNorm": (2, 4, 1e-3), "LocalResponseNorm": (2, 1e-3), "PReLU": (3,),
    }.get(name)  # fmt: skip
    kinds = {"LPPool": (2.0, 3), "Conv": (4, 6, 3, 2, 1), "ConstantPad": (1, -math.inf)}
    kinds |= dict.fromkeys(("Pad", "Pool", "huffle"), (2,))
    kinds |= dict.fromkeys(("BatchNorm", "InstanceNorm"), (3,))
    given = given or next((values for part, values in kinds.items() if part in name), ())
    layer = kind(*given)
    loaded = again(nn.Sequential(layer, nn.Linear(2, 2)), path)[0]
    assert type(loaded) is kind

    def settings(module):
        skipped = ("_parameters", "_buffers", "_modules", "training")
        return {key: value for key, value in vars(module).items() if key not in skipped}

    assert settings(loaded) == settings(layer)
    assert list(loaded.state_dict()) == list(layer.state_dict())


@pytest.mark.parametrize("example", activations.examples(), ids=lambda a: a.name)
def test_activations_come_back_with_their_parameters(path, example):
    model = nn.Sequential(nn.Linear(8, 8), activations.Elementwise(example)).bfloat16()
    loaded = again(model, path)
    assert loaded[1].activation == example
    assert torch.equal(loaded[0].weight, model[0].weight)


# weights alone, and classes of the user


class Residual(nn.Module):
    def __init__(self, width=4):
        super().__init__()
        self.body, self.head = nn.Linear(3, width), nn.Linear(width, 2)
        self.again = self.body
        self.register_buffer("mask", torch.full((2,), -math.inf))

    def forward(self, x):
        return self.head(torch.erf(self.body(x) + self.again(x)))


@pytest.fixture
def weights_only(path):
    torch.manual_seed(3)
    model = Residual()
    model.head.bias.requires_grad_(False)
    with pytest.warns(UserWarning, match=r"weights alone.*Residual.*into=model"):
        lpom.save(model, path)
    return path, model


def test_weights_alone_fill_a_model(weights_only):
    path, model = weights_only
    with pytest.raises(ModelFileError, match=r"weights alone.*Residual.*into=model"):
        lpom.load(path)
    other = Residual()
    assert lpom.load(path, into=other) is other and not other.training
    assert torch.equal(other(normal(5, 3)), model(normal(5, 3)))
    assert [n for n, p in other.named_parameters() if not p.requires_grad] == ["head.bias"]
    lpom.load(path, into=lpom.lift(Residual()))


def apart():
    model = Residual()
    model.again = nn.Linear(3, 4)
    return model


@pytest.mark.parametrize(
    ("model", "sentence"),
    [
        (Residual(5), r"body.weight should have shape \(5, 3\), got \(4, 3\)"),
        (Residual().double(), "is of torch.float64 in the model"),
        (nn.Sequential(nn.Linear(3, 4)), "0.weight of the model is not in the file"),
    ],
)
def test_a_model_that_does_not_fit_stays_as_it_was(weights_only, model, sentence):
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ModelFileError, match=sentence):
        lpom.load(weights_only[0], into=model)
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())


def test_sharing_must_agree(weights_only, path):
    model = apart()
    lpom.load(path, into=model)  # two copies of one tensor
    assert torch.equal(model.again.weight, model.body.weight)
    nn.init.ones_(model.again.weight)
    with pytest.warns(UserWarning, match="weights alone"):
        lpom.save(model, path)
    with pytest.raises(ModelFileError, match="one tensor in the model, and two in the file"):
        lpom.load(path, into=Residual())


def hooked():
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    model[1].register_forward_hook(lambda module, args, out: 2 * out)
    return model


def with_function():
    softsign = activations.from_function(nn.functional.softsign, lipschitz=1.0, name="softsign")
    return lpom.mlp([3, 4, 2], softsign, seed=0)


def with_extra_buffer():
    model = nn.Sequential(nn.Linear(3, 2))
    model[0].register_buffer("extra", torch.ones(1))
    return model


class OwnForward(nn.Sequential):
    def forward(self, x):
        return 2 * super().forward(x)


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (hooked, "forward hooks"),
        (lambda: nn.utils.parametrizations.weight_norm(nn.Linear(3, 2)), "Parametrized"),
        (with_function, "made of a function"),
        (with_extra_buffer, "0.extra"),
        (lambda: OwnForward(nn.Linear(3, 2)), "OwnForward"),
    ],
)
def test_of_what_needs_its_own_python_the_weights_are_kept(path, make, reason):
    model, other = make(), make()
    with pytest.warns(UserWarning, match=f"weights alone.*{reason}"):
        lpom.save(model, path)
    lpom.load(path, into=other)
    assert torch.equal(other(normal(4, 3)), model.eval()(normal(4, 3)))


class Named(nn.Module):
    """A name and its options, for classes that `register` knows."""

    def __init__(self, width):
        super().__init__()
        self.layer = nn.Linear(width, width)

    def _to_saved(self):
        return {"width": self.layer.in_features, "weights": self.state_dict()}

    @classmethod
    def _from_saved(cls, saved):
        made = cls(saved["width"])
        made.load_state_dict(saved["weights"])
        return made


def test_a_class_of_the_user(path, monkeypatch):
    monkeypatch.setattr(encoding, "_REGISTERED", {})
    saving.register(Named)
    model = Named(3)
    loaded = again({"model": model}, path)["model"]
    assert type(loaded) is Named and torch.equal(loaded.layer.weight, model.layer.weight)
    encoding._REGISTERED.clear()
    with pytest.raises(ModelFileError, match="unknown class 'Named'"):
        lpom.load(path)
    with pytest.raises(ValueError, match="StandardScaler is taken"):
        saving.register(type("StandardScaler", (), {}))


# plain values, estimators and pipelines


def test_plain_values(path):
    values = {
        "plain": [None, True, -3, 1e-300, "ä", math.inf, (1, (2,)), {3, 4}, slice(1, None)],
        "keys": {1: "one", ("a", None): "two", "~": {}},
        "arrays": [np.arange(6.0).reshape(2, 3), np.array([True]), np.array(["a", "bc"])],
        "odd": [np.array([1, None, "x"], object), np.array([2**63], np.uint64), np.float32(0.1)],
        "times": np.array(["2024-02-29", "NaT"], "datetime64[s]"),
        "types": [np.float64, np.dtype("int8"), torch.float16, torch.device("cpu")],
        "tensor": torch.arange(3, dtype=torch.bfloat16),
    }
    loaded = again(values, path)
    assert repr(loaded) == repr(values)
    assert loaded["types"][0] is np.float64 and type(loaded["odd"][2]) is np.float32
    generator = np.random.RandomState(3)
    assert again(generator, path).randint(2**30) == generator.randint(2**30)
    method = LPOM(weights=lpom.Exact(ridge=0.5), penalties={"0.weight": lpom.penalties.L1(1e-3)})
    assert again(method, path) == method


def test_every_known_class_is_there():
    for name in encoding._MODULE_OF:
        assert encoding.known_class(name).__name__ == name


X, labels = load_iris(return_X_y=True)
WORDS = np.array(["a red fox", "the fox", "a hen", "red red hen"] * 5)
MIXED = np.array([[0.5, "u"], [1.5, "v"], [np.nan, "w"], [2.0, "u"]] * 4, dtype=object)


@pytest.mark.parametrize(
    ("step", "rows"),
    [
        *((getattr(preprocessing, name)(), X) for name in (
            "StandardScaler", "MinMaxScaler", "MaxAbsScaler", "RobustScaler", "PowerTransformer",
            "Normalizer", "PolynomialFeatures", "KBinsDiscretizer",
        )),
        (preprocessing.QuantileTransformer(n_quantiles=20, random_state=0), X),
        (preprocessing.OneHotEncoder(handle_unknown="ignore", min_frequency=3), MIXED[:, 1:]),
        (preprocessing.OrdinalEncoder(dtype=np.float32), MIXED[:, 1:]),
        (impute.SimpleImputer(strategy="most_frequent", add_indicator=True), MIXED[:, :1]),
        (impute.SimpleImputer(), X),
        (decomposition.PCA(2), X),
        (decomposition.TruncatedSVD(2), X),
        (text.TfidfVectorizer(ngram_range=(1, 2)), WORDS),
        (text.CountVectorizer(), WORDS),
        (text.HashingVectorizer(n_features=8), WORDS),
        (pipeline.make_union(preprocessing.StandardScaler(), decomposition.PCA(1)), X),
        (compose.make_column_transformer(
            (impute.SimpleImputer(), [0]),
            (preprocessing.OneHotEncoder(), slice(1, 2)),
            remainder="passthrough",
        ), MIXED),
    ],
    ids=lambda value: type(value).__name__ if hasattr(value, "fit") else "",
)  # fmt: skip
def test_pieces_of_scikit_learn_come_back_fitted(path, step, rows):
    step.fit(rows)
    loaded = again(step, path)
    assert type(loaded) is type(step) and str(loaded) == str(step)
    expected, found = step.transform(rows), loaded.transform(rows)
    assert type(found) is type(expected)
    if hasattr(expected, "toarray"):
        expected, found = expected.toarray(), found.toarray()
    np.testing.assert_array_equal(np.asarray(found, object), np.asarray(expected, object))
    if hasattr(step, "get_feature_names_out"):
        assert list(loaded.get_feature_names_out()) == list(step.get_feature_names_out())


def classifier():
    model = lpom.MLPClassifier((8,), "tanh", method=LPOM(), max_iter=400, tol=0.05, random_state=0)
    names = np.array(["setosa", "versicolor", "virginica"])
    return pipeline.make_pipeline(preprocessing.StandardScaler(), model).fit(X, names[labels])


def regressor():
    rows, y = load_diabetes(return_X_y=True)
    model = lpom.MLPRegressor((4,), max_iter=100, tol=0.05, random_state=np.random.RandomState(1))
    scaled = compose.TransformedTargetRegressor(model, transformer=preprocessing.MinMaxScaler())
    return pipeline.make_pipeline(preprocessing.QuantileTransformer(n_quantiles=50), scaled).fit(
        rows, y
    )


def by_skops(model):
    skops = pytest.importorskip("skops.io")
    content = skops.dumps(model)
    return skops.loads(content, trusted=skops.get_untrusted_types(data=content))


def by_joblib(model):
    file = io.BytesIO()
    joblib.dump(model, file)
    return joblib.load(file)


@pytest.mark.parametrize("way", ["lpom", "pickle", "joblib", "skops"])
def test_pipelines_with_our_estimators_come_back(path, way):
    trip = {
        "lpom": lambda model: again(model, path),
        "pickle": lambda model: pickle.loads(pickle.dumps(model)),
        "joblib": by_joblib,
        "skops": by_skops,
    }[way]
    model = classifier()
    loaded = trip(model)
    np.testing.assert_array_equal(loaded.predict_proba(X), model.predict_proba(X))
    assert loaded.predict(X)[0] == "setosa" and loaded.score(X, model.predict(X)) == 1
    assert loaded[-1].loss_curve_ == model[-1].loss_curve_
    assert str(loaded) == str(model)
    loaded[-1].partial_fit(X, model.predict(X))  # and may go on
    loaded[-1].set_params(max_iter=1000).fit(X, labels)
    assert loaded[-1].score(X, labels) > 0.9
    model, rows = regressor(), load_diabetes().data
    np.testing.assert_array_equal(trip(model).predict(rows), model.predict(rows))


def test_estimators_before_fit_and_what_can_not_be_saved(path):
    estimator = lpom.MLPRegressor((3,), alpha=0.5)
    assert str(again(estimator, path)) == str(estimator)
    before = path.read_bytes()
    model = pipeline.make_pipeline(preprocessing.FunctionTransformer(np.log1p))
    circle = []
    circle.append(circle)
    for value, sentence in [
        (model, "steps.*FunctionTransformer"),
        ({"a": [print]}, "a.0 is print"),
        (object(), "the object is object"),
        ({"a": np.ma.array([1.0])}, "a is MaskedArray"),
        (circle, "in itself"),
        (nn.Sequential(nn.LazyLinear(2)), "0.weight has no values yet"),
        (nn.Sequential(nn.Linear(2, 2, dtype=torch.complex64)), "complex64"),
    ]:
        with pytest.raises(ModelFileError, match=sentence):
            lpom.save(value, path)
    with pytest.raises(TypeError, match="an object and then a path"):
        lpom.save(path, model)
    assert path.read_bytes() == before and list(path.parent.iterdir()) == [path]


def test_a_deflated_file(tmp_path):
    model = lpom.mlp([100, 100, 2], seed=0)
    with torch.no_grad():
        model[0].weight.sign_()
    lpom.save(model, tmp_path / "a.safetensors")
    lpom.save(model, tmp_path / "a.safetensors.gz")
    assert str(lpom.load(tmp_path / "a.safetensors.gz")) == str(model)
    sizes = [(tmp_path / f"a.safetensors{end}").stat().st_size for end in ("", ".gz")]
    assert sizes[1] < sizes[0] / 10
    content = (tmp_path / "a.safetensors.gz").read_bytes()
    for damaged in (content[:-20], content[:300] + b"x" + content[301:], content[:2]):
        (tmp_path / "a.safetensors.gz").write_bytes(damaged)
        with pytest.raises(ModelFileError, match="damaged"):
            lpom.load(tmp_path / "a.safetensors.gz")


def test_the_folder_of_a_run_is_its_model_file(saved):
    assert str(lpom.load(saved.parent)) == str(lpom.load(saved))
    saved.unlink()
    with pytest.raises(ModelFileError, match="there is no model file"):
        lpom.load(saved.parent)


# files that were damaged or made by somebody else


def parts(path):
    content = path.read_bytes()
    size = int.from_bytes(content[:8], "little")
    metadata = json.loads(content[8 : 8 + size])["__metadata__"]
    return safetensors.torch.load(content), json.loads(metadata["lpom"])


def rewrite(path, stored=None, sign=True, **changes):
    """Change a file as somebody who knows the format could, checksum included."""
    old, header = parts(path)
    stored = old if stored is None else stored
    header = {k: v for k, v in {**header, **changes}.items() if v is not ...}
    if sign:
        header["sha256"] = saving._checksum(stored, header)
    path.write_bytes(safetensors.torch.save(stored, metadata={"lpom": json.dumps(header)}))


def edit(path, *keys, value):
    """Put a value somewhere into the description of the module."""
    tree = parts(path)[1]["object"]
    place = tree["module"]
    for key in keys[:-1]:
        place = place[key]
    place[keys[-1]] = value
    rewrite(path, object=tree)


@pytest.mark.parametrize("keep", [0, 1, 5, 8, 9, 100, -1])
def test_a_file_cut_off_anywhere(saved, keep):
    saved.write_bytes(saved.read_bytes()[:keep])
    with pytest.raises(ModelFileError, match="is cut off or damaged"):
        lpom.load(saved)


def test_a_file_of_another_kind_version_or_checksum(saved):
    whole = saved.read_bytes()
    rewrite(saved, version=99, lpom_version="7.0")
    with pytest.raises(ModelFileError, match=r"format version.*version 7.0"):
        lpom.load(saved)
    saved.write_bytes(whole)
    rewrite(saved, sha256=..., sign=False)
    with pytest.raises(ModelFileError, match="checksum"):
        lpom.load(saved)
    torch.save({"weight": torch.ones(2)}, saved)
    with pytest.raises(ModelFileError, match="no safetensors file"):
        lpom.load(saved)
    saved.write_bytes(safetensors.torch.save({"weight": torch.ones(2)}))
    with pytest.raises(ModelFileError, match="lpom did not write it"):
        lpom.load(saved)


def test_every_changed_byte_is_noticed(saved):
    content = bytearray(saved.read_bytes())
    for k in random.Random(0).sample(range(len(content)), 150):
        changed = bytearray(content)
        changed[k] ^= 1
        saved.write_bytes(changed)
        with pytest.raises(ModelFileError):
            lpom.load(saved)


@pytest.mark.parametrize("text", ["[", "3", "null", "[" * 100_000, '{"a":' * 100_000, "{}"])
def test_metadata_that_are_no_json(saved, text):
    tensors, _ = parts(saved)
    saved.write_bytes(safetensors.torch.save(tensors, metadata={"lpom": text}))
    with pytest.raises(ModelFileError, match="damaged|another format version"):
        lpom.load(saved)


HUGE = 2**40


@pytest.mark.parametrize(
    "entry",
    [
        {"dtype": "F32", "shape": [HUGE], "data_offsets": [0, 4 * HUGE]},
        {"dtype": "F32", "shape": [HUGE, HUGE, HUGE], "data_offsets": [0, 8]},
        {"dtype": "F32", "shape": [-1], "data_offsets": [0, 8]},
        {"dtype": "F32", "shape": [2], "data_offsets": [8, 0]},
        {"dtype": "F32", "shape": [2]},
        {"dtype": "NO", "shape": [2], "data_offsets": [0, 8]},
        {"dtype": "F32", "shape": None, "data_offsets": [0, 8]},
        None,
    ],
)
@pytest.mark.parametrize("deflated", [False, True])
def test_a_header_that_claims_what_is_not_there(saved, entry, deflated):
    text = json.dumps({"__metadata__": {"lpom": json.dumps(parts(saved)[1])}, "a": entry}).encode()
    content = len(text).to_bytes(8, "little") + text + bytes(8)
    saved.write_bytes(saving.gzip.compress(content) if deflated else content)
    tracemalloc.start()
    with pytest.raises(ModelFileError, match="is cut off or damaged"):
        lpom.load(saved)
    assert tracemalloc.get_traced_memory()[1] < 10_000_000
    tracemalloc.stop()


def test_a_large_file_behind_a_small_header_is_not_read(saved):
    with saved.open("r+b") as file:
        file.truncate(2**40)  # a hole, which takes no place on disk
    with pytest.raises(ModelFileError, match="do not fill"):
        lpom.load(saved)
    with saved.open("r+b") as file:
        file.write((2**39).to_bytes(8, "little"))
    with pytest.raises(ModelFileError, match="a header of 549755813888 bytes"):
        lpom.load(saved)


def test_tensors_missing_too_many_or_of_another_kind(saved):
    tensors, _ = parts(saved)
    before = saved.read_bytes()
    for changed, sentence in [
        ({k: v for k, v in tensors.items() if k != "2.bias"}, "2.bias"),
        ({**tensors, "../evil": torch.ones(1)}, "evil"),
        ({**tensors, "0.weight": torch.ones(6, 3)}, r"shape \(5, 3\), got \(6, 3\)"),
        ({**tensors, "0.weight": torch.ones(5, 3).long()}, "torch.float32, got torch.int64"),
        ({**tensors, "0.weight": torch.full((5, 3), torch.nan)}, "NaN or infinity in|0.weight"),
    ]:
        saved.write_bytes(before)
        rewrite(saved, changed)
        with pytest.raises(ModelFileError, match=sentence):
            lpom.load(saved)


LAYERS_OF = ("layers", "Sequential")
LINEAR = (*LAYERS_OF, "0", "Linear")
WRONG = {  # by the place in the description of the module
    (*LINEAR, "out_features"): [6, HUGE, 10**30, -3, 0, "3", None, {"value": 0}, {"tuple": 3}],
    (*LINEAR, "bias"): [False],
    (*LINEAR, "device"): ["cuda"],
    LINEAR: [None],
    (*LAYERS_OF, "0"): [None, {}, {"Liner": {}}, {"same": ""}, {"LSTM": {}}, {"os.system": {}}],
    (*LAYERS_OF, "1"): [{"Elementwise": {}}, {"same": "9"}],
    **{(*LAYERS_OF, name): [{"ReLU": {}}] for name in ("../evil", "a/b", "x.y", "", "forward")},
    ("layers",): [{}, [], 3, "Linear"],
    ("tensors", "0.weight"): ["buffer", "code", None],
    ("tensors",): [{}, None, []],
    ("shared",): [{"0.weight": "0.bias"}, {"x": "0.bias"}, None],
    ("at",): ["x"],
}  # fmt: skip


@pytest.mark.parametrize(("keys", "value"), [(k, v) for k, values in WRONG.items() for v in values])
def test_modules_that_can_not_be(saved, keys, value):
    edit(saved, *keys, value=value)
    with pytest.raises(ModelFileError):
        lpom.load(saved)


@pytest.mark.parametrize(
    "tree",
    [
        *({"object": [name, {}]} for name in ("os.system", "Popen", "")),
        *({"object": ["StandardScaler", {name: 1}]} for name in ("transform", "__class__")),
        {"object": ["Epoch", {"nothing": 1}]},
        {"activation": ["evil", {}]},
        {"method": ["lpom", {"nothing": 1}]},
        {"number": "nothing"},
        *({"list": [dtype, [1]]} for dtype in ("O", "|O", "<f8", None)),
        {"random": [1, 2]},
        {"two": 1, "keys": 2},
    ],
)
def test_objects_that_are_never_made(saved, tree):
    rewrite(saved, object=tree, stored={})
    with pytest.raises(ModelFileError):
        lpom.load(saved)


def test_texts_take_no_more_than_they_need(saved):
    rewrite(saved, object={"list": ["<U999999999", ["a"]]}, stored={})
    assert lpom.load(saved).nbytes == 4


def test_nan_is_not_saved_in_a_network(saved):
    before = saved.read_bytes()
    model = lpom.mlp([3, 2], seed=0)
    nn.init.constant_(model[0].weight, torch.inf)
    with pytest.raises(ModelFileError, match="0.weight holds NaN or infinity"):
        lpom.save(model, saved)
    norm = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    norm[1].running_mean.fill_(torch.nan)
    with pytest.raises(ModelFileError, match="1.running_mean holds NaN or infinity"):
        lpom.save(norm, saved)
    assert saved.read_bytes() == before


def test_nothing_of_a_file_is_run(path, monkeypatch):
    model = classifier()
    lpom.save(model, path)

    def refuse(*_, **__):
        raise AssertionError("ran something")

    for name in ("pickle.loads", "pickle.load", "builtins.eval", "torch.load"):
        monkeypatch.setattr(name, refuse)
    monkeypatch.setattr(nn.Sequential, "forward", refuse)
    lpom.load(path)


HOSTILE = [
    *(None, True, False, 0, -1, 7, 2**63, 10**40, -0.5, 1e308, "", "x", "0", "../x", "a.b.c"),
    *("__class__", "torch.load", "Linear", "forward", "\x00", "ä", [], {}, [[]], {"value": 0}),
    *({"tuple": [1, 2]}, {"float": "inf"}, {"same": "0"}, {"ReLU": {}}, {"object": ["Task", {}]}),
]


def places(value, at=()):
    """Every place in JSON data, by the keys that lead there."""
    inner = value.items() if isinstance(value, dict) else enumerate(value)
    for key, item in inner:
        yield (*at, key)
        if isinstance(item, dict | list):
            yield from places(item, (*at, key))


def harmed(header, generator):
    """A header with one to three things replaced, removed or renamed."""
    for _ in range(generator.randint(1, 3)):
        keys = generator.choice([p for p in places(header) if p[0] != "version"])
        place = header
        for key in keys[:-1]:
            place = place[key]
        action = generator.randrange(3)
        if action == 0:
            place[keys[-1]] = copy.deepcopy(generator.choice(HOSTILE))
        elif action == 1 or isinstance(place, list):
            del place[keys[-1]]
        else:
            place[generator.choice([v for v in HOSTILE if isinstance(v, str)])] = place.pop(
                keys[-1]
            )
    return header


@pytest.mark.parametrize("name", ["network", "pipeline"])
def test_files_changed_at_random_load_or_are_refused(path, name, pytestconfig):
    lpom.save(convolutions() if name == "network" else classifier(), path)
    tensors, whole = parts(path)
    generator = random.Random(name)
    cases, refused = 4000 if pytestconfig.getoption("long") else 200, 0
    for _ in range(cases):
        header = harmed(copy.deepcopy(whole), generator)
        header["sha256"] = saving._checksum(tensors, header)
        path.write_bytes(safetensors.torch.save(tensors, metadata={"lpom": json.dumps(header)}))
        try:
            lpom.load(path)
        except ModelFileError:
            refused += 1
    assert cases / 3 < refused < cases
