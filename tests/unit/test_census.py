"""What a rank's census counts as its own, wherever the lab's own files lie."""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from faultlab.rank import census


@pytest.fixture
def run_folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A run's folder in shared memory, and a rank's own in it as the place for temporary files."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        own = Path(folder) / "t0"
        own.mkdir()
        monkeypatch.setattr(tempfile, "tempdir", str(own))
        yield Path(folder)


def test_a_mapped_file_of_the_run_is_not_the_ranks_shared_memory(run_folder: Path) -> None:
    before = census.take(set())
    with (run_folder / "clock").open("w+b") as file:
        file.truncate(4096)
        with mmap.mmap(file.fileno(), 4096):
            after = census.take(set())
    assert after["shared_memory"] == before["shared_memory"]
    assert after["descriptors"].get("shared-memory") == before["descriptors"].get("shared-memory")
    # The open file and the mapping's own duplicate of it.
    assert after["descriptors"]["file"] == before["descriptors"].get("file", 0) + 2


def test_shared_memory_of_the_subject_is_told_by_name(run_folder: Path) -> None:
    before = census.take(set())
    with tempfile.NamedTemporaryFile(dir="/dev/shm") as file:
        file.truncate(4096)
        with mmap.mmap(file.fileno(), 4096):
            after = census.take(set())
    assert set(after["shared_memory"]) - set(before["shared_memory"]) == {file.name}
    gained = after["descriptors"]["shared-memory"] - before["descriptors"].get("shared-memory", 0)
    assert gained == 2


def test_what_is_left_in_the_ranks_own_folder_is_told(run_folder: Path) -> None:
    (run_folder / "t0" / "left").touch()
    assert census.take(set())["folder"] == ["left"]
    assert os.listdir(run_folder) == ["t0"]
