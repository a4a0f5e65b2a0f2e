"""FlashInfer's two all-reduce kernels, through the memory that is really mapped.

Every pointer that the real kernel would follow is followed first. One that cannot
be followed poisons the context, as the real access does, and the rank never
meets its peers, which then spin for ever. Otherwise the rows go where the real
kernel puts them: one-shot, every rank writes its rows into its slot of every
peer's buffer and each sums its own buffer; two-shot, each rank sums a part of
the tokens and sends the sums to all. So a wrong mapping shows as a wrong
result. Sums are in float32, in rank order, rounded once.

Layouts and rotation are those of ``trtllm_mnnvl_allreduce.cuh`` and
``trtllm_allreduce_fusion.cuh`` in flashinfer 0.7.4. A buffer that is too small for
a launch is an illegal address here, where the real kernel may only run over into
the next buffer. Left out: clearing buffers, and waiting for data by its value.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import torch

from faultlab.machine.simulated.addresses import Allocation
from faultlab.machine.simulated.kernel_memory import (
    POINTER,
    VECTOR,
    WORD,
    BadPointer,
    begin,
    follow,
    multicast_mapping,
    multicast_targets,
    sum_in_rank_order,
    tensor_over,
)

if TYPE_CHECKING:
    from faultlab.machine.simulated.machine import SimulatedMachine

CALLS: dict[str, Callable[..., Any]] = {}

#: A launch writes into the next of three buffers, so a slow reader is not overtaken.
_BUFFERS: Final = 3
#: The flags of the two-shot trtllm kernel: kBarrierFlagCount for every rank.
_BARRIER_FLAGS: Final = 256
#: The trtllm control block: counter, two-shot flag, buffer index, buffer size, bytes to clear.
_CONTROL_WORDS: Final = 5
_INDEX, _SIZE = 2, 3


def lamport_initialize(machine: SimulatedMachine, pointer: int, count: int, dtype: torch.dtype) -> None:
    """Fill ``count`` elements with negative zero, the value that means "not written yet"."""

    def run() -> None:
        view = follow(machine, int(pointer), count * dtype.itemsize, "the lamport buffer")
        tensor_over(view, dtype, count).fill_(-0.0)

    _launch(machine, run)


def allreduce(machine: SimulatedMachine, *, backend: str, **arguments: Any) -> None:
    """One launch of a back end's kernel (``_mnnvl``, ``_trtllm``). A rank whose peers
    never launch it waits here."""
    kernels: dict[str, Callable[..., None]] = {"mnnvl": _mnnvl, "trtllm": _trtllm}
    _launch(machine, lambda: kernels[backend](machine, **arguments))


CALLS["kernel.lamport_initialize"] = lamport_initialize
CALLS["kernel.allreduce"] = allreduce


def _launch(machine: SimulatedMachine, run: Callable[[], None]) -> None:
    """A launch never reports an error; a capturing stream only records it."""
    machine.in_stream(lambda: _execute(machine, run))


def _execute(machine: SimulatedMachine, run: Callable[[], None]) -> None:
    """The kernel runs; a poisoned context runs nothing."""
    if machine.sticky:
        return
    try:
        run()
    except BadPointer as error:
        machine.sticky_reason = str(error)
        machine.poison(error.error)


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
    """``input`` and ``output``: ``[tokens, dim]``. The own buffer is the rank's entry in the
    table at ``uc_ptrs_dev``, as in the real kernels; ``uc_ptr_local``, the same address, is
    handed to them and not used, and is only checked here."""
    standin = machine.addresses.standins.get(mc_ptr)
    if standin is not None:
        _standin(machine, standin, input, output, world_size, rank)
        return
    mapping = multicast_mapping(machine, mc_ptr)
    size = world_size * POINTER
    table = follow(machine, uc_ptrs_dev, size, "the table of unicast pointers", aligned=POINTER)
    follow(machine, uc_ptr_local, VECTOR, "the own unicast pointer")
    flags = buffer_flags.view(torch.int32)
    stages = 1 if oneshot else 2
    job = _Mnnvl(
        machine=machine,
        given=input,
        output=output,
        multicast=mc_ptr,
        unicast=struct.unpack(f"<{world_size}Q", table),
        index=int(flags[0]),
        stage_bytes=int(flags[2]) % (1 << 32) // stages,
        stages=stages,
        world=world_size,
        rank=rank,
        key=f"multicast-{mapping.number}",
    )
    if oneshot:
        job.one_shot()
    else:
        job.two_shot()
    flags[0], flags[1], flags[3] = (job.index + 1) % _BUFFERS, job.index, stages


@dataclass(frozen=True)
class _Mnnvl:
    """One launch: where its current buffer lies, and what goes into it."""

    machine: SimulatedMachine
    given: torch.Tensor
    output: torch.Tensor
    multicast: int
    unicast: tuple[int, ...]
    index: int
    stage_bytes: int
    stages: int
    world: int
    rank: int
    key: str

    def one_shot(self) -> None:
        """Every rank stores its rows through the multicast address, and sums its own buffer."""
        shape = (self.given.shape[0], self.world, self.given.shape[1])
        targets, own = self._everywhere(0, shape), self._at(self.rank, 0, shape)
        launch = begin(self.machine, self.key, self.world)
        for target in targets:
            target[:, self.rank].copy_(self.given)
        launch.meet(1)
        self.output.copy_(self._sum(own))

    def two_shot(self) -> None:
        """Token ``t`` is summed by rank ``t % world``: scattered to it through its unicast
        address, and sent to all through the multicast address."""
        tokens, dim = self.given.shape
        scattered = [self._at(r, 0, (self._share(r), self.world, dim)) for r in range(self.world)]
        sums, own = self._everywhere(1, (tokens, dim)), self._at(self.rank, 1, (tokens, dim))
        launch = begin(self.machine, self.key, self.world)
        for peer, target in enumerate(scattered):
            target[:, self.rank].copy_(self.given[peer :: self.world])
        launch.meet(1)
        reduced = self._sum(scattered[self.rank])
        for target in sums:
            target[self.rank :: self.world].copy_(reduced)
        launch.meet(2)
        self.output.copy_(own)

    def _share(self, rank: int) -> int:
        """The tokens that a rank sums."""
        return len(range(rank, self.given.shape[0], self.world))

    def _sum(self, slots: torch.Tensor) -> torch.Tensor:
        return sum_in_rank_order(list(slots.unbind(1)), self.given.dtype)

    def _size(self, shape: tuple[int, ...]) -> int:
        size: int = torch.Size(shape).numel() * self.given.element_size()
        if size > self.stage_bytes:
            raise BadPointer(f"{size} bytes do not fit a stage of {self.stage_bytes} bytes")
        return size

    def _offset(self, stage: int) -> int:
        return (self.index * self.stages + stage) * self.stage_bytes

    def _everywhere(self, stage: int, shape: tuple[int, ...]) -> list[torch.Tensor]:
        """A stage of the current buffer in every memory behind the multicast address."""
        mapping = multicast_mapping(self.machine, self.multicast)
        address = self.multicast + self._offset(stage)
        views = multicast_targets(self.machine, mapping, address, self._size(shape))
        return [tensor_over(view, self.given.dtype, *shape) for view in views]

    def _at(self, rank: int, stage: int, shape: tuple[int, ...]) -> torch.Tensor:
        """A stage of the current buffer of one rank, through its unicast address."""
        address = self.unicast[rank] + self._offset(stage)
        view = follow(self.machine, address, self._size(shape), f"the unicast buffer of rank {rank}")
        return tensor_over(view, self.given.dtype, *shape)


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
    """``workspace_ptrs``: world buffers, world flags, world lamport buffers, then the
    control block (trtllm_ar.py). One-shot uses the lamport buffers, two-shot the plain
    ones and the flags."""
    pointers = [int(value) for value in workspace_ptrs.tolist()]
    if len(pointers) != 3 * world_size + 1:
        raise BadPointer(f"the table of pointers has {len(pointers)} entries, not {3 * world_size + 1}")
    standin = machine.addresses.standins.get(pointers[0])
    if standin is not None:
        _standin(machine, standin, input, output, world_size, rank)
        return
    view = follow(machine, pointers[-1], _CONTROL_WORDS * WORD, "the control block", aligned=WORD)
    control = tensor_over(view, torch.int32, _CONTROL_WORDS)
    given = input.reshape(token_num, hidden_dim)
    if oneshot:
        summed = _trtllm_one_shot(machine, given, pointers[2 * world_size : -1], control, rank)
    else:
        flags, size = pointers[world_size : 2 * world_size], world_size * _BARRIER_FLAGS * WORD
        for peer, pointer in enumerate(flags):
            follow(machine, pointer, size, f"the flags of rank {peer}", aligned=WORD)
        summed = _trtllm_two_shot(machine, given, pointers[:world_size], rank)
    output.copy_(summed.view(output.shape))


def _trtllm_one_shot(
    machine: SimulatedMachine, given: torch.Tensor, buffers: list[int], control: torch.Tensor, rank: int
) -> torch.Tensor:
    """Every rank writes its rows into its slot of every peer's current lamport buffer."""
    world, size = len(buffers), len(buffers) * given.numel() * given.element_size()
    index, room = int(control[_INDEX]) % _BUFFERS, int(control[_SIZE])
    if size > room:
        raise BadPointer(f"{size} bytes do not fit a lamport buffer of {room} bytes")
    targets = []
    for peer, pointer in enumerate(buffers):
        view = follow(machine, pointer + index * room, size, f"the lamport buffer of rank {peer}")
        targets.append(tensor_over(view, given.dtype, world, *given.shape))
    launch = begin(machine, _key(machine, buffers[0]), world)
    for target in targets:
        target[rank].copy_(given)
    launch.meet(1)
    control[_INDEX] = (index + 1) % _BUFFERS
    return sum_in_rank_order(list(targets[rank].unbind(0)), given.dtype)


def _trtllm_two_shot(
    machine: SimulatedMachine, given: torch.Tensor, buffers: list[int], rank: int
) -> torch.Tensor:
    """Every rank shows its rows in its own buffer, sums its part of the tokens out of all
    buffers, and writes the sums into the second half of every buffer."""
    size = 2 * given.numel() * given.element_size()
    halves = []
    for peer, pointer in enumerate(buffers):
        view = follow(machine, pointer, size, f"the buffer of rank {peer}")
        halves.append(tensor_over(view, given.dtype, 2, *given.shape))
    launch = begin(machine, _key(machine, buffers[0]), len(buffers))
    halves[rank][0].copy_(given)
    launch.meet(1)
    part = _part(given.shape[0], len(buffers), rank)
    summed = sum_in_rank_order([half[0][part] for half in halves], given.dtype)
    for half in halves:
        half[1][part].copy_(summed)
    launch.meet(2)
    return halves[rank][1]


def _part(tokens: int, world: int, rank: int) -> slice:
    """The tokens that a rank sums: consecutive ones, the first ranks one more."""
    share, rest = divmod(tokens, world)
    first = rank * share + min(rank, rest)
    return slice(first, first + share + (rank < rest))


def _key(machine: SimulatedMachine, buffer: int) -> str:
    """The workspace by the memory of rank 0's buffer, which has one number on all ranks."""
    mapping = machine.addresses.mapping_at(buffer)
    if mapping is None:
        raise BadPointer(f"the buffer of rank 0 at {buffer:#x} is memory that no peer can see")
    return f"memory-{mapping.number}"


# ------------------------------------------------------------------ stand-in


def _standin(
    machine: SimulatedMachine,
    standin: Allocation,
    given: torch.Tensor,
    output: torch.Tensor,
    world: int,
    rank: int,
) -> None:
    """A mocked workspace: one region that all ranks share, with a slot for each."""
    size = world * given.numel() * given.element_size()
    room = standin.size_bytes // _BUFFERS // VECTOR * VECTOR
    if size > room:
        raise BadPointer(f"{size} bytes do not fit a stand-in buffer of {room} bytes")
    launch = begin(machine, f"standin-{standin.key}", world)
    start = launch.number % _BUFFERS * room
    view = memoryview(standin.memory)[start : start + size]
    slots = tensor_over(view, given.dtype, world, given.numel())
    slots[rank].copy_(given.reshape(-1))
    launch.meet(1)
    output.copy_(sum_in_rank_order(list(slots.unbind(0)), given.dtype).view(output.shape))
