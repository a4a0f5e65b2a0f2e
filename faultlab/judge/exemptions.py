"""What the scenario itself made impossible to give back, per rank.

Promise: an object is exempt if the call that made it was struck after it ran
(its maker never learnt of it), if its own release was struck, or if it hangs
together with such an object: what stands on it, and whatever these keep alive
(a handle whose release failed, its mapping, and the range of that). A struck ``workspace.destroy`` exempts everything that was made inside
that workspace's creation, and the rank's descriptors, threads and files with it.
``no_leak`` is the only reader; another invariant about what is left would ask here too.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from faultlab.judge.facts import RankFacts
from faultlab.judge.records import Call, Strike
from faultlab.machine.base import LedgerObject
from faultlab.sites import SITES

_MAKES_DESCRIPTORS: Final = ("cuMemExportToShareableHandle", "fd.connect", "fd.send", "fd.recv")


@dataclass(frozen=True)
class Exemptions:
    """``sites``: where the strikes fell, for the reason. ``system``: whether growth of what the
    operating system holds is exempt too; ``descriptors``: how many descriptors are, where it is not."""

    objects: frozenset[str]
    sites: tuple[str, ...]
    standins: bool
    system: bool
    descriptors: int

    def covers(self, each: LedgerObject) -> bool:
        """Whether this object is not held against the subject."""
        return each.id in self.objects or (self.standins and each.kind == "standin")


def exemptions(rank: RankFacts) -> Exemptions:
    """The exemptions of one rank, over its whole run."""
    strikes = [strike for strike in rank.strikes if strike.loses]
    roots: set[str] = set()
    sites: list[str] = []
    for strike in strikes:
        lost = {*_lost_by(rank, strike), *strike.refers}
        roots |= lost
        if lost or _loses_a_workspace(strike) or _loses_a_descriptor(strike):
            sites.append(strike.site)
    whole = [strike for strike in strikes if _loses_a_workspace(strike)]
    return Exemptions(
        frozenset(_together(roots, _known(rank))),
        tuple(dict.fromkeys(sites)),
        # A stand-in is made below the seam: no leave event says which creation made it.
        standins=bool(whole),
        system=bool(whole),
        descriptors=sum(_loses_a_descriptor(strike) for strike in strikes),
    )


def _loses_a_workspace(strike: Strike) -> bool:
    if strike.site == "workspace.destroy":
        return True
    return SITES[strike.site].domain == "step" and strike.when == "after"


def _loses_a_descriptor(strike: Strike) -> bool:
    return strike.site in _MAKES_DESCRIPTORS and strike.when == "after"


def _lost_by(rank: RankFacts, strike: Strike) -> set[str]:
    """The objects that the subject cannot give back because of this strike alone."""
    call = rank.by_identity.get(strike.identity)
    if strike.site == "workspace.destroy":
        return set().union(*(_made_inside(rank, each) for each in _creations(rank, call)))
    if strike.when != "after":
        return set()
    return {*strike.made, *(_made_inside(rank, call) if call is not None else ())}


def _creations(rank: RankFacts, destroy: Call | None) -> list[Call]:
    """The creation of the workspace that a destroy names; all of them if it names none."""
    name = destroy.argument.partition(" ")[0] if destroy is not None else ""
    named = [each for each in rank.returned if each.workspace == name]
    found = [rank.creation_of(each) for each in named]
    if not found:
        return [call for call in rank.calls if call.site == "workspace.create"]
    return [call for call in found if call is not None]


def _made_inside(rank: RankFacts, outer: Call) -> set[str]:
    """What a call and the calls inside it made."""
    end = outer.ended.n if outer.ended is not None else rank.last.n
    return {
        made.id
        for call in rank.calls
        if call.ended is not None and outer.began.n <= call.began.n and call.ended.n <= end
        for made in call.made
    }


def _known(rank: RankFacts) -> list[LedgerObject]:
    """Every object that was ever seen in this rank."""
    listed = [each for ledger in rank.ledgers for each in ledger.objects]
    return listed + [each for call in rank.calls for each in call.made]


def _together(roots: Iterable[str], known: list[LedgerObject]) -> set[str]:
    """The roots, what stands on them, and what all of these keep alive: a mapping that
    stays because its handle's release was struck keeps its range."""
    keeps: dict[str, set[str]] = {}
    stands: dict[str, set[str]] = {}
    for each in known:
        for other in each.depends_on:
            keeps.setdefault(each.id, set()).add(other)
            stands.setdefault(other, set()).add(each.id)
    return _reached(_reached(set(roots), stands), keeps)


def _reached(start: set[str], edges: dict[str, set[str]]) -> set[str]:
    found, rest = set(start), list(start)
    while rest:
        new = edges.get(rest.pop(), set()) - found
        found |= new
        rest.extend(new)
    return found
