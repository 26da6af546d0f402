"""Copy what a segment reads of the state it found, at the moment it reads it."""

from __future__ import annotations

from dataclasses import dataclass

from regrad.replay.frame import Frame
from regrad.replay.place import Kept
from regrad.replay.ranges import Ranges, RangeSet
from regrad.replay.retention import Engine, Retention, StoreRetention, Subject


@dataclass(frozen=True, slots=True)
class ReadSet(Engine):
    """The values that a segment read from mutable state before it wrote them itself.

    Retained, per segment: those bytes with a header a range, and the states of the generators that it drew from.
    Transient: the present of what is restored and of what the replay writes. Seconds: gather.

    Not for: a replay that reads other bytes than the first run did. It would find the present there; the contract
    of what the segment wrote catches that.
    """

    @property
    def label(self) -> str:
        """``read_set``."""
        return "read_set"

    @property
    def replays(self) -> bool:
        """Yes."""
        return True

    @property
    def restores_everything(self) -> bool:
        """No: only what the segment reads."""
        return False

    def open(self, subject: Subject) -> Retention:
        """A retention with nothing read yet."""
        return _ReadSetRetention(subject)


class _ReadSetRetention(StoreRetention):
    def __init__(self, subject: Subject) -> None:
        super().__init__(subject)
        self._values: dict[int, list[Kept]] = {}
        self._generators: dict[int, dict[str, bytes]] = {}
        self._known = RangeSet()  # of the segment that runs: kept already, or its own

    def on_enter(self, segment: int) -> None:
        self._values[segment], self._generators[segment] = [], {}
        self._known = RangeSet()

    def on_read(self, segment: int, ranges: Ranges) -> None:
        for where in ranges:
            for part in self._known.missing(where):
                self._values[segment].append(self.take(segment, part))
                self._known.add(part)

    def on_write(self, segment: int, ranges: Ranges) -> None:
        self._known.update(ranges)

    def on_draw(self, segment: int, generator: str) -> None:
        if generator not in self._generators[segment]:
            self._generators[segment][generator] = self.take_generator(generator)

    def on_restore(self, segment: int, frame: Frame) -> None:
        values = self._values[segment]
        frame.cover(kept.where for kept in values)
        for kept in values:
            self.give_back(kept)
        self.give_back_generators(self._generators[segment], frame)

    def on_release(self, segment: int, remaining: frozenset[int]) -> None:
        for kept in self._values.pop(segment, []):
            self.give_up(kept)
        self.give_up_generators(self._generators.pop(segment, {}))
