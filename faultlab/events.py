"""The events of a run: what is recorded, and nothing else is judged.

A run's folder holds ``run.json`` (the scenario as resolved), one
``rank<N>.jsonl`` per rank, written by the rank itself, ``supervisor.jsonl``, and
``counterfactuals.json`` where the runner tried higher rungs alone (described at the
end). Every line of a ``.jsonl`` is one event, a
JSON object. Every event has

    v       schema version (``VERSION``)
    n       number of the event within its rank, from 0
    t       machine time in seconds since the run began
    kind    one of the kinds below

A rank's events also have ``thread`` (``main`` or a name) and, once the
workload runs, ``step`` (index into the workload, -1 outside of it). The steps inside a
capture are steps of their own and come first, one index each; the step ``capture`` has
the index after theirs, begins when they have ended, ends the capture and replays it.
So no step has another inside it: ``[create, {capture: [use]}, use]`` is create 0, use 1,
capture 2, use 3. What is recorded between ``capture-begin`` and ``capture-end`` happened
while a stream captured.

Kinds a rank records
    start        pid, subject, subject_version, flashinfer, machine, declared (names of the subject's declared errors), logs (bool: the subject logs),
                 ladder [rung…]: the rungs that the subject may choose by itself, best first,
                 own_sequence (bool: it sets workspaces up itself; FlashInfer's creation does not run)
    enter        id, site, argument, call (number within rank and site since the first create; 0 for the lab's own calls), phase, during, lab (bool)
    wait-begin   id, site, wait (see WAIT): the call really waits now, for peers or for time
    wait-end     id, site
    leave        id, site, result ("ok", an error's name, or "raised"), error {type, text, code} or null, made [ledger object…], released [object id…], value (small values only)
    fault        fault (index), id, site, call, effect, when, refers [object id…] (what a struck release named), made [object id…]
    step-begin   name, round (how often this step's name ran before)
    step-end     name, result: {"returned": "object"|"none"|"done"|"raised", "error": {type, text, code, declared} or null,
                 "backend": str|null, "workspace": id|null}
    workspace    workspace (id), backend, creation, mc_ptr (number or null), needs_multicast (bool): an object that creation returned
    use          number, path is told by the kernel and collective events inside; tokens, max_abs_error (null: infinite), tolerance, correct (bool)
    captured     number: use ``number`` was launched into the capture; its ``use`` follows the replay, in the step ``capture``
    capture-begin  a stream of the main thread begins to capture
    capture-end  error (the name of the code that the capture ended with, or null: it can be replayed)
    state        before, after: {name: digest}: the caller's state around one step
    ledger       label ("baseline", "step", "end"), objects, os, device_bytes, context
    log          level, logger, message, exception (the end of the traceback that it carries, or "")
    probe        name ("context", "collective"), group, label (the group's name in torch), ok (null: could not be asked), error, number
    sequence     groups: {name: [op, …]}: every collective the subject and the lab made, per group, in order (hash and length)
    unknown-call name
    sticky       error, site, injected (bool: by the scenario), reason: a kernel met an unusable pointer, or a fault poisoned the context
    exit         status: the rank program's own last word

Kinds the supervisor records
    hang         waits: [{rank, thread, site, waits_for, text, since, deadline}…], remaining_s, step
    jump         from, to: machine time moved forward because everybody waited
    over-budget  text: the run was ended because machine time ran out
    rank-exit    rank, exit (status, or null), signal (name, or null), expected (bool: its own last word, or the lab ended it), last_site
    lab-error    text: the lab itself failed
    end          machine_s, seconds

WAIT: {"kind": "collective"|"multicast"|"kernel"|"descriptor"|"thread"|"sleep"|"hang", "group", "number", "needs": [rank…],
"deadline": machine time or null, "text"}. ``needs``: the ranks that must arrive before this one can leave.

``counterfactuals.json``: {"v", "subject", "rungs": {rung: {"outcome", "path", "broken": [invariant…],
"unknown": why nothing can be said of it, or ""}}}: how the same faults ended
for a rung alone (``judge.counterfactual``).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import orjson

VERSION: Final = 1

#: One event: plain JSON data.
Event = dict[str, Any]

RANK_KINDS: Final = frozenset(
    {
        "start",
        "enter",
        "wait-begin",
        "wait-end",
        "leave",
        "fault",
        "step-begin",
        "step-end",
        "workspace",
        "use",
        "captured",
        "capture-begin",
        "capture-end",
        "state",
        "ledger",
        "log",
        "probe",
        "sequence",
        "unknown-call",
        "sticky",
        "exit",
    }
)
#: Of a rank's kinds, those that its supervisor follows: who waits, and where each one is.
FOLLOWED_KINDS: Final = frozenset({"start", "wait-begin", "wait-end", "step-begin", "step-end", "exit"})
SUPERVISOR_KINDS: Final = frozenset({"hang", "jump", "over-budget", "rank-exit", "lab-error", "end"})


#: How far back the last site of a rank is looked for.
TAIL_BYTES: Final = 32_768


def dump(event: Any) -> bytes:
    """Plain data as one line of JSON, without its newline."""
    try:
        return orjson.dumps(event)
    except TypeError:
        # Text that is no text (lone surrogates), or a number of more than 64 bits.
        return json.dumps(event, separators=(",", ":"), allow_nan=False).encode()


def load(data: bytes) -> Any:
    """What ``dump`` made, as data again. Raises ValueError if it is no JSON."""
    try:
        return orjson.loads(data)
    except orjson.JSONDecodeError:
        return json.loads(data)


def rank_file(folder: Path, rank: int) -> Path:
    """Where a rank's events are."""
    return folder / f"rank{rank}.jsonl"


def last_site(path: Path, thread: str | None = None) -> str:
    """The last site that was entered, by this thread or by any; empty if there is
    none among the last ``TAIL_BYTES`` of the file."""
    try:
        with path.open("rb") as file:
            start = max(0, path.stat().st_size - TAIL_BYTES)
            file.seek(start)
            lines = file.read(TAIL_BYTES).split(b"\n")
    except OSError:
        return ""
    # The last piece is no whole line, nor is the first where the file was cut.
    for line in reversed(lines[1 if start else 0 : -1]):
        if b'"kind":"enter"' in line:
            event = load(line)
            if thread in (None, event["thread"]):
                return str(event["site"])
    return ""


def read(path: Path) -> Iterator[Event]:
    """The events of one file; a half-written last line (a killed writer) is left out."""
    if not path.exists():
        return
    # Parsed as one array: a call of the parser for every line takes three times as long.
    whole = path.read_bytes().split(b"\n")[:-1]
    for event in load(b"[" + b",".join(whole) + b"]"):
        if event.get("v") != VERSION:
            raise ValueError(f"{path}: event schema {event.get('v')}, this faultlab reads {VERSION}")
        yield event
