"""What a simulated kernel may touch: pointers followed as the GPU would, and tensors there."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import torch

from faultlab.machine.simulated.addresses import READ_WRITE, Mapping
from faultlab.machine.simulated.pages import bring_in

if TYPE_CHECKING:
    from faultlab.machine.simulated.machine import SimulatedMachine

#: Kernels load and store 16 bytes at a time (kBytesPerAccess in
#: trtllm_allreduce_fusion.cuh; float4 in trtllm_mnnvl_allreduce.cuh).
VECTOR: Final = 16
POINTER: Final = 8
WORD: Final = 4


class BadPointer(Exception):
    """A pointer that the kernel cannot follow: the sticky error, and which one it was."""

    def __init__(self, text: str, error: str = "CUDA_ERROR_ILLEGAL_ADDRESS") -> None:
        super().__init__(text)
        self.error = error


def follow(
    machine: SimulatedMachine, address: int, size_bytes: int, what: str, *, aligned: int = VECTOR
) -> memoryview:
    """The bytes at an address that the kernel reads and writes. Raises BadPointer."""
    if not size_bytes:
        return memoryview(bytearray())
    check_alignment(address, what, aligned)
    view = machine.view(address, size_bytes)
    if view is None:
        raise BadPointer(f"{what} at {address:#x} is not {size_bytes} mapped and accessible bytes")
    return view


def check_alignment(address: int, what: str, aligned: int = VECTOR) -> None:
    """Raise BadPointer unless the address is a multiple of ``aligned`` bytes."""
    if address % aligned:
        text = f"{what} at {address:#x} is not a multiple of {aligned} bytes"
        raise BadPointer(text, "CUDA_ERROR_MISALIGNED_ADDRESS")


def tensor_over(view: memoryview, dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """The bytes as a tensor of this shape, which they must be enough for."""
    count = torch.Size(shape).numel()
    if not count:
        return torch.empty(shape, dtype=dtype)
    bring_in(view[: count * dtype.itemsize])
    return torch.frombuffer(view, dtype=dtype, count=count).view(*shape)


def sum_in_rank_order(parts: list[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    """The sum in float32, always in the order of ranks, rounded once."""
    total = parts[0].to(torch.float32, copy=True)
    for each in parts[1:]:
        total += each
    return total.to(dtype)


def multicast_mapping(machine: SimulatedMachine, pointer: int) -> Mapping:
    """The multicast object mapped at a kernel's multicast pointer. Raises BadPointer."""
    check_alignment(pointer, "the multicast pointer")
    mapping = machine.addresses.mapping_at(pointer)
    if mapping is None or not mapping.multicast:
        raise BadPointer(f"the multicast pointer is {pointer:#x}: no multicast object is mapped there")
    if not mapping.allows(machine.own_device, READ_WRITE):
        raise BadPointer(f"the multicast pointer is {pointer:#x}: its mapping was given no access")
    return mapping


def multicast_targets(
    machine: SimulatedMachine, mapping: Mapping, address: int, size_bytes: int
) -> list[memoryview]:
    """Where a store through a multicast address arrives: these bytes in every memory
    that is bound. Raises BadPointer where a device never bound any, or too little."""
    if address + size_bytes > mapping.end:
        raise BadPointer(f"{size_bytes} bytes at the multicast address {address:#x} reach past its mapping")
    request = {"number": mapping.number, "known": machine.kept()}
    told, fds = machine.board.call("multicast_bindings", request)
    sizes = {number: size for _, number, size in told["bound"]} if told else {}
    for number, fd in zip(told["sent"] if told else (), fds, strict=True):
        machine.keep_memory(number, fd, os.fstat(fd).st_size)
    if told is None or told["missing"]:
        raise BadPointer("not every device of the multicast object has bound memory")
    start = address - mapping.address
    if any(start + size_bytes > size for size in sizes.values()):
        raise BadPointer(f"{size_bytes} bytes at the multicast address {address:#x} reach past what is bound")
    # A member that left is not reached; its peers then miss its rows for ever.
    views = [memoryview(machine.memory(number))[start : start + size_bytes] for number in sizes]
    for number in told["sent"]:
        machine.drop_memory(number)
    return views


@dataclass(frozen=True)
class Launch:
    """One launch of a kernel that meets its peers: the ``number``-th on the workspace
    that ``key`` names, alike on every rank."""

    machine: SimulatedMachine
    key: str
    number: int
    world: int

    def meet(self, point: int) -> None:
        """Wait for every rank at a point of the kernel, as it spins on their data."""
        request = {"key": f"{self.key}/{point}", "launch": self.number, "world": self.world}
        self.machine.board.call("kernel_arrive", request)


def begin(machine: SimulatedMachine, key: str, world: int) -> Launch:
    """Count a launch on a workspace. All pointers must have been followed before: a
    kernel that faults never meets its peers, which then spin for ever."""
    machine.launches[key] += 1
    return Launch(machine, key, machine.launches[key], world)
