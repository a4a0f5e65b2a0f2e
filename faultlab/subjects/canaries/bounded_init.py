"""Canaries of ``bounded_init``: a rank waits for a peer that will not come, or for too long."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from faultlab.subjects.canaries.base import Canary
from faultlab.subjects.preflight import StepFailed
from faultlab.subjects.reference import WorkspaceUnavailable


class NoPreflight(Canary):
    """Walks into FlashInfer's sequence without asking whether every rank can: the rank
    that cannot add its device leaves its peers inside the driver (pytorch#195596)."""

    seed = "multicast-call-refused[case=add-device,faults.0.ranks=one,ranks=2]"
    breaks = frozenset({"bounded_init"})

    def preflight(self, backend: str) -> None:
        return


class _Escapes(Canary):
    """What ``_handles`` does not know leaves ``create`` before the vote, where the peers
    wait for it. Whoever called sees it again at each call."""

    _escaped: tuple[type[Exception], str] | None = None

    def _handles(self, error: Exception) -> bool:
        raise NotImplementedError

    def create(self) -> Any:
        if self._escaped is not None:
            kind, text = self._escaped
            raise kind(text)
        return super().create()

    def _voted(self, name: str, make: Callable[[], Any]) -> Any:
        def handled() -> Any:
            if problem:
                raise RuntimeError(problem)
            return workspace

        workspace, problem = None, ""
        try:
            workspace = make()
        except Exception as error:
            if not self._handles(error):
                self._escaped = (type(error), str(error))
                raise
            problem = f"{type(error).__name__}: {error}"
        return super()._voted(name, handled)


class CatchesOneClass(_Escapes):
    """Catches RuntimeError alone; whatever else creation raises escapes on the rank that
    met it (TensorRT-LLM#18270's review, vllm#33274)."""

    seed = "multicast-exception[effect=no-words,case=mocked-one,ranks=2]"
    breaks = frozenset({"bounded_init"})

    def _handles(self, error: Exception) -> bool:
        return isinstance(error, RuntimeError)


class MatchesTheWording(_Escapes):
    """Falls back where the text names multicast, as the first report had it; every other
    text escapes on the rank that met it (vllm#37662)."""

    seed = "multicast-exception[effect=illegal-state,case=mocked-one,ranks=2]"
    breaks = frozenset({"bounded_init"})
    #: What escapes on every rank is no refusal that whoever ordered can expect.
    also_breaks = frozenset({"user_choice"})

    def _handles(self, error: Exception) -> bool:
        return any(words in str(error).lower() for words in ("multicast", "not supported"))


class RefusesAlone(Canary):
    """The rank whose own probe says no refuses at once, and its peers are in the first
    vote by then (local-inference-lab/vllm#618, vllm's custom all-reduce)."""

    seed = "probe-wrong-on-one-rank[ranks=2,faults.0.ranks=one]"
    breaks = frozenset({"bounded_init"})

    def create(self) -> Any:
        from flashinfer.comm.mnnvl import is_multicast_supported

        if not is_multicast_supported(self._environment.device.index):
            raise WorkspaceUnavailable("this rank has no multicast")
        return super().create()


class RetriesUntilReady(Canary):
    """Takes "the system is not ready" for something that passes, and asks again and again:
    its peers' start-up takes as long (vllm#51986, 30 s a try)."""

    seed = "multicast-call-refused[case=bind-802,faults.0.ranks=one,ranks=2]"
    breaks = frozenset({"bounded_init"})

    def preflight(self, backend: str) -> None:
        for _ in range(4):
            try:
                return super().preflight(backend)
            except StepFailed:
                continue
        return super().preflight(backend)


CANARIES: dict[str, type[Canary]] = {
    "no-preflight": NoPreflight,
    "catches-one-class": CatchesOneClass,
    "matches-the-wording": MatchesTheWording,
    "refuses-alone": RefusesAlone,
    "retries-until-ready": RetriesUntilReady,
}
