"""The board: what the ranks of a simulated machine share.

It lives in the supervisor and is called by one thread. It owns the physical
memory (one memfd per allocation), knows who holds what, keeps the multicast
objects as state machines across processes, and is where the ranks of a kernel
meet. A rank reaches it through a ``BoardClient``.

Lifetimes follow the driver: memory lives while any handle, mapping, binding or
exported descriptor of it exists (recorded on an H200: ``driver_vectors.json``,
``memory_is_freed_only_when_last_reference_goes``). An exported descriptor is
the write end of a pipe whose read end stays here: the kernel says when the last
copy, in whichever process or socket, is closed.
"""

from __future__ import annotations

import os
import select
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from faultlab.topology.models import Topology

#: Slots for multicast objects on an NVSwitch node (NVIDIA/nccl#2077: 128 on 8x H200).
MULTICAST_SLOTS = 128


@dataclass(frozen=True)
class Reply:
    """An answer: a value, and descriptors to send with it."""

    value: Any
    fds: tuple[int, ...] = ()
    close_fds: bool = False


@dataclass(frozen=True)
class Waiting:
    """No answer yet: the call blocks until ``needs`` have acted."""

    kind: str
    text: str
    needs: tuple[int, ...]


class BoardClient(Protocol):
    """A rank's way to the board: blocks until the reply."""

    def call(
        self, method: str, arguments: dict[str, Any], fds: Sequence[int] = ()
    ) -> tuple[Any, list[int]]: ...


@dataclass
class Memory:
    """One physical allocation, or (``team`` set) one multicast object."""

    number: int
    gpu: int
    size_bytes: int
    fd: int = -1
    shareable: bool = True
    team: Team | None = None
    #: rank -> how many handles and mappings it holds.
    handles: dict[int, int] = field(default_factory=dict)
    mappings: dict[int, int] = field(default_factory=dict)
    bindings: int = 0
    #: read ends of exported descriptors, by the pipe's inode.
    exported: dict[int, int] = field(default_factory=dict)
    creator: int = -1


@dataclass
class Team:
    """The state of a multicast object: k of n devices added, what is bound."""

    devices_wanted: int
    devices: dict[int, int] = field(default_factory=dict)
    bound: dict[int, int] = field(default_factory=dict)
    slot: bool = False

    @property
    def complete(self) -> bool:
        return len(self.devices) >= self.devices_wanted


Answer = Reply | Waiting


class Board:
    """What is shared; every method name that ``call`` takes is a ``do_`` method."""

    def __init__(self, topology: Topology, gpu_of_rank: Sequence[int]) -> None:
        self._topology = topology
        self._gpu_of_rank = list(gpu_of_rank)
        self._memory: dict[int, Memory] = {}
        self._private: dict[tuple[int, int], int] = {}
        self._next = 1
        self._arrivals: dict[tuple[str, int], set[int]] = {}
        self._standins: dict[str, Memory] = {}
        self._dead: set[int] = set()
        self.version = 0

    def call(self, rank: int, method: str, arguments: dict[str, Any]) -> Answer:
        """Answer one request of a rank; a waiting one is asked again when ``version`` changed."""
        do: Callable[..., Answer] | None = getattr(self, f"do_{method}", None)
        assert do is not None, f"the board has no method {method}"
        return do(rank, **arguments)

    def forget(self, rank: int) -> None:
        """The rank's process died: the driver drops all it held."""
        self._dead.add(rank)
        for memory in list(self._memory.values()):
            memory.handles.pop(rank, None)
            memory.mappings.pop(rank, None)
            if memory.team is not None and rank in memory.team.bound:
                self._unbind(memory.team, rank)
        for key in [key for key in self._private if key[0] == rank]:
            del self._private[key]
        self._changed()

    def close(self) -> None:
        """Close every descriptor the board holds."""
        for memory in (*self._memory.values(), *self._standins.values()):
            self._drop_descriptors(memory)
        self._memory.clear()
        self._standins.clear()

    def device_bytes(self, gpu: int) -> int:
        """Bytes in use on one GPU now."""
        self._collect()
        shared = sum(m.size_bytes for m in self._memory.values() if m.gpu == gpu and m.team is None)
        own = sum(size for (rank, _), size in self._private.items() if self._gpu_of_rank[rank] == gpu)
        return shared + own

    def snapshot(self) -> dict[str, Any]:
        """Everything alive, for the log."""
        self._collect()
        return {
            "memory": [
                {
                    "number": m.number,
                    "gpu": m.gpu,
                    "size_bytes": m.size_bytes,
                    "multicast": m.team is not None,
                }
                for m in self._memory.values()
            ],
            "private": len(self._private),
        }

    # -------------------------------------------------------------- lifetime

    def _changed(self) -> None:
        self.version += 1
        self._collect()

    def _collect(self) -> None:
        """Free what nothing refers to any more; bindings may free others, so repeat."""
        found = True
        while found:
            found = False
            for memory in list(self._memory.values()):
                self._poll_exported(memory)
                if memory.handles or memory.mappings or memory.bindings or memory.exported:
                    continue
                found = True
                del self._memory[memory.number]
                if memory.team is not None:
                    for rank in list(memory.team.bound):
                        self._unbind(memory.team, rank)
                self._drop_descriptors(memory)

    def _unbind(self, team: Team, rank: int) -> None:
        bound = self._memory.get(team.bound.pop(rank))
        if bound is not None:
            bound.bindings -= 1

    def _poll_exported(self, memory: Memory) -> None:
        for inode, read_end in list(memory.exported.items()):
            poll = select.poll()
            poll.register(read_end, 0)
            if any(mask & select.POLLHUP for _, mask in poll.poll(0)):
                os.close(read_end)
                del memory.exported[inode]

    def _drop_descriptors(self, memory: Memory) -> None:
        for read_end in memory.exported.values():
            os.close(read_end)
        memory.exported.clear()
        if memory.fd >= 0:
            os.close(memory.fd)
            memory.fd = -1

    def _add(self, memory: Memory) -> Memory:
        memory.number = self._next
        self._next += 1
        self._memory[memory.number] = memory
        return memory

    def _fits(self, gpu: int, size_bytes: int) -> bool:
        return self.device_bytes(gpu) + size_bytes <= self._topology.gpus.memory_gib << 30

    # ---------------------------------------------------------------- memory

    def do_create(self, rank: int, gpu: int, size_bytes: int, shareable: bool) -> Answer:
        """Physical memory: its number and its memfd, or None where it does not fit."""
        if not self._fits(gpu, size_bytes):
            return Reply(None)
        fd = os.memfd_create(f"faultlab-{self._next}", os.MFD_CLOEXEC)
        os.ftruncate(fd, size_bytes)
        memory = self._add(Memory(0, gpu, size_bytes, fd, shareable, handles={rank: 1}, creator=rank))
        self.version += 1
        return Reply(memory.number, (fd,))

    def do_create_multicast(self, rank: int, size_bytes: int, devices: int, shareable: bool) -> Answer:
        """A multicast object for ``devices`` devices: its number. Book-keeping only."""
        memory = self._add(
            Memory(
                0, -1, size_bytes, shareable=shareable, team=Team(devices), handles={rank: 1}, creator=rank
            )
        )
        self.version += 1
        return Reply(memory.number)

    def do_export(self, rank: int, number: int) -> Answer:
        """A descriptor that keeps the object alive while any copy of it is open."""
        memory = self._memory[number]
        read_end, write_end = os.pipe2(os.O_CLOEXEC)
        memory.exported[os.fstat(write_end).st_ino] = read_end
        self.version += 1
        return Reply(None, (write_end,), close_fds=True)

    def do_import(self, rank: int, inode: int) -> Answer:
        """The object behind a descriptor, with its memfd; None if it is no such descriptor."""
        self._collect()
        for memory in self._memory.values():
            if inode in memory.exported:
                return self._hold(rank, memory)
        return Reply(None)

    def do_import_number(self, rank: int, number: int) -> Answer:
        """The object behind a fabric handle, None if it is gone."""
        memory = self._memory.get(number)
        return Reply(None) if memory is None else self._hold(rank, memory)

    def _hold(self, rank: int, memory: Memory) -> Answer:
        memory.handles[rank] = memory.handles.get(rank, 0) + 1
        self.version += 1
        told = {
            "number": memory.number,
            "gpu": memory.gpu,
            "size_bytes": memory.size_bytes,
            "multicast": memory.team is not None,
        }
        return Reply(told, (memory.fd,) if memory.fd >= 0 else ())

    def do_release(self, rank: int, number: int) -> Answer:
        """One handle of the rank goes."""
        self._less(self._memory[number].handles, rank)
        return Reply(None)

    def do_map(self, rank: int, number: int) -> Answer:
        """A mapping; of a multicast object it waits until every device was added
        (CUDA 13 documentation of cuMemMap; NVIDIA/TensorRT-LLM#11610)."""
        memory = self._memory[number]
        if memory.team is not None and not memory.team.complete:
            return self._incomplete(memory.team, "cuMemMap of the multicast object")
        memory.mappings[rank] = memory.mappings.get(rank, 0) + 1
        self.version += 1
        return Reply(None)

    def do_unmap(self, rank: int, number: int) -> Answer:
        """One mapping of the rank goes."""
        self._less(self._memory[number].mappings, rank)
        return Reply(None)

    def _less(self, counts: dict[int, int], rank: int) -> None:
        assert counts.get(rank, 0) > 0, rank
        counts[rank] -= 1
        if not counts[rank]:
            del counts[rank]
        self._changed()

    def do_charge(self, rank: int, key: int, size_bytes: int) -> Answer:
        """Private memory (cuMemAlloc): whether it fits; it counts until uncharged."""
        if not self._fits(self._gpu_of_rank[rank], size_bytes):
            return Reply(False)
        self._private[rank, key] = size_bytes
        return Reply(True)

    def do_uncharge(self, rank: int, key: int) -> Answer:
        """Private memory goes."""
        self._private.pop((rank, key), None)
        return Reply(None)

    def do_in_use(self, rank: int, gpu: int) -> Answer:
        """Bytes in use on a GPU."""
        return Reply(self.device_bytes(gpu))

    # ------------------------------------------------------------- multicast

    def _incomplete(self, team: Team, call: str) -> Waiting:
        missing = tuple(r for r, gpu in enumerate(self._gpu_of_rank) if gpu not in team.devices.values())
        text = f"{call} waits for {len(team.devices)} of {team.devices_wanted} devices to be added"
        return Waiting("multicast", text, missing[: team.devices_wanted])

    def do_add_device(self, rank: int, number: int, gpu: int) -> Answer:
        """Add a device, for the object's life; the error's name, or empty."""
        team = self._memory[number].team
        assert team is not None
        if gpu in team.devices.values() or team.complete:
            return Reply("CUDA_ERROR_INVALID_VALUE")
        team.devices[rank] = gpu
        self.version += 1
        return Reply("")

    def do_bind(self, rank: int, number: int, memory: int) -> Answer:
        """Bind memory of an added device; waits until every device was added."""
        team = self._memory[number].team
        assert team is not None
        if rank not in team.devices:
            return Reply("CUDA_ERROR_INVALID_VALUE")
        if not team.complete:
            return self._incomplete(team, "cuMulticastBindMem")
        if (
            not team.slot
            and sum(1 for m in self._memory.values() if m.team and m.team.slot) >= MULTICAST_SLOTS
        ):
            return Reply("CUDA_ERROR_OUT_OF_MEMORY")
        if rank in team.bound or self._memory[memory].gpu != team.devices[rank]:
            return Reply("CUDA_ERROR_INVALID_VALUE")
        team.slot = True
        team.bound[rank] = memory
        self._memory[memory].bindings += 1
        self.version += 1
        return Reply("")

    def do_unbind(self, rank: int, number: int) -> Answer:
        """Undo the rank's binding; the error's name, or empty."""
        team = self._memory[number].team
        assert team is not None
        if rank not in team.bound:
            return Reply("CUDA_ERROR_INVALID_VALUE")
        self._unbind(team, rank)
        self._changed()
        return Reply("")

    def do_bindings(self, rank: int, number: int) -> Answer:
        """What is bound, with the memfds: [[rank, number, size]…], in the order of ranks."""
        team = self._memory[number].team
        assert team is not None
        bound = [(r, self._memory[n]) for r, n in sorted(team.bound.items()) if n in self._memory]
        told = {
            "wanted": team.devices_wanted,
            "bound": [[r, m.number, m.size_bytes] for r, m in bound],
        }
        return Reply(told, tuple(m.fd for _, m in bound))

    # --------------------------------------------------------------- kernels

    def do_arrive(self, rank: int, key: str, launch: int, world: int) -> Answer:
        """Ranks of one kernel launch meet here, as they spin on each other's flags."""
        arrived = self._arrivals.setdefault((key, launch), set())
        if rank not in arrived:
            arrived.add(rank)
            self.version += 1
        missing = tuple(r for r in range(len(self._gpu_of_rank)) if r not in arrived)
        if len(arrived) >= world:
            return Reply(None)
        return Waiting("kernel", f"the kernel spins on {len(arrived)} of {world} ranks", missing)

    def do_standin(self, rank: int, key: str, size_bytes: int) -> Answer:
        """Memory of a mocked workspace: the same for every rank that asks with the key."""
        memory = self._standins.get(key)
        if memory is None:
            fd = os.memfd_create(f"faultlab-{key}", os.MFD_CLOEXEC)
            os.ftruncate(fd, size_bytes)
            memory = self._standins[key] = Memory(0, -1, size_bytes, fd)
        return Reply(None, (memory.fd,))


class WouldBlock(Exception):
    """A call that waits, made where nobody can let it go."""


class LocalBoard:
    """A board in the same process, for tests: a call that waits raises WouldBlock."""

    def __init__(self, board: Board, rank: int) -> None:
        self._board = board
        self._rank = rank

    def call(self, method: str, arguments: dict[str, Any], fds: Sequence[int] = ()) -> tuple[Any, list[int]]:
        answer = self._board.call(self._rank, method, arguments)
        if isinstance(answer, Waiting):
            raise WouldBlock(answer.text)
        copies = [os.dup(fd) for fd in answer.fds]
        if answer.close_fds:
            for fd in answer.fds:
                os.close(fd)
        return answer.value, copies
