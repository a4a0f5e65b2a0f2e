"""Which ranks a fault strikes, and which of their calls. Pure, and the same on every machine.

What is drawn by chance comes from a hash of the seed, not from a generator
with a state: the answer for one rank or call does not depend on the others,
nor on the version of Python.
"""

from __future__ import annotations

import hashlib

from faultlab.scenario.models import (
    CallsByChance,
    CallSelector,
    CallsFrom,
    NodeRanks,
    RandomRanks,
    RankSelector,
)


def ranks_of(selector: RankSelector, world_size: int, gpus_per_node: int) -> frozenset[int]:
    """The ranks, out of ``world_size``, that a selector names.

    Rank N runs on GPU N, so the ranks of a node are ``gpus_per_node``
    consecutive ones. ``random`` draws without repetition, at most all ranks;
    a smaller number with the same seed draws some of the same ranks. Ranks
    that do not exist are not in the answer.
    """
    assert world_size >= 1, world_size
    assert gpus_per_node >= 1, gpus_per_node
    everyone = range(world_size)
    if isinstance(selector, str):
        by_word = {
            "all": everyone,
            "first": everyone[:1],
            "last": everyone[-1:],
            "all-but-first": everyone[1:],
        }
        return frozenset(by_word[selector])
    if isinstance(selector, NodeRanks):
        return frozenset(rank for rank in everyone if rank // gpus_per_node == selector.node)
    if isinstance(selector, RandomRanks):
        drawn = sorted(everyone, key=lambda rank: (_share(f"ranks {selector.seed} {rank}"), rank))
        return frozenset(drawn[: selector.random])
    assert isinstance(selector, (list, tuple)), selector
    return frozenset(everyone) & frozenset(selector)


def strikes(selector: CallSelector, call: int, rank: int) -> bool:
    """Whether a fault strikes this call of this rank; calls are counted from 1.

    By chance: each call of each rank by itself, the same at every run with the
    same seed.
    """
    assert call >= 1, call
    assert rank >= 0, rank
    if isinstance(selector, str):
        assert selector == "every", selector
        return True
    if isinstance(selector, int):
        return call == selector
    if isinstance(selector, CallsFrom):
        return call >= selector.from_
    if isinstance(selector, CallsByChance):
        return _share(f"calls {selector.seed} {rank} {call}") < selector.chance
    assert isinstance(selector, (list, tuple)), selector
    return call in selector


def _share(text: str) -> float:
    """A number in [0, 1) that a text stands for, evenly spread over texts."""
    digest = hashlib.sha256(text.encode()).digest()
    # 53 bits: every value is a float of its own, and none rounds up to 1.
    return (int.from_bytes(digest[:8], "big") >> 11) / (1 << 53)
