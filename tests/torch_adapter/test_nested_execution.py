"""Nested plans really run: forwards of the planned step counted exactly, and the eager bytes, on chains of many layers.

A layer is tanh, then a product. Both save what tanh gives, so the replay of a span of m layers from its kept input takes
m - 1 products: the unit chain of the literature, in which a kept layer holds one value.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from regrad.core.chain import KEEP, RECOMPUTE, Chain, Option, Problem, Segment
from regrad.core.plan import Choices
from regrad.core.schedule import Recompute, schedule_of
from regrad.core.simulate import simulate
from regrad.planners import Binomial, Optimal, SqrtN
from regrad.torch.tape.ranges import Range
from regrad.torch.tape.tape import Tape

WIDTH, BATCH = 8, 4


class Layers(nn.Module):
    """``count`` layers of tanh and a product."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.products = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for product in self.products:
            x = product(torch.tanh(x))
        return x.square().sum()


def units(count: int) -> Problem:
    """Layers that hold one value each and take one forward; the last one of a span is cut short before its product."""
    options = (
        Option(KEEP, 1, 0, holds_input=True),
        Option(RECOMPUTE, 1, 0, holds_input=True, recomputes=True),
    )
    segment = Segment("layer", options, boundary_bytes=1, forward_seconds=1.0, tail_seconds=0.0)
    return Problem(Chain((segment,) * count))


def ranges_of(choices: Choices) -> list[Range]:
    """Spans as ranges of torch calls: layer i is calls 2 i and 2 i + 1. What a kept layer saves its range keeps."""
    found = []
    for choice in choices:
        if choice.is_span:
            found.append(Range(2 * choice.start, 2 * choice.stop))
            found += ranges_of(choice.inner)
    return found


class Flops(TorchDispatchMode):
    """Floating point operations by torch's own formulas. Its ``FlopCounterMode`` also hooks modules with torch calls of
    its own, which would be numbered among the model's."""

    total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        formula = flop_registry.get(func._overloadpacket)
        if formula is not None:
            self.total += formula(*args, **(kwargs or {}), out_val=result)
        return result


def products(model: Layers, x: torch.Tensor, ranges: list[Range]) -> tuple[int, list[bytes]]:
    """How many products one step does in forward and replays, and the bytes of its gradients."""
    model.zero_grad()
    tape = Tape()
    with Flops() as counter:
        with tape.forward(ranges):
            loss = model(x)
        loss.backward()
    each = 2 * BATCH * WIDTH * WIDTH
    count, rest = divmod(counter.total, each)
    assert rest == 0
    gradients = [p.grad.numpy().tobytes() for p in model.parameters() if p.grad is not None]
    return count, [loss.detach().numpy().tobytes(), *gradients]


def plans(count: int) -> dict[str, Choices]:
    problem = units(count)
    kept = simulate(tuple(Optimal()(problem, 10 * count).plan or ()), problem.chain).peak_bytes
    slots = max(3, round(kept**0.5))
    found = {
        "sqrt n": SqrtN()(problem, kept).plan,
        "binomial": Binomial()(problem, slots).plan,
        "optimal": Optimal(nested=True)(problem, slots).plan,
        "optimal, half": Optimal(nested=True)(problem, kept // 2).plan,
    }
    return {name: plan for name, plan in found.items() if plan is not None}


@pytest.mark.parametrize("count", [16, 64, 256])
def test_forwards_are_those_of_the_schedule(count: int) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model, x = Layers(count), torch.randn(BATCH, WIDTH, requires_grad=True)
    eager, expected = products(model, x, [])
    chain = units(count).chain
    found = plans(count)
    assert {"binomial", "optimal", "optimal, half"} <= set(found)
    for name, plan in found.items():
        again = sum(
            1 for action in schedule_of(plan, chain).actions if isinstance(action, Recompute) and not action.tail
        )
        assert again == simulate(plan, chain).added_seconds
        done, bytes_ = products(model, x, ranges_of(plan))
        assert done - eager == again, name
        assert again > 0
        assert bytes_ == expected
