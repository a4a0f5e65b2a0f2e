"""The rank program: what every rank of a run executes, by fork or by torchrun.

It reads the plan from the run's folder, puts the seams in place over the
machine, joins the process group, takes the baseline, runs the workload step by
step, asks the lab's own questions (does the group still work, does the
context), takes the last ledger, and leaves. It judges nothing.
"""

from __future__ import annotations

import gc
import json
import logging
import os
import random
import signal
import sys
import tempfile
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from faultlab import limits
from faultlab.errors import FaultlabError, SubjectError, WireError
from faultlab.injector import Context, Injector
from faultlab.machine.base import Machine
from faultlab.rank import steps
from faultlab.rank.link import Link
from faultlab.scenario.models import Scenario
from faultlab.seam import runtime
from faultlab.seam.install import installed
from faultlab.subjects.base import Environment
from faultlab.subjects.load import load_subject

#: The group that stands for everybody else's: it must work afterwards too.
BYSTANDERS = "bystanders"


def main(folder: Path, rank: int) -> None:
    """Run one rank to its end; the process exits here."""
    _own_streams(folder, rank)
    link = Link(folder, rank)
    status = 1
    try:
        plan = json.loads((folder / "run.json").read_text())
        scenario = Scenario.model_validate(plan["scenario"])
        Rank(folder, rank, scenario, link).run()
        status = 0
    except WireError:
        os._exit(1)
    except FaultlabError as error:
        of = "subject: " if isinstance(error, SubjectError) else ""
        link.emit("unknown-call", name=f"{of}{error}")
    link.emit("exit", status=status)
    sys.stdout.flush()
    sys.stderr.flush()
    # Past Python's own teardown: what a subject leaves to it was judged before.
    os._exit(status)


def _own_streams(folder: Path, rank: int) -> None:
    """Give the rank its own log, temporary folder and signal handling."""
    log = os.open(folder / f"rank{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.environ["TMPDIR"] = str(folder / f"t{rank}")
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    tempfile.tempdir = None


class Rank:
    """One rank of one run."""

    def __init__(self, folder: Path, rank: int, scenario: Scenario, link: Link) -> None:
        self.rank = rank
        self.scenario = scenario
        self.link = link
        self.context = Context()
        self.machine = _machine(scenario, rank, link)
        injector = Injector(
            rank=rank,
            world_size=scenario.ranks,
            gpus_per_node=scenario.topology.gpus.count,
            faults=scenario.faults,
            link=link,
            machine=self.machine,
            context=self.context,
        )
        self.seam = installed()
        self.seam.enter(
            scenario=scenario,
            rank=rank,
            machine=self.machine,
            injector=injector,
            context=self.context,
            link=link,
        )
        self._store = str(folder / "store")

    def run(self) -> None:
        """The whole life of the rank."""
        torch.set_num_threads(1)
        random.seed(self.rank)
        # torch.manual_seed would look for every accelerator that torch knows.
        torch.default_generator.manual_seed(self.rank)
        with self.context.in_lab():
            group = self._join()
            subject = load_subject(self.scenario.subject, self._environment(group))
            self._start(subject)
            self._warm_up(group)
            self._ledger("baseline")
            # What is there by now is no leak: collections look at what comes.
            gc.freeze()
        handler = _LogEvents(self.link)
        logging.getLogger().addHandler(handler)
        with runtime.device_mode():
            steps.Workload(self, subject).run()
        logging.getLogger().removeHandler(handler)
        del subject
        with self.context.in_lab():
            self._finish(group)

    def _join(self) -> Any:
        dist.init_process_group(
            "gloo",
            rank=self.rank,
            world_size=self.scenario.ranks,
            store=dist.FileStore(self._store, self.scenario.ranks),
            timeout=timedelta(seconds=self.scenario.budget.group_timeout_s),
        )
        self._bystanders = dist.new_group(group_desc=BYSTANDERS)
        return dist.group.WORLD

    def _environment(self, group: Any) -> Environment:
        workspace = self.scenario.workspace
        return Environment(
            rank=self.rank,
            world_size=self.scenario.ranks,
            device=torch.device("cuda", self.rank % self.scenario.topology.gpus.count),
            group=group,
            backend=workspace.backend,
            preferred=workspace.preferred,
            max_token_num=workspace.max_token_num,
            hidden_dim=workspace.hidden_dim,
            dtype=getattr(torch, workspace.dtype),
            window=self.context.in_window,
        )

    def _start(self, subject: Any) -> None:
        import flashinfer

        self.link.emit(
            "start",
            pid=os.getpid(),
            subject=self.scenario.subject.label,
            flashinfer=flashinfer.__version__,
            torch=torch.__version__,
            machine=self.machine.name,
            declared=[each.__name__ for each in subject.declared_errors],
            logs=bool(subject.logs),
            ladder=list(subject.ladder),
            own_sequence=bool(subject.own_sequence),
        )

    def _warm_up(self, group: Any) -> None:
        """Once through every kind of collective: what they keep is no leak."""
        _collectives(group, self.scenario.ranks, self.rank)
        _gather(self._bystanders, self.scenario.ranks, self.rank)
        with runtime.device_mode():
            self.seam.machine.call("cudart.cudaSetDevice", self.rank % self.scenario.topology.gpus.count)
        self.link.meet("baseline")

    def _finish(self, group: Any) -> None:
        """After the workload: do the context and the groups still work?"""
        self._probe_context()
        self.link.meet("workload done")
        self.link.emit("sequence", groups=self.seam.groups.sequence())
        if self.machine.context_error():
            # A poisoned rank asks nothing more; its peers hear of its end where they meet.
            self._ledger("end")
            return
        dead = self.link.meet("probes")
        self._probe_groups(group, dead)
        self._ledger("end")
        # Nobody leaves while a peer could still miss it; the groups end with the process.
        self.link.meet("ledgers taken")

    def _probe_context(self) -> None:
        error = self.machine.context_error()
        self.link.emit("probe", name="context", group="", ok=not error, error=error or None, number=0)

    def _probe_groups(self, group: Any, dead: list[int]) -> None:
        for name, each in (("world", group), (BYSTANDERS, self._bystanders)):
            ok, error = (None, f"ranks {dead} are gone") if dead else self._ask(each)
            label = str(each.group_name)
            self.link.emit("probe", name="collective", group=name, label=label, ok=ok, error=error, number=0)

    def _ask(self, group: Any) -> tuple[bool, str | None]:
        """Whether the group still answers rightly, and if not, how."""
        try:
            _gather(group, self.scenario.ranks, self.rank)
        except Exception as error:
            return False, f"{type(error).__name__}: {error}"[:500]
        return True, None

    def _ledger(self, label: str) -> None:
        steps.take_ledger(self, label)


def _collectives(group: Any, world_size: int, rank: int) -> None:
    """One of each kind the lab or a subject is likely to use, with its result checked."""
    objects: list[Any] = [None] * world_size
    dist.all_gather_object(objects, rank, group=group)
    root = dist.get_process_group_ranks(group)[0]
    told = [("word", rank) if rank == root else None]
    dist.broadcast_object_list(told, src=root, group=group)
    summed = torch.ones(8)
    dist.all_reduce(summed, group=group)
    dist.barrier(group=group)
    if (objects, told, summed.tolist()) != (
        list(range(world_size)),
        [("word", root)],
        [float(world_size)] * 8,
    ):
        raise RuntimeError(f"the group answered {objects}, {told}, {summed.tolist()}")


def _gather(group: Any, world_size: int, rank: int) -> None:
    """The collective that needs every member and tells them apart, with its result checked."""
    gathered = torch.empty(world_size, dtype=torch.int64)
    dist.all_gather(list(gathered.split(1)), torch.tensor([rank]), group=group)
    if gathered.tolist() != list(range(world_size)):
        raise RuntimeError(f"the group answered {gathered.tolist()}")


def _machine(scenario: Scenario, rank: int, link: Link) -> Machine:
    from faultlab.machine.simulated.machine import SimulatedMachine

    class Remote:
        """The board, reached through the supervisor."""

        def call(self, method: str, arguments: dict[str, Any], fds: Any = ()) -> tuple[Any, list[int]]:
            return link.request(method, arguments, fds)

    return SimulatedMachine(scenario.topology, rank, list(range(scenario.ranks)), Remote())


class _LogEvents(logging.Handler):
    """Every message the subject logs becomes an event."""

    def __init__(self, link: Link) -> None:
        super().__init__(level=logging.INFO)
        self._link = link

    def emit(self, record: logging.LogRecord) -> None:
        self._link.emit(
            "log",
            level=record.levelname,
            logger=record.name,
            message=record.getMessage()[: limits.LOG_MESSAGE_CHARS],
            # The last lines of a traceback are the ones that say what failed.
            exception=_traceback(record)[-limits.LOG_MESSAGE_CHARS :],
        )


def _traceback(record: logging.LogRecord) -> str:
    """The traceback that a message carries; empty if it carries none."""
    return logging.Formatter().formatException(record.exc_info) if record.exc_info else ""
