"""What every canary breaks over the seed scenarios, against what it declares.

    .venv/bin/python benchmarks/canaries.py --jobs 2
    .venv/bin/python benchmarks/canaries.py --own
    .venv/bin/python benchmarks/canaries.py -k "mocked and not h200" --canary ranks_agree

Runs each canary on its own seed, where exactly ``breaks`` must be broken, and on
every seed that ``-k`` and ``--ranks`` select, where nothing outside of ``breaks`` and
``also_breaks`` may be. Prints a line per canary, and each run that contradicts its
declaration. Runs that end ``unknown`` show nothing and are only counted: a canary
may never come to the call that a seed strikes. Exits 0 if every declaration is
true, 1 if one is not.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import typer

from faultlab.errors import FaultlabError
from faultlab.runner.batch import Item, Result, items_of, run_items, select
from faultlab.runner.session import Session
from faultlab.scenario.load import load_paths
from faultlab.scenario.models import Scenario
from faultlab.subjects.canaries import CANARIES

SEEDS = Path(__file__).resolve().parent.parent / "scenarios" / "seed"


@dataclass
class Seen:
    """What was seen of one canary: invariant to the first scenario that showed it broken."""

    runs: int = 0
    unknown: int = 0
    on_own_seed: frozenset[str] | None = None
    broken: dict[str, str] = field(default_factory=dict)

    def add(self, result: Result, *, own: bool) -> None:
        """Count one result."""
        self.runs += 1
        if result["verdict"] == "unknown":
            self.unknown += 1
            return
        broken = [name for name, found in result["invariants"].items() if found["state"] == "broken"]
        for name in broken:
            self.broken.setdefault(name, f"{result['id']}: {result['invariants'][name]['reason']}")
        if own:
            self.on_own_seed = frozenset(broken)


def contradictions(name: str, seen: Seen) -> Iterator[str]:
    """Where a canary's declaration is not true."""
    canary = CANARIES[name]
    if seen.on_own_seed is None:
        yield f"its own seed {canary.seed} ended unknown"
    elif seen.on_own_seed != canary.breaks:
        yield f"on {canary.seed} it breaks {_listed(seen.on_own_seed)}, declared is {_listed(canary.breaks)}"
    for invariant, where in seen.broken.items():
        if invariant not in canary.breaks | canary.also_breaks:
            yield f"{invariant} is not declared; {where}"


def _listed(names: frozenset[str]) -> str:
    return ", ".join(sorted(names)) or "nothing"


def _line(name: str, seen: Seen) -> str:
    canary = CANARIES[name]
    also = [each for each in seen.broken if each not in canary.breaks]
    runs = f"{seen.runs} runs" + (f", {seen.unknown} unknown" if seen.unknown else "")
    further = f"; elsewhere also {_listed(frozenset(also))}" if also else ""
    return f"{name:42} {runs:20} {_listed(seen.on_own_seed or frozenset())}{further}"


def _items(scenarios: list[Scenario], others: list[Scenario], name: str) -> list[Item]:
    """A canary's own seed, and the others that were selected."""
    seed = CANARIES[name].seed
    own = [scenario for scenario in scenarios if scenario.id == seed]
    others = [scenario for scenario in others if scenario.id != seed]
    return items_of(own + others, ("sim",), f"canary:{name}")


def main(
    expression: Annotated[str, typer.Option("-k", help="Which seeds besides a canary's own.")] = "",
    ranks: Annotated[int, typer.Option(min=1, help="Of those, which number of ranks.")] = 2,
    own: Annotated[bool, typer.Option("--own", help="Each canary's own seed alone.")] = False,
    canary: Annotated[str, typer.Option(help="A part of the names of the canaries to run.")] = "",
    jobs: Annotated[int, typer.Option(min=1, max=64, help="How many runs at a time.")] = 2,
) -> None:
    """Run, and print what was seen against what is declared."""
    names = [name for name in CANARIES if canary in name]
    if not names:
        sys.exit(f"no canary has {canary!r} in its name; there are {', '.join(CANARIES)}")
    try:
        scenarios = load_paths([SEEDS])
        chosen = select(items_of(scenarios, ("sim",)), expression)
        others = [item.scenario for item in chosen if item.scenario.ranks == ranks and not own]
        wrong = _run({name: _items(scenarios, others, name) for name in names}, jobs)
    except FaultlabError as error:
        sys.exit(str(error))
    sys.exit(1 if wrong else 0)


def _run(items: dict[str, list[Item]], jobs: int) -> int:
    """Run each canary's items and print what they show; the number of contradictions."""
    wrong, runs, began = 0, 0, time.monotonic()
    with Session() as session:
        session.warm_up()
        for name, mine in items.items():
            seen = Seen()
            for result in run_items(session, mine, jobs=jobs, out=None, on_result=lambda result: None):
                seen.add(result, own=result["id"] == mine[0].id)
            runs += seen.runs
            print(_line(name, seen), flush=True)
            for text in contradictions(name, seen):
                wrong += 1
                print(f"  ! {text}", flush=True)
    seconds = time.monotonic() - began
    print(f"{len(items)} canaries, {runs} runs in {seconds:.0f} s, {wrong} contradictions")
    return wrong


if __name__ == "__main__":
    typer.run(main)
