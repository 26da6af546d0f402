"""What recording a torch call and running it again takes beside its kernels, on this machine."""

from __future__ import annotations

import time
from functools import cache

import torch

from regrad.torch.tape.ranges import Range
from regrad.torch.tape.tape import Tape

_CALLS, _TRIES = 200, 5


@cache
def seconds_per_call() -> float:
    """Process CPU seconds that one recorded and replayed call adds, some 40 µs: a chain of tiny calls, in one range and
    without, the fastest of a few tries each. Measured once, in some 50 ms."""
    with torch.enable_grad():
        x = torch.ones(1, requires_grad=True)
        tape, ranges = Tape(guard="off"), [Range(0, _CALLS)]
        taped = min(_seconds(x, tape, ranges) for _ in range(_TRIES))
        return max(0.0, taped - min(_seconds(x, tape, []) for _ in range(_TRIES))) / _CALLS


def _seconds(x: torch.Tensor, tape: Tape, ranges: list[Range]) -> float:
    began = time.process_time()
    with tape.forward(ranges):
        y = x
        for _ in range(_CALLS):
            y = torch.sin(y)
    torch.autograd.grad(y, x)
    return time.process_time() - began
