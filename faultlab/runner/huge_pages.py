"""Fewer page tables to copy: the forkserver's memory, gathered into huge pages.

A fork copies the page tables of everything that is not a file, and an exit takes them
down again; what Python has allocated after its imports is some hundred MiB in pages of
4 KiB. Gathered into pages of 2 MiB, a fork costs two thirds. Only speed depends on it: a kernel
that cannot do it (before 6.1, or without huge pages) is left as it is.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from pathlib import Path
from typing import Final

#: madvise(2), Linux 6.1: MADV_COLLAPSE.
_COLLAPSE: Final = 25
_HUGE_BYTES: Final = 2 << 20


def gather() -> None:
    """Gather the private memory of this process that belongs to no file."""
    madvise = ctypes.CDLL(None).madvise
    for start, end in _private():
        first, last = -(-start // _HUGE_BYTES) * _HUGE_BYTES, end // _HUGE_BYTES * _HUGE_BYTES
        if first < last:
            # Best effort: what is refused stays as it is.
            madvise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), _COLLAPSE)


def _private() -> Iterator[tuple[int, int]]:
    for line in Path("/proc/self/maps").read_text().splitlines():
        addresses, access, _, _, _, *name = line.split(maxsplit=5)
        if access == "rw-p" and (not name or name[0] == "[heap]"):
            start, end = addresses.split("-")
            yield int(start, 16), int(end, 16)
