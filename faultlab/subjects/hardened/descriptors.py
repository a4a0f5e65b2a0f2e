"""Descriptors from rank to rank, over sockets, with nothing to wait for.

FlashInfer's exchange connects until the peer listens and accepts in a thread,
each for up to 30 s. Here every rank is known to listen before anybody connects,
and everything is known to be sent before anybody accepts, so there is no retry,
no thread and no wait: a time-out is left only for a peer that sent and lied.
"""

from __future__ import annotations

import os
import socket
import tempfile
from contextlib import ExitStack
from pathlib import Path

from faultlab.subjects.hardened.steps import Setup

_TIMEOUT_S = 5.0
_RANK_BYTES = 4


class Descriptors:
    """Descriptors that this process holds, by the rank they came from."""

    def __init__(self) -> None:
        self.by_rank: dict[int, int] = {}

    def close(self) -> None:
        """Close them all, once."""
        while self.by_rank:
            _, descriptor = self.by_rank.popitem()
            os.close(descriptor)


def pass_descriptors(setup: Setup, what: str, held: Descriptors, owners: list[int]) -> None:
    """Give every rank the descriptors of all ``owners``. ``held`` has the own one, if
    this rank owns one, and has all of them afterwards; it is for the caller to close.

    Raises StepFailed on every rank, or GroupFailed; no socket and no file is left.
    """
    senders = [owner for owner in owners if owner != setup.rank]
    with ExitStack() as closing:
        own = setup.together(f"listen for {what}", lambda: _listen(closing, setup) if senders else None)
        path = "" if own is None else str(own.getsockname())
        paths = setup.gather(f"tell the sockets for {what}", path)
        setup.together(f"send {what}", lambda: _send(setup, held, paths))
        setup.together(f"receive {what}", lambda: _receive(own, held, senders))


def _listen(closing: ExitStack, setup: Setup) -> socket.socket:
    """A socket in a folder of its own, with room for every peer's connection."""
    name = f"cuda_fd_pass_{os.getpid()}_{setup.rank}_"
    # What closes comes after a vote: it must not fail on one rank alone.
    folder = closing.enter_context(tempfile.TemporaryDirectory(prefix=name, ignore_cleanup_errors=True))
    listener = closing.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
    listener.bind(str(Path(folder) / "fd.sock"))
    listener.listen(setup.world_size)
    listener.settimeout(_TIMEOUT_S)
    return listener


def _send(setup: Setup, held: Descriptors, paths: list[str]) -> None:
    """The own descriptor to every peer that listens; a rank without one sends nothing."""
    if setup.rank not in held.by_rank:
        return
    for peer, path in enumerate(paths):
        if peer == setup.rank:
            continue
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(_TIMEOUT_S)
            connection.connect(path)
            whose = setup.rank.to_bytes(_RANK_BYTES, "little")
            socket.send_fds(connection, [whose], [held.by_rank[setup.rank]])


def _receive(listener: socket.socket | None, held: Descriptors, senders: list[int]) -> None:
    missing = set(senders)
    while missing and listener is not None:
        connection, _ = listener.accept()
        with connection:
            connection.settimeout(_TIMEOUT_S)
            whose, descriptors, _, _ = socket.recv_fds(connection, _RANK_BYTES, 1)
        sender = int.from_bytes(whose, "little")
        if len(whose) != _RANK_BYTES or len(descriptors) != 1 or sender not in missing:
            for descriptor in descriptors:
                os.close(descriptor)
            raise RuntimeError(f"no descriptor came from a peer; {sorted(missing)} are missing")
        held.by_rank[sender] = descriptors[0]
        missing.remove(sender)
