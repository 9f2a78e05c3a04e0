"""Downloads from a server on the loopback; nothing here leaves the machine."""

from __future__ import annotations

import hashlib
import socket
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest

from lpom.datasets import cifar10, download, mnist
from lpom.datasets import svhn as svhn_module
from lpom.datasets.download import Source, cache_folder, data_folder, fetch, find, find_or_fetch
from lpom.exceptions import DataError

pooch = pytest.importorskip("pooch", reason="pooch is not installed")

GOOD = bytes(range(256)) * 400
MD5 = "md5:" + hashlib.md5(GOOD).hexdigest()
SHA256 = "sha256:" + hashlib.sha256(GOOD).hexdigest()


class Server(BaseHTTPRequestHandler):
    """Serves `files`; what is under "cut" is announced whole and broken off in the middle."""

    files: dict[str, bytes]
    asked: list[str]

    def do_GET(self) -> None:
        name = self.path.lstrip("/")
        self.asked.append(name)
        if name not in self.files:
            self.send_error(404)
            return
        data = self.files[name]
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data[: len(data) // 2] if name == "cut" else data)

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[type[Server]]:
    files = {
        "good": GOOD,
        "cut": GOOD,
        "truncated": GOOD[:-1],
        "corrupted": b"!" + GOOD[1:],
    }
    handler = type("Handler", (Server,), {"files": files, "asked": []})
    http = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    handler.url = f"http://127.0.0.1:{http.server_address[1]}"  # type: ignore[attr-defined]
    thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield handler
    http.shutdown()
    http.server_close()
    thread.join()


def source(url: str, hash: str = MD5) -> Source:
    names = ("good", "cut", "truncated", "corrupted", "absent")
    return Source("things", url, dict.fromkeys(names, hash))


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.rglob("*") if path.is_file())


@pytest.mark.parametrize("hash", [MD5, SHA256], ids=["md5", "sha256"])
def test_a_good_file_is_kept_and_fetched_once(hash: str, server: type[Server], cache: Path) -> None:
    things = source(server.url, hash)
    path = fetch(things, "good")
    assert path == cache / "things" / "good"
    assert path.read_bytes() == GOOD
    assert fetch(things, "good") == path
    assert server.asked == ["good"]
    assert files(cache) == ["good"]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("cut", "broke off in the middle; what had come was thrown away"),
        ("truncated", f"what came is not the published file .expected {MD5}., and was thrown away"),
        ("corrupted", f"what came is not the published file .expected {MD5}., and was thrown away"),
        ("absent", "answered 404"),
    ],
)
def test_a_bad_file_is_not_kept(name: str, message: str, server: type[Server], cache: Path) -> None:
    with pytest.raises(DataError, match=f"Could not download {name}: .*{message}") as caught:
        fetch(source(server.url), name)
    assert files(cache) == []
    text = str(caught.value)
    assert f"fetch {server.url}/{name} by other means" in text
    assert "put it into DIR/things/" in text and "set LPOM_DATA=DIR, or pass data_dir=DIR" in text


def test_a_damaged_file_in_the_cache_is_fetched_again(server: type[Server], cache: Path) -> None:
    (cache / "things").mkdir(parents=True)
    (cache / "things" / "good").write_bytes(GOOD[:100])
    assert fetch(source(server.url), "good").read_bytes() == GOOD


def test_offline(cache: Path) -> None:
    with socket.socket() as closed:  # bound but not listening: connections are refused
        closed.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{closed.getsockname()[1]}"
        with pytest.raises(DataError, match="Could not download good: no connection to 127.0.0.1"):
            fetch(source(url), "good")
    assert files(cache) == []


def test_a_cache_that_cannot_be_written(server: type[Server], cache: Path) -> None:
    cache.write_text("a file where the folder should be")
    with pytest.raises(DataError, match="it cannot be written to"):
        fetch(source(server.url), "good")


def test_without_pooch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pooch", None)
    with pytest.raises(ImportError, match="Downloading good needs pooch: pip install pooch"):
        fetch(source("http://127.0.0.1:9"), "good")


def test_the_data_folder_comes_first(server: type[Server], tmp_path: Path) -> None:
    (tmp_path / "good").write_bytes(b"mine")
    assert find_or_fetch(source(server.url), "good", tmp_path) == tmp_path / "good"
    assert server.asked == []
    (tmp_path / "good").unlink()
    assert find_or_fetch(source(server.url), "good", tmp_path).read_bytes() == GOOD


def test_find_goes_through_the_folders_in_order(tmp_path: Path) -> None:
    (tmp_path / "b").write_bytes(b"")
    assert find(["a", "b"], ["things", ""], tmp_path) == tmp_path / "b"
    (tmp_path / "things").mkdir()
    (tmp_path / "things" / "b").write_bytes(b"")
    assert find(["a", "b"], ["things", ""], tmp_path) == tmp_path / "things" / "b"
    assert find(["c"], ["things", ""], tmp_path) is None
    assert find(["a"], [""]) is None


def test_the_data_folder_must_be_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DataError, match="data_dir should name a folder .* which is not there"):
        data_folder(tmp_path / "no")
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("LPOM_DATA", str(tmp_path / "file"))
    with pytest.raises(DataError, match="LPOM_DATA should name a folder .* which is a file"):
        data_folder()
    assert data_folder(tmp_path) == tmp_path
    monkeypatch.setenv("LPOM_DATA", "")
    assert data_folder() is None


def test_the_cache_is_in_the_usual_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LPOM_CACHE")
    assert cache_folder() == Path(pooch.os_cache("lpom"))


def test_every_published_file_has_a_hash_of_the_right_length() -> None:
    lengths = {"md5": 32, "sha256": 64}
    for published in (
        mnist.MNIST,
        mnist.FASHION_MNIST,
        cifar10.CIFAR10,
        svhn_module.SVHN,
    ):
        for name, known in published.hashes.items():
            algorithm, digest = known.split(":")
            assert len(digest) == lengths[algorithm]
            assert int(digest, 16) > 0
            assert published.url(name).startswith("http")


def test_a_whole_data_set_is_downloaded(
    server: type[Server], tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From a server to a `Dataset`, here CIFAR-10 with one image per batch."""
    import io
    import tarfile

    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        for k, name in enumerate((*cifar10.TRAIN_FILES, cifar10.TEST_FILE)):
            member = tarfile.TarInfo(f"{cifar10.FOLDER}/{name}")
            member.size = cifar10.RECORD
            tar.addfile(member, io.BytesIO(bytes([k]) * cifar10.RECORD))
    data = buffer.getvalue()
    server.files[cifar10.ARCHIVE] = data
    published = replace(
        cifar10.CIFAR10,
        base_url=server.url,
        hashes={cifar10.ARCHIVE: "md5:" + hashlib.md5(data).hexdigest()},
    )
    loaded = cifar10.load_cifar10(tmp_path, published)
    np.testing.assert_array_equal(loaded.y_train, range(5))
    np.testing.assert_array_equal(loaded.y_test, [5])
    np.testing.assert_allclose(loaded.picture_offset, [2 / 255] * 3, rtol=1e-6)
    assert files(cache) == [cifar10.ARCHIVE]
    assert download.find([cifar10.ARCHIVE], [""], tmp_path) is None
