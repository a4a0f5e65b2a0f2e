"""What every canary declares, and the plain scenario it runs on."""

from __future__ import annotations

from typing import Any, ClassVar, Final

from faultlab.subjects.reference import Reference

#: Keys of the scenario file that provoke a canary, over a plain one with mocked creation.
Provocation = dict[str, Any]

NULL_POINTER: Final[Provocation] = {"faults": [{"at": "workspace.mc_ptr", "effect": {"value": 0}}]}
CREATION_FAILS: Final[Provocation] = {
    "faults": [{"at": "workspace.create", "effect": {"error": "CUDA_ERROR_NOT_SUPPORTED"}}]
}
SHORT: Final[Provocation] = {"workload": ["create", "destroy", "exit"]}


class Canary(Reference):
    """What every canary declares."""

    breaks: ClassVar[frozenset[str]]
    scenario: ClassVar[Provocation] = {}
