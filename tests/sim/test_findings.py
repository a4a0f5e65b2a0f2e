"""What the lab must see in FlashInfer as it is: the reasons it exists."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from faultlab import events
from tests.conftest import broken

pytestmark = pytest.mark.sim

BARE = """
faultlab: 1
title: bare FlashInfer
topology: hgx-h100-8
ranks: 2
subject: flashinfer
"""


def test_a_fault_before_add_device_on_one_rank_is_a_hang_found_at_once(run_text: Callable[..., Any]) -> None:
    result, folder = run_text(
        BARE + "faults: [{at: cuMulticastAddDevice, ranks: [1], effect: {error: CUDA_ERROR_ILLEGAL_STATE}}]\n"
        "workload: [create, use, destroy, exit]\n"
    )
    assert result["outcome"] == "hang"
    # The rank that failed also leaves its half-built multicast object behind.
    assert broken(result) == {"bounded_init", "no_leak"}
    (hang,) = [event for event in events.read(folder / "supervisor.jsonl") if event["kind"] == "hang"]
    waits = {wait["rank"]: wait for wait in hang["waits"]}
    assert waits[0]["site"] == "cuMemMap"
    assert waits[0]["waits_for"] == [1]
    # Found by reasoning: long before the budget of 20 s or any time-out.
    assert hang["t"] - max(wait["since"] for wait in hang["waits"]) < 1.0


def test_the_trtllm_leak_is_found(run_text: Callable[..., Any]) -> None:
    result, _ = run_text(BARE + "workspace: {backend: trtllm}\nworkload: [create, destroy, exit]\n")
    assert result["outcome"] == "used"
    assert broken(result) == {"no_leak"}
    # The same objects that a real machine kept: 6 handles, 3 ranges, 6 mappings, 4 allocations less one flag each.
    reason = result["invariants"]["no_leak"]["reason"]
    for words in ("6 handles", "3 ranges", "6 mappings", "4 allocations"):
        assert words in reason


def test_the_mnnvl_workspace_leaves_nothing_behind(run_text: Callable[..., Any]) -> None:
    result, _ = run_text(BARE + "workspace: {backend: mnnvl}\nworkload: [create, use, destroy, exit]\n")
    assert result["outcome"] == "used"
    assert result["path"] == "mnnvl"
    assert broken(result) == set()


def test_a_null_pointer_that_is_used_is_a_crash_and_the_next_run_is_clean(
    run_text: Callable[..., Any],
) -> None:
    crashed, _ = run_text(BARE + "faults: [{at: workspace.mc_ptr, effect: {value: 0}}]\n")
    assert crashed["outcome"] == "crash"
    assert broken(crashed) >= {"no_cuda_crash"}
    assert "CUDA_ERROR_ILLEGAL_ADDRESS" in crashed["invariants"]["no_cuda_crash"]["reason"]
    clean, _ = run_text(BARE + "workspace: {backend: mnnvl}\nexpect: {outcome: used, path: mnnvl}\n")
    assert clean["verdict"] == "pass"


def test_a_null_pointer_on_one_rank_crashes_it_and_parks_its_peer(run_text: Callable[..., Any]) -> None:
    result, _ = run_text(BARE + "faults: [{at: workspace.mc_ptr, ranks: [1], effect: {value: 0}}]\n")
    assert result["outcome"] == "crash"
    assert [rank["outcome"] for rank in result["ranks"]] == ["hang", "crash"]


def test_a_killed_rank_is_not_held_against_the_subject(run_text: Callable[..., Any]) -> None:
    result, _ = run_text(BARE + "faults: [{at: cuMemCreate, ranks: [1], effect: {kill: true}}]\n")
    assert result["ranks"][1]["exit"] == "SIGKILL"
    assert result["invariants"]["comms_alive"]["state"] == "not-checked"
    assert result["invariants"]["no_cuda_crash"]["state"] != "broken"


def test_an_injected_hang_names_its_site(run_text: Callable[..., Any]) -> None:
    result, folder = run_text(
        BARE
        + "workspace: {creation: mocked}\nfaults: [{at: workspace.create, ranks: [1], effect: {hang: true}}]\n"
    )
    assert result["outcome"] == "hang"
    (hang,) = [event for event in events.read(folder / "supervisor.jsonl") if event["kind"] == "hang"]
    assert any(wait["rank"] == 1 and wait["site"] == "workspace.create" for wait in hang["waits"])


def test_a_delay_shorter_than_the_budget_costs_no_wall_clock(run_text: Callable[..., Any]) -> None:
    result, folder = run_text(
        BARE
        + "faults: [{at: cuMemCreate, ranks: [1], calls: 1, effect: {delay_s: 15}}]\nexpect: {outcome: used}\n"
        "workspace: {backend: mnnvl}\n"
    )
    assert result["verdict"] == "pass", result["reason"]
    assert result["machine_s"] > 15
    assert any(event["kind"] == "jump" for event in events.read(folder / "supervisor.jsonl"))


def test_a_wait_that_ends_beyond_the_budget_is_a_hang(run_text: Callable[..., Any]) -> None:
    result, _ = run_text(
        BARE + "faults: [{at: cuMemCreate, ranks: [1], calls: 1, effect: {delay_s: 25}}]\n"
        "workspace: {backend: mnnvl}\nbudget: {init_s: 20}\n"
    )
    assert result["outcome"] == "hang"
    assert broken(result) == {"bounded_init"}


def test_an_unknown_driver_call_makes_the_run_unknown(run_text: Callable[..., Any]) -> None:
    result, _ = run_text(BARE.replace("subject: flashinfer", "subject: tests.subjects:CallsTheUnknown"))
    assert result["verdict"] == "unknown"
    assert "cuMemPoolCreate" in result["reason"]


def test_a_lost_descriptor_ends_by_the_time_out_of_30_s(run_text: Callable[..., Any]) -> None:
    result, folder = run_text(
        BARE + "workspace: {backend: mnnvl}\nbudget: {init_s: 100}\n"
        "faults: [{at: fd.send, ranks: [1], calls: 1, effect: {lose: true}}]\n"
    )
    texts = [
        event["error"]["text"]
        for event in events.read(folder / "rank0.jsonl")
        if event["kind"] == "leave" and event["site"] == "workspace.create" and event["error"]
    ]
    assert "did not receive file descriptors from ranks: [1]" in texts[0] or result["outcome"] == "hang"
