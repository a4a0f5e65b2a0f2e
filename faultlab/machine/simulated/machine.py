"""The simulated machine of one rank: handles, addresses, context, and the answers.

Each library's calls are in modules of their own (``driver``, ``memory``,
``multicast``, ``runtime``, ``nvml``, ``kernels``), as functions that take the machine; this class holds the
state they share, the ledger, and the way to the board.
"""

from __future__ import annotations

import itertools
import mmap
import os
import signal
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from faultlab.codes import STICKY
from faultlab.errors import UnknownCall
from faultlab.machine.base import LedgerObject, Touched
from faultlab.machine.board import BoardClient
from faultlab.machine.simulated import driver, kernels, memory, multicast, nvml, runtime
from faultlab.machine.simulated.addresses import AddressSpace, Mapping
from faultlab.topology.models import Topology


@dataclass
class Handle:
    """A reference to physical memory or to a multicast object."""

    id: str
    number: int
    size_bytes: int
    gpu: int
    multicast: bool
    #: The handle types it was made with; 0 for an imported one, which cannot be exported.
    types: int


@dataclass
class Binding:
    """This rank's memory bound to a multicast object."""

    id: str
    team: int
    memory: int
    size_bytes: int


class SimulatedMachine:
    """One rank's half; ``board`` is the half all ranks share."""

    name = "simulated"

    def __init__(self, topology: Topology, rank: int, gpu_of_rank: Sequence[int], board: BoardClient) -> None:
        self.topology = topology
        self.rank = rank
        self.gpu_of_rank = list(gpu_of_rank)
        self.board = board
        self.node = topology.node_of(self.gpu_of_rank[rank])
        self.addresses = AddressSpace(rank)
        self.handles: dict[int, Handle] = {}
        self.bindings: dict[str, Binding] = {}
        self.device = self.gpu_of_rank[rank] % topology.gpus.count
        self.context_device: int | None = None
        self.retained: dict[int, int] = {}
        #: Memory of mocked workspaces by address: its ledger id and its key.
        self.standins: dict[int, tuple[str, str]] = {}
        self.nvml_users = 0
        self.launches: dict[str, int] = {}
        self.sticky = ""
        self.sticky_reason = ""
        self.capture_mode = ""
        self.capture_invalid = False
        self._numbers = itertools.count(1)
        self._handle_values = itertools.count((0xCAFE << 32) + (rank << 24) + 1)
        self._ledger: dict[str, LedgerObject] = {}
        self._memories: dict[int, mmap.mmap] = {}
        self._local = threading.local()
        # The modules for memory and multicast objects register with the driver's.
        assert memory and multicast
        self._calls: dict[str, Callable[..., Any]] = {
            **driver.CALLS,
            **runtime.CALLS,
            **nvml.CALLS,
            **kernels.CALLS,
        }

    # -------------------------------------------------------------- protocol

    def knows(self, site: str) -> bool:
        return site in self._calls

    def call(self, site: str, *args: Any, **kwargs: Any) -> Any:
        do = self._calls.get(site)
        if do is None:
            raise UnknownCall(site)
        self._local.touched = Touched()
        return do(self, *args, **kwargs)

    def refers_to(self, site: str, args: tuple[Any, ...]) -> list[str]:
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
            return [b.id for b in self.bindings.values() if handle and b.team == handle.number]
        return []

    def touched(self) -> Touched:
        touched = self._touched_now()
        self._local.touched = Touched()
        return touched

    def _touched_now(self) -> Touched:
        if getattr(self._local, "touched", None) is None:
            self._local.touched = Touched()
        touched: Touched = self._local.touched
        return touched

    def ledger(self) -> list[LedgerObject]:
        return list(self._ledger.values())

    def device_bytes(self) -> int:
        value, _ = self.board.call("in_use", {"gpu": self.gpu_of_rank[self.rank]})
        return int(value)

    def context_error(self) -> str:
        return self.sticky

    def poison(self, error: str) -> None:
        assert error in STICKY, error
        # The first error stays: later ones cannot be told from it.
        self.sticky = self.sticky or error

    def capturing(self) -> bool:
        return bool(self.capture_mode)

    def close(self) -> None:
        for kept in self._memories.values():
            kept.close()
        self._memories.clear()

    # ---------------------------------------------------------------- ledger

    def made(self, kind: str, size_bytes: int, depends_on: tuple[str, ...] = ()) -> str:
        """Enter a new object into the ledger; its id."""
        identity = f"{kind[0]}{next(self._numbers)}"
        entry = LedgerObject(kind, identity, size_bytes, depends_on)
        self._ledger[identity] = entry
        self._touched_now().made.append(entry)
        return identity

    def gone(self, identity: str) -> None:
        """Take an object out of the ledger."""
        del self._ledger[identity]
        self._touched_now().released.append(identity)

    # ---------------------------------------------------------------- memory

    def new_handle(self, number: int, size_bytes: int, gpu: int, *, multicast: bool, types: int) -> int:
        """A handle to a board object; its value."""
        identity = self.made("handle", size_bytes)
        value = next(self._handle_values)
        self.handles[value] = Handle(identity, number, size_bytes, gpu, multicast, types)
        return value

    def keep_memory(self, number: int, fd: int, size_bytes: int) -> None:
        """Map the bytes of a board object into this process, once."""
        try:
            if number not in self._memories:
                self._memories[number] = mmap.mmap(fd, size_bytes)
        finally:
            os.close(fd)

    def bytes_of(self, mapping: Mapping) -> mmap.mmap:
        """The bytes behind a unicast mapping."""
        return self._memories[mapping.number]

    def memory(self, number: int) -> mmap.mmap:
        """The bytes of a board object that this process has mapped."""
        return self._memories[number]

    def drop_memory(self, number: int) -> None:
        """Nothing of this rank refers to the object: unmap its bytes."""
        held = any(h.number == number for h in self.handles.values()) or any(
            m.number == number for r in self.addresses.ranges.values() for m in r.mappings.values()
        )
        if held:
            return
        # A multicast object nobody here refers to takes its bindings along.
        for binding in [b for b in self.bindings.values() if b.team == number]:
            del self.bindings[binding.id]
            self.gone(binding.id)
        memory = self._memories.pop(number, None)
        if memory is not None:
            try:
                memory.close()
            except BufferError:
                # A tensor still looks at it; the bytes go with that tensor.
                return

    def view(self, address: int, size_bytes: int) -> memoryview | None:
        """The bytes at a device address; None where a kernel must not touch them."""
        allocation = self.addresses.allocation_at(address)
        if allocation is not None:
            start = address - allocation.address
            if start + size_bytes > allocation.size_bytes:
                return None
            return memoryview(allocation.memory)[start : start + size_bytes]
        mapping = self.addresses.mapping_at(address)
        if mapping is None or mapping.multicast or not mapping.readable:
            return None
        start = address - mapping.address
        if start + size_bytes > mapping.size_bytes:
            return None
        return memoryview(self.bytes_of(mapping))[start : start + size_bytes]

    # --------------------------------------------------------------- capture

    def begin_capture(self, mode: str = "global") -> None:
        """A stream begins to capture: ``global``, ``thread-local`` or ``relaxed``."""
        assert mode in ("global", "thread-local", "relaxed"), mode
        self.capture_mode, self.capture_invalid = mode, False

    def end_capture(self) -> str:
        """The capture ends; the error it ends with, or empty."""
        self.capture_mode = ""
        return "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED" if self.capture_invalid else ""

    def unsafe_in_capture(self, *, allocates: bool) -> str:
        """The error of a call that a capturing stream refuses (recorded: allocation
        in the strict modes, synchronisation in every mode); it ends the capture."""
        if not self.capture_mode or (allocates and self.capture_mode == "relaxed"):
            return ""
        self.capture_invalid = True
        return "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED"

    # --------------------------------------------------------------- standin

    def make_standin(self, key: str, world_size: int, size_bytes: int) -> int:
        """Memory that all ranks share for a mocked workspace; its address, usable
        by the kernels as any of a workspace's pointers."""
        assert world_size == len(self.gpu_of_rank)
        self._local.touched = Touched()
        size_bytes = -(-size_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        _, fds = self.board.call("standin", {"key": key, "size_bytes": size_bytes})
        identity = self.made("standin", size_bytes)
        reserved = self.addresses.reserve(identity, size_bytes, 0)
        assert reserved is not None
        number = -next(self._numbers)
        self.keep_memory(number, fds[0], size_bytes)
        reserved.mappings[reserved.address] = Mapping(
            identity, reserved.address, size_bytes, number, multicast=False, readable=True
        )
        self.standins[reserved.address] = (identity, key)
        return reserved.address

    def release_standin(self, address: int) -> None:
        """The mocked workspace gives its memory back."""
        self._local.touched = Touched()
        identity, _ = self.standins.pop(address)
        reserved = self.addresses.ranges[address]
        mapping = reserved.mappings.pop(address)
        self.addresses.free(address, reserved.size_bytes)
        self.drop_memory(mapping.number)
        self.gone(identity)

    def segfault(self) -> None:
        """The real driver dies here (two recorded sequences)."""
        os.kill(os.getpid(), signal.SIGSEGV)
