"""A rank's events, and its link to its supervisor.

An event is a line of the rank's own file, written at once and with one call, so
that it is there whatever ends the process next. The supervisor follows the file.

Every thread has a connection of its own, made at its first event: by it the supervisor
knows which threads there are, and a blocked thread never holds up another. Requests are
answered by the supervisor: the shared half of a simulated machine, sleeping in
machine time, hanging for good, and meeting the other ranks.
"""

from __future__ import annotations

import itertools
import os
import select
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

from faultlab import events, limits
from faultlab.errors import LabError, WireError
from faultlab.runner import wire
from faultlab.runner.clock import MachineClock


class Link:
    """The connection of one rank. Thread-safe; one object per process."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._folder = folder
        self._rank = rank
        self._local = threading.local()
        self._numbers = itertools.count()
        self.step = -1
        self.clock = MachineClock(folder / "clock")
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        self._file = os.open(events.rank_file(folder, rank), flags, 0o600)
        #: Descriptors that belong to the lab and are nobody's leak.
        self.descriptors: set[int] = {self._file}

    def _connection(self) -> Any:
        connection = getattr(self._local, "connection", None)
        if connection is None:
            connection = wire.seqpacket()
            here = os.open(self._folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                # Through /proc, so that a long folder name fits a socket address.
                connection.connect(f"/proc/self/fd/{here}/supervisor")
            finally:
                os.close(here)
            self.descriptors.add(connection.fileno())
            self._local.name = _thread_name()
            hello = ["hello", {"rank": self._rank, "pid": os.getpid(), "thread": self._local.name}]
            wire.send(connection, events.dump(hello))
            self._local.connection = connection
        return connection

    def leave_thread(self) -> None:
        """The calling thread ends: its connection goes with it."""
        connection = getattr(self._local, "connection", None)
        if connection is not None:
            self.descriptors.discard(connection.fileno())
            connection.close()
            self._local.connection = None

    def now(self) -> float:
        """Machine time."""
        return self.clock.now()

    def emit(self, kind: str, **fields: Any) -> None:
        """Record one event of the calling thread."""
        assert kind in events.RANK_KINDS, kind
        number = next(self._numbers)
        if number >= limits.EVENTS_PER_RANK:
            raise LabError(
                f"rank {self._rank} recorded {number} events; the limit is {limits.EVENTS_PER_RANK}"
            )
        local = self._local
        if getattr(local, "connection", None) is None:
            # Before its first event is there to be read, the supervisor must know of the thread.
            self._connection()
        event = {
            "v": events.VERSION,
            "n": number,
            "t": round(self.now(), 6),
            "kind": kind,
            "thread": local.name,
            "step": self.step,
            **fields,
        }
        data = events.dump(event)
        if len(data) > limits.MESSAGE_BYTES:
            raise LabError(f"an event of {len(data)} bytes; the limit is {limits.MESSAGE_BYTES}")
        os.write(self._file, data + b"\n")

    def request(
        self, method: str, arguments: dict[str, Any] | None = None, fds: Sequence[int] = ()
    ) -> tuple[Any, list[int]]:
        """Ask the supervisor and wait for its answer, however long it takes."""
        connection = self._connection()
        wire.send(connection, events.dump([method, arguments or {}]), fds)
        while True:
            data, received = wire.receive(connection)
            if not data:
                raise WireError("the supervisor is gone")
            kind, value = cast("list[Any]", events.load(data))
            if kind == "wake":
                # The deadline of a wait that had already ended.
                continue
            if kind == "error":
                raise LabError(str(value))
            return value, received

    def sleep(self, seconds: float) -> None:
        """Sleep in machine time."""
        self.request("sleep", {"until": self.now() + seconds})

    def hang(self, text: str) -> None:
        """Never return: the supervisor ends the run."""
        self.request("hang", {"text": text})
        raise AssertionError("the supervisor answered a hang")

    def meet(self, label: str) -> list[int]:
        """Wait for every live rank to come here; the ranks that are dead."""
        value, _ = self.request("meet", {"label": label})
        return cast("list[int]", value)

    def wait_readable(self, fd: int, identity: int) -> bool:
        """Wait until ``fd`` can be read; False if the deadline of wait
        ``identity``, which the caller has announced, passed first."""
        connection = self._connection()
        while True:
            ready, _, _ = select.select([fd, connection], [], [])
            if fd in ready:
                return True
            data, _ = wire.receive(connection)
            if not data:
                raise WireError("the supervisor is gone")
            kind, value = events.load(data)
            if kind == "wake" and value == identity:
                return False


def _thread_name() -> str:
    name = threading.current_thread().name
    return "main" if name == "MainThread" else name
