"""``clear_log``: one message per outcome that names the failing call, its code and the
rank; its severity follows the outcome. Judged for subjects that log.

Promise: judges what the subject's own loggers said at WARNING or above outside of
its teardown, and the text of a declared error; what FlashInfer or torch said is not
the subject's word. Broken is, in this order:

- **repeated**: the same words again in a later step or use of the same rank, and
  nothing was tried in between: no creation, no driver call that takes or gives back, no
  failed call, no destroy step;
- **too loud**: an ERROR in a create that returned a workspace all the same (an
  attempt that failed is a WARNING, vllm#55127), or a WARNING that mnnvl failed from a
  rank that got mnnvl while no call of it failed (a first connection that comes too early
  is none);
- **silent**: a struck group that ended in ``fallback`` or ``error``, and no rank said so;
- **unclear**: no message, of any rank, names for any one of the calls that a fault
  made fail the call, its error and the rank. Words are free (``naming``). A rank need not
  name itself in its own log. Of what failed inside FlashInfer's creation the subject
  sees that creation and its error alone, so that is enough; nothing need be named that
  creation swallowed. An exception has words of its own: its class or they are enough. An
  error of the runtime is enough without its call, which torch and ctypes hide.

Not asked to be named: wrong values, delays and lost messages (they have no code),
questions (an error there is often answered "no" by a library), releases, struck
collectives and descriptors. Not judged: runs in which the scenario took a rank out,
which crashed or hung, or whose ranks split; a fallback without a strike, which is the
subject's choice. One message from one rank is enough; a message from each rank is not
too many. Messages that differ in a number only are not taken for the same.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from faultlab.judge import naming, wording
from faultlab.judge.facts import Facts, RankFacts
from faultlab.judge.finding import HELD, Finding, Moment, at_step, broken, not_checked
from faultlab.judge.outcome import outcome_of
from faultlab.judge.records import Call, Said, Strike
from faultlab.sites import SITES

#: The steps in which a set-up may be tried; a teardown's messages are ``teardown_clean``'s.
_SET_UP: Final = ("create", "use", "collective", "capture")
_SEVERE: Final = ("ERROR", "CRITICAL")
_LOUD: Final = ("WARNING", *_SEVERE)
#: Roots of loggers that are not the subject's.
_LIBRARIES: Final = frozenset(
    {"flashinfer", "torch", "numpy", "asyncio", "cuda", "pynvml", "py", "concurrent"}
)
_NAMED_DOMAINS: Final = ("driver", "runtime", "step")
_QUESTIONS: Final = ("cuDeviceGet", "cuDeviceCan", "cuDriverGet", "cuMemGetInfo", "cuCtxGet")
_FAILURE = re.compile(
    r"fail|fall(s|ing|en)? ?back|not used|disabl|unavailab|unusab|unable|cannot|could not|refus",
    re.IGNORECASE,
)


def check(facts: Facts) -> Finding:
    """Whether what was said of the outcome is said once, in the right tone, and clearly."""
    if not any(rank.logs for rank in facts.ranks):
        return not_checked("the subject does not log")
    if facts.lost:
        gone = facts.lost[0]
        assert gone.ended is not None
        return not_checked(f"rank {gone.rank} was {gone.ended.title}")
    for rank in facts.ranks:
        problem = _repeated(rank) or _too_loud(facts, rank)
        if problem is not None:
            return problem
    ended = outcome_of(facts).outcome
    if ended not in ("fallback", "error"):
        return not_checked(
            f"the outcome is {ended or 'none'}: no fallback that a message would have to explain"
        )
    strikes = [strike for rank in facts.ranks for strike in _strikes(rank)]
    if not strikes:
        return not_checked("nothing was struck while the set-up ran: the choice is the subject's")
    messages = list(_messages(facts))
    if not messages:
        step = max(strike.moment.step for strike in strikes)
        return broken(
            f"{_end(facts)}, and no rank said so at WARNING or above{_quieter(facts)}", at_step(step)
        )
    return _clear(facts, messages)


# ------------------------------------------------------------------- messages


@dataclass(frozen=True)
class _Message:
    """What one rank told its user, with what came of it: a log record or a declared error."""

    rank: int
    text: str
    title: str


def _said(rank: RankFacts, levels: tuple[str, ...] = _LOUD) -> list[Said]:
    """The subject's own messages of these levels while it set up or used something."""
    steps = {step.index for step in rank.steps if step.name in _SET_UP}
    return [
        each
        for each in rank.said
        if each.level in levels
        and each.moment.step in steps
        and each.logger.partition(".")[0] not in _LIBRARIES
    ]


def _messages(facts: Facts) -> Iterator[_Message]:
    for rank in facts.ranks:
        for each in _said(rank):
            text = f"{each.message}\n{each.exception}"
            yield _Message(
                rank.rank, text, f"rank {rank.rank}, {each.level}: {wording.shortened(each.message, 120)}"
            )
        for step in rank.steps:
            if step.error is not None and step.error.declared:
                text = f"{step.error.type}: {step.error.text}"
                yield _Message(rank.rank, text, f"rank {rank.rank}, raised: {wording.shortened(text, 120)}")


def _end(facts: Facts) -> str:
    ended = outcome_of(facts)
    if ended.outcome == "error":
        return "the group ended with an error"
    return f"the group fell back to {ended.path}" if ended.path is not None else "the group fell back"


def _quieter(facts: Facts) -> str:
    """What was said below WARNING, for whoever looks for it."""
    for rank in facts.ranks:
        for each in _said(rank, ("DEBUG", "INFO")):
            return f" (rank {rank.rank}, {each.level}: {wording.shortened(each.message, 80)})"
    return ""


# ---------------------------------------------------------- once, in the right tone


def _repeated(rank: RankFacts) -> Finding | None:
    before: dict[str, Moment] = {}
    for each in _said(rank):
        first = before.get(each.message)
        if (
            first is not None
            and _later_call(rank, first, each.moment)
            and not _tried(rank, first, each.moment)
        ):
            return broken(
                f"rank {rank.rank}: said again in step {each.moment.step} what it had said in step "
                f"{first.step}, and nothing was tried in between: {wording.shortened(each.message, 100)}",
                each.moment,
            )
        before[each.message] = each.moment
    return None


def _later_call(rank: RankFacts, first: Moment, second: Moment) -> bool:
    """Whether the two lie in different calls of the subject."""
    return first.step != second.step or any(first.n < use.moment.n < second.n for use in rank.uses)


def _tried(rank: RankFacts, first: Moment, second: Moment) -> bool:
    """Whether there was anything new to tell of between the two."""
    return (
        any(
            first.n < call.began.n < second.n and not call.lab and (_sets_up(call) or not call.ok)
            for call in rank.calls
        )
        or any(first.n < strike.moment.n < second.n for strike in rank.strikes)
        or any(step.name == "destroy" and first.n < step.began.n < second.n for step in rank.steps)
    )


def _sets_up(call: Call) -> bool:
    """Whether a call is part of trying a set-up: a peer may be the one whose call failed."""
    if SITES[call.site].domain in ("driver", "descriptor"):
        return not call.site.startswith(_QUESTIONS)
    return call.site in ("workspace.create", "cudart.cudaMalloc")


def _too_loud(facts: Facts, rank: RankFacts) -> Finding | None:
    ready = {
        step.index: step.backend for step in rank.steps if step.name == "create" and step.returned == "object"
    }
    for each in _said(rank):
        if each.moment.step not in ready or each.logger == "root":
            continue
        backend = ready[each.moment.step]
        told = f"{each.level}: {wording.shortened(each.message, 120)}"
        if each.level in _SEVERE:
            return broken(
                f"rank {rank.rank}: create returned a {backend} workspace, and said {told}", each.moment
            )
        if backend == "mnnvl" and _cries_wolf(each.message) and not _failed(facts, rank, each.moment.step):
            return broken(
                f"rank {rank.rank}: mnnvl works and nothing failed, and it said {told}", each.moment
            )
    return None


def _cries_wolf(message: str) -> bool:
    lowered = message.lower()
    return "mnnvl" in lowered and "trtllm" not in lowered and _FAILURE.search(message) is not None


def _failed(facts: Facts, rank: RankFacts, step: int) -> bool:
    """Whether anything had failed by the end of this step, that a warning may speak of."""
    struck = any(strike.moment.step <= step for each in facts.ranks for strike in each.strikes)
    return struck or any(
        not call.ok and call.began.step <= step and not _came_too_early(call)
        for call in rank.calls
        if not call.lab
    )


def _came_too_early(call: Call) -> bool:
    """Whether a rank connected before its peer listened: FlashInfer tries again, and two
    ranks that run freely meet like this now and then."""
    return call.site == "fd.connect" and call.raised in ("FileNotFoundError", "ConnectionRefusedError")


# -------------------------------------------------------------------- clearly


def _strikes(rank: RankFacts) -> list[Strike]:
    """The strikes that fell while this rank set something up."""
    steps = {step.index for step in rank.steps if step.name in _SET_UP}
    return [
        strike for strike in rank.strikes if strike.moment.step in steps and not SITES[strike.site].releases
    ]


def _clear(facts: Facts, messages: list[_Message]) -> Finding:
    """Held if one message says everything of one of the failures that can be named."""
    best: tuple[int, str] | None = None
    for rank in facts.ranks:
        for strike in _strikes(rank):
            if not _nameable(rank, strike):
                continue
            for message in messages:
                missing = _missing(facts, rank, strike, message)
                if not missing:
                    return HELD
                if best is None or len(missing) < best[0]:
                    best = (len(missing), _unclear(rank, strike, missing, message))
    if best is None:
        return HELD
    return broken(best[1], at_step(_last_set_up(facts)))


def _nameable(rank: RankFacts, strike: Strike) -> bool:
    """Whether the subject could know the call, or the creation it was made in, and its error."""
    if strike.effect not in ("error", "raise") or SITES[strike.site].domain not in _NAMED_DOMAINS:
        return False
    if strike.site.startswith(_QUESTIONS):
        return False
    creation = _creation_around(rank, strike)
    return creation is None or not creation.ok


def _creation_around(rank: RankFacts, strike: Strike) -> Call | None:
    """FlashInfer's creation in which the struck call was made."""
    for call in rank.calls:
        end = call.ended.n if call.ended is not None else rank.last.n
        if call.site == "workspace.create" and call.began.n <= strike.moment.n <= end:
            return call
    return None


def _missing(facts: Facts, rank: RankFacts, strike: Strike, message: _Message) -> list[str]:
    """What a message does not name of this failure."""
    inside = _creation_around(rank, strike) is not None
    missing = []
    by_name = inside or SITES[strike.site].domain != "runtime"
    if (
        strike.effect == "error"
        and by_name
        and not naming.names_call(message.text, strike.site, inside_creation=inside)
    ):
        missing.append("the call")
    if not _names_reason(facts, strike, message.text, inside=inside):
        missing.append("its error")
    if message.rank != rank.rank and not naming.names_rank(message.text, {rank.rank}):
        missing.append("the rank")
    return missing


def _names_reason(facts: Facts, strike: Strike, text: str, *, inside: bool) -> bool:
    """The code; for an exception its class or its words. Where creation gave its caller an
    exception that does not name the code, that exception."""
    effect = facts.scenario.faults[strike.fault].effect
    if effect.raise_ is not None and naming.names_exception(text, effect.raise_, effect.message or ""):
        return True
    if isinstance(effect.error, str) and naming.names_error(text, effect.error):
        return True
    if not inside:
        return False
    raised = [
        call for each in facts.ranks for call in each.calls if call.site == "workspace.create" and call.raised
    ]
    if isinstance(effect.error, str) and any(naming.names_error(call.text, effect.error) for call in raised):
        return False
    return any(naming.names_exception(text, call.raised, call.text) for call in raised)


def _unclear(rank: RankFacts, strike: Strike, missing: list[str], message: _Message) -> str:
    return (
        f"{strike.site} failed on rank {rank.rank}, and the clearest message does not name "
        f"{wording.joined(missing)} ({message.title})"
    )


def _last_set_up(facts: Facts) -> int:
    return max(step.index for rank in facts.ranks for step in rank.steps if step.name in _SET_UP)
