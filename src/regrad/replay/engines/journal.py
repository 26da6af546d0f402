"""Keep the old bytes of what is overwritten; go back by undoing, return by redoing.

Two ways to keep them, after the same rule of what a segment's entry looked like: the bytes that the first write at or
after its entry replaced, else the present.

* The *shared log* has each overwritten range once per segment that overwrote it, in write order. All earlier segments
  use the same entries, so an entry lives until none of them can be replayed any more.
* The *union* gives each segment its own copy of what itself and every later segment overwrote. It needs no order and no
  neighbours, and grows with the square of the live versions where writes are disjoint.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from regrad.replay.frame import Frame
from regrad.replay.place import Kept
from regrad.replay.ranges import Ranges, RangeSet
from regrad.replay.retention import Engine, Retention, StoreRetention, Subject


class Accounting(Enum):
    """Who holds the old bytes: all segments together, or each for itself."""

    SHARED_LOG = "shared log"
    UNION = "union"


@dataclass(frozen=True, slots=True)
class Journal(Engine):
    """Old bytes of overwritten ranges, with a header a range, and states of the generators that a segment drew from.

    Transient: the redo bytes of the ranges undone, and the present of what the replay writes. Seconds: gather in the
    forward, scatter in the backward. With ``stays_back`` (shared log only) the state stays rolled back from one replay
    to the next and the present returns once, at the end: moves are then linear in the number of segments, not
    quadratic. Not for: a step whose eager part reads the state between two replays.
    """

    accounting: Accounting = Accounting.SHARED_LOG
    stays_back: bool = False

    def __post_init__(self) -> None:
        if self.stays_back and self.accounting is Accounting.UNION:
            raise ValueError("stays_back is for the shared log: union entries are not in write order")

    @property
    def label(self) -> str:
        """``journal``, with what is not the default."""
        if self.accounting is Accounting.UNION:
            return "journal (union)"
        return "journal (stays back)" if self.stays_back else "journal"

    @property
    def replays(self) -> bool:
        """Yes."""
        return True

    @property
    def restores_everything(self) -> bool:
        """Yes: what was not overwritten is still there."""
        return True

    def open(self, subject: Subject) -> Retention:
        """A retention with an empty log."""
        return _Union(subject) if self.accounting is Accounting.UNION else SharedLog(subject, self.stays_back)


class SharedLog(StoreRetention):
    """The log of one step. ``undo`` is the heart of it."""

    def __init__(self, subject: Subject, stays_back: bool = False) -> None:
        super().__init__(subject, stays_back=stays_back)
        self._log: dict[int, list[Kept]] = {}
        self._generators: dict[int, dict[str, bytes]] = {}
        self._known = RangeSet()  # of the segment that runs: in the log already
        self._rolled_past = -1  # the newest epoch that was dropped although earlier segments were still to come

    def on_enter(self, segment: int) -> None:
        self._log[segment], self._generators[segment] = [], {}
        self._known = RangeSet()

    def on_read(self, segment: int, ranges: Ranges) -> None:
        pass

    def on_write(self, segment: int, ranges: Ranges) -> None:
        for where in ranges:
            for part in self._known.missing(where):
                self._log[segment].append(self.take(segment, part))
                self._known.add(part)

    def on_draw(self, segment: int, generator: str) -> None:
        if generator not in self._generators[segment]:
            self._generators[segment][generator] = self.take_generator(generator)

    def on_restore(self, segment: int, frame: Frame) -> None:
        if frame.at is None and segment <= self._rolled_past:
            raise self.dropped(segment)  # the present came back in between, and there is no way from it any more
        self.undo(self.entries(segment, frame), frame)
        frame.at = segment + 1  # where the replay will have brought it
        self.give_back_generators(self._generators[segment], frame)

    def entries(self, segment: int, frame: Frame) -> list[Kept]:
        """What must be undone to reach the entry of ``segment`` from where the state is, in write order."""
        newest = max(self._log, default=-1) + 1 if frame.at is None else frame.at
        return [kept for epoch in range(segment, newest) for kept in self._log.get(epoch, [])]

    def undo(self, entries: list[Kept], frame: Frame) -> None:
        """Write the old bytes of ``entries``, the newest first, so that the oldest of a byte stands in the end."""
        for kept in reversed(entries):
            frame.cover((kept.where,))
            self.give_back(kept)

    def on_release(self, segment: int, remaining: frozenset[int]) -> None:
        self.give_up_generators(self._generators.pop(segment, {}))
        # rolled back beyond an epoch, nobody undoes it again; else an entry serves every earlier segment that is left
        rolled = self._resting.at if self._resting is not None else None
        for epoch in list(self._log):
            needed = any(one <= epoch for one in remaining)
            passed = rolled is not None and epoch >= rolled and epoch not in remaining
            if not needed or passed:
                self._rolled_past = max(self._rolled_past, epoch) if needed else self._rolled_past
                for kept in self._log.pop(epoch):
                    self.give_up(kept)


class _Union(StoreRetention):
    def __init__(self, subject: Subject) -> None:
        super().__init__(subject)
        self._old: dict[int, list[Kept]] = {}
        self._known: dict[int, RangeSet] = {}
        self._generators: dict[int, dict[str, bytes]] = {}

    def on_enter(self, segment: int) -> None:
        self._old[segment], self._known[segment], self._generators[segment] = [], RangeSet(), {}

    def on_read(self, segment: int, ranges: Ranges) -> None:
        pass

    def on_write(self, segment: int, ranges: Ranges) -> None:
        for owner, known in self._known.items():
            for where in ranges:
                for part in known.missing(where):
                    self._old[owner].append(self.take(owner, part))
                    known.add(part)

    def on_draw(self, segment: int, generator: str) -> None:
        if generator not in self._generators[segment]:
            self._generators[segment][generator] = self.take_generator(generator)

    def on_restore(self, segment: int, frame: Frame) -> None:
        old = self._old[segment]
        frame.cover(kept.where for kept in old)
        for kept in old:
            self.give_back(kept)
        self.give_back_generators(self._generators[segment], frame)

    def on_release(self, segment: int, remaining: frozenset[int]) -> None:
        self._known.pop(segment, None)
        for kept in self._old.pop(segment, []):
            self.give_up(kept)
        self.give_up_generators(self._generators.pop(segment, {}))
