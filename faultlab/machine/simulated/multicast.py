"""Multicast objects: the driver's ``cuMulticast*`` calls. What blocks, blocks at the board."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cuda.bindings import driver as cuda

from faultlab.machine.simulated.addresses import GRANULARITY
from faultlab.machine.simulated.driver import OK, driver_call, fail, gpu_of, no_device

if TYPE_CHECKING:
    from faultlab.machine.simulated.machine import Handle, SimulatedMachine


# ------------------------------------------------------------------ multicast


@driver_call
def cuMulticastGetGranularity(machine: SimulatedMachine, prop: Any, option: Any) -> Any:  # noqa: N802
    return (OK, GRANULARITY)


@driver_call
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
    return (OK, cuda.CUmemGenericAllocationHandle(value))


def _team(machine: SimulatedMachine, handle: Any) -> Handle | None:
    found = machine.handles.get(int(handle))
    return found if found is not None and found.multicast else None


@driver_call
def cuMulticastAddDevice(machine: SimulatedMachine, mcHandle: Any, dev: Any) -> Any:  # noqa: N802, N803
    site = "cuMulticastAddDevice"
    team = _team(machine, mcHandle)
    if team is None:
        return fail(site, "CUDA_ERROR_INVALID_VALUE")
    if no_device(machine, dev):
        return fail(site, "CUDA_ERROR_INVALID_DEVICE")
    if not machine.topology.does.multicast:
        # No probe information about a fabric (open kernel driver, mem_multicast_fabric.c).
        return fail(site, "CUDA_ERROR_NOT_SUPPORTED")
    error, _ = machine.board.call("add_device", {"number": team.number, "gpu": gpu_of(machine, int(dev))})
    return fail(site, error) if error else (OK,)


@driver_call
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
    return (OK,)


@driver_call
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
    return (OK,)
