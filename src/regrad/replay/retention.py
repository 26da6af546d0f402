"""Engines and what they make: the retention of one step's state, from its forward to its backward.

An :class:`Engine` is a value. :meth:`Engine.open` makes a :class:`Retention`, which is told of every access while the
forward runs and brings old state back while the backward replays. :class:`StoreRetention` has everything that engines
share: counting bytes, keeping the present aside, nesting, threads and failures.

Whatever goes wrong inside a replay, the present comes back: bytes, generators and version counters are what they were
when the backward reached the segment.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import final

from regrad.core.errors import PresentLost, VersionDropped
from regrad.replay.frame import HEADER_BYTES, Frame, Meter
from regrad.replay.place import Address, Keeper, Kept, Place, SameMemory
from regrad.replay.ranges import ByteRange, Ranges
from regrad.replay.spec import StateSpec
from regrad.replay.store import Store


def _unnamed(where: ByteRange) -> str:
    return "not named"


@dataclass(frozen=True)
class Subject:
    """What a retention is for: a store, its state, the names of the segments in order, where bytes are to live.

    ``version_at`` names the version of a byte range now. It is asked of every range that is kept, so that a place that
    fails later can still say whose bytes they were; it should be cheap.
    """

    store: Store
    spec: StateSpec
    segments: tuple[str, ...]
    place: Place = field(default_factory=SameMemory)
    version_at: Callable[[ByteRange], str] = _unnamed


class Retention(ABC):
    """One step's old state. Calls come in this order: enter, accesses, leave per segment; then replaying, release."""

    @property
    @abstractmethod
    def meter(self) -> Meter:
        """Its bytes."""

    @abstractmethod
    def enter(self, segment: int) -> None:
        """The forward of ``segment`` is about to start."""

    @abstractmethod
    def before_read(self, ranges: Ranges) -> None:
        """An operation is about to read ``ranges``."""

    @abstractmethod
    def before_write(self, ranges: Ranges) -> None:
        """An operation is about to overwrite ``ranges``; their old bytes are still there."""

    @abstractmethod
    def before_draw(self, generator: str) -> None:
        """An operation is about to draw from ``generator``."""

    @abstractmethod
    def leave(self) -> None:
        """The forward of the segment that was entered has ended."""

    @abstractmethod
    def keep_activations(self, segment: int, nbytes: int) -> None:
        """``segment`` is not replayed: its caller holds ``nbytes`` of activations, which count as retained."""

    @abstractmethod
    def replaying(self, segment: int) -> AbstractContextManager[None]:
        """A context in which the state is what ``segment`` found at its entry. Afterwards the present is back.

        May be nested. Raises :class:`VersionDropped` for a segment that was released or never entered.
        """

    @abstractmethod
    def rest(self) -> None:
        """The backward ends here, or someone reads the present: bring it back where an engine stayed rolled back."""

    @abstractmethod
    def release(self, segment: int) -> None:
        """``segment`` will not be replayed again: drop what only it needs."""

    @abstractmethod
    def close(self) -> None:
        """Drop everything."""


class Engine(ABC):
    """A way of keeping old state. A value: settings are fields, and two equal ones do the same."""

    @property
    @abstractmethod
    def label(self) -> str:
        """How records and tables call it."""

    @property
    @abstractmethod
    def replays(self) -> bool:
        """Whether segments run again; otherwise their activations are kept."""

    @property
    @abstractmethod
    def restores_everything(self) -> bool:
        """Whether a replay finds all bytes of the state as they were, or only those that its segment touches."""

    @abstractmethod
    def open(self, subject: Subject) -> Retention:
        """A retention for one step."""


class StoreRetention(Retention):
    """What all engines that bring state back share. They fill in the methods that begin with ``on_``."""

    def __init__(self, subject: Subject, *, stays_back: bool = False) -> None:
        self.subject = subject
        self.store = subject.store
        self.keeper: Keeper = subject.place.open()
        self._meter = Meter()
        self._frames: list[Frame] = []
        self._resting: Frame | None = None
        self._stays_back = stays_back
        self._lock = threading.RLock()
        self._entered: set[int] = set()
        self._current: int | None = None
        self._activations: dict[int, int] = {}

    @abstractmethod
    def on_enter(self, segment: int) -> None: ...

    @abstractmethod
    def on_read(self, segment: int, ranges: Ranges) -> None: ...

    @abstractmethod
    def on_write(self, segment: int, ranges: Ranges) -> None: ...

    @abstractmethod
    def on_draw(self, segment: int, generator: str) -> None: ...

    @abstractmethod
    def on_restore(self, segment: int, frame: Frame) -> None:
        """Bring the store to the entry of ``segment``; cover in ``frame`` first whatever is changed."""

    @abstractmethod
    def on_release(self, segment: int, remaining: frozenset[int]) -> None:
        """Drop what none of ``remaining``, the segments that may still be replayed, needs."""

    # -- what engines call --------------------------------------------------------------------------------------------

    @final
    def take(self, segment: int, where: ByteRange, *, header: bool = True) -> Kept:
        """Copy the bytes at ``where`` into the place and count them, with a header unless the slot is known."""
        address = Address(self.name(segment), where, self.subject.version_at(where))
        kept = self.keeper.put(self.store, address, self.store.read(where))
        self._meter.gathered_bytes += where.nbytes
        self._meter.retain(where.nbytes + (HEADER_BYTES if header else 0))
        return kept

    @final
    def give_up(self, kept: Kept, *, header: bool = True) -> None:
        """Drop what :meth:`take` took."""
        self.keeper.free(kept)
        self._meter.retain(-kept.where.nbytes - (HEADER_BYTES if header else 0))

    @final
    def give_back(self, kept: Kept) -> None:
        """Write what :meth:`take` took into the store, and keep it."""
        self.store.write(kept.where, self.keeper.get(self.store, kept))
        self._meter.scattered_bytes += kept.where.nbytes

    @final
    def take_generator(self, name: str) -> bytes:
        """A generator's state, counted."""
        state = self.store.get_generator(name)
        self._meter.retain(len(state))
        return state

    @final
    def give_up_generators(self, states: dict[str, bytes]) -> None:
        """Drop what :meth:`take_generator` took."""
        self._meter.retain(-sum(map(len, states.values())))
        states.clear()

    @final
    def give_back_generators(self, states: dict[str, bytes], frame: Frame) -> None:
        """Set generators to ``states``; their present goes into ``frame``."""
        for name, state in states.items():
            frame.cover_generator(name)
            self.store.set_generator(name, state)

    @final
    def name(self, segment: int) -> str:
        """What the segment is called."""
        return self.subject.segments[segment]

    # -- the protocol -------------------------------------------------------------------------------------------------

    @property
    @final
    def meter(self) -> Meter:
        return self._meter

    @final
    def enter(self, segment: int) -> None:
        self._entered.add(segment)
        self._current = segment
        self.on_enter(segment)

    @final
    def before_read(self, ranges: Ranges) -> None:
        with self._lock:  # while another thread replays, an access of the forward waits for the present
            if not self._frames and self._current is not None:
                self.on_read(self._current, ranges)

    @final
    def before_write(self, ranges: Ranges) -> None:
        with self._lock:
            if self._frames:
                self._frames[-1].cover(ranges)
            elif self._current is not None:
                self.on_write(self._current, ranges)

    @final
    def before_draw(self, generator: str) -> None:
        with self._lock:
            if self._frames:
                self._frames[-1].cover_generator(generator)
            elif self._current is not None:
                self.on_draw(self._current, generator)

    @final
    def leave(self) -> None:
        self._current = None

    @final
    def keep_activations(self, segment: int, nbytes: int) -> None:
        self._activations[segment] = nbytes
        self._meter.retain(nbytes)
        self._meter.kept_segments += 1

    @contextmanager
    def replaying(self, segment: int) -> Iterator[None]:
        with self._lock, self.store.quiet():
            if segment not in self._entered:
                raise self.dropped(segment)
            with self._aside(segment):
                frame = self._resting or Frame(self.store, self._meter, segment)
                frame.segment, self._resting = segment, None
                self._frames.append(frame)
                clean = False
                try:
                    self._meter.replays += 1
                    self.on_restore(segment, frame)
                    self._meter.borrow(0, segment)  # what an earlier replay put aside counts for this one too
                    yield
                    clean = True
                finally:
                    self._end(frame, stay=clean and self._stays_back and len(self._frames) == 1)

    @contextmanager
    def _aside(self, segment: int) -> Iterator[None]:
        """Inside another replay: bring the present back for a while, then return to where that replay stood."""
        if not self._frames:
            yield
            return
        outer, inner = self._frames[-1], Frame(self.store, self._meter, segment)
        try:
            inner.cover_like(outer)
            outer.put_back()
            yield
        finally:
            try:
                inner.put_back()
            finally:
                inner.drop()

    def _end(self, frame: Frame, *, stay: bool) -> None:
        self._frames.pop()
        if stay:
            self._resting = frame
            return
        try:
            frame.put_back()
        except PresentLost:
            raise  # the frame stays as it is: it has the only copy
        except BaseException:
            frame.drop()
            raise
        frame.drop()

    @final
    def rest(self) -> None:
        with self._lock, self.store.quiet():
            if self._resting is not None:
                frame, self._resting = self._resting, None
                self._frames.append(frame)
                self._end(frame, stay=False)

    @final
    def release(self, segment: int) -> None:
        with self._lock:
            self._entered.discard(segment)
            self._meter.retain(-self._activations.pop(segment, 0))
            self.on_release(segment, frozenset(self._entered))

    @final
    def close(self) -> None:
        self.rest()
        for segment in sorted(self._entered, reverse=True):
            self.release(segment)
        self.keeper.close()

    @final
    def dropped(self, segment: int, where: ByteRange | None = None) -> VersionDropped:
        """The error for a version that is not there any more, to be raised."""
        known = 0 <= segment < len(self.subject.segments)
        where = where or (self.subject.spec.ranges[0] if self.subject.spec.ranges else None)
        return VersionDropped(
            "the state that this segment found at its entry is not kept: it was released after its backward, or its"
            " forward never ran",
            segment=self.name(segment) if known else segment,
            where=where,
            version=f"at the entry of {self.name(segment) if known else segment}",
            hint="For a second backward, retain the state in the first one.",
        )
