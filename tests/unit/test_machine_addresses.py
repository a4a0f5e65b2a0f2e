"""The address space of a rank: what is drawn, freed, mapped, and found again."""

from __future__ import annotations

import ctypes
import faulthandler
import mmap
import os
import random
import signal

import pytest

from faultlab.machine.simulated.addresses import (
    BASE,
    GRANULARITY,
    PAGE,
    READ,
    READ_WRITE,
    REGION,
    AddressSpace,
    Mapping,
    Range,
    may_reserve,
)


def reserved(space: AddressSpace, granules: int, alignment: int = 0) -> Range:
    made = space.reserve(granules * GRANULARITY, alignment)
    assert made is not None
    return made


def mapped(owner: Range, first: int, granules: int = 1) -> Mapping:
    """A mapping that begins at the owner's granule ``first``."""
    address = owner.address + first * GRANULARITY
    made = Mapping(f"m{first}", address, granules * GRANULARITY, 1, 0, multicast=False)
    owner.mappings[address] = made
    return made


def test_no_address_is_drawn_twice_or_on_two_ranks() -> None:
    drawn: set[int] = set()
    for rank in range(4):
        space = AddressSpace(rank)
        for _ in range(50):
            made = reserved(space, 3)
            drawn.add(made.address)
            assert space.free(made.address, made.size_bytes) is made
            assert BASE + rank * REGION <= made.address < BASE + (rank + 1) * REGION
    assert len(drawn) == 200


def test_an_address_of_the_device_crashes_as_a_host_pointer() -> None:
    address = reserved(AddressSpace(0), 1).address
    pid = os.fork()
    if pid == 0:
        faulthandler.disable()
        ctypes.string_at(address, 1)
        os._exit(0)
    _, status = os.waitpid(pid, 0)
    assert os.WTERMSIG(status) == signal.SIGSEGV


@pytest.mark.parametrize("alignment", [0, PAGE, GRANULARITY, 512 << 20])
def test_an_alignment_is_honoured(alignment: int) -> None:
    space = AddressSpace(1)
    reserved(space, 1)
    assert reserved(space, 1, alignment).address % max(alignment, GRANULARITY) == 0


@pytest.mark.parametrize(
    ("size", "alignment", "taken"),
    [
        (GRANULARITY, 0, True),
        (PAGE, PAGE, True),
        (0, GRANULARITY, False),
        (-PAGE, 0, False),
        (GRANULARITY + 1, GRANULARITY, False),
        (GRANULARITY, 3 << 20, False),
        (GRANULARITY, -1, False),
    ],
)
def test_what_may_be_reserved(size: int, alignment: int, taken: bool) -> None:
    assert may_reserve(size, alignment) is taken


def test_addresses_can_be_used_up_and_then_nothing_changes() -> None:
    space = AddressSpace(0)
    assert space.reserve(REGION, 0) is None
    assert space.allocate(REGION, 1) is None
    assert space.range_at(BASE) is None
    assert reserved(space, 1).address == BASE


def test_a_range_is_freed_whole_and_only_when_it_is_empty() -> None:
    space = AddressSpace(0)
    owner = reserved(space, 2)
    mapping = mapped(owner, 0)
    assert space.free(owner.address, owner.size_bytes) is None
    del owner.mappings[mapping.address]
    assert space.free(owner.address, GRANULARITY) is None
    assert space.free(owner.address + GRANULARITY, GRANULARITY) is None
    assert space.free(owner.address, owner.size_bytes) is owner
    assert space.free(owner.address, owner.size_bytes) is None


def test_an_address_is_found_up_to_the_end_and_no_further() -> None:
    space = AddressSpace(0)
    owner = reserved(space, 2)
    mapping = mapped(owner, 1)
    assert space.range_at(owner.address - 1) is None
    assert space.range_at(owner.end - 1) is owner
    assert space.range_at(owner.end) is None
    assert space.mapping_at(owner.address) is None
    assert space.mapping_at(owner.end - 1) is mapping
    assert space.end_of(mapping.address + 5) == mapping.end
    assert space.end_of(owner.address) == owner.address


def test_a_part_of_a_mapping_is_not_within() -> None:
    space = AddressSpace(0)
    owner = reserved(space, 4)
    first, second = mapped(owner, 0, 2), mapped(owner, 2)
    whole = owner.size_bytes
    assert space.mappings_within(owner.address, whole) == [first, second]
    assert space.mappings_within(owner.address, GRANULARITY) is None
    assert space.mappings_within(owner.address + GRANULARITY, 2 * GRANULARITY) is None
    assert space.mappings_within(owner.address + 3 * GRANULARITY, GRANULARITY) == []
    assert space.mappings_within(owner.address, whole + GRANULARITY) is None
    assert space.mappings_within(owner.address, 0) is None
    assert space.mappings_within(0, GRANULARITY) is None


def test_bytes_may_lie_in_adjacent_mappings_but_not_in_a_gap() -> None:
    space = AddressSpace(0)
    owner = reserved(space, 4)
    first, second = mapped(owner, 0), mapped(owner, 1)
    mapped(owner, 3)
    assert space.mappings_covering(owner.address + 7, 10) == [first]
    assert space.mappings_covering(owner.address + GRANULARITY - 1, 2) == [first, second]
    assert space.mappings_covering(owner.address, 2 * GRANULARITY + 1) is None
    assert space.mappings_covering(owner.address + 3 * GRANULARITY, GRANULARITY + 1) is None


def test_access_is_for_a_device_and_for_a_way() -> None:
    mapping = mapped(reserved(AddressSpace(0), 1), 0)
    assert not mapping.allows(0, READ)
    mapping.access[0] = READ
    assert mapping.allows(0, READ)
    assert not mapping.allows(0, READ_WRITE)
    mapping.access[1] = READ_WRITE
    assert mapping.allows(1, READ)
    assert not mapping.allows(2, READ)


def test_private_memory_is_aligned_zero_and_freed_by_its_base() -> None:
    space = AddressSpace(0)
    made = [space.allocate(size, size) for size in (1, 20, 4096)]
    for each in made:
        assert each is not None
        assert each.address % 512 == 0
        assert bytes(each.memory) == bytes(each.size_bytes)
        assert space.allocation_at(each.end - 1) is each
        assert space.free_allocation(each.address + 1) is None
        assert space.free_allocation(each.address) is each
        assert space.allocation_at(each.address) is None


def test_a_large_allocation_costs_no_memory_until_it_is_written() -> None:
    space = AddressSpace(0)
    made = space.allocate(1 << 40, 1)
    assert made is not None
    made.memory[(1 << 40) - 1] = 7
    assert made.memory[(1 << 40) - 1] == 7


def test_a_stand_in_is_neither_a_range_nor_private_memory() -> None:
    space = AddressSpace(0)
    made = space.place(mmap.mmap(-1, PAGE), "key")
    assert space.allocation_at(made.address) is made
    assert space.free_allocation(made.address) is None
    assert space.free(made.address, PAGE) is None
    assert space.free_standin(made.address) is made
    assert space.allocation_at(made.address) is None


def test_a_random_history_agrees_with_a_list_of_granules() -> None:
    """The same questions, put to a model that marks every granule."""
    dice = random.Random(20261201)
    space = AddressSpace(0)
    owner_of: dict[int, int] = {}
    owners = [reserved(space, 8) for _ in range(4)]
    for step in range(600):
        owner = dice.choice(owners)
        first, count = dice.randrange(8), dice.randrange(1, 5)
        address, size = owner.address + first * GRANULARITY, count * GRANULARITY
        marked = [owner_of.get(address + i * GRANULARITY) for i in range(count)]
        found = space.mappings_within(address, size)
        if first + count > 8:
            assert found is None
            continue
        cut = any(
            neighbour is not None and neighbour == inner
            for neighbour, inner in (
                (owner_of.get(address - GRANULARITY), marked[0]),
                (owner_of.get(address + size), marked[-1]),
            )
        )
        assert (found is None) == cut
        if found == []:
            mapped(owner, first, count).id = f"m{step}"
            owner_of.update({address + i * GRANULARITY: step for i in range(count)})
        elif found:
            assert {each.id for each in found} == {f"m{mark}" for mark in marked if mark is not None}
            for each in found:
                del owner.mappings[each.address]
                for i in range(each.size_bytes // GRANULARITY):
                    del owner_of[each.address + i * GRANULARITY]
