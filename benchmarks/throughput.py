"""How many scenarios a second, compared with one spawn per scenario, in the same run.

    .venv/bin/python benchmarks/throughput.py --ranks 2,4,8

Both sides run the same scenario with the same supervisor, the same rank program
and every invariant judged; they differ in how a rank's process begins. The lab forks
it from a process that has torch and FlashInfer imported; the other side starts it
as ``torch.multiprocessing.spawn`` does, with everything to be imported. The sides take
turns, so that a busy machine slows both. Only ratios of one run mean anything.
"""

from __future__ import annotations

import sys
import time
from itertools import product
from pathlib import Path
from typing import Annotated, ClassVar, Literal

import typer

from faultlab import limits
from faultlab.runner import forkserver
from faultlab.runner.batch import Item, run_items
from faultlab.runner.cleanup import die_with_parent
from faultlab.runner.session import Session
from faultlab.scenario.load import load_paths
from faultlab.scenario.models import Scenario

SCENARIO = Path(__file__).resolve().parent.parent / "scenarios" / "seed" / "no-fault.yaml"
#: Asked for by ``SpawnSession``, not by people.
_SPAWNER = "spawner"


class Spawner(forkserver.Forkserver):
    """Starts every rank in a fresh interpreter."""

    start_method: Literal["fork", "spawn"] = "spawn"


class SpawnSession(Session):
    """A session whose ranks import everything themselves."""

    forkserver_command: ClassVar[tuple[str, ...]] = (sys.executable, __file__, _SPAWNER)


def spawner(path: str, parent: int) -> None:
    """The process that spawns ranks; it imports torch alone, as a launcher does."""
    import torch.multiprocessing

    assert torch.multiprocessing
    die_with_parent(parent)
    server = Spawner(Path(path))
    print("ready", flush=True)
    server.serve()


def scenario_of(ranks: int, creation: str) -> Scenario:
    """The clean baseline on NVSwitch with this many ranks; ``creation``: mocked or real."""
    wanted = ("hgx-h100-8", f"creation={creation}", "subject=reference")
    found = next(each for each in load_paths([SCENARIO]) if all(part in each.id for part in wanted))
    return found.model_copy(update={"ranks": ranks})


def timed(session: Session, scenario: Scenario, runs: int, jobs: int) -> float:
    """Run it this often, ``jobs`` at a time: seconds. Every run must pass."""
    items = [Item(scenario, "sim")] * runs
    began = time.monotonic()
    results = run_items(session, items, jobs=jobs, out=None, on_result=lambda result: None)
    seconds = time.monotonic() - began
    wrong = [result["reason"] for result in results if result["verdict"] != "pass"]
    assert not wrong, wrong[0]
    return seconds


def main(
    ranks: Annotated[str, typer.Option(help="Rank counts, with commas between.")] = "2,4,8",
    creations: Annotated[
        str, typer.Option(help="mocked, real, or both, with a comma between.")
    ] = "mocked,real",
    rounds: Annotated[int, typer.Option(min=1, max=1000, help="How often the sides take turns.")] = 3,
    runs: Annotated[int, typer.Option(min=1, max=10_000, help="Forked scenarios in a turn.")] = 20,
    jobs: Annotated[int, typer.Option(min=1, max=64, help="How many forked ones at a time.")] = limits.JOBS,
) -> None:
    """Print a line per creation and rank count: scenarios a second of both sides, and their ratio."""
    print(f"{'creation':<8}  {'ranks':>5}  {'forked/s':>9}  {'spawned/s':>9}  {'ratio':>6}")
    with Session() as forks, SpawnSession() as spawns:
        forks.warm_up()
        spawns.warm_up()
        for creation, count in product(creations.split(","), map(int, ranks.split(","))):
            scenario = scenario_of(count, creation)
            forked = spawned = 0.0
            for _ in range(rounds):
                forked += timed(forks, scenario, runs, jobs)
                spawned += timed(spawns, scenario, 1, 1)
            lab, other = rounds * runs / forked, rounds / spawned
            print(f"{creation:<8}  {count:>5}  {lab:>9.2f}  {other:>9.3f}  {lab / other:>6.1f}", flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == [_SPAWNER]:
        spawner(sys.argv[2], int(sys.argv[3]))
    else:
        typer.run(main)
