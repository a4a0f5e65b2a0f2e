"""FlashInfer's two all-reduce kernels, through the memory that is really mapped.

Every pointer the real kernel would follow is checked first. One that cannot be
followed poisons the context, as the real access does, and the rank never meets
its peers, which then spin for ever. Otherwise each rank writes its rows into
its slot of every peer's buffer, the ranks meet, and each sums its own buffer:
a wrong mapping shows as a wrong result. One-shot and two-shot use the same
arithmetic here: slots in rank order, summed in float32, rounded once.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from faultlab.machine.simulated.machine import SimulatedMachine

CALLS: dict[str, Callable[..., Any]] = {}

#: A launch writes into the next of these, so a slow reader is not overtaken.
_ROTATION = 3
_POINTER = 8


class BadPointer(Exception):
    """A pointer that the kernel cannot follow."""

    def __init__(self, text: str, error: str = "CUDA_ERROR_ILLEGAL_ADDRESS") -> None:
        super().__init__(text)
        self.error = error


def lamport_initialize(machine: SimulatedMachine, pointer: int, count: int, dtype: torch.dtype) -> None:
    """Fill a buffer with negative zero, the value that means "not written yet"."""

    def run() -> None:
        view = _follow(machine, pointer, count * dtype.itemsize, "the lamport buffer")
        torch.frombuffer(view, dtype=dtype, count=count).fill_(-0.0)

    _launch(machine, run)


def allreduce(machine: SimulatedMachine, *, backend: str, **arguments: Any) -> None:
    """One launch of the back end's kernel."""
    kernels: dict[str, Callable[..., None]] = {"mnnvl": _mnnvl, "trtllm": _trtllm}
    run = kernels[backend]
    _launch(machine, lambda: run(machine, **arguments))


CALLS["kernel.lamport_initialize"] = lamport_initialize
CALLS["kernel.allreduce"] = allreduce


def _launch(machine: SimulatedMachine, run: Callable[[], None]) -> None:
    """A launch never reports an error; a poisoned context runs nothing."""
    if machine.sticky:
        return
    try:
        run()
    except BadPointer as error:
        machine.sticky_reason = str(error)
        machine.poison(error.error)


def _follow(machine: SimulatedMachine, address: int, size: int, what: str) -> memoryview:
    view = machine.view(int(address), size)
    if view is None:
        raise BadPointer(f"{what} at {int(address):#x} is not {size} mapped and accessible bytes")
    return view


# ------------------------------------------------------------------- the sum


def _slots(view: memoryview, like: torch.Tensor, world: int, launch: int) -> list[torch.Tensor]:
    """The slots of this launch in a buffer, one per rank."""
    count = like.numel()
    needed = world * count * like.element_size()
    room = len(view) // needed
    if room < 1:
        raise BadPointer(f"a buffer of {len(view)} bytes is too small for {needed}")
    start = (launch % min(room, _ROTATION)) * needed
    data = torch.frombuffer(view, dtype=like.dtype, count=world * count, offset=start)
    return list(data.view(world, count))


def _exchange(
    machine: SimulatedMachine,
    key: str,
    targets: list[memoryview],
    own: memoryview,
    given: torch.Tensor,
    output: torch.Tensor,
    world: int,
    rank: int,
) -> None:
    launch = machine.launches[key] = machine.launches.get(key, -1) + 1
    flat = given.reshape(-1)
    for target in targets:
        _slots(target, flat, world, launch)[rank].copy_(flat)
    machine.board.call("arrive", {"key": key, "launch": launch, "world": world})
    total = torch.zeros(flat.numel(), dtype=torch.float32)
    for slot in _slots(own, flat, world, launch):
        total += slot.to(torch.float32)
    output.view(-1).copy_(total.to(output.dtype))


# --------------------------------------------------------------------- mnnvl


def _mnnvl(
    machine: SimulatedMachine,
    *,
    input: torch.Tensor,
    output: torch.Tensor,
    mc_ptr: int,
    uc_ptrs_dev: int,
    uc_ptr_local: int,
    buffer_flags: torch.Tensor,
    world_size: int,
    rank: int,
    oneshot: bool,
) -> None:
    """Writes through the multicast address, reads the own unicast one."""
    if mc_ptr in machine.standins:
        _standin(machine, mc_ptr, input, output, world_size, rank)
        return
    mapping = machine.addresses.mapping_at(mc_ptr)
    if not mc_ptr or mapping is None or not mapping.multicast or not mapping.readable:
        raise BadPointer(f"the multicast pointer is {mc_ptr:#x}: no multicast mapping is there")
    table = _follow(machine, uc_ptrs_dev, world_size * _POINTER, "the table of unicast pointers")
    for peer, pointer in enumerate(struct.unpack(f"<{world_size}Q", table)):
        _follow(machine, pointer, 1, f"the unicast pointer of rank {peer}")
    local = machine.addresses.mapping_at(uc_ptr_local)
    if local is None:
        raise BadPointer(f"the own unicast pointer is {uc_ptr_local:#x}: nothing is mapped there")
    size = local.address + local.size_bytes - uc_ptr_local
    own = _follow(machine, uc_ptr_local, size, "the own buffer")
    targets = _bound(machine, mapping.number, world_size)
    _exchange(machine, f"mc{mapping.number}", targets, own, input, output, world_size, rank)


def _bound(machine: SimulatedMachine, team: int, world: int) -> list[memoryview]:
    """The bytes of every memory bound to the team: where a multicast store arrives."""
    told, fds = machine.board.call("bindings", {"number": team})
    found = []
    for (_, number, size), fd in zip(told["bound"], fds, strict=True):
        machine.keep_memory(number, fd, size)
        found.append(memoryview(machine.memory(number)))
    # A member that left is not reached; its peers then miss its rows for ever.
    return found


# -------------------------------------------------------------------- trtllm


def _trtllm(
    machine: SimulatedMachine,
    *,
    input: torch.Tensor,
    output: torch.Tensor,
    workspace_ptrs: torch.Tensor,
    world_size: int,
    rank: int,
    oneshot: bool,
    token_num: int,
    hidden_dim: int,
) -> None:
    """Writes through every peer's mapped pointer, reads the own buffer.

    ``workspace_ptrs``: world buffers, world flags, world lamport buffers, then
    the control flag (trtllm_ar.py). One-shot uses the lamport buffers, two-shot
    the plain ones.
    """
    pointers = [int(value) for value in workspace_ptrs.tolist()]
    if len(pointers) != 3 * world_size + 1:
        raise BadPointer(f"the table of pointers has {len(pointers)} entries")
    if pointers[0] in machine.standins:
        _standin(machine, pointers[0], input, output, world_size, rank)
        return
    _follow(machine, pointers[-1], 20, "the control flag")
    for peer in range(world_size):
        _follow(machine, pointers[world_size + peer], 4, f"the flags of rank {peer}")
    first = 2 * world_size if oneshot else 0
    targets = [
        _whole(machine, pointers[first + peer], f"the buffer of rank {peer}") for peer in range(world_size)
    ]
    key = machine.addresses.mapping_at(pointers[first])
    assert key is not None
    _exchange(machine, f"m{key.number}", targets, targets[rank], input, output, world_size, rank)


def _whole(machine: SimulatedMachine, address: int, what: str) -> memoryview:
    """From an address to the end of its mapping."""
    mapping = machine.addresses.mapping_at(address)
    size = 1 if mapping is None else mapping.address + mapping.size_bytes - address
    return _follow(machine, address, size, what)


def _standin(
    machine: SimulatedMachine, address: int, given: torch.Tensor, output: torch.Tensor, world: int, rank: int
) -> None:
    """A mocked workspace: one region that all ranks share."""
    _, key = machine.standins[address]
    view = _whole(machine, address, "the stand-in")
    _exchange(machine, f"standin-{key}", [view], view, given, output, world, rank)
