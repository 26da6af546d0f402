"""Tensors in fewer bytes, to the bit or not at all: two values as bits, signs for relu's backward, integers in a narrower type.

A codec takes all elements of a storage as one row. It works through them a piece at a time, so what it needs besides its
result is bounded. Decoding bits looks up eight elements for each byte, which costs less than drawing, comparing or copying
them would.
"""

from __future__ import annotations

import time
from functools import cache
from typing import Any

import numpy
import torch
from torch._subclasses.fake_tensor import FakeTensor

from regrad.core.errors import InvalidPlan
from regrad.torch.regions.ambient import unseen
from regrad.torch.regions.kept import Kept

BITS, SIGNS, NARROW, OFFLOAD = "bits", "signs", "narrow", "offload"
HOWS = (BITS, SIGNS, NARROW, OFFLOAD)
PIECE = 1 << 18
"""Elements that are looked at in one go; a multiple of eight."""
_CODES = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""For each width the integers that stand for the bits of an element."""
_EQUAL, _NOT, _UP_TO = (
    (numpy.equal, torch.eq),
    (numpy.not_equal, torch.ne),
    (numpy.less_equal, torch.le),
)
_HALVES = (torch.float16, torch.bfloat16)
_NARROW = (torch.uint8, torch.int16, torch.int32)


class Packed:
    """The elements of a storage, packed.

    ``nbytes`` is what it holds, ``unpack()`` gives the row of elements again: a new tensor of the same type. Of ``signs`` it
    gives one where the element was positive (or not a number), else zero.
    """

    __slots__ = ("_data", "_value", "dtype", "elements")

    def __init__(self, data: torch.Tensor, dtype: torch.dtype, elements: int, value: int | None = None) -> None:
        self._data = Kept(data, data.nbytes)
        self.dtype, self.elements, self._value = dtype, elements, value

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return int(self._data.nbytes)

    def unpack(self) -> torch.Tensor:
        """The row of elements again."""
        data: torch.Tensor = self._data.data
        row = data.new_empty(self.elements, dtype=self.dtype)  # not hidden: whoever counts memory is to see it
        if isinstance(data, FakeTensor):
            return row
        with unseen():
            if self._value is None:
                row.copy_(data)
            else:
                _look_up(data, self._value, row.view(_CODES[row.element_size()]))
        return row


def pack(how: str, row: torch.Tensor, *, width: int = 0) -> Packed | str:
    """Pack all elements of ``row`` (one dimension, contiguous); a reason, in words, if that cannot be done exactly.

    On fake tensors, which have no values, it is always done; integers take ``width`` bytes each there.
    """
    count = row.numel()
    if not count:
        return "it has no elements"
    if how == NARROW:
        return _narrow(row, width)
    if row.element_size() not in _CODES:
        return f"elements of {row.dtype} are too wide to be compared as integers"
    if how == SIGNS and not (row.is_floating_point() and row.element_size() > 1):
        return f"{row.dtype} has no signs that relu's backward would ask for"
    bits = row.new_empty(_bytes_of_bits(count), dtype=torch.uint8)
    if isinstance(row, FakeTensor):
        return Packed(bits, row.dtype, count, 0)
    with unseen():
        value = _signs(row, bits) if how == SIGNS else _two_values(row.view(_CODES[row.element_size()]), bits)
    return "it holds more than zero and one other value" if value is None else Packed(bits, row.dtype, count, value)


def _two_values(codes: torch.Tensor, bits: torch.Tensor) -> int | None:
    """Fill ``bits`` with where ``codes`` are not zero; the one other value, None if there are several."""
    value, count = 0, codes.numel()
    ones, same = (torch.empty(min(PIECE, count), dtype=torch.bool, device=codes.device) for _ in range(2))
    for start in range(0, count, PIECE):
        piece = codes[start : start + PIECE]
        size = min(PIECE, count - start)
        if not value:
            low, high = piece.aminmax()
            value = int(high) or int(low)
        here = _compare(_NOT, piece, 0, ones[:size])
        # What equals the value is not zero: as many of the one as of the other means that they are the same elements.
        if value and _count(here) != _count(_compare(_EQUAL, piece, value, same[:size])):
            return None
        _write_bits(here, bits, start)
    return value


def _signs(row: torch.Tensor, bits: torch.Tensor) -> int:
    """Fill ``bits`` with where relu's backward passes the gradient: everywhere but at zero and below."""
    count = row.numel()
    ones = torch.empty(min(PIECE, count), dtype=torch.bool, device=row.device)
    for start in range(0, count, PIECE):
        here = _compare(_UP_TO, row[start : start + PIECE], 0, ones[: min(PIECE, count - start)])
        _write_bits(here.logical_not_(), bits, start)
    return int(torch.ones(1, dtype=row.dtype).view(_CODES[row.element_size()]))


def _compare(how: tuple[Any, Any], piece: torch.Tensor, value: int, out: torch.Tensor) -> torch.Tensor:
    """Fill ``out``. On a CPU numpy does it at five times the speed, for types that it has."""
    by_numpy, by_torch = how
    if piece.device.type == "cpu" and piece.dtype not in _HALVES:
        by_numpy(piece.numpy(), value, out=out.numpy())
        return out
    return by_torch(piece, value, out=out)  # type: ignore[no-any-return]


def _count(ones: torch.Tensor) -> int:
    return int(numpy.count_nonzero(ones.numpy()) if ones.device.type == "cpu" else torch.count_nonzero(ones))


def _write_bits(ones: torch.Tensor, bits: torch.Tensor, start: int) -> None:
    """Eight elements a byte, the first in the highest bit, as numpy has it."""
    to = bits[start // 8 : start // 8 + _bytes_of_bits(ones.numel())]
    if ones.device.type == "cpu":
        to.copy_(torch.from_numpy(numpy.packbits(ones.numpy())))
        return
    padded = torch.nn.functional.pad(ones.view(torch.uint8), (0, -ones.numel() % 8)).view(-1, 8)
    weights = torch.tensor([128, 64, 32, 16, 8, 4, 2, 1], dtype=torch.uint8, device=ones.device)
    to.copy_((padded * weights).sum(1, dtype=torch.uint8))


def _look_up(bits: torch.Tensor, value: int, codes: torch.Tensor) -> None:
    """Fill ``codes`` with ``value`` where there is a one, else with zero."""
    table = _table(bits.device).to(codes.dtype) * value
    count = codes.numel()
    whole = count // 8 * 8
    for start in range(0, whole, PIECE):
        stop = min(whole, start + PIECE)
        torch.index_select(table, 0, bits[start // 8 : stop // 8].int(), out=codes[start:stop].view(-1, 8))
    if whole < count:
        codes[whole:] = table[int(bits[-1])][: count - whole]


@cache
def _table(device: torch.device) -> torch.Tensor:
    """The eight bits of each byte."""
    every = numpy.arange(256, dtype=numpy.uint8)[:, None]
    return torch.from_numpy(numpy.unpackbits(every, axis=1)).to(device)


with unseen():
    _table(torch.device("cpu"))  # 2 KiB for good: they must not come to be in the middle of somebody's step


def _narrow(row: torch.Tensor, width: int) -> Packed | str:
    if row.dtype not in (torch.int64, torch.int32, torch.int16):
        return f"{row.dtype} is not an integer type that could be narrower"
    if isinstance(row, FakeTensor):
        fitting = [dtype for dtype in _NARROW if dtype.itemsize == (width or 1)]
    else:
        with unseen():
            low, high = map(int, row.aminmax())
        fitting = [dtype for dtype in _NARROW if torch.iinfo(dtype).min <= low and high <= torch.iinfo(dtype).max]
    if not fitting or fitting[0].itemsize >= row.element_size():
        return "its values need all the bytes of their type"
    data = row.new_empty(row.numel(), dtype=fitting[0])
    if not isinstance(row, FakeTensor):
        with unseen():
            data.copy_(row)
    return Packed(data, row.dtype, row.numel())


def _bytes_of_bits(elements: int) -> int:
    return (elements + 7) // 8


# -- figures for planners -----------------------------------------------------------------------------------------------


def held_bytes(how: str, elements: int, width: int = 0) -> int:
    """Bytes that stand for ``elements`` meanwhile. ``width`` is that of a narrowed element; what is offloaded holds none."""
    _known(how)
    return {BITS: _bytes_of_bits(elements), SIGNS: _bytes_of_bits(elements), NARROW: elements * width}.get(how, 0)


def temporary_bytes(how: str, elements: int, itemsize: int) -> int:
    """The most that packing or unpacking allocates besides what is held and what is given back."""
    _known(how)
    if how not in (BITS, SIGNS):
        return 0
    piece = min(PIECE, elements)
    packing = piece * (2 if how == BITS else 1)
    table = 256 * 8 * itemsize
    return max(packing, 2 * table + _bytes_of_bits(piece) * 4)


_TRIAL_ELEMENTS = 1 << 23


@cache
def seconds_per_element(how: str) -> float:
    """Packing and unpacking one element of four bytes (of eight for "narrow") on this machine's processor: the fastest of
    a few tries on eight million, more than caches hold, as in a step. Measured once. "offload" takes its seconds from
    :func:`regrad.torch.offload.seconds_per_byte`.
    """
    _known(how)
    if how == OFFLOAD:
        return 0.0
    with unseen():
        generator = torch.Generator().manual_seed(0)
        row = (torch.rand(_TRIAL_ELEMENTS, generator=generator) > 0.1).to(
            torch.int64 if how == NARROW else torch.float32
        )
        return min(_seconds(how, row) for _ in range(3)) / row.numel()


def _seconds(how: str, row: torch.Tensor) -> float:
    began = time.process_time()
    packed: Any = pack(how, row)
    packed.unpack()
    return time.process_time() - began


def _known(how: str) -> None:
    if how not in HOWS:
        raise InvalidPlan(f"tensors cannot be moved as {how!r}; they can as {', '.join(HOWS)}")
