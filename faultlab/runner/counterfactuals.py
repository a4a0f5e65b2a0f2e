"""After a run and before it is judged: the rungs that its group passed by, each tried alone.

Promise: ``completed`` runs what ``judge.counterfactual`` asks for, in the same
session, writes how it ended into the run's folder, and gives the facts with it in them. The
times of the run itself stay as they were. Each question is asked once per session:
runs that share machine, ranks, workspace, faults and budget share the answer.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from faultlab.judge import counterfactual, judge_facts, read_facts
from faultlab.judge.facts import Facts
from faultlab.runner.answers import Answer
from faultlab.runner.session import Session
from faultlab.scenario.models import Scenario


def completed(session: Session, folder: Path) -> Facts:
    """The facts of the run in ``folder``, with what its counterfactuals showed. Raises
    LabError if there is no run in it that can be read, or if the lab itself failed."""
    facts = read_facts(folder)
    rungs = counterfactual.needed(facts)
    if rungs:
        answers = {rung: _answer(session, facts, rung) for rung in rungs}
        counterfactual.write(folder, answers)
        facts.counterfactuals = counterfactual.read(folder)
    return facts


def _answer(session: Session, facts: Facts, rung: str) -> Answer:
    scenario = counterfactual.scenario_for(facts.scenario, rung)
    # The scenario holds all that a run depends on, and nothing of who asks.
    question = f"{facts.lane} {scenario.model_dump_json()}"
    return session.counterfactuals.ask(question, lambda: _find(session, scenario, facts.lane))


def _find(session: Session, scenario: Scenario, lane: str) -> Answer:
    folder = session.run(scenario, lane)
    try:
        judgement = judge_facts(read_facts(folder))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    unknown = judgement.verdict.answer if judgement.verdict.word == "unknown" else ""
    return counterfactual.answer(judgement.facts, broken=judgement.broken, unknown=unknown)
