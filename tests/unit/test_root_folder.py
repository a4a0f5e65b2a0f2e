"""Where sessions lie."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

from faultlab import limits
from faultlab.runner import session

NAME = f"faultlab-{os.getuid()}"


@pytest.fixture(autouse=True)
def no_place_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TMPDIR", raising=False)
    monkeypatch.setattr(tempfile, "tempdir", "/tmp")


def with_shared_memory(monkeypatch: pytest.MonkeyPatch, size_bytes: int) -> None:
    def statvfs(path: object) -> os.statvfs_result:
        assert path == Path("/dev/shm")
        return os.statvfs_result((4096, 4096, size_bytes // 4096, 0, 0, 0, 0, 0, 0, 255))

    monkeypatch.setattr(os, "access", lambda path, mode: True)
    monkeypatch.setattr(os, "statvfs", statvfs)


def test_in_shared_memory_where_that_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    with_shared_memory(monkeypatch, limits.SHARED_MEMORY_MIN_BYTES)
    assert session.root_folder() == Path("/dev/shm") / NAME


def test_on_disk_where_shared_memory_is_small(monkeypatch: pytest.MonkeyPatch) -> None:
    with_shared_memory(monkeypatch, 64 << 20)
    assert session.root_folder() == Path("/tmp") / NAME


def test_on_disk_where_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "_SHARED_MEMORY", Path("/nowhere/at/all"))
    assert session.root_folder() == Path("/tmp") / NAME


def test_where_tmpdir_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", "/var/tmp")
    monkeypatch.setattr(tempfile, "tempdir", "/var/tmp")
    assert session.root_folder() == Path("/var/tmp") / NAME


def test_a_name_too_long_for_sockets_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    long = "/var/" + "x" * 60
    monkeypatch.setenv("TMPDIR", long)
    monkeypatch.setattr(tempfile, "tempdir", long)
    assert session.root_folder() == Path("/tmp") / NAME
