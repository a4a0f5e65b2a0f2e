"""The address space of one rank: ranges, mappings, access, and who owns an address.

The rules are the recorded ones (``driver_vectors.json``): a range is freed whole
and only when nothing is mapped in it; an object is mapped whole; unmapping
what is not mapped succeeds, a part of a mapping is refused. Addresses lie above
2**49, outside what a process can map, so one that is used as a host pointer
crashes; every rank draws from a region of its own.
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass, field

BASE = 1 << 49
REGION = 1 << 43
PAGE = 4096
#: What every discrete GPU answers for both granularities (recorded: 2 MiB).
GRANULARITY = 2 << 20


@dataclass
class Mapping:
    """A whole object at an address."""

    id: str
    address: int
    size_bytes: int
    number: int
    multicast: bool
    readable: bool = False


@dataclass
class Range:
    """Reserved addresses."""

    id: str
    address: int
    size_bytes: int
    mappings: dict[int, Mapping] = field(default_factory=dict)


@dataclass
class Allocation:
    """Private memory: cuMemAlloc and cudaMalloc."""

    id: str
    address: int
    size_bytes: int
    memory: bytearray


class AddressSpace:
    """Everything that has an address in one rank."""

    def __init__(self, rank: int) -> None:
        self._next = BASE + rank * REGION
        self._limit = self._next + REGION
        self.ranges: dict[int, Range] = {}
        self.allocations: dict[int, Allocation] = {}
        self._starts: list[int] = []

    def _draw(self, size_bytes: int, alignment: int) -> int:
        address = -(-self._next // alignment) * alignment
        # A gap after every range: running over the end of one is never another's.
        self._next = address + size_bytes + GRANULARITY
        assert self._next < self._limit, "the rank's addresses are used up"
        return address

    def _note(self, address: int) -> None:
        bisect.insort(self._starts, address)

    def reserve(self, identity: str, size_bytes: int, alignment: int) -> Range | None:
        """A new range, or None where the arguments are refused."""
        if size_bytes <= 0 or size_bytes % PAGE or alignment & (alignment - 1):
            return None
        address = self._draw(size_bytes, max(alignment, GRANULARITY))
        made = self.ranges[address] = Range(identity, address, size_bytes)
        self._note(address)
        return made

    def free(self, address: int, size_bytes: int) -> Range | None:
        """The range that goes, or None: not its bounds, or something is mapped in it."""
        found = self.ranges.get(address)
        if found is None or found.size_bytes != size_bytes or found.mappings:
            return None
        del self.ranges[address]
        self._starts.remove(address)
        return found

    def allocate(self, identity: str, size_bytes: int) -> Allocation:
        """Private memory, aligned to 512 bytes."""
        address = self._draw(size_bytes, 512)
        made = self.allocations[address] = Allocation(identity, address, size_bytes, bytearray(size_bytes))
        self._note(address)
        return made

    def free_allocation(self, address: int) -> Allocation | None:
        """The allocation that goes; None if the address is not the base of one."""
        found = self.allocations.pop(address, None)
        if found is not None:
            self._starts.remove(address)
        return found

    def range_at(self, address: int) -> Range | None:
        """The range that holds an address."""
        owner = self._owner(address)
        return owner if isinstance(owner, Range) else None

    def _owner(self, address: int) -> Range | Allocation | None:
        index = bisect.bisect_right(self._starts, address) - 1
        if index < 0:
            return None
        start = self._starts[index]
        owner = self.ranges.get(start) or self.allocations.get(start)
        if owner is None or address >= start + owner.size_bytes:
            return None
        return owner

    def allocation_at(self, address: int) -> Allocation | None:
        """The private memory that holds an address."""
        owner = self._owner(address)
        return owner if isinstance(owner, Allocation) else None

    def mapping_at(self, address: int) -> Mapping | None:
        """The mapping that holds an address."""
        owner = self.range_at(address)
        for mapping in owner.mappings.values() if owner is not None else ():
            if mapping.address <= address < mapping.address + mapping.size_bytes:
                return mapping
        return None

    def mappings_within(self, address: int, size_bytes: int) -> list[Mapping] | None:
        """The mappings in a range of addresses; None if one of them is only partly in it."""
        owner = self.range_at(address)
        if owner is None or address + size_bytes > owner.address + owner.size_bytes:
            return None
        end = address + size_bytes
        found = []
        for mapping in owner.mappings.values():
            inside = mapping.address >= address and mapping.address + mapping.size_bytes <= end
            apart = mapping.address >= end or mapping.address + mapping.size_bytes <= address
            if not inside and not apart:
                return None
            if inside:
                found.append(mapping)
        return found
