"""Messages between a rank and its supervisor.

One AF_UNIX SOCK_SEQPACKET connection per thread of a rank: messages keep their
bounds, arrive in the order in which the thread sent them, and can carry file
descriptors. From a rank come

    ["hello", {…}]       its first message: rank, pid and thread; not answered
    [method, {…}]        a request; the thread waits for its reply

and to a rank go

    ["reply", value]     with the descriptors that belong to it
    ["error", text]      the request was refused by the lab itself
    ["wake", id]         the deadline of wait ``id`` has passed
"""

from __future__ import annotations

import array
import socket
import threading
from collections.abc import Sequence
from typing import Final

from faultlab import limits
from faultlab.errors import WireError

_FD_SIZE: Final = array.array("i").itemsize
_FDS_MAX: Final = 200
_ANCILLARY_BYTES: Final = socket.CMSG_SPACE(_FDS_MAX * _FD_SIZE)
#: A buffer for each thread: one made for every message is mapped and unmapped every time.
_local = threading.local()


def send(connection: socket.socket, payload: bytes, fds: Sequence[int] = ()) -> None:
    """Send one message. Raises WireError if the other side is gone."""
    assert len(fds) <= _FDS_MAX, len(fds)
    if len(payload) > limits.MESSAGE_BYTES:
        raise WireError(f"a message of {len(payload)} bytes; the limit is {limits.MESSAGE_BYTES}")
    ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
    try:
        connection.sendmsg([payload], ancillary)
    except OSError as error:
        raise WireError(f"the other side is gone: {error}") from None


def receive(connection: socket.socket) -> tuple[bytes, list[int]]:
    """One message and its descriptors; an empty message means the end."""
    buffer = getattr(_local, "buffer", None)
    if buffer is None:
        buffer = _local.buffer = bytearray(limits.MESSAGE_BYTES)
    size, ancillary, _, _ = connection.recvmsg_into([buffer], _ANCILLARY_BYTES)
    fds: list[int] = []
    for level, kind, content in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            received = array.array("i")
            received.frombytes(content[: len(content) - len(content) % _FD_SIZE])
            fds.extend(received)
    return bytes(memoryview(buffer)[:size]), fds


def seqpacket() -> socket.socket:
    """A fresh AF_UNIX SOCK_SEQPACKET socket with room for a full message."""
    made = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2 * limits.MESSAGE_BYTES)
    return made
