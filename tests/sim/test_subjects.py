"""Subjects of one's own, and what the oracles say of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.conftest import broken

pytestmark = pytest.mark.sim


def scenario(subject: str, **extra: str) -> str:
    lines = [
        "faultlab: 1",
        "title: a subject of one's own",
        "topology: pcie-4",
        "ranks: 2",
        f"subject: tests.subjects:{subject}",
    ]
    return "\n".join([*lines, *(f"{key}: {value}" for key, value in extra.items())]) + "\n"


def test_the_smallest_subject_falls_back_cleanly(run_text: Callable[..., Any]) -> None:
    result, _ = run_text(scenario("Plain", expect="{outcome: fallback, path: none}"))
    assert result["verdict"] == "pass", result["reason"]


def test_one_rank_that_raises_is_a_disagreement(run_text: Callable[..., Any]) -> None:
    result, _ = run_text(scenario("RaisesOnOneRank", workload="[create, destroy, exit]"))
    assert result["outcome"] == "disagree"
    assert "ranks_agree" in broken(result)


def test_a_wrong_sum_is_a_wrong_result(run_text: Callable[..., Any]) -> None:
    result, _ = run_text(scenario("WrongSum"))
    assert result["outcome"] == "wrong-result"
    assert broken(result) == {"correct_result"}


def test_what_the_system_holds_is_counted(run_text: Callable[..., Any]) -> None:
    result, _ = run_text(scenario("LeaksThings"))
    assert "no_leak" in broken(result)


def test_a_loop_that_never_waits_is_ended_by_the_run_budget(run_text: Callable[..., Any]) -> None:
    result, _ = run_text(scenario("SpinsForEver", budget="{init_s: 1, run_s: 2}"))
    assert result["outcome"] == "hang"
    assert "bounded_init" in broken(result)


def test_a_collective_that_a_peer_never_enters_is_a_hang(run_text: Callable[..., Any]) -> None:
    result, _ = run_text(scenario("SkipsACollective", workload="[create, exit]"))
    assert result["outcome"] == "hang"


def test_a_subject_that_cannot_be_loaded_is_unknown(run_text: Callable[..., Any]) -> None:
    result, _ = run_text(scenario("Absent"))
    assert result["verdict"] == "unknown"
    assert "Absent" in result["reason"]
