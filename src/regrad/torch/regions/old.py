"""Old bytes of a storage: all of it, of one view, or of some rows of a view."""

from __future__ import annotations

from typing import Any

import torch

from regrad.torch.regions.ambient import unseen
from regrad.torch.regions.kept import Kept

# Operations that write rows which an argument names: name -> (position of the dimension or None for 0, of the rows).
ROWS: dict[str, tuple[int | None, int]] = {
    "index_copy_": (1, 2),
    "index_add_": (1, 2),
    "index_fill_": (1, 2),
    "index_reduce_": (1, 2),
    "embedding_renorm_": (None, 1),
}


class Old:
    """The bytes that stood at one place of a storage when this was made.

    Written through an alias with a version counter of its own, hidden from all modes: nothing that anyone looks at moves.
    """

    __slots__ = ("alias", "full", "geometry", "kept", "rows", "span")

    def __init__(
        self,
        tensor: torch.Tensor,
        *,
        whole: bool = False,
        lazy: bool = False,
        rows: tuple[int, torch.Tensor] | None = None,
        span: tuple[int, int, int] = (0, 0, 0),
    ) -> None:
        """``rows`` are (dimension, indices), and ``span`` how many they are, the first and the last; ``lazy`` copies
        nothing until :meth:`fill`."""
        with unseen(), torch.no_grad():
            storage = tensor.untyped_storage()
            self.geometry = None if whole else (tensor.size(), tensor.stride(), tensor.storage_offset())
            dtype = torch.uint8 if whole else tensor.dtype
            self.alias = torch.empty(0, dtype=dtype, device=tensor.device).set_(storage)
            dense = tensor.is_contiguous() and tensor.numel() * tensor.element_size() == storage.nbytes()
        self.full = whole or (rows is None and dense)
        self.rows, self.span = rows, span
        self.kept: Kept = _NOTHING
        if not lazy:
            self.fill()

    def fill(self) -> Old:
        """Copy the bytes."""
        copy = self.now()
        self.kept = Kept(copy, copy.untyped_storage().nbytes())
        return self

    @property
    def nbytes(self) -> int:
        """Bytes of the copy."""
        return self.kept.nbytes

    def covers(self, other: Old) -> bool:
        """Whether every byte of ``other`` is surely among those of this piece."""
        if self.full:
            return True
        if self.geometry != other.geometry or self.alias.dtype != other.alias.dtype:
            return False
        if self.rows is None:
            return True
        # most rows differ in where they begin: no operation for those
        if other.rows is None or self.span != other.span or self.rows[0] != other.rows[0]:
            return False
        with unseen():
            return torch.equal(self.rows[1], other.rows[1])

    def now(self) -> torch.Tensor:
        """A copy of what stands there now."""
        with unseen(), torch.no_grad():
            view = self._view()
            return view.clone() if self.rows is None else view.index_select(*self.rows)

    def put(self, data: torch.Tensor | None = None) -> None:
        """Write the old bytes (or ``data`` from :meth:`now`) there."""
        data = self.kept.data if data is None else data
        with unseen(), torch.no_grad():
            view = self._view()
            if self.rows is None:
                view.copy_(data)
            else:
                view.index_copy_(*self.rows, data)

    def _view(self) -> torch.Tensor:
        return self.alias if self.geometry is None else self.alias.as_strided(*self.geometry)


_NOTHING = Kept(None, 0)


def rows_named(operation: Any, args: Any) -> tuple[int, Any] | None:
    """Along which dimension an indexed write names rows, and the argument that does; ``None`` if none does."""
    name = operation._schema.name.partition("::")[2]
    if name in ROWS:
        at, index = ROWS[name]
        return 0 if at is None else args[at], args[index]
    if name in ("index_put_", "_index_put_impl_"):
        indices = args[1]
        if indices and indices[0] is not None and all(one is None for one in indices[1:]):
            return 0, indices[0]
    return None


def rows_written(tensor: torch.Tensor, operation: Any, args: Any) -> Old | None:
    """The rows of ``tensor`` that ``operation`` is about to write, not yet copied; ``None`` if its arguments do not name
    rows."""
    named = rows_named(operation, args)
    if named is None:
        return None
    dimension, rows = named
    if rows.dtype not in (torch.int64, torch.int32) or not rows.numel():
        return None
    with unseen(), torch.no_grad():
        rows = rows.detach().reshape(-1).to(torch.int64)
        rows = torch.where(rows < 0, rows + tensor.size(dimension), rows).unique()
        span = (rows.numel(), int(rows[0]), int(rows[-1]))
        if span[1] < 0 or span[2] >= tensor.size(dimension):
            return None
    return Old(tensor, rows=(dimension, rows), span=span, lazy=True)
