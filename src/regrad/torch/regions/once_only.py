"""What a call may use up, so that running it again would find it gone."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

from regrad.torch.regions.discover import sources
from regrad.torch.regions.discover.boxes import Box
from regrad.torch.regions.discover.walk import Found
from regrad.torch.regions.effects import file_position, position

if TYPE_CHECKING:
    from regrad.torch.regions.entry import Entry

_PEEK = sources.NumpyPeek()
_COPIED_ITERATORS = ("list_iterator", "tuple_iterator", "range_iterator", "str_ascii_iterator", "count", "repeat")


class OnceOnly:
    """Things whose use shows afterwards: iterators, caches of functions, files, NumPy's generator."""

    def __init__(self, found: Found, numpy: bool) -> None:
        self.iterators = [(one, position(one), _copied(one)) for one in found.iterators]
        self.caches = [(one, one.cache_info()) for one in found.caches]
        self.files = [(one, file_position(one)) for one in found.files]
        self.words = None if numpy else _PEEK.look()

    def after(self, entry: Entry) -> str | None:
        """The first thing that happened, in words; iterators that can be copied are given to ``entry`` instead."""
        for one, before, snapshot in self.iterators:
            if position(one) == before:
                continue
            if snapshot is not None and any(_holds(token, how, one) for how, _, token in entry.boxes):
                entry.substitutes[id(one)] = snapshot
            else:
                return f"consumed the iterator {type(one).__name__}"
        for one, info in self.caches:
            if one.cache_info().misses != info.misses:
                return f"filled the cache of {one.__wrapped__.__qualname__}"
        for one, at in self.files:
            if file_position(one) != at:
                return f"used the file {getattr(one, 'name', one)!r}"
        if self.words is not None and _PEEK.look() != self.words:
            return "drew from NumPy's random generator for the first time"
        self.iterators, self.caches, self.files = [], [], []
        return None


def _holds(token: Any, how: Box, value: Any) -> bool:
    return any(held is value for held in how.values(token))


def _copied(iterator: Any) -> Any:
    return copy.copy(iterator) if type(iterator).__name__ in _COPIED_ITERATORS else None
