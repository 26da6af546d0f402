"""Pieces of old state that are held for a replay, counted as they come and go."""

from __future__ import annotations

import threading
from typing import Any

_LOCK = threading.Lock()
_HELD = 0


class Kept:
    """An immutable copy of some state. Calls that saw the same state share one copy."""

    __slots__ = ("__weakref__", "data", "nbytes")

    def __init__(self, data: Any, nbytes: int) -> None:
        self.data, self.nbytes = data, nbytes
        _add(nbytes)

    def __del__(self) -> None:
        _add(-self.nbytes)


def _add(count: int) -> None:
    global _HELD
    with _LOCK:
        _HELD += count


def retained_bytes() -> int:
    """Bytes of state copies and generator states that are held now, by all regions together."""
    return _HELD
