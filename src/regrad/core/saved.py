"""What autograd keeps after a forward pass: storages, who saved them and why, totals per module."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from regrad.core.text import short_operation, short_place, without_numbers
from regrad.core.trace import ACTIVATIONS
from regrad.core.units import format_bytes

FORMAT_VERSION = 1
NUMBER = "Python number"
"""Stands for the operation that made a tensor of 8 bytes out of a number, such as the 0.5 of ``x * 0.5``."""
ARGUMENT, RESULT, ATTRIBUTE = "argument", "result", "attribute"


@dataclass(frozen=True, slots=True)
class SavedTensor:
    """One tensor that one node of the graph saved.

    node     name of the node, such as ``AddmmBackward0``
    what     "argument" or "result" of its operation, or "attribute" of a node that is written in Python
    index    the how-manieth of them, from 0; None if that is not known
    name     as the operation calls it, such as ``mat1``
    view     it is not the whole tensor that was made, or not in that shape
    module, where   of the operation that the node belongs to
    """

    node: str
    what: str
    index: int | None
    name: str
    shape: tuple[int, ...]
    dtype: str
    view: bool
    module: str
    where: str

    @property
    def reason(self) -> str:
        """``AddmmBackward0 saved its argument 1 (mat1)``."""
        number = "" if self.index is None else f" {self.index}"
        name = f" ({self.name})" if self.name and not re.fullmatch(rf"{RESULT}\d*", self.name) else ""
        return f"{self.node} saved its {self.what}{number}{name}" + (", a view of it" if self.view else "")


@dataclass(frozen=True, slots=True)
class SavedStorage:
    """A piece of memory that nodes of the graph hold, counted once however many of them do.

    bytes      of the whole storage, which a view keeps alive as well
    category   "activations" for what the forward made; "weights", "buffers" or "inputs" were there before it
    name       of a weight, a buffer or an input; "" for an activation
    shape      and ``dtype`` of the tensor that was made
    operation, module, where   that made it; "" for what was there before
    saves      at least one; the first is the first that was made
    """

    bytes: int
    category: str
    name: str
    shape: tuple[int, ...]
    dtype: str
    operation: str
    module: str
    where: str
    saves: tuple[SavedTensor, ...]

    @property
    def reason(self) -> str:
        """Why it is kept, in words."""
        more = len(self.saves) - 1
        return self.saves[0].reason + (f", and {more} more" if more else "")


@dataclass(frozen=True, slots=True)
class ModuleTotal:
    """Activations kept that were made in a module: by itself, and with those of the modules in it."""

    module: str
    own_bytes: int
    total_bytes: int
    count: int


@dataclass(frozen=True, slots=True)
class SavedRow:
    """Storages that differ at most in the number of their block: ``count`` of them, ``bytes`` in all."""

    bytes: int
    count: int
    category: str
    shape: tuple[int, ...]
    dtype: str
    operation: str
    module: str
    where: str
    reason: str


@dataclass(frozen=True)
class Saved:
    """Everything that autograd holds after one forward pass, in the order in which it was first saved.

    source  "fake" or "real": the kind of tensors that the pass was recorded on
    notes   what the user should know
    """

    storages: tuple[SavedStorage, ...]
    device: str
    source: str
    notes: tuple[str, ...] = ()
    version: int = FORMAT_VERSION

    @property
    def activations(self) -> tuple[SavedStorage, ...]:
        """What the forward made; the rest was there before it and costs nothing more by being saved."""
        return tuple(storage for storage in self.storages if storage.category == ACTIVATIONS)

    @property
    def activation_bytes(self) -> int:
        """Bytes that are alive after the forward only because autograd holds them, or holds them too."""
        return sum(storage.bytes for storage in self.activations)

    @property
    def modules(self) -> tuple[ModuleTotal, ...]:
        """Totals of every module that made a kept activation, and of those around it; "" is the whole model."""
        own: dict[str, list[int]] = {"": []}
        for storage in self.activations:
            parts = storage.module.split(".") if storage.module else []
            for length in range(1, len(parts) + 1):
                own.setdefault(".".join(parts[:length]), [])
            own[storage.module].append(storage.bytes)
        totals = dict.fromkeys(own, 0)
        for module, sizes in own.items():
            for around in totals:
                if around in ("", module) or module.startswith(f"{around}."):
                    totals[around] += sum(sizes)
        return tuple(ModuleTotal(module, sum(sizes), totals[module], len(sizes)) for module, sizes in own.items())

    def rows(self) -> tuple[SavedRow, ...]:
        """The activations folded over blocks, most bytes first."""
        groups: dict[tuple[object, ...], list[SavedStorage]] = {}
        for one in self.activations:
            key = (one.shape, one.dtype, one.operation, without_numbers(one.module), one.where, one.saves[0].reason)
            groups.setdefault(key, []).append(one)
        found = [_row(members) for members in groups.values()]
        return tuple(sorted(found, key=lambda row: -row.bytes))

    def module_rows(self) -> tuple[tuple[str, int, int, int], ...]:
        """Totals folded over blocks: name, how many modules, their own bytes, their bytes with what is in them."""
        groups: dict[str, list[ModuleTotal]] = {}
        for total in self.modules:
            groups.setdefault(without_numbers(total.module), []).append(total)
        return tuple(
            (name, len(many), sum(one.own_bytes for one in many), sum(one.total_bytes for one in many))
            for name, many in groups.items()
        )

    def __str__(self) -> str:
        return saved_text(self)


def _row(members: list[SavedStorage]) -> SavedRow:
    first, reasons = members[0], {member.reason for member in members}
    reason = first.reason if len(reasons) == 1 else first.saves[0].reason
    module = first.module if len(members) == 1 else without_numbers(first.module)
    total = sum(member.bytes for member in members)
    return SavedRow(
        total, len(members), first.category, first.shape, first.dtype, first.operation, module, first.where, reason
    )


def tensor_text(shape: Iterable[int], dtype: str) -> str:
    """``float32[4, 256]``."""
    return f"{dtype}[{', '.join(map(str, shape))}]"


def headline(saved: Saved) -> str:
    """How much is kept, in one line."""
    kept, others = saved.activations, len(saved.storages) - len(saved.activations)
    beside = f"; also held, but there before and not counted: {others} weights, buffers and inputs" if others else ""
    many = "storage" if len(kept) == 1 else "storages"
    size = f"{format_bytes(saved.activation_bytes)} ({saved.activation_bytes:,} bytes)"
    return f"autograd keeps {size} in {len(kept)} {many} that the forward made{beside}"


def saved_text(saved: Saved) -> str:
    """All of it for a terminal without colours, a log or a test."""
    lines = [headline(saved), ""]
    for row in saved.rows():
        times = f"{row.count} × " if row.count > 1 else ""
        place = " ".join(part for part in (row.module, short_place(row.where)) if part)
        what = f"{times}{tensor_text(row.shape, row.dtype)} by {short_operation(row.operation)}"
        lines.append(f"{format_bytes(row.bytes):>9}  {what}  {place}")
        lines.append(f"{'':>9}  {row.reason}")
    lines += ["", "by module (with the modules in it):"]
    lines += [f"{format_bytes(total):>9}  {name or 'the model'}" for name, _, _, total in saved.module_rows()]
    lines += [f"note: {note}" for note in saved.notes]
    return "\n".join(lines)
