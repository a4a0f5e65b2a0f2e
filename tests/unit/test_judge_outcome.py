"""The outcome of a run: every word, per rank and for the group, and what carried the all-reduce."""

from __future__ import annotations

from pathlib import Path

import pytest

from faultlab.scenario.models import WorkspaceSpec
from tests.unit.judging import Run, broken, clean, error, fault, ordered, topology, wait


def outcome(run: Run) -> tuple[str | None, str | None]:
    judgement = run.judge()
    return judgement.outcome.outcome, judgement.outcome.path


# ------------------------------------------------------------ used and fallback


@pytest.mark.parametrize(
    ("multicast", "spec", "path", "word"),
    [
        (True, {}, "mnnvl", "used"),
        (True, {}, "trtllm", "fallback"),
        (True, {}, "none", "fallback"),
        (False, {}, "trtllm", "used"),
        (False, {}, "none", "fallback"),
        (True, {"preferred": "trtllm"}, "trtllm", "used"),
        (False, {"preferred": "mnnvl"}, "trtllm", "used"),
        (True, {"preferred": "trtllm"}, "none", "fallback"),
        (True, {"backend": "trtllm"}, "trtllm", "used"),
        (True, {"backend": "mnnvl"}, "trtllm", "fallback"),
    ],
)
def test_the_first_rung_is_used_and_a_lower_one_is_a_fallback(
    tmp_path: Path, multicast: bool, spec: dict[str, str], path: str, word: str
) -> None:
    run = Run(tmp_path, topology=topology(multicast=multicast), workspace=WorkspaceSpec.model_validate(spec))
    assert outcome(clean(run, path)) == (word, path)


@pytest.mark.parametrize(
    ("backend", "word"), [("mnnvl", "used"), ("trtllm", "fallback"), ("none", "fallback")]
)
def test_without_a_use_what_was_created_decides_and_there_is_no_path(
    tmp_path: Path, backend: str, word: str
) -> None:
    run = Run(tmp_path, workload=("create", "destroy", "exit"))
    for rank in run:
        if backend == "none":
            rank.create_none()
        else:
            rank.create(backend)
        rank.destroy("w0")
        rank.finish()
    assert outcome(run) == (word, None)


def test_the_last_create_that_settled_on_something_decides(tmp_path: Path) -> None:
    run = Run(tmp_path, workload=("create", "create", "destroy", "exit"))
    for rank in run:
        rank.create("mnnvl")
        rank.create("trtllm")
        rank.destroy("w0")
        rank.finish()
    assert outcome(run) == ("fallback", None)


def test_a_workload_without_a_create_is_used(tmp_path: Path) -> None:
    run = Run(tmp_path, workload=("collective", "exit"))
    for rank in run:
        with rank.step("collective"):
            pass
        rank.finish()
    assert outcome(run) == ("used", None)


def test_the_path_is_what_was_seen_not_what_the_object_says(tmp_path: Path) -> None:
    run = Run(tmp_path)
    for rank in run:
        rank.create("mnnvl")
        rank.use("none")
        rank.destroy("w0")
        rank.finish()
    assert outcome(run) == ("fallback", "none")


def test_a_vote_by_all_reduce_does_not_hide_the_kernel(tmp_path: Path) -> None:
    run = Run(tmp_path)
    for rank in run:
        rank.create()
        with rank.step("use"):
            rank.carry("none")
            rank.carry("mnnvl")
            rank.carry("none")
            rank.compared()
        rank.destroy("w0")
        rank.finish()
    assert outcome(run) == ("used", "mnnvl")


def test_the_last_all_reduce_is_the_path_and_a_kernel_that_failed_carried_nothing(tmp_path: Path) -> None:
    run = Run(tmp_path)
    for rank in run:
        rank.create()
        with rank.step("use"):
            rank.carry("mnnvl")
            rank.compared()
            rank.call("kernel.allreduce", "mnnvl", result="raised")
            rank.carry("none")
            rank.compared()
        rank.destroy("w0")
        rank.finish()
    assert outcome(run) == ("fallback", "none")


def test_the_labs_own_collectives_and_those_of_other_steps_carry_nothing(tmp_path: Path) -> None:
    run = Run(tmp_path)
    for rank in run:
        rank.create()
        rank.carry("none")
        with rank.step("use"):
            rank.call("comm.allreduce", "0", lab=True)
            rank.call("kernel.allreduce", "unheard-of")
            rank.call("kernel.lamport_initialize", "trtllm")
            rank.call("comm.barrier", "0")
            rank.compared()
            rank.carry("none")
        rank.destroy("w0")
        rank.finish()
    assert outcome(run) == ("used", None)


# ----------------------------------------------------------------------- errors


def raising(run: Run, *told: dict[str, object]) -> Run:
    for rank, each in zip(run, told, strict=True):
        rank.create_raises(each)
        with rank.step("use") as result:
            result["returned"] = "skipped"
        rank.destroy()
        rank.finish()
    return run


def test_the_same_declared_error_everywhere_is_an_error(tmp_path: Path) -> None:
    told = error(code="CUDA_ERROR_UNKNOWN")
    assert outcome(raising(Run(tmp_path), told, {**told, "text": "other words"})) == ("error", None)


def test_one_undeclared_error_outweighs(tmp_path: Path) -> None:
    told = error("KeyError", declared=False)
    assert outcome(raising(Run(tmp_path), told, told)) == ("undeclared-error", None)


@pytest.mark.parametrize(
    "other", [error("ValueError"), error(code="CUDA_ERROR_UNKNOWN"), error("ValueError", declared=False)]
)
def test_errors_of_another_type_or_code_are_a_disagreement(tmp_path: Path, other: dict[str, object]) -> None:
    assert outcome(raising(Run(tmp_path), error(), other)) == ("disagree", None)


def test_ranks_on_different_paths_disagree(tmp_path: Path) -> None:
    run = Run(tmp_path)
    for rank, path in zip(run, ("mnnvl", "trtllm"), strict=True):
        rank.create(path)
        rank.use(path)
        rank.destroy("w0")
        rank.finish()
    judgement = run.judge()
    assert (judgement.outcome.outcome, judgement.outcome.path) == ("disagree", None)
    assert [each.outcome for each in judgement.outcome.ranks] == ["used", "fallback"]


def test_a_wrong_sum_on_one_rank_is_a_wrong_result(tmp_path: Path) -> None:
    run = Run(tmp_path)
    for rank in run:
        rank.create()
        rank.use(off=float(rank.rank))
        rank.destroy("w0")
        rank.finish()
    judgement = run.judge()
    assert judgement.outcome.outcome == "wrong-result"
    assert [each.outcome for each in judgement.outcome.ranks] == ["used", "wrong-result"]


# -------------------------------------------------------------- crash and hang


def test_a_kernel_with_an_unusable_pointer_is_a_crash(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run[0].create()
    run[1].create(pointer=0)
    run[1].begin("use")
    run[1].call("kernel.allreduce", "mnnvl", result="CUDA_ERROR_ILLEGAL_ADDRESS")
    run[1].sticky("kernel.allreduce")
    run[0].begin("use")
    run[0].enter("kernel.allreduce", "mnnvl")
    run.hang(wait(0, "kernel.allreduce", 1), wait(1, "", kind="meet"))
    judgement = run.judge()
    assert judgement.outcome.outcome == "crash"
    assert [each.outcome for each in judgement.outcome.ranks] == ["hang", "crash"]


@pytest.mark.parametrize(("status", "signal"), [(None, "SIGSEGV"), (3, None), (0, None)])
def test_a_process_that_ends_by_no_word_of_its_own_is_a_crash(
    tmp_path: Path, status: int | None, signal: str | None
) -> None:
    run = clean(Run(tmp_path))
    run[1].ends(status, signal, expected=False)
    judgement = run.judge()
    assert [each.outcome for each in judgement.outcome.ranks] == ["used", "crash"]
    assert judgement.outcome.outcome == "crash"


def test_a_context_that_does_not_answer_afterwards_is_a_crash(tmp_path: Path) -> None:
    run = Run(tmp_path)
    for rank in run:
        rank.create()
        rank.use()
        rank.destroy("w0")
        rank.finish(context=rank.rank != 1)
    assert outcome(run) == ("crash", "mnnvl")


def test_a_rank_that_never_leaves_its_step_is_a_hang(tmp_path: Path) -> None:
    run = Run(tmp_path)
    for rank in run:
        rank.begin("create")
        rank.enter("cuMemMap")
    run.hang(wait(0, "cuMemMap", 1), wait(1, "cuMemMap", 0))
    assert outcome(run) == ("hang", None)


def test_a_run_over_its_budget_is_a_hang_of_who_was_still_in_a_step(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run[0].begin("create")
    run[1].create()
    run.tell("over-budget", text="the run took longer than 2 s: rank 0 at its start")
    run.end_all()
    judgement = run.judge()
    assert [each.outcome for each in judgement.outcome.ranks] == ["hang", "used"]
    assert judgement.outcome.outcome == "hang"


def test_ranks_that_only_wait_for_the_others_at_the_end_do_not_hang(tmp_path: Path) -> None:
    """A poisoned rank leaves early, and its peers stand in the lab's own meeting."""
    run = Run(tmp_path, faults=[fault("cuMemCreate", [1], poison="CUDA_ERROR_ILLEGAL_ADDRESS")])
    run[1].begin("create")
    run[1].struck(0, "cuMemCreate", "poison")
    run[0].create_none()
    run[0].use("none")
    run[0].destroy()
    with run[0].step("exit"):
        pass
    run.hang(wait(0, "comm.allreduce", kind="meet"), wait(1, "cuMemCreate", kind="meet"))
    judgement = run.judge()
    assert judgement.outcome.outcome == "fallback"
    assert "bounded_init" not in broken(judgement)


# ------------------------------------------------------- ranks the scenario ends


@pytest.mark.parametrize(
    ("effect", "word"),
    [({"kill": True}, "crash"), ({"hang": True}, "hang"), ({"poison": "CUDA_ERROR_LAUNCH_FAILED"}, "crash")],
)
def test_a_rank_that_the_scenario_ends_does_not_speak_for_the_group(
    tmp_path: Path, effect: dict[str, object], word: str
) -> None:
    run = Run(tmp_path, faults=[fault("cuMemCreate", [1], **effect)])
    run[1].begin("create")
    run[1].strike(0, run[1].enter("cuMemCreate"), "cuMemCreate", next(iter(effect)))
    run[0].create_raises(error())
    run[0].destroy()
    run[1].ends(None, "SIGKILL", expected=False)
    run[0].ends(0)
    judgement = run.judge()
    assert judgement.outcome.outcome == "error"
    assert judgement.outcome.speaking == (0,)
    assert [each.outcome for each in judgement.outcome.ranks] == ["error", word]


def test_where_the_scenario_ends_every_rank_theirs_is_the_outcome(tmp_path: Path) -> None:
    run = Run(tmp_path, faults=[fault("cuMemCreate", kill=True)])
    for rank in run:
        rank.begin("create")
        rank.strike(0, rank.enter("cuMemCreate"), "cuMemCreate", "kill")
        rank.ends(None, "SIGKILL", expected=False)
    judgement = run.judge()
    assert judgement.outcome.outcome == "crash"
    assert broken(judgement) == set()


def test_a_rank_cut_off_by_a_struck_collective_does_not_speak_for_the_group(tmp_path: Path) -> None:
    run = Run(tmp_path, faults=[fault("comm.allgather", [1], raise_="RuntimeError")])
    for rank in run:
        with rank.step("create") as result:
            if rank.rank == 1:
                rank.struck(0, "comm.allgather", "raise", argument="0")
            result.update(returned="raised", error=error("OSError", declared=rank.rank == 0))
        rank.destroy()
        rank.finish()
    judgement = run.judge()
    assert judgement.outcome.outcome == "error"
    assert judgement.outcome.speaking == (0,)


def test_a_run_in_which_no_step_began_has_no_outcome(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.end_all()
    assert outcome(run) == (None, None)


def test_an_order_of_the_user_that_is_met_is_used(tmp_path: Path) -> None:
    assert outcome(clean(Run(tmp_path, workspace=ordered("trtllm")), "trtllm")) == ("used", "trtllm")
