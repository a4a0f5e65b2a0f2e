"""From files to scenarios: reads, expands the matrix, checks, and builds.

A file is data: loading it runs no code and imports no subject. Every mistake
of a file is reported at its place, all of them together where that is
possible, before anything runs.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

from faultlab import limits
from faultlab.errors import ScenarioError, ScenarioErrors
from faultlab.scenario import matrix, meaning, shape, yamlnodes
from faultlab.scenario.models import DEFAULT_WORKLOAD, Effect, Fault, Scenario, Subject
from faultlab.scenario.problems import Problems, bounded
from faultlab.scenario.words import code_of, nearest, site_of
from faultlab.scenario.written import WrittenScenario
from faultlab.scenario.yamlnodes import Document
from faultlab.sites import Site
from faultlab.topology import load as topologies
from faultlab.topology.load import SUFFIXES, Library, is_folder
from faultlab.topology.models import Topology

TOP_KEY: Final = "faultlab"
_TOP_KEY: Final = re.compile(rb"^(?:---[ \t]+)?[\"']?faultlab[\"']?[ \t]*:", re.MULTILINE)
_TOP_KEY_IN_BRACES: Final = re.compile(rb"\A\s*\{\s*[\"']?faultlab[\"']?\s*:")
_ANY_TOP_KEY: Final = re.compile(rb"^([A-Za-z][A-Za-z_-]{5,14})[ \t]*:", re.MULTILINE)
#: ``fault:`` and ``faults:`` are words of their own, ``fautlab:`` is none.
_MISSPELT: Final = 0.8
_FILES: Final = 20_000
_UTF8_BOM: Final = b"\xef\xbb\xbf"
_NOT_IN_STEM: Final = re.compile(r"[^A-Za-z0-9._=,-]+", re.ASCII)
_NEITHER: Final = "is neither a scenario nor a topology file"
_TOP_KEY_HINT: Final = "a scenario begins with 'faultlab: 1', a topology with 'topology-file: 1'"


# ----------------------------------------------------------------- one file


def load_file(path: Path, search: Sequence[Path] = ()) -> list[Scenario]:
    """The scenarios of one file; none if it is a topology file.

    ``search``: more folders with topologies. Raises ScenarioErrors with every
    mistake that was found, or ScenarioError if the file cannot be read.
    """
    path = Path(path)
    document = yamlnodes.read(path)
    root = document.root
    if root.get("topology-file") is not None and root.get(TOP_KEY) is None:
        return []
    problems = Problems(document)
    if root.get(TOP_KEY) is None:
        raise _neither(document)
    library = Library(path, search)
    scenarios = [
        scenario
        for combination in matrix.expand(root, problems)
        if (scenario := _build(combination, document, library, problems)) is not None
    ]
    problems.raise_if_any()
    return scenarios


def _neither(document: Document) -> ScenarioError:
    for key, node in document.root.mapping.items():
        if nearest(key, (TOP_KEY,), cutoff=_MISSPELT):
            return document.error(
                f"unknown key {key[:80]!r}", node, hint=f"did you mean {TOP_KEY!r}?", at_key=True
            )
    return document.error(f"this {_NEITHER}", document.root, hint=_TOP_KEY_HINT)


def _build(
    combination: matrix.Combination, document: Document, library: Library, problems: Problems
) -> Scenario | None:
    """One scenario, or None after its mistakes were added to ``problems``."""
    root = combination.root
    written = shape.validate(WrittenScenario, root, problems)
    setting = meaning.Setting(problems, library, combination.suffix)
    topology = meaning.topology_of(root, setting)
    setting = replace(setting, topology=topology, ranks=meaning.ranks_count(root, topology, setting))
    meaning.check(root, setting)
    # A mistake that an earlier combination had as well is not counted again.
    if problems:
        return None
    assert written is not None
    assert topology is not None
    assert setting.ranks is not None
    return _scenario(combination, document, written, topology, setting.ranks)


def _scenario(
    combination: matrix.Combination,
    document: Document,
    written: WrittenScenario,
    topology: Topology,
    ranks: int,
) -> Scenario:
    given = written.subject
    return Scenario(
        id=_stem(document.path) + combination.suffix,
        path=document.path,
        line=combination.place.key_line,
        column=combination.place.key_column,
        title=written.title,
        source=written.source,
        topology=topology,
        ranks=ranks,
        subject=Subject(name=given) if isinstance(given, str) else given,
        workspace=written.workspace,
        workload=tuple(written.workload) if written.workload is not None else DEFAULT_WORKLOAD,
        faults=tuple(_with_named_code(fault) for fault in written.faults),
        expect=written.expect,
        budget=written.budget,
        lanes=tuple(written.lanes) if written.lanes is not None else ("sim", "gpu"),
        matrix=dict(combination.labels),
    )


def _with_named_code(fault: Fault) -> Fault:
    """The same fault with its error by name, also where the file has a number."""
    effect: Effect = fault.effect
    if effect.error is None:
        return fault
    site = site_of(fault.at)
    assert isinstance(site, Site), fault.at
    name = code_of(site, effect.error)
    assert isinstance(name, str), name
    return fault.model_copy(update={"effect": effect.model_copy(update={"error": name})})


def _stem(path: str) -> str:
    return _NOT_IN_STEM.sub("-", Path(path).stem).strip("-.") or "scenario"


# --------------------------------------------------------------- many files


def load_paths(paths: Sequence[Path]) -> list[Scenario]:
    """The scenarios of files and folders, in the order of the paths and of the names in folders.

    Raises ScenarioErrors with the mistakes of all files.
    """
    groups, errors, _ = _load(paths, with_topologies=False)
    if errors:
        raise ScenarioErrors(bounded(errors))
    return _with_distinct_ids(groups)


def check_paths(paths: Sequence[Path]) -> tuple[int, int]:
    """Check scenario and topology files; how many scenarios and topology files there are.

    Raises ScenarioErrors with the mistakes of all files.
    """
    groups, errors, topology_files = _load(paths, with_topologies=True)
    if errors:
        raise ScenarioErrors(bounded(errors))
    return len(_with_distinct_ids(groups)), topology_files


def is_scenario_file(path: Path) -> bool:
    """Whether the top key is ``faultlab:``, be the rest right or wrong. Cheap; never raises."""
    return _kind_of(path) == "scenario"


def _load(
    paths: Sequence[Path], *, with_topologies: bool
) -> tuple[list[list[Scenario]], list[ScenarioError], int]:
    groups: list[list[Scenario]] = []
    errors: list[ScenarioError] = []
    topology_files = 0
    total = 0
    for path, kind in _files(paths, errors):
        try:
            if kind == "topology":
                if with_topologies:
                    topologies.read_file(path)
                    topology_files += 1
                continue
            groups.append(load_file(path))
        except ScenarioError as error:
            errors.extend(error.errors if isinstance(error, ScenarioErrors) else [error])
            continue
        total += len(groups[-1])
        if total > limits.SCENARIOS_PER_RUN:
            errors.append(ScenarioError(f"more than {limits.SCENARIOS_PER_RUN} scenarios", path=str(path)))
            break
    unique = {(each.path, each.line, each.column, each.message): each for each in errors}
    return groups, list(unique.values()), topology_files


def _files(paths: Sequence[Path], errors: list[ScenarioError]) -> Iterator[tuple[Path, str]]:
    """The files to look at and their kinds, each file once. What cannot be one is added to ``errors``.

    A file that is named is looked at whatever it seems to be.
    """
    seen: set[str] = set()
    for named in map(Path, paths):
        found = _walk(named, errors) if is_folder(named) else iter([(named, _kind_of(named))])
        for path, kind in found:
            real = os.path.realpath(path)
            if real not in seen:
                seen.add(real)
                yield path, kind


def _walk(folder: Path, errors: list[ScenarioError]) -> Iterator[tuple[Path, str]]:
    """The scenario and topology files below a folder; other YAML files are nobody's business."""
    root = os.path.realpath(folder)
    count = 0
    for place, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(names):
            if name.startswith(".") or not name.endswith(SUFFIXES):
                continue
            path = Path(place, name)
            kind = _kind_of(path)
            if not kind:
                continue
            count += 1
            if count > _FILES:
                errors.append(ScenarioError(f"more than {_FILES} files", path=str(folder)))
                return
            if not Path(os.path.realpath(path)).is_relative_to(root):
                errors.append(ScenarioError("is a link that leads out of its folder", path=str(path)))
                continue
            yield path, kind


def _kind_of(path: Path) -> str:
    """``scenario``, ``topology``, ``misspelt``, or nothing. Never raises."""
    try:
        data = yamlnodes.read_bytes(path).removeprefix(_UTF8_BOM)
    except ScenarioError:
        return _kind_of_large(path)
    return _kind_of_bytes(data)


def _kind_of_large(path: Path) -> str:
    """A file past the size limit is told by its beginning, so that its error is shown."""
    try:
        if not path.is_file():
            return ""
        with path.open("rb") as file:
            return _kind_of_bytes(file.read(limits.FILE_SIZE_BYTES).removeprefix(_UTF8_BOM))
    except (OSError, ValueError):
        return ""


def _kind_of_bytes(data: bytes) -> str:
    if _TOP_KEY.search(data) or _TOP_KEY_IN_BRACES.match(data):
        return "scenario"
    if topologies.looks_like_topology(data):
        return "topology"
    keys = {match.decode() for match in _ANY_TOP_KEY.findall(data)[:200]}
    return "misspelt" if any(nearest(key, (TOP_KEY,), cutoff=_MISSPELT) for key in keys) else ""


# ------------------------------------------------------------------------ ids


def _with_distinct_ids(groups: list[list[Scenario]]) -> list[Scenario]:
    """Ids that several files have get the folder's name in front. Raises ScenarioErrors if that is not enough."""
    counts = Counter(scenario.id for group in groups for scenario in group)
    found: list[Scenario] = []
    for group in groups:
        prefix = ""
        if any(counts[scenario.id] > 1 for scenario in group):
            name = Path(os.path.realpath(group[0].path)).parent.name
            prefix = f"{name}/" if name else ""
        found.extend(scenario.model_copy(update={"id": prefix + scenario.id}) for scenario in group)
    first: dict[str, Scenario] = {}
    errors: list[ScenarioError] = []
    for scenario in found:
        earlier = first.setdefault(scenario.id, scenario)
        if earlier is not scenario and earlier.path != scenario.path:
            hint = f"the other one is in {earlier.path}: rename one of the files"
            message = f"two scenarios have the id {scenario.id!r}"
            errors.append(ScenarioError(message, path=scenario.path, line=scenario.line, column=1, hint=hint))
    if errors:
        unique = {error.path: error for error in errors}
        raise ScenarioErrors(bounded(list(unique.values())))
    return found
