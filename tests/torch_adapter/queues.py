"""Small models whose blocks share one large queue, and planners that force an engine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import nn

import regrad.torch as rt
from regrad.core.chain import KEEP, Problem
from regrad.core.plan import Solution, Status, one_level
from regrad.core.state_options import only
from regrad.planners import Optimal
from regrad.planners.base import price

WIDTH, ROWS, WRITTEN = 64, 16_384, 16  # a queue of 4 MiB, 4 KiB written a block


class Queue(nn.Module):
    """Rows, and where the next ones go."""

    def __init__(self, rows: int = ROWS) -> None:
        super().__init__()
        self.register_buffer("rows", torch.randn(rows, WIDTH))
        self.at = 0


class Block(nn.Module):
    """Reads some rows and writes "rows" by an index, a "slice", or the "dense" whole."""

    def __init__(self, queue: Queue, mode: str) -> None:
        super().__init__()
        self.queue, self.mode = queue, mode
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        queue = self.queue
        h = torch.tanh(x + queue.rows[:WRITTEN].clone().mean(0))
        new = h.detach()[:WRITTEN]
        if self.mode == "rows":
            queue.rows.index_copy_(0, (torch.arange(WRITTEN) + queue.at) % len(queue.rows), new)
        elif self.mode == "slice":
            queue.rows[queue.at : queue.at + WRITTEN] = new
        else:
            queue.rows.mul_(0.99).add_(0.01 * new.mean())
        queue.at = (queue.at + WRITTEN) % len(queue.rows)
        return x + self.down(torch.relu(self.up(h)))


class Encoder(nn.Module):
    """Blocks around one queue; with ``shared`` one block is called again and again."""

    def __init__(self, mode: str, blocks: int = 4, *, shared: bool = False) -> None:
        super().__init__()
        queue = Queue()
        self.count = blocks
        self.blocks = nn.ModuleList(Block(queue, mode) for _ in range(1 if shared else blocks))
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index in range(self.count):
            x = self.blocks[index % len(self.blocks)](x)
        return self.head(x)


def loss_of(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    """A scalar."""
    return model(batch).square().mean()


def make_step(mode: str, *, shared: bool = False, rows: int = 256, blocks: int = 4) -> rt.Step:
    """A step of a fresh model, always the same one. ``rows`` of the batch: activations grow with them."""
    torch.manual_seed(0)
    model = Encoder(mode, blocks, shared=shared)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    return rt.Step(model, torch.randn(rows, WIDTH), loss_of, optimizer)


def train(step: rt.Step, steps: int = 3) -> list[torch.Tensor]:
    """All that ``steps`` steps leave: losses, gradients, weights, buffers, the generator, the pointer."""
    left = []
    for _ in range(steps):
        step.optimizer.zero_grad(set_to_none=True)
        loss = step.loss(step.model, step.batch)
        loss.backward()
        left += [loss.detach().clone(), *(p.grad.clone() for p in step.model.parameters())]
        step.optimizer.step()
    left += [t.detach().clone() for t in (*step.model.parameters(), *step.model.buffers())]
    return [*left, torch.get_rng_state(), torch.tensor(step.model.blocks[0].queue.at)]


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    """Whether all bytes are equal."""
    return len(one) == len(other) and all(map(torch.equal, one, other))


def by(engine: str) -> Callable[[Problem, int], Solution]:
    """A planner that recomputes what it can, and knows one engine."""

    def planner(problem: Problem, budget: int) -> Solution:
        chain = only(problem.chain, (engine,))
        assert chain is not None
        again = [tuple(o for o in segment.options if o.recomputes) or segment.options for segment in chain.segments]
        segments = tuple(
            replace(segment, options=options) for segment, options in zip(chain.segments, again, strict=True)
        )
        return Optimal()(replace(problem, shape=replace(chain, segments=segments)), budget)

    return planner


def fixed(options: list[str]) -> Any:
    """A planner of one plan."""

    def planner(problem: Problem, budget: int) -> Solution:
        priced = price(one_level(options), problem)
        return Solution(
            Status.FEASIBLE, priced.plan, 0.0, priced.peak_bytes, priced.added_seconds, priced.peak_bytes, "fixed"
        )

    return planner


def option(profile: rt.Profile, index: int, engine: str | None) -> str:
    """The name of the option of segment ``index`` that brings the queue back by ``engine``; None keeps."""
    if engine is None:
        return KEEP
    for one in profile.stateful.chain.segments[index].options:
        if [use.engine for use in one.states] == [engine]:
            return one.name
    raise AssertionError(f"segment {index} has no {engine}")


def options(profile: rt.Profile, engines: list[str | None]) -> list[str]:
    """The option of every segment; those after the given ones are kept."""
    engines = engines + [None] * (len(profile.pieces) - len(engines))
    return [option(profile, index, engine) for index, engine in enumerate(engines)]
