"""The steps of a workload: create, use, collective, destroy, exit, capture."""

from __future__ import annotations

import gc
from collections import Counter
from typing import TYPE_CHECKING, Any

import torch

from faultlab import limits
from faultlab.errors import UnknownCall, WireError
from faultlab.injector import describe
from faultlab.rank import census, state
from faultlab.scenario.models import CaptureStep, Step, UseStep

if TYPE_CHECKING:
    from faultlab.rank.program import Rank

_PHASES = {"create": "create", "use": "use", "collective": "use", "destroy": "destroy", "exit": "destroy"}


class Workload:
    """Runs the scenario's steps on a subject and records how each one ended."""

    def __init__(self, rank: Rank, subject: Any) -> None:
        self._rank = rank
        self._subject = subject
        self._rounds: Counter[str] = Counter()
        self._usable = True
        self._uses = 0

    def run(self) -> None:
        """All steps, in order; a poisoned context ends the workload."""
        for index, step in enumerate(self._rank.scenario.workload):
            self._run(index, step)
            if self._rank.machine.context_error():
                return
        self._rank.link.step = -1

    def _run(self, index: int, step: Step) -> None:
        if isinstance(step, CaptureStep):
            raise UnknownCall("the step 'capture' is not built yet")
        name = "use" if isinstance(step, UseStep) else str(step)
        link = self._rank.link
        link.step = index
        before = state.take()
        link.emit("step-begin", name=name, round=self._rounds[name])
        result = self._guarded(name, step)
        after = state.take()
        # Frames of a caught exception hold half-built objects until here.
        gc.collect()
        link.emit("step-end", name=name, round=self._rounds[name], result=result)
        link.emit("state", before=before, after=after)
        self._rounds[name] += 1
        if name == "create" and result["returned"] in ("none", "raised"):
            take_ledger(self._rank, "step")
        if name == "create":
            self._usable = result["returned"] != "raised"

    def _guarded(self, name: str, step: Step) -> dict[str, Any]:
        """Run one step; whatever it raises is its result."""
        result: dict[str, Any] = {"returned": "done", "error": None, "backend": None, "workspace": None}
        if name == "use" and not self._usable:
            return {**result, "returned": "skipped"}
        try:
            with self._rank.context.in_phase(_PHASES[name]):
                if name == "create":
                    return {**result, **_created(self._subject.create())}
                if name == "use":
                    self._use(step)
                else:
                    getattr(self._subject, name)()
        except (WireError, UnknownCall):
            raise
        except Exception as error:
            declared = isinstance(error, tuple(self._subject.declared_errors))
            result.update(returned="raised", error={**describe(error), "declared": declared})
        return result

    def _use(self, step: Step) -> None:
        times = step.use.times if isinstance(step, UseStep) else 1
        tokens = step.use.tokens if isinstance(step, UseStep) else None
        for _ in range(times):
            self._use_once(tokens or self._rank.scenario.workspace.max_token_num)

    def _use_once(self, tokens: int) -> None:
        rank = self._rank
        self._uses += 1
        given = make_input(rank.rank, self._uses, tokens, rank.scenario.workspace)
        output = self._subject.use(given)
        torch.cuda.synchronize()
        reference = make_reference(rank.scenario.ranks, self._uses)
        error, tolerance = compare(output, reference, given.shape, rank.scenario.ranks)
        rank.link.emit(
            "use",
            number=self._uses,
            tokens=tokens,
            max_abs_error=error,
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
    count = shape.numel()
    return period.repeat(-(-count // _PERIOD))[:count].view(shape)


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
