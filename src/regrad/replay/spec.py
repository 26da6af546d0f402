"""Which state a step has, and how anyone knows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from functools import cached_property

from regrad.replay.log import AccessLog, whole
from regrad.replay.ranges import ByteRange, Ranges, RangeSet


class Tag(Enum):
    """How a slot came to be known: someone named it, a step was seen to touch it, or it is covered to be safe."""

    DECLARED = "declared"
    DISCOVERED = "discovered"
    ASSUMED = "assumed"


@dataclass(frozen=True, slots=True)
class Slot:
    """A piece of state: bytes of a storage (``where``) or a generator (``generator``), never both.

    ``origin`` is the file and line where it was declared or first touched, for reports; it may be empty.
    """

    name: str
    tag: Tag
    where: ByteRange | None = None
    generator: str | None = None
    origin: str = ""

    def __post_init__(self) -> None:
        if (self.where is None) == (self.generator is None):
            raise ValueError(f"slot {self.name!r} must be a byte range or a generator, and not both")


@dataclass(frozen=True)
class StateSpec:
    """The state that engines keep and contracts compare."""

    slots: tuple[Slot, ...]

    @classmethod
    def declared(cls, sizes: Mapping[str, int], generators: Iterable[str] = ()) -> StateSpec:
        """Every storage of ``sizes`` and every generator, as someone named them."""
        ranges = tuple(Slot(one.storage, Tag.DECLARED, where=one) for one in whole(sizes.items()))
        return cls(ranges + tuple(Slot(name, Tag.DECLARED, generator=name) for name in generators))

    @classmethod
    def discovered(cls, log: AccessLog, assumed: Iterable[str] = ()) -> StateSpec:
        """What ``log`` saw touched, whole storages at a time; ``assumed`` adds storages that no one saw touched.

        Not for: proof that nothing else is touched. A branch that the observed step did not take is not in its log;
        :class:`regrad.replay.engines.guarded.Guarded` is there for that.
        """
        sizes = dict(log.storages)
        touched: dict[str, Tag] = {}
        for segment in log.segments:
            for where in [one.where for one in segment.reads] + [one.where for one in segment.writes]:
                touched.setdefault(where.storage, Tag.DISCOVERED)
        for name in assumed:
            touched.setdefault(name, Tag.ASSUMED)
        drawn = dict.fromkeys(name for segment in log.segments for name in segment.generators)
        ranges = tuple(Slot(name, tag, where=ByteRange(name, 0, sizes[name])) for name, tag in touched.items())
        return cls(ranges + tuple(Slot(name, Tag.DISCOVERED, generator=name) for name in drawn))

    @cached_property
    def ranges(self) -> Ranges:
        """The byte slots as disjoint ranges."""
        return tuple(RangeSet(slot.where for slot in self.slots if slot.where is not None))

    @cached_property
    def covered(self) -> RangeSet:
        """The bytes of all slots. Danger: shared, do not add to it."""
        return RangeSet(self.ranges)

    @cached_property
    def generators(self) -> tuple[str, ...]:
        """The generators, each once."""
        return tuple(dict.fromkeys(slot.generator for slot in self.slots if slot.generator is not None))

    @property
    def nbytes(self) -> int:
        """Bytes of all byte slots, each byte once."""
        return sum(one.nbytes for one in self.ranges)

    def tags(self) -> dict[Tag, int]:
        """How many slots have each tag."""
        return {tag: sum(slot.tag is tag for slot in self.slots) for tag in Tag}
