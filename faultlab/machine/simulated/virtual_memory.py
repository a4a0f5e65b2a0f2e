"""The driver's calls on physical memory and on addresses (``cuMem…``, the VMM calls).

None of them needs a context, and all of them go on answering after a kernel's
error has poisoned it (recorded: ``sticky700.*``), which is why half-built objects
can be taken apart even then.
"""

# ruff: noqa: N802, N803 - the names are the driver's, so that they can be given as keywords

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, Final

from cuda.bindings import driver as cuda

from faultlab.machine.simulated.addresses import GRANULARITY, Mapping, may_reserve
from faultlab.machine.simulated.answers import OK, answer, driver_call, fail

if TYPE_CHECKING:
    from faultlab.machine.simulated.machine import Handle, SimulatedMachine

FABRIC: Final = int(cuda.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_FABRIC)
#: What tells a handle of this machine from any other 64 bytes.
_MARK: Final = b"faultlab"
_FABRIC_BYTES: Final = 64
_INVALID: Final = "CUDA_ERROR_INVALID_VALUE"


@driver_call
def cuMemGetAllocationGranularity(machine: SimulatedMachine, prop: Any, option: Any) -> Any:
    """Recorded: 2 MiB for both options, and a made-up device is not noticed here."""
    return (OK, GRANULARITY)


@driver_call
def cuMemCreate(machine: SimulatedMachine, size: Any, prop: Any, flags: int) -> Any:
    """Physical memory of one device, charged to it at once."""
    site, size = "cuMemCreate", int(size)
    if flags or size <= 0 or size % GRANULARITY:
        return fail(site, _INVALID)
    if not machine.has_device(prop.location.id):
        return fail(site, "CUDA_ERROR_INVALID_DEVICE")
    types = int(prop.requestedHandleTypes)
    if types & FABRIC and machine.topology.does.fabric_handles != "works":
        return fail(site, machine.topology.does.fabric_handles)
    gpu = machine.gpu_of(prop.location.id)
    number, fds = machine.board.call("create", {"gpu": gpu, "size_bytes": size})
    if number is None:
        return fail(site, "CUDA_ERROR_OUT_OF_MEMORY")
    machine.keep_memory(number, fds[0], size)
    return (OK, machine.new_handle(number, size, gpu, types=types))


# ------------------------------------------------------------------- sharing


@driver_call
def cuMemExportToShareableHandle(machine: SimulatedMachine, handle: Any, handleType: Any, flags: int) -> Any:
    """A descriptor or 64 bytes; of an imported handle neither (recorded), and of
    a released one the driver dies (recorded)."""
    site = "cuMemExportToShareableHandle"
    found = _handle_or_death(machine, handle)
    if found is None or flags or not found.types & int(handleType):
        return fail(site, _INVALID)
    if int(handleType) == FABRIC:
        return _export_fabric(machine, site, found)
    error, fds = machine.board.call("export", {"number": found.number})
    return fail(site, error) if error else (OK, fds[0])


def _export_fabric(machine: SimulatedMachine, site: str, found: Handle) -> Any:
    """A multicast object is made without asking for a channel; its export asks
    (open-gpu-kernel-modules, mem_export.c)."""
    if machine.topology.does.fabric_handles != "works":
        return fail(site, machine.topology.does.fabric_handles)
    made = cuda.CUmemFabricHandle()
    made.data = (found.number.to_bytes(8, "little") + _MARK).ljust(_FABRIC_BYTES, b"\0")
    return (OK, made)


@driver_call
def cuMemImportFromShareableHandle(machine: SimulatedMachine, osHandle: Any, shHandleType: Any) -> Any:
    """A new handle to what another process, or this one, has exported."""
    if int(shHandleType) == FABRIC:
        return _import_fabric(machine, bytes(getattr(osHandle, "data", osHandle)))
    try:
        found = os.fstat(int(osHandle))
    except OSError:
        return fail("cuMemImportFromShareableHandle", "CUDA_ERROR_UNKNOWN")
    reply = machine.board.call("import", {"device": found.st_dev, "inode": found.st_ino})
    # Recorded: a descriptor of anything else answers 999 as well.
    return _imported(machine, reply, "CUDA_ERROR_UNKNOWN")


def _import_fabric(machine: SimulatedMachine, data: bytes) -> Any:
    # 400 for what this machine did not export, or no longer has (pytorch#178989).
    unknown = "CUDA_ERROR_INVALID_HANDLE"
    if len(data) != _FABRIC_BYTES or data[8:16] != _MARK:
        return fail("cuMemImportFromShareableHandle", unknown)
    reply = machine.board.call("import_number", {"number": int.from_bytes(data[:8], "little")})
    return _imported(machine, reply, unknown)


def _imported(machine: SimulatedMachine, reply: tuple[Any, list[int]], unknown: str) -> Any:
    told, fds = reply
    error = unknown if told is None else told["error"]
    if error:
        return fail("cuMemImportFromShareableHandle", error)
    if fds:
        machine.keep_memory(told["number"], fds[0], told["size_bytes"])
    # No types: an imported handle cannot be exported again (recorded).
    handle = machine.new_handle(told["number"], told["size_bytes"], told["gpu"], types=0)
    return (OK, handle)


@driver_call
def cuMemRelease(machine: SimulatedMachine, handle: Any) -> Any:
    """One reference goes; the memory lives on while anything else refers to it."""
    found = machine.handles.pop(int(handle), None)
    if found is None:
        return fail("cuMemRelease", _INVALID)
    machine.board.call("release", {"number": found.number})
    machine.gone(found.id)
    machine.drop_memory(found.number)
    return (OK,)


def _handle_or_death(machine: SimulatedMachine, handle: Any) -> Handle | None:
    """The handle behind a value; where there is none the real driver dies."""
    found = machine.handles.get(int(handle))
    if found is None:
        machine.segfault()
    return found


# ----------------------------------------------------------------- addresses


@driver_call
def cuMemAddressReserve(machine: SimulatedMachine, size: Any, alignment: Any, addr: Any, flags: int) -> Any:
    """Addresses without memory; ``addr`` is a hint that nobody has to take (cuda.h)."""
    site = "cuMemAddressReserve"
    if flags or not may_reserve(int(size), int(alignment)):
        return fail(site, _INVALID)
    made = machine.addresses.reserve(int(size), int(alignment))
    if made is None:
        return fail(site, "CUDA_ERROR_OUT_OF_MEMORY")
    made.id = machine.made("range", made.size_bytes)
    return (OK, cuda.CUdeviceptr(made.address))


@driver_call
def cuMemAddressFree(machine: SimulatedMachine, ptr: Any, size: Any) -> Any:
    """Gives back one whole range with nothing mapped in it."""
    found = machine.addresses.free(int(ptr), int(size))
    if found is None:
        return fail("cuMemAddressFree", _INVALID)
    machine.gone(found.id)
    return (OK,)


@driver_call
def cuMemMap(machine: SimulatedMachine, ptr: Any, size: Any, offset: Any, handle: Any, flags: int) -> Any:
    """Memory gets addresses, not yet access. With a made-up handle the driver dies
    (recorded); of a multicast object the call blocks until all devices were added."""
    site, address, size = "cuMemMap", int(ptr), int(size)
    found = _handle_or_death(machine, handle)
    owner = machine.addresses.range_at(address)
    within = machine.addresses.mappings_within(address, size)
    if found is None or owner is None or within is None:
        return fail(site, _INVALID)
    if flags or within or address % GRANULARITY:
        return fail(site, _INVALID)
    if int(offset) or not _may_map(found, size):
        return fail(site, "CUDA_ERROR_NOT_SUPPORTED")
    error, _ = machine.board.call("map", {"number": found.number})
    if error:
        return fail(site, error)
    identity = machine.made("mapping", size, (owner.id, found.id))
    owner.mappings[address] = Mapping(identity, address, size, found.number, found.gpu, found.multicast)
    return (OK,)


def _may_map(found: Handle, size: int) -> bool:
    """Recorded: of memory never a part. Of a multicast object the first granules may be
    mapped alone: libraries round its size up (TensorRT-LLM, mnnvl; not recorded)."""
    if found.multicast:
        return size <= found.size_bytes and size % GRANULARITY == 0
    return size == found.size_bytes


@driver_call
def cuMemSetAccess(machine: SimulatedMachine, ptr: Any, size: Any, desc: Any, count: int) -> Any:
    """Lets devices use mapped addresses, which must be mapped without a gap (recorded)."""
    site = "cuMemSetAccess"
    found = machine.addresses.mappings_within(int(ptr), int(size))
    if not found or sum(each.size_bytes for each in found) != int(size):
        return fail(site, _INVALID)
    wanted = [(int(each.location.id), int(each.flags)) for each in list(desc)[: int(count)]]
    if any(not machine.has_device(device) for device, _ in wanted):
        return fail(site, _INVALID)
    if any(not _reaches(machine, device, mapping) for device, _ in wanted for mapping in found):
        # No path between the two GPUs (pytorch#174030).
        return fail(site, "CUDA_ERROR_INVALID_DEVICE")
    for device, flags in wanted:
        for mapping in found:
            mapping.access[device] = flags
    return (OK,)


def _reaches(machine: SimulatedMachine, device: int, mapping: Mapping) -> bool:
    if mapping.multicast:
        return True
    return machine.topology.reaches(machine.gpu_of(device), mapping.gpu)


@driver_call
def cuMemUnmap(machine: SimulatedMachine, ptr: Any, size: Any) -> Any:
    """Takes whole mappings away; where none is it succeeds all the same (recorded)."""
    found = machine.addresses.mappings_within(int(ptr), int(size))
    owner = machine.addresses.range_at(int(ptr))
    if found is None or owner is None:
        return fail("cuMemUnmap", _INVALID)
    for mapping in found:
        del owner.mappings[mapping.address]
        machine.board.call("unmap", {"number": mapping.number})
        machine.gone(mapping.id)
        machine.drop_memory(mapping.number)
    return answer("cuMemUnmap", "")
