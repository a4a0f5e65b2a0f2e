"""Where the ranks of one kernel launch meet.

Real all-reduce kernels spin on their peers' flags or data; here each rank
arrives at a meeting, named by the workspace and the number of the launch, and
goes on once every rank has come. A meeting that was complete stays complete,
whoever dies afterwards, so the answer does not depend on who is asked first.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Meeting:
    """One launch: who has come, and who has gone on."""

    world: int
    arrived: set[int] = field(default_factory=set)
    left: set[int] = field(default_factory=set)

    @property
    def complete(self) -> bool:
        return len(self.arrived) >= self.world


class Rendezvous:
    """All meetings that somebody has come to and not everybody has left."""

    def __init__(self) -> None:
        self._meetings: dict[tuple[str, int], Meeting] = {}

    def arrive(self, rank: int, key: str, launch: int, world: int) -> bool:
        """The rank comes, once. Whether that is news."""
        meeting = self._meetings.setdefault((key, launch), Meeting(world))
        new = rank not in meeting.arrived
        meeting.arrived.add(rank)
        return new

    def arrived(self, key: str, launch: int) -> frozenset[int]:
        """Who has come."""
        return frozenset(self._meetings[key, launch].arrived)

    def leave(self, rank: int, key: str, launch: int) -> bool:
        """The rank goes on if it may; the last one to leave closes the meeting."""
        meeting = self._meetings[key, launch]
        if not meeting.complete:
            return False
        meeting.left.add(rank)
        self._close_if_over(key, launch)
        return True

    def forget(self, rank: int) -> None:
        """The rank died: it will not be met any more, nor will it leave."""
        for (key, launch), meeting in list(self._meetings.items()):
            if meeting.complete:
                meeting.left.add(rank)
            else:
                meeting.arrived.discard(rank)
            self._close_if_over(key, launch)

    def snapshot(self) -> list[dict[str, object]]:
        """Every open meeting, for the log."""
        return [
            {"key": key, "launch": launch, "world": meeting.world, "arrived": sorted(meeting.arrived)}
            for (key, launch), meeting in self._meetings.items()
        ]

    def _close_if_over(self, key: str, launch: int) -> None:
        meeting = self._meetings[key, launch]
        if meeting.left >= meeting.arrived:
            del self._meetings[key, launch]
