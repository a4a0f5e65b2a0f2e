"""The steps of a workload: create, use, collective, destroy, exit, capture."""

from __future__ import annotations

import gc
import math
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from faultlab import limits
from faultlab.codes import CUDA
from faultlab.errors import UnknownCall, WireError
from faultlab.injector import describe
from faultlab.rank import census, state
from faultlab.scenario.models import CaptureStep, Step, UseStep
from faultlab.seam import kernels, runtime

if TYPE_CHECKING:
    from faultlab.rank.program import Rank

_PHASES = {
    "create": "create",
    "use": "use",
    "collective": "use",
    "capture": "use",
    "destroy": "destroy",
    "exit": "destroy",
}


@dataclass
class Launch:
    """A captured use: what it was given, which the replay reads, and what it returned, which the
    replay fills."""

    number: int
    tokens: int
    given: torch.Tensor
    output: Any = None


class Workload:
    """Runs the scenario's steps on a subject and records how each one ended."""

    def __init__(self, rank: Rank, subject: Any) -> None:
        self._rank = rank
        self._subject = subject
        self._rounds: Counter[str] = Counter()
        self._usable = True
        self._uses = 0
        self._state: dict[str, str] = {}
        self._prepared: deque[Launch] = deque()
        self._launched: list[Launch] = []

    def run(self) -> None:
        """All steps, in order; a poisoned context ends the workload."""
        index = 0
        for step in self._rank.scenario.workload:
            if isinstance(step, CaptureStep):
                self._capture(index, step)
                index += len(step.capture)
            else:
                name = "use" if isinstance(step, UseStep) else str(step)
                self._run(index, name, partial(self._make, name, step))
            index += 1
            if self._rank.machine.context_error():
                return
        self._rank.link.step = -1

    def _run(self, index: int, name: str, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Run one step; its result."""
        link = self._rank.link
        link.step = index
        # Between two steps there is the lab alone: what one left is what the next finds.
        before = self._state or state.take()
        link.emit("step-begin", name=name, round=self._rounds[name])
        result = self._guarded(name, make)
        after = self._state = state.take()
        captured = self._rank.machine.capturing()
        if not captured:
            # Frames of a caught exception hold half-built objects until here.
            gc.collect()
        link.emit("step-end", name=name, round=self._rounds[name], result=result)
        link.emit("state", before=before, after=after)
        self._rounds[name] += 1
        if name == "create" and result["returned"] in ("none", "raised") and not captured:
            take_ledger(self._rank, "step")
        if name == "create":
            self._usable = result["returned"] != "raised"
        return result

    def _guarded(self, name: str, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Make one step; whatever it raises is its result."""
        result: dict[str, Any] = {"returned": "done", "error": None, "backend": None, "workspace": None}
        try:
            with self._rank.context.in_phase(_PHASES[name]):
                result.update(make())
        except (WireError, UnknownCall):
            raise
        except Exception as error:
            # What a capture or its replay raises is CUDA's word, whatever type the subject declares.
            declared = name != "capture" and isinstance(error, tuple(self._subject.declared_errors))
            result.update(returned="raised", error={**describe(error), "declared": declared})
        return result

    def _make(self, name: str, step: Step) -> dict[str, Any]:
        """One step of the subject; what there is to say of it besides that it was done."""
        if name == "create":
            return _created(self._subject.create())
        if name == "use" and not self._usable:
            return {"returned": "skipped"}
        if name == "use":
            for tokens in self._sizes(step):
                self._use_once(tokens)
        else:
            getattr(self._subject, name)()
        return {}

    # -------------------------------------------------------------- capture

    def _capture(self, index: int, step: CaptureStep) -> None:
        """The steps inside a capture, each as a step of its own, and then the step ``capture``.

        As in torch's ``with torch.cuda.graph(…)``, a step that raises leaves the capture: what comes
        after it is not run, and nothing is replayed."""
        machine, link = self._rank.machine, self._rank.link
        self._prepared = deque(self._launch(tokens) for each in step.capture for tokens in self._sizes(each))
        self._launched = []
        link.step = index
        # torch collects before a capture; a finalizer inside it would be there by chance.
        gc.collect()
        collects = gc.isenabled()
        gc.disable()
        try:
            link.emit("capture-begin")
            machine.begin_capture()
            whole = all(self._run_inside(index + at, each) for at, each in enumerate(step.capture))
            error = machine.end_capture()
            link.emit("capture-end", error=error or None)
        finally:
            if collects:
                gc.enable()
        if not machine.context_error():
            self._run(index + len(step.capture), "capture", lambda: self._replay(error, whole=whole))

    def _run_inside(self, index: int, step: Step) -> bool:
        """Run a step while the stream captures; whether the capture goes on."""
        name = "use" if isinstance(step, UseStep) else str(step)
        result = self._run(index, name, partial(self._make, name, step))
        return result["returned"] != "raised" and not self._rank.machine.context_error()

    def _launch(self, tokens: int) -> Launch:
        """What a captured use is given: made before the capture, as a graph's inputs are."""
        workspace = self._rank.scenario.workspace
        self._uses += 1
        return Launch(self._uses, tokens, make_input(self._rank.rank, self._uses, tokens, workspace))

    def _replay(self, error: str, *, whole: bool) -> dict[str, Any]:
        """Replay what was captured, and compare what each use returned. Raises torch's error if the
        capture ended with one."""
        if error:
            runtime.raise_if_failed(CUDA[error])
        if not whole:
            return {"returned": "skipped"}
        rank = self._rank
        kernels.replay(rank.seam)
        torch.cuda.synchronize()
        for each in self._launched:
            self._compare(each)
        return {}

    # ------------------------------------------------------------------ use

    def _sizes(self, step: Step) -> list[int]:
        """The tokens of each all-reduce of a step; none if it is no use."""
        whole = self._rank.scenario.workspace.max_token_num
        if isinstance(step, UseStep):
            return [step.use.tokens or whole] * step.use.times
        return [whole] if step == "use" else []

    def _use_once(self, tokens: int) -> None:
        rank = self._rank
        if rank.machine.capturing():
            launch = self._prepared.popleft()
            launch.output = self._subject.use(launch.given)
            self._launched.append(launch)
            rank.link.emit("captured", number=launch.number)
            return
        self._uses += 1
        given = make_input(rank.rank, self._uses, tokens, rank.scenario.workspace)
        output = self._subject.use(given)
        torch.cuda.synchronize()
        self._compare(Launch(self._uses, tokens, given, output))

    def _compare(self, launch: Launch) -> None:
        """Compare the result of a use with the reference."""
        rank = self._rank
        reference = make_reference(rank.scenario.ranks, launch.number)
        error, tolerance = compare(launch.output, reference, launch.given.shape, rank.scenario.ranks)
        rank.link.emit(
            "use",
            number=launch.number,
            tokens=launch.tokens,
            max_abs_error=error if math.isfinite(error) else None,
            tolerance=tolerance,
            correct=bool(error <= tolerance),
        )


def _created(workspace: Any) -> dict[str, Any]:
    """What ``create`` returned, as an event keeps it."""
    if workspace is None:
        return {"returned": "none"}
    return {
        "returned": "object",
        "backend": getattr(workspace, "backend", None),
        "workspace": getattr(workspace, "_faultlab_id", None),
    }


#: The rows repeat with this period: a prime, so no slot or row is aligned with it.
_PERIOD = 13


def _pattern(rank: int, number: int) -> torch.Tensor:
    """One period of the rank's values: small integers, so every sum is exact in float32."""
    return (torch.arange(_PERIOD) * (rank + 3) + 7 * number + rank) % _PERIOD - _PERIOD // 2


def _rows(period: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    tokens, hidden_dim = shape
    # Where a row begins in the period repeats after as many rows as the period has values.
    rows = period.repeat(hidden_dim).view(_PERIOD, hidden_dim)
    return rows.repeat(-(-tokens // _PERIOD), 1)[:tokens]


def make_input(rank: int, number: int, tokens: int, workspace: Any) -> torch.Tensor:
    """The rank's rows for use ``number``, different for every rank and use, so that
    every wrong slot shows. Shape ``[tokens, hidden_dim]``."""
    shape = torch.Size((tokens, workspace.hidden_dim))
    return _rows(_pattern(rank, number).to(getattr(torch, workspace.dtype)), shape)


def make_reference(ranks: int, number: int) -> torch.Tensor:
    """One period of the exact sum over all ranks, in float64. Shape ``[13]``."""
    return torch.stack([_pattern(rank, number) for rank in range(ranks)]).sum(0).to(torch.float64)


def compare(output: Any, reference: torch.Tensor, shape: torch.Size, ranks: int) -> tuple[float, float]:
    """The largest error of an output of this shape, and what the dtype's rounding
    allows for it; ``reference`` is one period of what should be there."""
    if not isinstance(output, torch.Tensor) or output.shape != shape:
        return float("inf"), 0.0
    # A plain all-reduce may round after every addition.
    largest = max(float(reference.abs().max()), 1.0)
    tolerance = torch.finfo(output.dtype).eps * largest * max(ranks - 1, 1)
    rounded = reference.to(output.dtype)
    if torch.equal(output, _rows(rounded, shape)):
        # The usual case, without a copy of everything in float64.
        return float((rounded.to(torch.float64) - reference).abs().max()), tolerance
    error = (output.to(torch.float64) - _rows(reference, shape)).abs().max()
    return float(torch.nan_to_num(error, nan=float("inf"))), tolerance


def take_ledger(rank: Rank, label: str) -> None:
    """Record what is alive in this rank: the machine's objects and the system's."""
    with rank.context.in_lab():
        gc.collect()
        objects = [
            {
                "kind": each.kind,
                "id": each.id,
                "size_bytes": each.size_bytes,
                "depends_on": list(each.depends_on),
            }
            for each in rank.machine.ledger()
        ]
        rank.link.emit(
            "ledger",
            label=label,
            objects=objects[: limits.LEDGER_OBJECTS],
            count=len(objects),
            os=census.take(rank.link.descriptors),
            device_bytes=rank.machine.device_bytes(),
            context=rank.machine.context_error(),
        )
