"""The driver's calls for devices and contexts, with the recorded answers; memory and
multicast objects are in the modules of these names.

Every function takes the machine and the arguments of the function of the same
name in ``cuda.bindings.driver``, and returns the same tuple. Codes that are not
from the recording are marked with their source.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from cuda.bindings import driver as cuda

from faultlab.codes import CUDA
from faultlab.sites import SITES

if TYPE_CHECKING:
    from faultlab.machine.simulated.machine import SimulatedMachine

OK = cuda.CUresult.CUDA_SUCCESS
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


def driver_call(function: Callable[..., Any]) -> Callable[..., Any]:
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


def no_device(machine: SimulatedMachine, device: Any) -> bool:
    return not 0 <= int(device) < machine.topology.gpus.count


def gpu_of(machine: SimulatedMachine, device: int) -> int:
    """The GPU of the whole machine behind an ordinal of this rank's node."""
    return machine.node * machine.topology.gpus.count + device


# ------------------------------------------------------------------- devices


@driver_call
def cuInit(machine: SimulatedMachine, flags: int) -> Any:  # noqa: N802
    return (OK,)


@driver_call
def cuDriverGetVersion(machine: SimulatedMachine) -> Any:  # noqa: N802
    return (OK, 13000)


@driver_call
def cuDeviceGet(machine: SimulatedMachine, ordinal: int) -> Any:  # noqa: N802
    if no_device(machine, ordinal):
        return fail("cuDeviceGet", "CUDA_ERROR_INVALID_DEVICE")
    return (OK, cuda.CUdevice(int(ordinal)))


@driver_call
def cuDeviceGetCount(machine: SimulatedMachine) -> Any:  # noqa: N802
    return (OK, machine.topology.gpus.count)


@driver_call
def cuDeviceGetAttribute(machine: SimulatedMachine, attribute: Any, device: Any) -> Any:  # noqa: N802
    site = "cuDeviceGetAttribute"
    if no_device(machine, device):
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
    return (OK, told[name])


@driver_call
def cuDeviceCanAccessPeer(machine: SimulatedMachine, device: Any, peer: Any) -> Any:  # noqa: N802
    if no_device(machine, device) or no_device(machine, peer):
        return fail("cuDeviceCanAccessPeer", "CUDA_ERROR_INVALID_DEVICE")
    a, b = gpu_of(machine, int(device)), gpu_of(machine, int(peer))
    return (OK, int(a != b and machine.topology.reaches(a, b)))


@driver_call
def cuDeviceGetP2PAttribute(machine: SimulatedMachine, attribute: Any, device: Any, peer: Any) -> Any:  # noqa: N802
    site = "cuDeviceGetP2PAttribute"
    if no_device(machine, device) or no_device(machine, peer) or int(device) == int(peer):
        return fail(site, "CUDA_ERROR_INVALID_DEVICE")
    name = cuda.CUdevice_P2PAttribute(int(attribute)).name
    if "RANK" in name or "PARTIAL" in name:
        return (OK, 0)
    return (OK, int(machine.topology.reaches(gpu_of(machine, int(device)), gpu_of(machine, int(peer)))))


# ------------------------------------------------------------------- context


@driver_call
def cuDevicePrimaryCtxRetain(machine: SimulatedMachine, device: Any) -> Any:  # noqa: N802
    if no_device(machine, device):
        return fail("cuDevicePrimaryCtxRetain", "CUDA_ERROR_INVALID_DEVICE")
    machine.retained[int(device)] = machine.retained.get(int(device), 0) + 1
    return (OK, cuda.CUcontext(0xC0DE0000 + int(device)))


@driver_call
def cuDevicePrimaryCtxRelease(machine: SimulatedMachine, device: Any) -> Any:  # noqa: N802
    if machine.retained.get(int(device), 0) < 1:
        return fail("cuDevicePrimaryCtxRelease", "CUDA_ERROR_INVALID_CONTEXT")
    machine.retained[int(device)] -= 1
    return (OK,)


@driver_call
def cuCtxSetCurrent(machine: SimulatedMachine, context: Any) -> Any:  # noqa: N802
    value = int(context)
    machine.context_device = value - 0xC0DE0000 if value else None
    return (OK,)


@driver_call
def cuCtxGetCurrent(machine: SimulatedMachine) -> Any:  # noqa: N802
    device = machine.context_device
    return (OK, cuda.CUcontext(0 if device is None else 0xC0DE0000 + device))


@driver_call
def cuCtxGetDevice(machine: SimulatedMachine) -> Any:  # noqa: N802
    if machine.context_device is None:
        return fail("cuCtxGetDevice", "CUDA_ERROR_INVALID_CONTEXT")
    return (OK, cuda.CUdevice(machine.context_device))


@driver_call
def cuCtxSynchronize(machine: SimulatedMachine, *context: Any) -> Any:  # noqa: N802
    error = machine.sticky or machine.unsafe_in_capture(allocates=False)
    return fail("cuCtxSynchronize", error) if error else (OK,)


@driver_call
def cuMemGetInfo(machine: SimulatedMachine) -> Any:  # noqa: N802
    if machine.sticky:
        return fail("cuMemGetInfo", machine.sticky)
    total = machine.topology.gpus.memory_gib << 30
    return (OK, total - machine.device_bytes(), total)
