"""The first moment at which two runs of a world differ, and in which slots."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from regrad.torch.audit.probe import Moment
from regrad.torch.audit.runs import Run
from regrad.torch.audit.survey import Key, Table


@dataclass(frozen=True)
class Difference:
    """The keys that differ at ``moment``; ``before`` is the last moment at which nothing did, if there was one."""

    moment: Moment
    before: Moment | None
    keys: tuple[Key, ...]
    eager: Table
    other: Table

    def values(self, key: Key) -> tuple[Any, Any]:
        """(in the eager step, in the other one)."""
        return self.eager.get(key), self.other.get(key)


def first_difference(eager: Run, other: Run) -> Difference | None:
    """``None`` if every moment of either run is in both, with the same table."""
    before = None
    for moment, table in eager.borders.moments.items():
        found = other.borders.moments.get(moment)
        if found is None:
            if other.error is not None:
                return None  # it stopped before it came there
            return Difference(moment, before, ((f"whether {moment} comes", "value"),), {}, {})
        keys = tuple(key for key in {**table, **found} if table.get(key, _NO) != found.get(key, _NO))
        if keys:
            return Difference(moment, before, keys, table, found)
        before = moment
    extra = next((moment for moment in other.borders.moments if moment not in eager.borders.moments), None)
    if extra is not None:
        return Difference(extra, before, ((f"whether {extra} comes", "value"),), {}, {})
    return None


_NO = object()
