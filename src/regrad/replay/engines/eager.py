"""Nothing is run again: the caller holds what the backward needs, and it is counted here."""

from __future__ import annotations

from dataclasses import dataclass

from regrad.replay.frame import Frame
from regrad.replay.ranges import Ranges
from regrad.replay.retention import Engine, Retention, StoreRetention, Subject


@dataclass(frozen=True, slots=True)
class Eager(Engine):
    """Keep the activations, and the historical operands where the backward needs them.

    Retained: what the caller announces by ``keep_activations``. Transient: nothing. Seconds: none.
    """

    @property
    def label(self) -> str:
        """``eager``."""
        return "eager"

    @property
    def replays(self) -> bool:
        """No."""
        return False

    @property
    def restores_everything(self) -> bool:
        """Nothing is restored, so nothing is promised of a replay."""
        return False

    def open(self, subject: Subject) -> Retention:
        """A retention that only counts."""
        return _EagerRetention(subject)


class _EagerRetention(StoreRetention):
    def on_enter(self, segment: int) -> None:
        pass

    def on_read(self, segment: int, ranges: Ranges) -> None:
        pass

    def on_write(self, segment: int, ranges: Ranges) -> None:
        pass

    def on_draw(self, segment: int, generator: str) -> None:
        pass

    def on_restore(self, segment: int, frame: Frame) -> None:
        raise self.dropped(segment)

    def on_release(self, segment: int, remaining: frozenset[int]) -> None:
        pass
