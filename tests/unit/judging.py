"""Builders of synthetic runs for the tests of the judge: a rank's life in a few lines.

A ``Run`` is a scenario and one ``RankLog`` per rank. A rank's methods record the
events that the real rank program records, in the same order and with the same
fields; ``Run.judge`` writes the folder and judges it. Everything a test does not
say is a clean run.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from faultlab import events
from faultlab.judge import Judgement, judge
from faultlab.scenario.models import Effect, Expect, Fault, Scenario, Subject, WorkspaceSpec
from faultlab.topology.models import Does, Gpus, Links, Says, Topology

SHORT = ("create", "use", "destroy", "exit")
URL = "https://example.org/1"


def topology(*, multicast: bool = True) -> Topology:
    """A node of eight GPUs that all reach each other, with or without multicast."""
    return Topology(
        name="node",
        title="A node",
        gpus=Gpus(count=8, model="X", memory_gib=8, compute_capability="9.0"),
        links=Links(kind="nvswitch"),
        says=Says(attributes={"MULTICAST_SUPPORTED": int(multicast)}),
        does=Does(multicast=multicast),
    )


def scenario(**fields: Any) -> Scenario:
    """Two ranks, the reference, a short workload; any field can be given instead."""
    given: dict[str, Any] = {
        "id": "case",
        "path": "some/case.yaml",
        "line": 1,
        "title": "A case",
        "topology": topology(),
        "ranks": 2,
        "subject": Subject(name="reference"),
        "workload": SHORT,
    }
    return Scenario(**{**given, **fields})


def fault(at: str, ranks: Any = "all", *, optional: bool = False, **effect: Any) -> Fault:
    """A fault; the effect's fields as keywords."""
    return Fault(at=at, ranks=ranks, optional=optional, effect=Effect(**effect))


def expecting(**fields: Any) -> Expect:
    """What a scenario expects."""
    return Expect.model_validate(fields)


def error(kind: str = "RuntimeError", code: str = "", *, declared: bool = True) -> dict[str, Any]:
    """What a step raised, as a step-end tells it."""
    return {"type": kind, "text": f"{kind} {code}", "code": code, "declared": declared}


def thing(kind: str, identity: str, size_bytes: int = 0, *depends_on: str) -> dict[str, Any]:
    """A ledger object as events tell it."""
    return {"kind": kind, "id": identity, "size_bytes": size_bytes, "depends_on": list(depends_on)}


class RankLog:
    """The events of one rank, recorded by what it does."""

    def __init__(self, rank: int, workload: tuple[Any, ...]) -> None:
        self.rank = rank
        self.events: list[events.Event] = []
        self.t = 0.0
        self.thread = "main"
        self.index = -1
        self.alive: dict[str, dict[str, Any]] = {}
        self.system: dict[str, Any] = {
            "descriptors": {"file": 3},
            "sockets": 2,
            "threads": ["MainThread"],
            "folder": [],
            "shared_memory": [],
        }
        self.collectives: dict[str, list[str]] = {"0": ["barrier"], "1": ["barrier"]}
        self.exit: dict[str, Any] | None = None
        self._workload = workload
        self._rounds: dict[str, int] = {}
        self._identities = 0
        self._objects = 0
        self._uses = 0

    def emit(self, kind: str, **fields: Any) -> int:
        """Record one event; its number."""
        number = len(self.events)
        self.t += 0.001
        self.events.append(
            {
                "v": events.VERSION,
                "n": number,
                "t": round(self.t, 6),
                "kind": kind,
                "thread": self.thread,
                "step": self.index,
                **fields,
            }
        )
        return number

    # ------------------------------------------------------------------ calls

    def enter(self, site: str, argument: str = "", *, lab: bool = False) -> int:
        """A call begins; its id."""
        self._identities += 1
        self.emit(
            "enter",
            id=self._identities,
            site=site,
            argument=argument,
            call=0 if lab else 1,
            phase="",
            during="preflight",
            lab=lab,
        )
        return self._identities

    def leave(self, identity: int, site: str, result: str = "ok", made: Any = (), error: Any = None) -> None:
        """A call comes back."""
        self.alive.update({each["id"]: each for each in made})
        self.emit(
            "leave",
            id=identity,
            site=site,
            result=result,
            error=error,
            made=list(made),
            released=[],
            value=None,
        )

    def call(
        self, site: str, argument: str = "", *, result: str = "ok", made: Any = (), lab: bool = False
    ) -> int:
        """A whole call; its id."""
        identity = self.enter(site, argument, lab=lab)
        self.leave(identity, site, result, made)
        return identity

    def strike(
        self, index: int, identity: int, site: str, effect: str, when: str = "before", **objects: Any
    ) -> None:
        """A fault fires inside a call."""
        self.emit(
            "fault",
            fault=index,
            id=identity,
            site=site,
            call=1,
            effect=effect,
            when=when,
            refers=objects.get("refers", []),
            made=objects.get("made", []),
        )

    def struck(
        self, index: int, site: str, effect: str, when: str = "before", *, argument: str = "", **objects: Any
    ) -> int:
        """A whole call that a fault strikes and that comes back with an error; its id."""
        identity = self.enter(site, argument)
        self.strike(index, identity, site, effect, when, **objects)
        self.leave(identity, site, "raised" if effect == "raise" else "CUDA_ERROR_UNKNOWN")
        return identity

    def say(self, message: str, level: str = "WARNING", logger: str = "subject", exception: str = "") -> None:
        """The subject, or a library, logs."""
        self.emit("log", level=level, logger=logger, message=message, exception=exception)

    def sticky(self, site: str, *, injected: bool = False) -> None:
        """The context is poisoned."""
        self.emit(
            "sticky",
            error="CUDA_ERROR_ILLEGAL_ADDRESS",
            site=site,
            injected=injected,
            reason="" if injected else "address 0x0",
        )

    # ------------------------------------------------------------------ steps

    def start(self) -> None:
        """The rank begins, and takes its baseline."""
        self.emit("start", pid=1, subject="x", subject_version="", flashinfer="0", machine="m", declared=[])
        self.ledger("baseline")

    @contextmanager
    def step(self, name: str, index: int | None = None) -> Iterator[dict[str, Any]]:
        """A step of the workload; what it returned may be changed inside."""
        self.begin(name, index)
        result: dict[str, Any] = {"returned": "done", "error": None, "backend": None, "workspace": None}
        yield result
        self.emit("step-end", name=name, round=self._rounds[name], result=result)
        self._rounds[name] += 1
        if name == "create" and result["returned"] in ("none", "raised"):
            self.ledger("step")

    def begin(self, name: str, index: int | None = None) -> None:
        """A step begins, and may never end."""
        self.index = self.index + 1 if index is None else index
        self.emit("step-begin", name=name, round=self._rounds.setdefault(name, 0))

    def create(self, backend: str = "mnnvl", *, pointer: int | None = 4096, made: Any = ()) -> None:
        """A create that returns an object."""
        with self.step("create") as result:
            name = self.returned(backend, pointer=pointer, made=made)
            result.update(returned="object", backend=backend, workspace=name)

    def returned(self, backend: str = "mnnvl", *, pointer: int | None = 4096, made: Any = ()) -> str:
        """FlashInfer's creation returns an object; its name."""
        identity = self.enter("workspace.create", backend)
        for each in made:
            self.call("cuMemCreate", made=[each])
        self.leave(identity, "workspace.create")
        name = f"w{self._objects}"
        self._objects += 1
        self.emit(
            "workspace",
            workspace=name,
            backend=backend,
            creation="real",
            mc_ptr=pointer if backend == "mnnvl" else None,
            needs_multicast=backend == "mnnvl",
        )
        return name

    def create_none(self) -> None:
        """A create that settles on the plain all-reduce."""
        with self.step("create") as result:
            result["returned"] = "none"

    def create_raises(self, told: dict[str, Any]) -> None:
        """A create that raises."""
        with self.step("create") as result:
            result.update(returned="raised", error=told)

    def use(self, path: str | None = "mnnvl", *, off: float = 0.0) -> None:
        """A use that comes back, carried by ``path``."""
        with self.step("use"):
            self.carry(path)
            self.compared(off)

    @contextmanager
    def capture(self, error_code: str | None = None) -> Iterator[None]:
        """A stream captures; then the step ``capture`` replays, or raises the code it ended with."""
        launched_before = self._uses
        self.emit("capture-begin")
        yield
        self.emit("capture-end", error=error_code)
        launched, self._uses = self._uses, launched_before
        with self.step("capture") as result:
            if error_code is not None:
                told = error("AcceleratorError", error_code, declared=False)
                result.update(returned="raised", error=told)
            while error_code is None and self._uses < launched:
                self.compared()

    def captured_use(self, path: str | None = "mnnvl", *calls: str) -> None:
        """A use inside a capture, with these calls before its launch."""
        with self.step("use"):
            for site in calls:
                self.call(site)
            self.carry(path)
            self._uses += 1
            self.emit("captured", number=self._uses)

    def carry(self, path: str | None) -> None:
        """An all-reduce, by a kernel or by the group."""
        if path in ("mnnvl", "trtllm"):
            self.call("kernel.allreduce", path)
        elif path is not None:
            self.call("comm.allreduce", "0")

    def compared(self, off: float = 0.0) -> None:
        """The result of a use is compared with the reference."""
        self._uses += 1
        self.emit("use", number=self._uses, tokens=8, max_abs_error=off, tolerance=0.5, correct=off <= 0.5)

    def destroy(self, workspace: str | None = None) -> None:
        """A destroy step; with a name, it destroys that workspace, and everything is given back."""
        with self.step("destroy"):
            if workspace is not None:
                self.call("workspace.destroy", workspace)
                self.alive.clear()

    def ledger(self, label: str) -> None:
        """Take the ledger."""
        self.emit(
            "ledger",
            label=label,
            objects=list(self.alive.values()),
            count=len(self.alive),
            os=json.loads(json.dumps(self.system)),
            device_bytes=0,
            context="",
        )

    # ----------------------------------------------------------------- the end

    def finish(
        self, *, probe: Callable[[str], bool | None] = lambda group: True, context: bool = True
    ) -> None:
        """The last step and the lab's own questions; the process ends as it should."""
        with self.step("exit"):
            pass
        self.index = -1
        told = None if context else "CUDA_ERROR_ILLEGAL_ADDRESS"
        self.emit("probe", name="context", group="", ok=context, error=told, number=0)
        self.emit("sequence", groups={name: list(made) for name, made in self.collectives.items()})
        for group in ("world", "bystanders"):
            ok = probe(group)
            text = None if ok else "RuntimeError: no answer"
            self.emit("probe", name="collective", group=group, ok=ok, error=text, number=0)
        self.ledger("end")
        self.emit("exit", status=0)
        self.ends(0)

    def ends(self, status: int | None, signal: str | None = None, *, expected: bool = True) -> None:
        """The process ends."""
        sites = [event["site"] for event in self.events if event["kind"] == "enter"]
        self.exit = {
            "rank": self.rank,
            "exit": status,
            "signal": signal,
            "expected": expected,
            "last_site": sites[-1] if sites else "",
        }


class Run:
    """A run to be judged; iterating gives the logs of its ranks, each already started."""

    def __init__(self, folder: Path, *, overrides: dict[str, Any] | None = None, **fields: Any) -> None:
        self.folder = folder
        self.scenario = scenario(**fields)
        self.overrides = overrides or {}
        self.versions = {"flashinfer-python": "0.7.2", "torch": "2.11.0"}
        self.ranks = [RankLog(rank, self.scenario.workload) for rank in range(self.scenario.ranks)]
        self.told: list[dict[str, Any]] = []
        for rank in self.ranks:
            rank.start()

    def __iter__(self) -> Iterator[RankLog]:
        return iter(self.ranks)

    def __getitem__(self, rank: int) -> RankLog:
        return self.ranks[rank]

    def tell(self, kind: str, **fields: Any) -> None:
        """The supervisor records an event."""
        event = {"v": events.VERSION, "n": len(self.told), "t": 1.0, "kind": kind, **fields}
        self.told.append(event)

    def hang(self, *waits: dict[str, Any]) -> None:
        """Nothing can move: the supervisor says who waits and ends everybody who is left."""
        self.tell("hang", waits=list(waits), remaining_s=19.0, step=0)
        self.end_all()

    def end_all(self) -> None:
        """The lab ends every rank that has not ended."""
        for rank in self.ranks:
            if rank.exit is None:
                rank.ends(None, "SIGKILL")

    def write(self) -> Path:
        """The run's folder."""
        self.folder.mkdir(exist_ok=True)
        for rank in self.ranks:
            lines = b"".join(events.dump(event) + b"\n" for event in rank.events)
            (self.folder / f"rank{rank.rank}.jsonl").write_bytes(lines)
            if rank.exit is not None:
                self.tell("rank-exit", **rank.exit)
        self.tell("end", machine_s=1.25, seconds=0.31)
        lines = b"".join(events.dump(event) + b"\n" for event in self.told)
        (self.folder / "supervisor.jsonl").write_bytes(lines)
        plan = {
            "v": events.VERSION,
            "id": self.scenario.id,
            "lane": "sim",
            "scenario": self.scenario.model_dump(mode="json", by_alias=True),
            "versions": self.versions,
            "overrides": self.overrides,
        }
        (self.folder / "run.json").write_text(json.dumps(plan))
        return self.folder

    def judge(self) -> Judgement:
        """Write the folder and judge it."""
        return judge(self.write())


def clean(run: Run, path: str = "mnnvl") -> Run:
    """Every rank creates, uses, destroys and exits as it should."""
    for rank in run:
        if path == "none":
            rank.create_none()
        else:
            rank.create(path)
        rank.use(path)
        rank.destroy("w0")
        rank.finish()
    return run


def wait(
    rank: int, site: str = "cuMemMap", *waits_for: int, kind: str = "multicast", text: str = ""
) -> dict[str, Any]:
    """A row of who waits for whom."""
    return {
        "rank": rank,
        "thread": "main",
        "site": site,
        "kind": kind,
        "waits_for": list(waits_for),
        "text": text,
        "since": 0.25,
        "deadline": None,
        "step": 0,
    }


def broken(judgement: Judgement) -> set[str]:
    """The names of the broken invariants."""
    return set(judgement.broken)


def state(judgement: Judgement, name: str) -> str:
    """An invariant's state."""
    return judgement.invariants[name].state


def reason(judgement: Judgement, name: str) -> str:
    """An invariant's reason."""
    return judgement.invariants[name].reason


def ordered(backend: str) -> WorkspaceSpec:
    """A workspace whose back end is the user's order."""
    return WorkspaceSpec.model_validate({"backend": backend})
