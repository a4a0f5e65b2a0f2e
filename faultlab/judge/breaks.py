"""Known breaks: which entries of ``expect.breaks`` hold for the subject that ran.

Promise: ``vllm>=0.25,<0.27, reference`` means vllm in that range, or reference.
A part that begins with a name opens an entry, one that is only a version bound
narrows the entry before it. A bound on a version that nobody knows never holds.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.version import InvalidVersion, Version

from faultlab.errors import LabError
from faultlab.scenario.models import Break, Subject

_PART: Final = re.compile(
    r"(?P<name>[A-Za-z][\w.:-]*?)?\s*(?P<bound>((<=?|>=?|===?|!=|~=)\s*[\w.+!*-]+)?)\Z", re.ASCII
)
#: The package whose version a subject's own name stands for.
_PACKAGES: Final = {"flashinfer": "flashinfer-python", "torch-symm-mem": "torch"}


def expected_breaks(breaks: dict[str, Break], subject: Subject, versions: dict[str, str]) -> dict[str, Break]:
    """The breaks that are expected of this subject; entries for others are left out."""
    return {name: each for name, each in breaks.items() if holds_for(each.subjects, subject, versions)}


def holds_for(specifier: str | None, subject: Subject, versions: dict[str, str]) -> bool:
    """Whether a ``subjects`` text names this subject in this version. Raises LabError if it is no such text."""
    if specifier is None:
        return True
    return any(
        name == subject.name and _within(bounds, version_of(subject, versions))
        for name, bounds in _entries(specifier)
    )


def version_of(subject: Subject, versions: dict[str, str]) -> str:
    """The subject's version: what the scenario says, else what the run recorded; empty if nobody knows."""
    if subject.version is not None:
        return subject.version
    if subject.name == "flashinfer" and subject.flashinfer is not None:
        return subject.flashinfer
    return versions.get(_PACKAGES.get(subject.name, subject.name), "")


def _entries(specifier: str) -> Iterator[tuple[str, list[str]]]:
    name, bounds = "", list[str]()
    for part in specifier.split(","):
        match = _PART.match(part.strip())
        if match is None or not (match["name"] or (name and match["bound"])):
            raise LabError(f"{specifier!r}: {part.strip()!r} names no subject")
        if match["name"]:
            if name:
                yield name, bounds
            name, bounds = match["name"], []
        if match["bound"]:
            bounds.append(match["bound"])
    yield name, bounds


def _within(bounds: list[str], version: str) -> bool:
    if not bounds:
        return True
    try:
        return SpecifierSet(",".join(bounds)).contains(Version(version), prereleases=True)
    except (InvalidVersion, InvalidSpecifier):
        return False
