"""Every invariant both ways: what keeps the promise, what breaks it, and what the reason says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from faultlab.judge.registry import CHECKS
from faultlab.scenario.invariants import INVARIANTS
from faultlab.scenario.models import Budget
from tests.unit.judging import Run, broken, clean, error, fault, reason, state, wait


def test_a_clean_run_breaks_nothing_and_says_why_what_was_not_checked_was_not(tmp_path: Path) -> None:
    judgement = clean(Run(tmp_path)).judge()
    assert broken(judgement) == set()
    assert tuple(judgement.invariants) == INVARIANTS
    held = {name for name, finding in judgement.invariants.items() if finding.state == "held"}
    assert held == set(CHECKS) - {
        "destroy_called",
        "fail_once",
        "user_choice",
        "state_neutral",
        "clear_log",
        "best_fallback",
        "capture_safe",
    }
    assert set(CHECKS) == set(INVARIANTS)
    assert reason(judgement, "destroy_called") == "every object that creation returned was valid"


# -------------------------------------------------------------- no_cuda_crash


def test_a_null_pointer_in_a_kernel_names_rank_error_site_and_step(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run[0].create()
    run[0].use()
    run[1].create(pointer=0)
    run[1].begin("use")
    run[1].call("kernel.allreduce", "mnnvl", result="CUDA_ERROR_ILLEGAL_ADDRESS")
    run[1].sticky("kernel.allreduce")
    run.hang(wait(0, kind="meet"), wait(1, kind="meet"))
    judgement = run.judge()
    assert broken(judgement) == {"no_cuda_crash"}
    assert reason(judgement, "no_cuda_crash") == (
        "rank 1: CUDA_ERROR_ILLEGAL_ADDRESS at kernel.allreduce (address 0x0), in use #1"
    )


def test_a_signal_names_the_last_site_and_other_ranks_that_died(tmp_path: Path) -> None:
    run = Run(tmp_path, ranks=4)
    for rank in run:
        rank.begin("create")
        rank.enter("cuMemCreate")
        rank.ends(None, "SIGSEGV", expected=False)
    judgement = run.judge()
    assert reason(judgement, "no_cuda_crash") == (
        "rank 0: the process ended with SIGSEGV at cuMemCreate, in create #1; ranks 1-3 crashed too"
    )


@pytest.mark.parametrize("effect", [{"kill": True}, {"poison": "CUDA_ERROR_ILLEGAL_ADDRESS"}])
def test_what_the_scenario_itself_kills_or_poisons_is_no_crash_of_the_subject(
    tmp_path: Path, effect: dict[str, Any]
) -> None:
    run = Run(tmp_path, faults=[fault("cuMemCreate", [1], **effect)])
    run[1].begin("create")
    identity = run[1].enter("cuMemCreate")
    run[1].strike(0, identity, "cuMemCreate", next(iter(effect)))
    run[1].sticky("cuMemCreate", injected=True)
    run[1].ends(None, "SIGKILL", expected=False)
    run[0].create_none()
    run[0].use("none")
    run[0].destroy()
    run[0].finish(probe=lambda group: None)
    judgement = run.judge()
    assert broken(judgement) == set()
    assert state(judgement, "no_cuda_crash") == "held"


def test_an_error_of_a_kernel_that_the_scenario_injects_is_no_crash_of_the_subject(tmp_path: Path) -> None:
    run = Run(tmp_path, faults=[fault("kernel.allreduce", error="CUDA_ERROR_ILLEGAL_ADDRESS")])
    for rank in run:
        rank.create()
        rank.begin("use")
        identity = rank.enter("kernel.allreduce", "mnnvl")
        rank.strike(0, identity, "kernel.allreduce", "error")
        rank.sticky("kernel.allreduce", injected=True)
        rank.leave(identity, "kernel.allreduce", "CUDA_ERROR_ILLEGAL_ADDRESS")
        rank.ends(0)
    judgement = run.judge()
    assert broken(judgement) == set()
    assert reason(judgement, "no_cuda_crash") == (
        "the scenario left no rank alive: ranks 0 and 1 were poisoned by the scenario at kernel.allreduce"
    )


# --------------------------------------------------------------- bounded_init


def test_a_late_step_names_rank_step_time_and_budget(tmp_path: Path) -> None:
    run = Run(tmp_path)
    for rank in run:
        with rank.step("create") as result:
            rank.t += 31.2 if rank.rank == 1 else 19.9
            result.update(returned="object", backend="mnnvl", workspace=rank.returned())
        rank.use()
        rank.destroy("w0")
        rank.finish()
    judgement = run.judge()
    assert broken(judgement) == {"bounded_init"}
    assert reason(judgement, "bounded_init") == (
        "rank 1 left create #1 after 31.2 s of machine time; the budget is 20 s"
    )


@pytest.mark.parametrize("late", ["create", "use", "destroy", "exit"])
def test_create_use_and_destroy_have_the_budget_and_exit_has_not(tmp_path: Path, late: str) -> None:
    run = Run(tmp_path, budget=Budget(init_s=5.0))
    for rank in run:
        for name in run.scenario.workload:
            with rank.step(str(name)) as result:
                rank.t += 5.1 if name == late and rank.rank == 1 else 1.0
                result["returned"] = "none" if name == "create" else "done"
        rank.index = -1
        rank.finish()
    assert ("bounded_init" in broken(run.judge())) == (late != "exit")


def delayed(tmp_path: Path, waits_s: float) -> Run:
    run = Run(tmp_path, faults=[fault("cuMemCreate", [1], delay_s=30.0)])
    for rank in run:
        with rank.step("create") as result:
            identity = rank.enter("cuMemCreate")
            if rank.rank == 1:
                rank.strike(0, identity, "cuMemCreate", "delay_s")
            rank.t += 30.1 if rank.rank == 1 else waits_s
            rank.leave(identity, "cuMemCreate")
            result["returned"] = "none"
        rank.use("none")
        rank.destroy()
        rank.finish()
    return run


def test_a_delay_of_the_scenario_is_not_held_against_its_own_rank(tmp_path: Path) -> None:
    assert broken(delayed(tmp_path, 1.0).judge()) == set()


def test_a_delay_of_the_scenario_is_held_against_the_peers_that_wait_and_is_said(tmp_path: Path) -> None:
    judgement = delayed(tmp_path, 30.1).judge()
    assert broken(judgement) == {"bounded_init"}
    assert reason(judgement, "bounded_init") == (
        "rank 0 left create #1 after 30.1 s of machine time; the budget is 20 s, "
        "and the delay of rank 1 by the scenario was 30 s"
    )


def test_a_hang_says_who_waits_for_whom(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run[0].begin("create")
    run[1].create_raises(error())
    run.hang(
        wait(0, "cuMemMap", 1, text="1 of 2 devices added"), wait(1, "cuMulticastAddDevice", kind="meet")
    )
    judgement = run.judge()
    assert broken(judgement) == {"bounded_init"}
    assert reason(judgement, "bounded_init") == (
        "rank 0 never left create #1: it waits in cuMemMap for rank 1 since 0.25 s, "
        "and rank 1 has finished and waits for the others"
    )


def test_a_hang_behind_a_dead_rank_says_what_became_of_it(tmp_path: Path) -> None:
    run = Run(tmp_path, faults=[fault("cuMemCreate", [1], kill=True)])
    run[0].begin("create")
    run[1].begin("create")
    run[1].strike(0, run[1].enter("cuMemCreate"), "cuMemCreate", "kill")
    run[1].ends(None, "SIGKILL", expected=False)
    run.hang(wait(0, "comm.allgather", 1, kind="collective"))
    judgement = run.judge()
    assert broken(judgement) == {"bounded_init"}
    assert reason(judgement, "bounded_init").endswith("and rank 1 was killed by the scenario at cuMemCreate")


def test_ranks_that_met_in_different_calls_are_both_named(tmp_path: Path) -> None:
    run = Run(tmp_path)
    for rank in run:
        rank.begin("create")
    run.hang(
        wait(0, "comm.barrier", kind="collective", text="barrier number 13"),
        wait(1, "comm.allgather", kind="collective", text="all_gather_object number 13"),
    )
    assert reason(run.judge(), "bounded_init") == (
        "rank 0 never left create #1: it waits in comm.barrier (barrier number 13) since 0.25 s, "
        "and rank 1 waits in comm.allgather (all_gather_object number 13) since 0.25 s"
    )


@pytest.mark.parametrize("step", ["create", "use"])
def test_a_late_rank_is_said_before_a_later_hang_and_after_one_in_its_own_step(
    tmp_path: Path, step: str
) -> None:
    run = Run(tmp_path)
    with run[1].step("create") as result:
        run[1].t += 25.0
        result["returned"] = "none"
    if step == "use":
        run[0].create_none()
    run[0].begin(step)
    run.hang(wait(0, "comm.barrier", 1), wait(1, kind="meet"))
    said = "rank 1 left create #1" if step == "use" else "rank 0 never left create #1"
    assert reason(run.judge(), "bounded_init").startswith(said)


def test_the_main_thread_says_what_its_rank_waits_for(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run[0].begin("create")
    helper = {**wait(0, "fd.recv", text="a descriptor"), "thread": "server"}
    run.hang(helper, wait(0, "cuMemMap", 1), wait(1, kind="meet"))
    assert "it waits in cuMemMap for rank 1" in reason(run.judge(), "bounded_init")


@pytest.mark.parametrize(("thread", "other_step"), [("server", False), ("main", True)])
def test_a_delay_of_another_thread_or_step_excuses_nothing(
    tmp_path: Path, thread: str, other_step: bool
) -> None:
    run = Run(tmp_path, faults=[fault("fd.recv", [1], delay_s=30.0)])
    for rank in run:
        with rank.step("create") as result:
            rank.thread = thread
            if rank.rank == 1:
                rank.strike(0, rank.enter("fd.recv"), "fd.recv", "delay_s")
            rank.thread = "main"
            rank.t += 0.0 if other_step else 25.0 * rank.rank
            result["returned"] = "none"
        with rank.step("use"):
            rank.t += 25.0 * rank.rank if other_step else 0.0
        rank.destroy()
        rank.finish()
    said = "rank 1 left use #1 after 25 s" if other_step else "rank 1 left create #1 after 25 s"
    assert reason(run.judge(), "bounded_init").startswith(said)


def test_a_workload_without_set_up_has_nothing_to_bound(tmp_path: Path) -> None:
    run = Run(tmp_path, workload=("collective", "exit"))
    for rank in run:
        with rank.step("collective"):
            pass
        rank.finish()
    assert reason(run.judge(), "bounded_init") == "no rank came to a create, a use or a destroy"


def test_a_run_over_its_budget_says_where_it_was(tmp_path: Path) -> None:
    run = Run(tmp_path)
    for rank in run:
        rank.begin("create")
    run.tell("over-budget", text="the run took longer than 2 s: rank 0 at cuMemMap")
    run.end_all()
    assert reason(run.judge(), "bounded_init") == (
        "rank 0 never left create #1: the run took longer than 2 s: rank 0 at cuMemMap"
    )


@pytest.mark.parametrize("everybody", [True, False])
def test_a_rank_that_sleeps_by_the_scenario_past_the_budget_hangs_by_no_fault_of_its_own(
    tmp_path: Path, everybody: bool
) -> None:
    run = Run(tmp_path, faults=[fault("cuMemCreate", delay_s=30.0)])
    for rank in run:
        rank.begin("create")
        rank.strike(0, rank.enter("cuMemCreate"), "cuMemCreate", "delay_s")
    peer = wait(0, "cuMemCreate", kind="sleep") if everybody else wait(0, "comm.barrier", 1)
    run.hang(peer, wait(1, "cuMemCreate", kind="sleep"))
    judgement = run.judge()
    assert judgement.outcome.outcome == "hang"
    if everybody:
        assert broken(judgement) == set()
        assert reason(judgement, "bounded_init") == ("the scenario itself delays rank 0 past the budget")
    else:
        assert reason(judgement, "bounded_init").startswith("rank 0 never left create #1")


# ---------------------------------------------------------------- ranks_agree


def test_a_split_names_the_step_and_both_decisions(tmp_path: Path) -> None:
    run = Run(tmp_path, ranks=3)
    for rank in run:
        if rank.rank == 2:
            rank.create_raises(error(code="CUDA_ERROR_NOT_SUPPORTED"))
        else:
            rank.create()
        rank.use("none")
        rank.destroy("w0")
        rank.finish()
    judgement = run.judge()
    assert broken(judgement) == {"ranks_agree", "truthful_ready"}
    assert reason(judgement, "ranks_agree") == (
        "in create #1 ranks 0 and 1 returned a mnnvl workspace "
        "and rank 2 raised RuntimeError (CUDA_ERROR_NOT_SUPPORTED)"
    )


def test_ranks_on_different_paths_disagree_in_the_use(tmp_path: Path) -> None:
    run = Run(tmp_path)
    for rank in run:
        rank.create()
        rank.use("mnnvl" if rank.rank else "none")
        rank.destroy("w0")
        rank.finish()
    assert reason(run.judge(), "ranks_agree") == "in use #1 rank 0 used none and rank 1 used mnnvl"


@pytest.mark.parametrize("effect", [{"kill": True}, {"hang": True}])
def test_after_a_kill_or_a_hang_the_survivors_are_asked(tmp_path: Path, effect: dict[str, Any]) -> None:
    for name, told in (("agree", error()), ("differ", error("ValueError"))):
        run = Run(tmp_path / name, ranks=3, faults=[fault("cuMemCreate", [1], **effect)])
        for rank in run:
            if rank.rank == 1:
                rank.begin("create")
                rank.strike(0, rank.enter("cuMemCreate"), "cuMemCreate", next(iter(effect)))
                rank.ends(None, "SIGKILL", expected=False)
            else:
                rank.create_raises(error() if rank.rank == 0 else told)
                rank.ends(0)
        assert state(run.judge(), "ranks_agree") == ("held" if name == "agree" else "broken")


def test_a_single_survivor_has_nobody_to_agree_with(tmp_path: Path) -> None:
    run = Run(tmp_path, faults=[fault("cuMemCreate", [1], kill=True)])
    run[1].begin("create")
    run[1].strike(0, run[1].enter("cuMemCreate"), "cuMemCreate", "kill")
    run[1].ends(None, "SIGKILL", expected=False)
    run[0].create_raises(error())
    run[0].ends(0)
    judgement = run.judge()
    assert reason(judgement, "ranks_agree") == "no step came to its end on two ranks that can be compared"


def ended_at_destroy(tmp_path: Path) -> Run:
    """Rank 1 used another path, and was wrong and late, before the scenario killed it in its destroy."""
    run = Run(tmp_path, faults=[fault("workspace.destroy", [1], kill=True)])
    for rank in run:
        rank.create()
        with rank.step("use"):
            rank.carry("mnnvl" if rank.rank == 0 else "none")
            rank.t += 25.0 * rank.rank
            rank.compared(1.0 * rank.rank)
        if rank.rank == 0:
            rank.destroy("w0")
            rank.finish(probe=lambda group: None)
        else:
            rank.begin("destroy")
            rank.strike(0, rank.enter("workspace.destroy", "w0"), "workspace.destroy", "kill")
            rank.ends(None, "SIGKILL", expected=False)
    return run


def test_what_a_rank_did_before_the_scenario_ended_it_is_judged(tmp_path: Path) -> None:
    assert broken(ended_at_destroy(tmp_path).judge()) == {"ranks_agree", "correct_result", "bounded_init"}


def test_a_split_before_a_collective_was_struck_is_judged(tmp_path: Path) -> None:
    run = Run(tmp_path, faults=[fault("comm.barrier", [1], raise_="RuntimeError")])
    for rank in run:
        rank.create("mnnvl" if rank.rank else "trtllm")
        with rank.step("use"):
            if rank.rank == 1:
                rank.struck(0, "comm.barrier", "raise", argument="0")
        rank.destroy("w0")
        rank.finish()
    assert reason(run.judge(), "ranks_agree").startswith("in create #1 rank 0 returned a trtllm workspace")


def test_a_rank_that_had_nothing_to_use_is_told_from_one_that_used(tmp_path: Path) -> None:
    run = Run(tmp_path)
    for rank in run:
        rank.create_none()
        with rank.step("use") as result:
            if rank.rank == 1:
                result["returned"] = "skipped"
        rank.destroy()
        rank.finish()
    assert reason(run.judge(), "ranks_agree") == "in use #1 rank 0 returned and rank 1 had nothing to use"


def struck_collective(tmp_path: Path, ranks: list[int]) -> Run:
    run = Run(tmp_path, ranks=3, faults=[fault("comm.allgather", ranks, raise_="RuntimeError")])
    for rank in run:
        with rank.step("create") as result:
            if rank.rank in ranks:
                rank.struck(0, "comm.allgather", "raise", argument="0")
            result.update(returned="raised", error=error("ValueError" if rank.rank == 1 else "OSError"))
        rank.destroy()
        rank.finish()
    return run


def test_a_rank_whose_collective_was_struck_is_not_asked_unless_all_were(tmp_path: Path) -> None:
    assert state(struck_collective(tmp_path / "one", [1]).judge(), "ranks_agree") == "held"
    assert state(struck_collective(tmp_path / "all", [0, 1, 2]).judge(), "ranks_agree") == "broken"


# ---------------------------------------------------------------- comms_alive


def test_a_group_that_does_not_answer_is_broken(tmp_path: Path) -> None:
    run = Run(tmp_path)
    for rank in run:
        rank.create_none()
        rank.use("none")
        rank.destroy()
        rank.finish(probe=lambda group: group != "bystanders")
    judgement = run.judge()
    assert broken(judgement) == {"comms_alive"}
    assert reason(judgement, "comms_alive") == (
        "rank 0: the lab's collectives on group bystanders failed afterwards: RuntimeError: no answer"
    )


@pytest.mark.parametrize(
    ("made", "words"),
    [
        (["barrier", "all_gather"], "collective 1 of group 0 was all_gather on rank 0 and barrier on rank 1"),
        (["all_gather"], "rank 0 made 2 collectives in group 0 and rank 1 made 1"),
    ],
)
def test_collectives_out_of_order_are_broken(tmp_path: Path, made: list[str], words: str) -> None:
    run = Run(tmp_path)
    run[0].collectives["0"] = ["all_gather", "barrier"]
    run[1].collectives["0"] = made
    judgement = clean(run).judge()
    assert broken(judgement) == {"comms_alive"}
    assert reason(judgement, "comms_alive") == words


def test_a_group_of_some_ranks_is_compared_among_them(tmp_path: Path) -> None:
    run = Run(tmp_path, ranks=3)
    run[0].collectives["pair"] = run[2].collectives["pair"] = ["barrier"]
    assert state(clean(run).judge(), "comms_alive") == "held"


def test_a_probe_that_never_comes_back_is_broken_and_no_hang_of_the_subject(tmp_path: Path) -> None:
    run = Run(tmp_path)
    for rank in run:
        rank.create_none()
        rank.use("none")
        rank.destroy()
        with rank.step("exit"):
            pass
        rank.index = -1
        rank.emit("probe", name="context", group="", ok=True, error=None, number=0)
        rank.emit("sequence", groups=rank.collectives)
        rank.enter("comm.allgather", "0", lab=True)
    run.hang(wait(0, "comm.allgather", 1, kind="collective"), wait(1, "comm.allgather", 0, kind="collective"))
    judgement = run.judge()
    assert judgement.outcome.outcome == "fallback"
    assert broken(judgement) == {"comms_alive"}
    assert reason(judgement, "comms_alive") == (
        "rank 0 never came back from the lab's collectives on group 0: "
        "it waits in comm.allgather for rank 1 since 0.25 s"
    )


def test_a_probe_that_names_its_group_itself_is_believed(tmp_path: Path) -> None:
    """A group with torch's name in the sequence, struck, and probed under another name."""
    run = Run(tmp_path, faults=[fault("comm.allgather", [1], raise_="RuntimeError")])
    for rank in run:
        rank.collectives = {"pg7": ["barrier"], "pg8": ["barrier"]}
        with rank.step("create") as result:
            if rank.rank == 1:
                rank.struck(0, "comm.allgather", "raise", argument="pg7")
            result["returned"] = "none"
        rank.finish(probe=lambda group: group != "world")
        for event in rank.events:
            if event["kind"] == "probe" and event["group"]:
                event["label"] = {"world": "pg7", "bystanders": "pg8"}[event["group"]]
    assert state(run.judge(), "comms_alive") == "held"


def test_a_lost_member_is_not_held_against_the_subject(tmp_path: Path) -> None:
    run = Run(tmp_path, faults=[fault("cuMemCreate", [1], kill=True)])
    run[1].begin("create")
    run[1].strike(0, run[1].enter("cuMemCreate"), "cuMemCreate", "kill")
    run[1].ends(None, "SIGKILL", expected=False)
    run[0].create_none()
    run[0].finish(probe=lambda group: None)
    judgement = run.judge()
    assert state(judgement, "comms_alive") == "not-checked"
    assert reason(judgement, "comms_alive") == (
        "every group lost a member: rank 1 was killed by the scenario at cuMemCreate"
    )


def out_of_step(tmp_path: Path, group: str, effect: str) -> Run:
    """A collective of ``group`` is struck on rank 1, and the world group does not answer afterwards."""
    told: dict[str, Any] = {"delay_s": 1.0} if effect == "delay_s" else {"raise_": "RuntimeError"}
    run = Run(tmp_path, faults=[fault("comm.allgather", [1], **told)])
    for rank in run:
        with rank.step("create") as result:
            if rank.rank == 1:
                rank.struck(0, "comm.allgather", effect, argument=group)
                rank.collectives["0"].append("all_gather")
            result["returned"] = "none"
        rank.use("none")
        rank.destroy()
        rank.finish(probe=lambda name: name != "world")
    return run


def test_a_group_with_a_struck_collective_is_passed_over_and_the_other_is_judged(tmp_path: Path) -> None:
    assert state(out_of_step(tmp_path / "world", "0", "raise").judge(), "comms_alive") == "held"
    assert state(out_of_step(tmp_path / "other", "1", "raise").judge(), "comms_alive") == "broken"
    assert state(out_of_step(tmp_path / "delay", "0", "delay_s").judge(), "comms_alive") == "broken"


# ------------------------------------------------------------- correct_result


def test_a_wrong_sum_names_rank_use_and_error(tmp_path: Path) -> None:
    run = Run(tmp_path)
    for rank in run:
        rank.create()
        rank.use(off=3.5 if rank.rank == 1 else 0.25)
        rank.destroy("w0")
        rank.finish()
    judgement = run.judge()
    assert broken(judgement) == {"correct_result"}
    assert reason(judgement, "correct_result") == (
        "rank 1: all-reduce 1 (8 tokens) is off by 3.5; the tolerance is 0.5"
    )


def test_a_result_that_the_scenario_falsified_is_not_held_against_the_subject(tmp_path: Path) -> None:
    run = Run(tmp_path, faults=[fault("kernel.allreduce", value=1.0)])
    for rank in run:
        rank.create()
        with rank.step("use"):
            identity = rank.enter("kernel.allreduce", "mnnvl")
            rank.strike(0, identity, "kernel.allreduce", "value", "after")
            rank.leave(identity, "kernel.allreduce")
            rank.compared(1.0)
        rank.destroy("w0")
        rank.finish()
    judgement = run.judge()
    assert judgement.outcome.outcome == "wrong-result"
    assert broken(judgement) == set()
    assert reason(judgement, "correct_result") == "rank 0: the scenario itself falsified all-reduce 1"


def test_a_falsified_result_excuses_no_other_use(tmp_path: Path) -> None:
    run = Run(tmp_path, faults=[fault("kernel.allreduce", value=1.0)])
    for rank in run:
        rank.create()
        with rank.step("use"):
            identity = rank.enter("kernel.allreduce", "mnnvl")
            rank.strike(0, identity, "kernel.allreduce", "value", "after")
            rank.leave(identity, "kernel.allreduce")
            rank.compared(0.0)
            rank.carry("mnnvl")
            rank.compared(1.0)
        rank.destroy("w0")
        rank.finish()
    assert reason(run.judge(), "correct_result").startswith("rank 0: all-reduce 2 ")


def test_without_a_use_no_result_is_checked(tmp_path: Path) -> None:
    run = Run(tmp_path, workload=("create", "exit"))
    for rank in run:
        rank.create_none()
        rank.finish()
    assert reason(run.judge(), "correct_result") == "no all-reduce came back"


# ------------------------------------------------------------- destroy_called


def null_pointer(tmp_path: Path, destroys: int, *, mark: str = "", ranks: tuple[int, ...] = (1,)) -> Run:
    """Creation returns a null pointer on ``ranks``; each rank destroys and goes on to trtllm."""
    run = Run(tmp_path)
    for rank in run:
        with rank.step("create") as result:
            rank.returned(pointer=0 if rank.rank in ranks else 4096)
            for _ in range(destroys):
                rank.call("workspace.destroy", "w0" + mark)
            name = rank.returned("trtllm")
            result.update(returned="object", backend="trtllm", workspace=name)
        rank.use("trtllm")
        rank.destroy("w1")
        rank.finish()
    return run


def test_an_invalid_workspace_that_is_destroyed_once_keeps_the_promise(tmp_path: Path) -> None:
    judgement = null_pointer(tmp_path, 1).judge()
    assert broken(judgement) == set()
    assert state(judgement, "destroy_called") == "held"


@pytest.mark.parametrize(("count", "words"), [(0, "was never destroyed"), (2, "was destroyed 2 times")])
def test_an_invalid_workspace_that_is_destroyed_never_or_twice_breaks_it(
    tmp_path: Path, count: int, words: str
) -> None:
    judgement = null_pointer(tmp_path, count).judge()
    assert broken(judgement) == {"destroy_called"}
    assert reason(judgement, "destroy_called") == (
        f"rank 1: the mnnvl workspace w0 with a null pointer {words} before workspace.create (trtllm) began"
    )


def test_a_destroy_that_comes_after_the_fallback_began_is_too_late(tmp_path: Path) -> None:
    run = null_pointer(tmp_path, 0)
    for rank in run:
        rank.events.pop()
        rank.call("workspace.destroy", "w0")
    assert "was never destroyed before workspace.create" in reason(run.judge(), "destroy_called")


def test_a_destruction_by_the_finalizer_is_nobodys_call(tmp_path: Path) -> None:
    assert "destroy_called" in broken(null_pointer(tmp_path, 1, mark=" by its finalizer").judge())


def test_a_fallback_that_begins_with_an_all_reduce_ends_the_time_to_destroy(tmp_path: Path) -> None:
    run = Run(tmp_path)
    for rank in run:
        rank.create(pointer=0)
        rank.use("none")
        rank.destroy("w0")
        rank.finish()
    judgement = run.judge()
    assert broken(judgement) == {"destroy_called"}
    assert "before comm.allreduce (0) began" in reason(judgement, "destroy_called")


def test_a_vote_in_between_is_no_fallback(tmp_path: Path) -> None:
    run = Run(tmp_path)
    for rank in run:
        with rank.step("create") as result:
            rank.returned(pointer=0)
            rank.call("comm.allreduce", "0")
            rank.call("workspace.destroy", "w0")
            result["returned"] = "none"
        rank.use("none")
        rank.destroy()
        rank.finish()
    assert state(run.judge(), "destroy_called") == "held"


def test_without_a_fallback_the_workloads_own_destroys_are_early_enough(tmp_path: Path) -> None:
    run = Run(tmp_path, workload=("create", "destroy", "destroy", "exit"))
    for rank in run:
        rank.create(pointer=0)
        rank.destroy("w0")
        rank.destroy("w0")
        rank.finish()
    assert state(run.judge(), "destroy_called") == "held"


def test_never_destroyed_at_all_is_broken_at_the_end(tmp_path: Path) -> None:
    run = Run(tmp_path, workload=("create", "exit"))
    for rank in run:
        rank.create(pointer=0)
        rank.finish()
    assert "by the end of the workload" in reason(run.judge(), "destroy_called")


def test_where_creation_returned_nothing_there_is_nothing_to_destroy(tmp_path: Path) -> None:
    assert reason(clean(Run(tmp_path), "none").judge(), "destroy_called") == "creation returned no object"
