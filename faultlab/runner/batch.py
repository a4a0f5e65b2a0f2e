"""Runs many scenarios: selection, jobs, results. Used by the command line and by pytest."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from _pytest.mark.expression import Expression

from faultlab.errors import UsageError
from faultlab.judge import judge_facts
from faultlab.report.results import result_object, skipped_result
from faultlab.runner.counterfactuals import completed
from faultlab.runner.session import Session, keep
from faultlab.scenario.models import Scenario, Subject
from faultlab.scenario.words import Wrong, subject_of
from faultlab.subjects.load import missing_reason

#: One result: an object of results.jsonl.
Result = dict[str, Any]


@dataclass(frozen=True)
class Item:
    """One scenario in one lane."""

    scenario: Scenario
    lane: str
    overrides: tuple[tuple[str, str], ...] = ()

    @property
    def id(self) -> str:
        """``stem[key=value,…]-sim``."""
        return f"{self.scenario.id}-{self.lane}"


def items_of(scenarios: Iterable[Scenario], lanes: Sequence[str], subject: str | None = None) -> list[Item]:
    """The items of some scenarios. With ``subject`` it replaces the file's."""
    if subject is not None and isinstance(wrong := subject_of(subject), Wrong):
        raise UsageError(f"--subject: {wrong.message}\n  {wrong.hint}")
    found: list[Item] = []
    for scenario in scenarios:
        chosen = scenario
        overrides: tuple[tuple[str, str], ...] = ()
        if subject is not None:
            chosen = scenario.model_copy(update={"subject": Subject(name=subject)})
            overrides = (("subject", subject),)
        found.extend(Item(chosen, lane, overrides) for lane in scenario.lanes if lane in lanes)
    return found


#: Characters of ids that pytest's expressions cannot have, and others that they can.
_ID_CHARACTERS = str.maketrans("=,", ":/")


def select(items: list[Item], expression: str | None) -> list[Item]:
    """The items that ``-k`` names: an id as it is, or words joined by and, or, not."""
    if not expression:
        return items
    exact = [item for item in items if expression in (item.id, item.scenario.id)]
    if exact:
        return exact
    try:
        compiled = Expression.compile(expression.translate(_ID_CHARACTERS))
    except SyntaxError:
        # An id has characters an expression cannot have; then it is a part of one.
        return [item for item in items if expression.lower() in item.id.lower()]

    def matches(item: Item) -> bool:
        identity = item.id.lower().translate(_ID_CHARACTERS)
        return compiled.evaluate(lambda name, /, **_: name.lower() in identity)

    try:
        return [item for item in items if matches(item)]
    except Exception as error:
        raise UsageError(f"-k {expression!r}: {error}") from None


def skip_reason(item: Item) -> str:
    """Why this item cannot run here; empty if it can."""
    if item.lane == "gpu":
        return gpu_reason()
    return missing_reason(item.scenario.subject)


def gpu_reason() -> str:
    """Why the gpu lane cannot run on this machine."""
    if not list(Path("/dev").glob("nvidia[0-9]*")):
        return "no GPU on this machine"
    return "the gpu lane is not built yet: this version simulates the machine"


def run_item(session: Session, item: Item, out: Path | None = None) -> Result:
    """Run and judge one item. Raises LabError if the lab itself failed."""
    reason = skip_reason(item)
    if reason:
        return skipped_result(item.scenario, item.lane, reason, dict(item.overrides))
    folder = session.run(item.scenario, item.lane, overrides=dict(item.overrides))
    try:
        result = result_object(judge_facts(completed(session, folder)), folder)
        if out is not None:
            keep(folder, out / result["id"])
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return result


def run_items(
    session: Session,
    items: list[Item],
    *,
    jobs: int,
    out: Path | None,
    on_result: Callable[[Result], None],
) -> list[Result]:
    """Run the items, ``jobs`` at a time; results are written and told as they end."""
    assert jobs >= 1
    lines = None
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        lines = (out / "results.jsonl").open("w")
    results: list[Result] = []
    lock = threading.Lock()

    def work(item: Item) -> None:
        result = run_item(session, item, out)
        with lock:
            results.append(result)
            if lines is not None:
                lines.write(json.dumps(result) + "\n")
                lines.flush()
            on_result(result)

    try:
        _in_threads(session, items, work, jobs)
    finally:
        if lines is not None:
            lines.close()
    return results


def _in_threads(session: Session, items: list[Item], work: Callable[[Item], None], jobs: int) -> None:
    pool = ThreadPoolExecutor(max_workers=jobs, thread_name_prefix="supervisor")
    pending: set[Future[None]] = set()
    rest = iter(items)
    try:
        while True:
            for item in rest:
                pending.add(pool.submit(work, item))
                if len(pending) >= jobs:
                    break
            if not pending:
                return
            done, pending = wait(pending, return_when=FIRST_COMPLETED, timeout=1.0)
            for each in done:
                each.result()
    except BaseException:
        session.stop()
        raise
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
