"""A time-memory curve as a value: which point is best, where ours is beaten, and its way through JSON."""

from __future__ import annotations

from math import inf

import pytest

from regrad.core.errors import InvalidPlan, InvalidQuantity
from regrad.core.frontier_curve import OURS, Frontier, FrontierPoint, LeftOut, outline, spread_budgets


def point(method: str, peak_bytes: int, added_seconds: float) -> FrontierPoint:
    return FrontierPoint(method, "planner", "", None, peak_bytes, added_seconds, 1 + added_seconds, 1, 1)


def curve(*points: FrontierPoint, budgets: tuple[int, ...] = (50, 100, 200)) -> Frontier:
    return Frontier("f", "cpu", budgets, points, 10, 200, 1.0, 50, "trace", 0.01, (LeftOut("Milp", "too large"),))


def test_the_best_within_a_budget():
    slow, fast, spans = point(OURS, 40, 0.5), point("FirstK", 90, 0.2), point("Uniform", 90, 0.1)
    found = curve(slow, fast, spans)
    assert found.best(39) is None
    assert found.best(100) is spans
    assert found.best(100, fast.method) is fast
    assert found.best(100, OURS) is slow
    assert found.best(80, others=True) is None
    assert found.methods == (OURS, "FirstK", "Uniform")


def test_of_equally_fast_ones_the_lowest():
    high, low = point("A", 90, 0.2), point("B", 80, 0.2)
    assert curve(high, low).best(100) is low


def test_where_ours_is_beaten():
    ours, other, spans = point(OURS, 90, 0.3), point("FirstK", 95, 0.2), point("Uniform", 45, 0.4)
    found = curve(ours, other, spans)
    assert [(budget, round(slower, 9), by.method) for budget, slower, by in found.behind()] == [
        (50, inf, "Uniform"),  # ours has nothing there
        (100, 0.1, "FirstK"),
        (200, 0.1, "FirstK"),
    ]


def test_rounding_is_not_being_beaten():
    assert curve(point(OURS, 90, 0.2 + 1e-12), point("FirstK", 90, 0.2)).behind() == ()
    assert len(curve(point(OURS, 90, 0.2 + 1e-6), point("FirstK", 90, 0.2)).behind()) == 2


def test_the_outline_is_a_staircase():
    points = [point("A", 30, 0.5), point("A", 40, 0.6), point("A", 50, 0.1), point("A", 50, 0.2), point("A", 60, 0.1)]
    assert [(one.peak_bytes, one.added_seconds) for one in outline(points)] == [(30, 0.5), (50, 0.1)]
    assert outline([]) == ()


def test_budgets_in_between():
    assert spread_budgets(10, 20, 3) == (10, 15, 20)
    assert spread_budgets(10, 10, 4) == (10,)
    assert spread_budgets(10, 5, 2) == (10,)
    with pytest.raises(InvalidQuantity, match="two budgets or more"):
        spread_budgets(10, 20, 1)


def test_json_and_back():
    found = curve(point(OURS, 40, 0.5), point("FirstK", 90, 0.2))
    assert Frontier.from_json(found.to_json()) == found
    with pytest.raises(InvalidPlan, match="format version 9"):
        Frontier.from_json(found.to_json().replace('"version": 1', '"version": 9'))
    with pytest.raises(InvalidPlan, match="not a Frontier"):
        Frontier.from_json("{}")
