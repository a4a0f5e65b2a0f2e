"""What every seam shares: the injector, the machine, and how to put itself in place.

A seam replaces functions of a library in this process, which runs one scenario
and ends; nothing is ever put back. To add one: write ``install(seam)`` in a
module of its own and name it in ``faultlab/seam/install.py``.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from faultlab.errors import UnknownCall
from faultlab.injector import Context, Injector
from faultlab.machine.base import Machine
from faultlab.rank.link import Link
from faultlab.scenario.models import Scenario


@dataclass
class Seam:
    """What the functions at the seam need."""

    scenario: Scenario
    rank: int
    machine: Machine
    injector: Injector
    context: Context
    link: Link
    #: How often creation was asked for, by the back end that was named: the same
    #: number on every rank, also on one whose creation was struck.
    creations: Counter[str] = field(default_factory=Counter)
    _unknown: set[str] = field(default_factory=set)

    def unknown(self, name: str) -> UnknownCall:
        """Record a call nobody here can answer; the error to raise for it."""
        if name not in self._unknown:
            self._unknown.add(name)
            self.link.emit("unknown-call", name=name)
        return UnknownCall(f"the {self.machine.name} machine does not know {name}")

    def refuse(self, name: str) -> Any:
        """A function that stands for a call nobody here can answer."""

        def unknown_call(*args: Any, **kwargs: Any) -> Any:
            raise self.unknown(name)

        unknown_call.__name__ = name.rsplit(".", 1)[-1]
        return unknown_call
