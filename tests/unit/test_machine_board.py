"""What the ranks share: lifetimes, budgets, multicast objects, meetings, stand-ins."""

from __future__ import annotations

import array
import json
import os
import socket
from collections.abc import Iterator
from typing import Any

import pytest

from faultlab.machine.board import MULTICAST_SLOTS, Board, LocalBoard, Reply, Waiting, WouldBlock
from tests.unit.machines import GRANULE, recorded_topology

GIB = 1 << 30
INVALID = "CUDA_ERROR_INVALID_VALUE"


@pytest.fixture
def board() -> Iterator[Board]:
    made = Board(recorded_topology(2), [0, 1])
    yield made
    made.close()


class Rank:
    """A rank's requests by name: ``rank.create(gpu=0, …)`` gives the value, or the wait."""

    def __init__(self, board: Board, number: int) -> None:
        self._board, self.number = board, number

    def __getattr__(self, method: str) -> Any:
        def ask(**arguments: Any) -> Any:
            answer = self._board.call(self.number, method, arguments)
            return answer.value if isinstance(answer, Reply) else answer

        return ask

    def exported(self, number: int) -> int:
        """A descriptor of the object, ours to close."""
        answer = self._board.call(self.number, "export", {"number": number})
        assert isinstance(answer, Reply)
        assert answer.close_fds
        (fd,) = answer.fds
        return fd

    def imported(self, fd: int) -> Any:
        found = os.fstat(fd)
        return getattr(self, "import")(device=found.st_dev, inode=found.st_ino)


def ranks_of(board: Board, count: int = 2) -> list[Rank]:
    return [Rank(board, number) for number in range(count)]


def team(board: Board, ranks: int = 2, devices: int = 2) -> int:
    """A multicast object that every rank holds and has added its device to."""
    first, *others = ranks_of(board, ranks)
    number: int = first.create_multicast(size_bytes=GRANULE, devices=devices)
    fd = first.exported(number)
    for other in others:
        other.imported(fd)
    os.close(fd)
    for each in (first, *others):
        assert each.add_device(number=number, gpu=each.number) == ""
    return number


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


# ---------------------------------------------------------------- lifetimes


def test_memory_lives_while_anything_refers_to_it(board: Board) -> None:
    first, second = ranks_of(board)
    number = first.create(gpu=0, size_bytes=GRANULE)
    fd = first.exported(number)
    told = second.imported(fd)
    assert told == {"number": number, "gpu": 0, "size_bytes": GRANULE, "multicast": False, "error": ""}
    assert second.map(number=number) == ""
    steps: list[Any] = [
        lambda: first.release(number=number),
        lambda: second.release(number=number),
        lambda: os.close(fd),
    ]
    for step in steps:
        step()
        assert board.device_bytes(0) == GRANULE
    second.unmap(number=number)
    assert board.device_bytes(0) == 0
    assert board.device_bytes(1) == 0


def test_a_copy_of_a_descriptor_keeps_memory_alive_wherever_it_is(board: Board) -> None:
    first, second = ranks_of(board)
    number = first.create(gpu=0, size_bytes=GRANULE)
    fd = first.exported(number)
    first.release(number=number)
    copy = os.dup(fd)
    os.close(fd)
    assert board.device_bytes(0) == GRANULE
    here, there = socket.socketpair()
    with here, there:
        here.sendmsg([b"x"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [copy]))])
        os.close(copy)
        assert board.device_bytes(0) == GRANULE, "it is in flight"
        _, fds, _, _ = socket.recv_fds(there, 1, 1)
    assert second.imported(fds[0])["number"] == number
    os.close(fds[0])
    assert board.device_bytes(0) == GRANULE
    second.release(number=number)
    assert board.device_bytes(0) == 0


def test_a_descriptor_in_a_socket_that_nobody_reads_dies_with_it(board: Board) -> None:
    (first, _) = ranks_of(board)
    number = first.create(gpu=0, size_bytes=GRANULE)
    fd = first.exported(number)
    first.release(number=number)
    here, there = socket.socketpair()
    here.sendmsg([b"x"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [fd]))])
    os.close(fd)
    assert board.device_bytes(0) == GRANULE
    here.close()
    there.close()
    assert board.device_bytes(0) == 0


def test_another_descriptor_is_no_export_even_with_the_same_inode(board: Board) -> None:
    (first, _) = ranks_of(board)
    fd = first.exported(first.create(gpu=0, size_bytes=GRANULE))
    found = os.fstat(fd)
    ask = getattr(first, "import")
    assert ask(device=found.st_dev, inode=found.st_ino) is not None
    assert ask(device=found.st_dev + 1, inode=found.st_ino) is None
    os.close(fd)
    assert ask(device=found.st_dev, inode=found.st_ino) is None


def test_every_import_is_a_reference_of_its_own(board: Board) -> None:
    first, second = ranks_of(board)
    number = first.create(gpu=0, size_bytes=GRANULE)
    fd = first.exported(number)
    second.imported(fd)
    second.imported(fd)
    os.close(fd)
    first.release(number=number)
    assert second.release(number=number) == ""
    assert board.device_bytes(0) == GRANULE
    assert second.release(number=number) == ""
    assert board.device_bytes(0) == 0
    assert second.release(number=number) == INVALID


def test_memory_of_another_node_cannot_be_imported() -> None:
    two_nodes = recorded_topology(2).model_copy(update={"nodes": 2})
    board = Board(two_nodes, [0, 1, 2, 3])
    first, third = Rank(board, 0), Rank(board, 2)
    for number in (
        first.create(gpu=0, size_bytes=GRANULE),
        first.create_multicast(size_bytes=GRANULE, devices=2),
    ):
        fd = first.exported(number)
        assert third.imported(fd)["error"] == "CUDA_ERROR_INVALID_DEVICE"
        os.close(fd)
        first.release(number=number)
    assert board.snapshot()["memory"] == [], "the refused importer holds nothing"
    board.close()


def test_a_dead_rank_holds_nothing(board: Board) -> None:
    first, second = ranks_of(board)
    number = first.create(gpu=0, size_bytes=GRANULE)
    first.map(number=number)
    first.charge(gpu=0, key=1, size_bytes=100)
    shared = first.create(gpu=0, size_bytes=GRANULE)
    fd = first.exported(shared)
    second.imported(fd)
    os.close(fd)
    before = board.version
    board.forget(0)
    assert board.version > before
    assert board.device_bytes(0) == GRANULE, "what a peer has imported stays"
    second.release(number=shared)
    assert board.device_bytes(0) == 0


def test_a_late_request_for_what_is_gone_is_answered(board: Board) -> None:
    """A rank may race with itself; the supervisor must survive it."""
    (first, _) = ranks_of(board)
    assert first.release(number=77) == INVALID
    assert first.unmap(number=77) == INVALID
    assert first.map(number=77) == INVALID
    assert first.export(number=77) == INVALID
    assert first.import_number(number=77) is None
    assert first.add_device(number=77, gpu=0) == INVALID
    assert first.bind(number=77, memory=78, size_bytes=GRANULE) == INVALID
    assert first.unbind(number=77) == INVALID
    assert first.multicast_bindings(number=77, known=[]) is None
    assert first.uncharge(key=5) is None
    assert first.standin_release(key="never") is None
    number = first.create(gpu=0, size_bytes=GRANULE)
    assert first.add_device(number=number, gpu=0) == INVALID, "memory is no multicast object"


def test_closing_leaves_no_descriptor_open() -> None:
    before = open_descriptors()
    board = Board(recorded_topology(2), [0, 1])
    first, second = ranks_of(board)
    for _ in range(3):
        os.close(first.exported(first.create(gpu=0, size_bytes=GRANULE)))
    kept = first.exported(team(board))
    second.standin(key="a", size_bytes=4096)
    board.close()
    os.close(kept)
    assert open_descriptors() == before


def test_nothing_stays_open_for_memory_that_is_gone(board: Board) -> None:
    (first, _) = ranks_of(board)
    before = open_descriptors()
    for _ in range(20):
        number = first.create(gpu=0, size_bytes=GRANULE)
        os.close(first.exported(number))
        first.release(number=number)
    board.device_bytes(0)
    assert open_descriptors() == before


# ------------------------------------------------------------------- budget


def test_a_gpu_holds_no_more_than_it_has(board: Board) -> None:
    first, second = ranks_of(board)
    size = 139 * GIB
    number = first.create(gpu=0, size_bytes=size - GRANULE)
    assert first.charge(gpu=0, key=1, size_bytes=GRANULE)
    assert first.create(gpu=0, size_bytes=GRANULE) is None
    assert not first.charge(gpu=0, key=2, size_bytes=1)
    assert second.create(gpu=1, size_bytes=size) is not None, "each GPU has its own"
    fd = first.exported(number)
    first.release(number=number)
    assert first.create(gpu=0, size_bytes=GRANULE) is None, "the open descriptor counts"
    os.close(fd)
    assert first.create(gpu=0, size_bytes=GRANULE) is not None
    first.uncharge(key=1)
    assert board.device_bytes(0) == GRANULE


def test_a_failed_create_charges_nothing(board: Board) -> None:
    (first, _) = ranks_of(board)
    before = board.version
    assert first.create(gpu=0, size_bytes=1 << 40) is None
    assert board.device_bytes(0) == 0
    assert board.version == before


# ---------------------------------------------------------------- multicast


def test_map_and_bind_wait_until_every_device_was_added(board: Board) -> None:
    first, second = ranks_of(board)
    number = first.create_multicast(size_bytes=GRANULE, devices=2)
    memory = first.create(gpu=0, size_bytes=GRANULE)
    assert first.add_device(number=number, gpu=0) == ""
    before = board.version
    for waiting in (
        first.map(number=number),
        first.map(number=number),
        first.bind(number=number, memory=memory, size_bytes=GRANULE),
    ):
        assert isinstance(waiting, Waiting)
        assert waiting.kind == "multicast"
        assert waiting.needs == (1,)
        assert "1 of 2" in waiting.text
    assert board.version == before, "a wait changes nothing"
    assert second.add_device(number=number, gpu=1) == ""
    assert board.version > before
    assert first.map(number=number) == ""
    assert first.bind(number=number, memory=memory, size_bytes=GRANULE) == ""


def test_those_who_hold_the_object_are_waited_for() -> None:
    board = Board(recorded_topology(4), [0, 1, 2, 3])
    first, _, third, _ = ranks_of(board, 4)
    number = first.create_multicast(size_bytes=GRANULE, devices=2)
    first.add_device(number=number, gpu=0)
    assert first.map(number=number).needs == (1, 2, 3), "anybody may still come"
    fd = first.exported(number)
    third.imported(fd)
    os.close(fd)
    assert first.map(number=number).needs == (2,)
    board.close()


def test_a_device_is_added_once_and_one_too_many_never(board: Board) -> None:
    first, second = ranks_of(board)
    number = first.create_multicast(size_bytes=GRANULE, devices=2)
    assert first.add_device(number=number, gpu=0) == ""
    assert first.add_device(number=number, gpu=0) == INVALID
    assert second.add_device(number=number, gpu=0) == INVALID
    assert second.add_device(number=number, gpu=1) == ""
    full = first.create_multicast(size_bytes=GRANULE, devices=1)
    first.add_device(number=full, gpu=0)
    assert second.add_device(number=full, gpu=1) == INVALID


def test_only_memory_of_the_own_added_device_is_bound_and_once(board: Board) -> None:
    first, second = ranks_of(board)
    number = team(board)
    own, foreign = first.create(gpu=0, size_bytes=GRANULE), first.create(gpu=1, size_bytes=GRANULE)
    assert first.bind(number=number, memory=foreign, size_bytes=GRANULE) == INVALID
    assert first.bind(number=number, memory=own, size_bytes=GRANULE) == ""
    assert first.bind(number=number, memory=own, size_bytes=GRANULE) == INVALID
    lonely = second.create_multicast(size_bytes=GRANULE, devices=1)
    second.add_device(number=lonely, gpu=1)
    assert first.bind(number=lonely, memory=own, size_bytes=GRANULE) == INVALID


def test_a_binding_keeps_memory_alive_until_it_or_the_object_goes(board: Board) -> None:
    first, second = ranks_of(board)
    number = team(board)
    for each in (first, second):
        memory = each.create(gpu=each.number, size_bytes=GRANULE)
        each.bind(number=number, memory=memory, size_bytes=GRANULE)
        each.release(number=memory)
        assert board.device_bytes(each.number) == GRANULE
    assert first.unbind(number=number) == ""
    assert board.device_bytes(0) == 0
    assert first.unbind(number=number) == INVALID
    first.release(number=number)
    assert board.device_bytes(1) == GRANULE
    second.release(number=number)
    assert board.device_bytes(1) == 0
    assert board.snapshot()["memory"] == []


def test_slots_run_out_at_bind_and_come_back_with_the_object(board: Board) -> None:
    (first, _) = ranks_of(board)
    memory = first.create(gpu=0, size_bytes=GRANULE)

    def bound() -> tuple[int, str]:
        number = first.create_multicast(size_bytes=GRANULE, devices=1)
        first.add_device(number=number, gpu=0)
        return number, first.bind(number=number, memory=memory, size_bytes=GRANULE)

    made = [bound() for _ in range(MULTICAST_SLOTS)]
    assert {error for _, error in made} == {""}
    assert bound()[1] == "CUDA_ERROR_OUT_OF_MEMORY"
    first.unbind(number=made[0][0])
    assert bound()[1] == "CUDA_ERROR_OUT_OF_MEMORY", "the slot is the object's"
    first.release(number=made[0][0])
    assert bound()[1] == ""


def test_every_node_has_slots_of_its_own() -> None:
    board = Board(recorded_topology(1).model_copy(update={"nodes": 2}), [0, 1])
    for rank in ranks_of(board):
        memory = rank.create(gpu=rank.number, size_bytes=GRANULE)
        for _ in range(MULTICAST_SLOTS):
            number = rank.create_multicast(size_bytes=GRANULE, devices=1)
            rank.add_device(number=number, gpu=rank.number)
            assert rank.bind(number=number, memory=memory, size_bytes=GRANULE) == ""
    board.close()


def test_the_memfds_of_bindings_are_sent_unless_they_are_known(board: Board) -> None:
    first, second = ranks_of(board)
    number = team(board)
    own = first.create(gpu=0, size_bytes=GRANULE)
    first.bind(number=number, memory=own, size_bytes=GRANULE)
    told = first.multicast_bindings(number=number, known=[])
    assert told == {"missing": 1, "bound": [[0, own, GRANULE]], "sent": [own]}
    other = second.create(gpu=1, size_bytes=2 * GRANULE)
    second.bind(number=number, memory=other, size_bytes=GRANULE)
    answer = board.call(0, "multicast_bindings", {"number": number, "known": [own]})
    assert isinstance(answer, Reply)
    assert answer.value == {"missing": 0, "bound": [[0, own, GRANULE], [1, other, GRANULE]], "sent": [other]}
    assert [os.fstat(fd).st_size for fd in answer.fds] == [2 * GRANULE]
    board.forget(1)
    assert first.multicast_bindings(number=number, known=[own])["missing"] == 0, "it was bound once"


# ------------------------------------------------------------------ kernels


def test_a_launch_waits_for_all_of_its_ranks_and_is_then_forgotten(board: Board) -> None:
    first, second = ranks_of(board)
    launch = {"key": "k", "launch": 1, "world": 2}
    for waiting in (first.kernel_arrive(**launch), first.kernel_arrive(**launch)):
        assert isinstance(waiting, Waiting)
        assert (waiting.kind, waiting.needs) == ("kernel", (1,))
        assert "1 of 2" in waiting.text
    assert isinstance(second.kernel_arrive(**{**launch, "launch": 2}), Waiting), "another launch"
    assert isinstance(second.kernel_arrive(**{**launch, "key": "l"}), Waiting), "another workspace"
    before = board.version
    assert second.kernel_arrive(**launch) is None
    assert board.version > before
    assert [each["key"] for each in board.snapshot()["kernels"]] == ["k", "k", "l"]
    assert first.kernel_arrive(**launch) is None
    assert [each["launch"] for each in board.snapshot()["kernels"]] == [2, 1]


def test_a_complete_launch_stays_complete_when_a_rank_dies(board: Board) -> None:
    first, second = ranks_of(board)
    launch = {"key": "k", "launch": 1, "world": 2}
    first.kernel_arrive(**launch)
    assert second.kernel_arrive(**launch) is None
    board.forget(1)
    assert first.kernel_arrive(**launch) is None
    assert board.snapshot()["kernels"] == []


def test_a_rank_that_dies_while_it_waits_has_not_come(board: Board) -> None:
    first, second = ranks_of(board)
    launch = {"key": "k", "launch": 1, "world": 2}
    second.kernel_arrive(**launch)
    board.forget(1)
    assert board.snapshot()["kernels"] == []
    assert first.kernel_arrive(**launch).needs == (1,)


def test_many_launches_leave_nothing_behind(board: Board) -> None:
    first, second = ranks_of(board)
    for number in range(100):
        launch = {"key": "k", "launch": number, "world": 2}
        first.kernel_arrive(**launch)
        second.kernel_arrive(**launch)
        first.kernel_arrive(**launch)
    assert board.snapshot()["kernels"] == []


# ----------------------------------------------------------------- stand-ins


def descriptor_of_standin(board: Board, rank: int, key: str, size: int = 4096) -> int:
    answer = board.call(rank, "standin", {"key": key, "size_bytes": size})
    assert isinstance(answer, Reply)
    return answer.fds[0]


def test_a_stand_in_is_the_same_memory_for_every_rank_that_asks(board: Board) -> None:
    fd = descriptor_of_standin(board, 0, "a")
    assert descriptor_of_standin(board, 1, "a", 8192) == fd
    assert os.fstat(fd).st_size == 8192, "the largest wish counts"
    assert descriptor_of_standin(board, 0, "b") != fd
    assert board.device_bytes(0) == 0


def test_a_stand_in_waits_for_a_slow_rank_and_then_goes(board: Board) -> None:
    first, second = ranks_of(board)
    descriptor_of_standin(board, 0, "a")
    first.standin_release(key="a")
    assert [each["key"] for each in board.snapshot()["standins"]] == ["a"]
    descriptor_of_standin(board, 1, "a")
    second.standin_release(key="a")
    assert board.snapshot()["standins"] == []


def test_a_stand_in_does_not_wait_for_the_dead(board: Board) -> None:
    descriptor_of_standin(board, 0, "a")
    board.forget(1)
    board.forget(0)
    assert board.snapshot()["standins"] == []


# -------------------------------------------------------------------- faces


def test_the_snapshot_is_data_for_the_log(board: Board) -> None:
    first, second = ranks_of(board)
    number = team(board)
    memory = first.create(gpu=0, size_bytes=GRANULE)
    first.bind(number=number, memory=memory, size_bytes=GRANULE)
    second.charge(gpu=1, key=3, size_bytes=20)
    fd = first.exported(memory)
    told = json.loads(json.dumps(board.snapshot()))
    os.close(fd)
    assert told["private"] == [{"rank": 1, "gpu": 1, "size_bytes": 20}]
    multicast, plain = told["memory"]
    assert multicast["devices"] == {"0": 0, "1": 1}
    assert multicast["bound"] == {"0": memory}
    assert (plain["handles"], plain["bindings"], plain["exports"]) == ({"0": 1}, 1, 1)


def test_a_local_board_gives_copies_and_never_blocks(board: Board) -> None:
    local = LocalBoard(board, 0)
    number, (fd,) = local.call("create", {"gpu": 0, "size_bytes": GRANULE})
    assert os.fstat(fd).st_size == GRANULE
    os.close(fd)
    before = open_descriptors()
    _, (exported,) = local.call("export", {"number": number})
    assert open_descriptors() == before + 2, "the write end here, the read end on the board"
    os.close(exported)
    multicast, _ = local.call("create_multicast", {"size_bytes": GRANULE, "devices": 2})
    with pytest.raises(WouldBlock, match="0 of 2 devices"):
        local.call("map", {"number": multicast})


def test_an_unknown_method_is_the_labs_own_mistake(board: Board) -> None:
    with pytest.raises(AssertionError, match="no method"):
        board.call(0, "nothing", {})
