"""The subject ``reference``: a consumer of FlashInfer that falls back together.

FlashInfer's creation is one long collective sequence, and a rank that fails
inside it leaves its peers waiting. A consumer cannot step into that sequence;
what it can do is find out beforehand, together, whether it will work:

1.  **Preflight**: every step that multicast set-up will take, on a small object
    of its own, with a vote of all ranks after each. A rank that fails says so
    at the next vote, nobody goes on, and everything is given back.
2.  **Votes before and after creation**: all ranks start it, and all ranks keep
    the result or none does. A workspace that is not usable on every rank is
    destroyed on every rank before the next rung is tried.
3.  **Ladder**: mnnvl, trtllm, then the process group's own all-reduce. An order of
    the user is used or refused with ``WorkspaceUnavailable``, the same on every rank.
4.  **Memory**: a rung that failed is not tried again by this object.

It restores what a caller owns (Python's random state, the current device) and
releases by public means what FlashInfer's trtllm ``destroy()`` leaves behind.
To use it in your own code, copy this file: it needs torch, FlashInfer and
``cuda.bindings``, and nothing of the lab but ``Environment``.
"""

from __future__ import annotations

import gc
import logging
import os
import random
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from faultlab.subjects.base import Environment, plain_all_reduce

logger = logging.getLogger("faultlab.reference")

_LADDER = ("mnnvl", "trtllm")


class WorkspaceUnavailable(RuntimeError):
    """The back end that the user ordered cannot be used, on any rank."""


class StepFailed(Exception):
    """At least one rank failed a voted step; every rank raises this together."""


class Reference:
    """One method a step; see the module for the protocol."""

    declared_errors: tuple[type[BaseException], ...] = (WorkspaceUnavailable,)
    logs = True

    def __init__(self, environment: Environment) -> None:
        self._environment = environment
        self._ladder = _ladder(environment)
        self._failed: dict[str, str] = {}
        self._workspace: Any = None
        self._leftovers: list[Callable[[], None]] = []

    # ----------------------------------------------------------------- steps

    def create(self) -> Any:
        """The best workspace that works on every rank, or None for the plain
        all-reduce. Raises WorkspaceUnavailable if the user's order cannot be met."""
        if self._workspace is not None:
            return self._workspace
        state, device = random.getstate(), torch.cuda.current_device()
        try:
            for backend in self._ladder:
                if backend not in self._failed and self._try(backend):
                    return self._workspace
        finally:
            random.setstate(state)
            if torch.cuda.current_device() != device:
                torch.cuda.set_device(device)
        if self._environment.backend != "auto":
            reason = self._failed.get(self._environment.backend, "it failed")
            raise WorkspaceUnavailable(
                f"{self._environment.backend} was ordered and cannot be used: {reason}"
            )
        return None

    def use(self, tensor: torch.Tensor) -> torch.Tensor:
        """The all-reduce, by whatever rung the ranks agreed on."""
        if self._workspace is None:
            return plain_all_reduce(tensor, self._environment.group)
        import flashinfer.comm

        return flashinfer.comm.allreduce_fusion(
            input=tensor,
            workspace=self._workspace,
            pattern=flashinfer.comm.AllReduceFusionPattern.kAllReduce,
            launch_with_pdl=False,
        )

    def collective(self) -> None:
        """One barrier on the group."""
        dist.barrier(group=self._environment.group)

    def destroy(self) -> None:
        """Give everything back; calling it again does nothing."""
        workspace, self._workspace = self._workspace, None
        if workspace is not None:
            self._destroy(workspace)

    def exit(self) -> None:
        """What is left when the interpreter ends is given back then."""
        self.destroy()

    # ---------------------------------------------------------------- a rung

    def _try(self, backend: str) -> bool:
        """Preflight, create and check one rung; all ranks return the same."""
        workspace = None
        try:
            with self._environment.window("preflight"):
                preflight(self._environment, backend)
            workspace = self._voted("creation", lambda: self._create(backend))
        except StepFailed as failure:
            self._failed[backend] = str(failure)
            level = logging.WARNING if backend != self._ladder[-1] else logging.ERROR
            logger.log(level, "rank %d: %s is not used: %s", self._environment.rank, backend, failure)
            return False
        self._workspace = workspace
        return True

    def _create(self, backend: str) -> Any:
        import flashinfer.comm
        from flashinfer.comm.mnnvl import TorchDistBackend

        environment = self._environment
        return flashinfer.comm.create_allreduce_fusion_workspace(
            backend=backend,
            world_size=environment.world_size,
            rank=environment.rank,
            max_token_num=environment.max_token_num,
            hidden_dim=environment.hidden_dim,
            dtype=environment.dtype,
            comm_backend=TorchDistBackend(environment.group),
            group=environment.group,
        )

    def _voted(self, name: str, make: Callable[[], Any]) -> Any:
        """Create, check and vote; a workspace that not all ranks can use is
        destroyed on every rank that has one."""
        workspace, problem = None, ""
        try:
            workspace = make()
            problem = usable_or_why(workspace)
        except Exception as error:
            problem = f"{type(error).__name__}: {error}"
        try:
            vote(self._environment, name, problem)
        except StepFailed:
            if workspace is not None:
                self._destroy(workspace)
            raise
        return workspace

    def _destroy(self, workspace: Any) -> None:
        """Destroy once; what the destruction leaves behind is released after it."""
        leftovers = leftovers_of(workspace)
        try:
            workspace.destroy()
        except Exception as error:
            logger.warning(
                "rank %d: destroying the %s workspace failed and was contained: %s",
                self._environment.rank,
                getattr(workspace, "backend", "?"),
                error,
            )
        del workspace
        for release in leftovers:
            try:
                release()
            except Exception as error:
                logger.warning("rank %d: releasing a leftover failed: %s", self._environment.rank, error)
        leftovers.clear()
        gc.collect()


def _ladder(environment: Environment) -> tuple[str, ...]:
    """The rungs to try, best first."""
    if environment.backend != "auto":
        return (environment.backend,)
    start = _LADDER.index(environment.preferred) if environment.preferred else 0
    return _LADDER[start:]


def usable_or_why(workspace: Any) -> str:
    """Empty if the object can be given to a kernel on this rank, else the reason."""
    if workspace is None:
        return "creation returned nothing"
    if workspace.backend == "mnnvl" and not int(workspace.mc_ptr or 0):
        return "creation returned a workspace whose multicast pointer is null"
    return ""


def leftovers_of(workspace: Any) -> list[Callable[[], None]]:
    """What to release after ``destroy()`` of this workspace, by public means.

    FlashInfer's trtllm ``destroy()`` deletes attributes, while a module-global
    dictionary keeps the memory and nobody frees the flag (0.6.10 to 0.7.4).
    """
    if getattr(workspace, "backend", "") != "trtllm":
        return []
    handles = getattr(workspace, "ipc_handles", None)
    flag = (getattr(workspace, "metadata", None) or {}).get("control_flag_ptr", 0)
    releases: list[Callable[[], None]] = []
    if handles is not None:
        from flashinfer.comm import trtllm_destroy_ipc_workspace_for_all_reduce_fusion

        releases.append(lambda: trtllm_destroy_ipc_workspace_for_all_reduce_fusion(handles))
    if flag:
        import ctypes

        from flashinfer.comm.cuda_ipc import cudart

        releases.append(lambda: cudart.cudaFree(ctypes.c_void_p(flag)))
    return releases


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
    told = [f"rank {rank}: {text}" for rank, text in enumerate(problems) if text]
    if told:
        raise StepFailed(f"{name} failed ({'; '.join(told)})")


# ----------------------------------------------------------------- preflight


def preflight(environment: Environment, backend: str) -> None:
    """Try every step the set-up of ``backend`` will take, with a vote after
    each, on the smallest objects the driver makes. Raises StepFailed on every
    rank, or on none; gives everything back either way."""
    trial = Trial(environment, multicast=backend == "mnnvl")
    try:
        for step in trial.steps():
            problem = ""
            try:
                step()
            except Exception as error:
                problem = f"{type(error).__name__}: {error}"
            vote(environment, f"preflight step {step.__name__.replace('_', ' ').strip()}", problem)
    finally:
        trial.give_back()


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

    def steps(self) -> list[Callable[[], None]]:
        """The steps in order. Every rank runs the same ones."""
        unicast = [
            self._context,
            self._allocate,
            self._exchange,
            self._import_all,
            self._map_all,
            self._small_allocation,
        ]
        if not self._multicast:
            return unicast
        team = [self._create_team, self._pass_team_on, self._add_device, self._map_team, self._bind]
        return [self._ask_multicast, *unicast, *team]

    def give_back(self) -> None:
        """Undo what was done, last first; a failure here is logged, never raised."""
        while self._undo:
            undo = self._undo.pop()
            try:
                undo()
            except Exception as error:
                logger.warning("rank %d: preflight could not give back: %s", self._environment.rank, error)

    # Every step below may raise; the vote after it tells the others.

    def _ask_multicast(self) -> None:
        from cuda.bindings import driver

        attribute = driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_MULTICAST_SUPPORTED
        if not checked(driver.cuDeviceGetAttribute(attribute, self._device)):
            raise RuntimeError("the device says that it does not support multicast")

    def _context(self) -> None:
        from cuda.bindings import driver

        context = checked(driver.cuDevicePrimaryCtxRetain(checked(driver.cuDeviceGet(self._device))))
        self._undo.append(lambda: checked(driver.cuDevicePrimaryCtxRelease(self._device)))
        checked(driver.cuCtxSetCurrent(context))
        self._size = checked(driver.cuMemGetAllocationGranularity(self._properties(), _recommended()))
        if self._multicast:
            self._size = max(
                self._size,
                checked(driver.cuMulticastGetGranularity(self._team_properties(), _team_recommended())),
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
        from cuda.bindings import driver

        self._own = checked(driver.cuMemCreate(self._size, self._properties(), 0))
        self._undo.append(lambda: checked(driver.cuMemRelease(self._own)))
        self._descriptor = int(checked(driver.cuMemExportToShareableHandle(self._own, _posix(), 0)))
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
        from cuda.bindings import driver

        self._handles: list[Any] = []
        for peer, descriptor in enumerate(self._received):
            if peer == self._environment.rank:
                self._handles.append(self._own)
                continue
            handle = checked(driver.cuMemImportFromShareableHandle(descriptor, _posix()))
            self._undo.append(partial(_release, handle))
            self._handles.append(handle)

    def _map_all(self) -> None:
        from cuda.bindings import driver

        total = self._size * len(self._handles)
        base = int(checked(driver.cuMemAddressReserve(total, self._size, 0, 0)))
        self._undo.append(lambda: checked(driver.cuMemAddressFree(base, total)))
        for index, handle in enumerate(self._handles):
            address = base + index * self._size
            checked(driver.cuMemMap(address, self._size, 0, handle, 0))
            self._undo.append(partial(_unmap, address, self._size))
        checked(driver.cuMemSetAccess(base, total, [self._access()], 1))
        checked(driver.cuMemsetD8(base + self._environment.rank * self._size, 0, self._size))

    def _small_allocation(self) -> None:
        from cuda.bindings import driver

        pointer = checked(driver.cuMemAlloc(8 * self._environment.world_size))
        self._undo.append(lambda: checked(driver.cuMemFree(pointer)))

    def _access(self) -> Any:
        from cuda.bindings import driver

        access = driver.CUmemAccessDesc()
        access.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        access.location.id = self._device
        access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        return access

    def _create_team(self) -> None:
        from cuda.bindings import driver

        self._team_descriptor: int | None = None
        if self._environment.rank != 0:
            return
        self._team = checked(driver.cuMulticastCreate(self._team_properties()))
        self._undo.append(lambda: checked(driver.cuMemRelease(self._team)))
        self._team_descriptor = int(checked(driver.cuMemExportToShareableHandle(self._team, _posix(), 0)))
        self._descriptors.append(self._team_descriptor)

    def _pass_team_on(self) -> None:
        from cuda.bindings import driver
        from flashinfer.comm.fd_exchange import broadcast_fd
        from flashinfer.comm.mnnvl import TorchDistBackend

        descriptor = broadcast_fd(TorchDistBackend(self._environment.group), self._team_descriptor, 0)
        if self._environment.rank == 0:
            return
        self._descriptors.append(descriptor)
        self._team = checked(driver.cuMemImportFromShareableHandle(descriptor, _posix()))
        self._undo.append(lambda: checked(driver.cuMemRelease(self._team)))

    def _add_device(self) -> None:
        from cuda.bindings import driver

        checked(driver.cuMulticastAddDevice(self._team, self._device))

    def _map_team(self) -> None:
        """Only after the vote on ``_add_device``: this call blocks until every
        device was added, and nothing can interrupt it."""
        from cuda.bindings import driver

        address = int(checked(driver.cuMemAddressReserve(self._size, self._size, 0, 0)))
        self._undo.append(lambda: checked(driver.cuMemAddressFree(address, self._size)))
        checked(driver.cuMemMap(address, self._size, 0, self._team, 0))
        self._undo.append(lambda: checked(driver.cuMemUnmap(address, self._size)))
        checked(driver.cuMemSetAccess(address, self._size, [self._access()], 1))

    def _bind(self) -> None:
        from cuda.bindings import driver

        checked(driver.cuMulticastBindMem(self._team, 0, self._own, 0, self._size, 0))
        self._undo.append(lambda: checked(driver.cuMulticastUnbind(self._team, self._device, 0, self._size)))


def checked(result: tuple[Any, ...]) -> Any:
    """The value of a driver call. Raises RuntimeError naming the error."""
    if int(result[0]):
        raise RuntimeError(f"{result[0].name} ({int(result[0])})")
    return result[1] if len(result) > 1 else None


def _release(handle: Any) -> None:
    from cuda.bindings import driver

    checked(driver.cuMemRelease(handle))


def _unmap(address: int, size: int) -> None:
    from cuda.bindings import driver

    checked(driver.cuMemUnmap(address, size))


def _posix() -> Any:
    from cuda.bindings import driver

    return driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR


def _recommended() -> Any:
    from cuda.bindings import driver

    return driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_RECOMMENDED


def _team_recommended() -> Any:
    from cuda.bindings import driver

    return driver.CUmulticastGranularity_flags.CU_MULTICAST_GRANULARITY_RECOMMENDED
