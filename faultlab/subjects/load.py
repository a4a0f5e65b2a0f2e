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
    "reference": "faultlab.subjects.reference:Reference",
}

#: Named in the design, not there yet; a scenario that asks for one is skipped.
NOT_BUILT = ("hardened", "vllm", "sglang", "torch-symm-mem", "trtllm-contract")


def missing_reason(named: Named) -> str:
    """Why this subject cannot be run here; empty if it can."""
    if named.name in NOT_BUILT or named.name.startswith("canary:"):
        return f"the subject {named.name!r} is not built yet"
    if named.name in BUILT_IN and (named.version or named.flashinfer or named.depth):
        return f"versions of {named.name!r} in environments of their own are not built yet"
    return ""


def load_subject(named: Named, environment: Environment) -> Subject:
    """Import the subject and make it. Raises SubjectError with the reason."""
    target = BUILT_IN.get(named.name, named.name)
    module_name, _, attribute = target.partition(":")
    if not attribute:
        raise SubjectError(f"{named.name!r} is neither a known subject nor package.module:callable")
    try:
        make = cast("Callable[[Environment], Any]", getattr(importlib.import_module(module_name), attribute))
        subject = make(environment)
    except Exception as error:
        raise SubjectError(f"{named.name} could not be loaded: {type(error).__name__}: {error}") from error
    absent = [name for name in _METHODS if not callable(getattr(subject, name, None))]
    if absent:
        raise SubjectError(f"{named.name} lacks the methods {', '.join(absent)}")
    for name, default in (("declared_errors", ()), ("logs", False)):
        if not hasattr(subject, name):
            setattr(subject, name, default)
    return cast("Subject", subject)
