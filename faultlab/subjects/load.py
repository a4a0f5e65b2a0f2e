"""From a subject's name to an object with its methods."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, cast

from faultlab.errors import SubjectError
from faultlab.scenario.models import Subject as Named
from faultlab.subjects.base import Environment, Subject

_METHODS = ("create", "use", "collective", "destroy", "exit")

#: The subjects that ship with the lab, by where they are.
BUILT_IN = {
    "flashinfer": "faultlab.subjects.flashinfer:FlashInfer",
    "hardened": "faultlab.subjects.hardened:Hardened",
    "reference": "faultlab.subjects.reference:Reference",
}

#: Named in the design, not there yet; a scenario that asks for one is skipped.
NOT_BUILT = ("vllm", "sglang", "torch-symm-mem", "trtllm-contract")


CANARY = "canary:"


def canaries() -> dict[str, Callable[[Environment], Any]]:
    """The canaries by their names."""
    from faultlab.subjects.canaries import CANARIES

    return dict(CANARIES)


def missing_reason(named: Named) -> str:
    """Why this subject cannot be run here; empty if it can."""
    if named.name in NOT_BUILT:
        return f"the subject {named.name!r} is not built yet"
    if named.name.startswith(CANARY) and named.name.removeprefix(CANARY) not in canaries():
        return f"there is no such canary; there are {', '.join(sorted(canaries()))}"
    if named.name in BUILT_IN and (named.version or named.flashinfer or named.depth):
        return f"versions of {named.name!r} in environments of their own are not built yet"
    return ""


def _callable(name: str) -> Callable[[Environment], Any]:
    """What makes the subject of this name."""
    if name.startswith(CANARY):
        return canaries()[name.removeprefix(CANARY)]
    module_name, _, attribute = BUILT_IN.get(name, name).partition(":")
    if not attribute:
        raise SubjectError(f"{name!r} is neither a known subject nor package.module:callable")
    found = getattr(importlib.import_module(module_name), attribute)
    return cast("Callable[[Environment], Any]", found)


def load_subject(named: Named, environment: Environment) -> Subject:
    """Import the subject and make it. Raises SubjectError with the reason."""
    try:
        subject = _callable(named.name)(environment)
    except SubjectError:
        raise
    except Exception as error:
        raise SubjectError(f"{named.name} could not be loaded: {type(error).__name__}: {error}") from error
    absent = [name for name in _METHODS if not callable(getattr(subject, name, None))]
    if absent:
        raise SubjectError(f"{named.name} lacks the methods {', '.join(absent)}")
    defaults = {"declared_errors": (), "logs": False, "ladder": (), "own_sequence": False}
    for name, default in defaults.items():
        if not hasattr(subject, name):
            setattr(subject, name, default)
    return cast("Subject", subject)
