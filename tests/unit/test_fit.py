"""The search for the largest size, seconds without the clock's noise, and how an answer reads."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable

import pytest

from regrad.core.errors import InvalidPlan
from regrad.core.fit import Fit, Size, accumulation, find_edge, fit_text, rows, smoothed_seconds

LEVELS: dict[str, tuple[Callable[[int], int | None], int]] = {
    "a line": (lambda n: 1000 + 37 * n, 8),
    "a square": (lambda n: 1000 + n * n, 8),
    "a floor, then a line": (lambda n: max(5000, 37 * n), 16),
    "a floor, then a steep line": (lambda n: max(5000, 1000 + 1500 * n), 12),
    "a line with noise": (lambda n: 1000 + 30 * n + random.Random(n).randrange(60), 26),
    "a line that ends": (lambda n: None if n > 77 else 10 * n, 14),
}


@pytest.mark.parametrize("name", LEVELS)
def test_the_edge_is_exact_and_found_in_few_trials(name: str) -> None:
    level, most_trials = LEVELS[name]
    for budget in range(5100, 60000, 1009):
        tried: dict[int, int | None] = {}

        def asked(size: int, tried: dict[int, int | None] = tried) -> int | None:
            assert size not in tried, "a size is tried twice"
            tried[size] = level(size)
            return tried[size]

        low, high = find_edge(asked, budget, 1, 1 << 20)
        at_low = level(low)
        assert at_low is not None
        assert at_low <= budget
        assert high == low + 1
        above = level(high)
        assert above is None or above > budget
        assert {low, high} <= set(tried)
        assert len(tried) <= most_trials


def test_a_search_ends_at_the_highest() -> None:
    assert find_edge(lambda n: n, 1000, 1, 50) == (50, None)
    assert find_edge(lambda n: n, 1000, 1, 1) == (1, None)
    assert find_edge(lambda n: 10 * n, 19, 1, 5) == (1, 2)


def test_growth_is_bounded() -> None:
    tried: list[int] = []
    find_edge(lambda n: tried.append(n) or 7, 100, 1, 1000, growth=2)
    assert all(after <= 2 * before for before, after in itertools.pairwise(tried))


def test_noise_is_taken_out_of_seconds() -> None:
    chooser = random.Random(1)
    true = {size: 0.003 + 0.001 * size for size in (1, 2, 5, 6, 9, 12, 13, 17, 20, 22)}
    found = smoothed_seconds({size: value * chooser.uniform(0.85, 1.15) for size, value in true.items()})
    assert all(abs(found[size] / value - 1) < 0.06 for size, value in true.items())
    exact = {size: 2.0 * size + 3.0 * size * size for size in (1, 4, 8, 100)}
    assert smoothed_seconds(exact) == pytest.approx(exact)
    assert smoothed_seconds({1: 1.0, 2: 3.0}) == {1: 1.0, 2: 3.0}
    assert smoothed_seconds({1: 1.0, 2: 2.0, 3: 3.0, 4: 0.0})[4] == 0.0


def size(count: int, **more: object) -> Size:
    """A size with an effective batch of 20."""
    given = {"micro_batch": count, "accumulation_steps": -(-20 // count), "gradients": "kept", "fits": True}
    return Size(count, **(given | {"peak_bytes": count << 20, "eager_peak_bytes": count << 21} | more))


def answer(**more: object) -> Fit:
    sizes = (size(4), size(6), size(7, fits=False), size(9, fits=False, peak_bytes=0, why="ValueError: no"))
    given = {
        "over": "batch", "budget_bytes": 6 << 20, "largest": sizes[1], "best": sizes[0], "largest_eager": None,
        "beyond": sizes[2], "sizes": sizes, "device": "cpu", "predicted_by": "fake trace", "band_ratio": 0.01,
        "effective_batch": 20, "notes": ("said so",),
    }  # fmt: skip
    return Fit(**(given | more))


def test_text_has_every_figure() -> None:
    text = fit_text(answer())
    assert str(answer()) == text
    for words in (
        "6.00 MiB (6,291,456 bytes)",
        "4 x 5 = 20",
        "no step was run",
        "least 7.00 MiB",
        "note: said so",
        "times",
    ):
        assert words in text
    assert [row[0] for row in rows(answer())] == ["largest, planned", "best throughput", "one more"]
    measured = answer(largest=size(6, measured_peak_bytes=7 << 20), confirmed=False)
    assert "7.00 MiB at 6: OVER the budget" in fit_text(measured)
    assert "does not run" in fit_text(answer(beyond=size(9, fits=False, peak_bytes=0)))
    assert "times" not in fit_text(answer(effective_batch=None))


def test_a_batch_that_does_not_divide_is_told() -> None:
    assert accumulation(answer(), size(6)).startswith("3 x 6 and one of 2 = 20: 6 does not divide it")
    assert accumulation(answer(effective_batch=None), size(6)) == ""


def test_json_and_back() -> None:
    assert Fit.from_json(answer().to_json()) == answer()
    with pytest.raises(InvalidPlan, match="format version 99"):
        Fit.from_json(answer(version=99).to_json())
    with pytest.raises(InvalidPlan, match="not a Fit"):
        Fit.from_json("{}")
