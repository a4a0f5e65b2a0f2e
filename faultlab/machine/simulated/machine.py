"""The simulated machine of one rank: handles, addresses, context, and the answers.

Each library's calls are in modules of their own (``driver``, ``virtual_memory``,
``memory``, ``multicast``, ``runtime``, ``nvml``, ``kernels``), as functions that
take the machine; this class holds the state they share, the ledger, and the way
to the board.
"""

from __future__ import annotations

import itertools
import mmap
import os
import signal
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Final

from cuda.bindings import driver as cuda

from faultlab.codes import STICKY
from faultlab.errors import UnknownCall
from faultlab.machine.base import LedgerObject, Touched
from faultlab.machine.board import BoardClient
from faultlab.machine.simulated import (
    answers,
    driver,
    kernels,
    memory,
    multicast,
    nvml,
    runtime,
    virtual_memory,
)
from faultlab.machine.simulated.addresses import READ, READ_WRITE, AddressSpace
from faultlab.machine.simulated.graph import Recording
from faultlab.topology.models import Topology

#: The driver's calls register themselves when their modules are imported.
_DRIVER_MODULES: Final = (driver, memory, multicast, virtual_memory)
_CALLS: Final[dict[str, Callable[..., Any]]] = {
    **answers.DRIVER,
    **runtime.CALLS,
    **nvml.CALLS,
    **kernels.CALLS,
}


@dataclass(frozen=True)
class Handle:
    """A reference to physical memory or to a multicast object.

    ``number``: the board's; ``gpu``: -1 for a multicast object; ``types``: the
    handle types it was made with, 0 for an imported one, which cannot be exported.
    """

    id: str
    number: int
    size_bytes: int
    gpu: int
    types: int

    @property
    def multicast(self) -> bool:
        return self.gpu < 0


@dataclass(frozen=True)
class Binding:
    """This rank's memory bound to a multicast object, both by the board's numbers."""

    id: str
    team: int
    memory: int
    size_bytes: int


@dataclass
class Capture:
    """A stream captures: in which mode, by which thread, what it recorded so far, and
    whether it was spoilt."""

    mode: str
    thread: int
    recording: Recording
    invalid: bool = False


class SimulatedMachine:
    """One rank's half; ``board`` is the half all ranks share.

    ``gpu_of_rank``: the GPU of every rank, counted over the whole machine. A process
    sees all GPUs of its node; its own is the one of its rank.
    """

    name = "simulated"

    def __init__(self, topology: Topology, rank: int, gpu_of_rank: Sequence[int], board: BoardClient) -> None:
        assert 0 <= rank < len(gpu_of_rank), rank
        self.topology = topology
        self.rank = rank
        self.gpu_of_rank = list(gpu_of_rank)
        self.board = board
        self.node = topology.node_of(self.gpu_of_rank[rank])
        self.own_device = self.gpu_of_rank[rank] % topology.gpus.count
        self.addresses = AddressSpace(rank)
        self.handles: dict[int, Handle] = {}
        self.retained: Counter[int] = Counter()
        self.nvml_users = 0
        #: Launches of the all-reduce kernels so far, by the workspace they ran on.
        self.launches: Counter[str] = Counter()
        self.sticky = ""
        #: Why the context was poisoned, where a kernel did it: for people.
        self.sticky_reason = ""
        self._capture: Capture | None = None
        self._graph: Recording | None = None
        self._bindings: dict[str, Binding] = {}
        self._numbers = itertools.count(1)
        # Large, and never equal on two ranks: a handle is no small number by chance.
        self._handle_values = itertools.count((0xCAFE << 32) + (rank << 24) + 1)
        self._ledger: dict[str, LedgerObject] = {}
        self._memories: dict[int, mmap.mmap] = {}
        self._thread = threading.local()

    # -------------------------------------------------------------- protocol

    def knows(self, site: str) -> bool:
        return site in _CALLS

    def call(self, site: str, *args: Any, **kwargs: Any) -> Any:
        do = _CALLS.get(site)
        if do is None:
            raise UnknownCall(site)
        self._thread.touched = Touched()
        refused = self.topology.does.refuses.get(site)
        if refused is not None:
            return answers.refuse(site, refused)
        with self.on_host():
            return do(self, *args, **kwargs)

    def refers_to(self, site: str, args: tuple[Any, ...]) -> list[str]:
        if not args:
            return []
        if site in ("cuMemFree", "cudart.cudaFree"):
            allocation = self.addresses.allocations.get(int(args[0]))
            return [allocation.id] if allocation else []
        if site == "cuMemRelease":
            handle = self.handles.get(int(args[0]))
            return [handle.id] if handle else []
        if site == "cuMemUnmap":
            return [each.id for each in self.addresses.mappings_within(int(args[0]), int(args[1])) or []]
        if site == "cuMemAddressFree":
            found = self.addresses.ranges.get(int(args[0]))
            return [found.id] if found else []
        if site == "cuMulticastUnbind":
            handle = self.handles.get(int(args[0]))
            return [each.id for each in self.bindings_of(handle.number)] if handle else []
        return []

    def touched(self) -> Touched:
        touched = self._touched_now()
        self._thread.touched = Touched()
        return touched

    def _touched_now(self) -> Touched:
        if getattr(self._thread, "touched", None) is None:
            self._thread.touched = Touched()
        touched: Touched = self._thread.touched
        return touched

    def ledger(self) -> list[LedgerObject]:
        return list(self._ledger.values())

    def device_bytes(self) -> int:
        return self.bytes_in_use(self.gpu_of_rank[self.rank])

    def context_error(self) -> str:
        return self.sticky

    def poison(self, error: str) -> None:
        assert error in STICKY, error
        # The first error stays: later ones cannot be told from it.
        self.sticky = self.sticky or error

    def capturing(self) -> bool:
        capture = self._capture
        return capture is not None and capture.thread == threading.get_ident()

    def on_host(self) -> AbstractContextManager[None]:
        capture = self._capture
        return capture.recording.paused() if capture is not None and self.capturing() else nullcontext()

    def in_stream(self, work: Callable[[], None]) -> None:
        capture = self._capture
        if capture is not None and self.capturing():
            capture.recording.add(work)
        else:
            work()

    def close(self) -> None:
        for number in list(self._memories):
            self._unmap_bytes(number)

    # --------------------------------------------------------------- devices

    @property
    def current_device(self) -> int | None:
        """The ordinal of the calling thread's context; None where it has none."""
        device: int | None = getattr(self._thread, "device", None)
        return device

    @current_device.setter
    def current_device(self, device: int | None) -> None:
        self._thread.device = device

    @property
    def current_gpu(self) -> int:
        """The GPU of the calling thread's context, the rank's own where it has none."""
        device = self.current_device
        return self.gpu_of(self.own_device if device is None else device)

    def has_device(self, ordinal: Any) -> bool:
        """Whether the node has a device of this ordinal."""
        return 0 <= int(ordinal) < self.topology.gpus.count

    def gpu_of(self, ordinal: Any) -> int:
        """The GPU, counted over the whole machine, behind an ordinal of this node."""
        assert self.has_device(ordinal), ordinal
        return self.node * self.topology.gpus.count + int(ordinal)

    def bytes_in_use(self, gpu: int) -> int:
        """Device memory in use on a GPU, over all processes."""
        value, _ = self.board.call("in_use", {"gpu": gpu})
        return int(value)

    # ---------------------------------------------------------------- ledger

    def new_number(self) -> int:
        """A number that nothing else in this rank has."""
        return next(self._numbers)

    def made(self, kind: str, size_bytes: int, depends_on: tuple[str, ...] = ()) -> str:
        """Enter a new object into the ledger; its id."""
        identity = f"{kind[0]}{self.new_number()}"
        entry = LedgerObject(kind, identity, size_bytes, depends_on)
        self._ledger[identity] = entry
        self._touched_now().made.append(entry)
        return identity

    def gone(self, identity: str) -> None:
        """Take an object out of the ledger."""
        del self._ledger[identity]
        self._touched_now().released.append(identity)

    def new_handle(self, number: int, size_bytes: int, gpu: int, *, types: int) -> Any:
        """A handle to a board object, as the binding's wrapper: always truthy."""
        value = next(self._handle_values)
        self.handles[value] = Handle(self.made("handle", size_bytes), number, size_bytes, gpu, types)
        return cuda.CUmemGenericAllocationHandle(value)

    def new_binding(self, team: Handle, bound: Handle, size_bytes: int) -> None:
        """Note that this rank's memory is bound."""
        identity = self.made("binding", size_bytes, (team.id, bound.id))
        self._bindings[identity] = Binding(identity, team.number, bound.number, size_bytes)

    def bindings_of(self, team: int) -> list[Binding]:
        """This rank's bindings to a multicast object."""
        return [each for each in self._bindings.values() if each.team == team]

    def forget_binding(self, binding: Binding) -> None:
        """The binding is undone."""
        del self._bindings[binding.id]
        self.gone(binding.id)

    # ---------------------------------------------------------------- memory

    def keep_memory(self, number: int, fd: int, size_bytes: int) -> None:
        """Map the bytes of a board object into this process, once; closes ``fd``."""
        try:
            if number not in self._memories:
                self._memories[number] = mmap.mmap(fd, size_bytes)
        finally:
            os.close(fd)

    def kept(self) -> list[int]:
        """The board objects whose bytes this process has mapped."""
        return list(self._memories)

    def memory(self, number: int) -> mmap.mmap:
        """The bytes of a board object that this process has mapped."""
        return self._memories[number]

    def drop_memory(self, number: int) -> None:
        """Unmap the bytes of a board object, if nothing of this rank refers to it."""
        ranges = list(self.addresses.ranges.values())
        if any(each.number == number for each in list(self.handles.values())) or any(
            each.number == number for owner in ranges for each in owner.mappings.values()
        ):
            return
        # A multicast object nobody here refers to takes its bindings along.
        for binding in self.bindings_of(number):
            self.forget_binding(binding)
        self._unmap_bytes(number)

    def _unmap_bytes(self, number: int) -> None:
        bytes_ = self._memories.pop(number, None)
        if bytes_ is None:
            return
        try:
            bytes_.close()
        except BufferError:
            # A tensor still looks at it; the bytes go with that tensor.
            return

    def views(self, address: int, size_bytes: int, *, write: bool = True) -> list[memoryview] | None:
        """The bytes at device addresses, in pieces where several mappings hold them;
        None where the thread's device must not touch one of them."""
        device = self.own_device if self.current_device is None else self.current_device
        return self._views(address, size_bytes, device, write=write)

    def view(self, address: int, size_bytes: int, *, write: bool = True) -> memoryview | None:
        """The bytes at a device address, of one mapping or allocation; None where a
        kernel on this rank's own device must not touch them."""
        found = self._views(address, size_bytes, self.own_device, write=write)
        return found[0] if found is not None and len(found) == 1 else None

    def _views(self, address: int, size_bytes: int, device: int, *, write: bool) -> list[memoryview] | None:
        if not size_bytes:
            return []
        end = address + size_bytes
        allocation = self.addresses.allocation_at(address)
        if allocation is not None:
            if end > allocation.end:
                return None
            start = address - allocation.address
            return [memoryview(allocation.memory)[start : start + size_bytes]]
        found = self.addresses.mappings_covering(address, size_bytes)
        wanted = READ_WRITE if write else READ
        if found is None or any(each.multicast or not each.allows(device, wanted) for each in found):
            return None
        return [
            memoryview(self._memories[each.number])[
                max(address - each.address, 0) : min(end, each.end) - each.address
            ]
            for each in found
        ]

    # --------------------------------------------------------------- capture

    def begin_capture(self, mode: str = "global") -> None:
        assert mode in ("global", "thread-local", "relaxed"), mode
        assert self._capture is None, "a stream captures once at a time"
        self._graph = None
        self._capture = Capture(mode, threading.get_ident(), Recording())
        self._capture.recording.__enter__()

    def end_capture(self) -> str:
        capture, self._capture = self._capture, None
        assert capture is not None, "no stream captures"
        capture.recording.__exit__(None, None, None)
        if self.sticky or capture.invalid:
            return self.sticky or "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED"
        self._graph = capture.recording
        return ""

    def replay(self) -> None:
        graph, self._graph = self._graph, None
        assert graph is not None, "no capture ended well"
        # After a failed kernel the stream runs nothing more.
        graph.replay(lambda: not self.sticky)

    def unsafe_in_capture(self, *, waits: bool) -> str:
        """The error of a call that a capturing stream refuses, or empty; it spoils the
        capture. Recorded: a call that waits in every mode, one that allocates in the two
        strict ones; ``thread-local`` minds the capturing thread alone (cuda.h)."""
        capture = self._capture
        if capture is None:
            return ""
        elsewhere = capture.mode == "thread-local" and capture.thread != threading.get_ident()
        if not waits and (capture.mode == "relaxed" or elsewhere):
            return ""
        capture.invalid = True
        return "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED"

    # --------------------------------------------------------------- standin

    def make_standin(self, key: str, world_size: int, size_bytes: int) -> int:
        """Memory that all ranks share for a mocked workspace of ``world_size`` ranks: its
        address, usable by the kernels as any of a workspace's pointers. Ranks that give
        the same ``key`` get the same memory."""
        assert world_size >= 1 and size_bytes >= 1
        self._thread.touched = Touched()
        size_bytes = -(-size_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        _, fds = self.board.call("standin", {"key": key, "size_bytes": size_bytes})
        try:
            made = self.addresses.place(mmap.mmap(fds[0], size_bytes), key)
        finally:
            os.close(fds[0])
        made.id = self.made("standin", size_bytes)
        return made.address

    def release_standin(self, address: int) -> None:
        """The mocked workspace gives its memory back."""
        self._thread.touched = Touched()
        found = self.addresses.free_standin(address)
        assert found is not None, f"no stand-in is at {address:#x}"
        self.board.call("standin_release", {"key": found.key})
        self.gone(found.id)

    def segfault(self) -> None:
        """The real driver dies here (two recorded sequences). Tests override it."""
        os.kill(os.getpid(), signal.SIGSEGV)
