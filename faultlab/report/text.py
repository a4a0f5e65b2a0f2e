"""Results as text: a line per scenario as it ends, a block where one failed, a summary.

Promise: the same words with and without colour, made for 80 columns and for the
log of a CI; the cause stands on the first line of every block, and the command
that runs the scenario again on the last, never broken over lines. Everything is
read from a result (``report.results``). A new part of the block is a function
that yields lines and a line in ``_block``.
"""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.text import Text

Result = dict[str, Any]
#: A style of rich, empty for none, and the line.
Line = tuple[str, str]

WIDTH: Final = 80
_INDENT: Final = "      "
_WORDS: Final = {"pass": "PASS", "fail": "FAIL", "unknown": "UNKNOWN", "skipped": "SKIP"}
_STYLES: Final = {"pass": "green", "fail": "bold red", "unknown": "bold yellow", "skipped": "cyan"}
_OWN_SEQUENCE: Final = "own sequence"
_VERDICTS: Final = ("pass", "fail", "unknown", "skipped")
_SAID: Final = {"pass": "passed", "fail": "failed", "unknown": "unknown", "skipped": "skipped"}


def exit_code(results: Sequence[Result]) -> int:
    """0 all as expected and at least one pass, 1 some failed, 2 some unknown and none failed,
    5 nothing selected or everything skipped."""
    seen = {result["verdict"] for result in results}
    if "fail" in seen:
        return 1
    if "unknown" in seen:
        return 2
    return 0 if "pass" in seen else 5


def print_result(console: Console, result: Result) -> None:
    """The line of a scenario that has ended, with its block unless it passed or was skipped."""
    for style, line in result_lines(result):
        console.print(Text(line, style=style), soft_wrap=True)


def print_summary(console: Console, results: Sequence[Result], seconds: float) -> None:
    """The verdicts by file, and one line over all."""
    for style, line in summary_lines(results, seconds):
        console.print(Text(line, style=style), soft_wrap=True)


def render_result(result: Result) -> str:
    """A result for a person who sees nothing else of it: the cause first."""
    word = _WORDS[result["verdict"]]
    head = f"{word}: {_answer(result)}"
    return "\n".join([head, headline(result), *(line for _, line in _block(result, answered=True))])


def result_lines(result: Result) -> Iterator[Line]:
    """The headline, and the block of a result that is neither a pass nor skipped."""
    yield _STYLES[result["verdict"]], headline(result)
    if result["verdict"] in ("fail", "unknown"):
        yield from _block(result, answered=False)


def headline(result: Result) -> str:
    """``PASS  id  fallback/trtllm  0.31 s``; ``own sequence`` follows the path where that is what ran."""
    word = _WORDS[result["verdict"]]
    if result["verdict"] == "skipped":
        return f"{word}  {result['id']}  {_answer(result)}"
    outcome = f"{result['outcome'] or '-'}/{result['path'] or '-'}"
    seconds = "" if result["seconds"] is None else f"  {result['seconds']:.2f} s"
    own = f"  {_OWN_SEQUENCE}" if _notes(result)[_OWN_SEQUENCE] else ""
    return f"{word}  {result['id']}  {outcome}{own}{seconds}"


# ------------------------------------------------------------------- the block


def _block(result: Result, *, answered: bool) -> Iterator[Line]:
    """What a person needs to see the reason and to run it again."""
    if not answered:
        yield from _wrapped(_answer(result), style="bold")
    notes = _notes(result)
    for title in notes["title"]:
        yield from _wrapped(title)
    for text in notes[_OWN_SEQUENCE]:
        yield from _wrapped(f"{_OWN_SEQUENCE}: {text}")
    yield from _broken(result, notes["unexpected"])
    for missing in notes["missing"]:
        yield from _wrapped(f"not broken, though expected: {missing}", style="red")
    yield from _unfired(result)
    yield from _waits(result)
    yield "dim", f"{_INDENT}again: {result['replay']}"


def _broken(result: Result, unexpected: Sequence[str]) -> Iterator[Line]:
    """Each broken invariant, unless the answer is that very sentence."""
    for name, finding in result["invariants"].items():
        if finding["state"] != "broken" or _answer(result) == f"{name}: {finding['reason']}":
            continue
        known = "" if name in unexpected else " (expected)"
        yield from _wrapped(f"{name}{known}: {finding['reason']}", style="" if known else "red")


def _unfired(result: Result) -> Iterator[Line]:
    """The optional faults that stayed away; of another one the answer speaks."""
    if result["verdict"] != "fail":
        return
    for fault in result["faults"]:
        if not any(fault["fired"].values()):
            yield from _wrapped(f"the fault at {fault['at']} never fired")


def _waits(result: Result) -> Iterator[Line]:
    """Who waits for whom: a row per rank that was blocked when the run was ended."""
    blocked = [rank for rank in result["ranks"] if rank["blocked_on"]]
    if not any(rank["outcome"] == "hang" for rank in result["ranks"]) or not blocked:
        return
    yield "", f"{_INDENT}who waits for whom:"
    rows = [_wait_row(rank) for rank in blocked]
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    for *row, text in rows:
        cells = "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        yield "", f"{_INDENT}  {cells}"
        yield from _wrapped(text, indent=f"{_INDENT}    ")


def _wait_row(rank: dict[str, Any]) -> tuple[str, str, str, str, str]:
    wait = rank["blocked_on"]
    peers = ", ".join(str(peer) for peer in wait["waits_for"])
    peers = peers if len(peers) <= 16 else f"{len(wait['waits_for'])} ranks"
    site = "-" if wait["kind"] == "meet" else wait["site"] or "-"
    return f"rank {rank['rank']}", site, f"for {peers or '-'}", f"since {wait['since']:.2f} s", wait["text"]


def _answer(result: Result) -> str:
    """The first line of the reason."""
    return str(result["reason"]).partition("\n")[0]


def _notes(result: Result) -> dict[str, list[str]]:
    """The other lines of the reason, by what stands before the colon."""
    notes: dict[str, list[str]] = {"title": [], _OWN_SEQUENCE: [], "unexpected": [], "missing": []}
    for line in str(result["reason"]).splitlines()[1:]:
        word, _, text = line.partition(": ")
        notes[word].append(text)
    return notes


def _wrapped(text: str, *, style: str = "", indent: str = _INDENT) -> Iterator[Line]:
    for line in textwrap.wrap(
        text,
        WIDTH,
        initial_indent=indent,
        subsequent_indent=f"{indent}  ",
        break_long_words=False,
        break_on_hyphens=False,
    ):
        yield style, line


# ----------------------------------------------------------------- the summary


def summary_lines(results: Sequence[Result], seconds: float) -> Iterator[Line]:
    """``36 scenarios: 34 passed, 1 failed, 1 skipped in 12.3 s (3.0 a second)``, after the table."""
    if len({result["file"] for result in results}) > 1:
        yield "", ""
        yield from _table(results)
    yield "", ""
    counts = Counter(result["verdict"] for result in results)
    told = ", ".join(f"{counts[each]} {_SAID[each]}" for each in _VERDICTS if counts[each]) or "nothing ran"
    text = f"{len(results)} {'scenario' if len(results) == 1 else 'scenarios'}: {told}"
    ran = len(results) - counts["skipped"]
    if seconds > 0:
        text += f" in {seconds:.1f} s"
        text += f" ({ran / seconds:.1f} a second)" if ran else ""
    yield _STYLES[_worst(counts)], text


def _worst(counts: Counter[str]) -> str:
    return next((each for each in ("fail", "unknown", "pass") if counts[each]), "skipped")


def _table(results: Iterable[Result]) -> Iterator[Line]:
    """The verdicts of each file, in the order of their names; only columns that have a number."""
    by_file: dict[str, Counter[str]] = {}
    for result in results:
        by_file.setdefault(result["file"], Counter())[result["verdict"]] += 1
    columns = [each for each in _VERDICTS if any(counts[each] for counts in by_file.values())]
    names = dict(zip(by_file, _short(list(by_file)), strict=True))
    width = max(len(name) for name in [*names.values(), "file"])
    yield "bold", f"{'file'.ljust(width)}  " + "  ".join(_SAID[each].rjust(7) for each in columns)
    for file, counts in sorted(by_file.items()):
        numbers = "  ".join(str(counts[each] or "-").rjust(7) for each in columns)
        yield _STYLES[_worst(counts)], f"{names[file].ljust(width)}  {numbers}"


def _short(files: list[str]) -> list[str]:
    """The files without the folder that they share, and from the left no longer than half a line."""
    parents = [Path(file).parent.parts for file in files]
    shared = 0
    while all(len(parts) > shared and parts[shared] == parents[0][shared] for parts in parents):
        shared += 1
    names = [str(Path(*Path(file).parts[shared:])) for file in files]
    return [name if len(name) <= WIDTH // 2 else f"…{name[1 - WIDTH // 2 :]}" for name in names]
