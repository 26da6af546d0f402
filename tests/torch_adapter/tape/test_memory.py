"""Nothing from inside a range lives between forward and backward, nothing leaks, and replays do the predicted work."""

from __future__ import annotations

import gc
import weakref

import torch
import torch.nn.functional as F
from taping import names_of
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from regrad.torch.regions.kept import retained_bytes
from regrad.torch.tape import Range, Tape


def live_tensors():
    gc.collect()
    return sum(issubclass(type(one), torch.Tensor) for one in gc.get_objects())


def test_interior_tensors_are_dead_between_forward_and_backward():
    weight, x = torch.randn(8, 8, requires_grad=True), torch.randn(4, 8)
    seen = {}

    def forward(x):
        y = torch.tanh(x @ weight)
        seen["tanh"] = weakref.ref(y.untyped_storage())
        z = F.gelu(y)
        seen["gelu"] = weakref.ref(z.untyped_storage())
        mask = z > 0
        seen["mask"] = weakref.ref(mask.untyped_storage())
        return (z * mask) @ weight

    names = names_of(lambda: forward(x))
    forward(x).sum()
    eager = forward(x)
    assert seen["tanh"]() is not None
    assert seen["mask"]() is not None
    del eager
    gc.disable()  # not by luck of the collector
    try:
        tape = Tape()
        with tape.forward([Range(0, len(names))]):
            out = forward(x)
        assert [one() for one in seen.values()] == [None] * 3
        recording = weakref.ref(_holder(out).recording)
        assert recording() is not None
        out.sum().backward()
        assert tape.report()[0].replays == 1
        del out
        assert recording() is None
    finally:
        gc.enable()


def _holder(tensor):
    """The holder of a saved tensor that is computed inside."""
    seen, left = set(), [tensor.grad_fn]
    while left:
        node = left.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        for name in dir(node):
            if name.startswith("_raw_saved"):
                raw = getattr(node, name)
                for one in raw if isinstance(raw, (list, tuple)) else [raw]:
                    data = getattr(one, "data", None)
                    if data is not None and getattr(data, "recording", None) is not None:
                        return data
        left += [parent for parent, _ in node.next_functions]
    return next(one for one in gc.get_objects() if type(one).__name__ == "Holder" and one.recording is not None)


def test_what_only_unneeded_calls_hold_is_let_go():
    weight, skip = torch.randn(8, 8, requires_grad=True), torch.randn(4, 8)

    def forward(skip):
        y = torch.tanh((skip * 1) @ weight)
        other = skip * 3  # an operand of the last sum: outside the range, and needed by no replay
        storage = weakref.ref(other.untyped_storage())
        with tape.forward([Range(0, 2)]):
            out = F.gelu(y) + other
        del other
        return out, storage

    tape = Tape()
    out, storage = forward(skip)
    assert storage() is None
    out.sum().backward()
    assert tape.report()[0].calls_replayed == 0  # gelu saves its argument, which is from outside
    assert tape.report()[0].replays == 0


def test_no_leak_over_steps():
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Dropout(0.1)) for _ in range(4)))
    x, tape = torch.randn(4, 8), Tape()

    def step():
        with tape.forward([Range(1, 11), Range(3, 6), Range(6, 9)]):
            loss = model(x).sum()
        loss.backward()
        model.zero_grad()

    for _ in range(3):
        step()
    tensors, kept = live_tensors(), retained_bytes()
    for _ in range(20):
        step()
    assert live_tensors() == tensors
    assert retained_bytes() == kept
    assert [report.replays for report in tape.report()] == [23] * 3
    # Graphs that are thrown away without a backward leave nothing either.
    for _ in range(5):
        with tape.forward([Range(1, 11), Range(3, 6)]):
            model(x)
    assert live_tensors() == tensors
    assert retained_bytes() == kept


def test_products_of_replays_are_counted_exactly():
    torch.manual_seed(0)
    layers = nn.ModuleList(nn.Linear(16, 16, bias=False) for _ in range(6))
    x = torch.randn(4, 16)
    one = 2 * 4 * 16 * 16

    def products(ranges):
        tape = Tape()
        with FlopCounterMode(display=False) as counter:
            with tape.forward(ranges):
                y = x
                for layer in layers:
                    y = torch.tanh(layer(y))
            y.sum().backward()
        assert all(report.replays == 1 for report in tape.report())
        return counter.get_total_flops() // one

    eager = 6 + 6 + 5  # forward, weights, inputs; the first has no gradient for its input
    assert products([]) == eager
    assert products([Range(0, 12)]) == eager + 6  # tanh saves its result
    assert products([Range(1, 11)]) == eager + 4 + 0  # from tanh to the last linear: that one is not needed
    assert products([Range(0, 6), Range(6, 12)]) == eager + 6
    # An outer replay runs what its sections need of it; each section then runs again.
    assert products([Range(0, 12), Range(0, 4), Range(4, 8), Range(8, 12)]) == eager + 4 + 6
    assert products([Range(2, 12), Range(6, 8)]) == eager + 5 + 1


def test_the_last_product_of_a_range_is_not_computed_for_a_copy_that_it_saves():
    query = torch.randn(2, 3, 4, 8, requires_grad=True)
    value = torch.randn(2, 8, 3, 8, requires_grad=True)

    def forward():
        return torch.softmax(query, -1) @ (value * 1).transpose(1, 2)  # the product takes a copy of that view

    tape = Tape()
    with FlopCounterMode(display=False) as counter:
        with tape.forward([Range(0, 4)]):
            out = forward()
        done = counter.get_total_flops()
        out.sum().backward()
    assert counter.get_total_flops() == 3 * done  # one forward, two products of the backward, none of the replay
    assert tape.report()[0].calls_replayed == 3 + 1


def test_a_tensor_that_only_lends_its_shape_is_let_go():
    weight, x = torch.randn(8, 8, requires_grad=True), torch.randn(4, 8)

    def forward(x, like):
        y = torch.sin(torch.tanh(x @ weight).view_as(like).reshape_as(x))
        return (y * torch.ones(1, 8).expand_as(y)) @ weight

    lender = [torch.zeros(2, 16)]  # not made by the range: it would be held if a call used it
    names = names_of(lambda: forward(x, *lender))
    assert {"Tensor.view_as", "Tensor.reshape_as", "Tensor.expand_as"} <= set(names)
    forward(x, *lender).sum().backward()
    eager, weight.grad = weight.grad, None
    tape = Tape()
    with tape.forward([Range(0, len(names))]):
        out = forward(x, *lender)
    lent = weakref.ref(lender.pop().untyped_storage())
    gc.collect()
    assert lent() is None
    out.sum().backward()
    assert tape.report()[0].replays == 1
    assert torch.equal(weight.grad, eager)
