"""truthful_ready, fail_once, user_choice, teardown_clean and state_neutral, both ways."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.unit.judging import RankLog, Run, broken, clean, error, ordered, reason, state

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
