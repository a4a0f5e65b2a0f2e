"""No false alarms: many runs of a clean scenario, under CPU load, all of which must pass.

    .venv/bin/python benchmarks/clean_runs.py --runs 1000 --load 2

Runs the scenario without a fault again and again while ``--load`` processes
keep the processors busy, and counts verdicts. Exits 0 only if every run passed.
The figures it prints are of one machine at one time; docs/performance.md says
how those there were taken.
"""

from __future__ import annotations

import multiprocessing
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Annotated

import typer

from faultlab.report import text
from faultlab.runner.batch import Item, run_items
from faultlab.runner.session import Session
from faultlab.scenario.load import load_paths

SCENARIO = Path(__file__).resolve().parent.parent / "scenarios" / "seed" / "no-fault.yaml"


def burn() -> None:
    """Keep one processor busy until killed."""
    while True:
        sum(range(10_000))


def main(
    runs: Annotated[int, typer.Option(min=1, max=100_000, help="How many runs.")] = 1000,
    jobs: Annotated[int, typer.Option(min=1, max=64, help="How many at a time.")] = 2,
    load: Annotated[int, typer.Option(min=0, max=64, help="Processes that burn CPU meanwhile.")] = 2,
    select: Annotated[str, typer.Option(help="A part of the ids to run.")] = "ranks=2,creation=real",
) -> None:
    """Run, count, and say every run that did not pass."""
    scenarios = [scenario for scenario in load_paths([SCENARIO]) if select in scenario.id]
    assert scenarios, f"no scenario of {SCENARIO} has {select!r} in its id"
    items = [Item(scenarios[number % len(scenarios)], "sim") for number in range(runs)]
    burners = [multiprocessing.Process(target=burn, daemon=True) for _ in range(load)]
    for burner in burners:
        burner.start()
    verdicts: Counter[str] = Counter()

    def count(result: dict[str, object]) -> None:
        verdicts[str(result["verdict"])] += 1
        if result["verdict"] != "pass":
            print(text.render_result(result), flush=True)

    with Session() as session:
        session.warm_up()
        began = time.monotonic()
        run_items(session, items, jobs=jobs, out=None, on_result=count)
        seconds = time.monotonic() - began
    for burner in burners:
        burner.kill()
    print(f"{runs} runs, {jobs} at a time, {load} burning processes: {dict(verdicts)} in {seconds:.0f} s")
    sys.exit(0 if verdicts["pass"] == runs else 1)


if __name__ == "__main__":
    typer.run(main)
