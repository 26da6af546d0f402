"""The price of nested ranges, against steps that run them: in-place writes across borders, and sets at random."""

from __future__ import annotations

import random

import pytest

import regrad.torch as rt
from regrad.bench.zoo import ZOO
from regrad.core.chain import KEEP
from regrad.core.simulate_tape import TapeRange
from regrad.core.simulate_trace import live_levels
from regrad.planners._tape_moves import Neighbours
from regrad.torch.describe import UNSEEN_BYTES
from regrad.torch.execute import Taped, install_plan
from regrad.torch.measure import measure_peak
from regrad.torch.profile import Profile
from regrad.torch.tape.ranges import Range
from regrad.torch.tape_plan import range_plans

Ranges = tuple[TapeRange, ...]
SETS = 12


def profiled(name: str) -> tuple[rt.Step, Profile]:
    step = ZOO[name].make("small")
    step()
    step.clear_gradients()
    return step, rt.profile(step)


def taped(profile: Profile, ranges: Ranges, guard: str) -> Taped:
    plans = range_plans(profile.search, ranges, profile.base.calls)
    return Taped([Range(one.start, one.stop, one.name) for one in plans], profile.base.calls, guard)


def test_what_an_inner_range_writes_of_the_outer_one_runs_with_the_outer_one() -> None:
    """The inner range begins with ``out += skip``: the replay of the outer one adds, so it is the outer that holds ``skip``."""
    step, profile = profiled("batchnorm_conv")
    calls, search = profile.base.calls, profile.search
    assert search is not None
    assert calls[37:41] == ("batch_norm", "Tensor.add_", "relu_", "conv2d")

    def range_of(start: int, stop: int, *inner: TapeRange) -> TapeRange:
        operations = profile.base.trace.operations[: profile.arithmetic.forward_stop]
        inside = [at for at, one in enumerate(operations) if start <= one.torch_call < stop]
        return TapeRange(inside[0], inside[-1] + 1, inner)

    ranges = (range_of(14, 33), range_of(35, 55, range_of(38, 55)))
    predicted = search.levels(ranges).peak_bytes + UNSEEN_BYTES
    install_plan(step.model, {}, training=True, cache_off=None, taped=taped(profile, ranges, "first"))
    measured = measure_peak(step).peak_bytes
    assert measured <= predicted <= measured + UNSEEN_BYTES


def test_what_a_call_is_given_lives_until_it_returns() -> None:
    """The last einsum of a mixture of experts copies its operands: the replay holds them and the copies side by side."""
    step, profile = profiled("moe")
    search, calls = profile.search, profile.base.calls
    assert search is not None
    assert [at for at, call in enumerate(calls) if call == "einsum"][4:6] == [177, 192]
    operations = profile.base.trace.operations[: profile.arithmetic.forward_stop]
    inside = [at for at, one in enumerate(operations) if 139 <= one.torch_call < 198]
    ranges = (TapeRange(inside[0], inside[-1] + 1),)
    predicted = search.levels(ranges).peak_bytes + UNSEEN_BYTES
    install_plan(step.model, {}, training=True, cache_off=None, taped=taped(profile, ranges, "first"))
    measured = measure_peak(step).peak_bytes
    assert measured <= predicted <= measured * 1.001


def test_a_range_holds_what_entered_it_no_longer_than_a_replay_may_come() -> None:
    """The second range was given the skip tensor; its first convolution keeps operands of its own and needs no replay."""
    step, profile = profiled("unet")
    search, calls = profile.search, profile.base.calls
    assert search is not None
    assert calls[70:80] == (
        "Tensor.add", "relu", "conv2d", "group_norm", "relu", "conv2d", "group_norm", "Tensor.add", "relu", "conv2d"
    )  # fmt: skip
    ranges = TapeRange(70, 74), TapeRange(75, 80)
    predicted = search.levels(ranges).peak_bytes
    install_plan(step.model, {}, training=True, cache_off=None, taped=taped(profile, ranges, "off"))
    assert measure_peak(step).peak_bytes == predicted


@pytest.mark.parametrize("name", ["batchnorm_conv", "unet", "gpt", "moe"])
def test_random_nestings_take_what_they_are_priced_at(name: str) -> None:
    """To the byte, but for generator states, which no allocator sees, and for Python numbers that became tensors."""
    _, profile = profiled(name)
    search, chooser = profile.search, random.Random(name)
    assert search is not None
    draws = sum(one.draws for one in profile.base.trace.operations)
    states = (draws + 1) * search.tape.generator_bytes if draws else 0
    kept, depths = tuple(KEEP for _ in profile.pieces), set()
    neighbours = Neighbours(search.calls, search._longest(), search.problem, chooser, None)
    for _ in range(SETS):
        at = search.price(())
        for _ in range(chooser.randrange(40, 240)):
            changed = neighbours.neighbour(at)
            moved = None if changed is None else search.price(changed[0])
            if moved is not None and (moved.peak_bytes <= at.peak_bytes * 1.02 or chooser.random() < 0.2):
                at = moved
        dry = live_levels(profile.dry_run(kept, taped(profile, at.ranges, "off")))
        # a dry run counts Python numbers that became tensors among what is there before the step
        over = (dry.peak_bytes - dry.before[0]) - (at.peak_bytes - search.levels(at.ranges).before[0])
        assert -states - UNSEEN_BYTES <= over <= UNSEEN_BYTES, at.ranges
        depths |= {one.depth for one in range_plans(search, at.ranges, profile.base.calls)}
    assert max(depths) >= 2
