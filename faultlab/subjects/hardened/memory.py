"""Memory that every rank maps, and a multicast object over it.

The driver calls are those of FlashInfer's ``SymmDeviceMemory`` (``mnnvl.py``, 0.7.4),
with a vote wherever one rank's failure would leave its peers waiting.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from faultlab.subjects.hardened.descriptors import Descriptors, pass_descriptors
from faultlab.subjects.hardened.steps import Setup, driver


@dataclass(frozen=True)
class SharedMemory:
    """``size_bytes`` of memory on every rank: ``own`` is the handle of this rank's, and
    ``addresses`` say, by rank, where each one is mapped here."""

    own: Any
    addresses: list[int]
    size_bytes: int
    granularity: int


def share_memory(setup: Setup, size_bytes: int, *, multicast: bool) -> SharedMemory:
    """Allocate at least ``size_bytes`` on every rank and map all of it on all.
    ``multicast``: rounded so that a team can be put over it. Raises StepFailed."""
    setup.together("use the device's context", lambda: _use_context(setup))
    granularity = setup.together("ask the granularity", lambda: _granularity(setup, multicast))
    size = _round_up(size_bytes, granularity)
    held = Descriptors()
    setup.undo.add(held.close)
    own = setup.together("allocate memory", lambda: _allocate(setup, size, held))
    pass_descriptors(setup, "memory", held, list(range(setup.world_size)))
    handles = setup.together("import the peers' memory", lambda: _import(setup, own, held))
    addresses = setup.together("map all memory", lambda: _map(setup, handles, size, granularity))
    return SharedMemory(own, addresses, size, granularity)


def create_team(setup: Setup, memory: SharedMemory) -> int:
    """Put a multicast object over the memory: the address at which it is mapped here. Raises StepFailed."""
    held = Descriptors()
    setup.undo.add(held.close)
    made = setup.together("create the multicast object", lambda: _create_team(setup, memory, held))
    pass_descriptors(setup, "the multicast object", held, [0])
    team = setup.together("import the multicast object", lambda: _import_team(setup, made, held))
    setup.together("add the device", lambda: driver("cuMulticastAddDevice", team, setup.device))
    # Both block until every device was added, and nothing can interrupt them: never before that vote.
    setup.together("bind the memory", lambda: _bind(setup, team, memory))
    size, granularity = memory.size_bytes, memory.granularity
    return setup.together("map the multicast object", lambda: _map(setup, [team], size, granularity)[0])


# ------------------------------------------------ the steps, each on one rank


def _use_context(setup: Setup) -> None:
    context = driver("cuDevicePrimaryCtxRetain", driver("cuDeviceGet", setup.device))
    setup.undo.add(driver, "cuDevicePrimaryCtxRelease", setup.device)
    driver("cuCtxSetCurrent", context)


def _granularity(setup: Setup, multicast: bool) -> int:
    from cuda.bindings import driver as cuda

    unicast = cuda.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_RECOMMENDED
    found = int(driver("cuMemGetAllocationGranularity", _properties(setup), unicast))
    if multicast:
        team = cuda.CUmulticastGranularity_flags.CU_MULTICAST_GRANULARITY_RECOMMENDED
        found = max(found, int(driver("cuMulticastGetGranularity", _team_properties(setup, found), team)))
    return found


def _allocate(setup: Setup, size_bytes: int, held: Descriptors) -> Any:
    own = driver("cuMemCreate", size_bytes, _properties(setup), 0)
    setup.undo.add(driver, "cuMemRelease", own)
    held.by_rank[setup.rank] = int(driver("cuMemExportToShareableHandle", own, _posix(), 0))
    return own


def _import(setup: Setup, own: Any, held: Descriptors) -> list[Any]:
    """Every rank's handle, by rank; the descriptors are not needed after this."""
    handles = []
    for peer in range(setup.world_size):
        if peer == setup.rank:
            handles.append(own)
        else:
            handles.append(_import_one(setup, held.by_rank[peer]))
    held.close()
    return handles


def _import_one(setup: Setup, descriptor: int) -> Any:
    handle = driver("cuMemImportFromShareableHandle", descriptor, _posix())
    setup.undo.add(driver, "cuMemRelease", handle)
    return handle


def _map(setup: Setup, handles: list[Any], size_bytes: int, granularity: int) -> list[int]:
    """Map the handles one behind the other, each ``size_bytes`` long: their addresses."""
    total = size_bytes * len(handles)
    base = int(driver("cuMemAddressReserve", total, granularity, 0, 0))
    setup.undo.add(driver, "cuMemAddressFree", base, total)
    addresses = [base + index * size_bytes for index in range(len(handles))]
    for address, handle in zip(addresses, handles, strict=True):
        driver("cuMemMap", address, size_bytes, 0, handle, 0)
        setup.undo.add(driver, "cuMemUnmap", address, size_bytes)
    driver("cuMemSetAccess", base, total, [_access(setup)], 1)
    return addresses


def _create_team(setup: Setup, memory: SharedMemory, held: Descriptors) -> Any:
    """Rank 0 makes the object and its descriptor; the others have nothing to do."""
    if setup.rank != 0:
        return None
    team = driver("cuMulticastCreate", _team_properties(setup, memory.size_bytes))
    setup.undo.add(driver, "cuMemRelease", team)
    held.by_rank[0] = int(driver("cuMemExportToShareableHandle", team, _posix(), 0))
    return team


def _import_team(setup: Setup, made: Any, held: Descriptors) -> Any:
    team = made if setup.rank == 0 else _import_one(setup, held.by_rank[0])
    held.close()
    return team


def _bind(setup: Setup, team: Any, memory: SharedMemory) -> None:
    driver("cuMulticastBindMem", team, 0, memory.own, 0, memory.size_bytes, 0)
    setup.undo.add(driver, "cuMulticastUnbind", team, setup.device, 0, memory.size_bytes)


# ------------------------------------------------------ the driver's structures


def _properties(setup: Setup) -> Any:
    from cuda.bindings import driver as cuda

    properties = cuda.CUmemAllocationProp()
    properties.type = cuda.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    properties.location.type = cuda.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    properties.location.id = setup.device
    properties.requestedHandleTypes = _posix()
    return properties


def _team_properties(setup: Setup, size_bytes: int) -> Any:
    from cuda.bindings import driver as cuda

    properties = cuda.CUmulticastObjectProp()
    properties.numDevices = setup.world_size
    properties.size = size_bytes
    properties.handleTypes = _posix()
    return properties


def _access(setup: Setup) -> Any:
    from cuda.bindings import driver as cuda

    access = cuda.CUmemAccessDesc()
    access.location.type = cuda.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    access.location.id = setup.device
    access.flags = cuda.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
    return access


def _posix() -> Any:
    from cuda.bindings import driver as cuda

    return cuda.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR


def _round_up(size_bytes: int, granularity: int) -> int:
    return -(-size_bytes // granularity) * granularity
