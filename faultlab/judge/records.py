"""The records that events become: small, typed, and without a judgement in them.

Promise: one record per thing that happened, each with its ``Moment``; a call is
its ``enter`` and its ``leave`` joined by their id. What no invariant asks for is
not here; an invariant that needs another field adds it to the record and to the
one line of ``facts`` that fills it.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from faultlab.judge import wording
from faultlab.judge.finding import Moment
from faultlab.machine.base import LedgerObject


@dataclass(frozen=True)
class Call:
    """One call at a site. ``ended`` is None while it has not come back; ``made``
    are the ledger objects that it made itself, not those of calls inside it; ``raised``
    and ``text`` are the class and the words of the exception with which it ended, if any."""

    identity: int
    site: str
    argument: str
    lab: bool
    began: Moment
    ended: Moment | None = None
    result: str = ""
    made: tuple[LedgerObject, ...] = ()
    raised: str = ""
    text: str = ""

    @property
    def ok(self) -> bool:
        """Whether it came back without an error."""
        return self.ended is not None and self.result == "ok"


@dataclass(frozen=True)
class StepError:
    """What a step raised."""

    type: str
    text: str
    code: str
    declared: bool

    @property
    def title(self) -> str:
        """``RuntimeError (CUDA_ERROR_NOT_SUPPORTED)``."""
        return f"{self.type} ({self.code})" if self.code else self.type


@dataclass(frozen=True)
class Step:
    """One step of the workload on one rank. ``ended`` is None while it runs.

    ``returned``: ``object``, ``none``, ``done``, ``raised`` or ``skipped``.
    """

    name: str
    number: int
    began: Moment
    ended: Moment | None = None
    returned: str = ""
    error: StepError | None = None
    backend: str | None = None
    workspace: str | None = None

    @property
    def index(self) -> int:
        """Its place in the workload."""
        return self.began.step

    @property
    def title(self) -> str:
        """``create #1``: the first create of the workload."""
        return f"{self.name} #{self.number}"

    @property
    def seconds(self) -> float:
        """Machine time from its begin to its end."""
        assert self.ended is not None, "it has not ended"
        return self.ended.t - self.began.t


@dataclass(frozen=True)
class Strike:
    """One time that a fault fired: at call ``identity``, before or after the real one."""

    fault: int
    identity: int
    site: str
    effect: str
    when: str
    moment: Moment
    refers: tuple[str, ...] = ()
    made: tuple[str, ...] = ()

    @property
    def loses(self) -> bool:
        """Whether the call's work was lost to the subject: a delay and a value lose nothing."""
        return self.effect not in ("delay_s", "value")


@dataclass(frozen=True)
class Sticky:
    """The context was left with an error that stays. ``injected``: by the scenario."""

    moment: Moment
    error: str
    site: str
    injected: bool
    reason: str


@dataclass(frozen=True)
class Use:
    """One all-reduce that came back, compared with the reference."""

    moment: Moment
    number: int
    tokens: int
    error: float
    tolerance: float
    correct: bool


@dataclass(frozen=True)
class Capture:
    """A stream captured. ``ended`` is None while it does; ``error``: what it ended with, or empty."""

    began: Moment
    ended: Moment | None = None
    error: str = ""

    def holds(self, moment: Moment) -> bool:
        """Whether something of the same rank happened while it captured."""
        return self.began.n < moment.n and (self.ended is None or moment.n < self.ended.n)


@dataclass(frozen=True)
class Returned:
    """A workspace object that creation returned."""

    moment: Moment
    workspace: str
    backend: str
    pointer: int | None
    needs_multicast: bool

    @property
    def invalid(self) -> bool:
        """Whether no kernel may be given this object."""
        return self.needs_multicast and not self.pointer


@dataclass(frozen=True)
class Said:
    """One message that the subject, or what it called, logged. ``exception``: the
    traceback that it carries, if any."""

    moment: Moment
    level: str
    message: str
    logger: str = ""
    exception: str = ""


@dataclass(frozen=True)
class StateAround:
    """The caller's state around one step: the names of what the step changed."""

    moment: Moment
    changed: tuple[str, ...]


@dataclass(frozen=True)
class Census:
    """What the operating system held for a rank."""

    descriptors: Counter[str] = field(default_factory=Counter)
    threads: Counter[str] = field(default_factory=Counter)
    folder: frozenset[str] = frozenset()
    shared_memory: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Ledger:
    """What was alive in a rank at a moment."""

    moment: Moment
    label: str
    objects: tuple[LedgerObject, ...]
    census: Census


@dataclass(frozen=True)
class Probe:
    """One of the lab's own questions. ``ok`` is None where it could not be asked."""

    moment: Moment
    name: str
    group: str
    ok: bool | None
    error: str


@dataclass(frozen=True)
class Exit:
    """How the process ended. ``expected``: by its own last word, or by the lab."""

    status: int | None
    signal: str | None
    expected: bool
    last_site: str

    @property
    def title(self) -> str:
        """``status 3`` or ``SIGSEGV``."""
        return self.signal or f"status {self.status}"


@dataclass(frozen=True)
class Wait:
    """A row of who waits for whom, as the supervisor saw it when nothing could move."""

    rank: int
    thread: str
    site: str
    kind: str
    waits_for: tuple[int, ...]
    text: str
    since: float

    @property
    def title(self) -> str:
        """``waits in cuMemMap for rank 1 since 0.2 s``, as a sentence goes on."""
        if self.kind == "meet":
            return "has finished and waits for the others"
        what = f"waits in {self.site or 'a call'}"
        if self.waits_for:
            what += f" for {wording.ranks(self.waits_for)}"
        elif self.text:
            what += f" ({wording.shortened(self.text, 80)})"
        return f"{what} since {wording.seconds(self.since)}"


@dataclass(frozen=True)
class Ended:
    """The scenario itself took a rank out: nothing after this is held against the subject."""

    how: str
    moment: Moment
    site: str

    @property
    def title(self) -> str:
        """``killed by the scenario at cuMemMap``."""
        return f"{self.how} by the scenario at {self.site}"


@dataclass(frozen=True)
class Counterfactual:
    """How the same faults ended for one rung alone. ``outcome`` is None and ``unknown`` says why
    where that could not be seen."""

    outcome: str | None
    broken: tuple[str, ...]
    unknown: str


@dataclass(frozen=True)
class Crash:
    """The first sign that a rank died or its context did, by no word of the scenario."""

    moment: Moment
    text: str
