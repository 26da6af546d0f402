"""Random chains with small integer figures, so that every comparison can be exact."""

import random
from dataclasses import replace

import pytest

from regrad.core.chain import KEEP, RECOMPUTE, Chain, Option, Problem, Segment
from regrad.core.state import (
    READ_SET,
    Bandwidth,
    LogEntry,
    Moves,
    StateCost,
    StateVariable,
)
from regrad.core.state_options import with_states


def make_option(rng: random.Random, name: str, share: float, scale: int) -> Option:
    return Option(
        name,
        retained_bytes=int(rng.randint(0, 20 * scale) * share),
        transient_bytes=rng.randint(-2 * scale, 15 * scale),
        forward_bytes=rng.randint(0, 25 * scale),
        added_seconds=0.0 if name == KEEP else float(rng.randint(0, 9)),
        holds_input=rng.random() < 0.5,
        recomputes=name != KEEP,
    )


def make_chain(rng: random.Random, count: int, *, most_options: int = 3, scale: int = 1, spans: bool = False) -> Chain:
    """``count`` segments of 1 … ``most_options`` options, keep first; every second one can be recomputed at least.

    With ``spans`` they have boundaries and tails too, and every segment can be recomputed.
    """
    segments = []
    for i in range(count):
        names = [KEEP, RECOMPUTE, "third", "fourth"][: rng.randint(2 if spans or i % 2 else 1, most_options)]
        options = tuple(make_option(rng, name, 1.0 if name == KEEP else 0.6, scale) for name in names)
        boundary = min(option.retained_bytes for option in options) if spans else 0
        segments.append(
            Segment(
                f"s{i}",
                options,
                gradient_bytes=rng.randint(0, 6 * scale),
                forward_seconds=float(rng.randint(1, 9)),
                boundary_bytes=boundary,
                tail_seconds=rng.choice([None, 0.0, 1.0]) if spans else None,
                replay_bytes=rng.randint(0, 10 * scale) if spans else 0,
            )
        )
    return Chain(tuple(segments), rng.randint(0, 50 * scale), optimizer_bytes=rng.choice([0, 0, 40 * scale]))


def make_span_chain(
    rng: random.Random, count: int, *, most_options: int = 3, scale: int = 1, kept_share: float = 0.0
) -> Chain:
    """``count`` segments whose boundaries are small beside what they retain, so that spans, and spans in spans, pay.

    A share of about ``kept_share`` can only be kept; the others have keep, recompute and up to ``most_options``.
    """
    segments = []
    for i in range(count):
        boundary = rng.randint(0, 5 * scale)
        options = []
        for name in [KEEP, RECOMPUTE, "third"][: rng.randint(2, most_options)]:
            holds = rng.random() < 0.5
            own = rng.randint(2 * scale, 20 * scale) if name == KEEP else rng.randint(0, 12 * scale)
            options.append(
                Option(
                    name,
                    retained_bytes=own + (boundary if holds else 0),
                    transient_bytes=rng.randint(-2 * scale, 6 * scale),
                    forward_bytes=rng.randint(0, 15 * scale),
                    added_seconds=0.0 if name == KEEP else float(rng.randint(1, 9)),
                    holds_input=holds,
                    recomputes=name != KEEP,
                )
            )
        segments.append(
            Segment(
                f"s{i}",
                tuple(options[: 1 if rng.random() < kept_share else None]),
                gradient_bytes=rng.randint(0, 4 * scale),
                forward_seconds=float(rng.randint(1, 9)),
                boundary_bytes=boundary,
                tail_seconds=rng.choice([None, 0.0, 1.0]),
                replay_bytes=rng.choice([0, rng.randint(0, 40 * scale)]),
            )
        )
    return Chain(tuple(segments), rng.randint(0, 30 * scale), optimizer_bytes=rng.choice([0, 0, 20 * scale]))


def make_variable(
    rng: random.Random, name: str, count: int, scale: int = 1, readers_share: float = 0.15
) -> StateVariable:
    """A state of some bytes that some of ``count`` segments write and read; its moves take dyadic seconds."""
    size = rng.randint(2, 12) * scale
    writers = [k for k in range(count) if rng.random() < 0.5] or [rng.randrange(count)]
    entries = []
    for writer in writers:
        for _ in range(rng.choice([1, 1, 2])):
            start = rng.randrange(size)
            entries.append(LogEntry(writer, name, start, rng.randint(1, size - start), rng.choice([0, scale])))
    readers = tuple(k for k in range(count) if rng.random() < 0.4)
    read = {k: rng.randint(1, size) for k in readers}
    return StateVariable(
        name,
        size,
        tuple(entries),
        touched_by=readers,
        present_readers=tuple(k for k in range(count) if rng.random() < readers_share),
        costs=tuple(StateCost(k, READ_SET, n, n, Moves(n), Moves(n, 2 * n)) for k, n in read.items()),
        bandwidth=Bandwidth(rng.choice([4.0, 16.0]), rng.choice([2.0, 8.0])),
    )


def _heavier(rng: random.Random, segment: Segment, more: int) -> Segment:
    """Larger activations, and higher moments, some of them in the forward."""
    options = tuple(
        replace(
            option,
            retained_bytes=option.retained_bytes + (more if option.name == KEEP else 0),
            transient_bytes=option.transient_bytes + (rng.randint(0, more) if option.name == KEEP else 0),
            forward_bytes=option.forward_bytes + rng.randint(0, 2 * more),
        )
        for option in segment.options
    )
    return replace(segment, options=options)


def make_state_problem(
    rng: random.Random,
    count: int,
    *,
    states: int,
    engines: tuple[str, ...],
    most_options: int = 2,
    scale: int = 1,
    state_scale: int = 1,
    readers_share: float = 0.15,
    kept_more: int = 0,
) -> Problem:
    """A one-level problem in which each state's segments are replayed by one of ``engines``.

    A large ``state_scale`` makes the log, and what is put aside, weigh more; ``kept_more`` what is kept, so that many
    segments are replayed.
    """
    chain = make_chain(rng, count, most_options=most_options, scale=scale)
    if kept_more:
        chain = replace(chain, segments=tuple(_heavier(rng, segment, kept_more) for segment in chain.segments))
    variables = tuple(make_variable(rng, f"v{k}", count, scale * state_scale, readers_share) for k in range(states))
    return Problem(with_states(chain, variables, engines), states=variables)


@pytest.fixture(scope="session")
def state_problem():
    return make_state_problem


@pytest.fixture(scope="session")
def random_chain():
    return make_chain


@pytest.fixture(scope="session")
def span_chain():
    return make_span_chain
