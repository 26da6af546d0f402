"""Seconds, workspace and hidden writes of operations, each measured alone, so that no step has to fit in memory.

Each distinct signature (kernel, shapes, strides, dtypes, plain arguments) of a trace is run on real tensors of its own
and the figures are written to all its operations. Three things come out that fake tensors cannot tell:

* seconds, on process CPU time;
* workspace: what the kernel allocates for itself beyond its results;
* writes that the schema does not declare: the bytes of every argument are compared before and after.

Cost: about three runs of every distinct operation, and the arguments and results of one operation at a time. Once
``limit_seconds`` are spent the rest is estimated by a roofline that the kernels measured so far have corrected; those
that weigh most in the step come first.
Not for: the time of a whole step on a machine whose caches matter; ratios between operations are what planners need.
"""

from __future__ import annotations

import functools
import math
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils.flop_counter import flop_registry

from regrad.core.trace import BUFFERS
from regrad.torch.record import Record, Signature, TensorSpec
from regrad.torch.workspace import workspaces

_LAUNCH_SECONDS, _BYTES_PER_SECOND, _FLOPS_PER_SECOND = 5e-6, 1e10, 1e11
_RUNS = 5
"""Runs of one signature: one for hidden writes, three timed, one for workspace."""
_FREE = {"aten.view.default", "aten.t.default", "aten.transpose.int", "aten.detach.default", "aten.expand.default"}


@dataclass(slots=True)
class Reading:
    """What one signature costs. ``hidden_writes`` are positions among its tensor arguments."""

    seconds: float
    workspace_bytes: int | None = 0
    hidden_writes: tuple[int, ...] = ()
    measured: bool = True


def _size(spec: TensorSpec) -> int:
    return math.prod(spec.shape) * spec.dtype.itemsize


def _bytes(signature: Signature) -> int:
    """Bytes of all tensor arguments."""
    return sum(_size(leaf) for leaf in signature.leaves if isinstance(leaf, TensorSpec))


def _meta(leaf: Any) -> Any:
    return torch.empty(leaf.shape, device="meta") if isinstance(leaf, TensorSpec) else leaf


def _guess(signature: Signature) -> float:
    """Seconds by roofline at round figures. Only proportions matter: measured kernels correct it."""
    flops = 0
    formula = flop_registry.get(signature.func._overloadpacket)
    if formula is not None:
        args, kwargs = pytree.tree_unflatten([_meta(leaf) for leaf in signature.leaves], signature.structure)
        flops = formula(*args, **kwargs, out_val=pytree.tree_map(_meta, signature.result))
    return _LAUNCH_SECONDS + max(_bytes(signature) / _BYTES_PER_SECOND, flops / _FLOPS_PER_SECOND)


@functools.cache
def _pool(dtype: torch.dtype) -> torch.Tensor:
    """Values between 0.25 and 0.75, in no order: valid as probabilities, variances and divisors."""
    generator = torch.Generator().manual_seed(0)
    return (torch.rand(1 << 16, generator=generator) * 0.5 + 0.25).to(dtype)


def _realise(spec: TensorSpec, varied: bool) -> torch.Tensor:
    """A real tensor of that shape and stride: zeros for integers and booleans (a valid index and a valid mask), else one
    half everywhere, or ``varied``."""
    span = 1 + sum((size - 1) * stride for size, stride in zip(spec.shape, spec.stride, strict=True))
    span = 0 if 0 in spec.shape else span
    if not spec.dtype.is_floating_point:
        memory = torch.zeros(span, dtype=spec.dtype, device=spec.device)
    elif not varied:
        memory = torch.full((span,), 0.5, dtype=spec.dtype, device=spec.device)
    else:
        pool = _pool(spec.dtype).to(spec.device)
        memory = pool.repeat(-(-span // len(pool)))[:span]
    return memory.as_strided(spec.shape, spec.stride)


class Clock:
    """Measures signatures; keeps what it measured for as long as it lives."""

    def __init__(self, *, limit_seconds: float = 4.0, largest_bytes: int | None = None) -> None:
        self.limit_seconds = limit_seconds
        self.largest_bytes = largest_bytes
        self.readings: dict[Any, Reading] = {}
        self._ratios: dict[Any, list[float]] = {}

    def read(self, record: Record, progress: Callable[[float], None] | None = None) -> None:
        """Fill in seconds, workspace and hidden writes of every operation of a recorded step."""
        trace, signatures, signature_of = record.trace, record.signatures, record.signature_of
        generator = torch.get_rng_state()
        deadline = time.monotonic() + self.limit_seconds
        guesses = [_guess(signature) for signature in signatures]
        total = [0.0] * len(signatures)
        for index in signature_of:
            total[index] += guesses[index]
        order = sorted(range(len(signatures)), key=lambda index: -total[index])
        suspects = _suspects(record)
        for done, index in enumerate(order):
            signature = signatures[index]
            if signature.key not in self.readings:
                fits = time.monotonic() + _RUNS * guesses[index] < deadline
                reading = (
                    self._measure(signature, guesses[index], index in suspects)
                    if fits
                    else Reading(0.0, measured=False)
                )
                self.readings[signature.key] = reading
            if progress is not None:
                progress((done + 1) / len(order))
        for index in order:
            reading = self.readings[signatures[index].key]
            if not reading.measured and not reading.seconds:
                reading.seconds = self._estimate(signatures[index], guesses[index])
        self._read_workspaces([signatures[index] for index in order])
        torch.set_rng_state(generator)
        for operation, index in zip(trace.operations, signature_of, strict=True):
            reading = self.readings[signatures[index].key]
            operation.seconds = reading.seconds
            operation.workspace_bytes = reading.workspace_bytes or 0
            if reading.hidden_writes:
                hidden = tuple(operation.reads[position] for position in reading.hidden_writes)
                operation.writes = tuple(dict.fromkeys(operation.writes + hidden))

    def _read_workspaces(self, signatures: list[Signature]) -> None:
        new = [s for s in signatures if self.readings[s.key].measured and self.readings[s.key].workspace_bytes is None]

        def calls() -> Iterator[tuple[Any, Any, Any]]:
            for signature in new:
                args, kwargs, _ = _arguments(signature)
                yield signature.func, args, kwargs

        if new:
            for signature, count in zip(new, workspaces(calls()), strict=True):
                self.readings[signature.key].workspace_bytes = count

    def _measure(self, signature: Signature, guess: float, suspect: bool) -> Reading:
        if str(signature.func) in _FREE:
            return Reading(1e-6)
        if self.largest_bytes is not None and 3 * _bytes(signature) > self.largest_bytes:
            return Reading(0.0, measured=False)
        try:
            reading = _run(signature, suspect)
        except (RuntimeError, IndexError, TypeError, ValueError, MemoryError, NotImplementedError):
            # A kernel may refuse made-up values (an index that must be positive, say); its time is then an estimate.
            return Reading(0.0, measured=False)
        self._ratios.setdefault(signature.func, []).append(reading.seconds / guess)
        return reading

    def _estimate(self, signature: Signature, guess: float) -> float:
        """The guess, corrected by how far it was off for this kernel, or for all kernels where this one was never run."""
        ratios = self._ratios.get(signature.func) or [ratio for found in self._ratios.values() for ratio in found]
        return guess * statistics.median(ratios or [1.0])


def _arguments(signature: Signature, varied: bool = False) -> tuple[Any, Any, list[torch.Tensor]]:
    leaves = [_realise(leaf, varied) if isinstance(leaf, TensorSpec) else leaf for leaf in signature.leaves]
    args, kwargs = pytree.tree_unflatten(leaves, signature.structure)
    return args, kwargs, [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]


def _suspects(record: Record) -> set[int]:
    """Signatures that may write in secret what outlives them: those that are given a buffer, and kernels that are not
    torch's own. Their arguments are compared byte by byte before and after a run."""
    found = set()
    for operation, index in zip(record.trace.operations, record.signature_of, strict=True):
        given = (record.trace.storages[i].category for i in operation.reads)
        if BUFFERS in given or record.signatures[index].func.namespace != "aten":
            found.add(index)
    return found


def _run(signature: Signature, suspect: bool) -> Reading:
    """The fastest of three runs, each on arguments of its own: in a step operands are seldom in a cache.

    The fastest, because on a shared machine a thread that waits for a core burns CPU time of its own process.
    """
    hidden: tuple[int, ...] = ()
    seconds = []
    with torch.no_grad():
        for run in range(3):
            args, kwargs, given = _arguments(signature)
            if run == 0 and suspect:
                args, kwargs, given = _arguments(signature, varied=True)
                hidden = _hidden_writes(signature.func, args, kwargs, given)
                args, kwargs, given = _arguments(signature)
            began = time.process_time()
            result = signature.func(*args, **kwargs)
            seconds.append(time.process_time() - began)
            del result, args, kwargs, given
            if seconds[-1] > 0.1:
                break
    return Reading(max(min(seconds), 1e-7), None, hidden)


def _hidden_writes(func: Any, args: Any, kwargs: Any, given: list[torch.Tensor]) -> tuple[int, ...]:
    """Positions of tensor arguments whose bytes the kernel changed although its schema does not say so."""
    schema = func._schema
    if schema.is_mutable:
        func(*args, **kwargs)
        return ()
    before = [tensor.clone() for tensor in given]
    func(*args, **kwargs)
    return tuple(
        position
        for position, (old, new) in enumerate(zip(before, given, strict=True))
        if not torch.equal(old.contiguous().view(torch.uint8), new.contiguous().view(torch.uint8))
    )
