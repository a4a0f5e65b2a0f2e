"""Every error that faultlab raises on purpose, drawn as a tree.

    FaultlabError
      x ScenarioError            a scenario or topology file is wrong            exit 3
        . ScenarioErrors         several of them, reported together              exit 3
      x UsageError               the command line is wrong                       exit 4
      x LabError                 the lab itself failed: a process it needs died  exit 4
        . WireError              a rank and the supervisor lost each other
      x SubjectError             the subject could not be loaded                 verdict unknown
      x UnknownCall              a call that the simulated machine does not know  verdict unknown

Bad input never ends in a traceback: the command line and the pytest plugin
print ``str(error)`` of any of these, and nothing else.
"""

from __future__ import annotations


class FaultlabError(Exception):
    """The root of the tree: whatever faultlab reports to a person."""


class ScenarioError(FaultlabError):
    """One mistake in a file, with the place where it stands.

    ``path``, ``line`` and ``column`` (both from 1) name the place, ``message``
    says what is wrong, ``hint`` what to do, ``excerpt`` is the source line.
    """

    def __init__(
        self,
        message: str,
        *,
        path: str = "",
        line: int = 0,
        column: int = 0,
        hint: str = "",
        excerpt: str = "",
    ) -> None:
        assert message, "an error needs a message"
        assert line >= 0 and column >= 0
        self.message = message
        self.path = path
        self.line = line
        self.column = column
        self.hint = hint
        self.excerpt = excerpt
        super().__init__(self.render())

    def render(self) -> str:
        """``file:line:column: message``, the source line, a caret, a hint."""
        place = self.path
        if self.line:
            place += f":{self.line}:{max(self.column, 1)}"
        lines = [f"{place}: {self.message}" if place else self.message]
        if self.excerpt:
            lines.append(f"  {self.excerpt}")
            if self.column:
                lines.append("  " + " " * (self.column - 1) + "^")
        if self.hint:
            lines.append(f"  {self.hint}")
        return "\n".join(lines)


class ScenarioErrors(ScenarioError):
    """Several mistakes, in the order in which a reader meets them."""

    def __init__(self, errors: list[ScenarioError]) -> None:
        assert errors, "an empty list of errors is no error"
        self.errors = errors
        first = errors[0]
        super().__init__(
            first.message,
            path=first.path,
            line=first.line,
            column=first.column,
            hint=first.hint,
            excerpt=first.excerpt,
        )

    def render(self) -> str:
        return "\n".join(error.render() for error in self.errors)


class UsageError(FaultlabError):
    """The command line asks for something that does not exist."""


class LabError(FaultlabError):
    """The lab itself failed; no verdict can be trusted."""


class WireError(LabError):
    """A rank and the supervisor lost each other."""


class SubjectError(FaultlabError):
    """The code under test could not be loaded or does not fit the interface."""


class UnknownCall(FaultlabError):
    """The simulated machine does not know this call, so it answers nothing."""
