"""Safe reading of YAML: from a file to a tree of nodes that know their places.

Files come from anywhere, so everything is bounded before it is built: the size
of the file, the depth, and the number of nodes after aliases are followed. The
tree is made from the parser's events, never by PyYAML's own composer or
constructor: the composer recurses without a limit and the constructor makes
objects. Whatever is wrong is one ``ScenarioError`` with its place.

Plain words follow the core schema of YAML 1.2: ``on``, ``off``, ``yes`` and
``no`` are words, ``012`` is twelve, ``1:30`` is a text. A scalar keeps the text
that was written, so that ``version: 0.10`` can be read as ``0.10``.
"""

from __future__ import annotations

import math
import os
import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import yaml

from faultlab import limits
from faultlab.errors import ScenarioError

#: libyaml where it is there; the parser in Python reads the same files, slower.
_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)

Scalar = str | int | float | bool | None
#: ``("faults", 0, "effect", "error")``
NodePath = tuple[str | int, ...]

_TAG_PREFIX: Final = "tag:yaml.org,2002:"
_SCALAR_TAGS: Final = {"str": str, "int": int, "float": float, "bool": bool, "null": type(None)}
_LINE_BREAK: Final = re.compile("\r\n|[\n\r\x85\u2028\u2029]")
#: What YAML 1.2 does not allow in a file at all.
_UNPRINTABLE: Final = re.compile(
    "[^\t\n\r\x20-\x7e\x85\xa0-\ud7ff\ue000-\ufefe\uff00-\ufffd\U00010000-\U0010ffff]"
)
_TAB_INDENT: Final = re.compile(r"^ *\t[ \t]*(?=\S)")

_INTEGER: Final = re.compile(r"[-+]?[0-9]+\Z")
_OTHER_BASE: Final = re.compile(r"0(?:x[0-9a-fA-F]+|o[0-7]+)\Z")
_FLOAT: Final = re.compile(r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?\Z")
_NOT_FINITE: Final = re.compile(r"(?:[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))\Z")
_WORDS: Final[dict[str, bool | None]] = {
    **dict.fromkeys(("true", "True", "TRUE"), True),
    **dict.fromkeys(("false", "False", "FALSE"), False),
    **dict.fromkeys(("null", "Null", "NULL", "~", ""), None),
}
_NUMBER_CHARS: Final = 40
_TOO_DEEP: Final = f"nested deeper than {limits.YAML_DEPTH} levels"
_EXCERPT_CHARS: Final = 110
#: Past this column no excerpt is shown: the caret would stand off the screen.
_CARET_COLUMN: Final = 200


@dataclass(frozen=True, eq=False)
class Node:
    """A piece of a file: its content, and where it and its key stand (from 1).

    ``content`` is a scalar, a dictionary of nodes or a list of nodes. A node
    without a key has its own place as its key's. Nodes are shared between
    trees, so nobody changes one. ``text`` is a scalar as it was written.
    """

    content: Scalar | dict[str, Node] | list[Node]
    line: int
    column: int
    key_line: int
    key_column: int
    text: str = ""
    size: int = 1
    height: int = 1

    @property
    def is_mapping(self) -> bool:
        return isinstance(self.content, dict)

    @property
    def is_list(self) -> bool:
        return isinstance(self.content, list)

    @property
    def mapping(self) -> dict[str, Node]:
        """The entries of a mapping; nothing for anything else."""
        return self.content if isinstance(self.content, dict) else {}

    @property
    def entries(self) -> list[Node]:
        """The entries of a list; nothing for anything else."""
        return self.content if isinstance(self.content, list) else []

    @property
    def word(self) -> str | None:
        """The content if it is a text, else None."""
        return self.content if isinstance(self.content, str) else None

    @property
    def number(self) -> int | None:
        """The content if it is a whole number, else None. ``true`` is none."""
        return self.content if type(self.content) is int else None

    def get(self, key: str) -> Node | None:
        """The entry of a mapping, or None."""
        return self.mapping.get(key)

    def plain(self) -> Any:
        """The content as plain data, without places."""
        if isinstance(self.content, dict):
            return {key: node.plain() for key, node in self.content.items()}
        if isinstance(self.content, list):
            return [node.plain() for node in self.content]
        return self.content

    def keyed(self, line: int, column: int) -> Node:
        """The same node under a key that stands elsewhere."""
        return replace(self, key_line=line, key_column=column)


@dataclass(frozen=True)
class Position:
    """Where a value and its key stand: lines and columns from 1."""

    key: tuple[int, int]
    value: tuple[int, int]


@dataclass(frozen=True)
class Document:
    """A file that was read: its tree, and its lines for the excerpts of errors."""

    path: str
    root: Node
    lines: list[str] = field(repr=False)

    @property
    def data(self) -> Any:
        """The whole file as plain data."""
        return self.root.plain()

    def positions(self) -> dict[NodePath, Position]:
        """The place of every key and value, by path; the root is ``()``."""
        return dict(_positions(self.root, ()))

    def error(self, message: str, node: Node, *, hint: str = "", at_key: bool = False) -> ScenarioError:
        """A mistake at a node, or at its key."""
        line, column = (node.key_line, node.key_column) if at_key else (node.line, node.column)
        return error_at(message, self.path, self.lines, line, column, hint)


def _positions(node: Node, path: NodePath) -> Iterator[tuple[NodePath, Position]]:
    yield path, Position((node.key_line, node.key_column), (node.line, node.column))
    for key, child in node.mapping.items():
        yield from _positions(child, (*path, key))
    for index, child in enumerate(node.entries):
        yield from _positions(child, (*path, index))


def error_at(
    message: str, path: str, lines: list[str], line: int, column: int, hint: str = ""
) -> ScenarioError:
    """A mistake with its source line, made safe for a terminal."""
    assert line >= 1 and column >= 1, (line, column)
    excerpt = ""
    if line <= len(lines) and column <= _CARET_COLUMN:
        shown = lines[line - 1][: max(_EXCERPT_CHARS, column + 20)]
        excerpt = "".join(char if char.isprintable() else " " for char in shown).rstrip()
    return ScenarioError(message, path=path, line=line, column=column, hint=hint, excerpt=excerpt)


# ------------------------------------------------------------------- reading


def read(path: Path) -> Document:
    """Read one file. Raises ScenarioError with the place of the first thing that is wrong."""
    return parse(read_bytes(path), str(path))


def read_bytes(path: Path, *, size_max: int = limits.FILE_SIZE_BYTES) -> bytes:
    """The bytes of a regular file. Raises ScenarioError if it is none, or too large.

    Opened without blocking: a pipe or a device named like a file would never answer.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(descriptor, "rb") as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise ScenarioError("is not a regular file", path=str(path))
            data = file.read(size_max + 1)
    except OSError as error:
        reason = (error.strerror or type(error).__name__).lower()
        raise ScenarioError(f"cannot be read: {reason}", path=str(path)) from None
    except ValueError:
        raise ScenarioError("is not a name a file can have", path=repr(str(path))) from None
    if len(data) > size_max:
        lines = _split(data[:4096].decode("utf-8", errors="replace"))
        raise error_at(f"the file is larger than {size_max} bytes", str(path), lines, 1, 1)
    return data


def parse(data: bytes, path: str) -> Document:
    """A document from the bytes of a file; ``path`` names it in errors.

    Raises ScenarioError: not UTF-8, a control character, a tab as indentation,
    not YAML, too deep, too many nodes, a tag, a key that is twice there or no
    text, nothing at all, or several documents.
    """
    text = _decoded(data, path)
    lines = _split(text)
    for number, line in enumerate(lines, 1):
        match = _UNPRINTABLE.search(line)
        if match is not None:
            name = f"U+{ord(match.group()):04X}"
            raise error_at(
                f"the character {name} cannot be in a YAML file", path, lines, number, match.start() + 1
            )
        match = _TAB_INDENT.match(line)
        if match is not None:
            column = line.index("\t") + 1
            raise error_at(
                "a tab in the indentation", path, lines, number, column, hint="YAML is indented with spaces"
            )
    return Document(path, _Composer(text, path, lines).compose(), lines)


def _decoded(data: bytes, path: str) -> str:
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        before = data[: error.start].decode("utf-8", errors="replace")
        lines = _split(data.decode("utf-8", errors="replace"))
        number = len(_split(before))
        column = len(_split(before)[-1]) + 1
        hint = "save the file in this encoding; is it a text file at all?"
        raise error_at("the file is not UTF-8", path, lines, number, column, hint) from None


def _split(text: str) -> list[str]:
    return _LINE_BREAK.split(text)


# ------------------------------------------------------------------ composing


class _Composer:
    """Makes the tree of one file from the events of the parser."""

    def __init__(self, text: str, path: str, lines: list[str]) -> None:
        self._events = yaml.parse(text, Loader=_LOADER)
        self._path = path
        self._lines = lines
        self._anchors: dict[str, Node | None] = {}
        self._count = 0

    def compose(self) -> Node:
        """The root of the file's only document."""
        root: Node | None = None
        while True:
            event = self._next()
            if isinstance(event, yaml.StreamEndEvent):
                break
            if isinstance(event, yaml.DocumentStartEvent):
                if root is not None:
                    raise self._error("a second document begins here", event, "one file is one document")
                root = self._node(self._next(), depth=1)
        if root is None or root.content is None:
            place = root or Node(None, 1, 1, 1, 1)
            raise error_at("the file is empty", self._path, self._lines, place.line, place.column)
        return root

    def _next(self) -> Any:
        try:
            return next(self._events)
        except yaml.MarkedYAMLError as error:
            raise self._syntax_error(error) from None
        except yaml.YAMLError as error:
            # The reader's own errors carry no mark; what they are about was refused before.
            text = " ".join(str(error).split())[:200]
            raise error_at(f"not YAML: {text}", self._path, self._lines, 1, 1) from None

    def _syntax_error(self, error: yaml.MarkedYAMLError) -> ScenarioError:
        mark = error.problem_mark or error.context_mark
        line, column = (mark.line + 1, mark.column + 1) if mark is not None else (1, 1)
        problem = error.problem or "it cannot be parsed"
        if "nesting depth" in problem:  # libyaml has a limit of its own, above the lab's
            return error_at(_TOO_DEEP, self._path, self._lines, line, column)
        hint = _SYNTAX_HINTS.get(problem, "")
        if error.context and error.context_mark is not None and not hint:
            hint = f"{error.context}, which begins at line {error.context_mark.line + 1}"
        return error_at(f"not YAML: {problem}", self._path, self._lines, line, column, hint)

    def _error(self, message: str, event: Any, hint: str = "") -> ScenarioError:
        line, column = _place(event)
        return error_at(message, self._path, self._lines, line, column, hint)

    def _node(self, event: Any, depth: int) -> Node:
        if depth > limits.YAML_DEPTH:
            raise self._error(_TOO_DEEP, event)
        if isinstance(event, yaml.AliasEvent):
            return self._aliased(event, depth)
        self._counted(1, event)
        if event.anchor is not None:
            self._anchors[event.anchor] = None
        if isinstance(event, yaml.ScalarEvent):
            node = self._scalar(event)
        elif isinstance(event, yaml.MappingStartEvent):
            node = self._mapping(event, depth)
        else:
            assert isinstance(event, yaml.SequenceStartEvent), event
            node = self._list(event, depth)
        if event.anchor is not None:
            self._anchors[event.anchor] = node
        return node

    def _counted(self, size: int, event: Any) -> None:
        self._count += size
        if self._count > limits.YAML_NODES:
            raise self._error(
                f"more than {limits.YAML_NODES} values", event, "aliases count as often as they are used"
            )

    def _aliased(self, event: Any, depth: int) -> Node:
        if event.anchor not in self._anchors:
            raise self._error(f"no anchor is called {event.anchor!r}", event)
        node = self._anchors[event.anchor]
        if node is None:
            raise self._error(f"the alias {event.anchor!r} is inside of what it stands for", event)
        self._counted(node.size, event)
        if depth + node.height - 1 > limits.YAML_DEPTH:
            raise self._error(_TOO_DEEP, event)
        line, column = _place(event)
        return replace(node, line=line, column=column, key_line=line, key_column=column)

    def _list(self, event: Any, depth: int) -> Node:
        self._check_tag(event, "seq")
        entries: list[Node] = []
        while not isinstance(following := self._next(), yaml.SequenceEndEvent):
            entries.append(self._node(following, depth + 1))
        return self._collection(event, entries, entries)

    def _mapping(self, event: Any, depth: int) -> Node:
        self._check_tag(event, "map")
        found: dict[str, Node] = {}
        while not isinstance(following := self._next(), yaml.MappingEndEvent):
            key = self._key(following)
            if key in found:
                first = found[key].key_line
                raise self._error(f"the key {key!r} is here twice", following, f"first in line {first}")
            found[key] = self._node(self._next(), depth + 1).keyed(*_place(following))
        return self._collection(event, found, list(found.values()))

    def _collection(self, event: Any, content: Any, children: list[Node]) -> Node:
        line, column = _place(event)
        size = 1 + sum(child.size for child in children)
        height = 1 + max((child.height for child in children), default=0)
        return Node(content, line, column, line, column, size=size, height=height)

    def _key(self, event: Any) -> str:
        if not isinstance(event, yaml.ScalarEvent):
            raise self._error("a key must be a text", event)
        self._counted(1, event)
        content = self._scalar(event).content
        if event.value == "<<" and event.implicit[0]:
            raise self._error("merge keys (<<) are not part of this format", event, "write the keys out")
        if not isinstance(content, str):
            shown = event.value[:_NUMBER_CHARS]
            raise self._error(f"the key {shown!r} is no text", event, f'write it in quotes: "{shown}"')
        return content

    def _check_tag(self, event: Any, wanted: str) -> None:
        if event.tag not in (None, "!", _TAG_PREFIX + wanted):
            raise self._tag_error(event)

    def _tag_error(self, event: Any) -> ScenarioError:
        tag = event.tag.removeprefix(_TAG_PREFIX)[:80]
        return self._error(f"the tag {tag!r} is not allowed", event, "a file is data: leave the tag out")

    def _scalar(self, event: Any) -> Node:
        line, column = _place(event)
        text = event.value
        name = (event.tag or "").removeprefix(_TAG_PREFIX)
        if event.tag is None and event.implicit[0]:
            content = self._resolved(event)
        elif event.tag in (None, "!") or name == "str":
            content = text
        elif name in _SCALAR_TAGS and event.tag != name:
            content = self._resolved(event)
            if type(content) is not _SCALAR_TAGS[name]:
                raise self._error(f"{text[:_NUMBER_CHARS]!r} is no {name}", event)
        else:
            raise self._tag_error(event)
        return Node(content, line, column, line, column, text=text)

    def _resolved(self, event: Any) -> Scalar:
        text: str = event.value
        if text in _WORDS:
            return _WORDS[text]
        number: int | float
        if not (_INTEGER.match(text) or _OTHER_BASE.match(text) or _FLOAT.match(text)):
            if _NOT_FINITE.match(text):
                raise self._error(f"{text!r} is not a finite number", event)
            return text
        if len(text) > _NUMBER_CHARS:
            raise self._error(f"a number of more than {_NUMBER_CHARS} characters", event)
        if _INTEGER.match(text):
            return int(text)
        number = int(text, 0) if _OTHER_BASE.match(text) else float(text)
        if not math.isfinite(number):
            raise self._error(f"{text!r} is not a finite number", event)
        return number


def _place(event: Any) -> tuple[int, int]:
    return event.start_mark.line + 1, event.start_mark.column + 1


_INDENT: Final = "is this line indented like its neighbours?"
_QUOTES: Final = f"{_INDENT} a text with ': ' in it needs quotes"
_SYNTAX_HINTS: Final[dict[str, str]] = {
    "mapping values are not allowed here": _QUOTES,
    "mapping values are not allowed in this context": _QUOTES,
    "could not find expected ':'": "a key is followed by ': '",
    "did not find expected key": _INDENT,
    "did not find expected ',' or '}'": "a '{' is not closed, or a comma is missing",
    "did not find expected ',' or ']'": "a '[' is not closed, or a comma is missing",
    "expected <block end>, but found '<block mapping start>'": _INDENT,
    "found unexpected end of stream": "a quote is not closed",
}
