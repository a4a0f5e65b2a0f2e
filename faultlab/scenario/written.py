"""A scenario file as a person writes it: what may be left out is left out.

``load`` reads a file as ``WrittenScenario``, after its matrix was applied, and
makes a ``Scenario`` of it, in which every field has its value. The JSON Schema
is derived from these models.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Discriminator, Field, Tag

from faultlab import limits
from faultlab.scenario.models import Budget, Closed, Expect, Fault, Lane, Step, Subject, WorkspaceSpec
from faultlab.topology.models import Does, Gpus, Links, Says

#: A number and not a literal: ``true`` equals 1, and 1.0 does.
FormatVersion = Annotated[int, Field(ge=1, le=1)]
#: A name of a topology or an overlay: the stem of a file, never a path.
NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9_-]*$"
Name = Annotated[str, Field(pattern=NAME_PATTERN, max_length=100)]


class PresetTopology(Closed):
    """A topology by name, and the states laid over it, the first one lowest."""

    preset: Name
    overlay: Annotated[
        Annotated[Name, Tag("<word>")]
        | Annotated[list[Name], Field(min_length=1, max_length=16), Tag("<list>")],
        Discriminator(lambda value: "<list>" if isinstance(value, list) else "<word>"),
    ] = Field(default_factory=list)


class InlineTopology(Closed):
    """A topology written out, with the keys of a topology file."""

    name: Name = "inline"
    title: str = ""
    source: str = ""
    nodes: Annotated[int, Field(ge=1, le=limits.GPUS)] = 1
    gpus: Gpus
    links: Links
    says: Says
    does: Does


def _kind_of_topology(value: Any) -> str | None:
    if isinstance(value, str):
        return "<word>"
    if isinstance(value, dict):
        return "<preset>" if "preset" in value or "overlay" in value else "<inline>"
    return None


def _kind_of_subject(value: Any) -> str | None:
    if isinstance(value, str):
        return "<word>"
    return "<mapping>" if isinstance(value, dict) else None


WrittenTopology = Annotated[
    Annotated[Name, Tag("<word>")]
    | Annotated[PresetTopology, Tag("<preset>")]
    | Annotated[InlineTopology, Tag("<inline>")],
    Discriminator(_kind_of_topology),
]
WrittenSubject = Annotated[
    Annotated[str, Field(min_length=1), Tag("<word>")] | Annotated[Subject, Tag("<mapping>")],
    Discriminator(_kind_of_subject),
]


class WrittenScenario(Closed):
    """The top of a scenario file."""

    faultlab: FormatVersion
    title: Annotated[str, Field(min_length=1)]
    source: str | None = None
    topology: WrittenTopology
    ranks: Annotated[int | None, Field(ge=1, le=limits.RANKS)] = None
    subject: WrittenSubject
    workspace: WorkspaceSpec = WorkspaceSpec()
    workload: Annotated[list[Step], Field(min_length=1, max_length=limits.STEPS_PER_WORKLOAD)] | None = None
    faults: Annotated[list[Fault], Field(max_length=limits.FAULTS_PER_SCENARIO)] = Field(default_factory=list)
    expect: Expect = Expect()
    budget: Budget = Budget()
    lanes: Annotated[list[Lane], Field(min_length=1, max_length=2)] | None = None
    matrix: dict[str, Any] = Field(default_factory=dict)
