"""What an engine needs of the memory that it serves: read bytes, write bytes, get and set a generator's state.

An engine never looks inside what it reads. That is why the same engine serves the reference machine, whose chunks are
numpy arrays, and storages of a framework on any device, whose chunks are that framework's own.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any, Protocol

from regrad.replay.ranges import ByteRange

# Bytes as the store holds them: opaque, owned by whoever read them. `len` of one is never asked, its range is known.
Chunk = Any


class Store(Protocol):
    """Byte storages and generators, by name."""

    def sizes(self) -> Mapping[str, int]:
        """Every storage that can be reached, declared or not, and its bytes."""
        ...

    def read(self, where: ByteRange) -> Chunk:
        """A copy of the bytes at ``where``. The store does not change it later."""
        ...

    def write(self, where: ByteRange, chunk: Chunk) -> None:
        """Put the bytes of ``chunk`` at ``where``: all of them, or none and an exception."""
        ...

    def to_host(self, chunk: Chunk) -> bytes:
        """``chunk`` in main memory."""
        ...

    def from_host(self, data: bytes) -> Chunk:
        """What :meth:`to_host` gave, as a chunk that :meth:`write` takes."""
        ...

    def get_generator(self, name: str) -> bytes:
        """The whole state of a generator."""
        ...

    def set_generator(self, name: str, state: bytes) -> None:
        """Put a generator where it was when :meth:`get_generator` gave ``state``."""
        ...

    def quiet(self) -> AbstractContextManager[None]:
        """Within it, no write moves a version counter that the eager part relies on. May be entered twice."""
        ...
