"""The two kernels over memory that is really mapped, with ranks as threads."""

from __future__ import annotations

import os
import struct
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from faultlab.machine.board import Board, LocalBoard, Reply, WouldBlock, received
from faultlab.machine.simulated.machine import SimulatedMachine
from tests.unit.machines import GRANULE, POSIX, access, memory_prop, recorded_topology, team_prop

ILLEGAL, MISALIGNED = "CUDA_ERROR_ILLEGAL_ADDRESS", "CUDA_ERROR_MISALIGNED_ADDRESS"
DIM = 16
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


class BlockingBoard:
    """A board that several threads share; a call that waits, waits."""

    def __init__(self, board: Board, rank: int, changed: threading.Condition) -> None:
        self._board, self._rank, self._changed = board, rank, changed

    def call(self, method: str, arguments: dict[str, Any], fds: Sequence[int] = ()) -> tuple[Any, list[int]]:
        with self._changed:
            while not isinstance(answer := self._board.call(self._rank, method, arguments), Reply):
                self._changed.notify_all()
                assert self._changed.wait(10), f"{method} never ended"
            self._changed.notify_all()
            return answer.value, received(answer)


class World:
    """Some ranks over one board, run side by side."""

    def __init__(self, ranks: int) -> None:
        topology = recorded_topology(ranks)
        self.ranks = ranks
        self.board = Board(topology, list(range(ranks)))
        self.barrier = threading.Barrier(ranks)
        self.team_fd = 0
        self.fds: list[int] = [0] * ranks
        changed = threading.Condition()
        self.machines = [
            SimulatedMachine(topology, rank, list(range(ranks)), BlockingBoard(self.board, rank, changed))
            for rank in range(ranks)
        ]

    def run(self, body: Callable[[int, SimulatedMachine], Any]) -> list[Any]:
        """What ``body(rank, machine)`` returns on every rank."""
        results: list[Any] = [None] * self.ranks

        def one(rank: int) -> None:
            m = self.machines[rank]
            m.call("cudart.cudaSetDevice", rank)
            results[rank] = body(rank, m)

        threads = [threading.Thread(target=one, args=(rank,)) for rank in range(self.ranks)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
            assert not thread.is_alive()
        return results

    def stop_waiting(self) -> None:
        """From here on a call that would wait raises WouldBlock instead."""
        for rank, m in enumerate(self.machines):
            m.board = LocalBoard(self.board, rank)

    # ------------------------------------------- what FlashInfer builds

    def symmetric(self, rank: int, m: SimulatedMachine, granules: int = 1) -> tuple[Any, list[int]]:
        """Memory of all ranks, mapped side by side on each (SymmDeviceMemory): the own
        handle, and a pointer for every rank."""
        size = granules * GRANULE
        own = value(m, "cuMemCreate", size, memory_prop(rank), 0)
        self.fds[rank] = value(m, "cuMemExportToShareableHandle", own, POSIX, 0)
        self.barrier.wait()
        base = int(value(m, "cuMemAddressReserve", self.ranks * size, GRANULE, 0, 0))
        pointers = [base + peer * size for peer in range(self.ranks)]
        for peer, fd in enumerate(self.fds):
            handle = own if peer == rank else value(m, "cuMemImportFromShareableHandle", fd, POSIX)
            value(m, "cuMemMap", pointers[peer], size, 0, handle, 0)
        value(m, "cuMemSetAccess", base, self.ranks * size, [access(rank)], 1)
        self.barrier.wait()
        os.close(self.fds[rank])
        return own, pointers

    def mnnvl(self, rank: int, m: SimulatedMachine, *, bind: bool = True, stage: int = 1 << 16) -> Mnnvl:
        """The memory of MNNVLAllReduceFusionWorkspace."""
        own, pointers = self.symmetric(rank, m)
        table = int(value(m, "cuMemAlloc", 8 * self.ranks))
        value(m, "cuMemcpyHtoD", table, struct.pack(f"<{self.ranks}Q", *pointers), 8 * self.ranks)
        flags = torch.tensor([0, 2, stage, 0, 0, 0, 0, 0, 0], dtype=torch.uint32)
        team, mc = self._multicast(rank, m)
        if bind:
            value(m, "cuMulticastBindMem", team, 0, own, 0, GRANULE, 0)
        self.barrier.wait()
        return Mnnvl(m, rank, self.ranks, mc, table, pointers, flags, team)

    def _multicast(self, rank: int, m: SimulatedMachine) -> tuple[Any, int]:
        team = None
        if rank == 0:
            team = value(m, "cuMulticastCreate", team_prop(self.ranks))
            self.team_fd = value(m, "cuMemExportToShareableHandle", team, POSIX, 0)
        self.barrier.wait()
        if rank:
            team = value(m, "cuMemImportFromShareableHandle", self.team_fd, POSIX)
        value(m, "cuMulticastAddDevice", team, rank)
        mc = int(value(m, "cuMemAddressReserve", GRANULE, GRANULE, 0, 0))
        value(m, "cuMemMap", mc, GRANULE, 0, team, 0)
        value(m, "cuMemSetAccess", mc, GRANULE, [access(rank)], 1)
        return team, mc

    def trtllm(self, rank: int, m: SimulatedMachine, *, lamport: int = 1 << 16) -> Trtllm:
        """The memory of TRTLLMAllReduceFusionWorkspace: buffers, flags, lamport buffers
        and the control block (trtllm_ar.py)."""
        pointers = [p for _ in range(3) for p in self.symmetric(rank, m)[1]]
        _, control = m.call("cudart.cudaMalloc", 20)
        m.call("cudart.cudaMemset", control, 0, 20)
        value(m, "cuMemcpyHtoD", control + 12, struct.pack("<i", lamport), 4)
        return Trtllm(m, rank, self.ranks, [*pointers, control])


@dataclass
class Mnnvl:
    """A rank's mnnvl workspace."""

    m: SimulatedMachine
    rank: int
    world: int
    mc: int
    table: int
    pointers: list[int]
    flags: torch.Tensor
    team: Any

    def allreduce(self, given: torch.Tensor, *, oneshot: bool = True) -> torch.Tensor:
        output = torch.full_like(given, 99)
        self.m.call(
            "kernel.allreduce",
            backend="mnnvl",
            input=given,
            output=output,
            mc_ptr=self.mc,
            uc_ptrs_dev=self.table,
            uc_ptr_local=self.pointers[self.rank],
            buffer_flags=self.flags,
            world_size=self.world,
            rank=self.rank,
            oneshot=oneshot,
        )
        return output


@dataclass
class Trtllm:
    """A rank's trtllm workspace."""

    m: SimulatedMachine
    rank: int
    world: int
    pointers: list[int]

    def allreduce(self, given: torch.Tensor, *, oneshot: bool = True) -> torch.Tensor:
        output = torch.full_like(given, 99)
        self.m.call(
            "kernel.allreduce",
            backend="trtllm",
            input=given,
            output=output,
            workspace_ptrs=torch.tensor(self.pointers, dtype=torch.int64),
            world_size=self.world,
            rank=self.rank,
            oneshot=oneshot,
            token_num=given.shape[0],
            hidden_dim=given.shape[1],
        )
        return output


BUILDERS: dict[str, Callable[[World, int, SimulatedMachine], Any]] = {
    "mnnvl": lambda world, rank, m: world.mnnvl(rank, m),
    "trtllm": lambda world, rank, m: world.trtllm(rank, m),
}


def value(m: SimulatedMachine, name: str, *args: Any) -> Any:
    result = m.call(name, *args)
    assert int(result[0]) == 0, (name, result)
    return result[1] if len(result) > 1 else None


def given(rank: int, number: int = 0, tokens: int = 4, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Small integers, different for every rank and launch: their sums are exact."""
    numbers = torch.arange(tokens * DIM) * (rank + 3) + 5 * number + rank
    return (numbers % 11 - 5).reshape(tokens, DIM).to(dtype)


def expected(
    ranks: int, number: int = 0, tokens: int = 4, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    return torch.stack([given(rank, number, tokens) for rank in range(ranks)]).sum(0).to(dtype)


def poisoned(m: SimulatedMachine) -> tuple[str, int]:
    """The sticky error, and what the next synchronisation answers."""
    return m.context_error(), int(m.call("cudart.cudaDeviceSynchronize")[0])


# ------------------------------------------------------------------ results


@pytest.mark.parametrize("oneshot", [True, False])
@pytest.mark.parametrize("backend", sorted(BUILDERS))
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_every_rank_has_the_sum_of_all(ranks: int, backend: str, oneshot: bool) -> None:
    """Token counts that do and do not divide evenly, and fewer than there are ranks."""
    world, counts = World(ranks), [4, 7, 1, 13]

    def body(rank: int, m: SimulatedMachine) -> list[torch.Tensor]:
        workspace = BUILDERS[backend](world, rank, m)
        return [workspace.allreduce(given(rank, n, n), oneshot=oneshot) for n in counts]

    for outputs in world.run(body):
        for count, output in zip(counts, outputs, strict=True):
            assert torch.equal(output, expected(ranks, count, count))
    assert world.board.snapshot()["kernels"] == []
    world.board.close()


@pytest.mark.parametrize("oneshot", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_sum_is_made_in_float32_and_rounded_once(dtype: torch.dtype, oneshot: bool) -> None:
    """256 + 1 + 1 + 1 + 1 is 260 in float32; rounded after every step it is 256 in bfloat16."""
    world = World(4)
    values = [256.0, 1.0, 1.0, 2.0]

    def body(rank: int, m: SimulatedMachine) -> list[torch.Tensor]:
        workspaces = [build(world, rank, m) for build in BUILDERS.values()]
        rows = torch.full((8, DIM), values[rank], dtype=dtype)
        return [workspace.allreduce(rows, oneshot=oneshot) for workspace in workspaces]

    for outputs in world.run(body):
        assert all(torch.equal(output, torch.full((8, DIM), 260.0, dtype=dtype)) for output in outputs)
    world.board.close()


@pytest.mark.parametrize("backend", sorted(BUILDERS))
def test_a_slow_rank_is_never_overtaken(backend: str) -> None:
    """One-shot and two-shot in turn; another rank is slow at every launch."""
    world, launches = World(3), 24

    def body(rank: int, m: SimulatedMachine) -> list[torch.Tensor]:
        workspace = BUILDERS[backend](world, rank, m)
        outputs = []
        for number in range(launches):
            if number % 3 == rank:
                time.sleep(0.002)
            outputs.append(workspace.allreduce(given(rank, number, 5), oneshot=number % 4 < 2))
        return outputs

    for outputs in world.run(body):
        for number, output in enumerate(outputs):
            assert torch.equal(output, expected(3, number, 5)), number
    world.board.close()


def test_two_workspaces_do_not_disturb_each_other() -> None:
    world = World(2)

    def body(rank: int, m: SimulatedMachine) -> list[torch.Tensor]:
        first, second = world.mnnvl(rank, m), world.mnnvl(rank, m)
        return [w.allreduce(given(rank, n)) for n, w in enumerate((first, second, second, first))]

    for outputs in world.run(body):
        assert all(torch.equal(output, expected(2, n)) for n, output in enumerate(outputs))
    world.board.close()


def test_two_shot_fits_the_buffer_that_flashinfer_computes_for_it() -> None:
    """get_required_buffer_size_bytes: twice the tokens, rounded up to the ranks, however
    many ranks there are; as slots for all ranks they would not fit."""
    world, tokens = World(4), 8
    room = 2 * tokens * DIM * 4

    def body(rank: int, m: SimulatedMachine) -> tuple[torch.Tensor, str]:
        workspace = world.mnnvl(rank, m, stage=room)
        output = workspace.allreduce(given(rank, 0, tokens), oneshot=False)
        return output, m.context_error()

    for output, error in world.run(body):
        assert error == ""
        assert torch.equal(output, expected(4, 0, tokens))
    world.board.close()


def test_the_flags_of_the_workspace_tell_the_next_buffer() -> None:
    world = World(1)
    (flags,) = world.run(lambda rank, m: _flags_after_each(world.mnnvl(rank, m)))
    assert flags == [[1, 0, 1], [2, 1, 1], [0, 2, 2]]
    world.board.close()


def _flags_after_each(workspace: Mnnvl) -> list[list[int]]:
    told = []
    for oneshot in (True, True, False):
        workspace.allreduce(given(0), oneshot=oneshot)
        current, dirty, _, stages = workspace.flags.tolist()[:4]
        told.append([current, dirty, stages])
    return told


# ----------------------------------------------------------- wrong mappings


@pytest.mark.parametrize(
    ("backend", "oneshot", "wrong"),
    [
        # Rows arrive through the multicast address, whatever the unicast table says.
        ("mnnvl", True, []),
        # Rank 0 gets rows meant for rank 1; both send their part of the sums to all.
        ("mnnvl", False, [0, 1, 2]),
        # Rank 1 misses rank 2's rows.
        ("trtllm", True, [1]),
        # Rank 2 sums rank 0's rows twice for all; rank 1 never gets these sums.
        ("trtllm", False, [0, 1, 2]),
    ],
)
def test_a_wrong_mapping_shows_as_a_wrong_result(backend: str, oneshot: bool, wrong: list[int]) -> None:
    """On rank 2, what should be rank 1's memory is rank 0's."""
    world = World(3)

    def body(rank: int, m: SimulatedMachine) -> torch.Tensor:
        workspace = BUILDERS[backend](world, rank, m)
        if rank == 2 and isinstance(workspace, Mnnvl):
            pointer = struct.pack("<Q", workspace.pointers[0])
            value(m, "cuMemcpyHtoD", workspace.table + 8, pointer, 8)
        elif rank == 2:
            for first in (0, 3, 6):
                workspace.pointers[first + 1] = workspace.pointers[first]
        return workspace.allreduce(given(rank, 1, 6), oneshot=oneshot)

    outputs = world.run(body)
    found = [rank for rank, output in enumerate(outputs) if not torch.equal(output, expected(3, 1, 6))]
    assert found == wrong
    world.board.close()


def test_memory_that_is_not_the_bound_one_never_gets_the_rows() -> None:
    world = World(2)

    def body(rank: int, m: SimulatedMachine) -> torch.Tensor:
        workspace = world.mnnvl(rank, m)
        if rank == 1:
            _, others = world_alone(m)
            value(m, "cuMemcpyHtoD", workspace.table + 8, struct.pack("<Q", others), 8)
        return workspace.allreduce(given(rank))

    def world_alone(m: SimulatedMachine) -> tuple[Any, int]:
        handle = value(m, "cuMemCreate", GRANULE, memory_prop(1), 0)
        address = int(value(m, "cuMemAddressReserve", GRANULE, GRANULE, 0, 0))
        value(m, "cuMemMap", address, GRANULE, 0, handle, 0)
        value(m, "cuMemSetAccess", address, GRANULE, [access(1)], 1)
        return handle, address

    first, second = world.run(body)
    assert torch.equal(first, expected(2))
    assert torch.equal(second, torch.zeros_like(second))
    world.board.close()


# ------------------------------------------------------------- bad pointers


def test_a_rank_that_faults_leaves_its_peers_waiting() -> None:
    world = World(2)
    first, second = world.run(lambda rank, m: world.mnnvl(rank, m))
    world.stop_waiting()
    second.mc = 0
    output = second.allreduce(given(1))
    assert torch.equal(output, torch.full_like(output, 99)), "it wrote nothing"
    assert poisoned(second.m) == (ILLEGAL, 700)
    assert "multicast pointer is 0x0" in second.m.sticky_reason
    with pytest.raises(WouldBlock, match="1 of 2 ranks"):
        first.allreduce(given(0))
    assert first.m.context_error() == ""
    second.allreduce(given(1))
    assert world.board.snapshot()["kernels"][0]["arrived"] == [0], "a poisoned context runs nothing"
    world.board.close()


def _nothing(workspace: Mnnvl) -> int:
    return 0


def _host(workspace: Mnnvl) -> int:
    return 0x7F00_0000_0000


def _odd(workspace: Mnnvl) -> int:
    return workspace.mc + 4


def _unicast(workspace: Mnnvl) -> int:
    return workspace.pointers[0]


def _past_the_end(workspace: Mnnvl) -> int:
    return workspace.mc + GRANULE


@pytest.mark.parametrize(
    ("pointer", "error"),
    [
        (_nothing, ILLEGAL),
        (_host, ILLEGAL),
        (_odd, MISALIGNED),
        (_unicast, ILLEGAL),
        (_past_the_end, ILLEGAL),
    ],
)
def test_a_multicast_pointer_must_be_one(pointer: Callable[[Mnnvl], int], error: str) -> None:
    world = World(1)
    (workspace,) = world.run(lambda rank, m: world.mnnvl(rank, m))
    workspace.mc = pointer(workspace)
    workspace.allreduce(given(0))
    assert workspace.m.context_error() == error
    assert f"{workspace.mc:#x}" in workspace.m.sticky_reason
    world.board.close()


@pytest.mark.parametrize("broken", ["mc", "table", "own"])
def test_a_pointer_that_cannot_be_followed_poisons_the_context(broken: str) -> None:
    world = World(1)
    (workspace,) = world.run(lambda rank, m: world.mnnvl(rank, m))
    if broken == "own":
        workspace.pointers = [0]
    else:
        setattr(workspace, broken, 0)
    workspace.allreduce(given(0))
    assert poisoned(workspace.m) == (ILLEGAL, 700)
    assert "0x0" in workspace.m.sticky_reason
    world.board.close()


@pytest.mark.parametrize(("oneshot", "peer_matters"), [(True, False), (False, True)])
def test_only_the_two_shot_kernel_follows_the_peers_unicast_pointers(
    oneshot: bool, peer_matters: bool
) -> None:
    world = World(2)
    first, _ = world.run(lambda rank, m: world.mnnvl(rank, m))
    world.stop_waiting()
    first.m.call("cudart.cudaSetDevice", 0)
    value(first.m, "cuMemcpyHtoD", first.table + 8, bytes(8), 8)
    if peer_matters:
        first.allreduce(given(0), oneshot=oneshot)
        assert first.m.context_error() == ILLEGAL
        assert "rank 1" in first.m.sticky_reason
    else:
        with pytest.raises(WouldBlock):
            first.allreduce(given(0), oneshot=oneshot)
    world.board.close()


def test_a_multicast_object_with_an_unbound_device_is_illegal_to_store_through() -> None:
    world = World(2)
    first, _ = world.run(lambda rank, m: world.mnnvl(rank, m, bind=rank == 0))
    first.allreduce(given(0))
    assert first.m.context_error() == ILLEGAL
    assert "not every device" in first.m.sticky_reason
    world.board.close()


def test_a_device_that_left_is_only_not_reached() -> None:
    """The team is not formed anew (open-gpu-kernel-modules); the kernel then spins for it."""
    world = World(2)
    first, second = world.run(lambda rank, m: world.mnnvl(rank, m))
    world.stop_waiting()
    value(second.m, "cuMulticastUnbind", second.team, 1, 0, GRANULE)
    with pytest.raises(WouldBlock):
        first.allreduce(given(0))
    assert first.m.context_error() == ""
    world.board.close()


def test_a_mapping_without_access_is_illegal() -> None:
    world = World(1)
    (workspace,) = world.run(lambda rank, m: world.mnnvl(rank, m))
    mapping = workspace.m.addresses.mapping_at(workspace.mc)
    assert mapping is not None
    mapping.access.clear()
    workspace.allreduce(given(0))
    assert "no access" in workspace.m.sticky_reason
    world.board.close()


@pytest.mark.parametrize("oneshot", [True, False])
@pytest.mark.parametrize("backend", sorted(BUILDERS))
def test_what_does_not_fit_the_buffers_is_illegal(backend: str, oneshot: bool) -> None:
    world = World(1)
    tokens = GRANULE // (DIM * 4) + 1
    (workspace,) = world.run(lambda rank, m: BUILDERS[backend](world, rank, m))
    workspace.allreduce(given(0, 0, tokens), oneshot=oneshot)
    assert workspace.m.context_error() == ILLEGAL
    world.board.close()


#: Which of the pointers [buffer, buffer, flag, flag, lamport, lamport, control] of two
#: ranks each kernel follows (LamportComm, SyncComm and Barrier in trtllm_allreduce_fusion.cuh).
FOLLOWED = {True: {4, 5, 6}, False: {0, 1, 2, 3, 6}}


@pytest.mark.parametrize("oneshot", [True, False])
@pytest.mark.parametrize("index", range(7))
def test_the_trtllm_kernel_follows_just_the_pointers_it_uses(index: int, oneshot: bool) -> None:
    world = World(2)
    first, _ = world.run(lambda rank, m: world.trtllm(rank, m))
    world.stop_waiting()
    first.pointers[index] = 0
    if index in FOLLOWED[oneshot]:
        first.allreduce(given(0), oneshot=oneshot)
        assert poisoned(first.m) == (ILLEGAL, 700)
        assert "at 0x0" in first.m.sticky_reason
    else:
        with pytest.raises(WouldBlock):
            first.allreduce(given(0), oneshot=oneshot)
        assert first.m.context_error() == ""
    world.board.close()


@pytest.mark.parametrize(
    ("index", "by", "oneshot"), [(4, 8, True), (6, 2, True), (0, 4, False), (3, 1, False)]
)
def test_a_misaligned_trtllm_pointer_is_that_error(index: int, by: int, oneshot: bool) -> None:
    world = World(2)
    first, _ = world.run(lambda rank, m: world.trtllm(rank, m))
    first.pointers[index] += by
    first.allreduce(given(0), oneshot=oneshot)
    assert poisoned(first.m) == (MISALIGNED, 716)
    world.board.close()


def test_private_memory_is_no_buffer_for_peers() -> None:
    world = World(1)
    (workspace,) = world.run(lambda rank, m: world.trtllm(rank, m))
    _, private = workspace.m.call("cudart.cudaMalloc", 1 << 18)
    workspace.pointers[2] = private
    workspace.allreduce(given(0))
    assert "no peer can see" in workspace.m.sticky_reason
    world.board.close()


def test_pointers_of_another_rank_are_nothing_here() -> None:
    world = World(2)
    first, second = world.run(lambda rank, m: world.trtllm(rank, m))
    first.pointers = second.pointers
    first.allreduce(given(0))
    assert first.m.context_error() == ILLEGAL
    world.board.close()


# --------------------------------------------------------- the other kernels


@pytest.mark.parametrize("dtype", DTYPES)
def test_lamport_buffers_are_filled_with_negative_zero(dtype: torch.dtype) -> None:
    world = World(1)
    ((_, (pointer,)),) = world.run(lambda rank, m: world.symmetric(rank, m))
    (m,) = world.machines
    m.call("kernel.lamport_initialize", pointer, 24, dtype)
    view = m.view(pointer, 32 * dtype.itemsize)
    assert view is not None
    negative_zero = (b"\x00\x80" if dtype.itemsize == 2 else b"\x00\x00\x00\x80") * 24
    assert bytes(view) == negative_zero + bytes(8 * dtype.itemsize)
    m.call("kernel.lamport_initialize", 0, 24, dtype)
    assert m.context_error() == ILLEGAL
    world.board.close()


@pytest.mark.parametrize("kind", [Mnnvl, Trtllm])
def test_a_stand_in_carries_an_all_reduce_and_is_gone_after_release(kind: type) -> None:
    world = World(3)

    def body(rank: int, m: SimulatedMachine) -> tuple[list[torch.Tensor], Any]:
        address = m.make_standin("key", 3, 3 * 3 * 5 * DIM * 4)
        if kind is Mnnvl:
            flags = torch.zeros(9, dtype=torch.int64).to(torch.uint32)
            workspace: Any = Mnnvl(m, rank, 3, address, address, [address] * 3, flags, None)
        else:
            workspace = Trtllm(m, rank, 3, [address] * 10)
        outputs = []
        for number in range(7):
            if number % 3 == rank:
                time.sleep(0.002)
            outputs.append(workspace.allreduce(given(rank, number, 5)))
        m.release_standin(address)
        return outputs, workspace

    results = world.run(body)
    for outputs, _ in results:
        assert all(torch.equal(output, expected(3, n, 5)) for n, output in enumerate(outputs))
    assert world.board.snapshot()["standins"] == []
    workspace = results[0][1]
    workspace.allreduce(given(0))
    assert workspace.m.context_error() == ILLEGAL
    world.board.close()


def test_a_kernel_leaves_no_descriptor_and_no_mapping_behind() -> None:
    world = World(2)
    before = len(os.listdir("/proc/self/fd"))

    def body(rank: int, m: SimulatedMachine) -> int:
        workspace = world.mnnvl(rank, m)
        workspace.allreduce(given(rank))
        world.barrier.wait()
        kept = len(m.kept())
        for _ in range(5):
            workspace.allreduce(given(rank))
        assert len(m.kept()) == kept
        world.barrier.wait()
        return kept

    assert world.run(body) == [2, 2], "the own memory and the peer's; the team has no bytes"
    os.close(world.team_fd)
    for m in world.machines:
        m.close()
    world.board.close()
    assert len(os.listdir("/proc/self/fd")) == before
