"""What every canary declares."""

from __future__ import annotations

from typing import ClassVar

from faultlab.subjects.reference import Reference


class Canary(Reference):
    """``reference`` with one mistake.

    ``seed``: the id of the scenario in ``scenarios/seed`` that shows it, without
    the lane. ``breaks``: exactly what it breaks there. ``also_breaks``: what else the
    same mistake breaks on other seeds; each canary that has any says why.
    """

    seed: ClassVar[str]
    breaks: ClassVar[frozenset[str]]
    also_breaks: ClassVar[frozenset[str]] = frozenset()
