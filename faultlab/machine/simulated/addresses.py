"""The address space of one rank: ranges, mappings, access, and who owns an address.

The rules are the recorded ones (``driver_vectors.json``): a range is freed whole
and only when nothing is mapped in it; an object is mapped whole; unmapping
what is not mapped succeeds, a part of a mapping is refused. Addresses lie above
2**49, outside what a process can map, so one that is used as a host pointer
crashes; every rank draws from a region of its own, and no address is drawn
twice, so no pointer is ever equal on two ranks.
"""

from __future__ import annotations

import bisect
import mmap
from dataclasses import dataclass, field
from typing import Final

BASE: Final = 1 << 49
REGION: Final = 1 << 43
PAGE: Final = 4096
#: What every discrete GPU answers for both granularities (recorded: 2 MiB).
GRANULARITY: Final = 2 << 20
#: cuMemAlloc and cudaMalloc align to at least 256 bytes (CUDA programming guide).
ALLOCATION_ALIGNMENT: Final = 512

#: MAP_NORESERVE has no name in Python 3.10; the number is Linux's.
_PRIVATE_AND_LAZY: Final = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000

#: CUmemAccess_flags (cuda.h).
READ: Final = 1
READ_WRITE: Final = 3


@dataclass
class Mapping:
    """A whole object at an address.

    ``number``: the board's number of the object; ``gpu``: where its memory lies,
    -1 for a multicast object; ``access``: device ordinal to ``CUmemAccess_flags``.
    """

    id: str
    address: int
    size_bytes: int
    number: int
    gpu: int
    multicast: bool
    access: dict[int, int] = field(default_factory=dict)

    @property
    def end(self) -> int:
        return self.address + self.size_bytes

    def allows(self, device: int, flags: int) -> bool:
        """Whether a device may access it so."""
        return self.access.get(device, 0) & flags == flags


@dataclass
class Range:
    """Reserved addresses, and what is mapped in them by address."""

    address: int
    size_bytes: int
    id: str = ""
    mappings: dict[int, Mapping] = field(default_factory=dict)

    @property
    def end(self) -> int:
        return self.address + self.size_bytes


@dataclass
class Allocation:
    """Memory with an address from the start: cuMemAlloc, cudaMalloc, a stand-in.

    ``key``: by what the board knows it.
    """

    address: int
    size_bytes: int
    memory: mmap.mmap
    key: int | str
    id: str = ""

    @property
    def end(self) -> int:
        return self.address + self.size_bytes


class AddressSpace:
    """Everything that has an address in one rank."""

    def __init__(self, rank: int) -> None:
        assert rank >= 0
        self._next = BASE + rank * REGION
        self._limit = self._next + REGION
        self.ranges: dict[int, Range] = {}
        self.allocations: dict[int, Allocation] = {}
        self.standins: dict[int, Allocation] = {}
        self._starts: list[int] = []

    # ------------------------------------------------------------ what comes

    def reserve(self, size_bytes: int, alignment: int) -> Range | None:
        """A new range; None where the addresses are used up. The arguments must be
        acceptable (``may_reserve``)."""
        assert may_reserve(size_bytes, alignment)
        address = self._draw(size_bytes, max(alignment, GRANULARITY))
        if address is None:
            return None
        made = self.ranges[address] = Range(address, size_bytes)
        return made

    def allocate(self, size_bytes: int, key: int) -> Allocation | None:
        """New private memory, all zero; None where the addresses are used up, or the
        host's memory is."""
        address = self._draw(size_bytes, ALLOCATION_ALIGNMENT)
        if address is None:
            return None
        try:
            # Pages come into being when they are written, however large it is.
            memory = mmap.mmap(-1, size_bytes, flags=_PRIVATE_AND_LAZY)
        except OSError:
            self._starts.remove(address)
            return None
        made = self.allocations[address] = Allocation(address, size_bytes, memory, key)
        return made

    def place(self, memory: mmap.mmap, key: str) -> Allocation:
        """Give shared stand-in memory an address."""
        address = self._draw(len(memory), GRANULARITY)
        assert address is not None, "the rank's addresses are used up"
        made = self.standins[address] = Allocation(address, len(memory), memory, key)
        return made

    def _draw(self, size_bytes: int, alignment: int) -> int | None:
        address = -(-self._next // alignment) * alignment
        # A gap after every range: running over the end of one is never another's.
        following = address + size_bytes + GRANULARITY
        if following > self._limit:
            return None
        self._next = following
        bisect.insort(self._starts, address)
        return address

    # ------------------------------------------------------------ what goes

    def free(self, address: int, size_bytes: int) -> Range | None:
        """The range that goes, or None: not its bounds, or something is mapped in it."""
        found = self.ranges.get(address)
        if found is None or found.size_bytes != size_bytes or found.mappings:
            return None
        del self.ranges[address]
        self._starts.remove(address)
        return found

    def free_allocation(self, address: int) -> Allocation | None:
        """The allocation that goes; None if the address is not the base of one."""
        return self._take(self.allocations, address)

    def free_standin(self, address: int) -> Allocation | None:
        """The stand-in that goes; None if the address is not the base of one."""
        return self._take(self.standins, address)

    def _take(self, kind: dict[int, Allocation], address: int) -> Allocation | None:
        found = kind.pop(address, None)
        if found is not None:
            self._starts.remove(address)
        return found

    # ------------------------------------------------------- what is where

    def range_at(self, address: int) -> Range | None:
        """The range that holds an address."""
        owner = self._owner(address)
        return owner if isinstance(owner, Range) else None

    def allocation_at(self, address: int) -> Allocation | None:
        """The private or stand-in memory that holds an address."""
        owner = self._owner(address)
        return owner if isinstance(owner, Allocation) else None

    def mapping_at(self, address: int) -> Mapping | None:
        """The mapping that holds an address."""
        owner = self.range_at(address)
        for mapping in owner.mappings.values() if owner is not None else ():
            if mapping.address <= address < mapping.end:
                return mapping
        return None

    def end_of(self, address: int) -> int:
        """The end of the mapping or allocation that holds an address; the address
        itself where nothing does."""
        found = self.allocation_at(address) or self.mapping_at(address)
        return address if found is None else found.end

    def mappings_within(self, address: int, size_bytes: int) -> list[Mapping] | None:
        """The mappings in a range of addresses, in order; None if one of them is only
        partly in it, or if the addresses are not all of one reservation."""
        owner, end = self.range_at(address), address + size_bytes
        if owner is None or size_bytes <= 0 or end > owner.end:
            return None
        met = [each for each in owner.mappings.values() if each.address < end and each.end > address]
        if any(each.address < address or each.end > end for each in met):
            return None
        return sorted(met, key=lambda each: each.address)

    def mappings_covering(self, address: int, size_bytes: int) -> list[Mapping] | None:
        """The adjacent mappings that together hold all of these addresses, in order;
        None if a byte of them is not mapped."""
        found, reached = [], address
        while reached < address + size_bytes:
            mapping = self.mapping_at(reached)
            if mapping is None:
                return None
            found.append(mapping)
            reached = mapping.end
        return found

    def _owner(self, address: int) -> Range | Allocation | None:
        index = bisect.bisect_right(self._starts, address) - 1
        if index < 0:
            return None
        start = self._starts[index]
        owner = self.ranges.get(start) or self.allocations.get(start) or self.standins.get(start)
        return owner if owner is not None and address < owner.end else None


def may_reserve(size_bytes: int, alignment: int) -> bool:
    """Whether cuMemAddressReserve takes these (recorded: ``reserve.*``)."""
    power_of_two_or_zero = alignment >= 0 and alignment & (alignment - 1) == 0
    return size_bytes > 0 and size_bytes % PAGE == 0 and power_of_two_or_zero
