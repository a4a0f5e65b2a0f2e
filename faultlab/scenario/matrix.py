"""The matrix of a file: from one file to many scenarios with stable ids.

    matrix:
      ranks: [2, 4]                          # a top key, and its values
      workspace.creation: [real, mocked]     # a path into the file
      faults.0.ranks: {all: all, one: [1]}   # values with labels
      case:                                  # labels, each with several paths at once
        bind: {faults.0.at: cuMulticastBindMem, expect.path: trtllm}
        create: {faults.0.at: cuMemCreate, expect.path: none}
      exclude:                               # combinations that are left out
        - {ranks: 4, case: create}

The scenarios are the product of all axes, in the order of the file; the last
axis changes fastest. An id is ``stem[axis=value,…]``: an axis is the last part
of its path (the whole path where that is not clear), a value is its label, or
itself in the characters that an id may have. ``exclude`` names axes and values
as the ids do. Values replace what the file says, before anything is checked,
and keep their own places for errors.
"""

from __future__ import annotations

import itertools
import math
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final

from faultlab import limits
from faultlab.scenario.problems import Problems
from faultlab.scenario.words import suggestion
from faultlab.scenario.written import WrittenScenario
from faultlab.scenario.yamlnodes import Node

CASE: Final = "case"
EXCLUDE: Final = "exclude"
#: A scenario's id is the name of a folder.
ID_CHARS: Final = 200
_VALUE_CHARS: Final = 80
_PATH_PARTS: Final = 8
_AXES: Final = 16
_PATHS_PER_CASE: Final = 32
_EXCLUSIONS: Final = 200
#: Nodes that are checked in all combinations together: some seconds.
_NODES_CHECKED: Final = 1_000_000
_LABEL: Final = re.compile(r"[A-Za-z0-9._-]+\Z", re.ASCII)
_PATH: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_-]*(\.[A-Za-z0-9_-]+)*\Z", re.ASCII)
_NOT_IN_ID: Final = re.compile(r"[^A-Za-z0-9._-]+", re.ASCII)

Path = tuple[str, ...]


@dataclass(frozen=True)
class Value:
    """One value of an axis: its name in ids, and what it sets."""

    label: str
    node: Node
    sets: tuple[tuple[Path, Node], ...]


@dataclass(frozen=True)
class Axis:
    """One axis: its name in the file, its name in ids, and its values."""

    name: str
    short: str
    node: Node
    values: list[Value]


@dataclass(frozen=True)
class Combination:
    """One scenario of a file: its tree, without a matrix, and what the axes are in it.

    ``suffix`` is ``[axis=value,…]``, empty without a matrix. ``place`` is the
    node the scenario is known by: the value of the first axis, or the top key.
    """

    root: Node
    labels: dict[str, str]
    suffix: str
    place: Node


def expand(root: Node, problems: Problems) -> list[Combination]:
    """The combinations of a file's matrix, one if it has none.

    A matrix with mistakes gives one combination, made of the axes that are
    right, so that the rest of the file can be checked as well.
    """
    base = replace(root, content={key: node for key, node in root.mapping.items() if key != "matrix"})
    place = root.get("faultlab") or root
    matrix = root.get("matrix")
    if matrix is None:
        return [Combination(base, {}, "", place)]
    before = problems.reports
    axes = _axes(matrix, problems)
    _check_overwriting(axes, problems)
    excluded = _exclusions(matrix, axes, problems)
    _check_size(root, matrix, axes, problems)
    if problems.reports > before:
        axes = [axis for axis in axes if axis.values]
        chosen = tuple(axis.values[0] for axis in axes)
        return [_combination(base, axes, chosen, problems)] if chosen else [Combination(base, {}, "", place)]
    return list(_product(base, matrix, axes, excluded, problems))


def _check_size(root: Node, matrix: Node, axes: list[Axis], problems: Problems) -> None:
    """Refuse too many combinations before the first one is made."""
    count = math.prod(len(axis.values) for axis in axes)
    if count > limits.MATRIX_SCENARIOS:
        message = f"the matrix has {count} combinations; at most {limits.MATRIX_SCENARIOS} are possible"
        problems.add(matrix, message, hint="split the file", at_key=True)
        return
    largest = sum(max((value.node.size for value in axis.values), default=0) for axis in axes)
    nodes = root.size - matrix.size + largest
    if nodes * count > _NODES_CHECKED:
        message = f"{count} combinations of a file with {nodes} values are too many"
        problems.add(matrix, message, hint="split the file", at_key=True)


def _product(
    base: Node, matrix: Node, axes: list[Axis], excluded: list[_Exclusion], problems: Problems
) -> Iterator[Combination]:
    kept = 0
    for chosen in itertools.product(*(axis.values for axis in axes)):
        labels = {axis.name: value.label for axis, value in zip(axes, chosen, strict=True)}
        if not any(each.covers(labels) for each in excluded):
            kept += 1
            yield _combination(base, axes, chosen, problems)
    if not kept:
        problems.add(matrix, "every combination of the matrix is left out", at_key=True)


def _combination(base: Node, axes: list[Axis], chosen: tuple[Value, ...], problems: Problems) -> Combination:
    root = base
    for path, node in (each for value in chosen for each in value.sets):
        try:
            root = _put(root, path, node, path)
        except _CannotSet as error:
            problems.add(node, error.args[0], hint=error.args[1], at_key=True)
    labels = {axis.short: value.label for axis, value in zip(axes, chosen, strict=True)}
    suffix = "[" + ",".join(f"{name}={label}" for name, label in labels.items()) + "]"
    if len(suffix) > ID_CHARS:
        message = f"the id {suffix[:40]}… has {len(suffix)} characters; at most {ID_CHARS} are possible"
        problems.add(chosen[0].node, message, hint="give values short labels: {label: value}")
    return Combination(root, labels, suffix, chosen[0].node)


# ----------------------------------------------------------------------- axes


def _axes(matrix: Node, problems: Problems) -> list[Axis]:
    if not matrix.is_mapping:
        problems.add(matrix, "a matrix maps axes to their values", hint="matrix: {ranks: [2, 4]}")
        return []
    names = [name for name in matrix.mapping if name != EXCLUDE]
    if not names:
        problems.add(matrix, "the matrix has no axis", hint="matrix: {ranks: [2, 4]}", at_key=True)
    if len(names) > _AXES:
        problems.add(matrix, f"a matrix has at most {_AXES} axes", at_key=True)
        return []
    axes = []
    for name in names:
        node = matrix.mapping[name]
        if name == CASE or _check_path(name, node, problems):
            axes.append(Axis(name, _short(name, names), node, _values(name, node, problems)))
    return axes


def _short(name: str, names: list[str]) -> str:
    last = Counter(each.rpartition(".")[2] for each in names)
    short = name.rpartition(".")[2]
    return name if last[short] > 1 or short.isdigit() else short


def _check_path(name: str, node: Node, problems: Problems) -> bool:
    """Whether a dotted path can lie in a scenario file."""
    top = name.partition(".")[0]
    known = [key for key in WrittenScenario.model_fields if key not in ("faultlab", "matrix")]
    hint = suggestion(top, [*known, CASE, EXCLUDE])
    if top not in known:
        problems.add(node, f"the axis {name[:80]!r} is no key of the file", hint=hint, at_key=True)
    elif not _PATH.match(name) or name.count(".") >= _PATH_PARTS:
        hint = "keys and numbers joined by dots: faults.0.ranks"
        problems.add(node, f"the axis {name[:80]!r} is no path", hint=hint, at_key=True)
    else:
        return True
    return False


def _values(name: str, node: Node, problems: Problems) -> list[Value]:
    if not (node.entries or node.mapping):
        message = f"the axis {name!r} needs a list of values, or a mapping from labels to values"
        problems.add(node, message, hint=f"{name}: [first, second]")
        return []
    if name == CASE:
        return _cases(node, problems)
    path = tuple(name.split("."))
    values = [
        Value(_slug(entry, path), entry, ((path, entry.keyed(node.key_line, node.key_column)),))
        for entry in node.entries
    ]
    for label, entry in node.mapping.items():
        _check_label(label, entry, problems)
        values.append(Value(label, entry, ((path, entry.keyed(node.key_line, node.key_column)),)))
    seen: set[str] = set()
    for value in values:
        if value.label in seen:
            hint = f"give the values labels: {name}: {{label: value}}"
            problems.add(value.node, f"two values of {name!r} are called {value.label!r}", hint=hint)
        seen.add(value.label)
    return values


def _cases(node: Node, problems: Problems) -> list[Value]:
    if not node.is_mapping:
        problems.add(node, "cases have labels", hint="case: {label: {faults.0.at: …, expect.path: …}}")
        return []
    values = []
    for label, entry in node.mapping.items():
        _check_label(label, entry, problems)
        if not entry.is_mapping:
            hint = "{faults.0.at: …, expect.path: …}"
            problems.add(entry, f"the case {label!r} maps paths to values", hint=hint)
            continue
        if len(entry.mapping) > _PATHS_PER_CASE:
            problems.add(entry, f"a case sets at most {_PATHS_PER_CASE} paths")
            continue
        right = [(path, each) for path, each in entry.mapping.items() if _check_path(path, each, problems)]
        sets = tuple((tuple(path.split(".")), each) for path, each in right)
        for earlier, later in itertools.combinations(sets, 2):
            _check_pair(earlier[0], later[0], later[1], problems)
        values.append(Value(label, entry, sets))
    return values


def _check_label(label: str, node: Node, problems: Problems) -> None:
    if not _LABEL.match(label) or len(label) > _VALUE_CHARS:
        message = f"the label {label[:80]!r} is part of an id: only letters, digits and '._-'"
        problems.add(node, message, at_key=True)


def _check_overwriting(axes: list[Axis], problems: Problems) -> None:
    """An axis whose value a later axis replaces would only seem to vary something."""
    for first, second in itertools.combinations(axes, 2):
        earlier = {path for value in first.values for path, _ in value.sets}
        later = {path: node for value in second.values for path, node in value.sets}
        for before, (path, node) in itertools.product(earlier, later.items()):
            _check_pair(before, path, node, problems)


def _check_pair(earlier: Path, later: Path, node: Node, problems: Problems) -> None:
    if earlier[: len(later)] == later:
        message = f"{'.'.join(later)!r} overwrites what {'.'.join(earlier)!r} has set"
        problems.add(node, message, hint="the shorter path comes first, and a path comes once", at_key=True)


# --------------------------------------------------------------------- values


def _slug(node: Node, path: Path) -> str:
    """A value in the characters of an id."""
    parts = _parts(node, path)
    slug = ".".join(filter(None, (_NOT_IN_ID.sub("-", part).strip("-.") for part in parts)))
    return slug[:_VALUE_CHARS].rstrip("-.") or "empty"


def _parts(node: Node, path: Path) -> list[str]:
    if node.is_list:
        return [part for entry in node.entries for part in _parts(entry, ())]
    if path == ("topology",) and node.get("preset") is not None:
        overlay = node.get("overlay")
        laid = overlay.entries or [overlay] if overlay is not None else []
        return [each.text for each in (node.mapping["preset"], *laid)]
    if path == ("topology",) and node.is_mapping:
        name = node.get("name")
        return [name.text if name is not None else "inline"]
    if path == ("subject",) and node.is_mapping:
        name, version, flashinfer = (node.get(key) for key in ("name", "version", "flashinfer"))
        label = "-".join(each.text for each in (name, version) if each is not None)
        return [label, *([f"fi-{flashinfer.text}"] if flashinfer is not None else [])]
    if node.is_mapping:
        return [f"{key}-{_slug(child, ())}" for key, child in node.mapping.items()]
    return ["null" if node.content is None else node.text]


class _CannotSet(Exception):
    """A path leads to no place in the file: the message and a hint."""


def _put(node: Node, path: Path, value: Node, whole: Path) -> Node:
    """A copy of the tree with a value at a path; what the copies share stays as it is."""
    if not path:
        return value
    head, rest = path[0], path[1:]
    name = ".".join(whole)
    if node.is_list:
        entries = node.entries
        if not head.isdigit() or int(head) >= len(entries):
            raise _CannotSet(f"{name!r}: the list has no entry {head} (from 0)", f"it has {len(entries)}")
        index = int(head)
        changed = [*entries[:index], _put(entries[index], rest, value, whole), *entries[index + 1 :]]
        return replace(node, content=changed)
    if not node.is_mapping or head.isdigit():
        raise _CannotSet(f"{name!r}: there is no place for {head!r} in the file", _where_to(whole, path))
    child = node.mapping.get(head)
    if child is None or (rest and child.content is None):
        child = replace(value, content={}, line=value.key_line, column=value.key_column)
    return replace(node, content={**node.mapping, head: _put(child, rest, value, whole)})


def _where_to(whole: Path, rest: Path) -> str:
    before = whole[: len(whole) - len(rest)]
    if before == ("topology",):
        return "write the topology as {preset: NAME}"
    if before == ("subject",):
        return "write the subject as {name: NAME}"
    if before[:1] == ("faults",):
        return "the file has the faults, the matrix changes them"
    return "the file must have a mapping there"


# ------------------------------------------------------------------- exclude


@dataclass(frozen=True)
class _Exclusion:
    """One entry of ``exclude``: the label that each named axis must have."""

    wanted: dict[str, str]

    def covers(self, labels: dict[str, str]) -> bool:
        """Whether a combination, its axes' labels by name, is left out."""
        return all(labels[name] == label for name, label in self.wanted.items())


def _exclusions(matrix: Node, axes: list[Axis], problems: Problems) -> list[_Exclusion]:
    node = matrix.get(EXCLUDE)
    if node is None:
        return []
    if not node.is_list:
        problems.add(node, "exclude is a list", hint="exclude: [{ranks: 4, topology: pcie-4}]")
        return []
    if len(node.entries) > _EXCLUSIONS:
        problems.add(node, f"exclude has at most {_EXCLUSIONS} entries")
        return []
    by_name = {**{axis.short: axis for axis in axes}, **{axis.name: axis for axis in axes}}
    found = []
    for entry in node.entries:
        if not entry.is_mapping or not entry.mapping:
            hint = "{ranks: 4, topology: pcie-4}"
            problems.add(entry, "an entry of exclude maps axes to values", hint=hint)
            continue
        wanted: dict[str, str] = {}
        for name, value in entry.mapping.items():
            axis = by_name.get(name)
            if axis is None:
                problems.add(
                    value, f"no axis is called {name[:80]!r}", hint=suggestion(name, by_name), at_key=True
                )
            else:
                wanted[axis.name] = _label_in(axis, value, problems)
        found.append(_Exclusion(wanted))
    return found


def _label_in(axis: Axis, node: Node, problems: Problems) -> str:
    """The label of the axis's value that an entry of ``exclude`` means, by label or by value."""
    path = tuple(axis.name.split("."))
    for value in axis.values:
        if node.word == value.label or _slug(node, path) == value.label:
            return value.label
        if axis.name != CASE and node.plain() == value.node.plain():
            return value.label
    labels = [value.label for value in axis.values]
    shown = _slug(node, path)
    problems.add(node, f"{axis.name!r} has no value {shown!r}", hint=suggestion(shown, labels))
    return ""
