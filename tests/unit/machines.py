"""A machine like the recorded one, and a driver's face over a rank's half of it."""

from __future__ import annotations

from typing import Any

from cuda.bindings import driver as cuda

from faultlab.machine.board import Board, LocalBoard
from faultlab.machine.simulated.machine import SimulatedMachine
from faultlab.topology.models import Does, Fabric, Gpus, Links, Says, Topology

GRANULE = 2 << 20
POSIX = cuda.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
FABRIC = cuda.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_FABRIC
NONE = cuda.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_NONE


def recorded_topology(gpus: int = 2) -> Topology:
    """Two H200 joined by NVSwitch, as recorded (tests/data/h200)."""
    attributes = {"MULTICAST_SUPPORTED": 1, "HANDLE_TYPE_FABRIC_SUPPORTED": 1}
    return Topology(
        name="h200-2",
        title="as recorded",
        gpus=Gpus(count=gpus, model="NVIDIA H200", memory_gib=139, compute_capability="9.0"),
        links=Links(kind="nvswitch"),
        says=Says(attributes=attributes, fabric=Fabric(state=3)),
        does=Does(multicast=True),
    )


class Driver:
    """``driver.cuMemCreate(…)`` ends at the machine, as it does at the seam."""

    def __init__(self, board: Board, rank: int, topology: Topology, ranks: int = 2) -> None:
        self.machine = SimulatedMachine(topology, rank, list(range(ranks)), LocalBoard(board, rank))
        self.machine.call("cuCtxSetCurrent", self.machine.call("cuDevicePrimaryCtxRetain", rank)[1])

    def __getattr__(self, name: str) -> Any:
        return lambda *args: self.machine.call(name, *args)

    def code(self, name: str, *args: Any) -> str:
        """The name of the answer of one call."""
        return str(self.machine.call(name, *args)[0].name)

    def value(self, name: str, *args: Any) -> Any:
        """The value of a call that must succeed."""
        result = self.machine.call(name, *args)
        assert int(result[0]) == 0, (name, result[0])
        return result[1] if len(result) > 1 else None


def pair(gpus: int = 2) -> tuple[Board, list[Driver]]:
    """A board and the ranks on it."""
    topology = recorded_topology(gpus)
    board = Board(topology, list(range(gpus)))
    return board, [Driver(board, rank, topology, gpus) for rank in range(gpus)]


def memory_prop(device: int = 0, types: Any = POSIX) -> Any:
    prop = cuda.CUmemAllocationProp()
    prop.requestedHandleTypes = types
    prop.type = cuda.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    prop.location.type = cuda.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    prop.location.id = device
    prop.allocFlags.gpuDirectRDMACapable = 1
    return prop


def access(device: int = 0) -> Any:
    desc = cuda.CUmemAccessDesc()
    desc.location.type = cuda.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    desc.location.id = device
    desc.flags = cuda.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
    return desc


def team_prop(devices: int, size: int = GRANULE) -> Any:
    prop = cuda.CUmulticastObjectProp()
    prop.numDevices = devices
    prop.size = size
    prop.handleTypes = POSIX
    return prop
