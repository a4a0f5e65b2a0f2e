"""NVML's answers on a simulated machine. Indices are physical, as NVML's are."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pynvml

from faultlab.codes import NVML

if TYPE_CHECKING:
    from faultlab.machine.simulated.machine import SimulatedMachine

CALLS: dict[str, Callable[..., Any]] = {}


def _call(function: Callable[..., Any]) -> Callable[..., Any]:
    """Register a call; all but init need NVML to be initialised."""
    name = function.__name__

    def guarded(machine: SimulatedMachine, *args: Any, **kwargs: Any) -> Any:
        if name != "nvmlInit" and machine.nvml_users < 1:
            raise _error("NVML_ERROR_UNINITIALIZED")
        return function(machine, *args, **kwargs)

    CALLS[name] = guarded
    return function


def _error(name: str) -> Exception:
    made: Exception = pynvml.NVMLError(NVML[name])
    return made


class Device:
    """What ``nvmlDeviceGetHandleByIndex`` returns: opaque."""

    def __init__(self, index: int) -> None:
        self.index = index


@_call
def nvmlInit(machine: SimulatedMachine) -> None:  # noqa: N802
    machine.nvml_users += 1


@_call
def nvmlShutdown(machine: SimulatedMachine) -> None:  # noqa: N802
    machine.nvml_users -= 1


@_call
def nvmlDeviceGetCount(machine: SimulatedMachine) -> int:  # noqa: N802
    return machine.topology.gpus.count


@_call
def nvmlDeviceGetHandleByIndex(machine: SimulatedMachine, index: int) -> Device:  # noqa: N802
    if not 0 <= int(index) < machine.topology.gpus.count:
        raise _error("NVML_ERROR_INVALID_ARGUMENT")
    return Device(int(index))


@_call
def nvmlDeviceGetGpuFabricInfoV(machine: SimulatedMachine, device: Device, info: Any) -> int:  # noqa: N802
    """Fills the caller's struct; only versions 2 and 3 are known (nvml.h)."""
    struct = getattr(info, "_obj", info)
    if int(struct.version) not in (0x02000024, 0x03000028):
        raise _error("NVML_ERROR_ARGUMENT_VERSION_MISMATCH")
    fabric = machine.topology.says.fabric
    if fabric is None:
        raise _error("NVML_ERROR_NOT_SUPPORTED")
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
def nvmlSystemGetConfComputeState(machine: SimulatedMachine) -> Any:  # noqa: N802
    return ConfidentialComputeState(int(machine.topology.says.confidential_compute))


@_call
def nvmlSystemGetConfComputeSettings(machine: SimulatedMachine, settings: Any) -> int:  # noqa: N802
    struct = getattr(settings, "_obj", settings)
    struct.ccFeature = int(machine.topology.says.confidential_compute)
    struct.multiGpuMode = 0
    return 0


@_call
def nvmlDeviceGetP2PStatus(machine: SimulatedMachine, device: Device, peer: Device, index: Any) -> int:  # noqa: N802
    base = machine.node * machine.topology.gpus.count
    a, b = base + device.index, base + peer.index
    number = index[0] if isinstance(index, tuple) else int(index)
    if number == pynvml.NVML_P2P_CAPS_INDEX_NVLINK:
        reached = machine.topology.nvlink(a, b)
    elif number == pynvml.NVML_P2P_CAPS_INDEX_PCI:
        # Recorded on a pair with NVLink: not supported.
        reached = machine.topology.reaches(a, b) and not machine.topology.nvlink(a, b)
    else:
        reached = machine.topology.reaches(a, b)
    return int(pynvml.NVML_P2P_STATUS_OK if reached else pynvml.NVML_P2P_STATUS_NOT_SUPPORTED)
