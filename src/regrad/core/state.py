"""What it costs to keep state for a replay, as plain values: planners charge it and never see a replay.

:mod:`regrad.replay.pricing` makes these values from an access log. The shared log couples segments: who keeps an entry
alive depends on which segments are replayed, so its price is a function of a choice, and it is here.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Moves:
    """Bytes copied: ``gather_bytes`` out of the state, ``scatter_bytes`` into it."""

    gather_bytes: int = 0
    scatter_bytes: int = 0

    def __add__(self, other: Moves) -> Moves:
        return Moves(self.gather_bytes + other.gather_bytes, self.scatter_bytes + other.scatter_bytes)


@dataclass(frozen=True, slots=True)
class StateCost:
    """What an engine charges one segment.

    retained_bytes   from the segment's forward to its backward, alone; 0 for what a shared log holds
    transient_bytes  put aside while the segment is replayed, with every later segment's writes still in place
    forward          moves while its forward runs; backward  moves of its replay, the return of the present included
    """

    segment: int
    engine: str
    retained_bytes: int
    transient_bytes: int
    forward: Moves = Moves()
    backward: Moves = Moves()


@dataclass(frozen=True, slots=True)
class LogEntry:
    """Old bytes of ``state`` that segment ``writer`` overwrote: ``payload_bytes``, with ``header_bytes`` around them.

    ``start`` is where in the state they stood.
    """

    writer: int
    state: str
    start: int
    payload_bytes: int
    header_bytes: int

    @property
    def total_bytes(self) -> int:
        """Payload and header."""
        return self.payload_bytes + self.header_bytes


@dataclass(frozen=True, slots=True)
class StateVariable:
    """A storage that segments write: its bytes, and the log entries of its writes in order."""

    name: str
    nbytes: int
    entries: tuple[LogEntry, ...]
    live_versions: int = 0


@dataclass(frozen=True)
class SharedLogPrice:
    """The price of one log for all segments (docs/concepts/cost-model.md).

    The entry that writer k left is live in the backward of i if and only if some replayed segment j <= min(i, k) needs
    it. ``entries`` are in write order; ``own_bytes`` is what each segment holds beside the log (generator states).
    """

    segments: int
    entries: tuple[LogEntry, ...]
    own_bytes: tuple[int, ...]

    def live(self, replayed: Collection[int], at: int) -> Iterator[LogEntry]:
        """The entries that are held when the backward of segment ``at`` starts. Segments above ``at`` are done."""
        first = min(replayed, default=self.segments)
        for entry in self.entries:
            if first <= min(at, entry.writer):
                yield entry

    def retained_bytes(self, replayed: Collection[int], at: int) -> int:
        """Bytes held when the backward of ``at`` starts, if the segments in ``replayed`` are replayed."""
        own = sum(self.own_bytes[j] for j in replayed if j <= at)
        return own + sum(entry.total_bytes for entry in self.live(replayed, at))

    def peak_retained_bytes(self, replayed: Collection[int]) -> int:
        """The most that is held: at the end of the forward, since nothing is added later."""
        return self.retained_bytes(replayed, self.segments - 1)

    def undone_bytes(self, segment: int) -> int:
        """Payload that a replay of ``segment`` writes when it starts from the present."""
        return sum(entry.payload_bytes for entry in self.entries if entry.writer >= segment)

    def redo_bytes(self, segment: int) -> int:
        """Bytes put aside while ``segment`` is replayed from the present: each overwritten byte once."""
        pieces: dict[str, list[tuple[int, int]]] = {}
        for entry in self.entries:
            if entry.writer >= segment:
                pieces.setdefault(entry.state, []).append((entry.start, entry.start + entry.payload_bytes))
        return sum(_covered(spans) for spans in pieces.values())

    def moves(self, replayed: Collection[int], *, stays_back: bool = False) -> Moves:
        """Bytes of state moved in the whole backward.

        From the present each replay undoes everything behind it and redoes it: quadratic in the number of replays.
        With ``stays_back`` each entry is undone once, plus those of the segments just replayed, and the present returns
        once. Not for: nested replays, which start from the present.
        """
        total, standing = Moves(), self.segments
        for segment in sorted(replayed, reverse=True):
            if stays_back:
                total += Moves(0, sum(e.payload_bytes for e in self.entries if segment <= e.writer < standing))
                standing = segment + 1  # the replay itself brings the state there
            else:
                redo = self.redo_bytes(segment)
                total += Moves(redo, self.undone_bytes(segment) + redo)
        if stays_back and replayed:
            redo = self.redo_bytes(min(replayed))
            total += Moves(redo, redo)
        return total


def _covered(spans: list[tuple[int, int]]) -> int:
    total, reach = 0, -1
    for start, stop in sorted(spans):
        total += max(0, stop - max(start, reach))
        reach = max(reach, stop)
    return total
