"""Training several ways side by side: steps in turns, each with its own generator state, and what they leave behind."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.utils import _pytree as pytree

from regrad.demo.corpus import Batches
from regrad.torch.step import Step

TRAIN_SEED = 40


def first_generator_state() -> torch.Tensor:
    """The state of the CPU generator in which every run begins to train."""
    return torch.Generator().manual_seed(TRAIN_SEED).get_state()


@dataclass
class Run:
    """One way to train: a step, its losses, its seconds (process CPU), and the generator state between its steps."""

    name: str
    step: Step
    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    generator: torch.Tensor = field(default_factory=first_generator_state)

    def advance(self, batch: tuple[torch.Tensor, torch.Tensor]) -> None:
        """Train one step on ``batch`` as if no other run were there."""
        outside = torch.get_rng_state()
        torch.set_rng_state(self.generator)
        try:
            self.step.batch = batch
            began = time.process_time()
            loss = self.step()
            self.seconds.append(time.process_time() - began)
            self.losses.append(loss.item())
            self.generator = torch.get_rng_state()
        finally:
            torch.set_rng_state(outside)

    @property
    def median_seconds(self) -> float:
        """Of its steps but the first, which makes the optimizer's state."""
        return statistics.median(self.seconds[1:] or self.seconds)


def train_in_turns(runs: list[Run], batches: Batches, steps: int, progress: Callable[[float], None]) -> None:
    """Train every run for ``steps`` steps, one step of each at a time, beginning with another one in each round."""
    for index in range(steps):
        batch = batches[index]
        for turn in range(len(runs)):
            runs[(index + turn) % len(runs)].advance(batch)
        progress((index + 1) / steps)


@dataclass(frozen=True, slots=True)
class Identity:
    """Whether two runs left the same bytes."""

    losses: bool
    gradients: bool
    weights: bool
    optimizer: bool
    generator: bool


def compare(run: Run, reference: Run) -> Identity:
    """Compare all that training left, bit for bit; no tolerance."""
    return Identity(
        losses=run.losses == reference.losses,
        gradients=same_bytes(gradients(run.step.model), gradients(reference.step.model)),
        weights=same_bytes(run.step.model.state_dict(), reference.step.model.state_dict()),
        optimizer=same_bytes(optimizer_state(run.step), optimizer_state(reference.step)),
        generator=same_bytes(run.generator, reference.generator),
    )


def gradients(model: nn.Module) -> dict[str, torch.Tensor | None]:
    """The gradient of each parameter, by name; None where there is none."""
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def optimizer_state(step: Step) -> object:
    """What the step's optimizer holds; nothing without one."""
    return step.optimizer.state_dict() if step.optimizer is not None else {}


def same_bytes(first: object, second: object) -> bool:
    """Whether two trees have the same shape and the same leaves, tensors compared as bytes (a NaN equals itself)."""
    (ours, our_shape), (theirs, their_shape) = pytree.tree_flatten(first), pytree.tree_flatten(second)
    return our_shape == their_shape and all(_same_leaf(a, b) for a, b in zip(ours, theirs, strict=True))


def _same_leaf(first: object, second: object) -> bool:
    if not isinstance(first, torch.Tensor) or not isinstance(second, torch.Tensor):
        return type(first) is type(second) and first == second
    if first.dtype != second.dtype or first.shape != second.shape:
        return False
    return torch.equal(_bytes(first), _bytes(second))


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


class Count:
    """How often something ran."""

    calls = 0


@contextmanager
def counting_forwards(kind: type[nn.Module]) -> Iterator[Count]:
    """Count every run of ``kind.forward`` in the body, replays included.

    The method of the class is wrapped, not a hook hung in: hooks may be silenced while a block is replayed.
    """
    original = kind.forward
    count = Count()

    def forward(self: nn.Module, *args: object, **kwargs: object) -> object:
        count.calls += 1
        return original(self, *args, **kwargs)

    kind.forward = forward
    try:
        yield count
    finally:
        kind.forward = original
