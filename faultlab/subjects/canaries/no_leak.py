"""Canaries of ``no_leak``: something is not given back."""

from __future__ import annotations

from typing import Any

from faultlab.subjects.canaries.base import Canary


class NeverGivesBack(Canary):
    """Destroy does nothing."""

    breaks = frozenset({"no_leak"})

    def destroy(self) -> None:
        return


class LeavesAFolder(Canary):
    """A temporary folder per creation stays behind."""

    breaks = frozenset({"no_leak"})

    def create(self) -> Any:
        import tempfile

        tempfile.mkdtemp(prefix="canary-")
        return super().create()


CANARIES = {
    "never-gives-back": NeverGivesBack,
    "leaves-a-folder": LeavesAFolder,
}
