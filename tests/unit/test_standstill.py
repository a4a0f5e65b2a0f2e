"""Reasoning over who waits for whom, without processes."""

from __future__ import annotations

from faultlab.runner.standstill import (
    Movement,
    RankState,
    Thread,
    Wait,
    earliest_deadline,
    end_of_budget,
    movement,
    table,
)


def rank(number: int, *waits: Wait | None, entered: int = 0, **fields: object) -> RankState:
    threads = {f"t{i}": Thread(f"t{i}", [wait] if wait else []) for i, wait in enumerate(waits)}
    state = RankState(number, threads=threads, entered={"world": entered}, started=True)
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
