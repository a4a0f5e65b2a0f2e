"""``no_leak``: what must be given back, when, and what the scenario itself made impossible."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from faultlab.judge import Judgement
from tests.unit.judging import RankLog, Run, broken, clean, error, fault, reason, state, thing

MIB = 1 << 20


def leaky(tmp_path: Path, *left: dict[str, Any], **fields: Any) -> Run:
    """Rank 0 makes things inside its creation, and destroy gives none of them back."""
    run = Run(tmp_path, **fields)
    for rank in run:
        rank.create(made=left if rank.rank == 0 else ())
        rank.use()
        rank.destroy()
        rank.finish()
    return run


def test_what_is_left_is_counted_sized_and_traced_to_the_call_that_made_it(tmp_path: Path) -> None:
    run = leaky(
        tmp_path,
        thing("handle", "h3", 2 * MIB),
        thing("handle", "h4", 2 * MIB),
        thing("range", "r1", 4 * MIB),
        thing("mapping", "m1", 2 * MIB, "r1", "h3"),
        thing("allocation", "a1", 66 * MIB),
    )
    judgement = run.judge()
    assert broken(judgement) == {"no_leak"}
    assert reason(judgement, "no_leak") == (
        "rank 0: 2 handles, 1 range, 1 mapping, 1 allocation (70.0 MiB) alive after destroy; "
        "first: handle h3 made by cuMemCreate in create #1"
    )


def test_other_ranks_that_leak_are_named(tmp_path: Path) -> None:
    run = Run(tmp_path, ranks=4)
    for rank in run:
        rank.create(made=[thing("handle", "h1", MIB)])
        rank.use()
        rank.destroy()
        rank.finish()
    assert reason(run.judge(), "no_leak").endswith("; ranks 1-3 leaked too")


def test_what_was_there_before_is_no_leak(tmp_path: Path) -> None:
    run = Run(tmp_path)
    for rank in run:
        rank.alive["h0"] = thing("handle", "h0", MIB)
        rank.ledger("baseline")
        rank.create()
        rank.use()
        rank.destroy()
        rank.finish()
    assert state(run.judge(), "no_leak") == "held"


@pytest.mark.parametrize(
    ("system", "words"),
    [
        ({"descriptors": {"file": 5}}, "2 file descriptors"),
        ({"descriptors": {"file": 3, "memfd": 1}}, "1 memfd descriptor"),
        ({"sockets": 4}, "2 sockets"),
        ({"threads": ["MainThread", "server"]}, "1 thread (server)"),
        ({"folder": ["cuda_fd_1"]}, "1 temporary file (cuda_fd_1)"),
        ({"shared_memory": ["/dev/shm/x"]}, "1 shared-memory file (/dev/shm/x)"),
    ],
)
def test_what_the_system_holds_more_of_is_a_leak(tmp_path: Path, system: dict[str, Any], words: str) -> None:
    run = Run(tmp_path)
    for rank in run:
        rank.create_none()
        rank.use("none")
        rank.destroy()
        if rank.rank == 1:
            rank.system.update(system)
        rank.finish()
    judgement = run.judge()
    assert broken(judgement) == {"no_leak"}
    assert reason(judgement, "no_leak") == f"rank 1: {words} alive after destroy"


def test_what_the_system_holds_less_of_is_none(tmp_path: Path) -> None:
    run = Run(tmp_path)
    for rank in run:
        rank.create_none()
        rank.destroy()
        rank.system.update(descriptors={}, sockets=0, threads=[])
        rank.finish()
    assert state(run.judge(), "no_leak") == "held"


# ----------------------------------------------------- after a create that failed


def failing(rank: RankLog, told: dict[str, Any], *made: dict[str, Any]) -> None:
    """A create that makes things and raises; its ledger is taken after it."""
    with rank.step("create") as result:
        identity = rank.enter("workspace.create", "mnnvl")
        for each in made:
            rank.call("cuMemCreate", made=[each])
        rank.leave(identity, "workspace.create", "raised")
        result.update(returned="raised", error=told)


def test_a_create_that_raises_must_have_given_back_what_it_took(tmp_path: Path) -> None:
    run = Run(tmp_path)
    for rank in run:
        failing(rank, error(code="CUDA_ERROR_UNKNOWN"), thing("handle", "h1", MIB))
        rank.alive.clear()
        rank.destroy()
        rank.finish()
    judgement = run.judge()
    assert broken(judgement) == {"no_leak"}
    assert "alive after create #1 raised RuntimeError (CUDA_ERROR_UNKNOWN); first: handle h1" in reason(
        judgement, "no_leak"
    )


def test_a_create_that_returns_none_must_too(tmp_path: Path) -> None:
    run = Run(tmp_path)
    for rank in run:
        with rank.step("create") as result:
            rank.call("cuMemCreate", made=[thing("handle", "h1", MIB)])
            result["returned"] = "none"
        rank.alive.clear()
        rank.finish()
    assert "alive after create #1 returned none" in reason(run.judge(), "no_leak")


def test_a_workspace_from_before_is_alive_by_right_while_a_later_create_fails(tmp_path: Path) -> None:
    run = Run(tmp_path, workload=("create", "create", "destroy", "exit"))
    for rank in run:
        rank.create(made=[thing("handle", "h1", MIB)])
        failing(rank, error())
        rank.destroy("w0")
        rank.finish()
    assert broken(run.judge()) == set()


def test_a_workload_without_a_destroy_gives_nothing_back(tmp_path: Path) -> None:
    run = Run(tmp_path, workload=("create", "use"))
    for rank in run:
        rank.create(made=[thing("handle", "h1", MIB)])
        rank.use()
        rank.finish()
    assert reason(run.judge(), "no_leak") == "the workload has no destroy, and no create failed"


def test_a_workload_without_a_destroy_must_still_clean_up_after_a_failure(tmp_path: Path) -> None:
    run = Run(tmp_path, workload=("create", "use"))
    for rank in run:
        failing(rank, error(), thing("handle", "h1", MIB))
        rank.finish()
    assert broken(run.judge()) == {"no_leak"}


# ------------------------------------------------------------------- exemptions


def exempt(judgement: Judgement) -> bool:
    """Whether what is left was passed over, and said."""
    return broken(judgement) == set() and "the scenario struck" in reason(judgement, "no_leak")


def test_what_a_call_struck_after_it_ran_had_made_is_exempt(tmp_path: Path) -> None:
    run = Run(tmp_path, faults=[fault("cuMemCreate", error="CUDA_ERROR_OUT_OF_MEMORY", when="after")])
    for rank in run:
        with rank.step("create") as result:
            rank.alive["h1"] = thing("handle", "h1", MIB)
            rank.struck(0, "cuMemCreate", "error", "after", made=["h1"])
            result["returned"] = "none"
        rank.finish()
    judgement = run.judge()
    assert exempt(judgement)
    assert reason(judgement, "no_leak") == (
        "rank 0: 1 thing could not be given back: the scenario struck cuMemCreate"
    )


def test_a_call_struck_before_it_ran_exempts_nothing(tmp_path: Path) -> None:
    run = Run(tmp_path, faults=[fault("cuMemCreate", error="CUDA_ERROR_OUT_OF_MEMORY")])
    for rank in run:
        with rank.step("create") as result:
            rank.call("cuMemCreate", made=[thing("handle", "h1", MIB)])
            rank.struck(0, "cuMemCreate", "error")
            result["returned"] = "none"
        rank.finish()
    assert broken(run.judge()) == {"no_leak"}


def test_a_delay_loses_nothing(tmp_path: Path) -> None:
    run = Run(tmp_path, faults=[fault("cuMemRelease", delay_s=1.0)])
    for rank in run:
        rank.create(made=[thing("handle", "h1", MIB)])
        rank.use()
        with rank.step("destroy"):
            rank.struck(0, "cuMemRelease", "delay_s", refers=["h1"])
        rank.finish()
    assert broken(run.judge()) == {"no_leak"}


THINGS = (
    thing("handle", "h1", MIB),
    thing("range", "r1", MIB),
    thing("mapping", "m1", MIB, "r1", "h1"),
    thing("handle", "h2", MIB),
)


@pytest.mark.parametrize(
    ("site", "refers", "left"),
    [
        ("cuMemUnmap", "m1", ("h1", "r1", "m1")),  # A mapping keeps its range and its handle's memory.
        (
            "cuMemRelease",
            "h1",
            ("h1", "r1", "m1"),
        ),  # What stands on a handle that stays, and what that keeps.
        ("cuMemRelease", "h2", ("h2",)),
    ],
)
def test_a_struck_release_exempts_its_object_and_what_hangs_together_with_it(
    tmp_path: Path, site: str, refers: str, left: tuple[str, ...]
) -> None:
    for extra, name in ((set[str](), "only"), ({"h1", "h2"} - set(left), "more")):
        run = Run(tmp_path / name, faults=[fault(site, error="CUDA_ERROR_INVALID_VALUE")])
        for rank in run:
            rank.create(made=THINGS)
            rank.use()
            with rank.step("destroy"):
                rank.struck(0, site, "error", refers=[refers])
                rank.alive = {each["id"]: each for each in THINGS if each["id"] in {*left, *extra}}
            rank.finish()
        judgement = run.judge()
        assert exempt(judgement) == (not extra), name
        if extra:
            assert reason(judgement, "no_leak").count("1 handle") == 1


def destroy_struck(
    tmp_path: Path, index: int, argument: str, *more: dict[str, Any], system: dict[str, Any] | None = None
) -> Run:
    """Two workspaces in a row; the destruction of one is struck on rank 0."""
    run = Run(tmp_path, faults=[fault("workspace.destroy", [0], raise_="RuntimeError")])
    for rank in run:
        with rank.step("create") as result:
            for each in more:
                rank.call("cuMemAlloc", made=[each])
            rank.returned(made=[thing("handle", "h0", MIB)])
            rank.returned("trtllm", made=[thing("handle", "h1", MIB)])
            result.update(returned="object", backend="trtllm", workspace="w1")
        rank.use("trtllm")
        with rank.step("destroy"):
            if rank.rank == 0:
                rank.struck(0, "workspace.destroy", "raise", argument=argument)
                rank.alive.pop(f"h{1 - index}")
                rank.system.update(system or {})
            else:
                rank.alive.clear()
        rank.finish()
    return run


@pytest.mark.parametrize("index", [0, 1])
def test_a_struck_destroy_exempts_what_its_workspaces_creation_made(tmp_path: Path, index: int) -> None:
    assert exempt(destroy_struck(tmp_path, index, f"w{index}").judge())


def test_a_struck_destroy_exempts_no_other_workspace(tmp_path: Path) -> None:
    judgement = destroy_struck(tmp_path, 1, "w0").judge()
    assert reason(judgement, "no_leak").endswith("first: handle h1 made by cuMemCreate in create #1")


def test_a_struck_destroy_exempts_nothing_that_was_made_outside_the_creation(tmp_path: Path) -> None:
    judgement = destroy_struck(tmp_path, 1, "w1", thing("allocation", "a1", MIB)).judge()
    assert broken(judgement) == {"no_leak"}


def test_a_struck_destroy_of_a_nameless_object_exempts_every_creation(tmp_path: Path) -> None:
    assert exempt(destroy_struck(tmp_path / "0", 0, "").judge())
    assert exempt(destroy_struck(tmp_path / "1", 1, "").judge())
    more = thing("allocation", "a1", MIB)
    assert broken(destroy_struck(tmp_path / "more", 1, "", more).judge()) == {"no_leak"}


def test_a_struck_destroy_by_the_finalizer_exempts_too(tmp_path: Path) -> None:
    assert exempt(destroy_struck(tmp_path, 0, "w0 by its finalizer").judge())


def test_a_struck_destroy_exempts_the_ranks_descriptors_and_threads(tmp_path: Path) -> None:
    assert exempt(destroy_struck(tmp_path, 0, "w0", system={"sockets": 9, "threads": ["a", "b"]}).judge())


def test_a_struck_destroy_on_one_rank_exempts_no_other(tmp_path: Path) -> None:
    run = destroy_struck(tmp_path, 0, "w0")
    run[1].events = [event for event in run[1].events if event["kind"] != "ledger" or event["label"] != "end"]
    run[1].alive["h1"] = thing("handle", "h1", MIB)
    run[1].ledger("end")
    assert reason(run.judge(), "no_leak").startswith("rank 1: 1 handle")


def test_a_stand_in_whose_destruction_was_struck_is_exempt(tmp_path: Path) -> None:
    run = Run(tmp_path, faults=[fault("workspace.destroy", raise_="RuntimeError")])
    for rank in run:
        rank.create("trtllm")
        rank.alive["s1"] = thing("standin", "s1", MIB)
        rank.use("trtllm")
        with rank.step("destroy"):
            rank.struck(0, "workspace.destroy", "raise", argument="w0")
        rank.finish()
    assert exempt(run.judge())


def test_a_creation_struck_after_it_ran_is_lost_whole(tmp_path: Path) -> None:
    run = Run(tmp_path, faults=[fault("workspace.create", raise_="RuntimeError", when="after")])
    for rank in run:
        with rank.step("create") as result:
            identity = rank.enter("workspace.create", "mnnvl")
            rank.call("cuMemCreate", made=[thing("handle", "h1", MIB)])
            rank.strike(0, identity, "workspace.create", "raise", "after")
            rank.leave(identity, "workspace.create", "raised")
            rank.system["sockets"] += 1
            result["returned"] = "none"
        rank.finish()
    assert exempt(run.judge())


@pytest.mark.parametrize(
    ("more", "when", "fine"), [(1, "after", True), (2, "after", False), (1, "before", False)]
)
def test_a_descriptor_that_a_struck_export_had_made_is_exempt_and_no_other(
    tmp_path: Path, more: int, when: str, fine: bool
) -> None:
    site = "cuMemExportToShareableHandle"
    run = Run(tmp_path, faults=[fault(site, error="CUDA_ERROR_OUT_OF_MEMORY", when=when)])
    for rank in run:
        with rank.step("create") as result:
            rank.struck(0, site, "error", when)
            rank.system["descriptors"]["file"] += more
            result["returned"] = "none"
        rank.finish()
    judgement = run.judge()
    assert exempt(judgement) == fine
    if fine:
        assert reason(judgement, "no_leak").endswith(f"the scenario struck {site}")


def test_ranks_that_the_scenario_ended_are_not_counted(tmp_path: Path) -> None:
    run = Run(tmp_path, faults=[fault("cuMemCreate", kill=True)])
    for rank in run:
        failing(rank, error())
        rank.alive["h1"] = thing("handle", "h1", MIB)
        rank.begin("create", 1)
        rank.strike(0, rank.enter("cuMemCreate"), "cuMemCreate", "kill")
        rank.ends(None, "SIGKILL", expected=False)
    assert reason(run.judge(), "no_leak") == "the scenario left no rank alive"


def test_a_clean_run_holds(tmp_path: Path) -> None:
    assert state(clean(Run(tmp_path)).judge(), "no_leak") == "held"
