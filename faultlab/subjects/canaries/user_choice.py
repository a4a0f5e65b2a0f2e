"""Canaries of ``user_choice``: an order is not followed."""

from __future__ import annotations

from typing import Any

from faultlab.subjects.canaries.base import Canary
from faultlab.subjects.reference import WorkspaceUnavailable

_REFUSED = "ordered-and-refused[backend=mnnvl,case=refused-on-all,ranks=2]"


class ReplacesTheChoice(Canary):
    """Gives trtllm to a user who ordered mnnvl (vllm#48071)."""

    seed = _REFUSED
    breaks = frozenset({"user_choice"})

    def __init__(self, environment: Any) -> None:
        super().__init__(environment)
        if self._ladder == ("mnnvl",):
            self._ladder = ("mnnvl", "trtllm")


class SaysNothingOfIt(Canary):
    """Ends on the plain all-reduce without a word where the order cannot be met (vllm#45800)."""

    seed = _REFUSED
    breaks = frozenset({"user_choice"})

    def create(self) -> Any:
        try:
            return super().create()
        except WorkspaceUnavailable:
            return None


class KnowsBetter(Canary):
    """Takes the best rung whatever was ordered: the user had a reason for trtllm
    (vllm#48071: an explicit trtllm stays)."""

    seed = "ordered[backend=trtllm,creation=mocked]"
    breaks = frozenset({"user_choice"})

    def __init__(self, environment: Any) -> None:
        super().__init__(environment)
        self._ladder = ("mnnvl", "trtllm")


class RaisesWhatItMet(Canary):
    """Refuses the order with whatever class it met, which no caller can expect (vLLM
    0.33.0: a ValueError out of the getter)."""

    seed = _REFUSED
    breaks = frozenset({"user_choice"})

    def create(self) -> Any:
        try:
            return super().create()
        except WorkspaceUnavailable as error:
            raise ValueError(str(error)) from None


CANARIES: dict[str, type[Canary]] = {
    "replaces": ReplacesTheChoice,
    "says-nothing-of-it": SaysNothingOfIt,
    "knows-better": KnowsBetter,
    "raises-what-it-met": RaisesWhatItMet,
}
