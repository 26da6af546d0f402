"""torch's caching allocator for CUDA, as far as bytes go: what it hands out, and what it takes from the device for it.

    a request            is rounded up to 512 bytes
    up to 1 MiB          comes out of segments of 2 MiB
    up to 10 MiB         comes out of segments of 20 MiB
    above that           has a segment of its own, rounded up to 2 MiB

A free piece of a segment serves a later request of the same pool, the smallest that is large enough first; what is left
of it stays free if it is 512 bytes or more (small pool) or more than 1 MiB (large pool). Neighbours that are free grow
together. When the device is full, segments that are wholly free go back to it. Source: ``c10/cuda/CUDACachingAllocator``
(defaults, without ``expandable_segments``). Not modelled: streams, graphs, and the order in which equal pieces are taken.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable
from dataclasses import dataclass

ROUND_BYTES = 512
SMALL_BYTES = 1 << 20
SMALL_SEGMENT_BYTES = 2 << 20
LARGE_SEGMENT_BYTES = 20 << 20
LARGE_BYTES = 10 << 20
SEGMENT_ROUND_BYTES = 2 << 20
SEGMENTS_DO_NOT_FIT = (
    "the tensors fit, the allocator's segments do not: set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"
)


def round_bytes(count: int) -> int:
    """What a request of ``count`` bytes occupies; nothing for an empty tensor."""
    return -(-count // ROUND_BYTES) * ROUND_BYTES


def segment_bytes(rounded: int) -> int:
    """The segment that is taken from the device when no free piece serves a request."""
    if rounded <= SMALL_BYTES:
        return SMALL_SEGMENT_BYTES
    if rounded < LARGE_BYTES:
        return LARGE_SEGMENT_BYTES
    return -(-rounded // SEGMENT_ROUND_BYTES) * SEGMENT_ROUND_BYTES


class _Piece:
    """A stretch of a segment, free or taken, with its neighbours in the same segment."""

    __slots__ = ("after", "before", "free", "segment", "size")

    def __init__(self, size: int, segment: int, before: _Piece | None = None, after: _Piece | None = None) -> None:
        self.size, self.segment, self.before, self.after, self.free = size, segment, before, after, False


@dataclass(frozen=True, slots=True)
class Reserved:
    """The two peaks of a run, in bytes: what was handed out (rounded), and what was taken from the device for it."""

    allocated_peak_bytes: int
    reserved_peak_bytes: int

    @property
    def lost_bytes(self) -> int:
        """Reserved above allocated, peak against peak: what segments cost."""
        return self.reserved_peak_bytes - self.allocated_peak_bytes


class CachingAllocator:
    """Hands out and takes back. ``limit_bytes`` is what the device gives; ``None`` for no limit.

    Over the limit, free segments go back first; what then still does not fit is counted all the same, so that the peak
    says how much would be needed.
    """

    def __init__(self, limit_bytes: int | None = None) -> None:
        self.limit_bytes = limit_bytes
        self.reserved = self.allocated = self.reserved_peak = self.allocated_peak = 0
        self._free: dict[bool, list[tuple[int, int]]] = {True: [], False: []}
        self._pieces: dict[int, _Piece] = {}
        self._count = 0

    def take(self, count: int) -> _Piece | None:
        """A piece for ``count`` bytes; None for none."""
        size = round_bytes(count)
        if size == 0:
            return None
        small = size <= SMALL_BYTES
        piece = self._best(size, small) or self._new_segment(size)
        self._split(piece, size, small)
        piece.free = False
        self.allocated += piece.size
        self.allocated_peak = max(self.allocated_peak, self.allocated)
        return piece

    def give_back(self, piece: _Piece | None) -> None:
        """Take a piece back and join it with free neighbours."""
        if piece is None:
            return
        self.allocated -= piece.size
        for other in (piece.before, piece.after):
            if other is not None and other.free:
                self._forget(other)
                piece.size += other.size
                if other is piece.before:
                    piece.before = other.before
                    if other.before is not None:
                        other.before.after = piece
                else:
                    piece.after = other.after
                    if other.after is not None:
                        other.after.before = piece
        self._remember(piece)

    def _best(self, size: int, small: bool) -> _Piece | None:
        free = self._free[small]
        at = bisect_left(free, (size, -1))
        if at == len(free):
            return None
        piece = self._pieces[free[at][1]]
        self._forget(piece)
        return piece

    def _new_segment(self, size: int) -> _Piece:
        segment = segment_bytes(size)
        if self.limit_bytes is not None and self.reserved + segment > self.limit_bytes:
            self._release()
        self.reserved += segment
        self.reserved_peak = max(self.reserved_peak, self.reserved)
        return _Piece(segment, segment)

    def _release(self) -> None:
        for small in (True, False):
            for _, key in list(self._free[small]):
                piece = self._pieces[key]
                if piece.before is None and piece.after is None:
                    self._forget(piece)
                    self.reserved -= piece.size

    def _split(self, piece: _Piece, size: int, small: bool) -> None:
        left = piece.size - size
        if left < ROUND_BYTES or (not small and left <= SMALL_BYTES):
            return
        rest = _Piece(left, piece.segment, piece, piece.after)
        if piece.after is not None:
            piece.after.before = rest
        piece.after, piece.size = rest, size
        self._remember(rest)

    def _pool(self, piece: _Piece) -> bool:
        return piece.segment == SMALL_SEGMENT_BYTES

    def _remember(self, piece: _Piece) -> None:
        piece.free = True
        self._count += 1
        key = self._count
        self._pieces[key] = piece
        insort(self._free[self._pool(piece)], (piece.size, key))

    def _forget(self, piece: _Piece) -> None:
        piece.free = False
        free = self._free[self._pool(piece)]
        at = bisect_left(free, (piece.size, -1))
        while self._pieces[free[at][1]] is not piece:
            at += 1
        del self._pieces[free.pop(at)[1]]


def replay(lives: Iterable[tuple[int, int, int]], limit_bytes: int | None = None) -> Reserved:
    """The peaks of a run in which each ``(bytes, first, end)`` is alive from slot ``first`` until before ``end``.

    In a slot what ended is taken back before what begins is handed out, in the order given. What is there before the run
    has a ``first`` below 0. Cost: O(n log n) for n lives.
    """
    starts: dict[int, list[tuple[int, int]]] = {}
    ends: dict[int, list[int]] = {}
    for index, (count, first, end) in enumerate(lives):
        starts.setdefault(max(first, -1), []).append((count, index))
        ends.setdefault(max(end, first + 1), []).append(index)
    allocator = CachingAllocator(limit_bytes)
    held: dict[int, _Piece | None] = {}
    for slot in sorted(starts.keys() | ends.keys()):
        for index in ends.get(slot, ()):
            allocator.give_back(held.pop(index))
        for count, index in starts.get(slot, ()):
            held[index] = allocator.take(count)
    return Reserved(allocator.allocated_peak, allocator.reserved_peak)
