"""The same verdict every time: all scenarios of some paths, again and again.

    .venv/bin/python benchmarks/repeats.py scenarios/seed --times 100

Runs every scenario ``--times`` times, in rounds over all of them, and compares verdict,
outcome, path and broken invariants with those of its first run. Prints every run that
differs, and exits 0 only if none did and every first run passed.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from pathlib import Path
from typing import Annotated, Any

import typer

from faultlab import limits
from faultlab.report import text
from faultlab.runner.batch import Result, items_of, run_items, select
from faultlab.runner.session import Session
from faultlab.scenario.load import load_paths


def judged(result: Result) -> tuple[Any, ...]:
    """What must not change from run to run."""
    broken = sorted(name for name, told in result["invariants"].items() if told["state"] == "broken")
    return result["verdict"], result["outcome"], result["path"], tuple(broken)


class Comparison:
    """The first result of every scenario, and how later ones compare."""

    def __init__(self) -> None:
        self._first: dict[str, tuple[Any, ...]] = {}
        self.verdicts: Counter[str] = Counter()
        self.different = 0

    def add(self, result: Result) -> None:
        """Take one result; says so if it is not what the first one was, or no pass."""
        self.verdicts[str(result["verdict"])] += 1
        first = self._first.setdefault(str(result["id"]), judged(result))
        if judged(result) != first:
            self.different += 1
        if judged(result) != first or result["verdict"] != "pass":
            print(text.render_result(result), flush=True)

    @property
    def clean(self) -> bool:
        """Whether every run passed, and none differed."""
        return not self.different and set(self.verdicts) == {"pass"}


def main(
    paths: Annotated[list[Path], typer.Argument(help="Scenario files or folders.")],
    times: Annotated[int, typer.Option(min=1, max=10_000, help="How often each scenario runs.")] = 100,
    jobs: Annotated[int, typer.Option(min=1, max=64, help="How many at a time.")] = limits.JOBS,
    expression: Annotated[str, typer.Option("-k", help="Which scenarios, as for faultlab run.")] = "",
) -> None:
    """Run, compare, and count."""
    items = select(items_of(load_paths(paths), ("sim",)), expression or None)
    comparison = Comparison()
    with Session() as session:
        session.warm_up()
        began = time.monotonic()
        for number in range(times):
            # A session answers each counterfactual once; here each round asks anew.
            session.counterfactuals.forget()
            run_items(session, items, jobs=jobs, out=None, on_result=comparison.add)
            seconds = time.monotonic() - began
            print(f"round {number + 1}: {comparison.different} differed, {seconds:.0f} s", flush=True)
    print(f"{len(items)} scenarios, {times} times: {dict(comparison.verdicts)}")
    sys.exit(0 if comparison.clean else 1)


if __name__ == "__main__":
    typer.run(main)
