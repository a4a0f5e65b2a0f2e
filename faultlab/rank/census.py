"""What the operating system holds for this rank: the other half of the ledger.

Counted are descriptors by kind, sockets, threads that Python knows, entries of
the rank's own temporary folder, and mapped shared-memory files. What belongs
to the lab is left out.
"""

from __future__ import annotations

import os
import re
import tempfile
import threading
from collections import Counter
from pathlib import Path
from typing import Any

from faultlab import limits

#: The simulated machine's own: device memory is counted by its ledger.
_MACHINE_MEMORY = "/memfd:faultlab-"

_SHARED_MEMORY = re.compile(rb"/dev/shm/.*")


def take(lab_descriptors: set[int]) -> dict[str, Any]:
    """One census: plain data for a ``ledger`` event."""
    folder = tempfile.gettempdir()
    # The run's folder, the parent of its ranks' own, can itself lie in shared memory.
    ours = f"{Path(folder).parent}/"
    kinds: Counter[str] = Counter()
    for entry in os.listdir("/proc/self/fd"):
        if int(entry) in lab_descriptors:
            continue
        try:
            target = os.readlink(f"/proc/self/fd/{entry}")
        except OSError:
            continue  # The listing's own descriptor is closed by now.
        if not target.startswith(_MACHINE_MEMORY):
            kinds[_kind(target, ours)] += 1
    return {
        "descriptors": {kind: count for kind, count in sorted(kinds.items()) if kind != "socket"},
        "sockets": kinds["socket"],
        "threads": sorted(each.name for each in threading.enumerate()),
        "folder": sorted(os.listdir(folder))[: limits.LEDGER_OBJECTS],
        "shared_memory": _shared_memory(ours),
    }


def _kind(target: str, ours: str) -> str:
    if target.startswith("/memfd:"):
        return "memfd"
    if target.startswith("/dev/shm/") and not target.startswith(ours):
        return "shared-memory"
    if target.startswith("/"):
        return "file"
    return target.split(":", 1)[0]


def _shared_memory(ours: str) -> list[str]:
    maps = Path("/proc/self/maps").read_bytes()
    paths = {path.decode(errors="replace") for path in _SHARED_MEMORY.findall(maps)}
    return sorted(path for path in paths if not path.startswith(ours))
