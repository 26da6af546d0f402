"""Byte ranges, and sets of them that know which bytes are new."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, order=True)
class ByteRange:
    """Bytes ``start`` … ``stop - 1`` of the storage called ``storage``."""

    storage: str
    start: int
    stop: int

    def __post_init__(self) -> None:
        if not 0 <= self.start < self.stop:
            raise ValueError(f"{self.storage}[{self.start}:{self.stop}] is no byte range: it is empty or negative")

    @property
    def nbytes(self) -> int:
        """How many bytes it spans."""
        return self.stop - self.start

    def overlaps(self, other: ByteRange) -> bool:
        """Whether the two share a byte."""
        return self.storage == other.storage and self.start < other.stop and other.start < self.stop

    def __str__(self) -> str:
        return f"{self.storage}[{self.start}:{self.stop}]"


Ranges = tuple[ByteRange, ...]


class RangeSet:
    """A set of bytes, kept as disjoint ranges in order. Ranges that touch are joined.

    Adding or asking costs a binary search and the ranges that are met; nothing is ever proportional to a storage.
    """

    def __init__(self, ranges: Iterable[ByteRange] = ()) -> None:
        self._starts: dict[str, list[int]] = {}
        self._stops: dict[str, list[int]] = {}
        for one in ranges:
            self.add(one)

    def missing(self, where: ByteRange) -> list[ByteRange]:
        """The parts of ``where`` that are not in the set, in order."""
        starts, stops = self._starts.get(where.storage, []), self._stops.get(where.storage, [])
        found, at = [], where.start
        index = bisect_right(stops, where.start)
        while index < len(starts) and starts[index] < where.stop:
            if starts[index] > at:
                found.append(ByteRange(where.storage, at, starts[index]))
            at = max(at, stops[index])
            index += 1
        if at < where.stop:
            found.append(ByteRange(where.storage, at, where.stop))
        return found

    def add(self, where: ByteRange) -> list[ByteRange]:
        """Put ``where`` into the set and return the parts of it that were not in it before, in order."""
        new = self.missing(where)
        if new:
            starts = self._starts.setdefault(where.storage, [])
            stops = self._stops.setdefault(where.storage, [])
            first = bisect_left(stops, where.start)
            last = bisect_right(starts, where.stop)
            start = min(where.start, starts[first]) if first < last else where.start
            stop = max(where.stop, stops[last - 1]) if first < last else where.stop
            starts[first:last] = [start]
            stops[first:last] = [stop]
        return new

    def update(self, ranges: Iterable[ByteRange]) -> list[ByteRange]:
        """:meth:`add` each of ``ranges``; what was new, in the order of the calls."""
        new: list[ByteRange] = []
        for one in ranges:
            new += self.add(one)
        return new

    def __contains__(self, where: ByteRange) -> bool:
        return not self.missing(where)

    def __iter__(self) -> Iterator[ByteRange]:
        for storage in sorted(self._starts):
            for start, stop in zip(self._starts[storage], self._stops[storage], strict=True):
                yield ByteRange(storage, start, stop)

    def __bool__(self) -> bool:
        return any(self._starts.values())

    @property
    def nbytes(self) -> int:
        """Bytes in the set."""
        return sum(one.nbytes for one in self)
