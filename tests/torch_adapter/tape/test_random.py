"""Random legal sets of ranges over the models of the zoo: bit-identical, and replayed. And the rule that says what is legal.

REGRAD_RANGES sets how many sets run on each model (10 by default).
"""

from __future__ import annotations

import os
import random
import warnings

import pytest
import torch
from taping import of_step, operations_of, random_ranges, run, trace_of

from regrad.bench.zoo import ZOO
from regrad.core import trace as tr
from regrad.core.trace import Operation, Storage, Trace
from regrad.torch.regions.region import RegionKept
from regrad.torch.tape import Ranges, Tape, problem_of_range

COUNT = int(os.environ.get("REGRAD_RANGES", "10"))
MODELS = (
    "gpt", "llama_like", "vit", "batchnorm_conv", "unet", "moe", "lstm", "queue_encoder", "vq_autoencoder",
    "spectral_norm", "spiking",
)  # fmt: skip


def fresh(name):
    torch.manual_seed(3)
    random.seed(3)
    step = ZOO[name].make()
    step.compute_loss().backward()  # what only a first forward does is not of the steady state
    step.model.zero_grad()
    return step


@pytest.mark.parametrize("name", MODELS)
def test_random_legal_ranges(name):
    trace, ordinals, names = trace_of(fresh(name))
    replays = calls = refused = 0
    for seed in range(COUNT):
        legal = []
        for one in random_ranges(random.Random(seed), len(names)):
            start, stop = operations_of(ordinals, one)
            if start == stop or not problem_of_range(trace, start, stop):
                legal.append(one)
            else:
                refused += 1
        tape = Tape()
        with warnings.catch_warnings():
            warnings.simplefilter("error", RegionKept)  # what is legal is never kept
            taped = run(of_step(fresh(name)), tape, Ranges(legal, names), seed=seed)
        assert taped == run(of_step(fresh(name)), seed=seed), f"seed {seed}: {legal}"
        replays += sum(report.replays for report in tape.report())
        calls += sum(report.calls_replayed for report in tape.report())
    assert replays >= COUNT // 2
    assert calls > replays or COUNT < 10
    assert refused > 0 or name not in ("queue_encoder", "vq_autoencoder")


def trace(*operations, births=(-1, -1)):
    """A forward of (reads, makes, writes); storages 0 and 1 are there before it."""
    storages = [Storage(8, tr.BUFFERS, birth) for birth in births]
    found = []
    for at, (reads, makes, writes) in enumerate(operations):
        storages += [Storage(8, tr.ACTIVATIONS, at) for _ in makes]
        found.append(Operation(f"op{at}", tr.FORWARD, -1, at, reads, makes, writes))
    return Trace(found, storages, [], "fake", "fresh", "cpu")


def test_the_in_place_rule_for_intervals():
    read_then_written = trace(((0,), (2,), ()), ((2,), (3,), ()), ((0, 3), (), (0,)))
    assert "state is read by op0 and then written in the range by op2" in problem_of_range(read_then_written, 0, 3)
    assert "later in the forward" in problem_of_range(read_then_written, 0, 2)
    assert "buffer b is" in problem_of_range(read_then_written, 0, 2, {0: "buffer b"})
    assert problem_of_range(read_then_written, 1, 3) == ""  # only written: that call is not run again
    written_then_read = trace(((0,), (), (0,)), ((0,), (2,), ()), ((2,), (3,), ()))
    assert problem_of_range(written_then_read, 0, 3) == ""
    assert problem_of_range(read_then_written, 0, 3, kept={0}) == ""
    assert problem_of_range(read_then_written, 0, 2, kept={1}) != ""
    own = trace(((0,), (2,), ()), ((2,), (), (2,)), ((2,), (3,), ()))
    assert problem_of_range(own, 0, 3) == ""
    assert problem_of_range(own, 0, 1) == ""  # what it makes, the replay makes for itself
    assert "is read by op2 and" in problem_of_range(
        trace(((0,), (2,), ()), ((2,), (3,), ()), ((2,), (4,), ()), ((2,), (), (2,))), 0, 4, kept={0, 1}
    )  # what a kept operation makes is held, and must stay what it is
    border = trace(((0,), (2,), ()), ((2,), (3,), ()), ((2,), (), (2,)))
    assert "a tensor computed before it" in problem_of_range(border, 1, 2)
    for start, stop in ((1, 1), (-1, 2), (0, 4)):
        assert "no interval" in problem_of_range(own, start, stop)
