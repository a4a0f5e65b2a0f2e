"""Which ranks and calls a fault strikes."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from faultlab.scenario.models import CallsByChance, CallsFrom, NodeRanks, RandomRanks
from faultlab.scenario.selectors import ranks_of, strikes

settings.register_profile("selectors", max_examples=100, deadline=None, derandomize=True, database=None)
SETTINGS = settings.get_profile("selectors")
WORLDS = st.integers(1, 128)
SEEDS = st.integers(0, 2**31)


@pytest.mark.parametrize(
    ("selector", "expected"),
    [
        ("all", {0, 1, 2, 3}),
        ("first", {0}),
        ("last", {3}),
        ("all-but-first", {1, 2, 3}),
        ([1, 3], {1, 3}),
        ([1, 7], {1}),
        (NodeRanks(node=0), {0, 1}),
        (NodeRanks(node=1), {2, 3}),
        (NodeRanks(node=2), set()),
    ],
)
def test_ranks_of_four_on_nodes_of_two(selector: object, expected: set[int]) -> None:
    assert ranks_of(selector, 4, 2) == expected  # type: ignore[arg-type]


def test_one_rank_is_first_and_last() -> None:
    assert ranks_of("first", 1, 8) == ranks_of("last", 1, 8) == {0}
    assert ranks_of("all-but-first", 1, 8) == frozenset()


def test_the_draw_is_the_same_on_every_machine() -> None:
    # Changing these changes which ranks every scenario with a seed strikes.
    assert ranks_of(RandomRanks(random=2, seed=7), 8, 8) == {1, 7}
    by_chance = CallsByChance(chance=0.3, seed=7)
    assert [call for call in range(1, 30) if strikes(by_chance, call, 0)] == [1, 4, 8, 10, 12, 18, 19, 25]


@SETTINGS
@given(WORLDS, st.integers(1, 128), SEEDS)
def test_random_ranks(world: int, number: int, seed: int) -> None:
    drawn = ranks_of(RandomRanks(random=number, seed=seed), world, 8)
    assert len(drawn) == min(number, world)
    assert drawn <= set(range(world))
    assert drawn == ranks_of(RandomRanks(random=number, seed=seed), world, 3)
    if number > 1:
        assert ranks_of(RandomRanks(random=number - 1, seed=seed), world, 8) <= drawn


@SETTINGS
@given(WORLDS, st.integers(1, 16))
def test_nodes_divide_the_ranks(world: int, gpus_per_node: int) -> None:
    nodes = [ranks_of(NodeRanks(node=node), world, gpus_per_node) for node in range(world)]
    assert frozenset().union(*nodes) == ranks_of("all", world, gpus_per_node)
    assert sum(map(len, nodes)) == world


@SETTINGS
@given(WORLDS)
def test_words_agree(world: int) -> None:
    everyone = ranks_of("all", world, 8)
    assert ranks_of("first", world, 8) | ranks_of("all-but-first", world, 8) == everyone
    assert ranks_of("last", world, 8) <= everyone


@pytest.mark.parametrize(
    ("selector", "expected"),
    [
        ("every", [1, 2, 3, 4]),
        (2, [2]),
        ([1, 4], [1, 4]),
        (CallsFrom.model_validate({"from": 3}), [3, 4]),
        (CallsByChance(chance=1.0), [1, 2, 3, 4]),
    ],
)
def test_calls(selector: object, expected: list[int]) -> None:
    struck = [call for call in range(1, 5) if strikes(selector, call, 0)]  # type: ignore[arg-type]
    assert struck == expected


@SETTINGS
@given(st.floats(0.01, 1.0), SEEDS, st.integers(1, 10**6), st.integers(0, 127))
def test_chance_depends_on_nothing_else(chance: float, seed: int, call: int, rank: int) -> None:
    selector = CallsByChance(chance=chance, seed=seed)
    answer = strikes(selector, call, rank)
    strikes(selector, call + 1, rank)
    assert strikes(CallsByChance(chance=chance, seed=seed), call, rank) == answer
    if answer:
        assert strikes(CallsByChance(chance=1.0, seed=seed), call, rank)


@pytest.mark.parametrize("chance", [0.1, 0.5, 0.9])
def test_chance_is_what_it_says(chance: float) -> None:
    selector = CallsByChance(chance=chance, seed=1)
    struck = sum(strikes(selector, call, rank) for call in range(1, 501) for rank in range(8))
    assert abs(struck / 4_000 - chance) < 0.03


def test_ranks_draw_apart() -> None:
    selector = CallsByChance(chance=0.5, seed=3)
    patterns = {tuple(strikes(selector, call, rank) for call in range(1, 40)) for rank in range(8)}
    assert len(patterns) == 8
