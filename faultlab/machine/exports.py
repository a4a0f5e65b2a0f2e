"""Exported descriptors: who still has a copy open, in whichever process or socket.

What a rank gets is the write end of a pipe; the read end stays here. The kernel
reports a hang-up on the read end when the last copy of the write end is closed,
be it in a process, in a child of it, or in flight in a socket. So the lifetime
of exported memory is exact without anybody having to report a close.
"""

from __future__ import annotations

import os
import select

#: A descriptor as ``fstat`` identifies it in every process: ``(st_dev, st_ino)``.
Identity = tuple[int, int]


class Exports:
    """The read ends of all exported descriptors, and the object behind each."""

    def __init__(self) -> None:
        self._poll = select.poll()
        self._objects: dict[int, int] = {}
        self._ends: dict[Identity, int] = {}

    def open(self, number: int) -> int:
        """Export object ``number``: a new write end, the caller's to close."""
        read_end, write_end = os.pipe2(os.O_CLOEXEC)
        # No event but the hang-up, which poll reports unasked.
        self._poll.register(read_end, 0)
        self._objects[read_end] = number
        self._ends[_identity(read_end)] = read_end
        return write_end

    def object_behind(self, identity: Identity) -> int | None:
        """The object that an open descriptor exports; None if it exports none."""
        read_end = self._ends.get(identity)
        return None if read_end is None else self._objects[read_end]

    def take_closed(self) -> list[int]:
        """The objects of the descriptors that were closed since the last call,
        one entry for each descriptor."""
        closed = [read_end for read_end, _ in self._poll.poll(0)]
        return [self._forget(read_end) for read_end in closed]

    def close(self) -> None:
        """Close every read end; what is exported is known no longer."""
        for read_end in list(self._objects):
            self._forget(read_end)

    def _forget(self, read_end: int) -> int:
        del self._ends[_identity(read_end)]
        self._poll.unregister(read_end)
        os.close(read_end)
        return self._objects.pop(read_end)


def _identity(fd: int) -> Identity:
    found = os.fstat(fd)
    return found.st_dev, found.st_ino
