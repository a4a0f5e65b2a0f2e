"""Whether a text names a call, an error and a rank, whatever its wording.

Promise: lenient, because how a message is worded is the subject's business. A
call is named by its name or by one word of it (``cuMulticastBindMem`` by
"multicast" or "binding"); an error by its name, in whatever spelling
(``CUDA_ERROR_NOT_SUPPORTED``, ``cudaErrorNotSupported``, "not supported"), by its
number, or by the words of the library's own text; a rank by its number after
such a word as "rank", alone or in a list. Used by ``clear_log`` alone.
"""

from __future__ import annotations

import re
from typing import Final

from faultlab.codes import CUDA, ERROR_TEXT, NVML, NVML_TEXT

#: Parts of a function's name that say nothing of what it does.
_NOTHING: Final = frozenset(
    {
        "cu",
        "cuda",
        "cudart",
        "nvml",
        "comm",
        "fd",
        "device",
        "get",
        "set",
        "mem",
        "ctx",
        "from",
        "to",
        "primary",
    }
)
#: What a workspace's creation is called besides "create".
_CREATION: Final = ("creat", "workspace", "initiali", "set up", "setup", "set-up")
#: How the exchange of descriptors, which a consumer sees as one, is called.
_EXCHANGE: Final = ("descriptor", "exchange", "socket", "handle")

_PART = re.compile(r"[A-Z]?[a-z]+|[A-Z0-9]+(?![a-z])")
_RANKS = re.compile(
    r"(?:ranks?|worker|process|(?:\b|_)tp)[^a-z0-9]{0,3}(\d{1,9}(?:(?:\s*[-,;&]\s*|\s+and\s+)\d{1,9})*)"
)


def names_call(text: str, site: str, *, inside_creation: bool) -> bool:
    """Whether ``text`` says which call failed. What FlashInfer's creation called by
    itself may be named by that creation: it is all that its caller sees."""
    lowered = text.lower()
    words = [part.lower() for part in _PART.findall(site.rpartition(".")[2])]
    # "creat" and "connec" are in "creation" and "connecting" too.
    stems = [word.removesuffix("e") for word in words if word not in _NOTHING and len(word) > 2]
    if site.startswith("workspace.create") or inside_creation:
        stems += _CREATION
    if site.startswith("fd."):
        stems += _EXCHANGE
    return _squeezed(site) in _squeezed(text) or any(stem in lowered for stem in stems)


def names_error(text: str, code: str) -> bool:
    """Whether ``text`` names the error ``code``, a name of ``codes``."""
    number = CUDA.get(code, NVML.get(code))
    words = re.sub(r"^(CUDA|NVML)_ERROR_", "", code)
    if _squeezed(words) in _squeezed(text):
        return True
    if number is None:
        return False
    told = NVML_TEXT.get(number, "") if code in NVML else ERROR_TEXT.get(number, "")
    return (bool(told) and told.lower() in text.lower()) or _has_number(text, number)


def names_exception(text: str, kind: str, message: str) -> bool:
    """Whether ``text`` names an exception, by its class or by what it says."""
    says = _squeezed(message)[:60]
    return _squeezed(kind) in _squeezed(text) or (bool(says) and says in _squeezed(text))


def names_rank(text: str, ranks: set[int]) -> bool:
    """Whether ``text`` names one of ``ranks``."""
    for listed in _RANKS.findall(text.lower()):
        for first, last in re.findall(r"(\d+)(?:\s*[-]\s*(\d+))?", listed):
            if any(int(first) <= rank <= int(last or first) for rank in ranks):
                return True
    return False


def _has_number(text: str, number: int) -> bool:
    """A small number stands for an error only beside a word that says so."""
    if number >= 100:
        return re.search(rf"(?<!\d){number}(?!\d)", text) is not None
    before = r"(?:code|error|err|status|result|returned|=|:|\()"
    return re.search(rf"{before}\s*[=:#(]?\s*{number}(?!\d)", text, re.IGNORECASE) is not None


def _squeezed(text: str) -> str:
    """Letters and digits alone, in lower case: all spellings of a name are one."""
    return re.sub(r"[^a-z0-9]", "", text.lower())
