"""Machine time: one clock for the supervisor and every rank of a run.

Machine time is CLOCK_MONOTONIC, which all processes of a host share, less a
base that lies in a file every rank maps. The supervisor moves time forward by
lowering the base: only when everybody waits, so nobody is overtaken.
"""

from __future__ import annotations

import mmap
import os
import struct
import time
from pathlib import Path
from typing import Final

_FORMAT: Final = "d"
_SIZE: Final = struct.calcsize(_FORMAT)


class MachineClock:
    """Reads machine time; ``advance_to`` is the supervisor's alone."""

    def __init__(self, path: Path, *, create: bool = False) -> None:
        flags = os.O_RDWR | (os.O_CREAT | os.O_EXCL if create else 0)
        fd = os.open(path, flags | os.O_CLOEXEC, 0o600)
        try:
            if create:
                os.ftruncate(fd, _SIZE)
            self._memory = mmap.mmap(fd, _SIZE)
        finally:
            os.close(fd)
        #: One number, read and written whole: it is aligned.
        self._base = memoryview(self._memory).cast(_FORMAT)
        if create:
            self._base[0] = time.monotonic()

    def now(self) -> float:
        """Seconds of machine time since the run began."""
        return time.monotonic() - self._base[0]

    def advance_to(self, machine_s: float) -> None:
        """Move machine time forward; it never goes back."""
        base = time.monotonic() - machine_s
        if base < self._base[0]:
            self._base[0] = base

    def close(self) -> None:
        """Unmap the clock."""
        self._base.release()
        self._memory.close()
