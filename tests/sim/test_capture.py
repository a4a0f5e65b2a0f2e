"""A capture in a live run: what is recorded, what is replayed, and what spoils it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from faultlab import events
from tests.conftest import broken
from tests.sim.test_subjects import scenario

pytestmark = pytest.mark.sim

TWO_CAPTURED = "[{capture: [{use: {times: 2, tokens: 8}}]}, {use: {tokens: 8}}, exit]"


def by_kind(folder: Any, rank: int, kind: str) -> list[events.Event]:
    return [event for event in events.read(folder / f"rank{rank}.jsonl") if event["kind"] == kind]


def test_a_subject_sees_a_capture_as_cuda_makes_one(run_text: Callable[..., Any]) -> None:
    result, folder = run_text(scenario("LooksIntoTheCapture", workload=TWO_CAPTURED))
    assert (result["verdict"], result["outcome"], result["path"]) == ("pass", "fallback", "none"), result
    assert result["invariants"]["capture_safe"]["state"] == "held"
    for rank in (0, 1):
        assert [event["step"] for event in by_kind(folder, rank, "use")] == [1, 1, 2]
        assert [event["step"] for event in by_kind(folder, rank, "captured")] == [0, 0]
        names = [(event["step"], event["name"]) for event in by_kind(folder, rank, "step-begin")]
        assert names == [(0, "use"), (1, "capture"), (2, "use"), (3, "exit")]


def test_a_handle_is_waited_for_on_the_stream(run_text: Callable[..., Any]) -> None:
    result, _ = run_text(scenario("WaitsOnAHandle", workload="[create, {capture: [use]}, exit]"))
    assert (result["verdict"], result["path"]) == ("pass", "none"), result["reason"]


def test_a_spoilt_capture_raises_and_a_peer_that_replays_waits_for_good(run_text: Callable[..., Any]) -> None:
    result, folder = run_text(scenario("SpoilsItsCapture", workload="[{capture: [use]}, exit]"))
    assert result["outcome"] == "hang"
    assert broken(result) == {"capture_safe", "bounded_init"}
    (step,) = [event for event in by_kind(folder, 0, "step-end") if event["name"] == "capture"]
    error = step["result"]["error"]
    assert (error["type"], error["code"]) == ("AcceleratorError", "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED")
    assert "waits in comm.allreduce" in result["invariants"]["bounded_init"]["reason"]


def test_objects_wait_for_the_device_unless_their_group_is_for_the_host(run_text: Callable[..., Any]) -> None:
    workload = "[create, {capture: [use]}, use, exit]"
    result, _ = run_text(scenario("TalksInTheCapture", workload=workload))
    assert broken(result) == {"capture_safe"}
    assert "use #1 called comm.allgather" in result["invariants"]["capture_safe"]["reason"]
    result, _ = run_text(scenario("TalksOnTheHost", workload=workload))
    assert result["invariants"]["capture_safe"]["state"] == "held", result["reason"]
    assert result["outcome"] == "fallback"


def reference(**extra: str) -> str:
    lines = ["faultlab: 1", "title: a capture", "topology: hgx-h100-8", "ranks: 2", "subject: reference"]
    return "\n".join([*lines, *(f"{key}: {value}" for key, value in extra.items())]) + "\n"


def test_an_order_is_refused_in_a_capture_and_kept_after_it(run_text: Callable[..., Any]) -> None:
    result, folder = run_text(
        reference(
            workspace="{creation: mocked, backend: mnnvl}",
            workload="[{capture: [create, use]}, create, {capture: [create, use]}, destroy, exit]",
        )
    )
    assert (result["verdict"], result["outcome"], result["path"]) == ("pass", "error", "mnnvl"), result
    ended = [(event["name"], event["result"]["returned"]) for event in by_kind(folder, 0, "step-end")]
    assert ended == [
        ("create", "raised"),
        ("capture", "skipped"),
        ("create", "object"),
        ("create", "object"),
        ("use", "done"),
        ("capture", "done"),
        ("destroy", "done"),
        ("exit", "done"),
    ]


def test_a_value_put_into_a_captured_kernel_shows_after_the_replay(run_text: Callable[..., Any]) -> None:
    result, _ = run_text(
        reference(
            workspace="{creation: mocked}",
            workload="[create, {capture: [use]}, use, destroy, exit]",
            faults="[{at: kernel.allreduce, ranks: [1], calls: 1, effect: {value: 1}}]",
            expect="{outcome: wrong-result}",
        )
    )
    assert result["verdict"] == "pass", result["reason"]
    assert result["invariants"]["correct_result"]["state"] == "not-checked"


def test_a_null_pointer_in_a_captured_kernel_crashes_at_the_replay(run_text: Callable[..., Any]) -> None:
    text = reference(
        workspace="{creation: mocked}",
        workload="[create, {capture: [use]}, use, destroy, exit]",
        faults="[{at: workspace.mc_ptr, effect: {value: 0}}]",
    )
    result, folder = run_text(text.replace("reference", "canary:no_cuda_crash-pointer-not-checked"))
    assert result["outcome"] == "crash"
    assert broken(result) == {"no_cuda_crash"}
    assert [event["step"] for event in by_kind(folder, 0, "sticky")] == [2]
    assert result["invariants"]["no_cuda_crash"]["reason"].endswith("in capture #1; rank 1 crashed too")
