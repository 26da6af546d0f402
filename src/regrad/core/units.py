"""Bytes in and out: the one place that reads and writes amounts of memory."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from regrad.core.errors import InvalidQuantity

_BINARY = {"": 1, "b": 1, "byte": 1, "bytes": 1}
for _power, _letter in enumerate("kmgtp", start=1):
    _BINARY[f"{_letter}ib"] = 1024**_power
    _BINARY[f"{_letter}b"] = 1000**_power
_QUANTITY = re.compile(r"^\s*(\d[\d_,]{0,30}(?:\.\d{1,30})?)\s*([a-zA-Z]*)\s*$")
_PERCENT = re.compile(r"^\s*(\d{1,9}(?:\.\d{1,30})?)\s*%\s*$")


def parse_bytes(text: str | int) -> int:
    """Bytes of ``"8 GiB"`` (2**33), ``"8GB"`` (8 * 10**9), ``"8589934592"`` or an int.

    Raises :class:`InvalidQuantity` for an unknown unit, a negative or fractional byte count, or anything else.
    """
    if isinstance(text, bool) or not isinstance(text, (str, int)):
        raise InvalidQuantity(text, f"it is a {type(text).__name__}, not a string or an int")
    if isinstance(text, int):
        if text < 0:
            raise InvalidQuantity(text, "it is negative")
        return text
    match = _QUANTITY.match(text)
    if match is None:
        raise InvalidQuantity(text, "it is not a number with a unit")
    number, unit = match[1].replace(",", "").replace("_", ""), match[2].lower()
    if unit not in _BINARY:
        raise InvalidQuantity(text, f"the unit {match[2]!r} is not known (KiB, MiB, GiB, TiB; kB, MB, GB, TB)")
    value = float(number) * _BINARY[unit] if "." in number else int(number) * _BINARY[unit]
    if value != int(value) and unit in ("", "b", "byte", "bytes"):
        raise InvalidQuantity(text, "there is no fraction of a byte")
    return int(value)


def format_bytes(count: int) -> str:
    """``count`` bytes in the largest of B, KiB, MiB, GiB, TiB that keeps it at or above 1, three digits or more."""
    size = float(abs(count))
    sign = "-" if count < 0 else ""
    if size < 1024:
        return f"{count} B"
    for unit in ("KiB", "MiB", "GiB", "TiB"):
        size /= 1024
        if size < 1024 or unit == "TiB":
            break
    digits = 2 if size < 10 else 1 if size < 100 else 0
    return f"{sign}{size:.{digits}f} {unit}"


def format_seconds(seconds: float) -> str:
    """Seconds as ``s`` or ``ms``."""
    return f"{seconds:.2f} s" if abs(seconds) >= 1 else f"{seconds * 1000:.1f} ms"


@dataclass(frozen=True, slots=True)
class Budget:
    """A memory budget before the model is known: an amount, a share of the eager step, or the least feasible.

    ``kind`` is ``"bytes"`` (``amount`` bytes), ``"share"`` (``amount`` percent: persistent bytes plus that share of
    what the eager step needs above them) or ``"min"`` (``amount`` is 0).
    """

    kind: Literal["bytes", "share", "min"]
    amount: float

    @classmethod
    def parse(cls, budget: str | int | Budget) -> Budget:
        """Read ``"8 GiB"``, ``"60%"``, ``"min"``, an int of bytes or a Budget. Raises :class:`InvalidQuantity`."""
        if isinstance(budget, Budget):
            return budget
        if isinstance(budget, str):
            if budget.strip().lower() == "min":
                return cls("min", 0)
            if match := _PERCENT.match(budget):
                return cls("share", float(match[1]))
        return cls("bytes", parse_bytes(budget))

    def resolve(self, *, persistent_bytes: int, eager_peak_bytes: int, least_bytes: int) -> int:
        """The budget in bytes for a model with these figures, rounded down."""
        if self.kind == "bytes":
            return int(self.amount)
        if self.kind == "min":
            return least_bytes
        return persistent_bytes + int(self.amount / 100 * (eager_peak_bytes - persistent_bytes))
