"""NVML's answers on a simulated machine. Indices are physical, as NVML's are."""

# ruff: noqa: N802, N803 - the names are NVML's

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import wraps
from typing import TYPE_CHECKING, Any, Final

import pynvml

from faultlab.machine.simulated.answers import nvml_error

if TYPE_CHECKING:
    from faultlab.machine.simulated.machine import SimulatedMachine

CALLS: dict[str, Callable[..., Any]] = {}

#: nvmlGpuFabricInfo_v2_t and _v3_t: the struct's size and its version in one number (nvml.h).
_FABRIC_VERSIONS: Final = (0x02000024, 0x03000028)
#: nvmlGpuP2PCapsIndex_t: its name in pynvml is no number.
_READ: Final = 0


def _call(function: Callable[..., Any]) -> Callable[..., Any]:
    """Register a call; all but init need NVML to be initialised."""
    name = function.__name__

    @wraps(function)
    def guarded(machine: SimulatedMachine, *args: Any, **kwargs: Any) -> Any:
        if name != "nvmlInit" and machine.nvml_users < 1:
            raise nvml_error("NVML_ERROR_UNINITIALIZED")
        return function(machine, *args, **kwargs)

    CALLS[name] = guarded
    return function


class Device:
    """What ``nvmlDeviceGetHandleByIndex`` returns: opaque."""

    def __init__(self, index: int) -> None:
        self.index = index


@_call
def nvmlInit(machine: SimulatedMachine) -> None:
    """Counted: as many shutdowns end it (nvml.h)."""
    machine.nvml_users += 1


@_call
def nvmlShutdown(machine: SimulatedMachine) -> None:
    """Undoes one init."""
    machine.nvml_users -= 1


@_call
def nvmlDeviceGetCount(machine: SimulatedMachine) -> int:
    """The GPUs of this node."""
    return machine.topology.gpus.count


@_call
def nvmlDeviceGetHandleByIndex(machine: SimulatedMachine, index: int) -> Device:
    """A GPU of this node by its physical index."""
    if not machine.has_device(index):
        raise nvml_error("NVML_ERROR_INVALID_ARGUMENT")
    return Device(int(index))


@_call
def nvmlDeviceGetGpuFabricInfoV(machine: SimulatedMachine, device: Device, gpuFabricInfo: Any) -> int:
    """Fills the caller's struct, given itself or by reference; only versions 2 and 3
    are known (nvml.h)."""
    struct = getattr(gpuFabricInfo, "_obj", gpuFabricInfo)
    if int(struct.version) not in _FABRIC_VERSIONS:
        raise nvml_error("NVML_ERROR_ARGUMENT_VERSION_MISMATCH")
    fabric = machine.topology.says.fabric
    if fabric is None:
        raise nvml_error("NVML_ERROR_NOT_SUPPORTED")
    struct.state = fabric.state
    struct.status = fabric.status
    struct.cliqueId = fabric.clique_id
    struct.healthMask = fabric.health_mask
    for index, byte in enumerate(bytes.fromhex(fabric.cluster_uuid)):
        struct.clusterUuid[index] = byte
    return 0


class ConfidentialComputeState:
    """``c_nvmlConfComputeSystemState_t``, as far as anybody reads it."""

    def __init__(self, feature: int) -> None:
        self.environment = 0
        self.ccFeature = feature
        self.devToolsMode = 0


@_call
def nvmlSystemGetConfComputeState(machine: SimulatedMachine) -> ConfidentialComputeState:
    """Whether confidential computing is on (recorded off: all three fields 0)."""
    return ConfidentialComputeState(int(machine.topology.says.confidential_compute))


@_call
def nvmlSystemGetConfComputeSettings(machine: SimulatedMachine, settings: Any) -> int:
    """Fills the caller's struct, given itself or by reference."""
    struct = getattr(settings, "_obj", settings)
    struct.ccFeature = int(machine.topology.says.confidential_compute)
    struct.multiGpuMode = 0
    return 0


@_call
def nvmlDeviceGetP2PStatus(machine: SimulatedMachine, device1: Device, device2: Device, p2pIndex: Any) -> int:
    """Recorded for two GPUs on NVSwitch: OK but for PCI, which is not supported there.

    Raises ctypes.ArgumentError for what is no number: ``NVML_P2P_CAPS_INDEX_READ`` is a
    tuple by a slip in pynvml (recorded).
    """
    if not isinstance(p2pIndex, int):
        raise ctypes.ArgumentError("argument 3: TypeError: Don't know how to convert parameter 3")
    a, b = machine.gpu_of(device1.index), machine.gpu_of(device2.index)
    joined, reached = machine.topology.nvlink(a, b), machine.topology.reaches(a, b)
    by_index = {
        _READ: reached,
        pynvml.NVML_P2P_CAPS_INDEX_WRITE: reached,
        pynvml.NVML_P2P_CAPS_INDEX_NVLINK: joined,
        pynvml.NVML_P2P_CAPS_INDEX_ATOMICS: reached,
        pynvml.NVML_P2P_CAPS_INDEX_PCI: reached and not joined,
    }
    if p2pIndex not in by_index:
        raise nvml_error("NVML_ERROR_INVALID_ARGUMENT")
    ok, not_supported = pynvml.NVML_P2P_STATUS_OK, pynvml.NVML_P2P_STATUS_NOT_SUPPORTED
    return int(ok if by_index[p2pIndex] else not_supported)
