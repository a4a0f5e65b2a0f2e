"""The driver's calls on devices and contexts.

The other driver calls are beside this module: ``virtual_memory`` (physical
memory and addresses), ``memory`` (cuMemAlloc, copies, memset) and
``multicast``. Answers are the recorded ones; what is not recorded names its
source.
"""

# ruff: noqa: N802, N803 - the names are the driver's, so that they can be given as keywords

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from cuda.bindings import driver as cuda

from faultlab.errors import UnknownCall
from faultlab.machine.simulated.answers import OK, answer, context_call, driver_call, fail

if TYPE_CHECKING:
    from faultlab.machine.simulated.machine import SimulatedMachine

#: CUDA 13.0, as recorded.
_VERSION: Final = 13000
#: Attributes that need no entry in a topology (recorded, except that a topology
#: which does not name fabric handles or multicast is taken to have neither).
_DEFAULTS: Final = {
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
#: A primary context's value tells its device; it only has to be no small number.
_CONTEXT: Final = 0xC0DE0000


@driver_call
def cuInit(machine: SimulatedMachine, Flags: int) -> Any:
    """Always done already: libraries call it before the lab is in place."""
    return (OK,)


@driver_call
def cuDriverGetVersion(machine: SimulatedMachine) -> Any:
    """The version of CUDA that the driver offers, 1000 times major plus 10 times minor."""
    return (OK, _VERSION)


@driver_call
def cuDeviceGet(machine: SimulatedMachine, ordinal: Any) -> Any:
    """A device of this node by its ordinal."""
    if not machine.has_device(ordinal):
        return fail("cuDeviceGet", "CUDA_ERROR_INVALID_DEVICE")
    return (OK, cuda.CUdevice(int(ordinal)))


@driver_call
def cuDeviceGetCount(machine: SimulatedMachine) -> Any:
    """One process sees every GPU of its node."""
    return (OK, machine.topology.gpus.count)


@driver_call
def cuDeviceGetAttribute(machine: SimulatedMachine, attrib: Any, dev: Any) -> Any:
    """What the topology says; UnknownCall for an attribute that nobody modelled."""
    site = "cuDeviceGetAttribute"
    if not machine.has_device(dev):
        return fail(site, "CUDA_ERROR_INVALID_DEVICE")
    try:
        name = cuda.CUdevice_attribute(int(attrib)).name.removeprefix("CU_DEVICE_ATTRIBUTE_")
    except ValueError:
        return fail(site, "CUDA_ERROR_INVALID_VALUE")
    major, minor = machine.topology.gpus.compute_capability.split(".")
    told = {
        **_DEFAULTS,
        "COMPUTE_CAPABILITY_MAJOR": int(major),
        "COMPUTE_CAPABILITY_MINOR": int(minor),
        **machine.topology.says.attributes,
    }
    if name not in told:
        raise UnknownCall(f"the attribute {name}")
    return (OK, told[name])


@driver_call
def cuDeviceCanAccessPeer(machine: SimulatedMachine, dev: Any, peerDev: Any) -> Any:
    """1 where loads and stores reach the peer; 0 for the device itself (cuda.h)."""
    if not machine.has_device(dev) or not machine.has_device(peerDev):
        return fail("cuDeviceCanAccessPeer", "CUDA_ERROR_INVALID_DEVICE")
    a, b = machine.gpu_of(dev), machine.gpu_of(peerDev)
    return (OK, int(a != b and machine.topology.reaches(a, b)))


@driver_call
def cuDeviceGetP2PAttribute(machine: SimulatedMachine, attrib: Any, srcDevice: Any, dstDevice: Any) -> Any:
    """Recorded for two GPUs on NVSwitch: rank and partial atomics 0, the others 1."""
    known = machine.has_device(srcDevice) and machine.has_device(dstDevice)
    if not known or int(srcDevice) == int(dstDevice):
        return fail("cuDeviceGetP2PAttribute", "CUDA_ERROR_INVALID_DEVICE")
    name = cuda.CUdevice_P2PAttribute(int(attrib)).name
    if "RANK" in name or "PARTIAL" in name:
        return (OK, 0)
    reached = machine.topology.reaches(machine.gpu_of(srcDevice), machine.gpu_of(dstDevice))
    return (OK, int(reached))


# ------------------------------------------------------------------- context


@driver_call
def cuDevicePrimaryCtxRetain(machine: SimulatedMachine, dev: Any) -> Any:
    """One more reference to the device's primary context."""
    if not machine.has_device(dev):
        return fail("cuDevicePrimaryCtxRetain", "CUDA_ERROR_INVALID_DEVICE")
    machine.retained[int(dev)] += 1
    return (OK, cuda.CUcontext(_CONTEXT + int(dev)))


@driver_call
def cuDevicePrimaryCtxRelease(machine: SimulatedMachine, dev: Any) -> Any:
    """One reference less; the context itself is kept, for nobody here resets it."""
    if not machine.has_device(dev) or machine.retained[int(dev)] < 1:
        return fail("cuDevicePrimaryCtxRelease", "CUDA_ERROR_INVALID_CONTEXT")
    machine.retained[int(dev)] -= 1
    return (OK,)


@driver_call
def cuCtxSetCurrent(machine: SimulatedMachine, ctx: Any) -> Any:
    """Makes a context current on the calling thread, and on no other (cuda.h)."""
    value = int(ctx)
    if value and not machine.has_device(value - _CONTEXT):
        return fail("cuCtxSetCurrent", "CUDA_ERROR_INVALID_CONTEXT")
    machine.current_device = value - _CONTEXT if value else None
    return (OK,)


@driver_call
def cuCtxGetCurrent(machine: SimulatedMachine) -> Any:
    """The thread's context; a null one, with success, where there is none (cuda.h)."""
    device = machine.current_device
    return (OK, cuda.CUcontext(0 if device is None else _CONTEXT + device))


@context_call
def cuCtxGetDevice(machine: SimulatedMachine) -> Any:
    """The device of the thread's context."""
    return (OK, cuda.CUdevice(machine.current_device))


@context_call
def cuCtxSynchronize(machine: SimulatedMachine) -> Any:
    """Where the error of a failed kernel shows."""
    return answer("cuCtxSynchronize", machine.sticky or machine.unsafe_in_capture(waits=True))


@context_call
def cuMemGetInfo(machine: SimulatedMachine) -> Any:
    """Free and total bytes of the current device."""
    if machine.sticky:
        return fail("cuMemGetInfo", machine.sticky)
    total = machine.topology.gpus.memory_gib << 30
    return (OK, total - machine.bytes_in_use(machine.current_gpu), total)
