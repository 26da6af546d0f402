"""Copy every slot at the entry of each segment."""

from __future__ import annotations

from dataclasses import dataclass

from regrad.replay.frame import Frame
from regrad.replay.place import Kept
from regrad.replay.ranges import Ranges
from regrad.replay.retention import Engine, Retention, StoreRetention, Subject


@dataclass(frozen=True, slots=True)
class Snapshot(Engine):
    """A copy of all state at each entry.

    Retained, per segment: the bytes of all slots and the states of all generators. Transient: the same once, the
    present. Seconds: copy out in the forward; copy out, in and back in the backward.
    """

    @property
    def label(self) -> str:
        """``snapshot``."""
        return "snapshot"

    @property
    def replays(self) -> bool:
        """Yes."""
        return True

    @property
    def restores_everything(self) -> bool:
        """Yes: every slot."""
        return True

    def open(self, subject: Subject) -> Retention:
        """A retention with no copies yet."""
        return _SnapshotRetention(subject)


class _SnapshotRetention(StoreRetention):
    def __init__(self, subject: Subject) -> None:
        super().__init__(subject)
        self._copies: dict[int, list[Kept]] = {}
        self._generators: dict[int, dict[str, bytes]] = {}

    def on_enter(self, segment: int) -> None:
        copies = self._copies.setdefault(segment, [])
        for where in self.subject.spec.ranges:
            copies.append(self.take(segment, where, header=False))
        states = self._generators.setdefault(segment, {})
        for name in self.subject.spec.generators:
            states[name] = self.take_generator(name)

    def on_read(self, segment: int, ranges: Ranges) -> None:
        pass

    def on_write(self, segment: int, ranges: Ranges) -> None:
        pass

    def on_draw(self, segment: int, generator: str) -> None:
        pass

    def on_restore(self, segment: int, frame: Frame) -> None:
        frame.cover(self.subject.spec.ranges)
        for kept in self._copies[segment]:
            self.give_back(kept)
        self.give_back_generators(self._generators[segment], frame)

    def on_release(self, segment: int, remaining: frozenset[int]) -> None:
        for kept in self._copies.pop(segment, []):
            self.give_up(kept, header=False)
        self.give_up_generators(self._generators.pop(segment, {}))
