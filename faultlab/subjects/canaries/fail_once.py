"""Canaries of ``fail_once``: a failure is not remembered."""

from __future__ import annotations

from typing import Any

from faultlab.subjects.canaries.base import Canary

_NO_RUNG_LEFT = "creation-exception[topology=pcie-4,ranks=2,case=mocked-all]"


class RetriesPerCall(Canary):
    """Forgets what failed, and tries it again at the next call (vllm#51986: 20 creations
    in 10 calls)."""

    seed = _NO_RUNG_LEFT
    breaks = frozenset({"fail_once"})

    def create(self) -> Any:
        self._failed.clear()
        return super().create()


class RetriesAtOnce(Canary):
    """Tries a rung three times before it goes on, as if the driver might change its mind
    (vllm#51986)."""

    seed = _NO_RUNG_LEFT
    breaks = frozenset({"fail_once"})
    #: Where the second try works, it had already said that the rung is not used.
    also_breaks = frozenset({"clear_log"})

    def _try(self, backend: str) -> bool:
        return any(super(RetriesAtOnce, self)._try(backend) for _ in range(3))


class ForgetsThePreflight(Canary):
    """Remembers a creation that failed, but not a preflight: every call allocates, exchanges
    and votes once more (tokenspeed#925: the probe's answer is to be kept)."""

    seed = "out-of-memory[topology=pcie-4,ranks=2]"
    breaks = frozenset({"fail_once"})

    def create(self) -> Any:
        for backend, why in list(self._failed.items()):
            if why.startswith("preflight"):
                del self._failed[backend]
        return super().create()


CANARIES: dict[str, type[Canary]] = {
    "retries-per-call": RetriesPerCall,
    "retries-at-once": RetriesAtOnce,
    "forgets-the-preflight": ForgetsThePreflight,
}
