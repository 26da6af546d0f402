"""Versions and the log of accesses: which bytes a segment read, wrote and drew, and whose bytes they were.

A version is named by the write that made it, not by an address: two writes to the same bytes make two versions, one
write through two overlapping views makes one. Write 0 is the contents that a program is given.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from regrad.replay.ranges import ByteRange, Ranges, RangeSet


@dataclass(frozen=True, slots=True, order=True)
class Version:
    """The bytes that write number ``write`` made. Number 0 made what was there at the start."""

    write: int

    def __str__(self) -> str:
        return f"v{self.write}"


GIVEN = Version(0)


@dataclass(frozen=True, slots=True)
class Read:
    """Operation number ``operation`` of its segment read ``where``, all of it of one ``version``.

    ``operand`` counts the reads of that operation: what one view gave may be of several versions.
    """

    operation: int
    where: ByteRange
    version: Version
    operand: int = 0


@dataclass(frozen=True, slots=True)
class Write:
    """Operation number ``operation`` of its segment made ``version`` at ``where``."""

    operation: int
    where: ByteRange
    version: Version


@dataclass(frozen=True, slots=True)
class Draw:
    """Operation number ``operation`` of its segment drew from ``generator``."""

    operation: int
    generator: str


Access = Read | Write | Draw


@dataclass(frozen=True, slots=True)
class SegmentLog:
    """The accesses of one segment in the order in which they happened."""

    name: str
    accesses: tuple[Access, ...]

    @property
    def reads(self) -> tuple[Read, ...]:
        """Its reads."""
        return tuple(one for one in self.accesses if isinstance(one, Read))

    @property
    def writes(self) -> tuple[Write, ...]:
        """Its writes."""
        return tuple(one for one in self.accesses if isinstance(one, Write))

    @property
    def draws(self) -> tuple[Draw, ...]:
        """Its draws."""
        return tuple(one for one in self.accesses if isinstance(one, Draw))

    @property
    def generators(self) -> tuple[str, ...]:
        """The generators that it drew from, in the order of the first draws."""
        return tuple(dict.fromkeys(one.generator for one in self.draws))

    def written(self) -> RangeSet:
        """The bytes that it overwrote."""
        return RangeSet(one.where for one in self.writes)

    def read_at_entry(self) -> RangeSet:
        """The bytes that it read before it wrote them itself: what it needs of the state it found."""
        own, needed = RangeSet(), RangeSet()
        for one in self.accesses:
            if isinstance(one, Read):
                for part in own.missing(one.where):
                    needed.add(part)
            elif isinstance(one, Write):
                own.add(one.where)
        return needed


@dataclass(frozen=True, slots=True)
class AccessLog:
    """What a step did to its state: one :class:`SegmentLog` a segment, and the storages with their bytes."""

    storages: tuple[tuple[str, int], ...]
    generators: tuple[tuple[str, int], ...]
    segments: tuple[SegmentLog, ...]

    @property
    def state_bytes(self) -> int:
        """Bytes of all storages."""
        return sum(size for _, size in self.storages)

    def generator_bytes(self, names: Iterable[str]) -> int:
        """Bytes of the states of the generators called ``names``."""
        sizes = dict(self.generators)
        return sum(sizes[name] for name in names)

    def overwritten_later(self, segment: int) -> RangeSet:
        """The bytes that ``segment`` or a later one overwrites."""
        return RangeSet(write.where for log in self.segments[segment:] for write in log.writes)

    def needed_versions(self, segment: int) -> tuple[Version, ...]:
        """The versions that ``segment`` found in the state and read, oldest first."""
        own, found = RangeSet(), set()
        for one in self.segments[segment].accesses:
            if isinstance(one, Read) and own.missing(one.where):
                found.add(one.version)
            elif isinstance(one, Write):
                own.add(one.where)
        return tuple(sorted(found))

    def live_versions(self, storage: str) -> int:
        """How many segments found bytes of ``storage`` that a later write (or their own) replaced."""
        count = 0
        for index, log in enumerate(self.segments):
            later = self.overwritten_later(index)
            needed = [one for one in log.read_at_entry() if one.storage == storage]
            count += any(later.missing(one) != [one] for one in needed)
        return count


def whole(sizes: Iterable[tuple[str, int]]) -> Ranges:
    """Each storage as one range; storages without bytes have none."""
    return tuple(ByteRange(name, 0, size) for name, size in sizes if size)
