"""The driver's calls on a simulated machine, with the recorded answers.

Every function takes the machine and the arguments of the function of the same
name in ``cuda.bindings.driver``, and returns the same tuple. Codes that are not
from the recording are marked with their source.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from cuda.bindings import driver as cuda

from faultlab.codes import CUDA
from faultlab.machine.simulated.addresses import GRANULARITY, Mapping
from faultlab.sites import SITES

if TYPE_CHECKING:
    from faultlab.machine.simulated.machine import Handle, SimulatedMachine

_TYPES = cuda.CUmemAllocationHandleType
_POSIX = int(_TYPES.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR)
_FABRIC = int(_TYPES.CU_MEM_HANDLE_TYPE_FABRIC)
_OK = cuda.CUresult.CUDA_SUCCESS
#: Attributes that need no entry in a topology: the same on every GPU here.
_DEFAULTS = {
    "VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED": 1,
    "HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED": 1,
    "GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED": 1,
    "GPU_DIRECT_RDMA_SUPPORTED": 1,
    "HANDLE_TYPE_FABRIC_SUPPORTED": 0,
    "MULTICAST_SUPPORTED": 0,
    "MULTIPROCESSOR_COUNT": 132,
    "UNIFIED_ADDRESSING": 1,
    "IPC_EVENT_SUPPORTED": 1,
    "HOST_NUMA_ID": 0,
    "MEMORY_POOLS_SUPPORTED": 1,
    "MEMPOOL_SUPPORTED_HANDLE_TYPES": 9,
}

CALLS: dict[str, Callable[..., Any]] = {}


def _call(function: Callable[..., Any]) -> Callable[..., Any]:
    """Register a call; what the topology refuses is refused before anything else."""
    site = function.__name__

    def guarded(machine: SimulatedMachine, *args: Any, **kwargs: Any) -> Any:
        refused = machine.topology.does.refuses.get(site)
        if refused is not None:
            return fail(site, refused)
        return function(machine, *args, **kwargs)

    CALLS[site] = guarded
    return function


def fail(site: str, error: str) -> tuple[Any, ...]:
    """What the binding returns for an error."""
    return (cuda.CUresult(CUDA[error]), *[None] * SITES[site].outputs)


def _no_device(machine: SimulatedMachine, device: Any) -> bool:
    return not 0 <= int(device) < machine.topology.gpus.count


def _gpu(machine: SimulatedMachine, device: int) -> int:
    """The GPU of the whole machine behind an ordinal of this rank's node."""
    return machine.node * machine.topology.gpus.count + device


# ------------------------------------------------------------------- devices


@_call
def cuInit(machine: SimulatedMachine, flags: int) -> Any:  # noqa: N802
    return (_OK,)


@_call
def cuDriverGetVersion(machine: SimulatedMachine) -> Any:  # noqa: N802
    return (_OK, 13000)


@_call
def cuDeviceGet(machine: SimulatedMachine, ordinal: int) -> Any:  # noqa: N802
    if _no_device(machine, ordinal):
        return fail("cuDeviceGet", "CUDA_ERROR_INVALID_DEVICE")
    return (_OK, cuda.CUdevice(int(ordinal)))


@_call
def cuDeviceGetCount(machine: SimulatedMachine) -> Any:  # noqa: N802
    return (_OK, machine.topology.gpus.count)


@_call
def cuDeviceGetAttribute(machine: SimulatedMachine, attribute: Any, device: Any) -> Any:  # noqa: N802
    site = "cuDeviceGetAttribute"
    if _no_device(machine, device):
        return fail(site, "CUDA_ERROR_INVALID_DEVICE")
    name = cuda.CUdevice_attribute(int(attribute)).name.removeprefix("CU_DEVICE_ATTRIBUTE_")
    major, minor = machine.topology.gpus.compute_capability.split(".")
    told = {
        **_DEFAULTS,
        "COMPUTE_CAPABILITY_MAJOR": int(major),
        "COMPUTE_CAPABILITY_MINOR": int(minor),
        **machine.topology.says.attributes,
    }
    if name not in told:
        from faultlab.errors import UnknownCall

        raise UnknownCall(f"the attribute {name}")
    return (_OK, told[name])


@_call
def cuDeviceCanAccessPeer(machine: SimulatedMachine, device: Any, peer: Any) -> Any:  # noqa: N802
    if _no_device(machine, device) or _no_device(machine, peer):
        return fail("cuDeviceCanAccessPeer", "CUDA_ERROR_INVALID_DEVICE")
    a, b = _gpu(machine, int(device)), _gpu(machine, int(peer))
    return (_OK, int(a != b and machine.topology.reaches(a, b)))


@_call
def cuDeviceGetP2PAttribute(machine: SimulatedMachine, attribute: Any, device: Any, peer: Any) -> Any:  # noqa: N802
    site = "cuDeviceGetP2PAttribute"
    if _no_device(machine, device) or _no_device(machine, peer) or int(device) == int(peer):
        return fail(site, "CUDA_ERROR_INVALID_DEVICE")
    name = cuda.CUdevice_P2PAttribute(int(attribute)).name
    if "RANK" in name or "PARTIAL" in name:
        return (_OK, 0)
    return (_OK, int(machine.topology.reaches(_gpu(machine, int(device)), _gpu(machine, int(peer)))))


# ------------------------------------------------------------------- context


@_call
def cuDevicePrimaryCtxRetain(machine: SimulatedMachine, device: Any) -> Any:  # noqa: N802
    if _no_device(machine, device):
        return fail("cuDevicePrimaryCtxRetain", "CUDA_ERROR_INVALID_DEVICE")
    machine.retained[int(device)] = machine.retained.get(int(device), 0) + 1
    return (_OK, cuda.CUcontext(0xC0DE0000 + int(device)))


@_call
def cuDevicePrimaryCtxRelease(machine: SimulatedMachine, device: Any) -> Any:  # noqa: N802
    if machine.retained.get(int(device), 0) < 1:
        return fail("cuDevicePrimaryCtxRelease", "CUDA_ERROR_INVALID_CONTEXT")
    machine.retained[int(device)] -= 1
    return (_OK,)


@_call
def cuCtxSetCurrent(machine: SimulatedMachine, context: Any) -> Any:  # noqa: N802
    value = int(context)
    machine.context_device = value - 0xC0DE0000 if value else None
    return (_OK,)


@_call
def cuCtxGetCurrent(machine: SimulatedMachine) -> Any:  # noqa: N802
    device = machine.context_device
    return (_OK, cuda.CUcontext(0 if device is None else 0xC0DE0000 + device))


@_call
def cuCtxGetDevice(machine: SimulatedMachine) -> Any:  # noqa: N802
    if machine.context_device is None:
        return fail("cuCtxGetDevice", "CUDA_ERROR_INVALID_CONTEXT")
    return (_OK, cuda.CUdevice(machine.context_device))


@_call
def cuCtxSynchronize(machine: SimulatedMachine, *context: Any) -> Any:  # noqa: N802
    error = machine.sticky or machine.unsafe_in_capture(allocates=False)
    return fail("cuCtxSynchronize", error) if error else (_OK,)


@_call
def cuMemGetInfo(machine: SimulatedMachine) -> Any:  # noqa: N802
    if machine.sticky:
        return fail("cuMemGetInfo", machine.sticky)
    total = machine.topology.gpus.memory_gib << 30
    return (_OK, total - machine.device_bytes(), total)


# ----------------------------------------------------------- physical memory


@_call
def cuMemGetAllocationGranularity(machine: SimulatedMachine, prop: Any, option: Any) -> Any:  # noqa: N802
    # Recorded: a made-up device is not noticed here.
    return (_OK, GRANULARITY)


@_call
def cuMemCreate(machine: SimulatedMachine, size: int, prop: Any, flags: int) -> Any:  # noqa: N802
    site = "cuMemCreate"
    if flags or size <= 0 or size % GRANULARITY:
        return fail(site, "CUDA_ERROR_INVALID_VALUE")
    if _no_device(machine, prop.location.id):
        return fail(site, "CUDA_ERROR_INVALID_DEVICE")
    types = int(prop.requestedHandleTypes)
    if types & _FABRIC and machine.topology.does.fabric_handles != "works":
        return fail(site, machine.topology.does.fabric_handles)
    gpu = _gpu(machine, int(prop.location.id))
    told, fds = machine.board.call("create", {"gpu": gpu, "size_bytes": int(size), "shareable": bool(types)})
    if told is None:
        return fail(site, "CUDA_ERROR_OUT_OF_MEMORY")
    machine.keep_memory(told, fds[0], int(size))
    value = machine.new_handle(told, int(size), gpu, multicast=False, types=types)
    return (_OK, cuda.CUmemGenericAllocationHandle(value))


@_call
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
        return (_OK, fabric)
    _, fds = machine.board.call("export", {"number": found.number})
    return (_OK, fds[0])


@_call
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
    return (_OK, cuda.CUmemGenericAllocationHandle(value))


@_call
def cuMemRelease(machine: SimulatedMachine, handle: Any) -> Any:  # noqa: N802
    found = machine.handles.pop(int(handle), None)
    if found is None:
        return fail("cuMemRelease", "CUDA_ERROR_INVALID_VALUE")
    machine.board.call("release", {"number": found.number})
    machine.drop_memory(found.number)
    machine.gone(found.id)
    return (_OK,)


# ----------------------------------------------------------------- addresses


@_call
def cuMemAddressReserve(machine: SimulatedMachine, size: int, alignment: int, addr: Any, flags: int) -> Any:  # noqa: N802
    site = "cuMemAddressReserve"
    identity = machine.made("range", int(size))
    found = None if flags else machine.addresses.reserve(identity, int(size), int(alignment))
    if found is None:
        machine.gone(identity)
        return fail(site, "CUDA_ERROR_INVALID_VALUE")
    return (_OK, cuda.CUdeviceptr(found.address))


@_call
def cuMemAddressFree(machine: SimulatedMachine, ptr: Any, size: int) -> Any:  # noqa: N802
    found = machine.addresses.free(int(ptr), int(size))
    if found is None:
        return fail("cuMemAddressFree", "CUDA_ERROR_INVALID_VALUE")
    machine.gone(found.id)
    return (_OK,)


@_call
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
    return (_OK,)


@_call
def cuMemSetAccess(machine: SimulatedMachine, ptr: Any, size: int, desc: Any, count: int) -> Any:  # noqa: N802
    site = "cuMemSetAccess"
    found = machine.addresses.mappings_within(int(ptr), int(size))
    if not found or sum(each.size_bytes for each in found) != int(size):
        return fail(site, "CUDA_ERROR_INVALID_VALUE")
    for each in list(desc)[: int(count)]:
        if _no_device(machine, each.location.id):
            return fail(site, "CUDA_ERROR_INVALID_VALUE")
        gpu = _gpu(machine, int(each.location.id))
        owners = {_owner(machine, mapping) for mapping in found if not mapping.multicast}
        # No path between the two GPUs (pytorch#174030).
        if any(not machine.topology.reaches(gpu, owner) for owner in owners):
            return fail(site, "CUDA_ERROR_INVALID_DEVICE")
        if int(each.flags) and int(each.location.id) == machine.device:
            for mapping in found:
                mapping.readable = True
    return (_OK,)


def _owner(machine: SimulatedMachine, mapping: Mapping) -> int:
    for handle in machine.handles.values():
        if handle.number == mapping.number:
            return handle.gpu
    # The handle is gone and the mapping lives on; its access was checked before.
    return machine.gpu_of_rank[machine.rank]


@_call
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
    return (_OK,)


# ------------------------------------------------------------ private memory


@_call
def cuMemAlloc(machine: SimulatedMachine, bytesize: int) -> Any:  # noqa: N802
    error, address = allocate(machine, int(bytesize))
    return fail("cuMemAlloc", error) if error else (_OK, cuda.CUdeviceptr(address))


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


@_call
def cuMemFree(machine: SimulatedMachine, dptr: Any) -> Any:  # noqa: N802
    error = free(machine, int(dptr))
    return fail("cuMemFree", error) if error else (_OK,)


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


@_call
def cuMemcpyHtoD(machine: SimulatedMachine, dstDevice: Any, srcHost: Any, ByteCount: int) -> Any:  # noqa: N802, N803
    if machine.sticky:
        return fail("cuMemcpyHtoD", machine.sticky)
    view = machine.view(int(dstDevice), int(ByteCount))
    if view is None:
        return fail("cuMemcpyHtoD", "CUDA_ERROR_INVALID_VALUE")
    view[:] = host_bytes(srcHost, int(ByteCount))
    return (_OK,)


@_call
def cuMemcpyDtoH(machine: SimulatedMachine, dstHost: Any, srcDevice: Any, ByteCount: int) -> Any:  # noqa: N802, N803
    if machine.sticky:
        return fail("cuMemcpyDtoH", machine.sticky)
    view = machine.view(int(srcDevice), int(ByteCount))
    if view is None:
        return fail("cuMemcpyDtoH", "CUDA_ERROR_INVALID_VALUE")
    target = memoryview(host_view(dstHost, int(ByteCount))).cast("B")
    target[:] = view
    return (_OK,)


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
        return fail(site, error) if error else (_OK,)

    memset.__name__ = site
    _call(memset)


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


# ------------------------------------------------------------------ multicast


@_call
def cuMulticastGetGranularity(machine: SimulatedMachine, prop: Any, option: Any) -> Any:  # noqa: N802
    return (_OK, GRANULARITY)


@_call
def cuMulticastCreate(machine: SimulatedMachine, prop: Any) -> Any:  # noqa: N802
    site = "cuMulticastCreate"
    size, devices = int(prop.size), int(prop.numDevices)
    if devices < 1 or size <= 0 or size % GRANULARITY or int(prop.flags):
        return fail(site, "CUDA_ERROR_INVALID_VALUE")
    if not machine.topology.does.multicast and "cuMulticastAddDevice" not in machine.topology.does.refuses:
        return fail(site, "CUDA_ERROR_NOT_SUPPORTED")
    types = int(prop.handleTypes)
    told, _ = machine.board.call(
        "create_multicast", {"size_bytes": size, "devices": devices, "shareable": bool(types)}
    )
    value = machine.new_handle(told, size, -1, multicast=True, types=types)
    return (_OK, cuda.CUmemGenericAllocationHandle(value))


def _team(machine: SimulatedMachine, handle: Any) -> Handle | None:
    found = machine.handles.get(int(handle))
    return found if found is not None and found.multicast else None


@_call
def cuMulticastAddDevice(machine: SimulatedMachine, mcHandle: Any, dev: Any) -> Any:  # noqa: N802, N803
    site = "cuMulticastAddDevice"
    team = _team(machine, mcHandle)
    if team is None:
        return fail(site, "CUDA_ERROR_INVALID_VALUE")
    if _no_device(machine, dev):
        return fail(site, "CUDA_ERROR_INVALID_DEVICE")
    if not machine.topology.does.multicast:
        # No probe information about a fabric (open kernel driver, mem_multicast_fabric.c).
        return fail(site, "CUDA_ERROR_NOT_SUPPORTED")
    error, _ = machine.board.call("add_device", {"number": team.number, "gpu": _gpu(machine, int(dev))})
    return fail(site, error) if error else (_OK,)


@_call
def cuMulticastBindMem(  # noqa: N802
    machine: SimulatedMachine,
    mcHandle: Any,  # noqa: N803
    mcOffset: int,  # noqa: N803
    memHandle: Any,  # noqa: N803
    memOffset: int,  # noqa: N803
    size: int,
    flags: int,
) -> Any:
    site = "cuMulticastBindMem"
    team, memory = _team(machine, mcHandle), machine.handles.get(int(memHandle))
    if team is None or memory is None or memory.multicast or flags or mcOffset or memOffset:
        return fail(site, "CUDA_ERROR_INVALID_VALUE")
    if size <= 0 or size % GRANULARITY or size > min(team.size_bytes, memory.size_bytes):
        return fail(site, "CUDA_ERROR_INVALID_VALUE")
    error, _ = machine.board.call("bind", {"number": team.number, "memory": memory.number})
    if error:
        return fail(site, error)
    from faultlab.machine.simulated.machine import Binding

    identity = machine.made("binding", int(size), (team.id, memory.id))
    machine.bindings[identity] = Binding(identity, team.number, memory.number, int(size))
    return (_OK,)


@_call
def cuMulticastUnbind(machine: SimulatedMachine, mcHandle: Any, dev: Any, mcOffset: int, size: int) -> Any:  # noqa: N802, N803
    site = "cuMulticastUnbind"
    team = _team(machine, mcHandle)
    bound = [
        b for b in machine.bindings.values() if team and b.team == team.number and b.size_bytes == int(size)
    ]
    if team is None or not bound or mcOffset:
        return fail(site, "CUDA_ERROR_INVALID_VALUE")
    error, _ = machine.board.call("unbind", {"number": team.number})
    if error:
        return fail(site, error)
    del machine.bindings[bound[0].id]
    machine.gone(bound[0].id)
    return (_OK,)
