"""What a session leaves behind, and how it goes away. Standard library only:
the warden runs this file alone, in a Python that has imported nothing else.

A session is a folder ``<temporary>/faultlab-<uid>/<session>`` with a lock that
its owner holds while it lives, and processes that carry its name in their
environment. Whoever finds the lock free may end the processes and remove the
folder: the warden at once, the next start of the lab at the latest.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import shutil
import signal
import sys
import time
from pathlib import Path

SESSION_VARIABLE = "FAULTLAB_SESSION"
LOCK_NAME = "lock"
PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when ``parent`` dies; leave if it already has."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def processes_of(session: str) -> list[int]:
    """The live processes, but for this one, whose environment names the session."""
    mark = f"{SESSION_VARIABLE}={session}".encode()
    found = []
    for entry in os.listdir("/proc"):
        if not entry.isdigit() or int(entry) == os.getpid():
            continue
        try:
            environment = Path("/proc", entry, "environ").read_bytes()
            # A zombie has no environment left; it is nobody's leftover.
        except OSError:
            continue
        if mark in environment.split(b"\0"):
            found.append(int(entry))
    return found


def end_processes(session: str, patience_s: float = 3.0) -> None:
    """SIGKILL every process of the session and wait until none is left."""
    deadline = time.monotonic() + patience_s
    while pids := processes_of(session):
        for pid in pids:
            try:
                os.kill(pid, signal.SIGKILL)
            except (ProcessLookupError, PermissionError):
                continue
        if time.monotonic() > deadline:
            return
        time.sleep(0.02)


def remove_session(folder: Path) -> None:
    """End the session's processes and remove its folder."""
    end_processes(folder.name)
    shutil.rmtree(folder, ignore_errors=True)


def hold_lock(folder: Path) -> int:
    """Take the session's lock; the descriptor holds it until it is closed."""
    fd = os.open(folder / LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return fd


def new_session(root: Path, name: str) -> tuple[Path, int]:
    """Remove what is abandoned under ``root``, and make a session's folder: the folder,
    and the descriptor that holds its lock.

    One process at a time: a folder whose lock is not taken yet looks abandoned.
    """
    turn = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(turn, fcntl.LOCK_EX)
        remove_abandoned(root)
        folder = root / name
        folder.mkdir(mode=0o700)
        return folder, hold_lock(folder)
    finally:
        os.close(turn)


def remove_abandoned(root: Path) -> list[str]:
    """Remove every session under ``root`` whose owner is dead; their names."""
    removed = []
    for folder in sorted(root.iterdir()) if root.is_dir() else []:
        try:
            if not folder.is_dir() or folder.stat().st_uid != os.getuid():
                continue
            fd = hold_lock(folder)
        except OSError:
            continue  # It is in use, or its owner has just removed it.
        try:
            remove_session(folder)
            removed.append(folder.name)
        finally:
            os.close(fd)
    return removed


def watch(folder: Path) -> None:
    """The warden: wait on standard input; at its end, without a word, clean up."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    said = os.read(0, 1)
    if said:
        return
    remove_session(folder)


if __name__ == "__main__":
    watch(Path(sys.argv[1]))
