"""truthful_ready, fail_once, user_choice, teardown_clean, state_neutral and capture_safe, both ways."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.unit.judging import RankLog, Run, broken, clean, error, fault, ordered, reason, state, wait

NO_MULTICAST = error(code="CUDA_ERROR_NOT_SUPPORTED")


def ended(run: Run) -> Run:
    for rank in run:
        rank.finish()
    return run


# ------------------------------------------------------------- truthful_ready


def test_ready_on_one_rank_and_failed_on_its_peer(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run[0].create()
    run[1].create_raises(NO_MULTICAST)
    judgement = ended(run).judge()
    assert "truthful_ready" in broken(judgement)
    assert reason(judgement, "truthful_ready") == (
        "create #1 returned a usable workspace on rank 0 and raised RuntimeError (CUDA_ERROR_NOT_SUPPORTED) on rank 1"
    )


def test_ready_on_one_rank_and_none_on_its_peer(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run[0].create()
    run[1].create_none()
    assert "truthful_ready" in broken(ended(run).judge())


def test_an_unusable_object_beside_a_failure_is_no_lie(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run[0].create(pointer=0)
    run[1].create_raises(NO_MULTICAST)
    assert state(ended(run).judge(), "truthful_ready") == "not-checked"


def test_ready_everywhere_and_ready_nowhere(tmp_path: Path) -> None:
    assert state(clean(Run(tmp_path / "a")).judge(), "truthful_ready") == "held"
    run = Run(tmp_path / "b")
    for rank in run:
        rank.create_none()
    assert state(ended(run).judge(), "truthful_ready") == "not-checked"


# ------------------------------------------------------------------ fail_once


def fails(rank: RankLog, backend: str = "mnnvl") -> None:
    rank.leave(rank.enter("workspace.create", backend), "workspace.create", "raised")


def test_a_failed_back_end_that_is_tried_again(tmp_path: Path) -> None:
    run = Run(tmp_path)
    for rank in run:
        for _ in range(2):
            with rank.step("create") as result:
                fails(rank)
                result["returned"] = "none"
    judgement = ended(run).judge()
    assert "fail_once" in broken(judgement)
    assert (
        reason(judgement, "fail_once") == "rank 0: creation of mnnvl had failed and was tried again in step 1"
    )


def test_a_failed_back_end_that_is_remembered(tmp_path: Path) -> None:
    run = Run(tmp_path)
    for rank in run:
        with rank.step("create") as result:
            fails(rank)
            result["returned"] = "none"
        rank.create_none()
    assert state(ended(run).judge(), "fail_once") == "held"


def test_an_unusable_object_counts_as_a_failure(tmp_path: Path) -> None:
    run = Run(tmp_path)
    for rank in run:
        with rank.step("create") as result:
            rank.returned(pointer=0)
            result["returned"] = "none"
        with rank.step("create") as result:
            rank.returned(pointer=0)
            result["returned"] = "none"
    assert "fail_once" in broken(ended(run).judge())


def test_the_next_rung_and_a_new_beginning_are_no_retry(tmp_path: Path) -> None:
    run = Run(tmp_path)
    for rank in run:
        with rank.step("create") as result:
            fails(rank)
            name = rank.returned("trtllm")
            result.update(returned="object", backend="trtllm", workspace=name)
        rank.destroy(name)
        with rank.step("create") as result:
            fails(rank)
            result["returned"] = "none"
    assert state(ended(run).judge(), "fail_once") == "held"


def refused(rank: RankLog, *, then: str = "none") -> None:
    """A create whose preflight is refused by the driver."""
    with rank.step("create") as result:
        rank.call("cuMemCreate", result="CUDA_ERROR_OUT_OF_MEMORY")
        result["returned"] = then


@pytest.mark.parametrize("then", ["none", "raised"])
def test_a_refused_set_up_call_that_is_tried_again(tmp_path: Path, then: str) -> None:
    run = Run(tmp_path)
    refused(run[1], then=then)
    run[0].create_none()
    for rank in run:
        with rank.step("create") as result:
            rank.call("cuMemCreate")
            result["returned"] = "none"
    judgement = ended(run).judge()
    assert reason(judgement, "fail_once") == (
        "rank 1: cuMemCreate had failed in create #1, which gave no workspace, and was tried again in create #2"
    )


def test_a_refused_set_up_call_that_is_remembered_or_of_a_rung_below_is_no_retry(tmp_path: Path) -> None:
    remembered = Run(tmp_path / "remembered")
    for rank in remembered:
        refused(rank)
        rank.create_none()
    assert state(ended(remembered).judge(), "fail_once") == "held"
    rung = Run(tmp_path / "rung")
    for rank in rung:
        with rank.step("create") as result:
            rank.call("cuMemCreate", result="CUDA_ERROR_OUT_OF_MEMORY")
            name = rank.returned("trtllm")
            result.update(returned="object", backend="trtllm", workspace=name)
        rank.create("trtllm")
    assert state(ended(rung).judge(), "fail_once") == "not-checked"


def test_what_worked_since_was_asked_or_released_or_follows_a_destroy_is_no_retry(tmp_path: Path) -> None:
    run = Run(tmp_path)
    for rank in run:
        with rank.step("create") as result:
            rank.call("cuMemCreate", result="CUDA_ERROR_NOT_PERMITTED")
            rank.call("cuMemCreate")
            rank.call("cuDeviceGetAttribute(MULTICAST_SUPPORTED)", result="CUDA_ERROR_INVALID_DEVICE")
            rank.call("cuMemRelease", result="CUDA_ERROR_INVALID_VALUE")
            rank.call("cuMemMap", result="CUDA_ERROR_OUT_OF_MEMORY")
            result["returned"] = "none"
        with rank.step("create") as result:
            rank.call("cuMemCreate")
            rank.call("cuDeviceGetAttribute(MULTICAST_SUPPORTED)")
            rank.call("cuMemRelease")
            result["returned"] = "none"
        rank.destroy()
        with rank.step("create") as result:
            rank.call("cuMemMap")
            result["returned"] = "none"
    assert state(ended(run).judge(), "fail_once") == "held"


# ---------------------------------------------------------------- user_choice


def test_an_order_that_is_kept_refused_or_replaced(tmp_path: Path) -> None:
    kept = Run(tmp_path / "kept", workspace=ordered("mnnvl"))
    assert state(clean(kept).judge(), "user_choice") == "held"

    refused = Run(tmp_path / "refused", workspace=ordered("mnnvl"))
    for rank in refused:
        rank.create_raises(NO_MULTICAST)
    assert state(ended(refused).judge(), "user_choice") == "held"

    replaced = Run(tmp_path / "replaced", workspace=ordered("mnnvl"))
    for rank in replaced:
        rank.create("trtllm")
    judgement = ended(replaced).judge()
    assert reason(judgement, "user_choice") == "rank 0: mnnvl was ordered, and create #1 gave trtllm"


def test_an_order_that_ends_in_silence_or_in_an_undeclared_error(tmp_path: Path) -> None:
    silent = Run(tmp_path / "silent", workspace=ordered("mnnvl"))
    for rank in silent:
        rank.create_none()
    assert "user_choice" in broken(ended(silent).judge())

    wild = Run(tmp_path / "wild", workspace=ordered("mnnvl"))
    for rank in wild:
        rank.create_raises(error(declared=False))
    assert "user_choice" in broken(ended(wild).judge())


def test_an_order_whose_all_reduce_is_carried_by_another(tmp_path: Path) -> None:
    run = Run(tmp_path, workspace=ordered("mnnvl"))
    for rank in run:
        rank.create()
        rank.use("none")
    assert "user_choice" in broken(ended(run).judge())


def test_no_order_is_nothing_to_judge(tmp_path: Path) -> None:
    assert state(clean(Run(tmp_path)).judge(), "user_choice") == "not-checked"


# ------------------------------------------------------------- teardown_clean


def test_a_destroy_that_raises(tmp_path: Path) -> None:
    run = Run(tmp_path)
    for rank in run:
        rank.create()
        with rank.step("destroy") as result:
            result.update(returned="raised", error=error(kind="AttributeError"))
    judgement = ended(run).judge()
    assert "teardown_clean" in broken(judgement)
    assert reason(judgement, "teardown_clean").startswith("rank 0: destroy #1 raised AttributeError")


@pytest.mark.parametrize(("level", "expected"), [("WARNING", "held"), ("INFO", "broken"), (None, "broken")])
def test_a_subject_that_logs_reports_a_failed_destruction(tmp_path: Path, level: Any, expected: str) -> None:
    run = Run(tmp_path)
    for rank in run:
        rank.events[0]["logs"] = True
        rank.create()
        with rank.step("destroy"):
            rank.leave(rank.enter("workspace.destroy", "w0"), "workspace.destroy", "raised")
            if level is not None:
                rank.emit("log", level=level, logger="subject", message="destroy failed and was contained")
    assert state(ended(run).judge(), "teardown_clean") == expected


# -------------------------------------------------------------- state_neutral


@pytest.mark.parametrize(("after", "expected"), [("one", "held"), ("two", "broken")])
def test_the_state_of_the_caller(tmp_path: Path, after: str, expected: str) -> None:
    run = Run(tmp_path)
    for rank in run:
        rank.create()
        rank.emit(
            "state", before={"the random state of Python": "one"}, after={"the random state of Python": after}
        )
    judgement = ended(run).judge()
    assert state(judgement, "state_neutral") == expected
    if expected == "broken":
        assert reason(judgement, "state_neutral") == "rank 0: create #1 changed the random state of Python"


# --------------------------------------------------------------- capture_safe

CAPTURED = ("create", {"capture": ["use"]}, "use", "destroy", "exit")
INVALIDATED = "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED"
UNSUPPORTED = "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED"


def captured(folder: Path, *calls: str, error_code: str | None = None, on: tuple[int, ...] = (0, 1)) -> Run:
    """A workspace that is used in a capture; the ranks ``on`` make these calls there."""
    run = Run(folder, workload=CAPTURED)
    for rank in run:
        rank.create()
        with rank.capture(error_code if rank.rank in on else None):
            rank.captured_use("mnnvl", *(calls if rank.rank in on else ()))
        rank.use()
        rank.destroy("w0")
    return ended(run)


def test_a_capture_of_launches_alone_is_safe_and_its_replay_is_the_use(tmp_path: Path) -> None:
    judgement = captured(tmp_path, "cuDeviceGetAttribute", "cuMemRelease", "kernel.load").judge()
    assert broken(judgement) == set()
    assert state(judgement, "capture_safe") == "held"
    assert state(judgement, "correct_result") == "held"
    assert (judgement.outcome.outcome, judgement.outcome.path) == ("used", "mnnvl")


@pytest.mark.parametrize(
    "site",
    [
        "workspace.create",
        "cuMemCreate",
        "cuMulticastBindMem",
        "cudart.cudaMalloc",
        "fd.send",
        "comm.new_group",
    ],
)
def test_set_up_in_a_capture_names_rank_step_and_call(tmp_path: Path, site: str) -> None:
    judgement = captured(tmp_path, site, on=(1,)).judge()
    assert broken(judgement) == {"capture_safe"}
    assert reason(judgement, "capture_safe") == f"rank 1: use #1 called {site} while a stream captured"


def test_the_same_calls_outside_of_a_capture_are_nobodys_business(tmp_path: Path) -> None:
    run = Run(tmp_path, workload=CAPTURED)
    for rank in run:
        rank.create()
        rank.call("cudart.cudaMalloc")
        with rank.capture():
            rank.call("cuMemCreate", lab=True)
            rank.captured_use()
        rank.call("cudart.cudaMalloc")
        rank.use()
        rank.destroy("w0")
    assert state(ended(run).judge(), "capture_safe") == "held"


def test_a_capture_that_was_spoilt_names_the_call_that_was_refused(tmp_path: Path) -> None:
    run = Run(tmp_path, workload=CAPTURED)
    for rank in run:
        rank.create()
        with rank.capture(INVALIDATED), rank.step("use"):
            outer = rank.enter("comm.allgather", "0")
            rank.call("cudart.cudaDeviceSynchronize", result=UNSUPPORTED)
            rank.leave(outer, "comm.allgather", "raised")
        rank.use()
        rank.destroy("w0")
    judgement = ended(run).judge()
    assert broken(judgement) == {"capture_safe"}
    assert judgement.outcome.outcome == "undeclared-error"
    assert reason(judgement, "capture_safe") == (
        f"rank 0: the capture ended with {INVALIDATED}: use #1 called comm.allgather (0), "
        f"where cudart.cudaDeviceSynchronize answered {UNSUPPORTED}"
    )


def test_a_capture_that_was_spoilt_by_nobody_knows_what(tmp_path: Path) -> None:
    judgement = captured(tmp_path, error_code=INVALIDATED).judge()
    assert reason(judgement, "capture_safe") == f"rank 0: the capture ended with {INVALIDATED}"


def test_a_capture_that_ended_with_another_error_was_not_spoilt_by_set_up(tmp_path: Path) -> None:
    judgement = captured(tmp_path, error_code="CUDA_ERROR_ILLEGAL_ADDRESS").judge()
    assert state(judgement, "capture_safe") == "held"


def test_set_up_in_a_capture_stays_broken_when_the_replay_hangs(tmp_path: Path) -> None:
    run = Run(tmp_path, workload=CAPTURED)
    for rank in run:
        rank.create()
    with run[0].capture(INVALIDATED):
        run[0].captured_use("mnnvl", "cudart.cudaMalloc")
    run[1].emit("capture-begin")
    run[1].captured_use()
    run[1].emit("capture-end", error=None)
    run[1].begin("capture")
    run.hang(wait(1, "kernel.allreduce", 0, kind="kernel"), wait(0, kind="meet"))
    judgement = run.judge()
    assert broken(judgement) == {"capture_safe", "bounded_init"}
    assert "never left capture #1" in reason(judgement, "bounded_init")


def test_a_capture_that_is_not_there_or_was_never_begun_says_so(tmp_path: Path) -> None:
    assert reason(clean(Run(tmp_path / "a")).judge(), "capture_safe") == "the workload captures nothing"
    run = Run(tmp_path / "b", workload=CAPTURED, faults=(fault("cuMemMap", kill=True),))
    for rank in run:
        rank.begin("create")
        rank.strike(0, rank.enter("cuMemMap"), "cuMemMap", "kill")
        rank.ends(None, "SIGKILL", expected=False)
    assert "began its capture" in reason(run.judge(), "capture_safe")


def test_a_value_that_the_scenario_put_into_a_captured_kernel_is_its_own(tmp_path: Path) -> None:
    run = Run(tmp_path, workload=CAPTURED, faults=(fault("kernel.allreduce", value=1),))
    for rank in run:
        rank.create()
        rank.emit("capture-begin")
        with rank.step("use"):
            rank.strike(0, rank.enter("kernel.allreduce", "mnnvl"), "kernel.allreduce", "value", "after")
            rank.emit("captured", number=1)
        rank.emit("capture-end", error=None)
        with rank.step("capture"):
            rank.compared(off=1.0)
        rank.destroy("w0")
    judgement = ended(run).judge()
    assert state(judgement, "correct_result") == "not-checked"
    assert judgement.outcome.outcome == "wrong-result"
