"""Selecting items: ids as they are, words, and expressions over both."""

from __future__ import annotations

import pytest

from faultlab.runner.batch import Item, items_of, select
from faultlab.scenario.load import load_paths
from tests.conftest import REPOSITORY


@pytest.fixture(scope="module")
def items() -> list[Item]:
    return items_of(load_paths([REPOSITORY / "scenarios" / "seed" / "no-fault.yaml"]), ("sim", "gpu"))


def test_an_id_selects_itself(items: list[Item]) -> None:
    assert select(items, items[3].id) == [items[3]]


def test_words_of_ids_stand_in_expressions(items: list[Item]) -> None:
    found = select(items, "ranks=2 and not creation=mocked and sim")
    assert found
    assert found == [
        item for item in items if "ranks=2" in item.id and "creation=real" in item.id and "sim" in item.id
    ]


def test_a_part_of_an_id_with_commas_is_a_word(items: list[Item]) -> None:
    found = select(items, "ranks=2,creation=real")
    assert found
    assert found == [item for item in items if "ranks=2,creation=real" in item.id]
