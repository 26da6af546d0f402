"""Modules built at random from a grammar of kinds of state: bit-identical to eager, or refused.

REGRAD_PROGRAMS sets how many programs run (500 by default; the full run is 10,000).
"""

from __future__ import annotations

import os
import warnings

import grammar
import pytest

from regrad.core.errors import RegionError
from regrad.torch.regions import region
from regrad.torch.regions.public import checkpoint
from regrad.torch.regions.region import RegionKept, reports

PROGRAMS = int(os.environ.get("REGRAD_PROGRAMS", "500"))
BATCH = 100


def eager(function, *args, **kwargs):
    return function(*args, **kwargs)


@pytest.mark.parametrize("first", range(0, PROGRAMS, BATCH))
def test_random_programs(first):
    exact, refused, wrong = 0, [], []
    region._REGIONS.clear()  # reports are of the latest regions only; this batch is to be counted alone
    for seed in range(first, min(first + BATCH, PROGRAMS)):
        try:
            expected = grammar.train(seed, eager)
        except RuntimeError:
            continue  # eager refuses the program itself: a second backward through what the first one freed
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RegionKept)
            try:
                got = grammar.train(seed, checkpoint)
            except RegionError as error:
                refused.append((seed, str(error)))
                continue
        if grammar.differences(expected, got):
            wrong.append(seed)
        else:
            exact += 1
    assert wrong == []
    assert len(refused) <= 0.02 * BATCH, refused
    assert exact >= 0.85 * min(BATCH, PROGRAMS - first)
    assert sum(report.replays for report in reports()) > exact  # nothing passes by keeping everything


def test_the_comparison_sees_a_plain_replay():
    """torch's own checkpoint is wrong on programs with state, and the comparison must say so."""
    from torch.utils.checkpoint import checkpoint as plain

    caught = 0
    for seed in range(20):
        try:
            expected = grammar.train(seed, eager)
            got = grammar.train(seed, lambda f, *args: plain(f, *args, use_reentrant=False))
        except RuntimeError:
            continue
        caught += bool(grammar.differences(expected, got))
    assert caught >= 10
