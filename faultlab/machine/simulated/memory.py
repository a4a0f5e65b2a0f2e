"""The driver's calls on private memory, and every copy and fill.

The runtime's calls (``runtime``) share these functions: both libraries answer
alike, each in its own convention. Addresses that cannot be used answer
INVALID_VALUE here (recorded: ``memcpy.*``, ``memset.*``); only a kernel that
follows one poisons the context.
"""

# ruff: noqa: N802, N803 - the names are the driver's, so that they can be given as keywords

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

import torch
from cuda.bindings import driver as cuda

from faultlab.machine.simulated.addresses import BASE, PAGE
from faultlab.machine.simulated.answers import OK, answer, context_call, fail
from faultlab.machine.simulated.pages import bring_in

if TYPE_CHECKING:
    from faultlab.machine.simulated.machine import SimulatedMachine

_INVALID: Final = "CUDA_ERROR_INVALID_VALUE"
#: What fills memory with one value, by the bytes of the value.
_FILLERS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


# -------------------------------------------------- shared with the runtime


def allocate(machine: SimulatedMachine, size: int) -> tuple[str, int]:
    """Private memory on the current device: the error's name, or empty and the address."""
    error = machine.sticky or machine.unsafe_in_capture(waits=False)
    if error:
        return error, 0
    if size <= 0:
        return _INVALID, 0
    key = machine.new_number()
    fits, _ = machine.board.call("charge", {"gpu": machine.current_gpu, "key": key, "size_bytes": size})
    made = machine.addresses.allocate(size, key) if fits else None
    if made is None:
        machine.board.call("uncharge", {"key": key})
        return "CUDA_ERROR_OUT_OF_MEMORY", 0
    made.id = machine.made("allocation", size)
    return "", made.address


def free(machine: SimulatedMachine, address: int) -> str:
    """Give private memory back: the error's name, or empty. Of a null pointer nothing
    is given back, but a sticky error is reported all the same (llvm-project PR 213184)."""
    if machine.sticky or not address:
        return machine.sticky
    # Not recorded: the programming guide counts it with cudaMalloc as unsafe in a capture.
    error = machine.unsafe_in_capture(waits=False)
    if error:
        return error
    found = machine.addresses.free_allocation(address)
    if found is None:
        return _INVALID
    machine.board.call("uncharge", {"key": found.key})
    machine.gone(found.id)
    return ""


def fill(machine: SimulatedMachine, address: int, value: int, count: int, width: int) -> str:
    """Fill device memory with ``count`` values of ``width`` bytes: the error's name, or empty."""
    if machine.sticky:
        return machine.sticky
    views = machine.views(address, count * width) if count >= 0 else None
    if views is None or address % width:
        return _INVALID
    bits = 8 * width
    unsigned = value % (1 << bits)
    # torch fills fast, but has signed types only for what is wider than a byte.
    signed = unsigned - (1 << bits) if width > 1 and unsigned >> (bits - 1) else unsigned
    for view in views:
        bring_in(view)
        torch.frombuffer(view, dtype=_FILLERS[width]).fill_(signed)
    return ""


def copy(machine: SimulatedMachine, to: Any, source: Any, count: int) -> str:
    """Copy ``count`` bytes between addresses, or objects with a buffer, of either side:
    the error's name, or empty. Which side an address is on shows by its value."""
    if machine.sticky:
        return machine.sticky
    if count < 0:
        return _INVALID
    sources = _views(machine, source, count, write=False)
    targets = _views(machine, to, count, write=True)
    if sources is None or targets is None:
        return _INVALID
    data = memoryview(b"".join(sources))
    for target in targets:
        target[:] = data[: len(target)]
        data = data[len(target) :]
    return ""


def _views(machine: SimulatedMachine, where: Any, count: int, *, write: bool) -> list[memoryview] | None:
    if not count:
        return []
    try:
        host = memoryview(where).cast("B")
        return [host[:count]] if len(host) >= count else None
    except TypeError:
        address = int(where)
    if address >= BASE:
        return machine.views(address, count, write=write)
    if address < PAGE:
        return None
    # A host address is the caller's word, as it is for the real library. A wild one
    # below BASE may crash, where the recording has INVALID_VALUE for a destination.
    return [memoryview((ctypes.c_char * count).from_address(address)).cast("B")]


# -------------------------------------------------------------------- driver


@context_call
def cuMemAlloc(machine: SimulatedMachine, bytesize: Any) -> Any:
    """Private memory of the current device."""
    error, address = allocate(machine, int(bytesize))
    return fail("cuMemAlloc", error) if error else (OK, cuda.CUdeviceptr(address))


@context_call
def cuMemFree(machine: SimulatedMachine, dptr: Any) -> Any:
    """Gives back what cuMemAlloc made; nothing else is taken (recorded)."""
    return answer("cuMemFree", free(machine, int(dptr)))


@context_call
def cuMemcpyHtoD(machine: SimulatedMachine, dstDevice: Any, srcHost: Any, ByteCount: Any) -> Any:
    """Host to device; the destination must be a device address (recorded: ``memcpy.wild_dst``)."""
    return answer("cuMemcpyHtoD", _to_or_from_device(machine, dstDevice, dstDevice, srcHost, ByteCount))


@context_call
def cuMemcpyDtoH(machine: SimulatedMachine, dstHost: Any, srcDevice: Any, ByteCount: Any) -> Any:
    """Device to host; the source must be a device address."""
    return answer("cuMemcpyDtoH", _to_or_from_device(machine, srcDevice, dstHost, srcDevice, ByteCount))


def _to_or_from_device(machine: SimulatedMachine, device: Any, to: Any, source: Any, count: Any) -> str:
    if not machine.sticky and int(device) < BASE:
        return _INVALID
    return copy(machine, to, source, int(count))


def _memset(width: int) -> Callable[[SimulatedMachine, str, Any, Any, Any], Any]:
    def memset(machine: SimulatedMachine, site: str, address: Any, value: Any, count: Any) -> Any:
        return answer(site, fill(machine, int(address), int(value), int(count), width))

    return memset


_BYTES, _SHORTS, _WORDS = _memset(1), _memset(2), _memset(4)


@context_call
def cuMemsetD8(machine: SimulatedMachine, dstDevice: Any, uc: Any, N: Any) -> Any:
    """``N`` bytes."""
    return _BYTES(machine, "cuMemsetD8", dstDevice, uc, N)


@context_call
def cuMemsetD16(machine: SimulatedMachine, dstDevice: Any, us: Any, N: Any) -> Any:
    """``N`` values of 2 bytes; the address must be a multiple of 2."""
    return _SHORTS(machine, "cuMemsetD16", dstDevice, us, N)


@context_call
def cuMemsetD32(machine: SimulatedMachine, dstDevice: Any, ui: Any, N: Any) -> Any:
    """``N`` values of 4 bytes; the address must be a multiple of 4 (recorded)."""
    return _WORDS(machine, "cuMemsetD32", dstDevice, ui, N)
