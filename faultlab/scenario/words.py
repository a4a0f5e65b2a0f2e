"""The words a file may use, and what to say when it uses another one.

Pure look-ups: codes by name or number, sites, subjects, exceptions. Each
function gives the right word or a ``Wrong``: what to say and what to suggest.
"""

from __future__ import annotations

import builtins
import difflib
import functools
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from faultlab import codes
from faultlab.scenario.invariants import INVARIANTS
from faultlab.sites import ATTRIBUTES, SITES, Site

#: The subjects that have a name of their own. ``canary:…`` and ``package.module:callable`` come besides.
SUBJECTS: Final = (
    "flashinfer",
    "reference",
    "hardened",
    "vllm",
    "sglang",
    "torch-symm-mem",
    "trtllm-contract",
)
_CALLABLE: Final = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*\Z", re.ASCII)
_CANARY: Final = re.compile(r"canary:(?P<invariant>[a-z_]+)(-[A-Za-z0-9_.-]+)?\Z")
_LISTED_MAX: Final = 14


@dataclass(frozen=True)
class Wrong:
    """Why a word cannot stand here, and what could."""

    message: str
    hint: str = ""


def nearest(word: str, known: Iterable[str], *, cutoff: float = 0.6) -> str:
    """The known word that is most like this one; empty if none is."""
    by_lower = {each.lower(): each for each in known}
    found = difflib.get_close_matches(word.lower()[:200], list(by_lower), n=1, cutoff=cutoff)
    return by_lower[found[0]] if found else ""


def suggestion(word: str, known: Iterable[str]) -> str:
    """A hint: the nearest known word, or all of them where they are few."""
    words = list(known)
    found = nearest(word, words)
    if found:
        return f"did you mean {found!r}?"
    return f"known here: {', '.join(words)}" if 0 < len(words) <= _LISTED_MAX else ""


def listed(words: Iterable[str]) -> str:
    """``a, b or c``."""
    found = list(words)
    if len(found) < 2:
        return "".join(found)
    return f"{', '.join(found[:-1])} or {found[-1]}"


def site_of(text: str) -> Site | Wrong:
    """The site that ``at`` names, with or without an argument."""
    name, opened, rest = text.partition("(")
    site = SITES.get(name)
    if site is None:
        # Its library left out: cudaMalloc for cudart.cudaMalloc.
        whole = [each for each in SITES if each.endswith(f".{name}")] if name else []
        hint = suggestion(name, whole or SITES) or "'faultlab sites' lists them"
        return Wrong(f"no site is called {name[:80]!r}", hint)
    if not opened:
        return site
    argument = rest.removesuffix(")")
    if name != "cuDeviceGetAttribute":
        return Wrong(f"{name} takes no argument here", f"write {name}")
    if not rest.endswith(")") or argument not in ATTRIBUTES:
        return Wrong(
            f"no attribute is called {argument[:80]!r}",
            suggestion(argument.removeprefix("CU_DEVICE_ATTRIBUTE_"), ATTRIBUTES),
        )
    return site


def code_of(site: Site, code: str | int) -> str | Wrong:
    """The name of a code that the site can return, from its name or number."""
    table = codes.NVML if site.domain == "nvml" else codes.CUDA
    can = f"it can return {listed(site.errors)}" if site.errors else "it returns no code; use raise"
    if isinstance(code, int):
        name = next((name for name, number in table.items() if number == code), "")
        if not name:
            return Wrong(f"no code has the number {code}", can)
    else:
        name = code
    if name in site.errors:
        return name
    if name in codes.CUDA or name in codes.NVML:
        return Wrong(f"{site.name} cannot return {name}", can)
    found = nearest(name, site.errors)
    return Wrong(f"no code is called {name[:80]!r}", f"did you mean {found!r}?" if found else can)


def sticky_of(code: str) -> str | Wrong:
    """A code that poisons a context."""
    if code in codes.STICKY:
        return code
    known = sorted(codes.STICKY)
    if code in codes.CUDA:
        return Wrong(f"{code} does not poison a context", f"these do: {listed(known)}")
    return Wrong(f"no code is called {code[:80]!r}", suggestion(code, known))


def exception_of(name: str) -> type[Exception] | Wrong:
    """The class of an exception that ships with Python and is made from a message alone."""
    known = _exceptions()
    found = known.get(name)
    if found is not None:
        return found
    hint = suggestion(name, known) or "RuntimeError, OSError, MemoryError, TimeoutError, ValueError, …"
    if isinstance(getattr(builtins, name, None), type):
        return Wrong(f"{name} cannot be raised by a fault", hint)
    return Wrong(f"no built-in exception is called {name[:80]!r}", hint)


@functools.lru_cache(maxsize=1)
def _exceptions() -> dict[str, type[Exception]]:
    return {
        name: kind
        for name, kind in vars(builtins).items()
        if isinstance(kind, type) and issubclass(kind, Exception) and _takes_a_message(kind)
    }


def _takes_a_message(kind: type[Exception]) -> bool:
    try:
        kind("a message")
    except TypeError:
        return False
    return True


def subject_of(name: str) -> str | Wrong:
    """The name of a subject. Nothing is imported: a callable is believed."""
    if name in SUBJECTS:
        return name
    if name.startswith("canary:"):
        match = _CANARY.match(name)
        if match is not None and match["invariant"] in INVARIANTS:
            return name
        invariant = name.removeprefix("canary:").partition("-")[0]
        return Wrong(f"no invariant is called {invariant[:80]!r}", suggestion(invariant, INVARIANTS))
    if _CALLABLE.match(name):
        return name
    hint = suggestion(name, SUBJECTS)
    return Wrong(f"no subject is called {name[:80]!r}", f"{hint} (or package.module:callable)")
