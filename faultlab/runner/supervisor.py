"""The supervisor of one run: hears every rank, holds what they share, ends what must end.

One object and one thread per run. It starts the ranks through the forkserver,
follows what they record (``follower``), answers their
requests (the shared half of the simulated machine, sleeping, meeting), notices
a dead rank, finds a hang (``standstill``), moves machine time forward when everybody only waits for
a time-out, and ends a run that is over its budget. It judges nothing.
"""

from __future__ import annotations

import os
import selectors
import signal
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from faultlab import events, limits
from faultlab.errors import LabError
from faultlab.machine.board import Board, Reply, Waiting
from faultlab.runner import standstill, wire
from faultlab.runner.clock import MachineClock
from faultlab.runner.follower import Follower
from faultlab.runner.standstill import Movement, RankState, Wait

SOCKET_NAME = "supervisor"


@dataclass(eq=False)
class Peer:
    """One connection: a thread of a rank."""

    connection: socket.socket
    rank: int = -1
    thread: str = "?"
    #: The request that is not answered yet.
    parked: tuple[str, dict[str, Any], Wait] | None = None


class Supervisor:
    """Runs the ranks whose plan lies in ``folder`` and records what they do."""

    def __init__(
        self,
        folder: Path,
        forkserver: Path,
        *,
        ranks: int,
        board: Board,
        init_s: float,
        run_s: float,
        stop: Callable[[], bool] = lambda: False,
    ) -> None:
        self._folder = folder
        self._forkserver_path = forkserver
        self._ranks = [RankState(rank) for rank in range(ranks)]
        self._followers = [Follower(folder, state) for state in self._ranks]
        self._board = board
        self._init_s = init_s
        self._run_s = run_s
        self._stop = stop
        self._clock = MachineClock(folder / "clock", create=True)
        self._selector = selectors.DefaultSelector()
        self._peers: set[Peer] = set()
        self._own: BinaryIO = (folder / "supervisor.jsonl").open("wb")
        self._number = 0
        self._board_version = board.version
        self._last_moved = time.monotonic()
        self._looked = 0.0
        self._timeout_s = 0.0
        self._quiet_since: float | None = None
        self._samples = 0
        self._ending = False
        self._meetings: dict[str, set[int]] = {}
        self._began = time.monotonic()

    # ------------------------------------------------------------------ life

    def run(self) -> None:
        """Run to the end. Raises LabError if the lab itself failed."""
        try:
            self._start()
            while any(state.alive for state in self._ranks):
                self._turn()
            self._drain()
        finally:
            self._close()

    def _start(self) -> None:
        for state in self._ranks:
            (self._folder / f"t{state.rank}").mkdir()
        listener = wire.seqpacket()
        listener.bind(str(self._folder / SOCKET_NAME))
        listener.listen(4 * len(self._ranks))
        listener.setblocking(False)
        self._listener = listener
        self._selector.register(listener, selectors.EVENT_READ, self._accept)
        self._forkserver = wire.seqpacket()
        try:
            self._forkserver.connect(str(self._forkserver_path))
        except OSError as error:
            raise LabError(f"the forkserver is gone: {error}") from None
        self._selector.register(self._forkserver, selectors.EVENT_READ, self._hear_forkserver)
        wire.send(self._forkserver, events.dump({"start": str(self._folder), "ranks": len(self._ranks)}))

    def _close(self) -> None:
        self._forkserver.close()
        self._listener.close()
        for peer in list(self._peers):
            peer.connection.close()
        for follower in self._followers:
            follower.close()
        self._record(
            "end", machine_s=round(self._clock.now(), 6), seconds=round(time.monotonic() - self._began, 6)
        )
        self._own.close()
        self._selector.close()
        self._board.close()
        self._clock.close()

    def _turn(self) -> None:
        ready = self._selector.select(self._timeout_s)
        for key, _ in ready:
            key.data()
        self._answer_parked()
        now = time.monotonic()
        if ready and now - self._looked < limits.SUPERVISOR_LOOK_S:
            # Much is said at once: the clock is looked at when there is a pause, or soon.
            self._timeout_s = limits.SUPERVISOR_LOOK_S
            return
        self._looked = now
        grown = self._follow()
        self._wake_overdue()
        self._watch_limits()
        self._watch_movement(grown=grown)
        self._timeout_s = self._patience()

    def _follow(self) -> bool:
        """Read what the live ranks recorded since the last look; whether that is anything."""
        grown = [each.follow() for each in self._followers if each.state.alive]
        if any(grown):
            self._moved()
        return any(grown)

    def _moved(self) -> None:
        """Somebody said or recorded something: whoever looked asleep is not."""
        self._last_moved = time.monotonic()
        self._quiet_since = None

    def _patience(self) -> float:
        """How long the loop may sleep: until the next deadline, or a look at the ranks."""
        now = self._clock.now()
        deadline = standstill.earliest_deadline(self._ranks)
        ahead = limits.STANDSTILL_SAMPLE_S
        if deadline is not None:
            ahead = min(ahead, max(0.0, deadline - now))
        return min(ahead, max(0.0, self._run_s - now))

    def _drain(self) -> None:
        """Everybody is gone: read what their connections still hold."""
        for peer in list(self._peers):
            while peer in self._peers:
                self._hear(peer)

    # -------------------------------------------------------------- messages

    def _accept(self) -> None:
        connection, _ = self._listener.accept()
        # A child that the subject forked may hold a copy: reading must never block.
        connection.setblocking(False)
        peer = Peer(connection)
        self._peers.add(peer)
        self._selector.register(connection, selectors.EVENT_READ, lambda: self._hear(peer))

    def _hear(self, peer: Peer) -> None:
        if peer not in self._peers:
            return  # Drained in this very turn, when its rank's end was heard.
        try:
            data, fds = wire.receive(peer.connection)
        except OSError:
            data, fds = b"", []
        self._moved()
        if not data:
            self._hang_up(peer)
            return
        method, arguments = events.load(data)
        try:
            self._request(peer, method, arguments)
        finally:
            for fd in fds:
                os.close(fd)

    def _hang_up(self, peer: Peer) -> None:
        self._selector.unregister(peer.connection)
        peer.connection.close()
        self._peers.discard(peer)
        if peer.rank >= 0:
            self._ranks[peer.rank].threads.pop(peer.thread, None)

    # -------------------------------------------------------------- requests

    def _request(self, peer: Peer, method: str, arguments: dict[str, Any]) -> None:
        if method == "hello":
            peer.rank = arguments["rank"]
            state = self._ranks[peer.rank]
            state.pid = arguments["pid"]
            peer.thread = arguments["thread"]
            state.threads[peer.thread] = None
        elif method == "sleep":
            self._park(peer, method, arguments, kind="sleep", deadline=arguments["until"], text="sleeps")
        elif method == "hang":
            self._park(peer, method, arguments, kind="hang", text=arguments["text"])
        elif method == "meet":
            self._meetings.setdefault(arguments["label"], set()).add(peer.rank)
            self._park(peer, method, arguments, kind="meet", text="has finished and waits for the others")
        else:
            self._board_request(peer, method, arguments)

    def _board_request(self, peer: Peer, method: str, arguments: dict[str, Any]) -> None:
        answer = self._board.call(peer.rank, method, arguments)
        if isinstance(answer, Reply):
            self._reply(peer, answer)
        else:
            self._park(peer, method, arguments, kind=answer.kind, needs=answer.needs, text=answer.text)

    def _park(
        self,
        peer: Peer,
        method: str,
        arguments: dict[str, Any],
        *,
        kind: str,
        needs: tuple[int, ...] = (),
        deadline: float | None = None,
        text: str = "",
    ) -> None:
        # Its site is looked up if the table of a hang is asked for.
        wait = Wait(-1, "", kind, self._clock.now(), needs=needs, deadline=deadline, text=text)
        self._ranks[peer.rank].threads[peer.thread] = wait
        peer.parked = (method, arguments, wait)

    def _unpark(self, peer: Peer, reply: Reply) -> None:
        assert peer.parked is not None
        peer.parked = None
        self._ranks[peer.rank].threads[peer.thread] = None
        self._reply(peer, reply)

    def _reply(self, peer: Peer, reply: Reply) -> None:
        try:
            wire.send(peer.connection, events.dump(["reply", reply.value]), reply.fds)
        except LabError:
            pass  # It died while it waited; its end is heard from the forkserver.
        finally:
            if reply.close_fds:
                for fd in reply.fds:
                    os.close(fd)
        self._moved()

    def _answer_parked(self) -> None:
        """Try again what could not be answered, whenever something changed."""
        self._answer_meetings()
        while self._board.version != self._board_version:
            self._board_version = self._board.version
            for peer in list(self._peers):
                if peer.parked is None or peer.parked[0] in ("sleep", "hang", "meet"):
                    continue
                method, arguments, wait = peer.parked
                answer = self._board.call(peer.rank, method, arguments)
                if isinstance(answer, Reply):
                    self._unpark(peer, answer)
                else:
                    assert isinstance(answer, Waiting)
                    wait.needs, wait.text = answer.needs, answer.text

    def _answer_meetings(self) -> None:
        live = {state.rank for state in self._ranks if state.alive}
        for label, arrived in list(self._meetings.items()):
            if not arrived >= live:
                continue
            del self._meetings[label]
            dead = sorted(set(range(len(self._ranks))) - live)
            for peer in list(self._peers):
                if peer.parked is not None and peer.parked[1].get("label") == label:
                    self._unpark(peer, Reply(dead))

    def _wake_overdue(self) -> None:
        """Tell every thread whose deadline has passed; it decides what that means."""
        now = self._clock.now()
        for peer in list(self._peers):
            wait = self._ranks[peer.rank].wait_of(peer.thread) if peer.rank >= 0 else None
            if wait is None or wait.deadline is None or wait.deadline > now:
                continue
            if peer.parked is not None:
                self._unpark(peer, Reply(None))
            elif wait.kind in ("descriptor", "thread"):
                wait.deadline = None
                try:
                    wire.send(peer.connection, events.dump(["wake", wait.identity]))
                except LabError:
                    continue
                self._moved()

    # ----------------------------------------------------------------- ends

    def _hear_forkserver(self) -> None:
        try:
            data, _ = wire.receive(self._forkserver)
        except OSError:
            data = b""
        if not data:
            self._record("lab-error", text="the forkserver died")
            for state in self._ranks:
                state.alive = False
            raise LabError("the forkserver died; its ranks died with it")
        message = events.load(data)
        self._moved()
        if "pids" in message:
            for state, pid in zip(self._ranks, message["pids"], strict=True):
                state.pid = pid
        else:
            self._rank_ended(message["rank"], message["exit"])

    def _rank_ended(self, rank: int, status: int) -> None:
        for peer in [peer for peer in self._peers if peer.rank == rank]:
            # Its last words are in the connection; the end of it follows.
            while peer in self._peers:
                self._hear(peer)
        state = self._ranks[rank]
        self._followers[rank].follow()
        state.alive = False
        self._board.forget(rank)
        name = signal.Signals(-status).name if status < 0 else None
        self._record(
            "rank-exit",
            rank=rank,
            exit=status if status >= 0 else None,
            signal=name,
            expected=self._ending or state.finished,
            last_site=self._last_site(rank),
        )

    def _end_all(self) -> None:
        self._ending = True
        for state in self._ranks:
            if state.alive and state.pid:
                try:
                    os.kill(state.pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue

    def _watch_limits(self) -> None:
        if self._ending:
            return
        now = self._clock.now()
        late = [s.rank for s in self._ranks if s.alive and not s.started]
        if self._stop():
            self._end_all()
        elif late and time.monotonic() - self._began > limits.RANK_START_S:
            self._record("lab-error", text=f"ranks {late} did not start within {limits.RANK_START_S} s")
            self._end_all()
        elif now > self._run_s:
            where = "; ".join(
                f"rank {s.rank} at {self._last_site(s.rank) or 'its start'}" for s in self._ranks if s.alive
            )
            self._record("over-budget", text=f"the run took longer than {self._run_s} s: {where}")
            self._end_all()

    # ------------------------------------------------------------ standstill

    def _watch_movement(self, *, grown: bool) -> None:
        seen = Movement.RUNNING if grown or self._ending else standstill.movement(self._ranks)
        if seen is Movement.RUNNING or not any(state.alive for state in self._ranks):
            self._quiet_since = None
            return
        now = time.monotonic()
        if self._quiet_since is None:
            self._quiet_since, self._samples = now, 0
            return
        if now - self._quiet_since < limits.STANDSTILL_SAMPLE_S:
            return
        if seen is Movement.MOVABLE and now - self._last_moved < limits.STANDSTILL_UNCERTAIN_S:
            return
        self._take_sample(now)

    def _take_sample(self, now: float) -> None:
        """Look whether all are asleep; the second time in a row, with nothing said or
        recorded in between (``_moved``), it is a standstill."""
        if not self._all_asleep():
            self._quiet_since = None
        elif self._samples == 0:
            self._quiet_since, self._samples = now, 1
        else:
            # What was recorded between the look at the files and this one.
            if not self._follow():
                self._move_or_end()
            self._quiet_since = None

    def _all_asleep(self) -> bool:
        return standstill.all_asleep([state.pid for state in self._ranks if state.alive])

    def _move_or_end(self) -> None:
        """Everybody waits: on to the next time-out, or it is a hang."""
        deadline = standstill.earliest_deadline(self._ranks)
        budget = standstill.end_of_budget(self._ranks, self._init_s)
        now = self._clock.now()
        if budget is None:
            budget = now + self._init_s
        if deadline is not None and deadline <= budget:
            if deadline > now:
                self._record("jump", **{"from": round(now, 6), "to": round(deadline, 6)})
                self._clock.advance_to(deadline)
            return
        self._name_sites()
        rows = standstill.table(self._ranks)
        steps = {row["step"] for row in rows if row["kind"] != "meet"}
        self._record(
            "hang",
            waits=rows,
            remaining_s=round(max(0.0, budget - now), 6),
            step=max(steps, default=-1),
        )
        self._end_all()

    def _name_sites(self) -> None:
        """Where each thread is that waits in a request."""
        for peer in self._peers:
            if peer.parked is not None:
                peer.parked[2].site = self._last_site(peer.rank, peer.thread)

    def _last_site(self, rank: int, thread: str | None = None) -> str:
        return events.last_site(events.rank_file(self._folder, rank), thread)

    def _record(self, kind: str, **fields: Any) -> None:
        assert kind in events.SUPERVISOR_KINDS, kind
        event = {
            "v": events.VERSION,
            "n": self._number,
            "t": round(self._clock.now(), 6),
            "kind": kind,
            **fields,
        }
        self._number += 1
        self._own.write(events.dump(event) + b"\n")
