"""Any choices on a profile's chain, spans in spans included, priced by trace arithmetic."""

from __future__ import annotations

from dataclasses import replace

from regrad.core.chain import KEEP, RECOMPUTE
from regrad.core.levels import Levels
from regrad.core.plan import Choices, leaves
from regrad.torch.describe import UNSEEN_BYTES
from regrad.torch.profile import Profile
from regrad.torch.spans import ranges_of


def depth_of(choices: Choices) -> int:
    """How deep choices nest: 0 if all is kept, 1 for segments run again by themselves or in a span, more for spans in spans."""
    deepest, ahead = 0, [(choice, 0) for choice in choices]
    while ahead:
        choice, depth = ahead.pop()
        depth += choice.is_span or choice.option != KEEP
        deepest = max(deepest, depth)
        ahead += [(inner, depth) for inner in choice.inner]
    return deepest


def simplified(choices: Choices) -> Choices:
    """The same plan without spans of one segment: the option that their inner choice stands for, run again."""
    return tuple(
        replace(choice, option=RECOMPUTE, inner=())
        if choice.is_span and choice.stop == choice.start + 1
        else replace(choice, inner=simplified(choice.inner))
        for choice in choices
    )


def recomputed(choices: Choices) -> int:
    """Segments that run again, in a span or by themselves."""
    inside = sum(choice.stop - choice.start for choice in choices if choice.is_span)
    return inside + sum(choice.option != KEEP for choice in choices if not choice.is_span)


class Pricing:
    """Prices choices of one profile: segments by themselves as regions, spans as the ranges of torch calls that they run as."""

    def __init__(self, source: Profile) -> None:
        self.source = source
        self._prices: dict[Choices, tuple[int, float]] = {}

    def price(self, choices: Choices) -> tuple[int, float]:
        """Peak in bytes and added seconds. Raises :class:`NoSuchSpan`. Cost: milliseconds, once for equal choices."""
        choices = simplified(choices)
        if choices not in self._prices:
            levels = self._levels(choices)
            self._prices[choices] = levels.peak_bytes + UNSEEN_BYTES, levels.added_seconds
        return self._prices[choices]

    def _levels(self, choices: Choices) -> Levels:
        if not any(choice.is_span for choice in choices):
            return self.source.levels(tuple(leaf.option for leaf in leaves(choices)))
        ranges = ranges_of(self.source, choices)
        assert self.source.search is not None
        return self.source.search.levels(ranges)
