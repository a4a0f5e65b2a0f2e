"""The parts of ``hardened`` that need no machine: votes, undoing, descriptors, sizes."""

from __future__ import annotations

import os
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from faultlab.subjects.hardened import descriptors, steps, workspaces
from faultlab.subjects.hardened.steps import CallFailed, GroupFailed, Setup, Undo
from faultlab.subjects.preflight import StepFailed


def setup_of(rank: int = 0, world_size: int = 2) -> Setup:
    device = torch.device("cuda", rank)
    environment: Any = SimpleNamespace(rank=rank, world_size=world_size, device=device, group=None)
    return Setup(environment)


# --------------------------------------------------------------------- votes


def test_a_step_that_fails_is_told_at_the_vote(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[tuple[str, str]] = []
    monkeypatch.setattr(steps, "vote", lambda environment, name, problem: told.append((name, problem)))
    setup = setup_of()

    def fails() -> None:
        raise CallFailed("cuMemMap: CUDA_ERROR_UNKNOWN (999)")

    assert setup.together("a step", lambda: 7) == 7
    setup.together("map", fails)
    setup.together("divide", lambda: 1 // 0)
    assert told == [
        ("a step", ""),
        ("map", "cuMemMap: CUDA_ERROR_UNKNOWN (999)"),
        ("divide", "ZeroDivisionError: integer division or modulo by zero"),
    ]


def test_a_vote_that_fails_is_not_a_step_that_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(environment: Any, name: str, problem: str) -> None:
        raise RuntimeError("Connection closed by peer")

    def refused(environment: Any, name: str, problem: str) -> None:
        raise StepFailed("rank 1: no")

    setup = setup_of()
    monkeypatch.setattr(steps, "vote", lost)
    with pytest.raises(GroupFailed, match=r"'map'.*Connection closed by peer"):
        setup.together("map", lambda: None)
    monkeypatch.setattr(steps, "vote", refused)
    with pytest.raises(StepFailed, match="rank 1: no"):
        setup.together("map", lambda: None)


# ------------------------------------------------------------------- undoing


def test_undo_goes_backwards_past_failures_and_once() -> None:
    done: list[int] = []

    def release(number: int) -> None:
        done.append(number)
        if number == 2:
            raise CallFailed("cuMemUnmap: CUDA_ERROR_INVALID_VALUE (1)")

    undo = Undo()
    for number in (1, 2, 3):
        undo.add(release, number)
    assert undo.all() == ["cuMemUnmap: CUDA_ERROR_INVALID_VALUE (1)"]
    assert done == [3, 2, 1]
    assert undo.all() == []
    assert done == [3, 2, 1]


# --------------------------------------------------------------- descriptors


def test_a_descriptor_arrives_and_nothing_is_left() -> None:
    here, there = setup_of(0), setup_of(1)
    reading, writing = os.pipe()
    owned, received = descriptors.Descriptors(), descriptors.Descriptors()
    owned.by_rank[0] = reading
    with ExitStack() as closing:
        listener = descriptors._listen(closing, there)
        path = str(listener.getsockname())
        descriptors._send(here, owned, ["", path])
        descriptors._receive(listener, received, [0])
    assert not Path(path).parent.exists()
    os.write(writing, b"word")
    os.close(writing)
    owned.close()
    assert os.read(received.by_rank[0], 4) == b"word"
    received.close()
    received.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(reading)


def test_who_sends_nothing_or_in_another_s_name_is_not_waited_for() -> None:
    there = setup_of(1)
    held = descriptors.Descriptors()
    before = set(os.listdir("/proc/self/fd"))
    with ExitStack() as closing:
        listener = descriptors._listen(closing, there)
        path = str(listener.getsockname())
        silent = closing.enter_context(descriptors.socket.socket(descriptors.socket.AF_UNIX))
        silent.connect(path)
        silent.close()
        with pytest.raises(RuntimeError, match=r"\[0\] are missing"):
            descriptors._receive(listener, held, [0])
        stranger = setup_of(5, 8)
        other = descriptors.Descriptors()
        other.by_rank[5] = os.open("/dev/null", os.O_RDONLY)
        descriptors._send(stranger, other, [path])
        other.close()
        with pytest.raises(RuntimeError, match=r"\[0\] are missing"):
            descriptors._receive(listener, held, [0])
    assert held.by_rank == {}
    assert set(os.listdir("/proc/self/fd")) == before


# --------------------------------------------------------------------- sizes


@settings(deadline=None)  # The first example imports FlashInfer.
@given(
    world=st.sampled_from([2, 4, 8, 16]),
    tokens=st.integers(1, 100_000),
    hidden=st.integers(8, 16_384),
    dtype=st.sampled_from([torch.bfloat16, torch.float16, torch.float32]),
)
def test_the_parts_of_trtllm_lie_apart_and_are_as_large_as_flashinfer_s(
    world: int, tokens: int, hidden: int, dtype: torch.dtype
) -> None:
    from flashinfer.comm.trtllm_ar import MAX_COMM_SIZE, BarrierFlagCount

    parts = workspaces.trtllm_parts(world, tokens, hidden, dtype)
    whole = world * tokens * hidden * dtype.itemsize
    assert parts.buffer == whole
    assert parts.flags == world * BarrierFlagCount * 4
    assert parts.message == min(whole, MAX_COMM_SIZE)
    buffer, flags, lamport = parts.offsets
    assert buffer == 0
    assert flags >= parts.buffer
    assert lamport >= flags + parts.flags
    assert parts.lamport >= 3 * parts.message
    assert parts.total == lamport + parts.lamport
    assert flags % 256 == lamport % 256 == parts.lamport % 16 == 0


def test_what_is_copied_from_flashinfer_is_still_so() -> None:
    from flashinfer.comm.trtllm_ar import _use_oneshot_heuristics
    from flashinfer.comm.trtllm_mnnvl_ar import MNNVLAllReduceFusionWorkspace as Theirs

    assert tuple(_use_oneshot_heuristics) == workspaces._TRTLLM_MEASURED
    assert Theirs.NUM_LAMPORT_BUFFERS == workspaces._BUFFERS
    assert Theirs.TWOSHOT_NUM_STAGES * Theirs.PACKED_ALIGNMENT_BYTES == workspaces._MNNVL_ALIGNMENT
