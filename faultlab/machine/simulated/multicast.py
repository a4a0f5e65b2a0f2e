"""The driver's multicast calls.

Nothing here is recorded: on the recorded machine multicast must not be touched.
Codes and blocking are those of cuda.h and of reports, named at each place. The
object's state is on the board, for it is shared by the ranks.
"""

# ruff: noqa: N802, N803 - the names are the driver's, so that they can be given as keywords

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from faultlab.errors import UnknownCall
from faultlab.machine.simulated.addresses import GRANULARITY
from faultlab.machine.simulated.answers import OK, answer, driver_call, fail

if TYPE_CHECKING:
    from faultlab.machine.simulated.machine import Handle, SimulatedMachine

_INVALID: Final = "CUDA_ERROR_INVALID_VALUE"


@driver_call
def cuMulticastGetGranularity(machine: SimulatedMachine, prop: Any, option: Any) -> Any:
    """2 MiB on current drivers for both options (NCCL's logging documentation)."""
    return (OK, GRANULARITY)


@driver_call
def cuMulticastCreate(machine: SimulatedMachine, prop: Any) -> Any:
    """Book-keeping only: neither the GPU nor the Fabric Manager is asked
    (open-gpu-kernel-modules, mem_multicast_fabric.c), so a machine whose later calls
    refuse may still answer success here."""
    site = "cuMulticastCreate"
    size, devices = int(prop.size), int(prop.numDevices)
    if devices < 1 or size <= 0 or size % GRANULARITY or int(prop.flags):
        return fail(site, _INVALID)
    does = machine.topology.does
    if not does.multicast and "cuMulticastAddDevice" not in does.refuses:
        # Where the attribute is 0; an inference, not documented.
        return fail(site, "CUDA_ERROR_NOT_SUPPORTED")
    number, _ = machine.board.call("create_multicast", {"size_bytes": size, "devices": devices})
    return (OK, machine.new_handle(number, size, -1, types=int(prop.handleTypes)))


@driver_call
def cuMulticastAddDevice(machine: SimulatedMachine, mcHandle: Any, dev: Any) -> Any:
    """A device joins for the object's life; the last one lets the waiting ranks go."""
    site = "cuMulticastAddDevice"
    team = _team(machine, mcHandle)
    if team is None:
        return fail(site, _INVALID)
    if not machine.has_device(dev):
        return fail(site, "CUDA_ERROR_INVALID_DEVICE")
    if not machine.topology.does.multicast:
        # No probe information about a fabric (open-gpu-kernel-modules, mem_multicast_fabric.c).
        return fail(site, "CUDA_ERROR_NOT_SUPPORTED")
    error, _ = machine.board.call("add_device", {"number": team.number, "gpu": machine.gpu_of(dev)})
    return answer(site, error)


@driver_call
def cuMulticastBindMem(
    machine: SimulatedMachine,
    mcHandle: Any,
    mcOffset: Any,
    memHandle: Any,
    memOffset: Any,
    size: Any,
    flags: int,
) -> Any:
    """This device's memory receives what is stored through the object. Blocks until all
    devices were added (cuda.h). UnknownCall for an offset: nothing here tiles objects."""
    site, size = "cuMulticastBindMem", int(size)
    team, memory = _team(machine, mcHandle), machine.handles.get(int(memHandle))
    if team is None or memory is None or memory.multicast or flags:
        return fail(site, _INVALID)
    if int(mcOffset) or int(memOffset):
        raise UnknownCall(f"{site} at an offset")
    if size <= 0 or size % GRANULARITY or size > min(team.size_bytes, memory.size_bytes):
        return fail(site, _INVALID)
    request = {"number": team.number, "memory": memory.number, "size_bytes": size}
    error, _ = machine.board.call("bind", request)
    if error:
        return fail(site, error)
    machine.new_binding(team, memory, size)
    return (OK,)


@driver_call
def cuMulticastUnbind(machine: SimulatedMachine, mcHandle: Any, dev: Any, mcOffset: Any, size: Any) -> Any:
    """Undoes a bind, named by its offset and size (cuda.h)."""
    site = "cuMulticastUnbind"
    team = _team(machine, mcHandle)
    if team is None or int(mcOffset) or not machine.has_device(dev):
        return fail(site, _INVALID)
    found = [each for each in machine.bindings_of(team.number) if each.size_bytes == int(size)]
    if not found:
        return fail(site, _INVALID)
    error, _ = machine.board.call("unbind", {"number": team.number})
    if error:
        return fail(site, error)
    machine.forget_binding(found[0])
    return (OK,)


def _team(machine: SimulatedMachine, handle: Any) -> Handle | None:
    found = machine.handles.get(int(handle))
    return found if found is not None and found.multicast else None
