"""Collects what is wrong with one file, so that a person sees all of it at once."""

from __future__ import annotations

from typing import Final

from faultlab.errors import ScenarioError, ScenarioErrors
from faultlab.scenario.yamlnodes import Document, Node

#: Past this many, the rest is counted, not shown.
SHOWN: Final = 25


class Problems:
    """The mistakes of one file. At most one is kept for each place.

    One mistake in the file shows in every combination of its matrix, and one
    wrong value breaks more than one rule: the first word about a place is kept.
    """

    def __init__(self, document: Document) -> None:
        self.document = document
        self._found: dict[tuple[str, int, int], ScenarioError] = {}
        #: How many were reported, the repeated ones counted too.
        self.reports = 0

    def __len__(self) -> int:
        return len(self._found)

    def add(self, node: Node, message: str, *, hint: str = "", at_key: bool = False) -> None:
        """A mistake at a node of this file, or at its key."""
        self.adopt(self.document.error(message, node, hint=hint, at_key=at_key))

    def adopt(self, error: ScenarioError) -> None:
        """A mistake that was found elsewhere, perhaps in another file."""
        for each in error.errors if isinstance(error, ScenarioErrors) else [error]:
            self.reports += 1
            self._found.setdefault((each.path, each.line, each.column), each)

    def raise_if_any(self) -> None:
        """Raise ScenarioErrors with everything found, in the order of the lines."""
        if self._found:
            raise ScenarioErrors(bounded(list(self._found.values()), self.document.path))


def bounded(errors: list[ScenarioError], first: str = "") -> list[ScenarioError]:
    """The errors in reading order, those of the file ``first`` first, the rest of too many counted."""
    ordered = sorted(errors, key=lambda each: (each.path != first, each.path, each.line, each.column))
    if len(ordered) <= SHOWN:
        return ordered
    rest = len(ordered) - SHOWN
    return [*ordered[:SHOWN], ScenarioError(f"and {rest} more mistakes", path=first)]
