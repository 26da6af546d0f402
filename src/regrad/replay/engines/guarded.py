"""Another engine with a guard on it, which refuses when a write goes past the engine.

Announced writes are undone on paper: the bytes at the exit with their pre-images laid over them must have the digest of
the bytes at the entry. A write that no one announced, into a declared storage or any other, breaks that.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from regrad.core.errors import UndeclaredWrite
from regrad.replay.frame import Meter
from regrad.replay.ranges import ByteRange, Ranges, RangeSet
from regrad.replay.retention import Engine, Retention, Subject

DIGEST_BYTES = 16


@dataclass(frozen=True, slots=True)
class Guarded(Engine):
    """``base``, watched.

    Retained: as the base, plus 16 bytes a storage and segment. Transient: as the base, plus the pre-images of the
    segment that runs forward. Seconds: as the base, plus two digests of all reachable bytes a segment.
    """

    base: Engine

    @property
    def label(self) -> str:
        """``guarded``, and its base where that is not the journal."""
        return "guarded" if self.base.label == "journal" else f"guarded {self.base.label}"

    @property
    def replays(self) -> bool:
        """As its base."""
        return self.base.replays

    @property
    def restores_everything(self) -> bool:
        """As its base."""
        return self.base.restores_everything

    def open(self, subject: Subject) -> Retention:
        """A retention of the base with the guard around it."""
        return GuardedRetention(subject, self.base)


class GuardedRetention(Retention):
    """The guard of one step."""

    def __init__(self, subject: Subject, base: Engine) -> None:
        self._subject = subject
        self._base = base.open(subject)
        self._declared = base.restores_everything
        self._digests: dict[int, dict[str, bytes]] = {}
        self._old: list[tuple[ByteRange, bytes]] = []
        self._known = RangeSet()
        self._current: int | None = None
        self._replaying = 0

    @property
    def meter(self) -> Meter:
        """The base's, in which the guard counts too."""
        return self._base.meter

    def enter(self, segment: int) -> None:
        """Take the digests, then let the base enter."""
        self._current, self._known = segment, RangeSet()
        digests = {name: self._digest(name, ()) for name in self._subject.store.sizes()}
        self._digests[segment] = digests
        self.meter.retain(DIGEST_BYTES * len(digests))
        self._base.enter(segment)

    def before_read(self, ranges: Ranges) -> None:
        """Passed on."""
        self._base.before_read(ranges)

    def before_write(self, ranges: Ranges) -> None:
        """Refuse a write outside the specification; otherwise hold its pre-image until the segment ends."""
        if self._current is not None and not self._replaying:
            for where in ranges:
                if self._subject.spec.covered.missing(where):
                    raise self._refusal("a segment is about to write state that is not in its specification", where)
                for part in self._known.add(where):
                    self._old.append((part, self._subject.store.to_host(self._subject.store.read(part))))
                    self.meter.borrow(part.nbytes, self._current)
        self._base.before_write(ranges)

    def before_draw(self, generator: str) -> None:
        """Passed on."""
        self._base.before_draw(generator)

    def leave(self) -> None:
        """Refuse if any reachable storage was written past the announcements."""
        segment, self._current = self._current, None
        old, self._old = self._old, []
        if segment is None:
            return
        try:
            for name, before in self._digests[segment].items():
                if self.changed(name, before, tuple(piece for piece in old if piece[0].storage == name)):
                    size = self._subject.store.sizes()[name]
                    self._current = segment
                    raise self._refusal("a segment wrote bytes that no one announced", ByteRange(name, 0, size))
        finally:
            self._current = None
            self.meter.borrow(-sum(where.nbytes for where, _ in old), segment)
            self._base.leave()

    def changed(self, storage: str, before: bytes, announced: tuple[tuple[ByteRange, bytes], ...]) -> bool:
        """Whether ``storage`` differs from its digest at the entry in more than the announced writes."""
        return self._digest(storage, announced) != before

    def keep_activations(self, segment: int, nbytes: int) -> None:
        """Passed on."""
        self._base.keep_activations(segment, nbytes)

    @contextmanager
    def replaying(self, segment: int) -> Iterator[None]:
        """As the base; the entry that it restored must have the digest that was taken there."""
        with self._base.replaying(segment):
            self._replaying += 1
            try:
                if self._declared:
                    for name, before in self._digests.get(segment, {}).items():
                        if self._digest(name, ()) != before:
                            size = self._subject.store.sizes()[name]
                            where = ByteRange(name, 0, size)
                            raise self._refusal("the state at the entry of a replay is not what it was", where, segment)
                yield
            finally:
                self._replaying -= 1

    def rest(self) -> None:
        """Passed on."""
        self._base.rest()

    def release(self, segment: int) -> None:
        """Drop the digests, then let the base release."""
        self.meter.retain(-DIGEST_BYTES * len(self._digests.pop(segment, {})))
        self._base.release(segment)

    def close(self) -> None:
        """Drop everything."""
        for segment in list(self._digests):
            self.release(segment)
        self._base.close()

    def _digest(self, storage: str, old: tuple[tuple[ByteRange, bytes], ...]) -> bytes:
        size = self._subject.store.sizes()[storage]
        if not size:
            return b""
        now = bytearray(self._subject.store.to_host(self._subject.store.read(ByteRange(storage, 0, size))))
        for where, data in old:
            now[where.start : where.stop] = data
        return hashlib.blake2b(now, digest_size=DIGEST_BYTES).digest()

    def _refusal(self, what: str, where: ByteRange, segment: int | None = None) -> UndeclaredWrite:
        segment = self._current if segment is None else segment
        return UndeclaredWrite(
            what,
            segment=None if segment is None else self._subject.segments[segment],
            where=where,
            version=self._subject.version_at(where),
            hint="Declare the storage, let discovery see the write, or keep this segment's activations.",
        )
