"""What is refused or kept, and that the present is restored whatever happens."""

from __future__ import annotations

import warnings

import pytest
import torch
from comparing import as_bytes
from taping import check, layers, names_of, run

from regrad.core.errors import InvalidPlan, ModifiedArgument, ReplayDivergence, UsageError
from regrad.torch.regions.region import RegionKept
from regrad.torch.tape import Range, Ranges, Tape


def test_ranges_must_nest():
    for bad in ([(0, 4), (2, 6)], [(3, 3)], [(-1, 2)], [(0, 4), (0, 4)], [(0, 2), (4, 3)]):
        with pytest.raises(InvalidPlan):
            Ranges([Range(*one) for one in bad])
    with pytest.raises(InvalidPlan, match="ends at call 9"):
        Ranges([Range(0, 9)], ["add"])
    with pytest.raises(InvalidPlan, match="not all of which are inside"):
        Ranges([Range(2, 5, keep=frozenset({5}))])
    assert [one.start for one in Ranges([Range(4, 6), Range(0, 9), Range(4, 5)]).ranges] == [0, 4, 4]
    with pytest.raises(UsageError):
        Tape(guard="sometimes")


def test_a_changed_argument_is_an_error_and_the_present_stays():
    model, x = layers()
    tape = Tape()
    y = x * 2
    with tape.forward([Range(0, 5, "the layers")]):
        out = model(y)
    y.add_(1)
    state, mode = torch.get_rng_state(), torch.is_grad_enabled()
    with pytest.raises(ModifiedArgument, match=r"argument of linear.*the layers"):
        out.sum().backward()
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.is_grad_enabled() is mode
    assert not torch._C._len_torch_function_stack()
    with tape.forward([Range(0, 5, "the layers")]):
        out = model(x)
    x.data.add_(1)  # moves no version counter
    with pytest.raises(ModifiedArgument):
        out.sum().backward()


def test_writing_state_that_the_range_read_before_is_an_error():
    model, x = layers()
    queue = torch.randn(4, 8)

    def forward():
        y = torch.tanh(model[0](x) @ queue.T).cos()
        queue.copy_(x)
        return y.sum()

    tape = Tape()
    with tape.forward([Range(0, len(names_of(forward)))]):
        loss = forward()
    with pytest.raises(ModifiedArgument):
        loss.backward()


def test_state_written_before_it_is_read_is_replayed():
    model, x = layers()
    count = torch.zeros(8)

    def forward():
        y = torch.tanh(model[0](x))
        count.copy_(y.detach().sum(0))
        return (y * (count / 2)).cos().sum(), [*model.parameters(), count]

    names = names_of(forward)
    check(forward, [(0, len(names))])


def test_an_in_place_change_after_saving_is_the_error_of_eager():
    weight = torch.randn(8, 8, requires_grad=True)

    def forward():
        y = torch.exp(weight * 1)
        return y.mul_(2).sum()

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        forward().backward()
    with Tape().forward([Range(0, 3)]):
        loss = forward()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_section_that_is_entered_by_what_it_writes_joins_the_range_around_it():
    weight = torch.randn(8, 8, requires_grad=True)

    def forward():
        y = torch.tanh(weight * 2) * 3
        z = y + 1
        y.relu_()
        return (y + z).exp().sum(), [weight]

    assert names_of(forward)[2:6] == ["Tensor.mul", "Tensor.add", "Tensor.relu_", "Tensor.add"]
    tape = Tape()
    with pytest.warns(RegionKept, match="writes in place what entered"):
        taped = run(forward, tape, [Range(0, 7), Range(3, 6)])
    assert taped == run(forward)
    whole, inner = tape.report()
    assert (whole.replays, inner.replays) == (1, 0)
    assert sum(count for _, count in inner.kept) == 1


def test_another_path_is_kept_and_told_once():
    model, x = layers()

    def forward(other):
        y = model[1](model[0](x))
        y = torch.sin(y) if other else torch.cos(y)
        return torch.tanh(model[3](torch.exp(y))).sum(), list(model.parameters())

    names = names_of(lambda: forward(False))
    plan = Ranges([Range(0, 2, "first"), Range(1, 2, "inner"), Range(2, 6, "last")], names)
    tape = Tape()
    assert run(lambda: forward(False), tape, plan) == run(lambda: forward(False))
    with pytest.warns(RegionKept, match=r"call 2 of the forward is sin where the plan has cos"):
        taped = run(lambda: forward(True), tape, plan)
    assert taped == run(lambda: forward(True))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run(lambda: forward(True), tape, plan)
    first, _, last = tape.report()
    assert (first.forwards, last.forwards, last.replays) == (3, 1, 1)
    assert [count for _, count in last.kept] == [2]
    assert first.replays == 3


def test_an_exception_in_the_forward_leaves_nothing_behind():
    model, x = layers()
    tape = Tape()

    def fails():
        with tape.forward([Range(0, 9), Range(1, 5)]):
            model(x)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fails()
    assert not torch._C._len_torch_function_stack()
    check(lambda: (model(x).sum(), list(model.parameters())), [(0, 5)])


def test_an_exception_in_a_replay_fills_nothing_and_restores():
    model, x = layers()
    fail = []

    @torch.library.custom_op("tape_tests::maybe", mutates_args=())
    def maybe(x: torch.Tensor) -> torch.Tensor:
        if fail:
            raise ValueError("no more")
        return x.clone()

    def setup(ctx, inputs, output):
        pass

    maybe.register_autograd(lambda ctx, gradient: gradient, setup_context=setup)

    def forward():
        return maybe(model(x)).cos().sum()

    names = names_of(forward)
    torch.manual_seed(3)
    with Tape().forward([Range(0, len(names))]):
        loss = forward()
    fail.append(1)
    state = torch.get_rng_state()
    with pytest.raises(ValueError, match="no more"):
        loss.backward(retain_graph=True)
    assert torch.equal(torch.get_rng_state(), state)
    assert not torch.is_autocast_enabled("cpu")
    fail.clear()
    model.zero_grad()
    loss.backward()
    found = as_bytes([p.grad for p in model.parameters()])
    model.zero_grad()
    torch.manual_seed(3)
    forward().backward()
    assert as_bytes([p.grad for p in model.parameters()]) == found


def test_a_kernel_that_is_not_deterministic_is_refused():
    model, x = layers()
    drift = []

    @torch.library.custom_op("tape_tests::drifting", mutates_args=())
    def drifting(x: torch.Tensor) -> torch.Tensor:
        drift.append(1)
        return x * float(len(drift))

    drifting.register_autograd(lambda ctx, gradient: gradient, setup_context=lambda ctx, inputs, output: None)
    for guard in ("first", "always"):
        with Tape(guard=guard).forward([Range(0, 7)]):
            loss = drifting(model(x)).cos().sum()
        with pytest.raises(ReplayDivergence, match="has another value when recomputed") as e:
            loss.backward()
        assert "test_faults.py" in e.value.line
        assert e.value.thing == "saved tensor 0 of call 6 (Tensor.cos)"
        assert e.value.gradients_touched


def test_a_shape_that_differs_is_refused_without_any_guard():
    model, x = layers()
    rows = [4]

    @torch.library.custom_op("tape_tests::shrinking", mutates_args=())
    def shrinking(x: torch.Tensor) -> torch.Tensor:
        return x[: rows[0]].clone()

    def backward(ctx, gradient):
        return gradient

    shrinking.register_autograd(backward, setup_context=lambda ctx, inputs, output: None)
    with Tape(guard="off").forward([Range(0, 7)]):
        loss = shrinking(model(x)).cos().sum()
    rows[0] = 2
    with pytest.raises(ReplayDivergence, match=r"was \[4, 8\] and is \[2, 8\]"):
        loss.backward()
