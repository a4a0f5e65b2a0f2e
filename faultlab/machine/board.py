"""The board: what the ranks of a simulated machine share.

It lives in the supervisor and is called by one thread. It owns the physical
memory (one memfd per allocation), knows who holds what, keeps the multicast
objects as state machines across processes, and is where the ranks of a kernel
meet. A rank reaches it through a ``BoardClient``.

Lifetimes follow the driver: memory lives while any handle, mapping, binding or
exported descriptor of it exists (recorded on an H200: ``driver_vectors.json``,
``memory_is_freed_only_when_last_reference_goes``). ``exports`` knows which
descriptors are still open.

A method never raises for what a rank asks: ranks race with themselves, and a
late request for something that is gone must not take the supervisor with it.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from faultlab.machine.exports import Exports
from faultlab.machine.rendezvous import Rendezvous
from faultlab.topology.models import Topology

#: Slots for multicast objects on an NVSwitch node (NVIDIA/nccl#2077: 128 on 8x H200).
MULTICAST_SLOTS = 128
_INVALID_VALUE = "CUDA_ERROR_INVALID_VALUE"


@dataclass(frozen=True)
class Reply:
    """An answer: a JSON-able value, and descriptors to send with it.

    ``close_fds``: they are the receiver's alone, so whoever sends them closes
    them afterwards; otherwise the board keeps owning them.
    """

    value: Any
    fds: tuple[int, ...] = ()
    close_fds: bool = False


@dataclass(frozen=True)
class Waiting:
    """No answer yet: the call blocks until ``needs`` have acted.

    ``kind``: ``multicast`` (cuMemMap, cuMulticastBindMem) or ``kernel``. ``needs``:
    the ranks that are missing, for the table of who waits for whom.
    """

    kind: str
    text: str
    needs: tuple[int, ...]


Answer = Reply | Waiting


class BoardClient(Protocol):
    """A rank's way to the board. ``call`` blocks until the reply; the returned
    descriptors are the caller's to close."""

    def call(
        self, method: str, arguments: dict[str, Any], fds: Sequence[int] = ()
    ) -> tuple[Any, list[int]]: ...


@dataclass(frozen=True)
class Bound:
    """Memory bound to a multicast object: its first ``size_bytes`` bytes."""

    number: int
    size_bytes: int


@dataclass
class Team:
    """The state of a multicast object: k of n devices added, what is bound.

    ``devices``: rank to GPU, for the object's life. ``ever_bound``: the ranks
    that have bound memory, though it may be unbound or gone by now.
    """

    devices_wanted: int
    devices: dict[int, int] = field(default_factory=dict)
    bound: dict[int, Bound] = field(default_factory=dict)
    ever_bound: set[int] = field(default_factory=set)
    slot: bool = False

    @property
    def complete(self) -> bool:
        return len(self.devices) >= self.devices_wanted


@dataclass
class Memory:
    """One physical allocation on ``gpu``, or (``team`` set) one multicast object.

    ``handles`` and ``mappings``: rank to how many it holds. ``exports``: open
    exported descriptors. ``bindings``: multicast objects that it is bound to.
    """

    number: int
    gpu: int
    size_bytes: int
    creator: int
    fd: int = -1
    team: Team | None = None
    handles: Counter[int] = field(default_factory=Counter)
    mappings: Counter[int] = field(default_factory=Counter)
    bindings: int = 0
    exports: int = 0

    @property
    def used(self) -> bool:
        """Whether anything refers to it; if nothing does, it is freed."""
        return bool(self.handles or self.mappings or self.bindings or self.exports)


@dataclass
class StandIn:
    """The memory of a mocked workspace; every rank asks for it once."""

    fd: int
    size_bytes: int
    asked: set[int] = field(default_factory=set)
    held: set[int] = field(default_factory=set)


class Board:
    """What is shared; every method name that ``call`` takes is a ``do_`` method.

    A ``do_`` method that may return ``Waiting`` changes nothing until it returns
    a ``Reply``, save for an arrival, which counts once: it is called again with
    the same arguments whenever ``version`` has changed.
    """

    def __init__(self, topology: Topology, gpu_of_rank: Sequence[int]) -> None:
        assert all(0 <= gpu < topology.gpu_count for gpu in gpu_of_rank), gpu_of_rank
        self._topology = topology
        self._gpu_of_rank = list(gpu_of_rank)
        self._memory: dict[int, Memory] = {}
        #: Private memory: (rank, its key there) to (GPU, size in bytes).
        self._private: dict[tuple[int, int], tuple[int, int]] = {}
        self._next = 1
        self._exports = Exports()
        self._rendezvous = Rendezvous()
        self._standins: dict[str, StandIn] = {}
        self._dead: set[int] = set()
        self.version = 0

    def call(self, rank: int, method: str, arguments: dict[str, Any]) -> Answer:
        """Answer one request of a rank; a waiting one is asked again when ``version`` changed."""
        do: Callable[..., Answer] | None = getattr(self, f"do_{method}", None)
        assert do is not None, f"the board has no method {method}"
        return do(rank, **arguments)

    def forget(self, rank: int) -> None:
        """The rank's process died: the driver drops all it held.

        The devices it added stay added, for the object's life; its binding goes
        (open-gpu-kernel-modules, mem_multicast_fabric.c).
        """
        self._dead.add(rank)
        for memory in list(self._memory.values()):
            memory.handles.pop(rank, None)
            memory.mappings.pop(rank, None)
            if memory.team is not None and rank in memory.team.bound:
                self._unbind(memory.team, rank)
            self._free_if_unused(memory)
        for key in [key for key in self._private if key[0] == rank]:
            del self._private[key]
        for name in list(self._standins):
            self._leave_standin(rank, name)
        self._rendezvous.forget(rank)
        self.version += 1
        self._settle()

    def close(self) -> None:
        """Close every descriptor the board holds."""
        self._exports.close()
        for fd in [m.fd for m in self._memory.values() if m.fd >= 0] + [
            s.fd for s in self._standins.values()
        ]:
            os.close(fd)
        self._memory.clear()
        self._standins.clear()

    def device_bytes(self, gpu: int) -> int:
        """Bytes in use on one GPU now, over all processes."""
        self._settle()
        shared = sum(m.size_bytes for m in self._memory.values() if m.gpu == gpu)
        return shared + sum(size for of, size in self._private.values() if of == gpu)

    def snapshot(self) -> dict[str, Any]:
        """Everything alive, as JSON-able data for the log."""
        self._settle()
        return {
            "memory": [_told(memory) for memory in self._memory.values()],
            "private": [
                {"rank": rank, "gpu": gpu, "size_bytes": size}
                for (rank, _), (gpu, size) in self._private.items()
            ],
            "standins": [
                {"key": key, "size_bytes": each.size_bytes, "ranks": sorted(each.held)}
                for key, each in self._standins.items()
            ],
            "kernels": self._rendezvous.snapshot(),
        }

    # -------------------------------------------------------------- lifetime

    def _settle(self) -> None:
        """Take note of the exported descriptors that were closed meanwhile."""
        for number in self._exports.take_closed():
            memory = self._memory[number]
            memory.exports -= 1
            self._free_if_unused(memory)
            self.version += 1

    def _free_if_unused(self, memory: Memory) -> None:
        """Free memory to which nothing refers, and what only it kept alive."""
        if memory.used or memory.number not in self._memory:
            return
        del self._memory[memory.number]
        if memory.fd >= 0:
            os.close(memory.fd)
        if memory.team is not None:
            for rank in list(memory.team.bound):
                self._unbind(memory.team, rank)

    def _unbind(self, team: Team, rank: int) -> None:
        # A binding keeps its memory alive, so the memory is there.
        bound = self._memory[team.bound.pop(rank).number]
        bound.bindings -= 1
        self._free_if_unused(bound)

    def _drop_one(self, memory: Memory, counts: Counter[int], rank: int) -> Answer:
        if not counts[rank]:
            return Reply(_INVALID_VALUE)
        counts[rank] -= 1
        if not counts[rank]:
            del counts[rank]
        self._free_if_unused(memory)
        self.version += 1
        return Reply("")

    def _add(self, memory: Memory) -> Memory:
        memory.number = self._next
        self._next += 1
        memory.handles[memory.creator] = 1
        self._memory[memory.number] = memory
        self.version += 1
        return memory

    def _fits(self, gpu: int, size_bytes: int) -> bool:
        return self.device_bytes(gpu) + size_bytes <= self._topology.gpus.memory_gib << 30

    # ---------------------------------------------------------------- memory

    def do_create(self, rank: int, gpu: int, size_bytes: int) -> Answer:
        """Physical memory: its number and its memfd, or None where it does not fit."""
        if not self._fits(gpu, size_bytes):
            return Reply(None)
        fd = os.memfd_create(f"faultlab-{self._next}", os.MFD_CLOEXEC)
        # Sparse: pages come into being when they are written.
        os.ftruncate(fd, size_bytes)
        memory = self._add(Memory(0, gpu, size_bytes, rank, fd))
        return Reply(memory.number, (fd,))

    def do_create_multicast(self, rank: int, size_bytes: int, devices: int) -> Answer:
        """A multicast object for ``devices`` devices: its number. Book-keeping only, as
        in the kernel driver (open-gpu-kernel-modules, mem_multicast_fabric.c)."""
        return Reply(self._add(Memory(0, -1, size_bytes, rank, team=Team(devices))).number)

    def do_export(self, rank: int, number: int) -> Answer:
        """A descriptor that keeps the object alive while any copy of it is open; none
        if the object is gone."""
        memory = self._memory.get(number)
        if memory is None:
            return Reply(_INVALID_VALUE)
        memory.exports += 1
        self.version += 1
        return Reply("", (self._exports.open(number),), close_fds=True)

    def do_import(self, rank: int, device: int, inode: int) -> Answer:
        """The object behind a descriptor (``st_dev`` and ``st_ino`` of it), with its
        memfd; None if it is no such descriptor."""
        self._settle()
        number = self._exports.object_behind((device, inode))
        return Reply(None) if number is None else self._hold(rank, self._memory[number])

    def do_import_number(self, rank: int, number: int) -> Answer:
        """The object behind a fabric handle, None if it is gone."""
        memory = self._memory.get(number)
        return Reply(None) if memory is None else self._hold(rank, memory)

    def _hold(self, rank: int, memory: Memory) -> Answer:
        """One more handle of the rank, unless the memory is out of its reach."""
        told = _identity(memory)
        if self._node(memory) != self._topology.node_of(self._gpu_of_rank[rank]):
            # The exporter's GPU is not one of the importer's (NVIDIA/nccl#1647).
            return Reply({**told, "error": "CUDA_ERROR_INVALID_DEVICE"})
        memory.handles[rank] += 1
        self.version += 1
        return Reply({**told, "error": ""}, (memory.fd,) if memory.fd >= 0 else ())

    def _node(self, memory: Memory) -> int:
        gpu = memory.gpu if memory.gpu >= 0 else self._gpu_of_rank[memory.creator]
        return self._topology.node_of(gpu)

    def do_release(self, rank: int, number: int) -> Answer:
        """One handle of the rank goes: the error's name, or empty."""
        memory = self._memory.get(number)
        return Reply(_INVALID_VALUE) if memory is None else self._drop_one(memory, memory.handles, rank)

    def do_map(self, rank: int, number: int) -> Answer:
        """A mapping: the error's name, or empty. Of a multicast object it waits until
        every device was added (CUDA 13 documentation of cuMemMap; NVIDIA/TensorRT-LLM#11610)."""
        memory = self._memory.get(number)
        if memory is None:
            return Reply(_INVALID_VALUE)
        if memory.team is not None and not memory.team.complete:
            return self._incomplete(memory, "cuMemMap of the multicast object")
        memory.mappings[rank] += 1
        self.version += 1
        return Reply("")

    def do_unmap(self, rank: int, number: int) -> Answer:
        """One mapping of the rank goes: the error's name, or empty."""
        memory = self._memory.get(number)
        return Reply(_INVALID_VALUE) if memory is None else self._drop_one(memory, memory.mappings, rank)

    def do_charge(self, rank: int, gpu: int, key: int, size_bytes: int) -> Answer:
        """Private memory (cuMemAlloc): whether it fits; it counts until uncharged."""
        if not self._fits(gpu, size_bytes):
            return Reply(False)
        self._private[rank, key] = gpu, size_bytes
        self.version += 1
        return Reply(True)

    def do_uncharge(self, rank: int, key: int) -> Answer:
        """Private memory goes."""
        self._private.pop((rank, key), None)
        self.version += 1
        return Reply(None)

    def do_in_use(self, rank: int, gpu: int) -> Answer:
        """Bytes in use on a GPU."""
        return Reply(self.device_bytes(gpu))

    # ------------------------------------------------------------- multicast

    def _incomplete(self, memory: Memory, call: str) -> Waiting:
        team = memory.team
        assert team is not None
        absent = [r for r, gpu in enumerate(self._gpu_of_rank) if gpu not in team.devices.values()]
        # Those who hold the object are meant; an importer that never came is not among them.
        holders = [r for r in absent if memory.handles[r]]
        missing = holders if len(holders) + len(team.devices) >= team.devices_wanted else absent
        text = f"{call} waits for {len(team.devices)} of {team.devices_wanted} devices to be added"
        return Waiting("multicast", text, tuple(missing))

    def _team(self, number: int) -> Team | None:
        memory = self._memory.get(number)
        return None if memory is None else memory.team

    def do_add_device(self, rank: int, number: int, gpu: int) -> Answer:
        """Add a device, for the object's life; the error's name, or empty. Twice the
        same one, or one too many, is an error (cuda.h; the code is not recorded)."""
        team = self._team(number)
        if team is None or gpu in team.devices.values() or team.complete:
            return Reply(_INVALID_VALUE)
        team.devices[rank] = gpu
        self.version += 1
        return Reply("")

    def do_bind(self, rank: int, number: int, memory: int, size_bytes: int) -> Answer:
        """Bind memory of the rank's added device: the error's name, or empty. Waits until
        every device was added (cuda.h, cuMulticastBindMem)."""
        team, bound = self._team(number), self._memory.get(memory)
        if team is None or bound is None or rank not in team.devices:
            return Reply(_INVALID_VALUE)
        if not team.complete:
            return self._incomplete(self._memory[number], "cuMulticastBindMem")
        if rank in team.bound or bound.gpu != team.devices[rank]:
            return Reply(_INVALID_VALUE)
        if not team.slot and not self._slot_is_free(team):
            # NVIDIA/nccl#2077: a bind answers 2 when the switches have no slot left.
            return Reply("CUDA_ERROR_OUT_OF_MEMORY")
        team.slot = True
        team.bound[rank] = Bound(memory, size_bytes)
        team.ever_bound.add(rank)
        bound.bindings += 1
        self.version += 1
        return Reply("")

    def _slot_is_free(self, team: Team) -> bool:
        """Whether every node that the team spans has a slot; one is kept until the
        object is destroyed."""
        used: Counter[int] = Counter()
        for other in self._memory.values():
            if other.team is not None and other.team.slot:
                used.update(self._nodes(other.team))
        return all(used[node] < MULTICAST_SLOTS for node in self._nodes(team))

    def _nodes(self, team: Team) -> set[int]:
        return {self._topology.node_of(gpu) for gpu in team.devices.values()}

    def do_unbind(self, rank: int, number: int) -> Answer:
        """Undo the rank's binding; the error's name, or empty."""
        team = self._team(number)
        if team is None or rank not in team.bound:
            return Reply(_INVALID_VALUE)
        self._unbind(team, rank)
        self.version += 1
        return Reply("")

    def do_multicast_bindings(self, rank: int, number: int, known: list[int]) -> Answer:
        """What is bound, in the order of ranks; None if the object is gone.

        ``bound``: ``[rank, number, size in bytes]``. ``missing``: devices that never
        bound anything. ``sent``: the numbers, without those of ``known``, whose memfds
        come with the reply.
        """
        team = self._team(number)
        if team is None:
            return Reply(None)
        bound = sorted(team.bound.items())
        sent = [each.number for _, each in bound if each.number not in known]
        told = {
            "missing": team.devices_wanted - len(team.ever_bound),
            "bound": [[owner, each.number, each.size_bytes] for owner, each in bound],
            "sent": sent,
        }
        return Reply(told, tuple(self._memory[each].fd for each in sent))

    # --------------------------------------------------------------- kernels

    def do_kernel_arrive(self, rank: int, key: str, launch: int, world: int) -> Answer:
        """The ranks of one kernel launch meet here, as they spin on each other's flags."""
        if self._rendezvous.arrive(rank, key, launch, world):
            self.version += 1
        arrived = self._rendezvous.arrived(key, launch)
        if self._rendezvous.leave(rank, key, launch):
            return Reply(None)
        missing = tuple(r for r in range(len(self._gpu_of_rank)) if r not in arrived)
        return Waiting("kernel", f"the kernel spins on {len(arrived)} of {world} ranks", missing)

    def do_standin(self, rank: int, key: str, size_bytes: int) -> Answer:
        """Memory of a mocked workspace: the same for every rank that asks with the key."""
        standin = self._standins.get(key)
        if standin is None:
            fd = os.memfd_create(f"faultlab-{key[:64]}", os.MFD_CLOEXEC)
            standin = self._standins[key] = StandIn(fd, 0)
        if size_bytes > standin.size_bytes:
            os.ftruncate(standin.fd, size_bytes)
            standin.size_bytes = size_bytes
        standin.asked.add(rank)
        standin.held.add(rank)
        self.version += 1
        return Reply(None, (standin.fd,))

    def do_standin_release(self, rank: int, key: str) -> Answer:
        """The rank's mocked workspace gives its memory back."""
        if key in self._standins:
            self._leave_standin(rank, key)
        self.version += 1
        return Reply(None)

    def _leave_standin(self, rank: int, key: str) -> None:
        """It goes when every living rank has had it and none has it now: a slow rank
        still finds what a fast one has already given back."""
        standin = self._standins[key]
        standin.held.discard(rank)
        living = set(range(len(self._gpu_of_rank))) - self._dead
        if not standin.held and standin.asked >= living:
            os.close(self._standins.pop(key).fd)


def _identity(memory: Memory) -> dict[str, Any]:
    """What an importer is told of an object."""
    return {
        "number": memory.number,
        "gpu": memory.gpu,
        "size_bytes": memory.size_bytes,
        "multicast": memory.team is not None,
    }


def _told(memory: Memory) -> dict[str, Any]:
    """What the log is told of an object."""
    team = memory.team
    told = {
        **_identity(memory),
        "handles": {str(rank): count for rank, count in memory.handles.items()},
        "mappings": {str(rank): count for rank, count in memory.mappings.items()},
        "bindings": memory.bindings,
        "exports": memory.exports,
    }
    if team is not None:
        told["devices"] = {str(rank): gpu for rank, gpu in team.devices.items()}
        told["devices_wanted"] = team.devices_wanted
        told["bound"] = {str(rank): each.number for rank, each in team.bound.items()}
    return told


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
        return answer.value, received(answer)


def received(reply: Reply) -> list[int]:
    """The reply's descriptors as a receiver of SCM_RIGHTS would have them: copies."""
    copies = [os.dup(fd) for fd in reply.fds]
    if reply.close_fds:
        for fd in reply.fds:
            os.close(fd)
    return copies
