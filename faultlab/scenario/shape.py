"""From a tree of nodes to a model: the form of a file, one message per mistake.

The models say what is allowed; pydantic finds what is not; this module says it
in the file's own words, at the place in the file. What a well-formed value
means (does this site exist, can it return that code) is ``meaning``'s job.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from pydantic import BaseModel, ValidationError

from faultlab.scenario import models as m
from faultlab.scenario.problems import Problems
from faultlab.scenario.words import Wrong, listed, nearest, suggestion
from faultlab.scenario.written import InlineTopology, PresetTopology
from faultlab.scenario.yamlnodes import Node, NodePath
from faultlab.topology import models as t

AnyModel = TypeVar("AnyModel", bound=BaseModel)

#: Keys whose value is a text: a number there is read as it was written, so that
#: ``version: 0.10`` is 0.10 and ``compute_capability: 9.0`` is 9.0.
_TEXT_KEYS: Final = frozenset(
    ("title", "source", "message", "version", "flashinfer", "model", "compute_capability", "cluster_uuid")
)

#: The models whose keys may stand in a mapping, by the key that it stands under.
_MODELS_UNDER: Final[dict[str, tuple[type[BaseModel], ...]]] = {
    "faults": (m.Fault,),
    "effect": (m.Effect,),
    "ranks": (m.NodeRanks, m.RandomRanks),
    "calls": (m.CallsFrom, m.CallsByChance),
    "workload": (m.UseStep, m.CaptureStep),
    "capture": (m.UseStep, m.CaptureStep),
    "use": (m.Use,),
    "subject": (m.Subject,),
    "workspace": (m.WorkspaceSpec,),
    "expect": (m.Expect,),
    "budget": (m.Budget,),
    "topology": (PresetTopology, InlineTopology),
    "gpus": (t.Gpus,),
    "links": (t.Links,),
    "fabric": (t.Fabric,),
    "says": (t.Says,),
    "does": (t.Does,),
}

#: What is wanted where the type alone does not say it, by the key and the one above it.
_WANTED: Final[dict[tuple[str, str], str]] = {
    ("", "faultlab"): "1, the version of the format that this lab reads",
    ("", "topology-file"): "1, the version of the format that this lab reads",
    ("", "ranks"): "a whole number: how many ranks run",
    ("", "topology"): "a name, {preset: NAME, overlay: NAME}, or a machine written out",
    ("", "subject"): "a name, or {name: NAME, version: VERSION}",
    (
        "faults",
        "ranks",
    ): "all, first, last, all-but-first, a list of ranks, {node: N} or {random: N, seed: S}",
    ("faults", "calls"): "every, a number, a list of numbers, {from: N} or {chance: P, seed: S}",
    ("effect", "error"): "the name of an error code, or its number",
    ("effect", "value"): "a number",
    ("", "workload"): "a list of steps: create, use, collective, destroy, exit",
    ("topology", "overlay"): "a name or a list of names",
    ("gpus", "compute_capability"): 'two numbers with a dot, like "9.0"',
    ("fabric", "cluster_uuid"): "32 hexadecimal digits",
}
_VERSION_KEYS: Final = ("faultlab", "topology-file")
_STEP: Final = "a step: create, use, collective, destroy, exit, {use: …} or {capture: [steps]}"
_TYPES: Final[dict[str, str]] = {
    "string_type": "a text",
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "bool_type": "true or false",
    "list_type": "a list",
    "tuple_type": "a list",
    "dict_type": "a mapping",
    "model_type": "a mapping",
}
_RANGES: Final[dict[str, tuple[str, str]]] = {
    "greater_than_equal": ("at least", "ge"),
    "greater_than": ("more than", "gt"),
    "less_than_equal": ("at most", "le"),
    "less_than": ("less than", "lt"),
}


def validate(model: type[AnyModel], root: Node, problems: Problems) -> AnyModel | None:
    """The model that a tree describes; None after every mistake was added to ``problems``.

    Numbers are never taken for texts (but see ``_TEXT_KEYS``), texts never for
    numbers, and ``true`` never for 1.
    """
    if not _python_names(root, problems):
        return None
    try:
        # In JSON mode strict validation still takes a list for a tuple.
        return model.model_validate_json(json.dumps(as_written(root, "")), strict=True)
    except ValidationError as error:
        _report(model, root, error, problems)
        return None


def as_written(node: Node, key: str) -> Any:
    """Plain data in which the texts of ``_TEXT_KEYS`` are texts."""
    if isinstance(node.content, dict):
        return {name: as_written(child, name) for name, child in node.content.items()}
    if isinstance(node.content, list):
        return [as_written(child, "") for child in node.content]
    if key in _TEXT_KEYS and isinstance(node.content, (int, float)):
        return node.text
    return node.content


def _python_names(node: Node, problems: Problems) -> bool:
    """Refuse ``raise_`` and ``from_``, which the models know as their Python names."""
    right = True
    for key, child in node.mapping.items():
        if key in ("raise_", "from_", "topology_file"):
            _unknown_key(problems, child, key, [key.rstrip("_").replace("_", "-")])
            right = False
        right = _python_names(child, problems) and right
    for child in node.entries:
        right = _python_names(child, problems) and right
    return right


# ------------------------------------------------------------------- messages


@dataclass(frozen=True)
class _Found:
    """Where an error of pydantic lies in the tree."""

    node: Node
    path: NodePath
    #: The name of a key that is not there.
    absent: str

    @property
    def names(self) -> list[str]:
        """The keys on the way, without the numbers of list entries."""
        return [part for part in self.path if isinstance(part, str)]

    @property
    def key(self) -> str:
        return self.names[-1] if self.names else ""

    @property
    def above(self) -> str:
        return self.names[-2] if len(self.names) > 1 else ""

    @property
    def in_list(self) -> bool:
        return bool(self.path) and isinstance(self.path[-1], int)


def _find(root: Node, location: tuple[str | int, ...]) -> _Found:
    """Follow a location of pydantic; the names of union branches in it lie in no tree."""
    node = root
    path: list[str | int] = []
    absent = ""
    for part in location:
        child: Node | None = None
        if isinstance(part, str):
            child = node.get(part)
        elif node.is_list and part < len(node.entries):
            child = node.entries[part]
        if child is None:
            absent = str(part)
            continue
        node = child
        path.append(part)
    return _Found(node, tuple(path), absent)


def _keys(model: type[BaseModel]) -> list[str]:
    return [field.alias or name for name, field in model.model_fields.items()]


def _known_keys(names: list[str], root_model: type[BaseModel]) -> list[str]:
    if not names:
        return _keys(root_model)
    if names[-2:-1] == ["breaks"]:
        return _keys(m.Break)
    return [key for model in _MODELS_UNDER.get(names[-1], ()) for key in _keys(model)]


def _report(model: type[BaseModel], root: Node, error: ValidationError, problems: Problems) -> None:
    missing: dict[NodePath, list[_Found]] = {}
    meant: dict[NodePath, set[str]] = {}
    for each in error.errors(include_url=False, include_input=False):
        kind = each["type"]
        found = _find(root, each["loc"])
        if kind == "missing":
            missing.setdefault(found.path, []).append(found)
        elif kind == "extra_forbidden":
            known = _known_keys([part for part in found.path[:-1] if isinstance(part, str)], model)
            meant.setdefault(found.path[:-1], set()).add(_unknown_key(problems, found.node, found.key, known))
        else:
            _wrong_value(problems, found, dict(each), model)
    for path, group in missing.items():
        names = [each.absent for each in group if each.absent not in meant.get(path, ())]
        if names:
            shown = ", ".join(map(repr, names))
            message = f"the keys {shown} are missing" if len(names) > 1 else f"the key {shown} is missing"
            problems.add(group[0].node, message)


def _unknown_key(problems: Problems, node: Node, key: str, known: list[str]) -> str:
    """Say so; the key that was probably meant."""
    problems.add(node, f"unknown key {key[:80]!r}", hint=suggestion(key, known), at_key=True)
    return nearest(key, known)


def _wrong_value(problems: Problems, found: _Found, error: Mapping[str, Any], model: type[BaseModel]) -> None:
    if error["type"] == "union_tag_not_found" and found.node.mapping:
        key, child = next(iter(found.node.mapping.items()))
        _unknown_key(problems, child, key, _known_keys(found.names, model))
        return
    wrong = _wrong(found, error["type"], error.get("ctx", {}), error["msg"])
    problems.add(found.node, f"{_name_of(found)} {wrong.message}", hint=wrong.hint)


def _wrong(found: _Found, kind: str, context: Mapping[str, Any], text: str) -> Wrong:
    """What is wrong with a value, as the end of a sentence that begins with its name."""
    node, wanted = found.node, _wanted(found, kind, context)
    if kind == "literal_error" and node.word is not None:
        near = nearest(node.word, _literal_words(context))
        return Wrong(f"must be {wanted}", f"did you mean {near!r}?" if near else "")
    if kind in _RANGES and not wanted:
        phrase, key = _RANGES[kind]
        return Wrong(f"must be {phrase} {context[key]:g}")
    if kind == "too_short":
        return Wrong(f"needs at least {context['min_length']} entries")
    if kind == "too_long":
        return Wrong(f"has more than {context['max_length']} entries")
    if kind in ("string_too_short", "string_too_long"):
        return Wrong("is empty" if kind == "string_too_short" else "is too long")
    if kind == "string_pattern_mismatch":
        return Wrong(f"must be {_PATTERNS.get(found.key) or wanted or 'a plain name'}")
    return Wrong(f"must be {wanted or text}, not {describe(node)}")


def _wanted(found: _Found, kind: str, context: Mapping[str, Any]) -> str:
    if found.in_list:
        if found.key in ("workload", "capture"):
            return _STEP
    elif (found.above, found.key) in _WANTED and (kind not in _RANGES or found.key in _VERSION_KEYS):
        return _WANTED[found.above, found.key]
    return listed(_literal_words(context)) if kind == "literal_error" else _TYPES.get(kind, "")


def _literal_words(context: Mapping[str, Any]) -> list[str]:
    """What pydantic lists as ``'a', 'b' or 'c'``, as words of YAML."""
    parts = str(context["expected"]).replace(" or ", ", ").split(",")
    return ["true" if part.strip() == "True" else part.strip().strip("'") for part in parts]


_NAME: Final = "a name, made of letters, digits, '-' and '_'"
_PATTERNS: Final = {
    "url": "an address that begins with http:// or https://",
    **dict.fromkeys(("topology", "preset", "overlay", "name"), _NAME),
}


def _name_of(found: _Found) -> str:
    if not found.path:
        return "the file"
    if found.in_list:
        index = found.path[-1]
        assert isinstance(index, int)
        return f"entry {index + 1} of {found.key!r}"
    return repr(found.key)


def describe(node: Node) -> str:
    """What a node is, for the end of a sentence."""
    if node.is_mapping:
        return "a mapping"
    if node.is_list:
        return "a list"
    if node.content is None:
        return "nothing"
    if isinstance(node.content, str):
        return f"the text {node.content[:60]!r}"
    if isinstance(node.content, bool):
        return node.text
    return f"the number {node.text}"
