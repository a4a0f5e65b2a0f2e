"""Finds and reads topologies and overlays by name.

A name is looked up beside the scenario, then in the project's
``scenarios/topologies`` (the nearest one on the way up from the scenario), then
in the package. The first folder that has it wins. A name is the stem of a
file, never a path, so nothing outside these folders is read.

A topology file has ``topology-file: 1`` and the fields of ``Topology``; an
overlay file has ``topology-file: 1``, ``overlay: NAME`` and the fields of
``Overlay``. The name in the file is the file's stem.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final

from pydantic import Field

from faultlab import limits
from faultlab.errors import ScenarioError
from faultlab.scenario import shape, yamlnodes
from faultlab.scenario.models import Closed
from faultlab.scenario.problems import Problems
from faultlab.scenario.words import Wrong, code_of, suggestion
from faultlab.scenario.written import NAME_PATTERN, FormatVersion, InlineTopology, Name
from faultlab.scenario.yamlnodes import Document, Node
from faultlab.sites import ATTRIBUTES, SITES
from faultlab.topology.models import Fabric, Overlay, Topology

SUFFIXES: Final = (".yaml", ".yml")
#: How far up the project's folder is looked for.
_LEVELS_UP: Final = 10
_FILES_PER_FOLDER: Final = 1_000
_TOP_KEY: Final = re.compile(rb"^(?:---[ \t]+)?[\"']?topology-file[\"']?[ \t]*:", re.MULTILINE)
_TOP_KEY_IN_BRACES: Final = re.compile(rb"\A\s*\{\s*[\"']?topology-file[\"']?\s*:")
_CALL_DOMAINS: Final = ("driver", "runtime", "nvml")


class WrittenTopology(InlineTopology):
    """A topology file as it is written."""

    topology_file: Annotated[FormatVersion, Field(alias="topology-file")]
    name: Name
    title: Annotated[str, Field(min_length=1)]


class WrittenOverlay(Closed):
    """An overlay file as it is written."""

    topology_file: Annotated[FormatVersion, Field(alias="topology-file")]
    overlay: Name
    title: Annotated[str, Field(min_length=1)]
    source: str = ""
    attributes: dict[str, Annotated[int, Field(ge=0)]] = Field(default_factory=dict)
    fabric: Fabric | None = None
    confidential_compute: bool | None = None
    multicast: bool | None = None
    refuses: dict[str, str] = Field(default_factory=dict)
    fabric_handles: str | None = None


class TopologyMissing(ScenarioError):
    """No file has this name, or the name is that of the other kind of file."""


@dataclass(frozen=True)
class Available:
    """A topology or overlay that can be named. ``error``: why its file is wrong, if it is."""

    name: str
    is_overlay: bool
    title: str
    path: Path
    error: str = ""


# -------------------------------------------------------------------- look-up


def load_topology(name: str, beside: Path) -> Topology:
    """The topology of a name, seen from a scenario file or its folder.

    Raises TopologyMissing if there is none, ScenarioErrors if its file is wrong.
    """
    return Library(beside).topology(name)


def available_topologies(beside: Path) -> list[Available]:
    """Everything that a scenario there can name, sorted; one entry a name. Raises nothing for wrong files."""
    found: dict[str, Available] = {}
    for path in Library(beside).files():
        if path.stem not in found:
            found[path.stem] = _available(path)
    return sorted(found.values(), key=lambda each: (each.is_overlay, each.name))


def _available(path: Path) -> Available:
    try:
        made = read_file(path)
    except ScenarioError as error:
        return Available(path.stem, False, "", path, str(error))
    return Available(made.name, isinstance(made, Overlay), made.title, path)


def is_topology_file(path: Path) -> bool:
    """Whether the top key is ``topology-file:``. Cheap; never raises."""
    try:
        return looks_like_topology(yamlnodes.read_bytes(path))
    except ScenarioError:
        return False


def looks_like_topology(data: bytes) -> bool:
    """Whether a file with these bytes means to be a topology, right or wrong."""
    return bool(_TOP_KEY.search(data) or _TOP_KEY_IN_BRACES.match(data))


def package_folder() -> Path:
    """The topologies that ship with the lab: in a wheel beside this module, else in the repository."""
    presets = Path(__file__).parent / "presets"
    return presets if presets.is_dir() else Path(__file__).parents[2] / "scenarios" / "topologies"


def is_folder(path: Path) -> bool:
    """Whether a path is a folder, also where its parent may not be entered. Never raises."""
    try:
        return path.is_dir()
    except OSError:
        return False


def project_folder(beside: Path) -> Path | None:
    """The nearest ``scenarios/topologies`` on the way up from a folder, or None."""
    for folder in (beside, *beside.parents)[: _LEVELS_UP + 1]:
        candidate = folder / "scenarios" / "topologies"
        if is_folder(candidate):
            return candidate
    return None


def _real(path: Path) -> Path:
    return Path(os.path.realpath(path))


class Library:
    """The topologies that scenarios of one folder can name; each file is read once.

    ``search``: more folders, looked at after the project's and before the package's.
    """

    def __init__(self, beside: Path, search: Sequence[Path] = ()) -> None:
        place = _real(beside)
        folder = place if is_folder(place) else place.parent
        project = project_folder(folder)
        candidates = [folder, *([project] if project else []), *search, package_folder()]
        self.folders = list(dict.fromkeys(_real(each) for each in candidates))
        self._made: dict[Path, Topology | Overlay | ScenarioError] = {}

    def topology(self, name: str) -> Topology:
        """The topology of a name. Raises TopologyMissing or ScenarioErrors."""
        made = self._named(name, "topology")
        if isinstance(made, Overlay):
            raise TopologyMissing(
                f"{name!r} is an overlay, not a topology",
                hint=f"lay it over one: {{preset: NAME, overlay: {name}}}",
            )
        return made

    def overlay(self, name: str) -> Overlay:
        """The overlay of a name. Raises TopologyMissing or ScenarioErrors."""
        made = self._named(name, "overlay")
        if isinstance(made, Topology):
            raise TopologyMissing(f"{name!r} is a topology, not an overlay")
        return made

    def files(self) -> Iterator[Path]:
        """Every topology and overlay file, in the order of the look-up."""
        for folder in self.folders:
            try:
                names = sorted(os.listdir(folder))
            except OSError:
                continue
            paths = [folder / name for name in names if name.endswith(SUFFIXES) and name[0] != "."]
            yield from (path for path in paths[:_FILES_PER_FOLDER] if self._is_ours(path, folder))

    def _is_ours(self, path: Path, folder: Path) -> bool:
        # A link could lead anywhere. What was installed is trusted: installers make links.
        trusted = folder == _real(package_folder())
        return (trusted or _real(path).is_relative_to(folder)) and is_topology_file(path)

    def _named(self, name: str, kind: str) -> Topology | Overlay:
        path = self._find(name)
        if path is None:
            known = sorted({each.stem for each in self.files()})
            raise TopologyMissing(f"no {kind} is called {name[:80]!r}", hint=suggestion(name, known))
        if path not in self._made:
            try:
                self._made[path] = read_file(path)
            except ScenarioError as error:
                self._made[path] = error
        made = self._made[path]
        if isinstance(made, ScenarioError):
            raise made
        return made

    def _find(self, name: str) -> Path | None:
        if not re.match(NAME_PATTERN, name):
            return None
        for folder in self.folders:
            for suffix in SUFFIXES:
                path = folder / f"{name}{suffix}"
                if self._is_ours(path, folder):
                    return path
        return None


# -------------------------------------------------------------------- reading


def read_file(path: Path) -> Topology | Overlay:
    """The topology or overlay of one file. Raises ScenarioErrors with every mistake in it."""
    document = yamlnodes.read(path)
    problems = Problems(document)
    if not document.root.is_mapping:
        problems.add(document.root, "a topology file is a mapping that begins with 'topology-file: 1'")
        problems.raise_if_any()
    made = _overlay(document, problems) if document.root.get("overlay") else _topology(document, problems)
    problems.raise_if_any()
    assert made is not None
    return made


def _topology(document: Document, problems: Problems) -> Topology | None:
    root = document.root
    written = shape.validate(WrittenTopology, root, problems)
    check_machine(root, problems)
    _check_name(root.get("name"), document, problems)
    return topology_from(written) if written is not None else None


def _overlay(document: Document, problems: Problems) -> Overlay | None:
    root = document.root
    written = shape.validate(WrittenOverlay, root, problems)
    _check_answers(root.get("attributes"), root, problems)
    _check_name(root.get("overlay"), document, problems)
    if written is None:
        return None
    fields = {name: getattr(written, name) for name in Overlay.model_fields if name != "name"}
    return Overlay(name=written.overlay, **fields)


def topology_from(written: InlineTopology) -> Topology:
    """The topology that was written, in a file or inside a scenario."""
    fields = {name: getattr(written, name) for name in InlineTopology.model_fields}
    return Topology(**fields)


# --------------------------------------------------------------------- checks


def _check_name(node: Node | None, document: Document, problems: Problems) -> None:
    stem = Path(document.path).stem
    if node is not None and node.word is not None and node.word != stem:
        hint = f"write {stem}, or rename the file"
        problems.add(node, f"the name {node.word[:80]!r} is not that of the file", hint=hint)


def check_machine(root: Node, problems: Problems) -> None:
    """What the form cannot say about a topology: names that do not exist, islands that overlap."""
    says, does = root.get("says"), root.get("does")
    _check_answers(says.get("attributes") if says else None, does, problems)
    gpus, links = root.get("gpus"), root.get("links")
    count = gpus.get("count") if gpus else None
    if count is not None and count.number is not None:
        nodes = root.get("nodes")
        whole = count.number * (nodes.number or 1 if nodes else 1)
        if whole > limits.GPUS:
            problems.add(count, f"the machine has {whole} GPUs; at most {limits.GPUS} are possible")
        if links is not None:
            _check_islands(links, count.number, problems)


def _check_islands(links: Node, count: int, problems: Problems) -> None:
    kind, islands = links.get("kind"), links.get("islands")
    if kind is None or kind.word not in ("nvswitch", "bridge", "pcie"):
        return
    if kind.word != "bridge":
        if islands is not None and islands.entries:
            problems.add(islands, "only a machine of kind 'bridge' has islands", at_key=True)
        return
    if islands is None or (islands.is_list and not islands.entries):
        problems.add(links, "a machine of kind 'bridge' needs islands", hint="islands: [[0, 1], [2, 3]]")
        return
    seen: set[int] = set()
    for ordinal in [each for island in islands.entries for each in island.entries]:
        if ordinal.number is None:
            continue
        if not 0 <= ordinal.number < count:
            problems.add(ordinal, f"GPU {ordinal.number} is outside the node, which has {count} (from 0)")
        elif ordinal.number in seen:
            problems.add(ordinal, f"GPU {ordinal.number} is in two islands")
        seen.add(ordinal.number)


def _check_answers(attributes: Node | None, calls: Node | None, problems: Problems) -> None:
    """The attributes that probes say, the calls that refuse, and fabric handles."""
    for name, value in (attributes.mapping if attributes else {}).items():
        if name not in ATTRIBUTES:
            hint = suggestion(name.removeprefix("CU_DEVICE_ATTRIBUTE_"), ATTRIBUTES)
            problems.add(value, f"no attribute is called {name[:80]!r}", hint=hint, at_key=True)
        elif name.endswith("_SUPPORTED") and value.number is not None and value.number > 1:
            problems.add(value, f"{name} is 0 or 1")
    refuses = calls.get("refuses") if calls else None
    for name, value in (refuses.mapping if refuses else {}).items():
        site = SITES.get(name)
        if site is None or site.domain not in _CALL_DOMAINS:
            known = [each.name for each in SITES.values() if each.domain in _CALL_DOMAINS]
            hint = suggestion(name, known)
            problems.add(value, f"no call is called {name[:80]!r}", hint=hint, at_key=True)
        else:
            _check_code(name, value, problems)
    handles = calls.get("fabric_handles") if calls else None
    if handles is not None and handles.word != "works":
        _check_code("cuMemCreate", handles, problems, instead="'works', or a code of cuMemCreate: ")


def _check_code(site: str, node: Node, problems: Problems, *, instead: str = "") -> None:
    if node.word is not None:
        answer = code_of(SITES[site], node.word)
        if isinstance(answer, Wrong):
            problems.add(node, answer.message, hint=instead + answer.hint)
