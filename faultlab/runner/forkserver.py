"""The warm forkserver: imports torch and FlashInfer once, then starts ranks by fork.

One process per session. A supervisor connects, asks for the ranks of one run,
and hears of each one's end; when the supervisor hangs up, its ranks are ended.
Ranks are started by ``torch.multiprocessing.start_processes``, the launcher
that torchrun's elastic agent uses, with the start method ``fork``, so that
what was imported here is there. Nothing here starts a thread or touches a
process group: a forked child would inherit half of it.
"""

from __future__ import annotations

import gc
import os
import selectors
import signal
import socket
import sys
from pathlib import Path
from typing import Any, Literal

from faultlab import events
from faultlab.errors import WireError
from faultlab.runner import huge_pages, wire
from faultlab.runner.cleanup import die_with_parent


def preload() -> None:
    """Import what every rank needs; the costly part of a start, paid once."""
    import cuda.bindings.driver
    import cuda.bindings.runtime
    import flashinfer.comm
    import numpy.random
    import pynvml
    import torch.multiprocessing

    import faultlab.machine.simulated.machine
    import faultlab.rank.program
    import faultlab.subjects.canaries
    import faultlab.subjects.flashinfer
    import faultlab.subjects.hardened
    import faultlab.subjects.reference
    from faultlab.seam.install import installed

    assert cuda.bindings.driver and flashinfer.comm and numpy.random and pynvml and faultlab.rank.program
    torch.set_num_threads(1)
    installed()
    gc.collect()
    # Objects that are never collected do not make forked pages private.
    gc.freeze()
    huge_pages.gather()


class Run:
    """The ranks of one run and the supervisor that asked for them."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.processes: list[Any] = []
        self.ended: set[int] = set()

    def end(self) -> None:
        """SIGKILL whatever is left and reap it."""
        for process in self.processes:
            if process.is_alive():
                process.kill()
        for process in self.processes:
            process.join()
        self.connection.close()


class Forkserver:
    """The loop: new supervisors, their requests, the ends of ranks."""

    #: How a rank's process begins; benchmarks compare with ``spawn``.
    start_method: Literal["fork", "spawn"] = "fork"

    def __init__(self, path: Path) -> None:
        self._selector = selectors.DefaultSelector()
        self._listener = wire.seqpacket()
        self._listener.bind(str(path))
        self._listener.listen(64)
        self._selector.register(self._listener, selectors.EVENT_READ, None)
        self._runs: set[Run] = set()

    def serve(self) -> None:
        """Serve until killed."""
        while True:
            for key, _ in self._selector.select():
                if key.data is None:
                    self._accept()
                elif isinstance(key.data, Run):
                    self._hear(key.data)
                else:
                    self._rank_ended(*key.data)

    def _accept(self) -> None:
        connection, _ = self._listener.accept()
        run = Run(connection)
        self._runs.add(run)
        self._selector.register(connection, selectors.EVENT_READ, run)

    def _hear(self, run: Run) -> None:
        try:
            data, _ = wire.receive(run.connection)
        except OSError:
            data = b""
        if not data:
            self._forget(run)
            return
        request = events.load(data)
        if "start" in request:
            self._start(run, request["start"], request["ranks"])

    def _forget(self, run: Run) -> None:
        for rank, process in enumerate(run.processes):
            if rank not in run.ended:
                self._selector.unregister(process.sentinel)
        self._selector.unregister(run.connection)
        run.end()
        self._runs.discard(run)

    def _start(self, run: Run, folder: str, ranks: int) -> None:
        import torch.multiprocessing as torch_processes

        assert not run.processes, "one start per run"
        context = torch_processes.start_processes(
            enter_rank,
            args=(folder, os.getpid(), self._inherited()),
            nprocs=ranks,
            join=False,
            start_method=self.start_method,
        )
        run.processes = list(context.processes)
        for rank, process in enumerate(run.processes):
            self._selector.register(process.sentinel, selectors.EVENT_READ, (run, rank))
        self._tell(run, {"pids": [process.pid for process in run.processes]})

    def _inherited(self) -> list[int]:
        """The descriptors that a forked rank has and must not keep."""
        if self.start_method != "fork":
            return []
        connections = [other.connection.fileno() for other in self._runs]
        return [self._listener.fileno(), self._selector.fileno(), *connections]

    def _rank_ended(self, run: Run, rank: int) -> None:
        process = run.processes[rank]
        self._selector.unregister(process.sentinel)
        process.join()
        run.ended.add(rank)
        self._tell(run, {"rank": rank, "exit": process.exitcode})

    def _tell(self, run: Run, message: dict[str, Any]) -> None:
        try:
            wire.send(run.connection, events.dump(message))
        except WireError:
            # The supervisor hung up; its end is heard by the loop itself.
            return


def enter_rank(rank: int, folder: str, forkserver: int, inherited: list[int]) -> None:
    """The first thing a forked rank does: cut its ties, then run the program."""
    die_with_parent(forkserver)
    for fd in inherited:
        os.close(fd)
    signal.set_wakeup_fd(-1)
    from faultlab.rank.program import main

    main(Path(folder), rank)


def main() -> None:
    """``python -m faultlab.runner.forkserver SOCKET PARENT``: says ``ready`` on stdout."""
    path, parent = Path(sys.argv[1]), int(sys.argv[2])
    die_with_parent(parent)
    preload()
    server = Forkserver(path)
    print("ready", flush=True)
    server.serve()


if __name__ == "__main__":
    main()
