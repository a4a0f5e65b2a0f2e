"""The sites: every named point at which a fault can strike.

A site knows which errors it may return in the field, whether it blocks on
peers, and what state is left when it fails. The loader uses this table to
refuse impossible faults before anything runs; the injector uses it to give an
error in the convention of the library that the site belongs to.

To add a site: add a row here, let a seam report it (``faultlab/seam``) and,
for the simulated machine, give it a handler (``faultlab/machine/simulated``).
Error lists come from the driver documentation and public reports; a site may
return only what is listed.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

#: driver: functions of ``cuda.bindings.driver``; they return ``(CUresult, …)``.
#: runtime: ``cudart.*``; the ctypes library returns a number, the bindings ``(cudaError_t, …)``.
#: nvml: functions of ``pynvml``; they raise ``NVMLError``.
#: collective: functions of ``torch.distributed`` on a process group; they raise.
#: descriptor: FlashInfer's exchange of file descriptors; it raises ``OSError``.
#: step: a whole call of the workspace interface; it raises.
#: value: something that is read, not called.
#: kernel: a launch; its error is sticky and shows at the next synchronisation.
DOMAINS: Final = (
    "driver",
    "runtime",
    "nvml",
    "collective",
    "descriptor",
    "step",
    "value",
    "kernel",
)

_EFFECTS: Final[dict[str, frozenset[str]]] = {
    "driver": frozenset({"error", "raise", "delay_s", "hang", "kill", "poison"}),
    "runtime": frozenset({"error", "raise", "delay_s", "hang", "kill", "poison"}),
    "nvml": frozenset({"error", "delay_s", "hang", "kill"}),
    "collective": frozenset({"raise", "delay_s", "hang", "kill"}),
    "descriptor": frozenset({"raise", "delay_s", "hang", "kill", "lose"}),
    "step": frozenset({"error", "raise", "delay_s", "hang", "kill", "poison"}),
    "value": frozenset({"value"}),
    "kernel": frozenset({"error", "delay_s", "hang", "kill", "value"}),
}


@dataclass(frozen=True)
class Site:
    """One row of the table.

    ``errors``: codes by name that the call may return. ``blocks_on``: what it
    waits for, empty if it never waits for a peer. ``on_failure``: the state
    that is left. ``outputs``: how many values follow the code (driver only).
    ``releases``: its success gives something back, so what it was asked to
    release is not held against the subject when it is struck.
    """

    name: str
    domain: str
    errors: tuple[str, ...] = ()
    blocks_on: str = ""
    on_failure: str = "nothing changed"
    outputs: int = 0
    releases: bool = False
    extra_effects: frozenset[str] = frozenset()

    @property
    def effects(self) -> frozenset[str]:
        """The kinds of effect that make sense here."""
        return _EFFECTS[self.domain] | self.extra_effects


def _cuda(*names: str) -> tuple[str, ...]:
    return tuple(f"CUDA_ERROR_{name}" for name in names)


_GENERIC = _cuda("NOT_INITIALIZED", "DEINITIALIZED", "INVALID_CONTEXT")
_STICKY = _cuda(
    "ILLEGAL_ADDRESS",
    "MISALIGNED_ADDRESS",
    "LAUNCH_FAILED",
    "ECC_UNCORRECTABLE",
    "NVLINK_UNCORRECTABLE",
    "LAUNCH_TIMEOUT",
)


def _driver(
    name: str,
    errors: tuple[str, ...],
    *,
    outputs: int = 0,
    blocks_on: str = "",
    on_failure: str = "nothing changed",
    releases: bool = False,
    extra: frozenset[str] = frozenset(),
) -> Site:
    return Site(name, "driver", (*errors, *_GENERIC), blocks_on, on_failure, outputs, releases, extra)


_VALUE = frozenset({"value"})
_CAPTURE = _cuda("STREAM_CAPTURE_UNSUPPORTED", "STREAM_CAPTURE_IMPLICIT")

_DRIVER: Final = (
    _driver("cuInit", _cuda("INVALID_VALUE", "INVALID_DEVICE", "NO_DEVICE", "SYSTEM_NOT_READY")),
    _driver("cuDriverGetVersion", _cuda("INVALID_VALUE"), outputs=1),
    _driver("cuDeviceGet", _cuda("INVALID_VALUE", "INVALID_DEVICE"), outputs=1),
    _driver("cuDeviceGetCount", _cuda("INVALID_VALUE"), outputs=1),
    _driver("cuDeviceGetAttribute", _cuda("INVALID_VALUE", "INVALID_DEVICE"), outputs=1, extra=_VALUE),
    _driver("cuDeviceCanAccessPeer", _cuda("INVALID_DEVICE"), outputs=1, extra=_VALUE),
    _driver("cuDeviceGetP2PAttribute", _cuda("INVALID_VALUE", "INVALID_DEVICE"), outputs=1, extra=_VALUE),
    _driver(
        "cuDevicePrimaryCtxRetain",
        _cuda("INVALID_VALUE", "INVALID_DEVICE", "OUT_OF_MEMORY", "SYSTEM_NOT_READY", "UNKNOWN"),
        outputs=1,
    ),
    _driver("cuDevicePrimaryCtxRelease", _cuda("INVALID_DEVICE"), releases=True),
    _driver("cuCtxSetCurrent", ()),
    _driver("cuCtxGetCurrent", (), outputs=1),
    _driver("cuCtxGetDevice", (), outputs=1),
    _driver("cuCtxSynchronize", (*_STICKY, *_CAPTURE)),
    _driver("cuMemGetInfo", (*_cuda("INVALID_VALUE"), *_STICKY), outputs=2),
    _driver("cuMemGetAllocationGranularity", _cuda("INVALID_VALUE", "NOT_SUPPORTED"), outputs=1),
    _driver(
        "cuMemCreate",
        _cuda("INVALID_VALUE", "OUT_OF_MEMORY", "INVALID_DEVICE", "NOT_PERMITTED", "NOT_SUPPORTED"),
        outputs=1,
    ),
    _driver(
        "cuMemExportToShareableHandle",
        _cuda("INVALID_VALUE", "OUT_OF_MEMORY", "NOT_PERMITTED", "NOT_SUPPORTED"),
        outputs=1,
    ),
    _driver(
        "cuMemImportFromShareableHandle",
        _cuda(
            "INVALID_VALUE",
            "OUT_OF_MEMORY",
            "INVALID_DEVICE",
            "INVALID_HANDLE",
            "NOT_PERMITTED",
            "NOT_SUPPORTED",
            "UNKNOWN",
        ),
        outputs=1,
    ),
    _driver(
        "cuMemAddressReserve",
        _cuda("INVALID_VALUE", "OUT_OF_MEMORY", "NOT_PERMITTED", "NOT_SUPPORTED"),
        outputs=1,
    ),
    _driver(
        "cuMemAddressFree",
        _cuda("INVALID_VALUE", "NOT_PERMITTED", "NOT_SUPPORTED"),
        on_failure="the range stays reserved",
        releases=True,
    ),
    _driver(
        "cuMemMap",
        _cuda(
            "INVALID_VALUE",
            "OUT_OF_MEMORY",
            "INVALID_DEVICE",
            "ILLEGAL_STATE",
            "NOT_PERMITTED",
            "NOT_SUPPORTED",
            "SYSTEM_NOT_READY",
        ),
        blocks_on="a multicast object: every device added",
    ),
    _driver(
        "cuMemSetAccess",
        _cuda("INVALID_VALUE", "INVALID_DEVICE", "NOT_SUPPORTED"),
        on_failure="the range stays mapped without access",
    ),
    _driver(
        "cuMemUnmap",
        _cuda("INVALID_VALUE", "NOT_PERMITTED", "NOT_SUPPORTED"),
        on_failure="the range stays mapped",
        releases=True,
    ),
    _driver(
        "cuMemRelease",
        _cuda("INVALID_VALUE", "NOT_PERMITTED", "NOT_SUPPORTED"),
        on_failure="the reference stays",
        releases=True,
    ),
    _driver("cuMemAlloc", (*_cuda("INVALID_VALUE", "OUT_OF_MEMORY"), *_STICKY, *_CAPTURE), outputs=1),
    _driver(
        "cuMemFree",
        (*_cuda("INVALID_VALUE"), *_STICKY, *_CAPTURE),
        on_failure="the memory stays",
        releases=True,
    ),
    _driver("cuMemcpyHtoD", (*_cuda("INVALID_VALUE"), *_STICKY)),
    _driver("cuMemcpyDtoH", (*_cuda("INVALID_VALUE"), *_STICKY)),
    _driver("cuMemsetD8", (*_cuda("INVALID_VALUE"), *_STICKY)),
    _driver("cuMemsetD16", (*_cuda("INVALID_VALUE"), *_STICKY)),
    _driver("cuMemsetD32", (*_cuda("INVALID_VALUE"), *_STICKY)),
    _driver("cuMulticastGetGranularity", _cuda("INVALID_VALUE", "NOT_SUPPORTED"), outputs=1),
    _driver(
        "cuMulticastCreate",
        _cuda("INVALID_VALUE", "OUT_OF_MEMORY", "INVALID_DEVICE", "NOT_PERMITTED", "NOT_SUPPORTED"),
        outputs=1,
    ),
    _driver(
        "cuMulticastAddDevice",
        _cuda(
            "INVALID_VALUE",
            "OUT_OF_MEMORY",
            "INVALID_DEVICE",
            "ILLEGAL_STATE",
            "NOT_PERMITTED",
            "NOT_SUPPORTED",
            "UNKNOWN",
        ),
        on_failure="the device is not in the team: peers block in map and bind",
    ),
    _driver(
        "cuMulticastBindMem",
        _cuda(
            "INVALID_VALUE",
            "OUT_OF_MEMORY",
            "INVALID_DEVICE",
            "ILLEGAL_STATE",
            "NOT_PERMITTED",
            "NOT_SUPPORTED",
            "SYSTEM_NOT_READY",
            "UNKNOWN",
        ),
        blocks_on="a multicast object: every device added",
    ),
    _driver(
        "cuMulticastUnbind",
        _cuda("INVALID_VALUE", "INVALID_DEVICE", "NOT_PERMITTED", "NOT_SUPPORTED", "UNKNOWN"),
        on_failure="the memory stays bound",
        releases=True,
    ),
)


def _runtime(name: str, errors: tuple[str, ...] = (), *, releases: bool = False) -> Site:
    return Site(f"cudart.{name}", "runtime", (*errors, *_STICKY), releases=releases)


_RUNTIME: Final = (
    _runtime("cudaSetDevice", _cuda("INVALID_DEVICE", "SYSTEM_NOT_READY")),
    _runtime("cudaDeviceSynchronize", _CAPTURE),
    _runtime("cudaMalloc", (*_cuda("INVALID_VALUE", "OUT_OF_MEMORY"), *_CAPTURE)),
    _runtime("cudaFree", (*_cuda("INVALID_VALUE"), *_CAPTURE), releases=True),
    _runtime("cudaMemset", _cuda("INVALID_VALUE")),
    _runtime("cudaMemcpy", _cuda("INVALID_VALUE")),
)


def _nvml(name: str, *errors: str, releases: bool = False) -> Site:
    return Site(
        name,
        "nvml",
        tuple(f"NVML_ERROR_{e}" for e in (*errors, "UNINITIALIZED", "UNKNOWN")),
        releases=releases,
    )


_NVML: Final = (
    _nvml("nvmlInit", "DRIVER_NOT_LOADED", "NO_PERMISSION", "LIBRARY_NOT_FOUND", "LIB_RM_VERSION_MISMATCH"),
    _nvml("nvmlShutdown", releases=True),
    _nvml("nvmlDeviceGetCount"),
    _nvml("nvmlDeviceGetHandleByIndex", "INVALID_ARGUMENT", "NO_PERMISSION", "GPU_IS_LOST", "NOT_FOUND"),
    _nvml(
        "nvmlDeviceGetGpuFabricInfoV",
        "INVALID_ARGUMENT",
        "NOT_SUPPORTED",
        "FUNCTION_NOT_FOUND",
        "ARGUMENT_VERSION_MISMATCH",
        "GPU_IS_LOST",
    ),
    _nvml("nvmlSystemGetConfComputeState", "NOT_SUPPORTED", "FUNCTION_NOT_FOUND"),
    _nvml(
        "nvmlSystemGetConfComputeSettings", "NOT_SUPPORTED", "FUNCTION_NOT_FOUND", "ARGUMENT_VERSION_MISMATCH"
    ),
    _nvml("nvmlDeviceGetP2PStatus", "INVALID_ARGUMENT", "NOT_SUPPORTED"),
)


def _collective(name: str) -> Site:
    return Site(
        f"comm.{name}",
        "collective",
        blocks_on="the ranks of the group",
        on_failure="the group may be out of step",
    )


_COLLECTIVE: Final = tuple(
    _collective(name)
    for name in (
        "allgather",
        "allreduce",
        "barrier",
        "broadcast",
        "gather",
        "reduce",
        "scatter",
        "reduce_scatter",
        "alltoall",
        "send",
        "recv",
        "new_group",
    )
)

_DESCRIPTOR: Final = (
    Site("fd.connect", "descriptor", blocks_on="the peer's socket, for at most 30 s"),
    Site("fd.send", "descriptor", on_failure="the peer waits for a descriptor that never comes"),
    Site("fd.recv", "descriptor", blocks_on="the peer's descriptor, for at most 30 s"),
)

_MULTICAST_TEXTS = _cuda(
    "INVALID_VALUE",
    "OUT_OF_MEMORY",
    "INVALID_DEVICE",
    "INVALID_HANDLE",
    "ILLEGAL_STATE",
    "NOT_PERMITTED",
    "NOT_SUPPORTED",
    "SYSTEM_NOT_READY",
    "UNKNOWN",
)

_STEP: Final = (
    Site(
        "workspace.create",
        "step",
        _MULTICAST_TEXTS,
        blocks_on="the ranks of the group",
        on_failure="whatever the creation had built by then",
    ),
    Site(
        "workspace.destroy",
        "step",
        (*_MULTICAST_TEXTS, *_STICKY),
        on_failure="whatever the destruction had not given back by then",
        releases=True,
    ),
)

_VALUES: Final = (
    Site("workspace.mc_ptr", "value"),
    Site("symm.multicast_ptr", "value"),
)

_KERNEL: Final = (
    Site("kernel.allreduce", "kernel", _STICKY, blocks_on="the same launch on every rank"),
    Site("kernel.lamport_initialize", "kernel", _STICKY),
    Site("kernel.load", "step", on_failure="no kernel: the first use fails"),
)

SITES: Final[dict[str, Site]] = {
    site.name: site
    for site in (*_DRIVER, *_RUNTIME, *_NVML, *_COLLECTIVE, *_DESCRIPTOR, *_STEP, *_VALUES, *_KERNEL)
}

#: Device attributes a fault can name: ``cuDeviceGetAttribute(MULTICAST_SUPPORTED)``.
ATTRIBUTES: Final[dict[str, int]] = {
    "COMPUTE_CAPABILITY_MAJOR": 75,
    "COMPUTE_CAPABILITY_MINOR": 76,
    "VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED": 102,
    "HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED": 103,
    "GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED": 110,
    "HANDLE_TYPE_FABRIC_SUPPORTED": 128,
    "MULTICAST_SUPPORTED": 132,
}

_QUALIFIED = re.compile(r"^(?P<site>[A-Za-z_.]+)\((?P<argument>[A-Z0-9_]+)\)$")


def split_site(text: str) -> tuple[str, str]:
    """``cuDeviceGetAttribute(MULTICAST_SUPPORTED)`` as site and argument.

    The argument is empty where the whole site is meant.
    """
    match = _QUALIFIED.match(text)
    if match is None:
        return text, ""
    return match["site"], match["argument"]


assert all(site.domain in DOMAINS for site in SITES.values())
assert all(
    error.startswith(("CUDA_ERROR_", "NVML_ERROR_")) for site in SITES.values() for error in site.errors
)
