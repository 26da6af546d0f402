"""Where retained bytes live: in the same memory as the state, in main memory, or in a file.

A place is a value; :meth:`Place.open` makes the keeper that holds bytes for one step. Any engine works with any place.
Every failure is a :class:`PlaceFailed` that names segment, byte range and version; nothing is kept of the chunk then.
"""

from __future__ import annotations

import os
import tempfile
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, final

from regrad.core.errors import PlaceFailed
from regrad.replay.ranges import ByteRange
from regrad.replay.store import Chunk, Store


@dataclass(frozen=True, slots=True)
class Address:
    """Whose bytes are kept, for messages: the segment, the range, and the version as text."""

    segment: str
    where: ByteRange
    version: str


@dataclass(frozen=True, slots=True, eq=False)
class Kept:
    """A chunk that a keeper holds. ``token`` is the keeper's own affair."""

    address: Address
    token: Any

    @property
    def where(self) -> ByteRange:
        """The bytes of the state that these are a copy of."""
        return self.address.where


class Keeper(ABC):
    """Holds chunks. ``nbytes`` is what it holds now."""

    def __init__(self) -> None:
        self.nbytes = 0

    @final
    def put(self, store: Store, address: Address, chunk: Chunk) -> Kept:
        """Take ``chunk``, the bytes of ``address.where``. Raises :class:`PlaceFailed` and keeps nothing then."""
        kept = Kept(address, self._put(store, address, chunk))
        self.nbytes += address.where.nbytes
        return kept

    @final
    def get(self, store: Store, kept: Kept) -> Chunk:
        """The chunk again, as one that ``store.write`` takes. Raises :class:`PlaceFailed`."""
        return self._get(store, kept)

    @final
    def free(self, kept: Kept) -> None:
        """Give up the chunk. Danger: once only."""
        self._free(kept)
        self.nbytes -= kept.where.nbytes

    @abstractmethod
    def _put(self, store: Store, address: Address, chunk: Chunk) -> Any: ...

    @abstractmethod
    def _get(self, store: Store, kept: Kept) -> Chunk: ...

    @abstractmethod
    def _free(self, kept: Kept) -> None: ...

    @abstractmethod
    def close(self) -> None:
        """Give up everything. May be called twice."""


class Place(ABC):
    """Where retained bytes live."""

    @abstractmethod
    def open(self) -> Keeper:
        """A keeper with nothing in it."""


@dataclass(frozen=True, slots=True)
class SameMemory(Place):
    """The memory that the state is in: chunks stay what the store gave."""

    def open(self) -> Keeper:
        """A keeper that holds the store's own chunks."""
        return _Chunks()


@dataclass(frozen=True, slots=True)
class HostMemory(Place):
    """Main memory: the device's bytes are free again, and each chunk is copied twice more."""

    def open(self) -> Keeper:
        """A keeper that holds bytes objects."""
        return _HostBytes()


@dataclass(frozen=True, slots=True)
class FilePlace(Place):
    """A file in ``folder`` (the system's folder for temporary files if ``None``).

    It has no name from the moment it is made, so nothing is left behind however the process ends. Freed room is used
    again for chunks of the same size or smaller; the file's length is the most that was held at once, or somewhat more.
    """

    folder: Path | None = None

    def open(self) -> Keeper:
        """A keeper that makes its file for the first chunk, and raises :class:`PlaceFailed` then if it cannot."""
        return _File(self.folder)


class _Chunks(Keeper):
    def _put(self, store: Store, address: Address, chunk: Chunk) -> Any:
        return [chunk]

    def _get(self, store: Store, kept: Kept) -> Chunk:
        return kept.token[0]

    def _free(self, kept: Kept) -> None:
        kept.token.clear()  # the chunk's memory goes now, whoever still holds the handle

    def close(self) -> None:
        self.nbytes = 0


class _HostBytes(_Chunks):
    def _put(self, store: Store, address: Address, chunk: Chunk) -> Any:
        return [store.to_host(chunk)]

    def _get(self, store: Store, kept: Kept) -> Chunk:
        return store.from_host(kept.token[0])


class _File(Keeper):
    def __init__(self, folder: Path | None) -> None:
        super().__init__()
        self._folder = folder
        self._file: IO[bytes] | None = None  # made for the first chunk, so that a failure can say whose it was
        self._end = 0
        self._holes: list[tuple[int, int]] = []  # (size, offset), largest last

    def _descriptor(self, address: Address) -> int:
        if self._file is None:
            try:
                self._file = tempfile.TemporaryFile(dir=self._folder, buffering=0)  # noqa: SIM115 - see close()
            except OSError as error:
                where = self._folder or tempfile.gettempdir()
                raise PlaceFailed(
                    f"cannot make a file for retained bytes in {where}: {error.strerror}",
                    errno=error.errno or 0,
                    segment=address.segment,
                    where=address.where,
                    version=address.version,
                    hint="Give a folder that exists and can be written, or keep the bytes in memory.",
                ) from error
        return self._file.fileno()

    def _put(self, store: Store, address: Address, chunk: Chunk) -> Any:
        descriptor, data = self._descriptor(address), store.to_host(chunk)
        offset, size = self._room(len(data))
        done = 0
        try:
            while done < len(data):
                done += os.pwrite(descriptor, data[done:], offset + done)
        except (OSError, ValueError) as error:
            self._give_back(offset, size)
            raise _failed("write", error, address) from error
        return offset, size

    def _get(self, store: Store, kept: Kept) -> Chunk:
        offset, _ = kept.token
        wanted, parts, done = kept.where.nbytes, [], 0
        try:
            while done < wanted:
                part = os.pread(self._descriptor(kept.address), wanted - done, offset + done)
                if not part:
                    raise OSError(0, f"the file ends {wanted - done} bytes early")
                parts.append(part)
                done += len(part)
        except (OSError, ValueError) as error:
            raise _failed("read", error, kept.address) from error
        return store.from_host(b"".join(parts))

    def _free(self, kept: Kept) -> None:
        self._give_back(*kept.token)

    def _room(self, wanted: int) -> tuple[int, int]:
        for index, (size, offset) in enumerate(self._holes):
            if size >= wanted:
                del self._holes[index]
                return offset, size
        offset, self._end = self._end, self._end + wanted
        return offset, wanted

    def _give_back(self, offset: int, size: int) -> None:
        if offset + size == self._end:
            self._end = offset
        else:
            self._holes.append((size, offset))
            self._holes.sort()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
        self.nbytes = 0


def _failed(verb: str, error: OSError | ValueError, address: Address) -> PlaceFailed:
    said = (error.strerror if isinstance(error, OSError) else None) or str(error)
    return PlaceFailed(
        f"cannot {verb} {address.where.nbytes:,} retained bytes {'to' if verb == 'write' else 'from'} the file: {said}",
        errno=(error.errno or 0) if isinstance(error, OSError) else 0,
        segment=address.segment,
        where=address.where,
        version=address.version,
        hint="Free room on that disk, choose another folder, or keep the bytes in memory.",
    )
