"""Any choices on a profile's chain, spans in spans included, priced by trace arithmetic."""

from __future__ import annotations

from dataclasses import replace

from regrad.core.chain import KEEP, RECOMPUTE
from regrad.core.plan import Choice, Choices, leaves
from regrad.core.simulate_trace import Range, StateCopy
from regrad.core.trace import Call
from regrad.torch.describe import UNSEEN_BYTES
from regrad.torch.profile import Profile
from regrad.torch.watch import border_problem, given


class NoSuchSpan(Exception):
    """A span that cannot be run again as one; the message says why."""


def depth_of(choices: Choices) -> int:
    """How deep choices nest: 0 if all is kept, 1 for segments run again by themselves or in a span, more for spans in spans."""
    deepest, ahead = 0, [(choice, 0) for choice in choices]
    while ahead:
        choice, depth = ahead.pop()
        depth += choice.is_span or choice.option != KEEP
        deepest = max(deepest, depth)
        ahead += [(inner, depth) for inner in choice.inner]
    return deepest


def can_run(choices: Choices) -> bool:
    """Whether ``rt.apply`` takes a plan of these choices: it runs segments, no spans."""
    return not any(choice.is_span for choice in choices)


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
    """Prices choices of one profile; legality of spans is looked up once."""

    def __init__(self, source: Profile) -> None:
        self.source = source
        self._calls = {(call.module, call.count): call for call in source.arithmetic.trace.calls}
        self._spans: dict[tuple[int, int], Range | str] = {}
        self._prices: dict[Choices, tuple[int, float]] = {}

    def price(self, choices: Choices) -> tuple[int, float]:
        """Peak in bytes and added seconds. Raises :class:`NoSuchSpan`. Cost: milliseconds, once for equal choices."""
        choices = simplified(choices)
        if choices not in self._prices:
            if can_run(choices):
                levels = self.source.levels(tuple(leaf.option for leaf in leaves(choices)))
            else:
                levels = self.source.arithmetic.levels(self._ranges(choices))
            self._prices[choices] = levels.peak_bytes + UNSEEN_BYTES, levels.added_seconds
        return self._prices[choices]

    def _ranges(self, choices: Choices) -> tuple[Range, ...]:
        found = (self._range(choice) for choice in choices)
        return tuple(one for one in found if one is not None)

    def _range(self, choice: Choice) -> Range | None:
        if choice.is_span:
            return replace(self._span(choice.start, choice.stop), inner=self._ranges(choice.inner))
        piece = self.source.pieces[choice.start]
        if choice.option == KEEP or not piece.module:
            return None
        return self.source.ranges_of[piece.module, piece.call]

    def _span(self, start: int, stop: int) -> Range:
        if (start, stop) not in self._spans:
            self._spans[start, stop] = self._make_span(start, stop)
        found = self._spans[start, stop]
        if isinstance(found, str):
            raise NoSuchSpan(found)
        return found

    def _make_span(self, start: int, stop: int) -> Range | str:
        """The calls of neighbouring segments as one range, or why they cannot be run again as one."""
        source, trace = self.source, self.source.arithmetic.trace
        calls = [self._calls[piece.module, piece.call] for piece in source.pieces[start:stop]]
        first, last = calls[0], calls[-1]
        span = replace(
            first,
            stop=last.stop,
            stop_sequence=last.stop_sequence,
            outputs=last.outputs,
            plain_inputs=tuple(
                {i: None for call in calls for i in call.plain_inputs if trace.storages[i].birth < first.start}
            ),
        )
        small = {index for call in calls for index in source.states.reached(call.module).small}
        problem = border_problem(trace, span, source.eager.names, small, source.states.logged)
        if problem:
            return f"{source.pieces[start].name} … {source.pieces[stop - 1].name} cannot be run again as one: {problem}"
        return Range(span.start, span.stop, given(trace, span), state=self._state(span, calls))

    def _state(self, span: Call, calls: list[Call]) -> tuple[StateCopy, ...]:
        """The copies that a region over all of the calls takes as it begins."""
        found: dict[object, StateCopy] = {}
        for call in calls:
            for copy in self.source.states.copies(replace(span, module=call.module)):
                found.setdefault(copy.key, copy)
        return tuple(found.values())
