"""Pages of simulated device memory, brought in by one call instead of a fault for each.

A fault costs some microseconds, more in a virtual machine, and a workspace has
thousands of pages that a fill or a kernel touches one after the other.
"""

from __future__ import annotations

import ctypes
import mmap
from typing import Final

#: madvise(2), since Linux 5.14; an older kernel refuses it, and the faults come one by one.
_MADV_POPULATE_WRITE: Final = 23
#: Below this the faults are cheaper than the call.
_WORTH_A_CALL_BYTES: Final = 16 * mmap.PAGESIZE

_libc = ctypes.CDLL(None)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def bring_in(view: memoryview) -> None:
    """Bring in the pages of writable bytes that are about to be touched."""
    if view.nbytes < _WORTH_A_CALL_BYTES:
        return
    address = ctypes.addressof(ctypes.c_char.from_buffer(view))
    start = address & -mmap.PAGESIZE
    _libc.madvise(start, address + view.nbytes - start, _MADV_POPULATE_WRITE)
