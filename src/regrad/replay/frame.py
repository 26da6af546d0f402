"""The present, put aside while a replay changes it, and the meter on which its bytes are counted.

A write that fails while the present is put back is tried once more before :class:`PresentLost` is raised.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from regrad.core.errors import PresentLost
from regrad.replay.ranges import ByteRange, RangeSet
from regrad.replay.store import Chunk, Store

HEADER_BYTES = 32  # of an entry that must say whose bytes it holds: epoch, storage, start and stop, 8 bytes each


@dataclass
class Meter:
    """Bytes that a retention holds and moves, counted as they come and go.

    retained_bytes   held from the forward for the backward: copies, headers, generator states, kept activations
    transient_bytes  held only while a segment runs: the present put aside, a guard's pre-images
    gathered_bytes   read out of the store so far; scattered_bytes  written into it so far
    """

    retained_bytes: int = 0
    transient_bytes: int = 0
    peak_retained_bytes: int = 0
    peak_transient_bytes: int = 0
    peak_bytes: int = 0
    gathered_bytes: int = 0
    scattered_bytes: int = 0
    replays: int = 0
    kept_segments: int = 0
    transient_by_segment: dict[int, int] = field(default_factory=dict)

    def retain(self, count: int) -> None:
        """Add ``count`` (which may be negative) to the retained bytes."""
        self.retained_bytes += count
        self.peak_retained_bytes = max(self.peak_retained_bytes, self.retained_bytes)
        self.peak_bytes = max(self.peak_bytes, self.retained_bytes + self.transient_bytes)

    def borrow(self, count: int, segment: int) -> None:
        """Add ``count`` (which may be negative) to the transient bytes, on account of ``segment``."""
        self.transient_bytes += count
        self.peak_transient_bytes = max(self.peak_transient_bytes, self.transient_bytes)
        self.peak_bytes = max(self.peak_bytes, self.retained_bytes + self.transient_bytes)
        most = self.transient_by_segment.get(segment, 0)
        self.transient_by_segment[segment] = max(most, self.transient_bytes)


class Frame:
    """The present of what one replay changes, put aside so that it can come back.

    ``at`` is the segment whose entry the state is in, ``None`` while it is the present (engines that stay rolled back).
    """

    def __init__(self, store: Store, meter: Meter, segment: int) -> None:
        self._store, self._meter, self.segment = store, meter, segment
        self._covered = RangeSet()
        self._bytes: list[tuple[ByteRange, Chunk]] = []
        self._generators: dict[str, bytes] = {}
        self.at: int | None = None

    def cover(self, ranges: Iterable[ByteRange]) -> None:
        """Put the bytes at ``ranges`` aside, as far as they are not yet."""
        for where in ranges:
            for part in self._covered.missing(where):
                chunk = self._store.read(part)
                self._covered.add(part)
                self._bytes.append((part, chunk))
                self._meter.gathered_bytes += part.nbytes
                self._meter.borrow(part.nbytes, self.segment)

    def cover_generator(self, name: str) -> None:
        """Put a generator's state aside, unless it is."""
        if name not in self._generators:
            self._generators[name] = state = self._store.get_generator(name)
            self._meter.borrow(len(state), self.segment)

    def cover_like(self, other: Frame) -> None:
        """Put aside what ``other`` put aside, as it is now."""
        self.cover(where for where, _ in other._bytes)
        for name in other._generators:
            self.cover_generator(name)

    def put_back(self) -> None:
        """Write everything that was put aside. Every write that fails is tried once more; then the error is raised."""
        failed, first = self._write(self._bytes, dict(self._generators))
        if first is None:
            return
        again, second = self._write(*failed)
        if second is None:
            raise first  # repaired: the present is intact, and still someone must hear of it
        lost = again[0][0][0] if again[0] else None
        raise PresentLost(
            f"writing the present back failed twice: {second}",
            segment=self.segment,
            where=lost,
            version="the present",
            hint="The bytes are still held by the frame of this replay.",
        ) from second

    def _write(
        self, pieces: list[tuple[ByteRange, Chunk]], generators: dict[str, bytes]
    ) -> tuple[tuple[list[tuple[ByteRange, Chunk]], dict[str, bytes]], BaseException | None]:
        bad: list[tuple[ByteRange, Chunk]] = []
        bad_generators: dict[str, bytes] = {}
        first: BaseException | None = None
        for where, chunk in pieces:
            try:
                self._store.write(where, chunk)
                self._meter.scattered_bytes += where.nbytes
            except BaseException as error:  # noqa: BLE001 - collected, and raised by put_back
                bad.append((where, chunk))
                first = first or error
        for name, state in generators.items():
            try:
                self._store.set_generator(name, state)
            except BaseException as error:  # noqa: BLE001 - collected, and raised by put_back
                bad_generators[name] = state
                first = first or error
        return (bad, bad_generators), first

    def drop(self) -> None:
        """Give up what was put aside."""
        count = sum(where.nbytes for where, _ in self._bytes) + sum(map(len, self._generators.values()))
        self._meter.borrow(-count, self.segment)
        self._bytes, self._generators, self._covered = [], {}, RangeSet()
