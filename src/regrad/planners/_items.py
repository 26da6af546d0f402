"""A one-level chain under the timeline rule, put so that dynamic programs read it directly.

The rule at segment i, with R_i the bytes retained by the segments before it:

    P + R_i + max(f, r + t + Σ_{j>i} g_j) <= M

Let m_i be the least that any option of i retains, and *slack* s_i = M - P - Σ_{j<i} (r_j - m_j): what is left when the
segments before i have taken what they hold beyond their least. Then an option of i needs ``s_i >= need`` and leaves
``s_{i+1} = s_i - extra``, with

    extra = r - m_i >= 0        need = Σ_{j<i} m_j + max(f, r + t + Σ_{j>i} g_j)

and the least slack with which a suffix of the chain can run is a plain minimum over options, exact in bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite

from regrad.core.chain import Chain, Option
from regrad.core.errors import PlannerMismatch

LOWEST = -(1 << 60)
MOST_BYTES = 1 << 59


@dataclass(frozen=True, slots=True)
class Item:
    """An option that no other one of its segment beats: bytes beyond the least, slack that it needs, seconds."""

    name: str
    extra: int
    need: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Items:
    """The items of every segment, and what follows from them alone.

    least    for each i the least slack with which segments i … n-1 can run (and ``LOWEST`` for the empty suffix)
    enough   for each i the least slack with which all of them can take their fastest option
    fastest  for each i the seconds of i … n-1 at their fastest, added up from the end as the simulator does
    floor    the bytes of the optimizer's step: no budget below it has a plan
    """

    segments: tuple[tuple[Item, ...], ...]
    persistent: int
    floor: int
    least: tuple[int, ...]
    enough: tuple[int, ...]
    fastest: tuple[float, ...]

    @property
    def least_bytes(self) -> int:
        """The smallest budget that has a plan."""
        return max(self.persistent + self.least[0], self.floor)

    def frugal(self) -> tuple[tuple[int, ...], float]:
        """A plan for ``least_bytes`` and its seconds: from the first segment on, the fastest item that leaves a way."""
        slack = self.least_bytes - self.persistent
        chosen = []
        for i, items in enumerate(self.segments):
            fits = [k for k, it in enumerate(items) if it.need <= slack and slack - it.extra >= self.least[i + 1]]
            chosen.append(min(fits, key=lambda k: (items[k].seconds, items[k].extra, items[k].need)))
            slack -= items[chosen[-1]].extra
        seconds = 0.0
        for items, k in zip(reversed(self.segments), reversed(chosen), strict=True):
            seconds += items[k].seconds
        return tuple(chosen), seconds


def items_of(chain: Chain) -> Items:
    """The items of ``chain``. Raises :class:`PlannerMismatch` for infinite or undefined seconds and for 2**59 bytes."""
    held = 0
    segments: list[tuple[Item, ...]] = []
    for segment, later in zip(chain.segments, chain.later_gradient_bytes, strict=True):
        minimum = min(option.retained_bytes for option in segment.options)
        items: list[Item] = []
        for o in segment.options:
            need = checked_need(segment.name, o, held, later)
            items.append(Item(o.name, o.retained_bytes - minimum, need, o.added_seconds))
        segments.append(tuple(_undominated(items)))
        held += minimum
    least, enough, fastest = [LOWEST], [LOWEST], [0.0]
    for segment_items in reversed(segments):
        quickest = min(item.seconds for item in segment_items)
        quick = [item for item in segment_items if item.seconds <= quickest]
        least.append(min(max(least[-1] + item.extra, item.need) for item in segment_items))
        enough.append(min(max(enough[-1] + item.extra, item.need) for item in quick))
        fastest.append(fastest[-1] + quickest)
    floor = chain.persistent_bytes + chain.gradient_bytes + chain.optimizer_bytes
    return Items(
        segments=tuple(segments),
        persistent=chain.persistent_bytes,
        floor=floor,
        least=tuple(reversed(least)),
        enough=tuple(reversed(enough)),
        fastest=tuple(reversed(fastest)),
    )


def checked_need(segment: str, o: Option, held: int, later: int, forward: int = 0, backward: int = 0) -> int:
    """The slack that ``o`` needs above ``held``, with so much more at its two moments, if it can be added up."""
    need = held + max(o.forward_bytes + forward, o.retained_bytes + o.transient_bytes + later + backward)
    if not isfinite(o.added_seconds):
        raise PlannerMismatch(f"option {o.name!r} of segment {segment!r} takes {o.added_seconds} seconds")
    if abs(need) + abs(o.retained_bytes) >= MOST_BYTES:
        raise PlannerMismatch(f"segment {segment!r} with option {o.name!r} needs {need:,} bytes; 2**59 is the limit")
    return need


def _undominated(items: list[Item]) -> list[Item]:
    """Without items that another one matches or beats on all three; of equal ones the first stays.

    Sorted by what they hold, so that ties between plans fall to the one that holds less.
    """
    best: list[Item] = []
    for item in sorted(items, key=lambda it: (it.extra, it.need, it.seconds)):
        if not any(other.need <= item.need and other.seconds <= item.seconds for other in best):
            best.append(item)
    return best
