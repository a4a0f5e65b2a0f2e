"""Kill any one process of the lab, and everything is gone within 5 s; kill all,
and the next start removes what is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from faultlab.runner import cleanup
from faultlab.runner.session import root_folder

pytestmark = [pytest.mark.sim, pytest.mark.slow]

#: A run that hangs for good by machine time: it waits for us to kill something.
WAITS = """\
faultlab: 1
title: spins until it is ended
topology: pcie-4
ranks: 2
subject: tests.subjects:SpinsForEver
budget: {init_s: 1000, run_s: 1000}
"""


class Lab:
    """A running ``faultlab run`` and the processes it is made of."""

    def __init__(self, path: Path, root: Path) -> None:
        environment = {**os.environ, "TMPDIR": str(root), "PYTHONPATH": os.pathsep.join(sys.path)}
        self.main = subprocess.Popen(
            [sys.executable, "-m", "faultlab.cli", "run", str(path)],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            env=environment,
        )
        self.root = root / f"faultlab-{os.getuid()}"

    def wait_for_ranks(self) -> None:
        wait_until(lambda: len(self.ranks()) == 2 and all(self.spinning(pid) for pid in self.ranks()), 60)

    def spinning(self, pid: int) -> bool:
        return psutil.Process(pid).cpu_times().user > 0.2

    @property
    def session(self) -> str:
        (folder,) = list(self.root.iterdir())
        return folder.name

    def forkserver(self) -> int:
        (found,) = [
            p.pid
            for p in psutil.Process(self.main.pid).children()
            if "faultlab.runner.forkserver" in p.cmdline()
        ]
        return found

    def warden(self) -> int:
        (found,) = [
            p.pid
            for p in psutil.Process(self.main.pid).children()
            if any("cleanup.py" in w for w in p.cmdline())
        ]
        return found

    def ranks(self) -> list[int]:
        try:
            return [each.pid for each in psutil.Process(self.forkserver()).children()]
        except (ValueError, psutil.NoSuchProcess):
            return []

    def everything(self) -> list[int]:
        return [self.main.pid, self.forkserver(), self.warden(), *self.ranks()]


def wait_until(condition: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.02)


@pytest.fixture
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    root = Path(os.environ.get("TMPDIR", "/tmp")) / f"fl{os.getpid()}"
    root.mkdir()
    path = root / "case.yaml"
    path.write_text(WAITS)
    made = Lab(path, root)
    made.wait_for_ranks()
    yield made
    if made.main.poll() is None:
        made.main.kill()
    made.main.wait()
    cleanup.remove_abandoned(made.root)
    for each in (path, made.root):
        if each.is_dir():
            each.rmdir()
        else:
            each.unlink(missing_ok=True)
    root.rmdir()


def gone(pids: list[int]) -> bool:
    return all(
        not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE for pid in pids
    )


def empty(root: Path) -> bool:
    return not list(root.iterdir())


@pytest.mark.parametrize("victim", ["forkserver", "main"])
def test_everything_is_gone_after_one_is_killed(lab: Lab, victim: str) -> None:
    pids = lab.everything()
    os.kill(lab.forkserver() if victim == "forkserver" else lab.main.pid, signal.SIGKILL)
    wait_until(lambda: gone(pids) and empty(lab.root), 5)
    if victim == "forkserver":
        assert lab.main.wait(5) == 4
        assert lab.main.stderr is not None
        assert b"Traceback" not in lab.main.stderr.read()


def test_a_killed_rank_is_noticed_and_the_run_goes_on(lab: Lab) -> None:
    pids = lab.everything()
    first, second = lab.ranks()
    os.kill(first, signal.SIGKILL)
    wait_until(lambda: lab.ranks() == [second], 5)
    os.kill(second, signal.SIGKILL)
    lab.main.wait(10)
    wait_until(lambda: gone(pids) and empty(lab.root), 5)


def test_a_killed_warden_leaves_the_cleaning_to_the_session(lab: Lab) -> None:
    pids = lab.everything()
    os.kill(lab.warden(), signal.SIGKILL)
    lab.main.send_signal(signal.SIGINT)
    assert lab.main.wait(10) == 130
    wait_until(lambda: gone(pids) and empty(lab.root), 5)


def test_an_interrupt_ends_everything_with_130(lab: Lab) -> None:
    pids = lab.everything()
    lab.main.send_signal(signal.SIGINT)
    assert lab.main.wait(10) == 130
    wait_until(lambda: gone(pids) and empty(lab.root), 5)


def test_after_all_are_killed_the_next_start_cleans_up(lab: Lab) -> None:
    pids = lab.everything()
    os.kill(lab.warden(), signal.SIGSTOP)
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    wait_until(lambda: gone(pids), 5)
    assert not empty(lab.root)
    removed: list[str] = []
    # A killed process with threads is a zombie a moment before its last thread drops the lock.
    wait_until(lambda: bool(removed.extend(cleanup.remove_abandoned(lab.root)) or removed), 5)
    assert empty(lab.root)


def test_no_session_of_this_process_is_taken_for_abandoned(faultlab_session: object) -> None:
    folders = set(root_folder().iterdir())
    cleanup.remove_abandoned(root_folder())
    assert getattr(faultlab_session, "folder") in folders & set(root_folder().iterdir())  # noqa: B009
