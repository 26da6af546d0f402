"""What it costs in time to copy state out, to put it back, and to watch a call's operations while a log is written.

Measured once a process on the device where the step runs (about 0.3 s), for steps that write large state; for a device that
is not here its data sheet, as for everything else in such a plan.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from regrad.core.state import Bandwidth
from regrad.memory.devices import BANDWIDTH_SHARE, LAUNCH_SECONDS, Device
from regrad.torch.regions.ambient import unseen
from regrad.torch.regions.old import Old
from regrad.torch.regions.watch import Quiet, Watch

FAR_BYTES = 32 << 20
"""From here on an allocator asks the system for every copy, and each of its pages is touched for the first time."""
_NEAR, _FAR, _ROWS = 8 << 20, 40 << 20, 4
_RUNS = 3
_OPERATIONS = 64
WATCH_SECONDS = 4e-6
"""For a device that is not here: what watching an operation costs the host."""


@dataclass(frozen=True, slots=True)
class StateCosts:
    """near, far       bandwidth of copies out of state and into it, of less than :data:`FAR_BYTES` and of more
    copy_seconds    each copy takes beside its bytes
    watch_seconds   a watched operation takes longer
    """

    near: Bandwidth = field(default_factory=Bandwidth)
    far: Bandwidth = field(default_factory=Bandwidth)
    copy_seconds: float = 0.0
    watch_seconds: float = 0.0

    def out(self, nbytes: int, copies: int = 1) -> float:
        """Seconds of ``copies`` copies out, ``nbytes`` in all."""
        return copies * self.copy_seconds + nbytes / self._rate(nbytes, copies).gather_bytes_per_second

    def back(self, nbytes: int, copies: int = 1) -> float:
        """Seconds of ``copies`` copies in, ``nbytes`` in all."""
        return copies * self.copy_seconds + nbytes / self._rate(nbytes, copies).scatter_bytes_per_second

    def bandwidth(self, nbytes: int) -> Bandwidth:
        """Bytes a second of copies of ``nbytes`` each, all that they take counted."""
        if not self.copy_seconds or not nbytes:
            return self._rate(nbytes, 1)
        return Bandwidth(nbytes / self.out(nbytes), nbytes / self.back(nbytes))

    def _rate(self, nbytes: int, copies: int) -> Bandwidth:
        return self.near if nbytes < FAR_BYTES * max(1, copies) else self.far


def of_device(device: Device) -> StateCosts:
    """By the data sheet: a copy reads and writes each byte once."""
    rate = BANDWIDTH_SHARE * device.bandwidth_bytes / 2
    return StateCosts(Bandwidth(rate, rate), Bandwidth(rate, rate), LAUNCH_SECONDS, WATCH_SECONDS)


@functools.cache
def measured(device: torch.device) -> StateCosts:
    """Measured here with the engine's own copies. Takes 80 MiB for a moment; draws nothing."""
    if device.type not in ("cpu", "cuda"):
        return StateCosts()
    near, far = _bandwidth(_NEAR, device), _bandwidth(_FAR, device)
    with torch.no_grad():
        few = torch.zeros(64, 64, device=device)
        rows = Old(few, rows=(0, torch.arange(_ROWS, device=device)))
        copy = (_median(rows.now, device) + _median(rows.put, device)) / 2
        watch = max(0.0, _median(_watched(Watch(whole=set())), device) - _median(_watched(Quiet()), device))
    return StateCosts(near, far, copy, watch / _OPERATIONS)


def _bandwidth(nbytes: int, device: torch.device) -> Bandwidth:
    with unseen(), torch.no_grad():
        old = Old(torch.zeros(nbytes, dtype=torch.uint8, device=device), whole=True)
        return Bandwidth(nbytes / _median(old.now, device), nbytes / _median(old.put, device))


def _watched(mode: Any) -> Callable[[], object]:
    one = torch.zeros(1)

    def run() -> None:
        with mode:
            for _ in range(_OPERATIONS):
                one.add(one)

    return run


def _median(run: Callable[[], object], device: torch.device) -> float:
    clock = time.perf_counter if device.type == "cuda" else time.process_time  # as the clock of operations has it
    seconds = []
    for _ in range(_RUNS + 1):
        began = clock()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(clock() - began)
    return max(statistics.median(seconds[1:]), 1e-9)
