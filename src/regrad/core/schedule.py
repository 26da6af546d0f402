"""A plan spelled out as actions, in the order in which a step carries them out."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from regrad.core.chain import Chain
from regrad.core.plan import Choice, Choices, check_choices


@dataclass(frozen=True, slots=True)
class Forward:
    """The first run of a segment. With an ``option`` what that option retains is held; without one nothing is."""

    segment: int
    option: str | None


@dataclass(frozen=True, slots=True)
class Save:
    """The boundary that enters ``segment`` is held from here on."""

    segment: int


@dataclass(frozen=True, slots=True)
class Restore:
    """The boundary that enters ``segment``, saved before, is where the next recompute starts."""

    segment: int


@dataclass(frozen=True, slots=True)
class Recompute:
    """Another run of a segment, in a replay. ``tail`` marks the last of its span: what no backward needs is skipped."""

    segment: int
    option: str | None
    tail: bool = False


@dataclass(frozen=True, slots=True)
class Backward:
    """The backward of a segment; what its option retained is freed at its end, its gradients come into being."""

    segment: int


@dataclass(frozen=True, slots=True)
class Drop:
    """The boundary that enters ``segment`` is freed."""

    segment: int


@dataclass(frozen=True, slots=True)
class PutBack:
    """The present of ``state``, which stood rolled back since the replay of ``segment``, returns."""

    segment: int
    state: str


Action = Forward | Save | Restore | Recompute | Backward | Drop | PutBack


@dataclass(frozen=True, slots=True)
class Schedule:
    """Actions of one step on a chain, the optimizer's apart."""

    actions: tuple[Action, ...]


def schedule_of(choices: Choices, chain: Chain) -> Schedule:
    """The schedule that carries out ``choices`` (checked first)."""
    check_choices(choices, chain)
    actions: list[Action] = []
    for choice in choices:
        actions += _run(choice, None, shared=False)
    last = _last_replays(choices, chain)
    for choice in reversed(choices):
        actions += _unwind(choice)
        actions += (PutBack(choice.start, state) for state in last.get(choice.start, ()))
    return Schedule(tuple(actions))


def _last_replays(choices: Choices, chain: Chain) -> dict[int, list[str]]:
    """By segment the states that stay rolled back until its replay, the last of theirs, is done."""
    lowest: dict[str, int] = {}
    for choice in reversed(choices):
        if not choice.is_span:
            for use in chain.segments[choice.start].option(choice.option).states:
                if use.stays_back:
                    lowest[use.state] = choice.start
    found: dict[int, list[str]] = {}
    for state, segment in lowest.items():
        found.setdefault(segment, []).append(state)
    return found


def _run(choice: Choice, tail: int | None, *, shared: bool) -> Iterator[Action]:
    """One run through ``choice``.

    ``tail`` is the last segment of the span that is replayed, None in the forward pass; ``shared`` says that the
    boundary of ``choice`` is that of the span around it, which holds it already.
    """
    if choice.is_span and not shared:
        yield Save(choice.start)
    for segment in range(choice.start, choice.stop):
        option = None if choice.is_span else choice.option
        yield Forward(segment, option) if tail is None else Recompute(segment, option, tail=segment == tail)


def _unwind(choice: Choice) -> Iterator[Action]:
    """The backward of ``choice``, the replay of a span first. No recursion: spans may nest a thousand deep."""
    ahead: list[tuple[Choice, bool] | Drop] = [(choice, False)]
    while ahead:
        item = ahead.pop()
        if isinstance(item, Drop):
            yield item
            continue
        here, shared = item
        if not here.is_span:
            yield Backward(here.start)
            continue
        yield Restore(here.start)
        if not shared:
            ahead.append(Drop(here.start))
        for inner in here.inner:
            yield from _run(inner, here.stop - 1, shared=inner.start == here.start)
            ahead.append((inner, inner.start == here.start))
