"""Steps with and without a tape, compared bit by bit; and the traces that say which ranges are legal."""

from __future__ import annotations

import random
from typing import Any

import torch
from comparing import as_bytes
from torch import nn

import regrad.torch as rt
from regrad.core.trace import Trace
from regrad.torch.record import Recorder
from regrad.torch.store import persistent_tensors
from regrad.torch.tape import CallCounter, Range, Ranges, Tape


def run(forward: Any, tape: Tape | None = None, ranges: Any = (), moves: Any = (), *, seed: int = 11) -> dict[str, Any]:
    """Forward and backward of ``forward() -> (loss, tensors whose gradients and bytes count)``."""
    torch.manual_seed(seed)
    random.seed(seed)
    getattr(forward, "reset", lambda: None)()
    if tape is None:
        loss, watched = forward()
    else:
        with tape.forward(ranges, moves):
            loss, watched = forward()
    loss.backward()
    result = {
        "loss": as_bytes(loss),
        "gradients": [None if one.grad is None else as_bytes(one.grad) for one in watched],
        "bytes": [as_bytes(one) for one in watched],
        "generator": as_bytes(torch.get_rng_state()),
    }
    for one in watched:
        one.grad = None
    return result


def of_step(step: rt.Step) -> Any:
    """A forward for :func:`run` from a step. Every run finds the buffers as they are now."""
    buffers = [(buffer, buffer.clone()) for buffer in step.model.buffers()]

    def forward() -> Any:
        return step.compute_loss(), [*step.model.parameters(), *step.model.buffers()]

    def reset() -> None:
        for buffer, data in buffers:
            buffer.copy_(data)

    forward.reset = reset  # type: ignore[attr-defined]
    return forward


def layers() -> tuple[nn.Sequential, torch.Tensor]:
    """Five small layers, one of which draws, and what they are called with."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Dropout(0.3), nn.Linear(8, 8), nn.Tanh())
    return model, torch.randn(4, 8)


def names_of(forward: Any) -> list[str]:
    """The names of the torch calls of a forward."""
    counter = CallCounter()
    with counter:
        forward()
    return counter.names


class Tracing(Recorder):
    """A recorder that runs under a counter: the ordinal of the call of each operation, -1 outside calls."""

    def __init__(self, counter: CallCounter) -> None:
        super().__init__()
        self.counter = counter
        self.ordinals: list[int] = []

    def _note(self, *args: Any) -> None:
        self.ordinals.append(self.counter.current)
        super()._note(*args)


def trace_of(step: rt.Step) -> tuple[Trace, list[int], list[str]]:
    """The forward's trace, the ordinal of each of its operations, and the names of its calls."""
    counter = CallCounter()
    tracing = Tracing(counter)
    for tensor, category in persistent_tensors(step):
        tracing.register(tensor, category)
    with tracing, counter:
        loss = step.compute_loss()
    del loss
    return tracing.finish(source="real", gradients="fresh", device="cpu"), tracing.ordinals, counter.names


def operations_of(ordinals: list[int], one: Range) -> tuple[int, int]:
    """The interval of operations of a range of calls; an empty one where the calls make none."""
    inside = [at for at, ordinal in enumerate(ordinals) if one.start <= ordinal < one.stop]
    return (inside[0], inside[-1] + 1) if inside else (0, 0)


def random_ranges(rng: random.Random, count: int) -> list[Range]:
    """Random laminar ranges over ``count`` calls, up to four deep."""
    found: list[Range] = []

    def fits(start: int, stop: int) -> bool:
        return not any(
            (one.start, one.stop) == (start, stop)
            or (start < one.stop and one.start < stop and not _nested(one, start, stop))
            for one in found
        )

    def fill(start: int, stop: int, depth: int) -> None:
        for _ in range(rng.randint(1, 3)):
            if stop - start < 2 or depth > 3:
                return
            first = rng.randint(start, stop - 1)
            last = rng.randint(first + 1, min(stop, first + rng.choice((3, 10, 40, 200))))
            if fits(first, last):
                found.append(Range(first, last))
                fill(first, last, depth + 1)

    fill(0, count, 0)
    return found


def _nested(one: Range, start: int, stop: int) -> bool:
    return (one.start <= start and stop <= one.stop) or (start <= one.start and one.stop <= stop)


def check(forward: Any, ranges: list[tuple[int, int]], *, times: int = 2, guard: str = "first") -> Tape:
    """Run eagerly and under a tape, both ``times`` times; all bytes must be equal and every range must be replayed."""
    names = names_of(forward)
    plan, tape = Ranges([Range(*one) for one in ranges], names), Tape(guard=guard)
    for turn in range(times):
        assert run(forward, tape, plan, seed=turn) == run(forward, seed=turn)
    for report in tape.report():
        assert report.forwards == times
        assert report.replays == times
        assert report.kept == ()
    return tape


def spans(names: list[str], *wanted: str) -> list[int]:
    """Where the sequence ``wanted`` begins among the names."""
    return [at for at in range(len(names)) if tuple(names[at : at + len(wanted)]) == wanted]
