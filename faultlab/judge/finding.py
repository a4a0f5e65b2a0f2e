"""What a check answers: held, broken or not-checked, with one sentence that says why.

Promise: a finding that is not ``held`` always has a reason, and a broken one
knows the moment at which it broke, so that nothing that merely followed from a
crash or a hang is held against the subject (``cascade``).

To add an invariant: write ``invariants/<name>.py`` with
``check(facts) -> Finding`` and name it in ``registry.CHECKS``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

State = Literal["held", "broken", "not-checked"]

#: The rank of a moment that belongs to the group and to no single rank.
GROUP: Final = -1


@dataclass(frozen=True)
class Moment:
    """Where an event stands: ``n`` orders the events of one rank, ``step`` those of different ranks.

    ``step`` is the index into the workload, -1 before it and the number of its
    steps after it. Machine time never orders events of different ranks here:
    which of two ranks came first differs from run to run.
    """

    rank: int
    n: int
    step: int
    t: float = 0.0
    thread: str = "main"


@dataclass(frozen=True)
class Finding:
    """One promise, judged."""

    state: State
    reason: str = ""
    moment: Moment | None = None

    def __post_init__(self) -> None:
        assert self.state == "held" or self.reason, "a finding that is not held says why"
        assert "\n" not in self.reason, "a reason is one sentence"
        assert (self.state == "broken") == (self.moment is not None), "what is broken broke at a moment"


HELD: Final = Finding("held")


def broken(reason: str, moment: Moment) -> Finding:
    """The promise was not kept; ``reason`` names rank, call, code and number."""
    return Finding("broken", _one_line(reason), moment)


def not_checked(reason: str) -> Finding:
    """The run could not show whether the promise was kept."""
    return Finding("not-checked", _one_line(reason))


def at_step(step: int) -> Moment:
    """The moment of something that the whole group did in a step."""
    return Moment(GROUP, -1, step)


def _one_line(text: str) -> str:
    return " ".join(text.split())
