"""The seam at the exchange of file descriptors (``flashinfer.comm.fd_exchange``, and that
of the subject ``hardened``).

The exchange itself is theirs, over real sockets with real descriptors.
The lab replaces names in the module, ``socket``, ``threading`` and
``time``, so that it hears who connects, sends and receives, and so that the
time-outs count machine time: a wait that everybody is in costs nothing,
and still the side whose time-out is earlier gives up first.
"""

from __future__ import annotations

import importlib
import os
import re
import socket as real_socket
import threading as real_threading
import time as real_time
from pathlib import Path
from types import ModuleType
from typing import Any

from faultlab.seam.base import Seam
from faultlab.seam.conventions import RAISING

#: Named, not imported: a seam knows no subject, and the module has to be at this seam whoever loads it.
_HARDENED = "faultlab.subjects.hardened.descriptors"
_PEER_IN_PATH = re.compile(r"cuda_fd_\w+?_(\d+)_(\d+)_")


def install(seam: Seam) -> None:
    """Put the lab's names into the modules."""
    from flashinfer.comm import fd_exchange

    fd_exchange.socket = _module(real_socket, socket=_socket_class(seam, fd_exchange))
    fd_exchange.threading = _module(real_threading, Thread=_thread_class(seam))
    fd_exchange.time = _module(real_time, monotonic=lambda: seam.link.now())
    hardened: Any = importlib.import_module(_HARDENED)
    hardened.socket = _module(real_socket, socket=_socket_class(seam, hardened))


def _module(original: ModuleType, **names: Any) -> ModuleType:
    """The module with some of its names replaced."""
    made = ModuleType(original.__name__)
    made.__dict__.update(original.__dict__)
    made.__dict__.update(names)
    return made


def _peer(path: Any) -> list[int]:
    """The rank whose socket lies at this path, as FlashInfer names its folder."""
    match = _PEER_IN_PATH.search(str(path))
    return [int(match[2])] if match else []


def _socket_class(seam: Seam, module: Any) -> type:
    class Socket(real_socket.socket):
        """A socket whose waits are heard, and whose time-outs are machine time."""

        _machine_timeout_s: float | None = None
        _retry: Any = None

        def settimeout(self, value: float | None) -> None:
            self._machine_timeout_s = value

        def connect(self, address: Any) -> None:
            if self._retry is not None:
                self._try_again(address)
                return
            seam.injector.call(
                "fd.connect", lambda: self._first_try(address), RAISING, argument=str(_peer(address))
            )

        def _first_try(self, address: Any) -> None:
            try:
                super().connect(address)
            except (ConnectionRefusedError, FileNotFoundError):
                # FlashInfer polls every 10 ms until its own deadline: one wait.
                self._retry = seam.injector.waiting(
                    "fd.connect",
                    {
                        "kind": "descriptor",
                        "needs": _peer(address),
                        "deadline": seam.link.now() + module._TIMEOUT_S,
                        "text": f"connects to {Path(str(address)).parent.name}",
                    },
                )
                self._retry.__enter__()
                raise

        def _try_again(self, address: Any) -> None:
            super().connect(address)
            self._end_retry()

        def _end_retry(self) -> None:
            if self._retry is not None:
                self._retry.__exit__(None, None, None)
                self._retry = None

        def close(self) -> None:
            self._end_retry()
            super().close()

        def sendmsg(self, *args: Any, **kwargs: Any) -> Any:
            sent = seam.injector.call(
                "fd.send", lambda: super(Socket, self).sendmsg(*args, **kwargs), RAISING
            )
            return 1 if sent is None else sent

        def accept(self) -> Any:
            return seam.injector.call("fd.recv", self._accept_in_time, RAISING)

        def _accept_in_time(self) -> Any:
            timeout_s = self._machine_timeout_s
            deadline = None if timeout_s is None else seam.link.now() + timeout_s
            wait: dict[str, Any] = {
                "kind": "descriptor",
                "needs": [],
                "deadline": deadline,
                "text": "waits for a peer's descriptor",
            }
            with seam.injector.waiting("fd.recv", wait) as identity:
                if not seam.link.wait_readable(self.fileno(), identity):
                    raise TimeoutError("timed out")
            fd, address = self._accept()  # type: ignore[attr-defined]
            return Socket(self.family, self.type, self.proto, fileno=fd), address

    return Socket


def _thread_class(seam: Seam) -> type:
    class Thread(real_threading.Thread):
        """A thread whose end can be waited for in machine time."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self._ended, self._ends = os.pipe()
            seam.link.descriptors.update((self._ended, self._ends))

        def run(self) -> None:
            try:
                super().run()
            finally:
                seam.link.leave_thread()
                seam.link.descriptors.discard(self._ends)
                os.close(self._ends)

        def join(self, timeout: float | None = None) -> None:
            deadline = None if timeout is None else seam.link.now() + timeout
            wait: dict[str, Any] = {
                "kind": "thread",
                "needs": [],
                "deadline": deadline,
                "text": f"waits for its thread {self.name}",
            }
            with seam.injector.waiting("fd.recv", wait) as identity:
                if not seam.link.wait_readable(self._ended, identity):
                    return
            super().join()

        def __del__(self) -> None:
            seam.link.descriptors.discard(self._ended)
            os.close(self._ended)

    return Thread
