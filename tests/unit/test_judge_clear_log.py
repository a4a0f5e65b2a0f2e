"""clear_log both ways: what is said, how often, how loudly, how clearly; and what is never asked."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from faultlab.judge import Judgement, naming
from tests.unit.judging import RankLog, Run, broken, clean, error, fault, ordered, reason, state

CODE = "CUDA_ERROR_ILLEGAL_STATE"
CLEAR = f"rank 1: mnnvl is not used: add device failed (rank 1: RuntimeError: cuMulticastAddDevice answered {CODE} (401))"


def logging_run(folder: Path, **fields: Any) -> Run:
    given: dict[str, Any] = {"faults": (fault("cuMulticastAddDevice", [1], error=CODE),)}
    run = Run(folder, **{**given, **fields})
    for rank in run:
        rank.events[0]["logs"] = True
    return run


def fallback(run: Run, say: Callable[[RankLog], None] = lambda rank: None, **struck: Any) -> Run:
    """Rank 1 meets the fault, says what ``say`` says, and the group falls back to trtllm."""
    for rank in run:
        with rank.step("create") as result:
            if rank.rank == 1:
                rank.struck(0, struck.get("site", "cuMulticastAddDevice"), struck.get("effect", "error"))
            say(rank)
            name = rank.returned("trtllm")
            result.update(returned="object", backend="trtllm", workspace=name)
        rank.use("trtllm")
        rank.destroy(name)
        rank.finish()
    return run


def said_by(number: int, *messages: Any, **fields: Any) -> Callable[[RankLog], None]:
    def say(rank: RankLog) -> None:
        if rank.rank == number:
            for message in messages:
                rank.say(message, **fields)

    return say


def judged(tmp_path: Path, say: Callable[[RankLog], None], **fields: Any) -> Judgement:
    judgement = fallback(logging_run(tmp_path, **fields), say).judge()
    assert judgement.outcome.outcome == "fallback"
    assert broken(judgement) <= {"clear_log"}
    return judgement


# -------------------------------------------------------------------- clearly


@pytest.mark.parametrize(
    ("rank", "message"),
    [
        (1, CLEAR),
        (0, CLEAR),
        (1, "multicast failed: error 401"),
        (1, "cuMulticastAddDevice: the operation cannot be performed in the present state"),
        (1, "Failed to add device: cudaErrorIllegalState"),
        (0, "ranks [0, 1]: adding the device: IllegalState"),
        (0, "ranks 0-3: adding the device: code=401"),
    ],
)
def test_any_wording_that_names_call_error_and_rank(tmp_path: Path, rank: int, message: str) -> None:
    assert state(judged(tmp_path, said_by(rank, message)), "clear_log") == "held"


@pytest.mark.parametrize(
    ("rank", "message", "missing"),
    [
        (1, "fused all-reduce is off", "the call and its error"),
        (1, "multicast failed", "its error"),
        (1, f"set-up failed with {CODE}", "the call"),
        (0, f"cuMulticastAddDevice answered {CODE}", "the rank"),
        (0, f"rank 0: cuMulticastAddDevice answered {CODE}", "the rank"),
        (0, f"rank 10: cuMulticastAddDevice answered {CODE}", "the rank"),
        (1, "cuMulticastAddDevice answered 1401", "its error"),
    ],
)
def test_what_the_clearest_message_does_not_name(
    tmp_path: Path, rank: int, message: str, missing: str
) -> None:
    judgement = judged(tmp_path, said_by(rank, message))
    assert broken(judgement) == {"clear_log"}
    assert reason(judgement, "clear_log") == (
        f"cuMulticastAddDevice failed on rank 1, and the clearest message does not name {missing} "
        f"(rank {rank}, WARNING: {message})"
    )


def test_a_traceback_names_what_its_message_does_not(tmp_path: Path) -> None:
    told = f"Traceback\n  checkCudaErrors(cuda.cuMulticastAddDevice(handle, device))\nRuntimeError: {CODE}"
    assert state(judged(tmp_path, said_by(1, "no mnnvl", exception=told)), "clear_log") == "held"


def test_one_of_several_messages_is_enough(tmp_path: Path) -> None:
    assert state(judged(tmp_path, said_by(1, CLEAR, "trtllm is used instead")), "clear_log") == "held"


def test_a_declared_error_is_a_message(tmp_path: Path) -> None:
    for name, text, expected in (("clear", CLEAR, "held"), ("vague", "mnnvl cannot be used", "broken")):
        run = logging_run(tmp_path / name, workspace=ordered("mnnvl"))
        for rank in run:
            with rank.step("create") as result:
                if rank.rank == 1:
                    rank.struck(0, "cuMulticastAddDevice", "error")
                result.update(returned="raised", error={**error(), "text": text})
            rank.finish()
        judgement = run.judge()
        assert judgement.outcome.outcome == "error"
        assert state(judgement, "clear_log") == expected


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ("workspace creation failed: AssertionError", "held"),
        ("workspace creation failed: no NVLink here", "held"),
        ("workspace creation failed", "broken"),
    ],
)
def test_an_exception_is_named_by_its_class_or_its_words(tmp_path: Path, message: str, expected: str) -> None:
    raising = fault("workspace.create", [1], raise_="AssertionError", message="no NVLink here")
    run = fallback(
        logging_run(tmp_path, faults=(raising,)), said_by(1, message), site="workspace.create", effect="raise"
    )
    assert state(run.judge(), "clear_log") == expected


@pytest.mark.parametrize(
    ("text", "message", "expected"),
    [
        # What creation tells its caller names the code: so must the message.
        (f"CUDA error code=401(b'{CODE}')", "creation failed: RuntimeError", "broken"),
        (f"CUDA error code=401(b'{CODE}')", f"creation failed: {CODE}", "held"),
        # It does not: its own words are all that the subject has.
        ("no NVLink on this host", "creation failed: no NVLink on this host", "held"),
        ("no NVLink on this host", "creation failed", "broken"),
    ],
)
def test_inside_creation_the_subject_sees_creation_alone(
    tmp_path: Path, text: str, message: str, expected: str
) -> None:
    run = logging_run(tmp_path)
    for rank in run:
        with rank.step("create") as result:
            creation = rank.enter("workspace.create", "mnnvl")
            if rank.rank == 1:
                rank.struck(0, "cuMulticastAddDevice", "error")
            rank.leave(creation, "workspace.create", "raised")
            rank.events[-1]["error"] = {"type": "RuntimeError", "text": text, "code": ""}
            if rank.rank == 1:
                rank.say(message)
            result["returned"] = "none"
        rank.use("none")
        rank.finish()
    assert state(run.judge(), "clear_log") == expected


def test_what_creation_swallowed_need_not_be_named(tmp_path: Path) -> None:
    run = logging_run(tmp_path)
    for rank in run:
        with rank.step("create") as result:
            creation = rank.enter("workspace.create", "auto")
            if rank.rank == 1:
                rank.struck(0, "cuMulticastAddDevice", "error")
            rank.leave(creation, "workspace.create")
            rank.say("slower than it could be")
            name = rank.returned("trtllm")
            result.update(returned="object", backend="trtllm", workspace=name)
        rank.use("trtllm")
        rank.finish()
    assert state(run.judge(), "clear_log") == "held"


@pytest.mark.parametrize(
    ("site", "effect"),
    [
        ("workspace.mc_ptr", {"value": 0}),
        ("cuDeviceGetAttribute", {"error": "CUDA_ERROR_INVALID_DEVICE"}),
        ("fd.recv", {"lose": True}),
        ("comm.allgather", {"raise_": "RuntimeError"}),
        ("nvmlInit", {"error": "NVML_ERROR_UNKNOWN"}),
    ],
)
def test_what_has_no_code_must_be_told_of_and_no_more(tmp_path: Path, site: str, effect: Any) -> None:
    kind = next(iter(effect)).rstrip("_")
    for name, say, expected in (
        ("said", said_by(1, "mnnvl is off"), "held"),
        ("silent", said_by(1), "broken"),
    ):
        run = logging_run(tmp_path / name, faults=(fault(site, [1], **effect),))
        judgement = fallback(run, say, site=site, effect=kind).judge()
        assert state(judgement, "clear_log") == expected


# --------------------------------------------------------------------- silent


def test_a_fallback_that_no_rank_tells_of(tmp_path: Path) -> None:
    judgement = judged(tmp_path, said_by(1))
    assert broken(judgement) == {"clear_log"}
    assert reason(judgement, "clear_log") == (
        "the group fell back to trtllm, and no rank said so at WARNING or above"
    )


def test_what_is_said_quietly_or_by_a_library_is_not_said(tmp_path: Path) -> None:
    quiet = judged(tmp_path / "quiet", said_by(1, CLEAR, level="INFO"))
    assert reason(quiet, "clear_log").endswith("(rank 1, INFO: " + CLEAR[:79] + "…)")
    library = judged(tmp_path / "library", said_by(1, CLEAR, logger="flashinfer.comm.mnnvl"))
    assert broken(library) == {"clear_log"}


# ------------------------------------------------------- once, in the right tone


def test_an_attempt_that_failed_is_no_error(tmp_path: Path) -> None:
    judgement = judged(tmp_path, said_by(1, CLEAR, level="ERROR"))
    assert broken(judgement) == {"clear_log"}
    assert reason(judgement, "clear_log").startswith(
        "rank 1: create returned a trtllm workspace, and said ERROR: rank 1: mnnvl is not used"
    )


@pytest.mark.parametrize("level", ["WARNING", "ERROR"])
def test_where_no_rung_is_left_both_are_right(tmp_path: Path, level: str) -> None:
    run = logging_run(tmp_path)
    for rank in run:
        with rank.step("create") as result:
            if rank.rank == 1:
                rank.struck(0, "cuMulticastAddDevice", "error")
            rank.say(CLEAR, level=level)
            result["returned"] = "none"
        rank.use("none")
        rank.finish()
    assert state(run.judge(), "clear_log") == "held"


@pytest.mark.parametrize(
    ("message", "failed", "expected"),
    [
        ("mnnvl may be unavailable", False, "broken"),
        ("mnnvl may be unavailable", True, "not-checked"),
        ("mnnvl uses 70 MiB", False, "not-checked"),
        ("custom all-reduce is disabled", False, "not-checked"),
        ("mnnvl is not used: trtllm is", False, "not-checked"),
    ],
)
def test_an_alarm_where_nothing_failed(tmp_path: Path, message: str, failed: bool, expected: str) -> None:
    run = logging_run(tmp_path, faults=())
    for rank in run:
        with rank.step("create") as result:
            if failed:
                rank.call("cuMemCreate", result="CUDA_ERROR_NOT_PERMITTED")
            rank.say(message)
            name = rank.returned()
            result.update(returned="object", backend="mnnvl", workspace=name)
        rank.use()
        rank.finish()
    assert state(run.judge(), "clear_log") == expected


@pytest.mark.parametrize(
    ("raised", "expected"),
    [("FileNotFoundError", "broken"), ("ConnectionRefusedError", "broken"), ("TimeoutError", "not-checked")],
)
def test_a_connection_that_came_too_early_explains_no_alarm(
    tmp_path: Path, raised: str, expected: str
) -> None:
    run = logging_run(tmp_path, faults=())
    for rank in run:
        with rank.step("create") as result:
            identity = rank.enter("fd.connect", "[1]")
            rank.leave(
                identity, "fd.connect", "raised", error={"type": raised, "text": "no peer", "code": ""}
            )
            rank.say("mnnvl may be unavailable")
            result.update(returned="object", backend="mnnvl", workspace=rank.returned())
        rank.use()
        rank.finish()
    assert state(run.judge(), "clear_log") == expected


def test_what_fails_after_an_alarm_does_not_explain_it(tmp_path: Path) -> None:
    run = logging_run(tmp_path, faults=(fault("workspace.destroy", raise_="RuntimeError"),))
    for rank in run:
        with rank.step("create") as result:
            rank.say("mnnvl may be unavailable")
            result.update(returned="object", backend="mnnvl", workspace=rank.returned())
        rank.use()
        with rank.step("destroy"):
            rank.struck(0, "workspace.destroy", "raise", argument="w0")
            rank.say("destroying failed and was contained")
        rank.finish()
    assert state(run.judge(), "clear_log") == "broken"


def repeated(folder: Path, between: Callable[[RankLog], None]) -> Judgement:
    """Told of in create and again in the use after it, with something in between."""
    run = logging_run(folder, workload=("create", "use", "destroy", "exit"))
    for rank in run:
        with rank.step("create") as result:
            if rank.rank == 1:
                rank.struck(0, "cuMulticastAddDevice", "error")
            rank.say(CLEAR)
            result["returned"] = "none"
        with rank.step("use"):
            between(rank)
            rank.say(CLEAR)
            rank.carry("none")
            rank.compared()
        rank.finish()
    return run.judge()


def test_the_same_again_with_nothing_tried_in_between(tmp_path: Path) -> None:
    judgement = repeated(tmp_path, lambda rank: None)
    assert broken(judgement) == {"clear_log"}
    assert reason(judgement, "clear_log").startswith(
        "rank 0: said again in step 1 what it had said in step 0, and nothing was tried in between: rank 1: mnnvl"
    )


def test_the_same_again_after_another_attempt(tmp_path: Path) -> None:
    creation = repeated(
        tmp_path / "creation", lambda rank: rank.leave(rank.enter("workspace.create"), "workspace.create")
    )
    # A peer's call failed; this rank took and gave back what it needed for the attempt.
    peer = repeated(tmp_path / "peer", lambda rank: rank.leave(rank.enter("cuMemCreate"), "cuMemCreate"))
    failure = repeated(
        tmp_path / "failure", lambda rank: rank.leave(rank.enter("cuInit"), "cuInit", "CUDA_ERROR_NO_DEVICE")
    )
    assert {state(each, "clear_log") for each in (creation, peer, failure)} == {"held"}


def test_a_question_asked_again_is_no_attempt(tmp_path: Path) -> None:
    judgement = repeated(
        tmp_path, lambda rank: rank.leave(rank.enter("cuDeviceGetAttribute"), "cuDeviceGetAttribute")
    )
    assert state(judgement, "clear_log") == "broken"


def test_the_lab_s_own_calls_are_no_attempt(tmp_path: Path) -> None:
    def lab(rank: RankLog) -> None:
        rank.call("workspace.create", lab=True)

    assert state(repeated(tmp_path, lab), "clear_log") == "broken"


def test_between_the_all_reduces_of_one_use(tmp_path: Path) -> None:
    run = logging_run(tmp_path)
    for rank in run:
        with rank.step("create") as result:
            rank.struck(0, "cuMulticastAddDevice", "error")
            rank.say(CLEAR)
            result["returned"] = "none"
        with rank.step("use"):
            for _ in range(2):
                rank.say("the plain all-reduce is used")
                rank.carry("none")
                rank.compared()
        rank.finish()
    assert broken(run.judge()) == {"clear_log"}


def test_twice_in_one_call_and_in_teardown_is_not_per_call(tmp_path: Path) -> None:
    run = logging_run(tmp_path)
    for rank in run:
        with rank.step("create") as result:
            rank.struck(0, "cuMulticastAddDevice", "error")
            rank.say(CLEAR)
            rank.say(CLEAR)
            result["returned"] = "none"
        rank.use("none")
        for _ in range(2):
            with rank.step("destroy"):
                rank.say("nothing to destroy")
        rank.finish()
    assert state(run.judge(), "clear_log") == "held"


# ------------------------------------------------------------------ never asked


def test_a_subject_that_does_not_log(tmp_path: Path) -> None:
    judgement = fallback(Run(tmp_path, faults=(fault("cuMulticastAddDevice", [1], error=CODE),))).judge()
    assert reason(judgement, "clear_log") == "the subject does not log"


def test_a_fallback_without_a_strike_is_a_choice(tmp_path: Path) -> None:
    run = logging_run(tmp_path, faults=())
    for rank in run:
        rank.create("trtllm")
        rank.use("trtllm")
        rank.finish()
    judgement = run.judge()
    assert judgement.outcome.outcome == "fallback"
    assert state(judgement, "clear_log") == "not-checked"


def test_a_clean_run_and_a_run_with_a_lost_rank(tmp_path: Path) -> None:
    used = clean(logging_run(tmp_path / "used")).judge()
    assert reason(used, "clear_log").startswith("the outcome is used")
    lost = logging_run(tmp_path / "lost", faults=(fault("cuMemMap", [1], kill=True),))
    lost[1].begin("create")
    lost[1].strike(0, lost[1].enter("cuMemMap"), "cuMemMap", "kill")
    lost[1].ends(None, "SIGKILL", expected=False)
    lost[0].create_none()
    lost[0].use("none")
    lost[0].finish()
    assert reason(lost.judge(), "clear_log") == "rank 1 was killed by the scenario at cuMemMap"


def test_a_split_group_is_judged_by_others(tmp_path: Path) -> None:
    run = logging_run(tmp_path)
    run[0].create()
    with run[1].step("create") as result:
        run[1].struck(0, "cuMulticastAddDevice", "error")
        result["returned"] = "none"
    for rank in run:
        rank.finish()
    assert reason(run.judge(), "clear_log").startswith("the outcome is disagree")


# --------------------------------------------------------------------- naming


@pytest.mark.parametrize(
    ("text", "code", "expected"),
    [
        ("CUDA_ERROR_INVALID_VALUE", "CUDA_ERROR_INVALID_VALUE", True),
        ("invalid argument", "CUDA_ERROR_INVALID_VALUE", True),
        ("error 1 at rank 0", "CUDA_ERROR_INVALID_VALUE", True),
        ("code=1(b'...')", "CUDA_ERROR_INVALID_VALUE", True),
        ("rank 1 failed", "CUDA_ERROR_INVALID_VALUE", False),
        ("error 12", "CUDA_ERROR_INVALID_VALUE", False),
        ("it said 802", "CUDA_ERROR_SYSTEM_NOT_READY", True),
        ("it said 8021", "CUDA_ERROR_SYSTEM_NOT_READY", False),
        ("Insufficient Permissions", "NVML_ERROR_NO_PERMISSION", True),
        ("it failed", "NVML_ERROR_NO_PERMISSION", False),
    ],
)
def test_an_error_by_name_number_or_words(text: str, code: str, expected: bool) -> None:
    assert naming.names_error(text, code) is expected


@pytest.mark.parametrize(
    ("text", "ranks", "expected"),
    [
        ("rank 3 failed", {3}, True),
        ("Rank=3", {3}, True),
        ("(Worker_TP3 pid=7)", {3}, True),
        ("ranks 0, 3 and 5", {5}, True),
        ("ranks 2-5", {4}, True),
        ("rank 30", {3}, False),
        ("3 attempts", {3}, False),
        ("a wrong frank", {3}, False),
    ],
)
def test_a_rank_by_its_number(text: str, ranks: set[int], expected: bool) -> None:
    assert naming.names_rank(text, ranks) is expected
