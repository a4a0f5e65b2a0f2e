"""What a file means: whether what it names exists, and whether it can happen.

Works on the tree, not on the models, so that it says what it can about a file
whose form is wrong elsewhere. It takes every node as it finds it: what has the
wrong form is ``shape``'s to report, and passed over here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from pydantic import TypeAdapter, ValidationError

from faultlab import limits
from faultlab.errors import ScenarioError
from faultlab.scenario.invariants import INVARIANTS
from faultlab.scenario.models import EFFECT_KINDS, Effect, RankSelector
from faultlab.scenario.problems import Problems
from faultlab.scenario.selectors import ranks_of
from faultlab.scenario.shape import as_written
from faultlab.scenario.words import (
    Wrong,
    code_of,
    exception_of,
    listed,
    site_of,
    sticky_of,
    subject_of,
    suggestion,
)
from faultlab.scenario.written import InlineTopology
from faultlab.scenario.yamlnodes import Node
from faultlab.sites import Site
from faultlab.topology.load import Library, TopologyMissing, check_machine, topology_from
from faultlab.topology.models import Topology

_SELECTOR: Final[TypeAdapter[RankSelector]] = TypeAdapter(RankSelector)
_EFFECT_KEYS: Final = frozenset(field.alias or name for name, field in Effect.model_fields.items())
#: The error comes that much later; a value, a delay and a lost message have no later.
_KINDS_WITH_AFTER_S: Final = ("error", "raise", "kill", "poison")
_VERSIONS: Final = re.compile(
    r"(?P<name>[A-Za-z][\w.:-]*?)?\s*(?P<versions>((<=?|>=?|==|!=|~=)\s*[\w.+!*]+)?)\Z"
)


@dataclass(frozen=True)
class Setting:
    """What the checks of one combination share."""

    problems: Problems
    library: Library
    #: ``[ranks=2,…]``, for mistakes that only this combination of a matrix has.
    combination: str
    topology: Topology | None = None
    ranks: int | None = None

    @property
    def here(self) -> str:
        """The end of a sentence about a mistake that another combination may not have."""
        return f", in {self.combination}" if self.combination else ""

    @property
    def leave_out(self) -> str:
        """A hint for such a mistake."""
        return "'exclude' in the matrix leaves a combination out" if self.combination else ""


def topology_of(root: Node, setting: Setting) -> Topology | None:
    """The topology that a scenario names or writes out; None if that is wrong."""
    node = root.get("topology")
    if node is None:
        return None
    if node.word is not None:
        return _named(node, setting)
    if node.get("preset") is None:
        return _inline(node, setting)
    topology = _named(node.mapping["preset"], setting)
    overlay = node.get("overlay")
    for each in [overlay] if overlay is not None and overlay.word is not None else _entries(overlay):
        laid = _overlay(each, setting)
        topology = laid.laid_over(topology) if laid is not None and topology is not None else None
    return topology


def _named(node: Node, setting: Setting) -> Topology | None:
    try:
        return setting.library.topology(node.word) if node.word is not None else None
    except ScenarioError as error:
        _not_found(node, error, setting)
        return None


def _overlay(node: Node, setting: Setting) -> Any:
    try:
        return setting.library.overlay(node.word) if node.word is not None else None
    except ScenarioError as error:
        _not_found(node, error, setting)
        return None


def _not_found(node: Node, error: ScenarioError, setting: Setting) -> None:
    if isinstance(error, TopologyMissing):
        setting.problems.add(node, error.message, hint=error.hint)
    else:
        setting.problems.adopt(error)


def _inline(node: Node, setting: Setting) -> Topology | None:
    if not node.is_mapping:
        return None
    before = setting.problems.reports
    check_machine(node, setting.problems)
    if setting.problems.reports > before:
        return None
    try:
        return topology_from(InlineTopology.model_validate(as_written(node, "")))
    except ValidationError:
        return None  # The form is reported by the whole file's check.


def ranks_count(root: Node, topology: Topology | None, setting: Setting) -> int | None:
    """How many ranks run; None if that is wrong or cannot be known."""
    node = root.get("ranks")
    if topology is None:
        return node.number if node is not None else None
    if node is not None and node.content is not None:
        if node.number is None:
            return None
        if node.number > topology.gpu_count:
            gpus = f"{topology.name} has {topology.gpu_count} GPUs"
            message = f"{node.number} ranks need a GPU each, and {gpus}{setting.here}"
            setting.problems.add(node, message, hint=setting.leave_out)
            return None
        return node.number
    if topology.gpu_count > limits.RANKS:
        place = root.get("topology") or root
        problem = f"{topology.name} has {topology.gpu_count} GPUs, more than {limits.RANKS} ranks can run"
        setting.problems.add(place, problem, hint="say how many: 'ranks: N'")
        return None
    return topology.gpu_count


def check(root: Node, setting: Setting) -> None:
    """Everything but the topology and the number of ranks, which ``setting`` has."""
    for fault in _entries(root.get("faults")):
        _check_fault(fault, setting)
    _check_subject(root.get("subject"), setting.problems)
    _check_workspace(root.get("workspace"), setting.problems)
    _check_steps(root.get("workload"), setting.problems, captured=False)
    _check_breaks(root.get("expect"), setting.problems)
    _check_budget(root.get("budget"), setting.problems)
    lanes = _entries(root.get("lanes"))
    if len(lanes) == 2 and lanes[0].content == lanes[1].content:
        setting.problems.add(lanes[1], f"the lane {lanes[1].text!r} is here twice")


def _entries(node: Node | None) -> list[Node]:
    return node.entries if node is not None else []


def _given(node: Node) -> Mapping[str, Node]:
    """The keys of a mapping that have a value."""
    return {key: child for key, child in node.mapping.items() if child.content is not None}


# --------------------------------------------------------------------- faults


def _check_fault(fault: Node, setting: Setting) -> None:
    at, effect, ranks = fault.get("at"), fault.get("effect"), fault.get("ranks")
    site: Site | None = None
    if at is not None and at.word is not None:
        answer = site_of(at.word)
        if isinstance(answer, Wrong):
            setting.problems.add(at, answer.message, hint=answer.hint)
        else:
            site = answer
    if effect is not None and effect.is_mapping:
        _check_effect(effect, site, setting.problems)
    if ranks is not None:
        _check_struck_ranks(ranks, setting)


def _check_effect(effect: Node, site: Site | None, problems: Problems) -> None:
    given = _given(effect)
    kinds = [kind for kind in given if kind in EFFECT_KINDS]
    if not kinds:
        if set(effect.mapping) <= _EFFECT_KEYS:
            possible = [kind for kind in EFFECT_KINDS if site is None or kind in site.effects]
            problems.add(effect, "the effect has no kind", hint=f"one of {listed(possible)}")
        return
    if len(kinds) > 1:
        message = f"an effect has one kind, here are {' and '.join(kinds)}"
        problems.add(given[kinds[1]], message, hint="write a fault for each", at_key=True)
        return
    kind = kinds[0]
    if site is not None and kind not in site.effects:
        possible = [each for each in EFFECT_KINDS if each in site.effects]
        problems.add(
            given[kind],
            f"{kind} is not possible at {site.name}",
            hint=f"possible: {listed(possible)}",
            at_key=True,
        )
        return
    _check_kind(kind, given[kind], site, problems)
    _check_manner(kind, given, site, problems)


def _check_kind(kind: str, node: Node, site: Site | None, problems: Problems) -> None:
    answer: object = None
    if kind == "error" and site is not None:
        code = node.word if node.word is not None else node.number
        answer = code_of(site, code) if code is not None else None
    elif kind == "raise" and node.word is not None:
        answer = exception_of(node.word)
    elif kind == "poison" and node.word is not None:
        answer = sticky_of(node.word)
    elif kind == "value" and site is not None:
        answer = _value_of(site, node)
    elif kind in ("hang", "lose", "kill") and node.content is not True:
        answer = Wrong(f"{kind!r} must be true")
    if isinstance(answer, Wrong):
        problems.add(node, answer.message, hint=answer.hint)


def _value_of(site: Site, node: Node) -> Wrong | None:
    if node.word is not None:
        return Wrong(f"the value at {site.name} is a number")
    if site.domain != "kernel" and (node.number is None or node.number < 0) and not _odd(node):
        return Wrong(f"the value at {site.name} is a whole number, at least 0")
    return None


def _odd(node: Node) -> bool:
    """Neither text nor number: the form is wrong already."""
    return isinstance(node.content, (bool, dict, list)) or node.content is None


def _check_manner(kind: str, given: Mapping[str, Node], site: Site | None, problems: Problems) -> None:
    message, after_s, poisons, when = (given.get(key) for key in ("message", "after_s", "poisons", "when"))
    if message is not None and kind != "raise":
        problems.add(message, f"a message belongs to raise, not to {kind}", at_key=True)
    if after_s is not None and kind not in _KINDS_WITH_AFTER_S:
        hint = "a delay is {delay_s: …}" if kind != "delay_s" else ""
        problems.add(after_s, f"after_s means nothing for {kind}", hint=hint, at_key=True)
    if when is not None and kind == "value":
        problems.add(when, "when means nothing for value: a value is read once", at_key=True)
    if poisons is None:
        return
    if kind not in ("error", "raise"):
        hint = "for a poisoned context alone: {poison: CODE}"
        problems.add(poisons, f"poisons belongs to error or raise, not to {kind}", hint=hint, at_key=True)
    elif site is not None and "poison" not in site.effects:
        problems.add(poisons, f"{site.name} cannot poison a context", at_key=True)
    elif poisons.word is not None and isinstance(answer := sticky_of(poisons.word), Wrong):
        problems.add(poisons, answer.message, hint=answer.hint)


def _check_struck_ranks(node: Node, setting: Setting) -> None:
    topology, count = setting.topology, setting.ranks
    seen: set[int] = set()
    for entry in node.entries:
        rank = entry.number
        if rank is None:
            continue
        if rank in seen:
            setting.problems.add(entry, f"rank {rank} is here twice")
        elif topology is not None and rank >= topology.gpu_count:
            gpus = f"{topology.name} has {topology.gpu_count} GPUs"
            _outside(entry, f"rank {rank} is outside the topology: {gpus} (from 0)", setting)
        elif count is not None and rank >= count:
            _outside(entry, f"rank {rank} does not run: the scenario has {count} ranks (from 0)", setting)
        seen.add(rank)
    if topology is None or count is None or node.is_list:
        return
    _check_selector(node, topology, count, setting)


def _check_selector(node: Node, topology: Topology, count: int, setting: Setting) -> None:
    number, drawn = node.get("node"), node.get("random")
    if number is not None and number.number is not None and number.number >= topology.nodes:
        nodes = "1 node" if topology.nodes == 1 else f"{topology.nodes} nodes"
        message = f"node {number.number} is outside the topology: {topology.name} has {nodes} (from 0)"
        _outside(number, message, setting)
        return
    if drawn is not None and drawn.number is not None and drawn.number > count:
        _outside(drawn, f"{drawn.number} ranks cannot be drawn from {count}", setting)
        return
    try:
        selector = _SELECTOR.validate_python(node.plain())
    except ValidationError:
        return
    if not ranks_of(selector, count, topology.gpus.count):
        _outside(node, f"this is no rank of the {count} that run", setting)


def _outside(node: Node, message: str, setting: Setting) -> None:
    setting.problems.add(node, f"{message}{setting.here}", hint=setting.leave_out)


# ---------------------------------------------------------- the other parts


def _check_subject(node: Node | None, problems: Problems) -> None:
    name = node.get("name") if node is not None and node.is_mapping else node
    if name is not None and name.word and isinstance(answer := subject_of(name.word), Wrong):
        problems.add(name, answer.message, hint=answer.hint)


def _check_workspace(node: Node | None, problems: Problems) -> None:
    given = _given(node) if node is not None else {}
    backend, preferred = given.get("backend"), given.get("preferred")
    if preferred is not None and backend is not None and backend.word != "auto":
        hint = "backend is an order, preferred is where 'auto' begins: say one of them"
        problems.add(
            preferred, f"preferred says nothing beside 'backend: {backend.text}'", hint=hint, at_key=True
        )


#: The steps that may not stand inside a capture, and why.
_NOT_CAPTURED: Final = {
    "collective": "it is a barrier, which waits on the host; a capture holds create and use",
    "destroy": "a graph needs its workspace until it is dropped; a capture holds create and use",
    "exit": "the interpreter ends after the capture; a capture holds create and use",
}


def _check_steps(node: Node | None, problems: Problems, *, captured: bool) -> None:
    steps = _entries(node)
    for index, step in enumerate(steps):
        if captured and step.word in _NOT_CAPTURED:
            problems.add(step, f"{step.word} cannot be captured", hint=_NOT_CAPTURED[step.word])
        elif step.word == "exit" and index + 1 < len(steps):
            problems.add(steps[index + 1], "no step runs after exit")
        inner = step.get("capture")
        if inner is None:
            continue
        if captured:
            problems.add(step, "a capture inside a capture", hint="a stream captures once at a time")
        else:
            _check_steps(inner, problems, captured=True)


def _check_breaks(expect: Node | None, problems: Problems) -> None:
    breaks = expect.get("breaks") if expect is not None else None
    for name, node in (breaks.mapping if breaks is not None else {}).items():
        if name not in INVARIANTS:
            hint = suggestion(name, INVARIANTS) or f"the invariants: {', '.join(INVARIANTS)}"
            problems.add(node, f"no invariant is called {name[:80]!r}", hint=hint, at_key=True)
        subjects = node.get("subjects")
        if subjects is not None and subjects.word is not None:
            _check_versions(subjects, problems)


def _check_versions(node: Node, problems: Problems) -> None:
    """``vllm>=0.25,<0.27, reference``: a misspelt name would hold for nobody, and say nothing."""
    assert node.word is not None
    named = False
    for part in node.word.split(","):
        match = _VERSIONS.match(part.strip())
        if match is None or not (match["name"] or (named and match["versions"])):
            hint = "subjects with versions: 'vllm>=0.25,<0.27, reference'"
            problems.add(node, f"{part.strip()[:80]!r} names no subject", hint=hint)
            return
        if match["name"]:
            answer = subject_of(match["name"])
            if isinstance(answer, Wrong):
                problems.add(node, answer.message, hint=answer.hint)
                return
            named = True


def _check_budget(node: Node | None, problems: Problems) -> None:
    given = _given(node) if node is not None else {}
    init_s = given.get("init_s")
    run_s = given["run_s"].content if "run_s" in given else 600.0
    if init_s is None or not isinstance(init_s.content, (int, float)) or not isinstance(run_s, (int, float)):
        return
    if init_s.content > run_s:
        problems.add(init_s, f"init_s is longer than the whole run (run_s: {run_s:g})")
