"""Files are written whole or not at all, and where they were meant to be."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from lpom.files import check_writable, write_atomically


def test_a_file_is_written_over_in_one_go(tmp_path: Path) -> None:
    path = tmp_path / "file"
    for content in (b"old", b"new"):
        write_atomically(path, content)
        assert path.read_bytes() == content
    assert list(tmp_path.iterdir()) == [path]


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "real").write_bytes(b"old")
    (tmp_path / "link").symlink_to("real")
    write_atomically(tmp_path / "link", b"new")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real").read_bytes() == b"new"


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no named pipes")
def test_a_pipe_is_written_into(tmp_path: Path) -> None:
    pipe, read = tmp_path / "pipe", []
    os.mkfifo(pipe)
    reader = threading.Thread(target=lambda: read.append(pipe.read_bytes()), daemon=True)
    reader.start()
    write_atomically(pipe, b"through")
    reader.join(timeout=10)
    assert read == [b"through"] and pipe.is_fifo()


def test_errors_name_what_the_user_named(tmp_path: Path) -> None:
    missing = tmp_path / "nowhere"
    with pytest.raises(FileNotFoundError) as raised:
        write_atomically(missing / "file", b"")
    assert raised.value.filename == str(missing / "file")
    with pytest.raises(FileNotFoundError) as raised:
        check_writable(missing)
    assert raised.value.filename == str(missing)
