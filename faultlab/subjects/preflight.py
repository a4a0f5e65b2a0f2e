"""Votes, and a preflight that tries every step of a set-up together.

Part of the subject ``reference``, and to be copied with it. Before a step that waits for
peers, and at the end, all ranks vote on the steps since the last vote, so a rank that
fails says so before its peers wait for it; only what every rank could do is gone on with.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from faultlab.subjects.base import Environment

logger = logging.getLogger("faultlab.reference")


class StepFailed(Exception):
    """At least one rank failed a voted step; every rank raises this together."""


# --------------------------------------------------------------------- votes


def vote(environment: Environment, name: str, problem: str) -> None:
    """Tell every rank what happened here. Raises StepFailed on every rank if
    any rank reports a problem; the text is the same everywhere."""
    anybody = torch.tensor([1 if problem else 0])
    dist.all_reduce(anybody, op=dist.ReduceOp.MAX, group=environment.group)
    if not int(anybody):
        return
    problems: list[Any] = [None] * environment.world_size
    dist.all_gather_object(problems, problem, group=environment.group)
    told = {text: [rank for rank, said in enumerate(problems) if said == text] for text in problems if text}
    if told:
        reasons = "; ".join(f"{_ranks(ranks)}: {text}" for text, ranks in told.items())
        raise StepFailed(f"{name} failed ({reasons})")


def _ranks(ranks: list[int]) -> str:
    """``rank 1``, ``ranks 0, 2``, ``ranks 0-71``: short enough for a line of a log."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if len(ranks) == ranks[-1] - ranks[0] + 1:
        return f"ranks {ranks[0]}-{ranks[-1]}"
    return f"ranks {', '.join(str(rank) for rank in ranks)}"


# ----------------------------------------------------------------- preflight


def preflight(environment: Environment, backend: str) -> None:
    """Try every step the set-up of ``backend`` will take, on the smallest objects
    the driver makes. Raises StepFailed on every rank, or on none; gives everything
    back either way."""
    trial = Trial(environment, multicast=backend == "mnnvl")
    try:
        for stage in trial.stages():
            vote(environment, "preflight", _problem_of(stage))
    finally:
        trial.give_back()


def _problem_of(stage: list[Callable[[], None]]) -> str:
    """Take the steps in order, up to the first that fails: which one, and why; else empty."""
    for step in stage:
        try:
            step()
        except Exception as error:
            return f"{step.__name__.strip('_').replace('_', ' ')}: {type(error).__name__}: {error}"
    return ""


class Trial:
    """A small symmetric allocation, with a multicast object over it or without."""

    def __init__(self, environment: Environment, *, multicast: bool) -> None:
        self._environment = environment
        self._multicast = multicast
        self._device = environment.device.index
        self._undo: list[Callable[[], Any]] = []
        self._own: Any = None
        self._team: Any = None
        self._descriptors: list[int] = []

    def stages(self) -> list[list[Callable[[], None]]]:
        """The steps in order, with a vote after each stage. Every rank takes the same ones.

        A stage begins with a step that waits for peers, or that peers would wait for
        without a time-out once it failed: nobody takes it before all said that they can."""
        local = [self._context, self._allocate]
        mapped = [self._import_all, self._map_all, self._small_allocation]
        if not self._multicast:
            return [local, [self._exchange], mapped]
        return [
            [self._ask_multicast, *local],
            [self._exchange],
            [*mapped, self._create_team],
            [self._pass_team_on],
            [self._add_device],
            [self._map_team, self._bind],
        ]

    def give_back(self) -> None:
        """Undo what was done, last first; a failure here is logged, never raised."""
        while self._undo:
            undo = self._undo.pop()
            try:
                undo()
            except Exception as error:
                logger.warning("rank %d: preflight could not give back: %s", self._environment.rank, error)

    # Every step below may raise; the vote after its stage tells the others.

    def _ask_multicast(self) -> None:
        from cuda.bindings import driver

        attribute = driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_MULTICAST_SUPPORTED
        if not called("cuDeviceGetAttribute", attribute, self._device):
            raise RuntimeError("the device says that it does not support multicast")

    def _context(self) -> None:
        context = called("cuDevicePrimaryCtxRetain", called("cuDeviceGet", self._device))
        self._undo.append(lambda: called("cuDevicePrimaryCtxRelease", self._device))
        called("cuCtxSetCurrent", context)
        self._size = called("cuMemGetAllocationGranularity", self._properties(), _recommended())
        if self._multicast:
            self._size = max(
                self._size,
                called("cuMulticastGetGranularity", self._team_properties(), _team_recommended()),
            )

    def _properties(self) -> Any:
        from cuda.bindings import driver

        properties = driver.CUmemAllocationProp()
        properties.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        properties.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        properties.location.id = self._device
        properties.requestedHandleTypes = _posix()
        # FlashInfer asks for it too, without a query (mnnvl.py).
        properties.allocFlags.gpuDirectRDMACapable = 1
        return properties

    def _team_properties(self) -> Any:
        from cuda.bindings import driver

        properties = driver.CUmulticastObjectProp()
        properties.numDevices = self._environment.world_size
        properties.size = getattr(self, "_size", 0)
        properties.handleTypes = _posix()
        return properties

    def _allocate(self) -> None:
        self._own = called("cuMemCreate", self._size, self._properties(), 0)
        self._undo.append(lambda: called("cuMemRelease", self._own))
        self._descriptor = int(called("cuMemExportToShareableHandle", self._own, _posix(), 0))
        self._undo.append(self._close_descriptors)
        self._descriptors.append(self._descriptor)

    def _close_descriptors(self) -> None:
        while self._descriptors:
            os.close(self._descriptors.pop())

    def _exchange(self) -> None:
        from flashinfer.comm.fd_exchange import exchange_fds
        from flashinfer.comm.mnnvl import TorchDistBackend

        self._received = exchange_fds(TorchDistBackend(self._environment.group), self._descriptor)
        self._descriptors.extend(fd for fd in self._received if fd != self._descriptor)

    def _import_all(self) -> None:
        self._handles: list[Any] = []
        for peer, descriptor in enumerate(self._received):
            if peer == self._environment.rank:
                self._handles.append(self._own)
                continue
            handle = called("cuMemImportFromShareableHandle", descriptor, _posix())
            self._undo.append(partial(_release, handle))
            self._handles.append(handle)

    def _map_all(self) -> None:
        total = self._size * len(self._handles)
        base = int(called("cuMemAddressReserve", total, self._size, 0, 0))
        self._undo.append(lambda: called("cuMemAddressFree", base, total))
        for index, handle in enumerate(self._handles):
            address = base + index * self._size
            called("cuMemMap", address, self._size, 0, handle, 0)
            self._undo.append(partial(_unmap, address, self._size))
        called("cuMemSetAccess", base, total, [self._access()], 1)
        called("cuMemsetD8", base + self._environment.rank * self._size, 0, self._size)

    def _small_allocation(self) -> None:
        pointer = called("cuMemAlloc", 8 * self._environment.world_size)
        self._undo.append(lambda: called("cuMemFree", pointer))

    def _access(self) -> Any:
        from cuda.bindings import driver

        access = driver.CUmemAccessDesc()
        access.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        access.location.id = self._device
        access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        return access

    def _create_team(self) -> None:
        self._team_descriptor: int | None = None
        if self._environment.rank != 0:
            return
        self._team = called("cuMulticastCreate", self._team_properties())
        self._undo.append(lambda: called("cuMemRelease", self._team))
        self._team_descriptor = int(called("cuMemExportToShareableHandle", self._team, _posix(), 0))
        self._descriptors.append(self._team_descriptor)

    def _pass_team_on(self) -> None:
        from flashinfer.comm.fd_exchange import broadcast_fd
        from flashinfer.comm.mnnvl import TorchDistBackend

        descriptor = broadcast_fd(TorchDistBackend(self._environment.group), self._team_descriptor, 0)
        if self._environment.rank == 0:
            return
        self._descriptors.append(descriptor)
        self._team = called("cuMemImportFromShareableHandle", descriptor, _posix())
        self._undo.append(lambda: called("cuMemRelease", self._team))

    def _add_device(self) -> None:
        called("cuMulticastAddDevice", self._team, self._device)

    def _map_team(self) -> None:
        """Only after the vote on ``_add_device``: this call blocks until every
        device was added, and nothing can interrupt it."""
        address = int(called("cuMemAddressReserve", self._size, self._size, 0, 0))
        self._undo.append(lambda: called("cuMemAddressFree", address, self._size))
        called("cuMemMap", address, self._size, 0, self._team, 0)
        self._undo.append(lambda: called("cuMemUnmap", address, self._size))
        called("cuMemSetAccess", address, self._size, [self._access()], 1)

    def _bind(self) -> None:
        called("cuMulticastBindMem", self._team, 0, self._own, 0, self._size, 0)
        self._undo.append(lambda: called("cuMulticastUnbind", self._team, self._device, 0, self._size))


def called(name: str, *arguments: Any) -> Any:
    """The value of the driver call ``name``. Raises RuntimeError naming it and its error."""
    from cuda.bindings import driver

    try:
        result = getattr(driver, name)(*arguments)
    except Exception as error:
        raise RuntimeError(f"{name} raised {type(error).__name__}: {error}") from error
    if int(result[0]):
        raise RuntimeError(f"{name} answered {result[0].name} ({int(result[0])})")
    return result[1] if len(result) > 1 else None


def _release(handle: Any) -> None:
    called("cuMemRelease", handle)


def _unmap(address: int, size: int) -> None:
    called("cuMemUnmap", address, size)


def _posix() -> Any:
    from cuda.bindings import driver

    return driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR


def _recommended() -> Any:
    from cuda.bindings import driver

    return driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_RECOMMENDED


def _team_recommended() -> Any:
    from cuda.bindings import driver

    return driver.CUmulticastGranularity_flags.CU_MULTICAST_GRANULARITY_RECOMMENDED
