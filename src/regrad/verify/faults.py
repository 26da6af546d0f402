"""Engines that are wrong in known ways. A suite that does not catch every one of them fails.

They reach into the real engines and break one thing each, so that what is caught is that thing and not a caricature.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from regrad.replay.engines.guarded import Guarded, GuardedRetention
from regrad.replay.engines.journal import Journal, SharedLog
from regrad.replay.frame import Frame
from regrad.replay.place import Kept
from regrad.replay.ranges import ByteRange
from regrad.replay.retention import Engine, Retention, Subject


class _FinalStorage(SharedLog):
    """Replays from the bytes that are there."""

    def undo(self, entries: list[Kept], frame: Frame) -> None:
        pass


class _OwnWritesOnly(SharedLog):
    """Undoes the segment's own writes and not those of later segments."""

    def entries(self, segment: int, frame: Frame) -> list[Kept]:
        return self._log[segment]


class _ForgottenGenerator(SharedLog):
    """Restores bytes and leaves generators where they are."""

    def give_back_generators(self, states: dict[str, bytes], frame: Frame) -> None:  # type: ignore[misc]
        pass


class _OneViewOnly(SharedLog):
    """Restores the bytes of one view of each storage; an alias that reaches further sees the present."""

    def undo(self, entries: list[Kept], frame: Frame) -> None:
        view: dict[str, ByteRange] = {}
        for kept in entries:
            view.setdefault(kept.where.storage, kept.where)
        mine = [kept for kept in entries if kept.where == view[kept.where.storage]]
        super().undo(mine, frame)


class _WrongUndoOrder(SharedLog):
    """Undoes the oldest write first, so that the newest old bytes stand in the end."""

    def undo(self, entries: list[Kept], frame: Frame) -> None:
        super().undo(entries[::-1], frame)


class _PresentNotBack(SharedLog):
    """Leaves the state where the replay left it."""

    def _end(self, frame: Frame, *, stay: bool) -> None:
        self._frames.pop()
        frame.drop()


class _ReplaysConsumed(SharedLog):
    """Replays after the release as if there were still something to restore."""

    @contextmanager
    def replaying(self, segment: int) -> Iterator[None]:
        self._entered.add(segment)
        self._log.setdefault(segment, [])
        self._generators.setdefault(segment, {})
        with super().replaying(segment):
            yield


class _NeverFires(GuardedRetention):
    """A guard that looks and sees nothing."""

    def changed(self, storage: str, before: bytes, announced: tuple[tuple[ByteRange, bytes], ...]) -> bool:
        return False


@dataclass(frozen=True, slots=True)
class Faulty(Engine):
    """The journal (or the guard on it) with a fault called ``name``."""

    name: str
    make: Callable[[Subject], Retention]
    guard: bool = False

    @property
    def label(self) -> str:
        """The fault's name."""
        return self.name

    @property
    def replays(self) -> bool:
        """Yes."""
        return True

    @property
    def restores_everything(self) -> bool:
        """So it claims."""
        return True

    def open(self, subject: Subject) -> Retention:
        """The faulty retention."""
        return self.make(subject)


FINAL_STORAGE = Faulty("reads the final storage", _FinalStorage)
FORGOTTEN_GENERATOR = Faulty("forgets the generator", _ForgottenGenerator)
FAULTS: tuple[Faulty, ...] = (
    FINAL_STORAGE,
    Faulty("undoes its own writes only", _OwnWritesOnly),
    FORGOTTEN_GENERATOR,
    Faulty("restores one view and not its alias", _OneViewOnly),
    Faulty("undoes in the wrong order", _WrongUndoOrder),
    Faulty("does not bring the present back", _PresentNotBack),
    Faulty("replays on consumed state", _ReplaysConsumed),
    Faulty("never fires", lambda subject: _NeverFires(subject, Journal()), guard=True),
)
SOUND: tuple[Engine, ...] = (Journal(), Guarded(Journal()))  # what the faults were made from must pass
