"""What every seam shares: the injector, the machine, and how to put itself in place.

A seam replaces functions of a library in this process, which runs one scenario
and ends; nothing is ever put back. To add one: write ``install(seam)`` in a
module of its own and name it in ``faultlab/seam/install.py``. ``install`` may run
before a fork and before anybody knows the scenario: what it puts in place asks
``seam`` when it is called, never before.
"""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from faultlab.errors import UnknownCall
from faultlab.injector import Context, Injector
from faultlab.machine.base import Machine
from faultlab.rank.link import Link
from faultlab.scenario.models import Scenario


class Groups:
    """How many collectives this rank has entered in each group, and which."""

    def __init__(self) -> None:
        self._entered: dict[str, list[str]] = {}
        self._lock = threading.Lock()
        #: The groups that the subject made for the host alone.
        self.on_host: set[str] = set()

    def enter(self, group: str, name: str) -> int:
        """The number, from 1, of the collective that is entered now."""
        with self._lock:
            operations = self._entered.setdefault(group, [])
            operations.append(name)
            return len(operations)

    def sequence(self) -> dict[str, list[str]]:
        """Every collective so far, per group, in order."""
        with self._lock:
            return {name: list(operations) for name, operations in self._entered.items()}


@dataclass
class Seam:
    """What the functions at the seam need, from ``enter`` on."""

    scenario: Scenario = field(init=False)
    rank: int = field(init=False)
    machine: Machine = field(init=False)
    injector: Injector = field(init=False)
    context: Context = field(init=False)
    link: Link = field(init=False)
    groups: Groups = field(default_factory=Groups)
    #: How often creation was asked for, by the back end that was named: the same
    #: number on every rank, also on one whose creation was struck.
    creations: Counter[str] = field(default_factory=Counter)
    _unknown: set[str] = field(default_factory=set)

    def enter(
        self,
        *,
        scenario: Scenario,
        rank: int,
        machine: Machine,
        injector: Injector,
        context: Context,
        link: Link,
    ) -> None:
        """This process is ``rank`` of a run of ``scenario`` from now on."""
        self.scenario, self.rank, self.machine = scenario, rank, machine
        self.injector, self.context, self.link = injector, context, link

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
