"""A session of the lab: its folder, its warden, its forkserver, and the runs in it.

One session per process that runs scenarios (a command line, a pytest worker).
``run`` may be called from several threads: each run has a supervisor of its
own. What dies with what, after kill -9 of any one process:

    a rank        its run goes on without it and says so
    the ranks     die with the forkserver, by the kernel (PR_SET_PDEATHSIG)
    the forkserver  dies with the session's process, likewise
    the session   the warden hears its pipe close, ends and removes everything
    the warden    the session's own end removes everything

and after all at once, the next session removes what it finds abandoned.
"""

from __future__ import annotations

import atexit
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import uuid
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any, ClassVar

from faultlab import events, limits
from faultlab.errors import LabError
from faultlab.machine.board import Board
from faultlab.runner import cleanup
from faultlab.runner.answers import Answers
from faultlab.runner.supervisor import Supervisor
from faultlab.scenario.models import Scenario

#: A socket's address has 108 bytes; FlashInfer's own sockets lie in a rank's folder.
_ROOT_LENGTH_MAX = 40

_SHARED_MEMORY = Path("/dev/shm")


def root_folder() -> Path:
    """Where sessions lie: short enough for the sockets in them.

    Where TMPDIR names no place and shared memory is large enough, there: a
    run makes and removes some forty entries, and a disk's file system is slow
    at that. Its size is asked, not what is free: the next session must find the same place.
    """
    base = Path(tempfile.gettempdir())
    if "TMPDIR" not in os.environ and _total_bytes(_SHARED_MEMORY) >= limits.SHARED_MEMORY_MIN_BYTES:
        base = _SHARED_MEMORY
    if len(str(base)) > _ROOT_LENGTH_MAX:
        base = Path("/tmp")
    return base / f"faultlab-{os.getuid()}"


def _total_bytes(folder: Path) -> int:
    """How large its file system is; 0 if one cannot write there."""
    if not os.access(folder, os.W_OK | os.X_OK):
        return 0
    status = os.statvfs(folder)
    return status.f_frsize * status.f_blocks


class Session:
    """Opens with ``with Session() as session`` and leaves nothing behind."""

    #: What starts ranks: it is given the path of its socket and its parent's pid.
    forkserver_command: ClassVar[tuple[str, ...]] = (sys.executable, "-m", "faultlab.runner.forkserver")

    def __init__(self) -> None:
        root = root_folder()
        root.mkdir(mode=0o700, exist_ok=True)
        if root.stat().st_uid != os.getuid():
            raise LabError(f"{root} belongs to somebody else")
        self.name = uuid.uuid4().hex[:8]
        self.folder, self._lock = cleanup.new_session(root, self.name)
        self._warden = self._start_warden()
        self._forkserver: subprocess.Popen[bytes] | None = None
        self.counterfactuals = Answers()
        self._starting = threading.Lock()
        # The kernel ends a child with the thread that started it: this one lasts.
        self._starter = ThreadPoolExecutor(max_workers=1, thread_name_prefix="starter")
        self._runs = 0
        self._stopping = False
        self._closed = False
        self._owner = os.getpid()
        atexit.register(self.close)

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def stop(self) -> None:
        """End every run soon; ``run`` then raises LabError."""
        self._stopping = True

    def close(self) -> None:
        """End every process of the session and remove its folder."""
        if self._closed or os.getpid() != self._owner:
            return
        self._closed = True
        self._stopping = True
        if self._forkserver is not None:
            self._forkserver.kill()
            self._forkserver.wait()
        # Its ranks die with it, by the kernel; the folder is theirs until then.
        cleanup.end_processes(self.name)
        shutil.rmtree(self.folder, ignore_errors=True)
        os.close(self._lock)
        self._dismiss_warden()
        self._starter.shutdown(wait=False)

    def _start_warden(self) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [sys.executable, "-I", "-S", cleanup.__file__, str(self.folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            cwd="/",
        )

    def _dismiss_warden(self) -> None:
        assert self._warden.stdin is not None
        try:
            self._warden.stdin.write(b"x")
            self._warden.stdin.close()
        except OSError:
            pass  # It is dead already.
        self._warden.wait()

    # ------------------------------------------------------------ forkserver

    def warm_up(self) -> None:
        """Start the forkserver, unless it runs: the one slow import."""
        with self._starting:
            if self._forkserver is None:
                self._forkserver = self._starter.submit(self._start_forkserver).result()

    def _start_forkserver(self) -> subprocess.Popen[bytes]:
        log = (self.folder / "forkserver.log").open("wb")
        with log:
            process = subprocess.Popen(
                [*self.forkserver_command, str(self.folder / "forkserver"), str(os.getpid())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,
                env=_environment(self.name, self.folder),
            )
        assert process.stdout is not None
        timer = threading.Timer(limits.FORKSERVER_START_S, process.kill)
        timer.start()
        try:
            said = process.stdout.readline()
        finally:
            timer.cancel()
        if said.strip() != b"ready":
            process.kill()
            process.wait()
            words = (self.folder / "forkserver.log").read_text(errors="replace").strip().splitlines()
            raise LabError("the forkserver did not start: " + (words[-1] if words else "it said nothing"))
        return process

    # ------------------------------------------------------------------ runs

    def run(self, scenario: Scenario, lane: str = "sim", *, overrides: dict[str, Any] | None = None) -> Path:
        """Run one scenario; the folder with what happened, the caller's to remove.

        Raises LabError if the lab itself failed or was stopped.
        """
        assert lane == "sim", "the gpu lane is not built yet"
        self.warm_up()
        with self._starting:
            self._runs += 1
            folder = self.folder / f"r{self._runs}"
        folder.mkdir()
        write_plan(folder, scenario, lane, overrides or {})
        board = Board(scenario.topology, list(range(scenario.ranks)))
        supervisor = Supervisor(
            folder,
            self.folder / "forkserver",
            ranks=scenario.ranks,
            board=board,
            init_s=scenario.budget.init_s,
            run_s=scenario.budget.run_s,
            stop=lambda: self._stopping,
        )
        supervisor.run()
        if self._stopping:
            raise LabError("the run was stopped")
        return folder


def write_plan(folder: Path, scenario: Scenario, lane: str, overrides: dict[str, Any]) -> None:
    """Write ``run.json``: everything a rank and a judge need to know."""
    plan = {
        "v": events.VERSION,
        "id": scenario.id,
        "lane": lane,
        "scenario": scenario.model_dump(mode="json", by_alias=True),
        "versions": versions(),
        "overrides": overrides,
    }
    (folder / "run.json").write_text(json.dumps(plan, indent=1))


@cache
def versions() -> dict[str, str]:
    """The versions a result depends on; do not change what is returned."""
    found = {"python": sys.version.split()[0]}
    for package in ("faultlab", "torch", "flashinfer-python", "cuda-bindings"):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = "unknown"
    return found


def keep(folder: Path, destination: Path) -> None:
    """Copy what a run recorded, without its sockets and temporary folders."""
    destination.mkdir(parents=True, exist_ok=True)
    for entry in folder.iterdir():
        if entry.suffix in (".json", ".jsonl", ".log") and entry.is_file():
            shutil.copyfile(entry, destination / entry.name)


def _environment(session: str, folder: Path) -> dict[str, str]:
    environment = dict(os.environ)
    environment[cleanup.SESSION_VARIABLE] = session
    environment["TMPDIR"] = str(folder)
    # Warnings of the preload and of torch's launcher are no subject's words.
    environment.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    environment["FLASHINFER_DISABLE_VERSION_CHECK"] = "1"
    environment["PYTHONUNBUFFERED"] = "1"
    # No GPU is looked for when FlashInfer is imported (compilation_context.py).
    environment["FLASHINFER_CUDA_ARCH_LIST"] = "9.0a"
    environment["OMP_NUM_THREADS"] = "1"
    # The heap in huge pages (a tunable of glibc, where it has it): a
    # fork then copies a hundred times fewer page table entries, and so does the end of a rank.
    environment["GLIBC_TUNABLES"] = "glibc.malloc.hugetlb=1"
    environment.pop("FLASHINFER_CONFIDENTIAL_COMPUTE", None)
    return environment


__all__ = ["Session", "keep", "root_folder", "versions", "write_plan"]
