"""Answers that cost a run each, kept so that those who ask the same pay once.

Promise: of several threads that ask the same question at the same time, one finds
the answer and the others wait for it; a failure is told to all of them and is not kept.
At most ``limits.COUNTERFACTUALS_KEPT`` answers are kept, the one unused longest goes first.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from faultlab import limits

#: An answer: plain JSON data.
Answer = dict[str, Any]


class Answers:
    """What was asked in a session, and what came of it."""

    def __init__(self, kept: int = limits.COUNTERFACTUALS_KEPT) -> None:
        assert kept >= 1, kept
        self._kept = kept
        self._known: OrderedDict[str, Future[Answer]] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._known)

    def forget(self) -> None:
        """Keep none of the answers."""
        with self._lock:
            self._known = OrderedDict(
                (question, told) for question, told in self._known.items() if not told.done()
            )

    def ask(self, question: str, find: Callable[[], Answer]) -> Answer:
        """The answer to ``question``, found by ``find`` unless it is known. Raises what ``find`` raises."""
        with self._lock:
            told = self._known.get(question)
            mine = told is None
            if told is None:
                told = self._known[question] = Future()
            self._known.move_to_end(question)
        if mine:
            self._find(question, told, find)
        return told.result()

    def _find(self, question: str, told: Future[Answer], find: Callable[[], Answer]) -> None:
        try:
            told.set_result(find())
        except BaseException as error:
            with self._lock:
                self._known.pop(question, None)
            told.set_exception(error)
            return
        with self._lock:
            while len(self._known) > self._kept:
                oldest = next((each for each, known in self._known.items() if known.done()), None)
                if oldest is None:
                    break
                del self._known[oldest]
