"""Answers that are kept: each question is asked once, whoever asks it at the same time."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from faultlab.runner.answers import Answer, Answers


def test_a_question_is_asked_once() -> None:
    answers, found = Answers(), []

    def find() -> Answer:
        found.append(1)
        return {"outcome": "used"}

    assert answers.ask("a", find) == answers.ask("a", find) == {"outcome": "used"}
    assert len(found) == 1


def test_who_asks_while_it_is_being_found_waits_for_it() -> None:
    answers, found = Answers(), []
    entered, go_on = threading.Event(), threading.Event()

    def slow() -> Answer:
        found.append(1)
        entered.set()
        assert go_on.wait(30)
        return {"outcome": "error"}

    def never() -> Answer:
        raise AssertionError("it is being found already")

    with ThreadPoolExecutor(4) as pool:
        first = pool.submit(answers.ask, "a", slow)
        assert entered.wait(30)
        others = [pool.submit(answers.ask, "a", never) for _ in range(3)]
        # Another question is not held up by this one.
        assert answers.ask("b", lambda: {"outcome": "used"}) == {"outcome": "used"}
        go_on.set()
        assert [each.result(30) for each in (first, *others)] == [{"outcome": "error"}] * 4
    assert len(found) == 1


def test_a_failure_is_told_and_not_kept() -> None:
    answers = Answers()

    def fails() -> Answer:
        raise ValueError("the lab failed")

    with pytest.raises(ValueError, match="the lab failed"):
        answers.ask("a", fails)
    assert len(answers) == 0
    assert answers.ask("a", lambda: {"outcome": "used"}) == {"outcome": "used"}


def test_the_answer_unused_longest_goes_first() -> None:
    answers, found = Answers(kept=2), []

    def ask(question: str) -> None:
        def find() -> Answer:
            found.append(question)
            return {}

        answers.ask(question, find)

    for question in ("a", "b", "a", "c", "a", "b"):
        ask(question)
    assert found == ["a", "b", "c", "b"]
    assert len(answers) == 2
