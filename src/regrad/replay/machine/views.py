"""Typed views: how an operation sees the bytes of a storage. Views of one storage may overlap in any way."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from regrad.core.errors import ViewOutOfRange
from regrad.replay.ranges import ByteRange, Ranges, RangeSet

# name: (code that fits a small array, bytes, whether gradients exist)
DTYPES: dict[str, tuple[int, int, bool]] = {
    "float64": (1, 8, True),
    "float32": (2, 4, True),
    "int64": (3, 8, False),
    "int32": (4, 4, False),
    "uint8": (5, 1, False),
}


@dataclass(frozen=True)
class View:
    """``count`` elements of ``dtype``, the first at byte ``offset`` of ``storage``, ``stride`` bytes apart.

    ``stride`` 0 means: as many as an element has. Nothing needs to be aligned.
    """

    storage: str
    dtype: str
    offset: int
    count: int
    stride: int = 0

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ViewOutOfRange(f"there is no dtype {self.dtype!r}; there are {', '.join(DTYPES)}")
        if self.offset < 0 or self.count < 1 or self.stride < 0:
            raise ViewOutOfRange(
                f"a view needs an offset >= 0, a count >= 1 and a stride >= 0, not {self.offset}, {self.count} and"
                f" {self.stride}",
                where=self.storage,
            )

    @property
    def code(self) -> int:
        """The dtype as a small number."""
        return DTYPES[self.dtype][0]

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return DTYPES[self.dtype][1]

    @property
    def is_float(self) -> bool:
        """Whether its elements can carry gradients."""
        return DTYPES[self.dtype][2]

    @property
    def step(self) -> int:
        """Bytes from one element to the next."""
        return self.stride or self.itemsize

    @property
    def stop(self) -> int:
        """The byte after the last one that it reaches."""
        return self.offset + self.step * (self.count - 1) + self.itemsize

    @property
    def overlaps_itself(self) -> bool:
        """Whether two of its elements share bytes; such a view can be read and not written."""
        return self.count > 1 and self.step < self.itemsize

    @cached_property
    def starts(self) -> NDArray[np.int64]:
        """The byte at which each element begins."""
        return self.offset + self.step * np.arange(self.count, dtype=np.int64)

    @cached_property
    def bytes_of(self) -> NDArray[np.int64]:
        """The bytes of each element, one row an element."""
        return self.starts[:, None] + np.arange(self.itemsize, dtype=np.int64)

    @cached_property
    def ranges(self) -> Ranges:
        """The bytes that its elements occupy, as disjoint ranges."""
        if self.step <= self.itemsize:
            return (ByteRange(self.storage, self.offset, self.stop),)
        return tuple(RangeSet(ByteRange(self.storage, int(at), int(at) + self.itemsize) for at in self.starts))

    @cached_property
    def span(self) -> ByteRange:
        """From its first byte to its last, gaps included."""
        return ByteRange(self.storage, self.offset, self.stop)

    def overlaps(self, other: View) -> bool:
        """Whether the two share a byte."""
        return self.storage == other.storage and any(
            mine.overlaps(theirs) for mine in self.ranges for theirs in other.ranges
        )

    def at(self, indices: NDArray[np.int64]) -> Ranges:
        """The bytes of the elements at ``indices``. Danger: indices are not checked."""
        return tuple(
            RangeSet(ByteRange(self.storage, int(a), int(a) + self.itemsize) for a in self.starts[np.asarray(indices)])
        )

    def __str__(self) -> str:
        step = f" every {self.step}" if self.step != self.itemsize else ""
        return f"{self.storage}[{self.offset}:{self.stop}]{step} as {self.dtype}"
