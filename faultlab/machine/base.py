"""The machine: the small interface that the simulated and the real one share.

Above it stand the seams (``faultlab/seam``), which put themselves in place of
the libraries' functions, and the fault injector. Both call a machine through
``call`` and do not know which one they have.

To write another machine: implement ``Machine``. ``call`` answers in the
convention of the site's library:

    driver      ``(CUresult,)`` or ``(CUresult, value, …)``; never raises for a CUDA error
    runtime     the number of the error and the values: ``(0,)``, ``(2, None)``
    nvml        the value; raises ``pynvml.NVMLError``
    kernel      ``None``; an error of the kernel is sticky and shows at the next synchronisation

and raises ``faultlab.errors.UnknownCall`` for a site it does not know.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol


@dataclass(frozen=True)
class LedgerObject:
    """Something alive that must be given back.

    ``kind``: ``handle`` (a reference to physical memory or to a multicast
    object), ``range`` (reserved addresses), ``mapping``, ``binding``,
    ``allocation`` (cuMemAlloc, cudaMalloc), ``standin`` (a mocked workspace).
    ``id`` is unique in the rank's life. ``depends_on``: ids of objects that
    cannot be given back while this one lives the other way round: a mapping
    keeps its range and its handle's memory.
    """

    kind: str
    id: str
    size_bytes: int
    depends_on: tuple[str, ...] = ()


@dataclass
class Touched:
    """What the latest call of this thread made and released, by object id."""

    made: list[LedgerObject] = field(default_factory=list)
    released: list[str] = field(default_factory=list)


class Machine(Protocol):
    """What a rank's process has below the seam."""

    name: str

    def knows(self, site: str) -> bool:
        """Whether ``call`` has an answer for this site."""
        ...

    def call(self, site: str, *args: Any, **kwargs: Any) -> Any:
        """Make the call, in its library's convention (module docstring)."""
        ...

    def refers_to(self, site: str, args: tuple[Any, ...]) -> list[str]:
        """The ids of the ledger objects that a releasing call names."""
        ...

    def touched(self) -> Touched:
        """What the latest ``call`` of this thread made and released; told once."""
        ...

    def ledger(self) -> list[LedgerObject]:
        """Everything alive in this rank, in the order in which it was made."""
        ...

    def device_bytes(self) -> int:
        """Device memory in use on this rank's GPU, over all processes."""
        ...

    def context_error(self) -> str:
        """The sticky error of this rank's context, empty while it is good."""
        ...

    def poison(self, error: str) -> None:
        """Leave the context with a sticky error, as a failed kernel does."""
        ...

    def begin_capture(self, mode: str = "global") -> None:
        """The calling thread's stream begins to capture, in the ``mode`` ``global``,
        ``thread-local`` or ``relaxed``. One capture at a time."""
        ...

    def end_capture(self) -> str:
        """That capture ends, in the thread that began it: the name of the error it ends
        with, or empty, and then there is a graph to replay."""
        ...

    def replay(self) -> None:
        """Run the graph of the latest capture, once, and drop it. An error of its
        kernels is sticky. Raises what a collective in it raises."""
        ...

    def capturing(self) -> bool:
        """Whether the calling thread's stream captures now."""
        ...

    def on_host(self) -> AbstractContextManager[None]:
        """What the calling thread does with tensors inside is no work of its stream."""
        ...

    def in_stream(self, work: Callable[[], None]) -> None:
        """Do ``work`` when the stream comes to it: now, or at the replay while it captures."""
        ...

    def close(self) -> None:
        """Give back what the machine itself holds; the rank ends."""
        ...
