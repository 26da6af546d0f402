"""The honest peak and the seconds of a training step.

On CPU the peak is the running sum of the torch profiler's ``[memory]`` events, one for every allocation and every free
that goes through torch's CPU allocator. No dispatch mode is involved, so the program that is measured is the program
that runs. Not counted is what a kernel takes from ``malloc`` by itself (oneDNN and MKL scratch): about 1 % on the
workloads tried. How the profiler's own drops are closed stands in :mod:`regrad.torch.ledger`.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from regrad.core.errors import UsageError
from regrad.core.units import format_bytes, format_seconds
from regrad.torch.ledger import Peak, Recording
from regrad.torch.step import FRESH, Step

Runnable = Callable[[], object]


@dataclass(frozen=True, slots=True)
class Measurement:
    """What one step really took.

    peak_bytes            the most that was live at one moment of the measured step. On CUDA: by the sizes that were
                          asked for, before the allocator rounds them
    baseline_bytes        what was live when the measured step began; counted in peak_bytes
    step_seconds          median process CPU seconds of a step, all threads together; on CUDA the same as wall_seconds
    wall_seconds          median seconds of a step on the clock
    steps                 how many steps were timed
    device                "cpu" or "cuda"
    counted               what the baseline was counted from: "storages of the step", "storages given", "nothing before
                          the step", "from the start" or "allocator statistics"
    allocated_peak_bytes  CUDA only: the same peak with the allocator's rounding
    reserved_peak_bytes   CUDA only: the most that the allocator held from the device
    """

    peak_bytes: int
    baseline_bytes: int
    step_seconds: float
    wall_seconds: float
    steps: int
    device: str
    counted: str
    allocated_peak_bytes: int | None = None
    reserved_peak_bytes: int | None = None

    def __str__(self) -> str:
        text = (
            f"peak {format_bytes(self.peak_bytes)}, of which {format_bytes(self.baseline_bytes)} were there before the "
            f"step; {format_seconds(self.wall_seconds)} a step ({format_seconds(self.step_seconds)} of CPU time)"
        )
        if self.allocated_peak_bytes is not None and self.reserved_peak_bytes is not None:
            text += f"; allocated {format_bytes(self.allocated_peak_bytes)}"
            text += f", reserved {format_bytes(self.reserved_peak_bytes)}"
        return text


@dataclass(frozen=True, slots=True)
class Pair:
    """Two steps timed in turns: median seconds of each (process CPU; on CUDA wall) and second over first."""

    first_seconds: float
    second_seconds: float
    ratio: float
    rounds: int


def measure(
    step: Step | Runnable, *, steps: int = 3, warmup: int = 1, persistent: Any = (), device: str | None = None
) -> Measurement:
    """Measure the peak memory and the seconds of ``step``.

    ``step`` is an :class:`~regrad.torch.Step` or any callable without arguments. It is *run*, ``warmup + 1 + steps``
    times: the warm-up and one step under the profiler, then ``steps`` steps by the clock, without it. The model trains
    meanwhile.

    The baseline, what exists before the step, is for a Step the sum of the unique storages of its parameters, buffers,
    other tensors on its modules, gradients (if it keeps them), optimizer state and batch. A bare callable has only what
    ``persistent`` names: modules, optimizers, tensors or containers of those; left out, the peak is what the step
    allocates above whatever was there. To have everything counted by the profiler itself, use
    :func:`measure_from_start`.

    ``device`` is the Step's own, else "cpu" unless given. Raises :class:`UsageError` for counts below one step
    (``warmup`` may be 0: then the first step is measured), for something that cannot be called, and if a profiler is
    running already, and for a device that is neither "cpu" nor "cuda". An exception of the step passes through.
    Not for: memory that kernels take from ``malloc`` by themselves, and allocations of threads that the step starts.
    """
    _check(step, warmup, steps)
    kind = device or (step.device.type if isinstance(step, Step) else "cpu")
    if kind not in ("cpu", "cuda"):
        raise UsageError(f"memory on {kind!r} cannot be measured; on cpu and cuda it can")
    if kind == "cuda":
        return _measure_cuda(step, steps, warmup)
    given = "nothing before the step" if isinstance(persistent, tuple) and not persistent else "storages given"
    peak = measure_peak(step, warmup=warmup, persistent=persistent)
    return _finish(peak, step, steps, "storages of the step" if isinstance(step, Step) else given)


def measure_from_start(factory: Callable[[], Step | Runnable], *, steps: int = 3, warmup: int = 1) -> Measurement:
    """As :func:`measure`, with the profiler started before the model exists (CPU).

    ``factory`` makes the model, the optimizer and all else and returns the step, a :class:`~regrad.torch.Step` or a
    callable. Every byte of the baseline is then an allocation that the profiler saw, and nothing has to be known about
    where the step keeps its tensors. What ``factory`` merely hands on, and was made before, is not seen.
    """
    _check(factory, warmup, steps)
    with Recording(()) as recording:
        step = factory()
        _check(step, warmup, steps)
        recording.run(step, warmup)
    return _finish(recording.peak(), step, steps, "from the start")


def measure_peak(step: Step | Runnable, *, warmup: int = 1, persistent: Any = ()) -> Peak:
    """The peak alone, on CPU: runs ``step`` ``warmup + 1`` times under the profiler. See :func:`measure`."""
    _check(step, warmup, 1)
    if isinstance(step, Step) and step.gradients == FRESH:
        step.clear_gradients()  # what the step drops before its forward is no part of its baseline
    with Recording(step if isinstance(step, Step) else persistent) as recording:
        recording.run(step, warmup)
    return recording.peak()


def measure_pair(first: Step | Runnable, second: Step | Runnable, *, rounds: int = 5, warmup: int = 1) -> Pair:
    """Time two steps in turns and give the ratio of the medians, second over first.

    Each round runs both, and the one that goes first changes from round to round, so that a slow spell of the machine
    meets both. Process CPU seconds on CPU; synchronised wall seconds where a Step lives on CUDA. Raises
    :class:`UsageError` for counts below one round, and for a first step that is too short for the clock.
    """
    _check(first, warmup, rounds, name="rounds")
    _check(second, warmup, rounds, name="rounds")
    cuda = any(isinstance(step, Step) and step.device.type == "cuda" for step in (first, second))
    for _ in range(warmup):
        first()
        second()
    seconds: tuple[list[float], list[float]] = ([], [])
    for round_ in range(rounds):
        for which in ((0, 1), (1, 0))[round_ % 2]:
            cpu, wall = _seconds((first, second)[which], cuda=cuda)
            seconds[which].append(wall if cuda else cpu)
    first_seconds, second_seconds = (statistics.median(times) for times in seconds)
    if first_seconds <= 0:
        raise UsageError("the first step is too short for the process clock: let each callable do the work many times")
    return Pair(first_seconds, second_seconds, second_seconds / first_seconds, rounds)


def _measure_cuda(step: Step | Runnable, steps: int, warmup: int) -> Measurement:
    for _ in range(warmup):
        step()
    if isinstance(step, Step) and step.gradients == FRESH:
        step.clear_gradients()
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    baseline = torch.cuda.memory_stats()["requested_bytes.all.current"]
    step()
    torch.cuda.synchronize()
    stats = torch.cuda.memory_stats()
    times = [_seconds(step, cuda=True)[1] for _ in range(steps)]
    return Measurement(
        peak_bytes=stats["requested_bytes.all.peak"],
        baseline_bytes=baseline,
        step_seconds=statistics.median(times),
        wall_seconds=statistics.median(times),
        steps=steps,
        device="cuda",
        counted="allocator statistics",
        allocated_peak_bytes=stats["allocated_bytes.all.peak"],
        reserved_peak_bytes=stats["reserved_bytes.all.peak"],
    )


def _finish(peak: Peak, step: Runnable, steps: int, counted: str) -> Measurement:
    times = [_seconds(step, cuda=False) for _ in range(steps)]
    return Measurement(
        peak_bytes=peak.peak_bytes,
        baseline_bytes=peak.baseline_bytes,
        step_seconds=statistics.median(cpu for cpu, _ in times),
        wall_seconds=statistics.median(wall for _, wall in times),
        steps=steps,
        device="cpu",
        counted=counted,
    )


def _seconds(step: Runnable, *, cuda: bool) -> tuple[float, float]:
    """Process CPU seconds and wall seconds of one run."""
    if cuda:
        torch.cuda.synchronize()
    cpu, wall = time.process_time(), time.perf_counter()
    step()
    if cuda:
        torch.cuda.synchronize()
    return time.process_time() - cpu, time.perf_counter() - wall


def _check(step: object, warmup: int, steps: int, *, name: str = "steps") -> None:
    if not callable(step):
        raise UsageError(
            f"what is to be measured is a {type(step).__name__}; give an rt.Step or a callable without arguments"
        )
    if steps < 1:
        raise UsageError(f"{name}={steps}: at least one is needed")
    if warmup < 0:
        raise UsageError(f"warmup={warmup}: it cannot be negative; 0 measures the first step")
