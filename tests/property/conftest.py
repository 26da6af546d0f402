"""Random chains with small integer figures, so that every comparison can be exact."""

import random

import pytest

from regrad.core.chain import KEEP, RECOMPUTE, Chain, Option, Segment


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


@pytest.fixture(scope="session")
def random_chain():
    return make_chain


@pytest.fixture(scope="session")
def span_chain():
    return make_span_chain
