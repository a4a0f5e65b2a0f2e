"""No cascades: after a crash or a hang only its own invariant is broken, besides what was broken before."""

from __future__ import annotations

from pathlib import Path

import pytest

from faultlab.judge.registry import CHECKS
from tests.unit.judging import RankLog, Run, broken, error, fault, reason, state, thing, wait

LONG = ("create", "use", "use", "destroy", "exit")


def crash(rank: RankLog) -> None:
    """A use in which the rank's kernel meets an unusable pointer."""
    rank.begin("use")
    rank.call("kernel.allreduce", "mnnvl", result="CUDA_ERROR_ILLEGAL_ADDRESS")
    rank.sticky("kernel.allreduce")


def crashed_in_second_use(tmp_path: Path, *, off: tuple[float, float] = (0, 0), path: str = "mnnvl") -> Run:
    """Rank 1 crashes in the second use; in the first one the results may be wrong or the paths differ."""
    run = Run(tmp_path, workload=LONG)
    for rank in run:
        rank.create()
        rank.use(path if rank.rank else "mnnvl", off=off[rank.rank])
    crash(run[1])
    run[1].emit("exit", status=0)
    run[0].begin("use")
    run.hang(wait(0, "kernel.allreduce", 1), wait(1, kind="meet"))
    return run


def test_after_a_crash_everything_else_is_not_checked(tmp_path: Path) -> None:
    judgement = crashed_in_second_use(tmp_path).judge()
    assert broken(judgement) == {"no_cuda_crash"}
    for name in set(CHECKS) - {"no_cuda_crash"}:
        assert state(judgement, name) == "not-checked"
        assert reason(judgement, name).startswith("(crash) rank 1 crashed: CUDA_ERROR_ILLEGAL_ADDRESS")


@pytest.mark.parametrize("off", [(1.0, 0.0), (0.0, 1.0)])
def test_what_a_step_before_the_crash_had_broken_stays_broken(
    tmp_path: Path, off: tuple[float, float]
) -> None:
    judgement = crashed_in_second_use(tmp_path, off=off).judge()
    assert broken(judgement) == {"no_cuda_crash", "correct_result"}


def test_a_split_before_the_crash_stays_broken(tmp_path: Path) -> None:
    judgement = crashed_in_second_use(tmp_path, path="trtllm").judge()
    assert broken(judgement) == {"no_cuda_crash", "ranks_agree"}


def test_what_a_peer_did_in_the_step_of_the_crash_is_not_judged(tmp_path: Path) -> None:
    run = Run(tmp_path)
    for rank in run:
        rank.create()
    crash(run[1])
    run[1].ends(0)
    run[0].use(off=1.0)
    run[0].destroy()
    run[0].finish()
    assert broken(run.judge()) == {"no_cuda_crash"}


def test_what_the_rank_itself_did_before_its_crash_in_the_same_step_is_judged(tmp_path: Path) -> None:
    run = Run(tmp_path)
    for rank in run:
        rank.create()
    run[1].begin("use")
    run[1].carry("mnnvl")
    run[1].compared(1.0)
    run[1].sticky("kernel.allreduce")
    run[1].ends(0)
    run[0].use()
    run[0].destroy()
    run[0].finish()
    assert broken(run.judge()) == {"no_cuda_crash", "correct_result"}


def test_an_invalid_workspace_that_crashes_the_rank_was_not_left_for_a_fallback(tmp_path: Path) -> None:
    run = Run(tmp_path)
    for rank in run:
        rank.create(pointer=0)
        crash(rank)
        rank.ends(0)
    assert broken(run.judge()) == {"no_cuda_crash"}


def hung(tmp_path: Path) -> Run:
    """Rank 0 hangs in the second create; both went on to it in the same way."""
    run = Run(tmp_path, workload=("create", "create", "destroy", "exit"))
    for rank in run:
        rank.create()
        rank.begin("create")
    run.hang(wait(0, "cuMemMap", 1), wait(1, "comm.barrier", 0))
    return run


def test_after_a_hang_everything_else_is_not_checked(tmp_path: Path) -> None:
    judgement = hung(tmp_path).judge()
    assert broken(judgement) == {"bounded_init"}
    for name in set(CHECKS) - {"bounded_init"}:
        assert reason(judgement, name) == "(hang) rank 0 never left create #2"


def test_a_leak_that_a_rank_had_shown_before_it_stood_still_stays_broken(tmp_path: Path) -> None:
    run = Run(tmp_path)
    with run[1].step("create") as result:
        run[1].call("cuMemCreate", made=[thing("handle", "h1", 1)])
        result.update(returned="raised", error=error())
    run[0].begin("create")
    run.hang(wait(0, "cuMemMap", 1), wait(1, kind="meet"))
    assert broken(run.judge()) == {"bounded_init", "no_leak"}


def test_ranks_that_left_the_step_of_a_hang_in_different_ways_are_not_judged(tmp_path: Path) -> None:
    run = Run(tmp_path, ranks=3)
    run[0].begin("create")
    run[1].create_raises(error())
    run[2].create_raises(error("TimeoutError"))
    run.hang(wait(0, "cuMemMap", 1), wait(1, kind="meet"), wait(2, kind="meet"))
    assert broken(run.judge()) == {"bounded_init"}


def test_an_invalid_workspace_that_a_hang_left_no_time_to_destroy_is_not_judged(tmp_path: Path) -> None:
    run = Run(tmp_path)
    for rank in run:
        rank.begin("create")
        rank.returned(pointer=0)
    run.hang(wait(0, "comm.allgather", 1), wait(1, "comm.barrier", 0))
    assert broken(run.judge()) == {"bounded_init"}


def test_an_invalid_workspace_left_behind_before_the_hang_is_judged(tmp_path: Path) -> None:
    run = Run(tmp_path)
    for rank in run:
        rank.begin("create")
        rank.returned(pointer=0)
        rank.enter("workspace.create", "trtllm")
    run.hang(wait(0, "comm.allgather", 1), wait(1, "comm.barrier", 0))
    assert broken(run.judge()) == {"bounded_init", "destroy_called"}


def test_a_crash_outweighs_a_hang_that_it_caused(tmp_path: Path) -> None:
    judgement = crashed_in_second_use(tmp_path).judge()
    assert judgement.outcome.outcome == "crash"
    assert "bounded_init" not in broken(judgement)


def test_the_end_of_a_rank_by_the_scenario_is_no_crash_that_hides_others(tmp_path: Path) -> None:
    run = Run(tmp_path, ranks=3, faults=[fault("cuMemCreate", [1], kill=True)])
    run[1].begin("create")
    run[1].strike(0, run[1].enter("cuMemCreate"), "cuMemCreate", "kill")
    run[1].ends(None, "SIGKILL", expected=False)
    for rank in (run[0], run[2]):
        rank.create_raises(error("OSError" if rank.rank else "ValueError"))
        rank.ends(0)
    assert broken(run.judge()) == {"ranks_agree"}
