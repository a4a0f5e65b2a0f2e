"""What a rank has recorded so far, followed by its supervisor.

A rank writes its events into its own file and tells nobody: that it waits, for whom, and
in which step it is, the supervisor reads there, whenever it looks.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Final

from faultlab import events, limits
from faultlab.runner.standstill import RankState, Wait

#: The beginning of a line that changes the picture of who waits for whom (``Link.emit``).
_FOLLOWED: Final = re.compile(
    rb'\{"v":\d+,"n":\d+,"t":[^,]+,"kind":"(?:' + "|".join(sorted(events.FOLLOWED_KINDS)).encode() + rb')"'
)


class Follower:
    """Reads the file of one rank and keeps its state up to date."""

    def __init__(self, folder: Path, state: RankState) -> None:
        self.state = state
        self._path = events.rank_file(folder, state.rank)
        self._fd = -1
        self._read_bytes = 0
        self._size_bytes = 0

    def follow(self) -> bool:
        """Note what was recorded since the last time; whether that is anything. A line
        that is half written waits for the next time."""
        before, self._size_bytes = self._size_bytes, self._measure()
        while self._read_bytes < self._size_bytes:
            part = os.pread(self._fd, limits.FOLLOWED_BYTES, self._read_bytes)
            whole = part.rfind(b"\n") + 1
            if not whole:
                break
            self._read_bytes += whole
            for line in part[:whole].split(b"\n"):
                if _FOLLOWED.match(line):
                    self._note(events.load(line))
        return self._size_bytes > before

    def close(self) -> None:
        """Give the descriptor back."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _measure(self) -> int:
        if self._fd < 0:
            try:
                self._fd = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
            except FileNotFoundError:
                return 0
        return os.fstat(self._fd).st_size

    def _note(self, event: events.Event) -> None:
        state, kind = self.state, event["kind"]
        if kind == "wait-begin":
            self._enter_wait(event)
        elif kind == "wait-end":
            waits = state.waits.get(event["thread"], [])
            if waits and waits[-1].identity == event["id"]:
                waits.pop()
        elif kind == "step-begin":
            state.step, state.step_name, state.step_since = event["step"], event["name"], event["t"]
        elif kind == "step-end":
            state.step, state.step_name = -1, ""
        elif kind == "start":
            state.started = True
        elif kind == "exit":
            state.finished = True

    def _enter_wait(self, event: events.Event) -> None:
        state, told = self.state, event["wait"]
        state.waits.setdefault(event["thread"], []).append(
            Wait(
                identity=event["id"],
                site=event["site"],
                kind=told["kind"],
                since=event["t"],
                needs=tuple(told.get("needs", ())),
                group=told.get("group", ""),
                number=told.get("number", 0),
                deadline=told.get("deadline"),
                text=told.get("text", ""),
            )
        )
        if told["kind"] == "collective":
            state.entered[told["group"]] = max(state.entered.get(told["group"], 0), told["number"])
