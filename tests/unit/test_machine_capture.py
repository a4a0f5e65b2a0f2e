"""What a capturing stream records and what its replay does; which thread captures."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from faultlab.errors import UnknownCall
from faultlab.machine.simulated.machine import SimulatedMachine
from tests.unit.machines import pair


@pytest.fixture
def machine() -> Iterator[SimulatedMachine]:
    board, (driver, _) = pair()
    yield driver.machine
    board.close()


def test_work_is_recorded_and_done_at_the_replay_in_order_once(machine: SimulatedMachine) -> None:
    done: list[int] = []
    machine.in_stream(lambda: done.append(0))
    machine.begin_capture()
    machine.in_stream(lambda: done.append(1))
    machine.in_stream(lambda: done.append(2))
    assert done == [0]
    assert machine.end_capture() == ""
    assert done == [0]
    machine.replay()
    assert done == [0, 1, 2]
    with pytest.raises(AssertionError, match="no capture ended well"):
        machine.replay()


def test_operations_before_and_after_a_launch_read_its_true_values(machine: SimulatedMachine) -> None:
    given, kernel_output = torch.zeros(4), torch.full((4,), float("nan"))
    machine.begin_capture()
    before = given.clone()
    machine.in_stream(lambda: kernel_output.copy_(before * 10))
    view = kernel_output.view(2, 2)[1]
    after = torch.stack([view, view]).to(torch.float64) + 1
    spread = given[:1].expand(3)
    machine.end_capture()
    assert bool(after.isnan().all()), "nothing ran yet"
    given.copy_(torch.arange(4.0))
    machine.replay()
    assert after.tolist() == [[21.0, 31.0], [21.0, 31.0]]
    assert spread.tolist() == [0.0, 0.0, 0.0]


def test_what_is_changed_in_place_changes_at_the_replay_alone(machine: SimulatedMachine) -> None:
    total, given, out = torch.ones(3), torch.zeros(3), torch.empty(0)
    machine.begin_capture()
    total.add_(given)
    total[0] = 9
    torch.mul(total, 2, out=out)
    machine.end_capture()
    assert total.tolist() == [1.0, 1.0, 1.0]
    given.fill_(5)
    machine.replay()
    assert total.tolist() == [9.0, 6.0, 6.0]
    assert out.tolist() == [18.0, 12.0, 12.0]


def test_tensors_of_inference_mode_are_filled_as_others_are(machine: SimulatedMachine) -> None:
    given, weight = torch.zeros(2), torch.ones(2, requires_grad=True)
    machine.begin_capture()
    with torch.inference_mode():
        doubled = given * 2
        doubled.add_(1)
    weighed = doubled.clone() * weight
    machine.end_capture()
    given.fill_(3)
    machine.replay()
    assert doubled.tolist() == [7.0, 7.0]
    assert weighed.tolist() == [7.0, 7.0]


def test_nothing_is_recorded_after_the_capture_or_by_the_machine_itself(machine: SimulatedMachine) -> None:
    address = machine.call("cudart.cudaMalloc", 16)[1]
    machine.begin_capture()
    assert int(machine.call("cuMemsetD8", address, 7, 16)[0]) == 0
    machine.end_capture()
    assert int(machine.call("cuMemsetD8", address, 9, 16)[0]) == 0
    later = torch.ones(2)
    later.add_(1)
    machine.replay()
    assert later.tolist() == [2.0, 2.0]
    view = machine.view(address, 16)
    assert view is not None
    assert bytes(view) == bytes([9] * 16)


def test_a_thread_that_does_not_capture_runs_at_once(machine: SimulatedMachine) -> None:
    told: list[Any] = []

    def elsewhere() -> None:
        told.append(machine.capturing())
        machine.in_stream(lambda: told.append("ran"))

    machine.begin_capture()
    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert machine.capturing()
    assert told == [False, "ran"]
    machine.end_capture()


def test_a_spoilt_or_poisoned_capture_leaves_no_graph(machine: SimulatedMachine) -> None:
    machine.begin_capture()
    assert machine.call("cudart.cudaDeviceSynchronize")[0] == 900
    assert machine.end_capture() == "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED"
    machine.begin_capture()
    assert machine.end_capture() == "", "the next capture is whole again"
    machine.begin_capture()
    machine.poison("CUDA_ERROR_ILLEGAL_ADDRESS")
    assert machine.end_capture() == "CUDA_ERROR_ILLEGAL_ADDRESS"
    with pytest.raises(AssertionError, match="no capture ended well"):
        machine.replay()


def test_a_kernel_that_fails_in_the_replay_poisons_and_ends_it(machine: SimulatedMachine) -> None:
    done: list[str] = []
    machine.begin_capture()
    machine.call("kernel.lamport_initialize", 0, 24, torch.float32)
    machine.in_stream(lambda: done.append("after"))
    assert machine.end_capture() == ""
    assert machine.context_error() == ""
    machine.replay()
    assert machine.context_error() == "CUDA_ERROR_ILLEGAL_ADDRESS"
    assert done == []


def test_a_shape_that_depends_on_values_cannot_be_replayed(machine: SimulatedMachine) -> None:
    given = torch.zeros(4)
    machine.begin_capture()
    given.nonzero()
    machine.end_capture()
    given.fill_(1)
    with pytest.raises(UnknownCall, match="another shape"):
        machine.replay()
