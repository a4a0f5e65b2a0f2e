"""Physical memory, addresses, mappings and private memory: the driver's memory calls."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from cuda.bindings import driver as cuda

from faultlab.machine.simulated.addresses import GRANULARITY, Mapping
from faultlab.machine.simulated.driver import OK, driver_call, fail, gpu_of, no_device

if TYPE_CHECKING:
    from faultlab.machine.simulated.machine import SimulatedMachine

_FABRIC = int(cuda.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_FABRIC)


# ----------------------------------------------------------- physical memory


@driver_call
def cuMemGetAllocationGranularity(machine: SimulatedMachine, prop: Any, option: Any) -> Any:  # noqa: N802
    # Recorded: a made-up device is not noticed here.
    return (OK, GRANULARITY)


@driver_call
def cuMemCreate(machine: SimulatedMachine, size: int, prop: Any, flags: int) -> Any:  # noqa: N802
    site = "cuMemCreate"
    if flags or size <= 0 or size % GRANULARITY:
        return fail(site, "CUDA_ERROR_INVALID_VALUE")
    if no_device(machine, prop.location.id):
        return fail(site, "CUDA_ERROR_INVALID_DEVICE")
    types = int(prop.requestedHandleTypes)
    if types & _FABRIC and machine.topology.does.fabric_handles != "works":
        return fail(site, machine.topology.does.fabric_handles)
    gpu = gpu_of(machine, int(prop.location.id))
    told, fds = machine.board.call("create", {"gpu": gpu, "size_bytes": int(size), "shareable": bool(types)})
    if told is None:
        return fail(site, "CUDA_ERROR_OUT_OF_MEMORY")
    machine.keep_memory(told, fds[0], int(size))
    value = machine.new_handle(told, int(size), gpu, multicast=False, types=types)
    return (OK, cuda.CUmemGenericAllocationHandle(value))


@driver_call
def cuMemExportToShareableHandle(machine: SimulatedMachine, handle: Any, handleType: Any, flags: int) -> Any:  # noqa: N802, N803
    site = "cuMemExportToShareableHandle"
    found = machine.handles.get(int(handle))
    if found is None:
        machine.segfault()
        return fail(site, "CUDA_ERROR_INVALID_VALUE")
    if flags or not found.types & int(handleType):
        return fail(site, "CUDA_ERROR_INVALID_VALUE")
    if int(handleType) == _FABRIC:
        fabric = cuda.CUmemFabricHandle()
        fabric.data = found.number.to_bytes(8, "little") + b"faultlab" + bytes(48)
        return (OK, fabric)
    _, fds = machine.board.call("export", {"number": found.number})
    return (OK, fds[0])


@driver_call
def cuMemImportFromShareableHandle(machine: SimulatedMachine, osHandle: Any, shHandleType: Any) -> Any:  # noqa: N802, N803
    site = "cuMemImportFromShareableHandle"
    if int(shHandleType) == _FABRIC:
        data = bytes(getattr(osHandle, "data", osHandle))
        if data[8:16] != b"faultlab":
            return fail(site, "CUDA_ERROR_INVALID_HANDLE")
        told, fds = machine.board.call("import_number", {"number": int.from_bytes(data[:8], "little")})
        # An unknown export answers 400 (pytorch#178989).
        return _imported(machine, told, fds) if told else fail(site, "CUDA_ERROR_INVALID_HANDLE")
    try:
        inode = os.fstat(int(osHandle)).st_ino
    except OSError:
        return fail(site, "CUDA_ERROR_UNKNOWN")
    told, fds = machine.board.call("import", {"inode": inode})
    return _imported(machine, told, fds) if told else fail(site, "CUDA_ERROR_UNKNOWN")


def _imported(machine: SimulatedMachine, told: dict[str, Any], fds: list[int]) -> Any:
    if fds:
        machine.keep_memory(told["number"], fds[0], told["size_bytes"])
    value = machine.new_handle(
        told["number"], told["size_bytes"], told["gpu"], multicast=told["multicast"], types=0
    )
    return (OK, cuda.CUmemGenericAllocationHandle(value))


@driver_call
def cuMemRelease(machine: SimulatedMachine, handle: Any) -> Any:  # noqa: N802
    found = machine.handles.pop(int(handle), None)
    if found is None:
        return fail("cuMemRelease", "CUDA_ERROR_INVALID_VALUE")
    machine.board.call("release", {"number": found.number})
    machine.drop_memory(found.number)
    machine.gone(found.id)
    return (OK,)


# ----------------------------------------------------------------- addresses


@driver_call
def cuMemAddressReserve(machine: SimulatedMachine, size: int, alignment: int, addr: Any, flags: int) -> Any:  # noqa: N802
    site = "cuMemAddressReserve"
    identity = machine.made("range", int(size))
    found = None if flags else machine.addresses.reserve(identity, int(size), int(alignment))
    if found is None:
        machine.gone(identity)
        return fail(site, "CUDA_ERROR_INVALID_VALUE")
    return (OK, cuda.CUdeviceptr(found.address))


@driver_call
def cuMemAddressFree(machine: SimulatedMachine, ptr: Any, size: int) -> Any:  # noqa: N802
    found = machine.addresses.free(int(ptr), int(size))
    if found is None:
        return fail("cuMemAddressFree", "CUDA_ERROR_INVALID_VALUE")
    machine.gone(found.id)
    return (OK,)


@driver_call
def cuMemMap(machine: SimulatedMachine, ptr: Any, size: int, offset: int, handle: Any, flags: int) -> Any:  # noqa: N802
    site = "cuMemMap"
    found = machine.handles.get(int(handle))
    if found is None:
        machine.segfault()
        return fail(site, "CUDA_ERROR_INVALID_VALUE")
    address, size = int(ptr), int(size)
    within = machine.addresses.mappings_within(address, size)
    if flags or within is None or within or address % GRANULARITY:
        return fail(site, "CUDA_ERROR_INVALID_VALUE")
    # Of a multicast object a part may be mapped; of memory never (recorded).
    part_of_team = found.multicast and size < found.size_bytes and not size % GRANULARITY
    if offset or (size != found.size_bytes and not part_of_team):
        return fail(site, "CUDA_ERROR_NOT_SUPPORTED")
    machine.board.call("map", {"number": found.number})
    owner = machine.addresses.range_at(address)
    assert owner is not None
    identity = machine.made("mapping", size, (owner.id, found.id))
    owner.mappings[address] = Mapping(identity, address, size, found.number, found.multicast)
    return (OK,)


@driver_call
def cuMemSetAccess(machine: SimulatedMachine, ptr: Any, size: int, desc: Any, count: int) -> Any:  # noqa: N802
    site = "cuMemSetAccess"
    found = machine.addresses.mappings_within(int(ptr), int(size))
    if not found or sum(each.size_bytes for each in found) != int(size):
        return fail(site, "CUDA_ERROR_INVALID_VALUE")
    for each in list(desc)[: int(count)]:
        if no_device(machine, each.location.id):
            return fail(site, "CUDA_ERROR_INVALID_VALUE")
        gpu = gpu_of(machine, int(each.location.id))
        owners = {_owner(machine, mapping) for mapping in found if not mapping.multicast}
        # No path between the two GPUs (pytorch#174030).
        if any(not machine.topology.reaches(gpu, owner) for owner in owners):
            return fail(site, "CUDA_ERROR_INVALID_DEVICE")
        if int(each.flags) and int(each.location.id) == machine.device:
            for mapping in found:
                mapping.readable = True
    return (OK,)


def _owner(machine: SimulatedMachine, mapping: Mapping) -> int:
    for handle in machine.handles.values():
        if handle.number == mapping.number:
            return handle.gpu
    # The handle is gone and the mapping lives on; its access was checked before.
    return machine.gpu_of_rank[machine.rank]


@driver_call
def cuMemUnmap(machine: SimulatedMachine, ptr: Any, size: int) -> Any:  # noqa: N802
    found = machine.addresses.mappings_within(int(ptr), int(size))
    owner = machine.addresses.range_at(int(ptr))
    if found is None or owner is None:
        return fail("cuMemUnmap", "CUDA_ERROR_INVALID_VALUE")
    for mapping in found:
        del owner.mappings[mapping.address]
        machine.board.call("unmap", {"number": mapping.number})
        machine.drop_memory(mapping.number)
        machine.gone(mapping.id)
    return (OK,)


# ------------------------------------------------------------ private memory


@driver_call
def cuMemAlloc(machine: SimulatedMachine, bytesize: int) -> Any:  # noqa: N802
    error, address = allocate(machine, int(bytesize))
    return fail("cuMemAlloc", error) if error else (OK, cuda.CUdeviceptr(address))


def allocate(machine: SimulatedMachine, size: int) -> tuple[str, int]:
    """Private memory for both libraries: the error, or empty and the address."""
    error = machine.sticky or machine.unsafe_in_capture(allocates=True)
    if error:
        return error, 0
    if size <= 0:
        return "CUDA_ERROR_INVALID_VALUE", 0
    identity = machine.made("allocation", size)
    told, _ = machine.board.call("charge", {"key": int(identity[1:]), "size_bytes": size})
    if not told:
        machine.gone(identity)
        return "CUDA_ERROR_OUT_OF_MEMORY", 0
    return "", machine.addresses.allocate(identity, size).address


@driver_call
def cuMemFree(machine: SimulatedMachine, dptr: Any) -> Any:  # noqa: N802
    error = free(machine, int(dptr))
    return fail("cuMemFree", error) if error else (OK,)


def free(machine: SimulatedMachine, address: int) -> str:
    """Give private memory back: the error, or empty."""
    if machine.sticky:
        return machine.sticky
    if not address:
        return ""
    found = machine.addresses.free_allocation(address)
    if found is None:
        return "CUDA_ERROR_INVALID_VALUE"
    machine.board.call("uncharge", {"key": int(found.id[1:])})
    machine.gone(found.id)
    return ""


@driver_call
def cuMemcpyHtoD(machine: SimulatedMachine, dstDevice: Any, srcHost: Any, ByteCount: int) -> Any:  # noqa: N802, N803
    if machine.sticky:
        return fail("cuMemcpyHtoD", machine.sticky)
    view = machine.view(int(dstDevice), int(ByteCount))
    if view is None:
        return fail("cuMemcpyHtoD", "CUDA_ERROR_INVALID_VALUE")
    view[:] = host_bytes(srcHost, int(ByteCount))
    return (OK,)


@driver_call
def cuMemcpyDtoH(machine: SimulatedMachine, dstHost: Any, srcDevice: Any, ByteCount: int) -> Any:  # noqa: N802, N803
    if machine.sticky:
        return fail("cuMemcpyDtoH", machine.sticky)
    view = machine.view(int(srcDevice), int(ByteCount))
    if view is None:
        return fail("cuMemcpyDtoH", "CUDA_ERROR_INVALID_VALUE")
    target = memoryview(host_view(dstHost, int(ByteCount))).cast("B")
    target[:] = view
    return (OK,)


def host_view(host: Any, size: int) -> Any:
    """Writable bytes of a host address or of an object with a buffer."""
    import ctypes

    if isinstance(host, int):
        return (ctypes.c_char * size).from_address(host)
    return memoryview(host).cast("B")[:size]


def host_bytes(host: Any, size: int) -> bytes:
    """The bytes at a host address or of an object with a buffer."""
    import ctypes

    if isinstance(host, int):
        return ctypes.string_at(host, size)
    return bytes(memoryview(host).cast("B")[:size])


def _memset(site: str, width: int) -> None:
    def memset(machine: SimulatedMachine, dstDevice: Any, value: int, N: int) -> Any:  # noqa: N803
        error = fill(machine, int(dstDevice), int(value), int(N), width)
        return fail(site, error) if error else (OK,)

    memset.__name__ = site
    driver_call(memset)


def fill(machine: SimulatedMachine, address: int, value: int, count: int, width: int) -> str:
    """Fill device memory with ``count`` values of ``width`` bytes: the error, or empty."""
    import torch

    if machine.sticky:
        return machine.sticky
    view = machine.view(address, count * width)
    if view is None or address % width:
        return "CUDA_ERROR_INVALID_VALUE"
    dtype = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[width]
    limit = 1 << (8 * width)
    signed = value % limit if width == 1 else (value % limit + limit // 2) % limit - limit // 2
    torch.frombuffer(view, dtype=dtype, count=count).fill_(signed)
    return ""


for _site, _width in (("cuMemsetD8", 1), ("cuMemsetD16", 2), ("cuMemsetD32", 4)):
    _memset(_site, _width)
