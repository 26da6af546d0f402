"""The machine's memory: bytes, generators, and beside the bytes the name of the write that made each of them.

Every element that was ever written is a *cell*: a write's version, an address, a type. A byte knows its cell. Reading
through any view therefore finds whose bytes it got, whatever view wrote them; an element whose bytes come from several
cells, or from a cell of another type, is not a version of anything and has no gradient.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from regrad.core.errors import ReplayError, UnwrittenRead, ViewOutOfRange
from regrad.replay.log import Version
from regrad.replay.machine.views import View
from regrad.replay.ranges import ByteRange

UNWRITTEN = -1
TABLES = ("cell_write", "cell_start", "cell_code", "cell_active")
Names = dict[str, NDArray[np.int64]]


@dataclass(frozen=True, slots=True)
class Bookkeeping:
    """Which cell every byte is of, and what is known of the cells, at one moment."""

    names: Names
    cells: int
    tables: tuple[NDArray[Any], ...]


class Generator:
    """Normal numbers from a stream whose position can be read and set."""

    def __init__(self, seed: int) -> None:
        self._bits = np.random.PCG64(seed)
        self._normal = np.random.Generator(self._bits)

    def normal(self, count: int) -> NDArray[np.float64]:
        """``count`` draws."""
        return self._normal.standard_normal(count)

    @property
    def state(self) -> bytes:
        """All of the state: 40 bytes."""
        now = self._bits.state
        inner = now["state"]
        half = int(now["has_uint32"]).to_bytes(4, "little") + int(now["uinteger"]).to_bytes(4, "little")
        return int(inner["state"]).to_bytes(16, "little") + int(inner["inc"]).to_bytes(16, "little") + half

    @state.setter
    def state(self, state: bytes) -> None:
        if len(state) != 40:
            raise ReplayError(f"a generator's state has 40 bytes, not {len(state)}")
        number = [int.from_bytes(state[a:b], "little") for a, b in ((0, 16), (16, 32), (32, 36), (36, 40))]
        self._bits.state = {
            "bit_generator": "PCG64",
            "state": {"state": number[0], "inc": number[1]},
            "has_uint32": number[2],
            "uinteger": number[3],
        }


class Memory:
    """Byte storages and generators of one run. A :class:`regrad.replay.store.Store`.

    ``counters`` counts the program's writes to each storage; writes within :meth:`quiet` do not count.
    """

    def __init__(self, storages: Mapping[str, int], generators: Mapping[str, int]) -> None:
        self._bytes = {name: np.zeros(size, np.uint8) for name, size in storages.items()}
        self._generators = {name: Generator(seed) for name, seed in generators.items()}
        self.names: Names = {name: np.full(size, UNWRITTEN, np.int64) for name, size in storages.items()}
        self.counters = dict.fromkeys(storages, 0)
        self._quiet = 0
        # of each cell: its write, its address, its dtype's code, whether it depends on an input; indexed by cell
        self.cell_write = np.zeros(1024, np.int64)
        self.cell_start = np.zeros(1024, np.int64)
        self.cell_code = np.zeros(1024, np.int8)
        self.cell_active = np.zeros(1024, np.bool_)
        self.cells = 0

    # -- as a store ---------------------------------------------------------------------------------------------------

    def sizes(self) -> Mapping[str, int]:
        """Every storage and its bytes."""
        return {name: data.size for name, data in self._bytes.items()}

    def read(self, where: ByteRange) -> NDArray[np.uint8]:
        """A copy."""
        return self._bytes[where.storage][where.start : where.stop].copy()

    def write(self, where: ByteRange, chunk: NDArray[np.uint8]) -> None:
        """Put bytes back. Names are not touched: whoever restores bytes restores names."""
        self._bytes[where.storage][where.start : where.stop] = chunk
        self._count(where.storage)

    def to_host(self, chunk: NDArray[np.uint8]) -> bytes:
        """As bytes."""
        return chunk.tobytes()

    def from_host(self, data: bytes) -> NDArray[np.uint8]:
        """As an array."""
        return np.frombuffer(data, np.uint8)

    def get_generator(self, name: str) -> bytes:
        """Its 40 bytes of state."""
        return self._generators[name].state

    def set_generator(self, name: str, state: bytes) -> None:
        """Put it where it was."""
        self._generators[name].state = state

    @contextmanager
    def quiet(self) -> Iterator[None]:
        """Counters stand still within it."""
        self._quiet += 1
        try:
            yield
        finally:
            self._quiet -= 1

    def _count(self, storage: str) -> None:
        if not self._quiet:
            self.counters[storage] += 1

    # -- as a machine's memory ----------------------------------------------------------------------------------------

    def generator(self, name: str) -> Generator:
        """The generator called ``name``. Raises :class:`ViewOutOfRange` if there is none."""
        if name not in self._generators:
            raise ViewOutOfRange(f"there is no generator {name!r}; there are {', '.join(self._generators) or 'none'}")
        return self._generators[name]

    def check(self, view: View, *, write: bool = False) -> None:
        """Raise :class:`ViewOutOfRange` unless ``view`` lies in its storage and, if written, not on itself."""
        data = self._bytes.get(view.storage)
        if data is None:
            raise ViewOutOfRange(f"there is no storage {view.storage!r}", where=view.span)
        if view.stop > data.size:
            raise ViewOutOfRange(
                f"the view {view} reaches byte {view.stop} of a storage of {data.size}", where=view.span
            )
        if write and view.overlaps_itself:
            raise ViewOutOfRange(f"the view {view} overlaps itself and cannot be written", where=view.span)

    def array(self, view: View) -> NDArray[Any]:
        """The elements of ``view``, not a copy. Danger: call :meth:`check` first."""
        data = self._bytes[view.storage]
        return np.ndarray((view.count,), view.dtype, data.data, view.offset, (view.step,))

    def cells_of(self, view: View) -> NDArray[np.int64]:
        """The cell of each byte of each element, one row an element. Raises :class:`UnwrittenRead`."""
        cells = self.names[view.storage][view.bytes_of]
        if cells.min() < 0:
            row, column = np.argwhere(cells < 0)[0]
            at = int(view.bytes_of[row, column])
            raise UnwrittenRead(
                f"the view {view} reads byte {at}, which no write made",
                where=ByteRange(view.storage, at, at + 1),
                version="none",
                hint="Give the storage contents at the start, or write it first.",
            )
        return cells

    def put(
        self,
        view: View,
        values: NDArray[Any],
        write: int,
        active: NDArray[np.bool_],
        indices: NDArray[np.int64] | None = None,
        reserve: int = 0,
    ) -> int:
        """Write ``values`` as version ``write``, to the elements ``indices`` of the view or to all; the first new cell.

        ``active`` says which of them depend on an input. At least ``reserve`` cells are used up, so that the number of
        cells of a write does not depend on values.
        """
        starts, spread = view.starts, view.bytes_of
        if indices is None:
            self.array(view)[:] = values
        else:
            starts, spread = starts[indices], spread[indices]
            self.array(view)[indices] = values
        first, count = self.cells, len(starts)
        while first + max(count, reserve) > self.cell_write.size:
            self._grow()
        self.cell_write[first : first + count] = write
        self.cell_start[first : first + count] = starts
        self.cell_code[first : first + count] = view.code
        self.cell_active[first : first + count] = active
        self.names[view.storage][spread] = np.arange(first, first + count)[:, None]
        self.cells = first + max(count, reserve)
        self._count(view.storage)
        return first

    def _grow(self) -> None:
        for name in TABLES:
            old = getattr(self, name)
            setattr(self, name, np.concatenate([old, np.zeros_like(old)]))

    def bookkeeping(self) -> Bookkeeping:
        """The names and tables as they are. They are the graph's, not the state's: no bytes of any value."""
        tables = tuple(getattr(self, name)[: self.cells].copy() for name in TABLES)
        return Bookkeeping({name: cells.copy() for name, cells in self.names.items()}, self.cells, tables)

    def set_bookkeeping(self, book: Bookkeeping) -> None:
        """Return to what :meth:`bookkeeping` gave."""
        for name, cells in book.names.items():
            self.names[name][:] = cells
        for name, table in zip(TABLES, book.tables, strict=True):
            getattr(self, name)[: book.cells] = table
        self.cells = book.cells

    def version_at(self, where: ByteRange) -> str:
        """The versions that the bytes at ``where`` are of, as text: ``v3``, or ``v3, v7`` where they are mixed."""
        cells = self.names[where.storage][where.start : where.stop]
        writes = np.unique(self.cell_write[cells[cells >= 0]])
        shown = [str(Version(int(write))) for write in writes[:4]]
        if (cells < 0).any():
            shown.insert(0, "none")
        return ", ".join(shown) + (", …" if writes.size > 4 else "")

    def copy_bytes(self) -> dict[str, bytes]:
        """All bytes, for comparisons."""
        return {name: data.tobytes() for name, data in self._bytes.items()}

    def copy_generators(self) -> dict[str, bytes]:
        """All generators' states, for comparisons."""
        return {name: generator.state for name, generator in self._generators.items()}
