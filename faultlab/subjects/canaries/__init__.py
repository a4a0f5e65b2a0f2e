"""The canaries: consumers broken on purpose, each in one way, to prove that the lab sees it.

Every canary is ``reference`` (or ``hardened``) with one mistake that users met in
real consumers, told in its docstring with the report it comes from. ``breaks``
is the exact set of invariants it breaks on the scenario that ``seed`` names, and
a test compares the two, so that an oracle that cannot fail is found out;
``benchmarks/canaries.py`` does so over all seeds.

To add one: write a class with its one mistake in the module of its invariant,
declare ``seed`` and ``breaks``, and name its variant in the module's ``CANARIES``.
Its name is then ``<invariant>-<variant>``.
"""

from __future__ import annotations

from importlib import import_module

from faultlab.scenario.invariants import INVARIANTS
from faultlab.subjects.canaries.base import Canary


def _found() -> dict[str, type[Canary]]:
    found: dict[str, type[Canary]] = {}
    for invariant in INVARIANTS:
        for variant, canary in import_module(f"{__name__}.{invariant}").CANARIES.items():
            found[f"{invariant}-{variant}"] = canary
    return found


#: By name, without ``canary:``.
CANARIES: dict[str, type[Canary]] = _found()
