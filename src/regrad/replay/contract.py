"""What a segment owes when it is run again, and the ways in which it can fail to give it.

With B the bytes of the state and R the generators' states, running the segment from ``(B, R)`` at its entry must end
in ``(B, R)`` at its exit. A contract holds fingerprints of both, taken in the first run. An engine that brings back
only part of the state is held to that part. Cost: one digest of the bytes compared, at entry and at exit.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from regrad.core.errors import ContractViolated
from regrad.replay.ranges import ByteRange, Ranges
from regrad.replay.store import Store


class Verdict(Enum):
    """What a comparison of a planned step with the eager one came to."""

    EXACT = "exact"
    DIVERGED = "diverged"
    UNSUPPORTED = "unsupported"
    NOT_RUN = "not run"


class Moment(Enum):
    """When a difference was found."""

    ENTRY = "entry"
    EXIT = "exit"
    PRESENT = "present"


@dataclass(frozen=True, slots=True)
class Violation:
    """One slot that differs at one moment: a byte range of the state, or a generator."""

    segment: str
    moment: Moment
    where: ByteRange | None = None
    generator: str | None = None

    def __str__(self) -> str:
        return f"{self.where or f'generator {self.generator}'} differs at the {self.moment.value} of {self.segment}"


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """Digests of byte ranges and the states of generators at one moment."""

    digests: tuple[tuple[ByteRange, bytes], ...]
    generators: tuple[tuple[str, bytes], ...]

    @classmethod
    def take(cls, store: Store, ranges: Ranges, generators: tuple[str, ...]) -> Fingerprint:
        """Look at ``store`` now."""
        return cls(
            tuple((where, digest(store, where)) for where in ranges),
            tuple((name, store.get_generator(name)) for name in generators),
        )

    def differences(self, other: Fingerprint, segment: str, moment: Moment) -> tuple[Violation, ...]:
        """The slots of this fingerprint that are not the same in ``other``; one that is missing there differs."""
        their_bytes, their_generators = dict(other.digests), dict(other.generators)
        found = [
            Violation(segment, moment, where=where) for where, mine in self.digests if their_bytes.get(where) != mine
        ]
        found += [
            Violation(segment, moment, generator=name)
            for name, mine in self.generators
            if their_generators.get(name) != mine
        ]
        return tuple(found)


def digest(store: Store, where: ByteRange) -> bytes:
    """16 bytes of BLAKE2b over the bytes at ``where``: order and position count."""
    return hashlib.blake2b(store.to_host(store.read(where)), digest_size=16).digest()


@dataclass(frozen=True, slots=True)
class ReplayContract:
    """What segment ``name`` owes at its entry and at its exit."""

    name: str
    entry: Fingerprint
    exit: Fingerprint

    def check(self, store: Store, moment: Moment) -> tuple[Violation, ...]:
        """What differs in ``store`` now from what is owed at ``moment`` (ENTRY or EXIT)."""
        owed = self.entry if moment is Moment.ENTRY else self.exit
        seen = Fingerprint.take(store, tuple(w for w, _ in owed.digests), tuple(g for g, _ in owed.generators))
        return owed.differences(seen, self.name, moment)

    def enforce(self, store: Store, moment: Moment, version_at: Callable[[ByteRange], str] | None = None) -> None:
        """Raise :class:`ContractViolated` with all violations if :meth:`check` finds any."""
        found = self.check(store, moment)
        if found:
            first = found[0]
            raise ContractViolated(
                f"the replay does not give what the first run gave: {'; '.join(map(str, found))}",
                violations=found,
                segment=self.name,
                where=first.where,
                version=None if first.where is None or version_at is None else version_at(first.where),
                hint="The state that this segment reads is not restored by its engine, or the segment is not a function"
                " of its state.",
            )
