"""Reasoning over who waits for whom, without processes."""

from __future__ import annotations

from pathlib import Path

from faultlab import events
from faultlab.runner.follower import Follower
from faultlab.runner.standstill import (
    Movement,
    RankState,
    Wait,
    earliest_deadline,
    end_of_budget,
    movement,
    table,
)


def rank(number: int, *waits: Wait | None, entered: int = 0, **fields: object) -> RankState:
    threads: dict[str, Wait | None] = {f"t{i}": None for i in range(len(waits))}
    recorded = {f"t{i}": [wait] for i, wait in enumerate(waits) if wait}
    state = RankState(number, threads=threads, waits=recorded, entered={"world": entered}, started=True)
    for name, value in fields.items():
        setattr(state, name, value)
    return state


def collective(number: int, *needs: int) -> Wait:
    return Wait(
        1, "comm.allgather", "collective", 0.0, needs=needs, group="world", number=number, deadline=1800.0
    )


def parked(*needs: int, deadline: float | None = None) -> Wait:
    return Wait(2, "cuMemMap", "multicast", 0.0, needs=needs, deadline=deadline)


def test_a_running_thread_means_somebody_runs() -> None:
    assert movement([rank(0, parked(1)), rank(1, None)]) is Movement.RUNNING
    assert movement([rank(0, parked(1)), rank(1, collective(1, 0), None)]) is Movement.RUNNING


def test_a_rank_that_has_not_started_runs() -> None:
    assert movement([rank(0, parked(1)), rank(1, parked(0), started=False)]) is Movement.RUNNING


def test_map_and_a_collective_wait_for_each_other() -> None:
    ranks = [rank(0, parked(1), entered=12), rank(1, collective(13, 0), entered=13)]
    assert movement(ranks) is Movement.STUCK
    assert [(row["rank"], row["waits_for"]) for row in table(ranks)] == [(0, [1]), (1, [0])]


def test_a_collective_that_all_have_entered_can_end() -> None:
    ranks = [rank(0, collective(3, 1), entered=3), rank(1, collective(3, 0), entered=3)]
    assert movement(ranks) is Movement.MOVABLE


def test_a_member_that_went_on_counts_as_having_entered() -> None:
    ranks = [rank(0, collective(3, 1), entered=3), rank(1, parked(0), entered=5)]
    assert movement(ranks) is Movement.MOVABLE


def test_a_dead_member_may_end_a_collective_with_an_error() -> None:
    ranks = [rank(0, collective(3, 1), entered=3), rank(1, alive=False)]
    assert movement(ranks) is Movement.MOVABLE


def test_a_rank_that_needs_nobody_may_leave() -> None:
    root = Wait(1, "comm.broadcast", "collective", 0.0, needs=(), group="world", number=1)
    assert movement([rank(0, root, entered=1), rank(1, parked(0))]) is Movement.MOVABLE


def test_deadlines_and_budgets_of_the_dead_do_not_count() -> None:
    ranks = [
        rank(0, parked(1, deadline=30.0), step_name="create", step_since=2.0),
        rank(1, parked(0, deadline=5.0), alive=False, step_name="create", step_since=9.0),
    ]
    assert earliest_deadline(ranks) == 30.0
    assert end_of_budget(ranks, 20.0) == 22.0
    assert end_of_budget([rank(0, parked(1))], 20.0) is None


# ------------------------------------------------------------------ follower


def _follower(folder: Path, data: bytes) -> Follower:
    events.rank_file(folder, 0).write_bytes(data)
    return Follower(folder, RankState(0, threads={"main": None}))


def _event(kind: str, **fields: object) -> bytes:
    return (
        events.dump({"v": 1, "n": 3, "t": 0.5, "kind": kind, "thread": "main", "step": 0, **fields}) + b"\n"
    )


WAIT = {
    "kind": "collective",
    "group": "world",
    "number": 4,
    "needs": [1],
    "deadline": 9.0,
    "text": "it waits",
}


def test_a_wait_begins_and_ends_in_the_picture(tmp_path: Path) -> None:
    begin = _event("wait-begin", id=7, site="comm.allgather", wait=WAIT)
    follower = _follower(tmp_path, _event("start") + begin)
    assert follower.follow()
    state = follower.state
    wait = state.wait_of("main")
    assert state.started and wait is not None and (wait.identity, wait.deadline) == (7, 9.0)
    assert state.entered == {"world": 4}
    assert not follower.follow()
    with events.rank_file(tmp_path, 0).open("ab") as file:
        file.write(_event("wait-end", id=7, site="comm.allgather"))
    assert follower.follow()
    assert state.wait_of("main") is None
    follower.close()


def test_a_line_that_is_half_written_is_read_when_it_is_whole(tmp_path: Path) -> None:
    line = _event("step-begin", name="create", round=0)
    follower = _follower(tmp_path, line[:-9])
    assert follower.follow() and follower.state.step_name == ""
    with events.rank_file(tmp_path, 0).open("ab") as file:
        file.write(line[-9:])
    assert follower.follow() and follower.state.step_name == "create"
    follower.close()


def test_a_line_that_quotes_a_followed_kind_is_not_one(tmp_path: Path) -> None:
    follower = _follower(tmp_path, _event("log", message='"kind":"wait-begin"', level='{"v":1,"kind":"exit"'))
    assert follower.follow()
    assert follower.state.wait_of("main") is None and not follower.state.finished
    follower.close()


def test_a_rank_that_has_recorded_nothing_yet_has_not_moved(tmp_path: Path) -> None:
    follower = Follower(tmp_path, RankState(0))
    assert not follower.follow()
    follower.close()


def test_a_request_is_the_innermost_wait() -> None:
    state = rank(0, collective(1, 1))
    state.threads["t0"] = parked(1)
    assert state.wait_of("t0") is state.threads["t0"]
