"""What it costs to keep state for a replay, as plain values: planners charge it and never see a replay.

:mod:`regrad.replay.pricing` makes these values from an access log. The shared log couples segments: who keeps an entry
alive depends on which segments are replayed, so its price is a function of a choice, and it is here.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from math import inf

SNAPSHOT = "snapshot"
READ_SET = "read_set"
UNION = "journal (union)"
JOURNAL = "journal"
STAYS_BACK = "journal (stays back)"
LOG_ENGINES = (JOURNAL, STAYS_BACK)


@dataclass(frozen=True, slots=True)
class Moves:
    """Bytes copied: ``gather_bytes`` out of the state, ``scatter_bytes`` into it."""

    gather_bytes: int = 0
    scatter_bytes: int = 0

    def __add__(self, other: Moves) -> Moves:
        return Moves(self.gather_bytes + other.gather_bytes, self.scatter_bytes + other.scatter_bytes)


@dataclass(frozen=True, slots=True)
class Bandwidth:
    """Measured bytes a second of copies out of a state and into it; infinite where moves are not charged."""

    gather_bytes_per_second: float = inf
    scatter_bytes_per_second: float = inf

    def seconds(self, moves: Moves) -> float:
        """Seconds that ``moves`` take."""
        gather = moves.gather_bytes / self.gather_bytes_per_second
        return gather + moves.scatter_bytes / self.scatter_bytes_per_second


@dataclass(frozen=True, slots=True)
class StateCost:
    """What an engine charges one segment.

    retained_bytes   from the segment's forward to its backward, alone; 0 for what a shared log holds
    transient_bytes  put aside while the segment is replayed, with every later segment's writes still in place
    forward          moves while its forward runs; backward  moves of its replay, the return of the present included
    seconds          what the engine takes beside its moves, such as watching every operation
    """

    segment: int
    engine: str
    retained_bytes: int
    transient_bytes: int
    forward: Moves = Moves()
    backward: Moves = Moves()
    seconds: float = 0.0


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
    """A storage that segments write: its bytes, and the log entries of its writes in order.

    touched_by       the segments that read or write it: only they need it back for a replay
    present_readers  segments whose backward reads it as it is now, so it cannot stay rolled back across them
    costs            what engines other than the journal and the snapshot charge a segment for it
    """

    name: str
    nbytes: int
    entries: tuple[LogEntry, ...]
    live_versions: int = 0
    touched_by: tuple[int, ...] = ()
    present_readers: tuple[int, ...] = ()
    costs: tuple[StateCost, ...] = ()
    bandwidth: Bandwidth = Bandwidth()

    @property
    def touching(self) -> tuple[int, ...]:
        """``touched_by`` and the writers, ascending."""
        return tuple(sorted({*self.touched_by, *(entry.writer for entry in self.entries)}))

    def undone_bytes(self, segment: int, standing: int | None = None) -> int:
        """Payload that is written to get from the entry of segment ``standing`` (the present) back to ``segment``."""
        return undone_bytes(self.entries, segment, standing)

    def redo_bytes(self, segment: int) -> int:
        """Bytes put aside while ``segment`` is replayed: each byte overwritten by it or later, once."""
        return redo_bytes(self.entries, segment)

    def union(self, segment: int) -> tuple[int, int]:
        """(payload, headers) that the segment keeps for itself under union accounting; a header for each piece."""
        payload = headers = 0
        known: list[tuple[int, int]] = []
        for entry in self.entries:
            if entry.writer >= segment:
                span = entry.start, entry.start + entry.payload_bytes
                for start, stop in _missing(known, span):
                    payload, headers = payload + stop - start, headers + entry.header_bytes
                known.append(span)
        return payload, headers

    def cost(self, segment: int, engine: str) -> StateCost | None:
        """What ``engine`` charges the segment alone, None if nobody said.

        For the log's engines that is nothing: :mod:`regrad.core.rollback` charges what segments share.
        """
        for given in self.costs:
            if (given.segment, given.engine) == (segment, engine):
                return given
        size, (payload, headers) = self.nbytes, self.union(segment) if engine == UNION else (0, 0)
        known = {
            SNAPSHOT: StateCost(segment, engine, size, size, Moves(size, 0), Moves(size, 2 * size)),
            UNION: StateCost(segment, engine, payload + headers, payload, Moves(payload), Moves(payload, 2 * payload)),
            JOURNAL: StateCost(segment, engine, 0, 0),
            STAYS_BACK: StateCost(segment, engine, 0, 0),
        }
        return known.get(engine)


@dataclass(frozen=True, slots=True)
class StateUse:
    """How one option of a segment brings one state variable back for its replay.

    The bytes and the seconds are the segment's own, and stand in the figures of the option too; what the shared log
    costs on top depends on the other segments' choices.
    """

    state: str
    engine: str
    retained_bytes: int = 0
    transient_bytes: int = 0
    added_seconds: float = 0.0

    @property
    def needs_log(self) -> bool:
        """Whether its replay undoes the shared log."""
        return self.engine in LOG_ENGINES

    @property
    def stays_back(self) -> bool:
        """Whether the state stays rolled back after its replay, for the next one to go on from there."""
        return self.engine == STAYS_BACK


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
        return undone_bytes(self.entries, segment)

    def redo_bytes(self, segment: int) -> int:
        """Bytes put aside while ``segment`` is replayed from the present: each overwritten byte once."""
        return redo_bytes(self.entries, segment)

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


def undone_bytes(entries: Iterable[LogEntry], segment: int, standing: int | None = None) -> int:
    """Payload of the entries from ``segment`` on, up to the writers before ``standing`` if that is given."""
    return sum(e.payload_bytes for e in entries if segment <= e.writer and (standing is None or e.writer < standing))


def redo_bytes(entries: Iterable[LogEntry], segment: int) -> int:
    """Bytes that ``segment`` or a later one overwrote, each once."""
    pieces: dict[str, list[tuple[int, int]]] = {}
    for entry in entries:
        if entry.writer >= segment:
            pieces.setdefault(entry.state, []).append((entry.start, entry.start + entry.payload_bytes))
    return sum(_covered(spans) for spans in pieces.values())


def _missing(known: list[tuple[int, int]], span: tuple[int, int]) -> list[tuple[int, int]]:
    """The pieces of ``span`` that none of ``known`` covers."""
    found, (at, stop) = [], span
    for start, end in sorted(known):
        if end > at and start < stop:
            if start > at:
                found.append((at, start))
            at = max(at, end)
    return [*found, (at, stop)] if at < stop else found


def _covered(spans: list[tuple[int, int]]) -> int:
    total, reach = 0, -1
    for start, stop in sorted(spans):
        total += max(0, stop - max(start, reach))
        reach = max(reach, stop)
    return total
