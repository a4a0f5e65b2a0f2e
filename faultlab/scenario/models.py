"""The models of a scenario file: closed, so that a misspelt key is an error.

These classes are what the rest of the lab sees of a file. ``Scenario`` is one
scenario after its matrix was expanded: every field has its value. Reading a
file, with line and column for every mistake, is ``load``'s job.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag

from faultlab import limits
from faultlab.topology.models import Topology

Outcome = Literal[
    "crash",
    "hang",
    "disagree",
    "undeclared-error",
    "wrong-result",
    "error",
    "fallback",
    "used",
]
Path = Literal["mnnvl", "trtllm", "none"]
Lane = Literal["sim", "gpu"]
Window = Literal["any", "preflight", "mnnvl", "trtllm"]
Phase = Literal["any", "create", "use", "destroy"]
Seconds = Annotated[float, Field(ge=0, le=86_400)]


class Closed(BaseModel):
    """A model that knows its keys and never changes."""

    model_config = ConfigDict(extra="forbid", frozen=True, populate_by_name=True)


class NodeRanks(Closed):
    """The ranks of one node."""

    node: Annotated[int, Field(ge=0)]


class RandomRanks(Closed):
    """``random`` ranks drawn with ``seed``: the same ones at every run."""

    random: Annotated[int, Field(ge=1, le=limits.RANKS)]
    seed: int = 0


def _kind_of_ranks(value: Any) -> str | None:
    if isinstance(value, str):
        return "<word>"
    if isinstance(value, (list, tuple)):
        return "<list>"
    if isinstance(value, NodeRanks) or (isinstance(value, dict) and "node" in value):
        return "<node>"
    if isinstance(value, RandomRanks) or (isinstance(value, dict) and "random" in value):
        return "<random>"
    return None


# The unions of this format are told apart by the form of the value, so that a
# mistake in one form is reported once and not once for every other form.
RankSelector = Annotated[
    Annotated[Literal["all", "first", "last", "all-but-first"], Tag("<word>")]
    | Annotated[
        list[Annotated[int, Field(ge=0, lt=limits.RANKS)]],
        Field(min_length=1, max_length=limits.RANKS),
        Tag("<list>"),
    ]
    | Annotated[NodeRanks, Tag("<node>")]
    | Annotated[RandomRanks, Tag("<random>")],
    Discriminator(_kind_of_ranks),
]


class CallsFrom(Closed):
    """Every call from number ``from`` on (numbers start at 1)."""

    from_: Annotated[int, Field(ge=1, alias="from")]


class CallsByChance(Closed):
    """Each call with probability ``chance``, drawn with ``seed``."""

    chance: Annotated[float, Field(gt=0, le=1)]
    seed: int = 0


def _kind_of_calls(value: Any) -> str | None:
    if isinstance(value, str):
        return "<word>"
    if isinstance(value, int) and not isinstance(value, bool):
        return "<number>"
    if isinstance(value, (list, tuple)):
        return "<list>"
    if isinstance(value, CallsFrom) or (isinstance(value, dict) and ("from" in value or "from_" in value)):
        return "<from>"
    if isinstance(value, CallsByChance) or (isinstance(value, dict) and "chance" in value):
        return "<chance>"
    return None


CallNumber = Annotated[int, Field(ge=1, le=1_000_000)]
CallSelector = Annotated[
    Annotated[Literal["every"], Tag("<word>")]
    | Annotated[CallNumber, Tag("<number>")]
    | Annotated[list[CallNumber], Field(min_length=1, max_length=1_000), Tag("<list>")]
    | Annotated[CallsFrom, Tag("<from>")]
    | Annotated[CallsByChance, Tag("<chance>")],
    Discriminator(_kind_of_calls),
]


class Effect(Closed):
    """What happens at the site: exactly one of the kinds, and its manner.

    ``error``: a code by name or number. ``raise``: the class of an exception,
    with ``message``. ``value``: what is read instead. ``delay_s``: the call is
    late. ``hang``: it never returns. ``lose``: the message never arrives.
    ``kill``: the process dies by SIGKILL. ``poison``: a sticky error from now on.

    ``when``: ``before`` the real call, which then is not made (a delay: it is
    made after the delay), or ``after`` it, which then was made and took
    effect. ``after_s``: the error or exception comes that much later.
    ``poisons``: the error leaves the context with this sticky error too.
    """

    error: str | int | None = None
    raise_: Annotated[str | None, Field(alias="raise")] = None
    message: str | None = None
    value: int | float | str | None = None
    delay_s: Seconds | None = None
    hang: Literal[True] | None = None
    lose: Literal[True] | None = None
    kill: Literal[True] | None = None
    poison: str | None = None
    when: Literal["before", "after"] = "before"
    after_s: Seconds = 0.0
    poisons: str | None = None

    @property
    def kind(self) -> str:
        """The one kind of this effect, as the file names it."""
        for name in EFFECT_KINDS:
            if getattr(self, "raise_" if name == "raise" else name) is not None:
                return name
        raise AssertionError("the loader lets no effect without a kind through")


#: In the order in which errors name them.
EFFECT_KINDS = ("error", "raise", "value", "delay_s", "hang", "lose", "kill", "poison")


class Fault(Closed):
    """A site, the ranks it strikes, which of its calls, and an effect."""

    at: str
    ranks: RankSelector = "all"
    calls: CallSelector = "every"
    during: Window = "any"
    phase: Phase = "any"
    effect: Effect
    optional: bool = False


class Use(Closed):
    """``times`` all-reduces of ``tokens`` rows."""

    times: Annotated[int, Field(ge=1, le=limits.REPEATS_PER_STEP)] = 1
    tokens: Annotated[int, Field(ge=1, le=1_000_000)] | None = None


class UseStep(Closed):
    use: Use


class CaptureStep(Closed):
    """Steps that run while a stream captures."""

    capture: Annotated[list[Step], Field(min_length=1, max_length=limits.STEPS_PER_WORKLOAD)]


def _kind_of_step(value: Any) -> str | None:
    if isinstance(value, str):
        return "<word>"
    if isinstance(value, UseStep) or (isinstance(value, dict) and "use" in value):
        return "<use>"
    if isinstance(value, CaptureStep) or (isinstance(value, dict) and "capture" in value):
        return "<capture>"
    return None


Step = Annotated[
    Annotated[Literal["create", "use", "collective", "destroy", "exit"], Tag("<word>")]
    | Annotated[UseStep, Tag("<use>")]
    | Annotated[CaptureStep, Tag("<capture>")],
    Discriminator(_kind_of_step),
]


class Subject(Closed):
    """The code under test: a name and, for a consumer, its versions."""

    name: str
    version: str | None = None
    flashinfer: str | None = None
    depth: Literal["package", "file"] | None = None

    @property
    def label(self) -> str:
        """``name``, ``name-version`` or ``name-version.fi-version``."""
        text = self.name if self.version is None else f"{self.name}-{self.version}"
        return text if self.flashinfer is None else f"{text}.fi-{self.flashinfer}"


class WorkspaceSpec(Closed):
    """What is created, and whether FlashInfer's own code creates it.

    ``backend: auto`` lets the subject walk its ladder; a named back end is an
    order of the user; ``preferred`` starts the ladder there without an order.
    """

    creation: Literal["real", "mocked"] = "real"
    backend: Literal["auto", "mnnvl", "trtllm"] = "auto"
    preferred: Literal["mnnvl", "trtllm"] | None = None
    max_token_num: Annotated[int, Field(ge=1, le=1_000_000)] = 32
    hidden_dim: Annotated[int, Field(ge=8, le=65_536)] = 1024
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"


class Break(Closed):
    """A known break: where it is reported, and for which subjects it holds.

    ``subjects``: names, each with versions if only some break: ``vllm>=0.25,<0.27``.
    """

    url: Annotated[str, Field(pattern=r"^https?://\S+$")]
    subjects: str | None = None


class Expect(Closed):
    """What the run must show; what is not given is not compared."""

    outcome: Outcome | None = None
    path: Path | None = None
    breaks: dict[str, Break] = Field(default_factory=dict)


class Budget(Closed):
    """Machine time. ``init_s``: for each step to return on every rank.
    ``run_s``: for the whole run; past it every process is ended."""

    init_s: Annotated[float, Field(gt=0, le=86_400)] = 20.0
    run_s: Annotated[float, Field(gt=0, le=86_400)] = 600.0
    group_timeout_s: Annotated[float, Field(gt=0, le=86_400)] = 1_800.0


DEFAULT_WORKLOAD: tuple[Step, ...] = ("create", "use", "create", "use", "destroy", "destroy", "exit")


def steps_in_order(workload: Sequence[Step]) -> Iterator[Step]:
    """Every step of a workload as events number them: what a capture holds, then the capture itself."""
    for step in workload:
        if isinstance(step, CaptureStep):
            yield from steps_in_order(step.capture)
        yield step


class Scenario(Closed):
    """One scenario, complete: what to run, on what, and what must be seen.

    ``id`` is stable: ``stem[key=value,…]``, without the lane. ``path``,
    ``line`` and ``column`` are the place in the file it came from: the top
    key, or the first axis's value. ``matrix`` maps each axis to the name of
    its value in this scenario.
    """

    id: str
    path: str
    line: int
    column: int = 1
    title: str
    source: str | None = None
    topology: Topology
    ranks: Annotated[int, Field(ge=1, le=limits.RANKS)]
    subject: Subject
    workspace: WorkspaceSpec = WorkspaceSpec()
    workload: tuple[Step, ...] = DEFAULT_WORKLOAD
    faults: tuple[Fault, ...] = ()
    expect: Expect = Expect()
    budget: Budget = Budget()
    lanes: tuple[Lane, ...] = ("sim", "gpu")
    matrix: dict[str, Any] = Field(default_factory=dict)

    @property
    def steps(self) -> int:
        """How many steps the workload has, each one inside a capture counted too."""
        return sum(1 for _ in steps_in_order(self.workload))


CaptureStep.model_rebuild()
