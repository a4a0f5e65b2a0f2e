"""The subject ``hardened``: whatever call of its set-up fails, on whatever rank, all ranks fall back clean."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from faultlab import events
from faultlab.scenario.load import load_paths
from faultlab.sites import split_site
from tests.conftest import REPOSITORY, broken

pytestmark = pytest.mark.sim

#: The sites of the set-up that the seed scenarios leave to this test, with an error that each may return.
REST = {
    "cuDeviceGet": "CUDA_ERROR_INVALID_DEVICE",
    "cuDevicePrimaryCtxRetain": "CUDA_ERROR_OUT_OF_MEMORY",
    "cuCtxSetCurrent": "CUDA_ERROR_INVALID_CONTEXT",
    "cuMemGetAllocationGranularity": "CUDA_ERROR_NOT_SUPPORTED",
    "cuMulticastGetGranularity": "CUDA_ERROR_NOT_SUPPORTED",
    "cuMemsetD32": "CUDA_ERROR_INVALID_VALUE",
    "cuMemAlloc": "CUDA_ERROR_OUT_OF_MEMORY",
    "cuMemcpyHtoD": "CUDA_ERROR_INVALID_VALUE",
}
#: A refusal here is either answered below this subject, or is sticky and so a crash of the scenario's making.
NOT_REFUSED = {"nvmlInit", "nvmlSystemGetConfComputeSettings", "nvmlShutdown", "kernel.lamport_initialize"}


def scenario(*faults: dict[str, Any], **keys: Any) -> str:
    base = {
        "faultlab": 1,
        "title": "hardened",
        "topology": "hgx-h100-8",
        "ranks": 2,
        "subject": "hardened",
        "faults": list(faults),
    }
    return yaml.safe_dump({**base, **keys})


def told(folder: Path, rank: int, kind: str) -> Iterator[dict[str, Any]]:
    yield from (event for event in events.read(folder / f"rank{rank}.jsonl") if event["kind"] == kind)


def calls(folder: Path, rank: int, phase: str) -> list[str]:
    """The sites that the subject called in a phase, in order."""
    entered = told(folder, rank, "enter")
    return [event["site"] for event in entered if not event["lab"] and event["phase"] == phase]


def messages(folder: Path, rank: int) -> list[str]:
    return [event["message"] for event in told(folder, rank, "log") if event["level"] != "INFO"]


# --------------------------------------------------------------- every call


@pytest.mark.parametrize(("site", "code"), REST.items())
def test_a_refused_call_is_named_by_every_rank_and_costs_one_rung(
    site: str, code: str, run_text: Callable[..., Any]
) -> None:
    fault = {"at": site, "ranks": [1], "during": "mnnvl", "effect": {"error": code}}
    result, folder = run_text(scenario(fault, expect={"outcome": "fallback", "path": "trtllm"}))
    assert result["verdict"] == "pass", result["reason"]
    for rank in range(2):
        (message,) = messages(folder, rank)
        assert f"rank {rank}: mnnvl is not used" in message
        assert f"rank 1: {site}: {code} (" in message


def test_every_call_of_the_set_up_is_struck_somewhere(run_text: Callable[..., Any]) -> None:
    seeds = load_paths(sorted((REPOSITORY / "scenarios" / "seed").glob("hardened-*.yaml")))
    struck = {split_site(fault.at)[0] for each in seeds for fault in each.faults} | set(REST)
    # In the seed multicast-lie-refused and its like the probe is struck.
    struck.add("cuDeviceGetAttribute")
    # Its only errors are sticky: that is a crash, whoever is asked.
    struck.add("cudart.cudaDeviceSynchronize")
    called: set[str] = set()
    for topology in ("hgx-h100-8", "h200-nvl-4"):
        result, folder = run_text(scenario(topology=topology, workload=["create", "destroy", "exit"]))
        assert result["verdict"] == "pass", result["reason"]
        called |= set(calls(folder, 0, "create")) | set(calls(folder, 1, "create"))
    assert called - struck == NOT_REFUSED
    assert {"cuMulticastBindMem", "cudart.cudaMalloc", "fd.recv", "kernel.load"} <= called


def test_without_the_vote_on_adding_the_peers_hang_in_the_driver(run_text: Callable[..., Any]) -> None:
    fault = {"at": "cuMulticastAddDevice", "ranks": [1], "effect": {"error": "CUDA_ERROR_UNKNOWN"}}
    result, _ = run_text(scenario(fault, subject="tests.subjects:NoVoteOnAddDevice"))
    assert result["outcome"] == "hang"
    assert result["ranks"][0]["last_site"] == "cuMulticastBindMem"


# --------------------------------------------------------------- giving back


def test_everything_is_undone_in_the_reverse_order(run_text: Callable[..., Any]) -> None:
    result, folder = run_text(scenario(workload=["create", "destroy", "destroy", "exit"]))
    assert result["verdict"] == "pass", result["reason"]
    assert calls(folder, 1, "destroy") == [
        "cudart.cudaDeviceSynchronize",
        "cuMemFree",
        # The multicast object, then the memory under it.
        "cuMemUnmap",
        "cuMemAddressFree",
        "cuMulticastUnbind",
        "cuMemRelease",
        "cuMemUnmap",
        "cuMemUnmap",
        "cuMemAddressFree",
        "cuMemRelease",
        "cuMemRelease",
        "cuDevicePrimaryCtxRelease",
    ]


def test_a_failure_in_the_middle_gives_back_what_was_made_by_then(run_text: Callable[..., Any]) -> None:
    fault = {"at": "cuMemMap", "ranks": [0], "calls": 2, "effect": {"error": "CUDA_ERROR_OUT_OF_MEMORY"}}
    keys = {"workspace": {"backend": "mnnvl"}, "workload": ["create", "exit"]}
    result, folder = run_text(scenario(fault, **keys))
    assert result["outcome"] == "error"
    assert broken(result) == set()
    made = calls(folder, 0, "create")
    assert made[made.index("cuMemMap", made.index("cuMemMap") + 1) + 1 :] == [
        "comm.allreduce",
        "comm.allgather",
        "cuMemUnmap",
        "cuMemAddressFree",
        "cuMemRelease",
        "cuMemRelease",
        "cuDevicePrimaryCtxRelease",
    ]


def test_refused_releases_are_logged_in_one_message_and_stop_no_other(run_text: Callable[..., Any]) -> None:
    fault = {"at": "cuMemUnmap", "ranks": [1], "effect": {"error": "CUDA_ERROR_NOT_SUPPORTED"}}
    result, folder = run_text(scenario(fault, workload=["create", "use", "destroy", "destroy", "exit"]))
    assert result["verdict"] == "pass", result["reason"]
    assert messages(folder, 0) == []
    (message,) = messages(folder, 1)
    # One for the multicast object, one for each rank's memory, and their ranges, which stay in use.
    assert message.count("cuMemUnmap: CUDA_ERROR_NOT_SUPPORTED") == 3
    assert message.count("cuMemAddressFree") == 2
    assert calls(folder, 1, "destroy").count("cuMemRelease") == 3


def test_what_failed_is_not_tried_again(run_text: Callable[..., Any]) -> None:
    fault = {"at": "cuMemCreate", "ranks": [0], "effect": {"error": "CUDA_ERROR_OUT_OF_MEMORY"}}
    workload = ["create", "use", "create", "use", "destroy", "create", "use", "exit"]
    result, folder = run_text(scenario(fault, workload=workload))
    assert (result["outcome"], result["path"], broken(result)) == ("fallback", "none", set())
    for rank in range(2):
        entered = [event for event in told(folder, rank, "enter") if event["phase"] == "create"]
        assert {event["step"] for event in entered} == {0}
        # mnnvl, then trtllm, the last rung but the plain all-reduce.
        levels = [event["level"] for event in told(folder, rank, "log") if event["level"] != "INFO"]
        assert levels == ["WARNING", "ERROR"]


# ------------------------------------------------------------ a broken group


def test_a_group_that_failed_is_never_asked_again(run_text: Callable[..., Any]) -> None:
    fault = {
        "at": "comm.allreduce",
        "ranks": [1],
        "phase": "create",
        "calls": 9,
        "effect": {"raise": "OSError"},
    }
    workload = ["create", "create", "collective", "destroy", "exit"]
    result, folder = run_text(scenario(fault, workload=workload, budget={"group_timeout_s": 1}))
    assert result["outcome"] == "error"
    assert broken(result) == set()
    for rank in range(2):
        ends = list(told(folder, rank, "step-end"))
        raised = [event["result"]["error"]["type"] for event in ends if event["result"]["error"]]
        assert raised == ["GroupFailed"] * 3
        entered = [event for event in told(folder, rank, "enter") if event["site"].startswith("comm.")]
        assert {event["step"] for event in entered if not event["lab"]} == {0}


def test_an_order_that_cannot_be_met_is_refused_alike(run_text: Callable[..., Any]) -> None:
    fault = {"at": "cuMulticastBindMem", "ranks": [0], "effect": {"error": "CUDA_ERROR_SYSTEM_NOT_READY"}}
    result, folder = run_text(scenario(fault, workspace={"backend": "mnnvl"}))
    assert result["outcome"] == "error"
    assert broken(result) == set()
    for rank in range(2):
        first = next(told(folder, rank, "step-end"))["result"]["error"]
        assert first["type"] == "WorkspaceUnavailable"
        assert "rank 0: cuMulticastBindMem: CUDA_ERROR_SYSTEM_NOT_READY (802)" in first["text"]


# ------------------------------------------------------------------- kernels


@pytest.mark.parametrize(
    ("keys", "path"),
    [
        ({"ranks": 8, "workspace": {"max_token_num": 16, "hidden_dim": 1024}}, "mnnvl"),
        ({"workspace": {"dtype": "float32", "max_token_num": 32, "hidden_dim": 512}}, "mnnvl"),
        ({"workspace": {"dtype": "float32", "backend": "trtllm", "max_token_num": 32}}, "trtllm"),
        # Two-shot: more than 1 MiB over all ranks; fewer tokens than the workspace has room for.
        ({"workload": ["create", {"use": {"times": 2, "tokens": 100}}, "use", "destroy"]}, "mnnvl"),
        ({"workload": ["create", {"use": {"times": 4, "tokens": 3}}, "destroy"]}, "mnnvl"),
    ],
)
def test_the_kernels_find_their_memory(keys: dict[str, Any], path: str, run_text: Callable[..., Any]) -> None:
    result, _ = run_text(scenario(**keys))
    assert result["verdict"] == "pass", result["reason"]
    assert (result["outcome"], result["path"]) == ("used", path)
    assert result["invariants"]["correct_result"]["state"] == "held"


@pytest.mark.parametrize("backend", ["mnnvl", "trtllm"])
def test_an_input_without_room_is_refused(backend: str, run_text: Callable[..., Any]) -> None:
    workload = ["create", {"use": {"tokens": 4096}}, "use", "destroy", "exit"]
    result, folder = run_text(scenario(workspace={"backend": backend, "hidden_dim": 64}, workload=workload))
    assert result["outcome"] == "error"
    assert broken(result) == set()
    errors = [event["result"]["error"] for event in told(folder, 0, "step-end")]
    assert [each["type"] for each in errors if each] == ["InputTooLarge"]


def test_a_number_of_ranks_that_no_kernel_serves_ends_on_the_plain_all_reduce(
    run_text: Callable[..., Any],
) -> None:
    result, folder = run_text(scenario(ranks=3))
    assert (result["outcome"], result["path"]) == ("used", "none")
    assert broken(result) == set()
    assert not any(site.startswith(("cuMem", "cuMulticast")) for site in calls(folder, 0, "create"))


def test_results_say_own_sequence(run_text: Callable[..., Any]) -> None:
    result, _ = run_text(scenario(workload=["create", "destroy"]))
    assert "own sequence: " in result["reason"]
    assert result["subject"] == "hardened"
    result, _ = run_text(scenario(workload=["create", "destroy"], subject="reference"))
    assert "own sequence" not in result["reason"]
