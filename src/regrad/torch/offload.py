"""Where moved tensors live meanwhile: in a file without a name, or in the host's memory beside a CUDA device.

A :class:`Place` is a value: what a plan is applied with, and what pickling and deep copies carry. For each forward it opens
a :class:`Spool`, which lives as long as anything that was put into it. No file is left behind, however the process ends: it
has no name from the moment it is made.
"""

from __future__ import annotations

import ctypes
import errno
import os
import tempfile
import threading
import time
from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from regrad.core.errors import InvalidPlace, PlaceFailed
from regrad.torch.regions.ambient import unseen

_HINT = "Free room on that disk, give rt.apply(..., place=...) another folder, or plan without offload."
_NO_PREALLOCATION = {errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS}
_NO_NAMELESS = {errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL, errno.ENOENT}
_TRIAL_BYTES = 16 << 20


class Spool(ABC):
    """What one forward put away. Freed with the last thing in it."""

    @abstractmethod
    def put(self, row: torch.Tensor) -> Any:
        """Take the bytes of ``row`` (one dimension, uint8); a ticket for them. Raises :class:`PlaceFailed`, and has then
        taken nothing."""

    @abstractmethod
    def get(self, ticket: Any, like: torch.Tensor) -> torch.Tensor:
        """The bytes again, in a new tensor on the device of ``like``. Raises :class:`PlaceFailed`."""

    @abstractmethod
    def free(self, ticket: Any) -> None:
        """Nobody will ask for it any more. Danger: once only."""


class Place(ABC):
    """Where moved tensors live. Equal places are the same place."""

    @abstractmethod
    def check(self) -> None:
        """Raise :class:`InvalidPlace` unless it can be written now."""

    @abstractmethod
    def open(self, reserve_bytes: int = 0) -> Spool:
        """A spool with room for ``reserve_bytes``, which nobody else can take. Raises :class:`PlaceFailed`."""

    @property
    @abstractmethod
    def device(self) -> str:
        """The kind of device that measurements use tensors of."""


@dataclass(frozen=True, slots=True)
class FilePlace(Place):
    """A file in ``folder``; in the system's folder for temporary files if that is "".

    Not for: a folder in memory, such as /dev/shm and on many systems /tmp. It saves nothing where the budget is of the
    same memory.
    """

    folder: str | os.PathLike[str] = ""

    def __post_init__(self) -> None:
        # the same folder wherever the process goes, and equal places equal
        object.__setattr__(self, "folder", os.path.abspath(self.folder) if os.fspath(self.folder) else "")

    def __str__(self) -> str:
        return f"a file in {self._folder}"

    @property
    def _folder(self) -> str:
        return os.fspath(self.folder) or tempfile.gettempdir()

    @property
    def device(self) -> str:
        """A file takes tensors of any device; those of the CPU without a copy."""
        return "cpu"

    def check(self) -> None:
        """Make a file there and write a few bytes. Raises :class:`InvalidPlace`."""
        try:
            descriptor = _nameless(self._folder)
            try:
                os.pwrite(descriptor, bytes(4096), 0)
            finally:
                os.close(descriptor)
        except OSError as error:
            raise InvalidPlace(
                self, f"{error.strerror}", "Give a folder that exists, can be written and has room."
            ) from error

    def open(self, reserve_bytes: int = 0) -> Spool:
        """A file of that size. Raises :class:`PlaceFailed` if there is no room; nothing is left of it then."""
        return _File(self._folder, reserve_bytes)


@dataclass(frozen=True, slots=True)
class HostPlace(Place):
    """The host's memory, for tensors on a CUDA device: pinned, copied on a stream of its own.

    When one tensor is read back, the one that was put away before it is fetched ahead, so one more than is used is on the
    device.
    """

    def __str__(self) -> str:
        return "the host's memory"

    @property
    def device(self) -> str:
        """Only CUDA tensors leave their memory by going there."""
        return "cuda"

    def check(self) -> None:
        """Raise :class:`InvalidPlace` without a CUDA device."""
        if not torch.cuda.is_available():
            raise InvalidPlace(
                self,
                "there is no CUDA device here, and a tensor on the CPU is in it already",
                "Use rt.FilePlace(folder).",
            )

    def open(self, reserve_bytes: int = 0) -> Spool:
        """Nothing is reserved: pinned memory is taken piece by piece."""
        self.check()
        return _Pinned()


def default_place(device: str) -> Place:
    """Where a plan's tensors go if nobody says it: the host's memory for CUDA, else a file among the temporary ones."""
    return HostPlace() if torch.device(device).type == "cuda" else FilePlace()


@cache
def seconds_per_byte(place: Place) -> float:
    """Seconds to put one byte there and to read it back: the fastest of a few tries with 16 MiB, by the clock. Measured once
    for each place. Raises :class:`InvalidPlace`."""
    place.check()
    with unseen(), torch.no_grad():
        row = torch.ones(_TRIAL_BYTES, dtype=torch.uint8, device=place.device)
        return min(_seconds(place, row) for _ in range(4)) / _TRIAL_BYTES


def _seconds(place: Place, row: torch.Tensor) -> float:
    spool = place.open(row.numel())
    began = time.perf_counter()
    ticket = spool.put(row)
    spool.get(ticket, row)
    if row.is_cuda:
        torch.cuda.synchronize(row.device)
    took = time.perf_counter() - began
    spool.free(ticket)
    return took


# -- a file -----------------------------------------------------------------------------------------------------------


def _nameless(folder: str) -> int:
    """The descriptor of a file without a name. Where the file system knows none, it has one until the next line."""
    flags = os.O_RDWR | os.O_CLOEXEC
    if hasattr(os, "O_TMPFILE"):
        try:
            return os.open(folder, flags | os.O_TMPFILE | os.O_EXCL, 0o600)
        except OSError as error:
            if error.errno not in _NO_NAMELESS or not os.path.isdir(folder):
                raise
    descriptor, name = tempfile.mkstemp(dir=folder, prefix="regrad-")
    os.unlink(name)
    return descriptor


class _File(Spool):
    """One file: tickets are (offset, bytes). It shrinks as the last pieces go, which a backward frees in that order."""

    def __init__(self, folder: str, reserve_bytes: int) -> None:
        self._descriptor = -1
        self._folder, self._owner = folder, os.getpid()
        self._lock = threading.RLock()  # the garbage collector may free a ticket in the middle of put
        self._used: dict[int, int] = {}
        self._end = self._length = 0
        try:
            self._descriptor = _nameless(folder)
            self._grow(reserve_bytes)
        except OSError as error:
            self._close()
            raise PlaceFailed(
                f"cannot reserve {reserve_bytes:,} bytes for moved tensors in {folder}: {error.strerror}",
                errno=error.errno or 0,
                hint=f"Nothing of this step has run. {_HINT}",
            ) from error

    def _grow(self, length: int) -> None:
        """Make room up to ``length``, before anything is written there."""
        if length <= self._length:
            return
        try:
            os.posix_fallocate(self._descriptor, self._length, length - self._length)
        except OSError as error:
            if error.errno not in _NO_PREALLOCATION:
                raise
        self._length = length

    def put(self, row: torch.Tensor) -> Any:
        """Write the bytes. Tensors of another device go through main memory."""
        host = row if row.device.type == "cpu" else row.cpu()
        view, size = _bytes_of(host), host.numel()
        with self._lock:
            offset = self._end
            try:
                self._grow(offset + size)
                done = 0
                while done < size:
                    done += os.pwrite(self._descriptor, view[done:], offset + done)
            except OSError as error:
                raise self._failed("write", size, error) from error
            self._used[offset] = self._end = offset + size
        return offset, size

    def get(self, ticket: Any, like: torch.Tensor) -> torch.Tensor:
        """Read the bytes straight into their new place."""
        offset, size = ticket
        row = like.new_empty(size, dtype=torch.uint8)
        host = row if row.device.type == "cpu" else torch.empty(size, dtype=torch.uint8)
        view, done = _bytes_of(host), 0
        try:
            while done < size:
                read = os.preadv(self._descriptor, [view[done:]], offset + done)
                if not read:
                    raise OSError(errno.EIO, f"the file ends {size - done:,} bytes early")
                done += read
        except OSError as error:
            raise self._failed("read", size, error) from error
        return row if host is row else row.copy_(host)

    def free(self, ticket: Any) -> None:
        """Give the room back, if it is at the file's end now."""
        offset, _ = ticket
        with self._lock:
            del self._used[offset]
            if os.getpid() != self._owner or self._descriptor < 0:
                return  # the file is another process's
            end = self._used[next(reversed(self._used))] if self._used else 0  # later ones lie further back
            if end < self._end:
                self._end = self._length = end
                os.ftruncate(self._descriptor, end)

    def _failed(self, verb: str, size: int, error: OSError) -> PlaceFailed:
        reading = verb == "read"
        return PlaceFailed(
            f"cannot {verb} {size:,} bytes of a moved tensor {'from' if reading else 'to'} the file in {self._folder}: "
            f"{error.strerror}",
            errno=error.errno or 0,
            hint="Fields .grad may already hold part of this backward: clear them, and run the step again."
            if reading
            else _HINT,
        )

    def _close(self) -> None:
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor < 0:
            return
        try:
            if os.getpid() == self._owner:
                os.ftruncate(descriptor, 0)  # a process that was forked meanwhile may keep it open
        finally:
            os.close(descriptor)

    def __del__(self) -> None:
        self._close()


def _bytes_of(row: torch.Tensor) -> memoryview:
    """The memory of ``row`` itself. Danger: no longer than ``row`` lives."""
    return memoryview((ctypes.c_char * row.numel()).from_address(row.data_ptr())).cast("B")


# -- the host's memory, for CUDA ----------------------------------------------------------------------------------------


class _Piece:
    """A tensor that is in host memory, and perhaps on its way back."""

    __slots__ = ("ahead", "device", "event", "index", "pinned")

    def __init__(self, pinned: torch.Tensor, device: torch.device, index: int) -> None:
        self.pinned, self.device, self.index = pinned, device, index
        self.ahead: torch.Tensor | None = None
        self.event: Any = None


class _Pinned(Spool):
    """Pinned copies, made and read back on one stream a device."""

    def __init__(self) -> None:
        self._streams: dict[torch.device, Any] = {}
        self._pieces: dict[int, _Piece] = {}
        self._count = 0
        self._lock = threading.RLock()  # the garbage collector may free a ticket in the middle of put

    def _stream(self, device: torch.device) -> Any:
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)
        return self._streams[device]

    def put(self, row: torch.Tensor) -> Any:
        """Start the copy out. The device's memory is free once that is done and nobody else holds it."""
        if not row.is_cuda:
            raise PlaceFailed(
                f"a tensor of {row.numel():,} bytes is on {row.device}, and only CUDA tensors are moved to the host's memory",
                hint="Use rt.FilePlace(folder) for it.",
            )
        stream = self._stream(row.device)
        stream.wait_stream(torch.cuda.current_stream(row.device))
        with unseen(), torch.cuda.stream(stream):
            pinned = torch.empty(row.numel(), dtype=torch.uint8, pin_memory=True)
            pinned.copy_(row, non_blocking=True)
            row.record_stream(stream)
        with self._lock:
            piece = _Piece(pinned, row.device, self._count)
            self._pieces[self._count] = piece
            self._count += 1
        return piece

    def get(self, ticket: Any, like: torch.Tensor) -> torch.Tensor:
        """The tensor, as soon as it is back; the one before it is started."""
        with self._lock:
            self._fetch(ticket)
            row, event = ticket.ahead, ticket.event
            ticket.ahead = ticket.event = None
            before = max((index for index in self._pieces if index < ticket.index), default=None)
            if before is not None:
                self._fetch(self._pieces[before])
        current = torch.cuda.current_stream(ticket.device)
        current.wait_event(event)
        row.record_stream(current)
        fetched: torch.Tensor = row
        return fetched

    def _fetch(self, piece: _Piece) -> None:
        """Start the copy back. It runs after the copy out, on the same stream."""
        if piece.ahead is not None:
            return
        stream = self._stream(piece.device)
        with torch.cuda.stream(stream):
            piece.ahead = torch.empty(piece.pinned.numel(), dtype=torch.uint8, device=piece.device)
            with unseen():
                piece.ahead.copy_(piece.pinned, non_blocking=True)
            piece.event = stream.record_event()

    def free(self, ticket: Any) -> None:
        """Let go of the pinned memory."""
        with self._lock:
            del self._pieces[ticket.index]
