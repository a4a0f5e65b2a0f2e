"""The fault injector: between the seams and the machine, knowing neither.

A seam hands over each call with the way its library reports an error; the
injector records it, decides whether a fault strikes, and either lets the real
call happen, changes it, or keeps it from happening. ``fired`` counts are in
the events, never in the scenario's word.
"""

from __future__ import annotations

import builtins
import itertools
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

from faultlab.codes import CUDA, NVML
from faultlab.machine.base import Machine, Touched
from faultlab.rank.link import Link
from faultlab.scenario.models import Effect, Fault
from faultlab.scenario.selectors import ranks_of, strikes
from faultlab.sites import SITES, split_site

#: A wait as the events describe it, or None.
WaitFields = dict[str, Any] | None


class Convention(Protocol):
    """How a library reports an error: by returning it or by raising it."""

    def fail(self, site: str, code: str) -> Any:
        """Return what the library's function would return, or raise."""
        ...

    def result_name(self, result: Any) -> str:
        """``ok`` or the name of the error in what a call returned."""
        ...


@dataclass
class Context:
    """Where the rank is: which phase, which window, inside the lab or not."""

    phase: str = ""
    window: str = "preflight"
    counting: bool = False
    phase_serial: int = 0
    window_serial: int = 0
    _inside: threading.local = field(default_factory=threading.local)

    @contextmanager
    def in_phase(self, phase: str) -> Iterator[None]:
        """The subject's step runs: create, use or destroy."""
        before = self.phase
        self.phase, self.phase_serial = phase, self.phase_serial + 1
        self.counting = self.counting or phase == "create"
        try:
            yield
        finally:
            self.phase = before

    @contextmanager
    def in_window(self, window: str) -> Iterator[None]:
        """The set-up, use or destruction of one back end runs, or a preflight."""
        before = self.window
        if window != before:
            self.window, self.window_serial = window, self.window_serial + 1
        try:
            yield
        finally:
            if window != before:
                self.window, self.window_serial = before, self.window_serial + 1

    @contextmanager
    def in_lab(self) -> Iterator[None]:
        """The lab's own probes run: not counted, never struck."""
        depth = getattr(self._inside, "lab", 0)
        self._inside.lab = depth + 1
        try:
            yield
        finally:
            self._inside.lab = depth

    @property
    def lab(self) -> bool:
        """Whether the calling thread runs the lab's own code."""
        return getattr(self._inside, "lab", 0) > 0


class Armed:
    """One fault of the scenario that strikes this rank, and its counter."""

    def __init__(self, index: int, fault: Fault, rank: int) -> None:
        self.index = index
        self.fault = fault
        self.site, self.argument = split_site(fault.at)
        self._rank = rank
        self._count = 0
        self._window: tuple[int, int] = (-1, -1)

    def meets(self, site: str, argument: str, context: Context) -> bool:
        """Whether the fault strikes this call; counts the call if it is in its window."""
        if site != self.site or (self.argument and argument != self.argument):
            return False
        fault = self.fault
        if fault.during not in ("any", context.window) or fault.phase not in ("any", context.phase):
            return False
        window = (
            context.window_serial if fault.during != "any" else 0,
            context.phase_serial if fault.phase != "any" else 0,
        )
        if window != self._window:
            self._window, self._count = window, 0
        self._count += 1
        return strikes(fault.calls, self._count, self._rank)


@dataclass
class OneCall:
    """One call at a site: how it is made, and what it touched once it was."""

    identity: int
    site: str
    real: Callable[[], Any]
    convention: Convention
    wait: Callable[[], WaitFields] | None
    refers: tuple[Any, ...] | None
    replace: Callable[[Any], Any] | None
    touched: Touched = field(default_factory=Touched)


class Injector:
    """Records every call at a site and strikes those the scenario names."""

    def __init__(
        self,
        *,
        rank: int,
        world_size: int,
        gpus_per_node: int,
        faults: tuple[Fault, ...],
        link: Link,
        machine: Machine,
        context: Context,
    ) -> None:
        self.link = link
        self.machine = machine
        self.context = context
        self._identities = itertools.count()
        self._calls: dict[str, int] = {}
        self._lock = threading.Lock()
        self._armed = [
            Armed(index, fault, rank)
            for index, fault in enumerate(faults)
            if rank in ranks_of(fault.ranks, world_size, gpus_per_node)
        ]

    def new_identity(self) -> int:
        """A number for one call, unique in the rank."""
        return next(self._identities)

    def strike(self, site: str, argument: str = "") -> list[Armed]:
        """The faults that strike this call of the subject; counts it."""
        if self.context.lab or not self.context.counting:
            return []
        with self._lock:
            return [armed for armed in self._armed if armed.meets(site, argument, self.context)]

    def call(
        self,
        site: str,
        real: Callable[[], Any],
        convention: Convention,
        *,
        argument: str = "",
        wait: Callable[[], WaitFields] | None = None,
        refers: tuple[Any, ...] | None = None,
        replace: Callable[[Any], Any] | None = None,
    ) -> Any:
        """Make one call of ``site``, struck or not.

        ``real`` makes it below; ``wait`` says what it waits for, asked only when
        the real call is made; ``refers`` are its arguments, kept when a release
        is struck; ``replace`` turns an effect's value into what is returned.
        """
        call = OneCall(self.new_identity(), site, real, convention, wait, refers, replace)
        struck = self.strike(site, argument)
        self._enter(call.identity, site, argument)
        try:
            result = self._perform(call, struck)
        except BaseException as error:
            self._leave_raised(call.identity, site, error)
            raise
        self._leave(call, convention.result_name(result), result)
        return result

    # ------------------------------------------------------------- one call

    def _perform(self, call: OneCall, struck: list[Armed]) -> Any:
        for armed in struck:
            effect = armed.fault.effect
            if effect.when == "before" and effect.kind != "value":
                self._fired(armed, call, "before", refers=self._named(call))
                if effect.kind != "delay_s":
                    return self._take_effect(effect, call)
                self.link.sleep(effect.delay_s or 0.0)
        result = self._real(call)
        call.touched = self._touched(call.site)
        for armed in struck:
            effect = armed.fault.effect
            if effect.kind == "value":
                assert call.replace is not None, f"{call.site} has no value to replace"
                self._fired(armed, call, "after")
                result = call.replace(effect.value)
            elif effect.when == "after":
                self._fired(armed, call, "after", made=[each.id for each in call.touched.made])
                if effect.kind == "delay_s":
                    self.link.sleep(effect.delay_s or 0.0)
                else:
                    result = self._take_effect(effect, call)
        return result

    def _named(self, call: OneCall) -> list[str]:
        """The objects that a struck release was to give back."""
        if call.refers is None or not SITES[call.site].releases:
            return []
        return self.machine.refers_to(call.site, call.refers)

    def _real(self, call: OneCall) -> Any:
        if call.wait is None or (fields := call.wait()) is None:
            return call.real()
        with self.waiting(call.site, fields):
            return call.real()

    @contextmanager
    def waiting(self, site: str, fields: dict[str, Any]) -> Iterator[int]:
        """The calling thread waits, as ``fields`` say (``events.WAIT``); the wait's id."""
        identity = self.new_identity()
        self.link.emit("wait-begin", id=identity, site=site, wait=fields)
        try:
            yield identity
        finally:
            self.link.emit("wait-end", id=identity, site=site)

    def _take_effect(self, effect: Effect, call: OneCall) -> Any:
        """The call is struck: what it does instead. Returns what the library returns."""
        site, convention = call.site, call.convention
        if effect.after_s:
            self.link.sleep(effect.after_s)
        kind = effect.kind
        if effect.poisons:
            self._poison(effect.poisons, site)
        if kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if kind == "hang":
            self.link.hang(f"{site} never returns (injected)")
        if kind == "raise":
            assert effect.raise_ is not None
            raise getattr(builtins, effect.raise_)(effect.message or f"injected by the scenario at {site}")
        if kind == "poison":
            assert effect.poison is not None
            self._poison(effect.poison, site)
            return convention.fail(site, effect.poison)
        if kind == "lose":
            return None
        assert kind == "error" and isinstance(effect.error, str), kind
        return convention.fail(site, effect.error)

    def _poison(self, error: str, site: str) -> None:
        self.machine.poison(error)
        self.link.emit("sticky", error=error, site=site, injected=True)

    # --------------------------------------------------------------- events

    def _fired(self, armed: Armed, call: OneCall, when: str, **objects: Any) -> None:
        self.link.emit(
            "fault",
            fault=armed.index,
            id=call.identity,
            site=call.site,
            call=self._calls.get(call.site, 0),
            effect=armed.fault.effect.kind,
            when=when,
            refers=objects.get("refers", []),
            made=objects.get("made", []),
        )

    def _enter(self, identity: int, site: str, argument: str) -> None:
        context = self.context
        number = 0
        if context.counting and not context.lab:
            with self._lock:
                number = self._calls[site] = self._calls.get(site, 0) + 1
        self.link.emit(
            "enter",
            id=identity,
            site=site,
            argument=argument,
            call=number,
            phase=context.phase,
            during=context.window,
            lab=context.lab,
        )

    def _leave(self, call: OneCall, result: str, value: Any) -> None:
        self.link.emit(
            "leave",
            id=call.identity,
            site=call.site,
            result=result,
            error=None,
            made=[_object(each) for each in call.touched.made],
            released=call.touched.released,
            value=value if isinstance(value, (int, bool)) else None,
        )

    def _touched(self, site: str) -> Touched:
        """What the call itself made and released. A step is made of calls that
        said so themselves; only a mocked one makes its memory on its own."""
        touched = self.machine.touched()
        if SITES[site].domain in ("driver", "runtime"):
            return touched
        if SITES[site].domain != "step":
            return Touched()
        return Touched([each for each in touched.made if each.kind == "standin"])

    def _leave_raised(self, identity: int, site: str, error: BaseException) -> None:
        self.link.emit(
            "leave",
            id=identity,
            site=site,
            result="raised",
            error=describe(error),
            made=[],
            released=[],
        )


def _object(each: Any) -> dict[str, Any]:
    return {
        "kind": each.kind,
        "id": each.id,
        "size_bytes": each.size_bytes,
        "depends_on": list(each.depends_on),
    }


def describe(error: BaseException) -> dict[str, Any]:
    """An exception as events keep it: type, text, and the code it names, if any."""
    text = str(error)[:1000]
    return {"type": type(error).__name__, "text": text, "code": named_code(text)}


def named_code(text: str) -> str:
    """The CUDA or NVML error named in a text, by name or as ``code=N``; else empty."""
    for name in sorted((*CUDA, *NVML), key=len, reverse=True):
        if name in text:
            return name
    for name, words in _RUNTIME_TEXTS:
        if words in text:
            return name
    return ""


#: torch and the ctypes runtime report the words of cudaGetErrorString, not the name.
_RUNTIME_TEXTS = (
    ("CUDA_ERROR_ILLEGAL_ADDRESS", "an illegal memory access was encountered"),
    ("CUDA_ERROR_MISALIGNED_ADDRESS", "misaligned address"),
    ("CUDA_ERROR_LAUNCH_FAILED", "unspecified launch failure"),
    ("CUDA_ERROR_OUT_OF_MEMORY", "out of memory"),
    ("CUDA_ERROR_NOT_SUPPORTED", "operation not supported"),
    # Before the shorter text that it begins with.
    ("CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED", "operation not permitted when stream is capturing"),
    ("CUDA_ERROR_STREAM_CAPTURE_INVALIDATED", "due to a previous error during capture"),
    ("CUDA_ERROR_NOT_PERMITTED", "operation not permitted"),
    ("CUDA_ERROR_INVALID_VALUE", "invalid argument"),
    ("CUDA_ERROR_INVALID_DEVICE", "invalid device ordinal"),
)
