"""The two kernels over memory that is really mapped, with ranks as threads."""

from __future__ import annotations

import struct
import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from faultlab.machine.board import Board, Reply
from faultlab.machine.simulated.machine import SimulatedMachine
from tests.unit.machines import GRANULE, POSIX, access, memory_prop, recorded_topology, team_prop


class BlockingBoard:
    """A board that several threads share; a call that waits, waits."""

    def __init__(self, board: Board, rank: int, changed: threading.Condition) -> None:
        self._board, self._rank, self._changed = board, rank, changed

    def call(self, method: str, arguments: dict[str, Any], fds: Sequence[int] = ()) -> tuple[Any, list[int]]:
        import os

        with self._changed:
            while not isinstance(answer := self._board.call(self._rank, method, arguments), Reply):
                self._changed.notify_all()
                assert self._changed.wait(10), f"{method} never ended"
            self._changed.notify_all()
            copies = list(answer.fds) if answer.close_fds else [os.dup(fd) for fd in answer.fds]
            return answer.value, copies


class World:
    """Some ranks over one board, run side by side."""

    def __init__(self, ranks: int) -> None:
        topology = recorded_topology(ranks)
        self.board = Board(topology, list(range(ranks)))
        changed = threading.Condition()
        self.machines = [
            SimulatedMachine(topology, rank, list(range(ranks)), BlockingBoard(self.board, rank, changed))
            for rank in range(ranks)
        ]

    def run(self, body: Callable[[int, SimulatedMachine], Any]) -> list[Any]:
        results: list[Any] = [None] * len(self.machines)

        def one(rank: int) -> None:
            results[rank] = body(rank, self.machines[rank])

        threads = [threading.Thread(target=one, args=(rank,)) for rank in range(len(self.machines))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
            assert not thread.is_alive()
        return results


def value(machine: SimulatedMachine, name: str, *args: Any) -> Any:
    result = machine.call(name, *args)
    assert int(result[0]) == 0, (name, result)
    return result[1] if len(result) > 1 else None


class Memory:
    """Symmetric memory of all ranks, as FlashInfer builds it, with a multicast object over it."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self.fds: list[int] = [0] * ranks
        self.team_fd = 0
        self.barrier = threading.Barrier(ranks)

    def build(self, rank: int, m: SimulatedMachine) -> dict[str, Any]:
        own = value(m, "cuMemCreate", GRANULE, memory_prop(rank), 0)
        self.fds[rank] = value(m, "cuMemExportToShareableHandle", own, POSIX, 0)
        self.barrier.wait()
        base = int(value(m, "cuMemAddressReserve", self.ranks * GRANULE, GRANULE, 0, 0))
        pointers = [base + peer * GRANULE for peer in range(self.ranks)]
        for peer, fd in enumerate(self.fds):
            handle = own if peer == rank else value(m, "cuMemImportFromShareableHandle", fd, POSIX)
            value(m, "cuMemMap", pointers[peer], GRANULE, 0, handle, 0)
        value(m, "cuMemSetAccess", base, self.ranks * GRANULE, [access(rank)], 1)
        table = int(value(m, "cuMemAlloc", 8 * self.ranks))
        value(m, "cuMemcpyHtoD", table, struct.pack(f"<{self.ranks}Q", *pointers), 8 * self.ranks)
        return {"own": own, "pointers": pointers, "table": table, "mc": self.multicast(rank, m, own)}

    def multicast(self, rank: int, m: SimulatedMachine, own: Any) -> int:
        if rank == 0:
            team = value(m, "cuMulticastCreate", team_prop(self.ranks))
            self.team_fd = value(m, "cuMemExportToShareableHandle", team, POSIX, 0)
        self.barrier.wait()
        if rank:
            team = value(m, "cuMemImportFromShareableHandle", self.team_fd, POSIX)
        value(m, "cuMulticastAddDevice", team, rank)
        address = int(value(m, "cuMemAddressReserve", GRANULE, GRANULE, 0, 0))
        value(m, "cuMemMap", address, GRANULE, 0, team, 0)
        value(m, "cuMemSetAccess", address, GRANULE, [access(rank)], 1)
        value(m, "cuMulticastBindMem", team, 0, own, 0, GRANULE, 0)
        self.barrier.wait()
        return address


def given(rank: int, dtype: torch.dtype) -> torch.Tensor:
    return ((torch.arange(64) * (rank + 3)) % 11 - 5).reshape(4, 16).to(dtype)


def mnnvl(
    m: SimulatedMachine, rank: int, ranks: int, built: dict[str, Any], dtype: torch.dtype
) -> torch.Tensor:
    output = torch.empty(4, 16, dtype=dtype)
    m.call(
        "kernel.allreduce",
        backend="mnnvl",
        input=given(rank, dtype),
        output=output,
        mc_ptr=built["mc"],
        uc_ptrs_dev=built["table"],
        uc_ptr_local=built["pointers"][rank],
        buffer_flags=torch.zeros(9),
        world_size=ranks,
        rank=rank,
        oneshot=True,
    )
    return output


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_the_mnnvl_kernel_sums_over_all_ranks(ranks: int, dtype: torch.dtype) -> None:
    world, memory = World(ranks), Memory(ranks)

    def body(rank: int, m: SimulatedMachine) -> list[torch.Tensor]:
        built = memory.build(rank, m)
        return [mnnvl(m, rank, ranks, built, dtype) for _ in range(5)]

    expected = torch.stack([given(rank, dtype) for rank in range(ranks)]).to(torch.float64).sum(0)
    for outputs in world.run(body):
        assert all(torch.equal(output.to(torch.float64), expected) for output in outputs)


def test_the_trtllm_kernel_sums_and_a_swapped_mapping_shows() -> None:
    world, memory = World(2), Memory(2)

    def body(rank: int, m: SimulatedMachine, swap: bool = False) -> torch.Tensor:
        built = memory.build(rank, m)
        pointers = built["pointers"][::-1] if swap and rank else built["pointers"]
        flag = int(value(m, "cuMemAlloc", 20))
        output = torch.empty(64)
        m.call(
            "kernel.allreduce",
            backend="trtllm",
            input=given(rank, torch.float32).view(-1),
            output=output,
            workspace_ptrs=torch.tensor([*pointers * 3, flag]),
            world_size=2,
            rank=rank,
            oneshot=True,
            token_num=4,
            hidden_dim=16,
        )
        return output

    expected = (given(0, torch.float32) + given(1, torch.float32)).view(-1)
    assert all(torch.equal(output, expected) for output in world.run(body))


@pytest.mark.parametrize("broken", ["mc", "table", "own"])
def test_a_pointer_that_cannot_be_followed_poisons_the_context(broken: str) -> None:
    world, memory = World(1), Memory(1)
    m = world.machines[0]
    built = memory.build(0, m)
    if broken == "own":
        built["pointers"] = [0]
    else:
        built[broken] = 0
    mnnvl(m, 0, 1, built, torch.float32)
    assert m.context_error() == "CUDA_ERROR_ILLEGAL_ADDRESS"
    assert "0x0" in m.sticky_reason
    assert int(m.call("cudart.cudaDeviceSynchronize")[0]) == 700


def test_map_and_bind_wait_until_every_device_was_added() -> None:
    from faultlab.machine.board import Waiting

    board = Board(recorded_topology(2), [0, 1])
    number = board.call(0, "create_multicast", {"size_bytes": GRANULE, "devices": 2, "shareable": True}).value
    assert board.call(0, "add_device", {"number": number, "gpu": 0}).value == ""
    waiting = board.call(0, "map", {"number": number})
    assert isinstance(waiting, Waiting)
    assert waiting.needs == (1,)
    assert "1 of 2" in waiting.text
    assert board.call(1, "add_device", {"number": number, "gpu": 1}).value == ""
    assert isinstance(board.call(0, "map", {"number": number}), Reply)
    board.close()


def test_the_same_device_twice_and_too_much_memory_are_refused() -> None:
    board = Board(recorded_topology(2), [0, 1])
    number = board.call(0, "create_multicast", {"size_bytes": GRANULE, "devices": 2, "shareable": True}).value
    board.call(0, "add_device", {"number": number, "gpu": 0})
    assert board.call(0, "add_device", {"number": number, "gpu": 0}).value == "CUDA_ERROR_INVALID_VALUE"
    assert board.call(0, "create", {"gpu": 0, "size_bytes": 1 << 40, "shareable": True}).value is None
    board.close()


def test_a_dead_rank_holds_nothing() -> None:
    board = Board(recorded_topology(2), [0, 1])
    board.call(0, "create", {"gpu": 0, "size_bytes": GRANULE, "shareable": True})
    assert board.device_bytes(0) == GRANULE
    board.forget(0)
    assert board.device_bytes(0) == 0
    board.close()
