"""The quick figures of plans of one kind against the walk, to the byte and to the last bit of the seconds."""

import random
from dataclasses import replace
from itertools import product

import pytest

from regrad.core.chain import Problem
from regrad.planners import EveryK, FirstK, Uniform
from regrad.planners._ranking import Ranking
from regrad.planners.base import price, recomputable, recomputing
from regrad.planners.spans import uniform_cuts, uniform_spans


def problems(span_chain, count, seed):
    """Chains whose times are no round numbers, under both rules."""
    rng = random.Random(seed)
    for _ in range(count):
        chain = span_chain(rng, rng.randint(1, 12), kept_share=0.2)
        odd = [
            replace(
                s,
                options=tuple(replace(o, added_seconds=rng.random()) for o in s.options),
                forward_seconds=rng.random(),
                tail_seconds=rng.choice([None, 0.0, rng.random()]),
            )
            for s in chain.segments
        ]
        for rule in ("timeline", "static"):
            yield Problem(replace(chain, segments=tuple(odd)), rule)


def wrong(problem):
    """Plans whose quick figures are not those of their walk."""
    ranking, can = Ranking(problem), recomputable(problem)
    flat = [ranking.one_level(k, can[:k]) for k in range(len(can) + 1)]
    spans = [ranking.spans(k, uniform_cuts(can, k)) for k in range(1, len(can) + 1)]
    walked = [price(recomputing(problem, can[: e.which]), problem) for e in flat]
    walked += [price(uniform_spans(problem, e.which), problem) for e in spans]
    pairs = zip([*flat, *spans], walked, strict=True)
    return [e for e, p in pairs if (e.peak_bytes, e.added_seconds) != (p.peak_bytes, p.added_seconds)]


def test_quick_figures_are_those_of_the_walk(span_chain):
    for problem in problems(span_chain, 120, seed=41):
        assert wrong(problem) == []


@pytest.mark.parametrize("name", ["_replay", "_tail", "_boundary"])
def test_the_comparison_catches_figures_that_ignore(name, span_chain, monkeypatch):
    true_init = Ranking.__init__

    def faulty(self, problem):
        true_init(self, problem)
        setattr(self, name, getattr(self, name) * 0)

    monkeypatch.setattr(Ranking, "__init__", faulty)
    assert sum(bool(wrong(problem)) for problem in problems(span_chain, 30, seed=42)) > 5


def test_every_number_is_looked_at(span_chain):
    """The answers of planners that rank are those of walking every plan they have."""
    for problem in problems(span_chain, 25, seed=43):
        can = recomputable(problem)
        every = {
            FirstK(): [FirstK(k) for k in range(len(can) + 1)],
            EveryK(): [FirstK(0), *(EveryK(k) for k in range(1, len(can) + 1))],
            Uniform(): [Uniform(k) for k in range(1, len(can) + 1)] or [FirstK(0)],
        }
        for planner, single in every.items():
            priced = [one(problem, 10**9) for one in single]
            for budget in {p.peak_bytes + d for p, d in product(priced, (-1, 0, 3))}:
                found = planner(problem, budget)
                seconds = [p.added_seconds for p in priced if p.peak_bytes <= budget]
                assert (found.plan is None) == (not seconds)
                assert found.least_bytes == min(p.peak_bytes for p in priced)
                if seconds:
                    assert found.added_seconds == min(seconds)


def test_figures_that_are_wrong_cost_speed_and_never_the_budget(span_chain, monkeypatch):
    true_estimate = Ranking._estimate
    monkeypatch.setattr(
        Ranking, "_estimate", lambda self, *a: replace(true_estimate(self, *a), peak_bytes=0, added_seconds=0.0)
    )
    for problem in problems(span_chain, 10, seed=44):
        for planner in (FirstK(), EveryK(), Uniform()):
            eager = FirstK(0)(problem, 10**9)
            found = planner(problem, eager.peak_bytes - 1)
            assert found.plan is None or found.peak_bytes < eager.peak_bytes
