"""Seconds, workspace and hidden writes of operations, each measured alone, so that no step has to fit in memory.

Each distinct signature (kernel, shapes, strides, dtypes, plain arguments) of a trace is run on real tensors of its own
and the figures are written to all its operations. Three things come out that fake tensors cannot tell:

* seconds, on process CPU time;
* workspace: what the kernel allocates for itself beyond its results;
* writes that the schema does not declare: the bytes of every argument are compared before and after.

Cost: about three runs of every distinct operation, and the arguments and results of one operation at a time. Once
``limit_seconds`` are spent the rest is estimated by a roofline that the kernels measured so far have corrected; those
that weigh most in the step come first. Workspace of what was not measured comes from a table of earlier measurements.
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
from regrad.torch.values import operands
from regrad.torch.workspace import workspaces
from regrad.torch.workspace_table import WorkspaceTable, current_table

_LAUNCH_SECONDS, _BYTES_PER_SECOND, _FLOPS_PER_SECOND = 5e-6, 1e10, 1e11
_RUNS = 5
"""Runs of one signature: one for hidden writes, three timed, one for workspace."""
_FREE = {"aten.view.default", "aten.t.default", "aten.transpose.int", "aten.detach.default", "aten.expand.default"}


@dataclass(slots=True)
class Reading:
    """What one signature costs. ``hidden_writes`` are positions among its tensor arguments; ``made_bytes`` the sizes of
    the storages that it made, which some kernels only decide when they run."""

    seconds: float
    workspace_bytes: int | None = 0
    made_bytes: tuple[int, ...] | None = None
    hidden_writes: tuple[int, ...] = ()
    measured: bool = True


def _size(spec: TensorSpec) -> int:
    return math.prod(spec.shape) * spec.dtype.itemsize


def _bytes(signature: Signature) -> int:
    """Bytes of all tensor arguments."""
    return sum(_size(leaf) for leaf in signature.leaves if isinstance(leaf, TensorSpec))


def _meta(leaf: Any) -> Any:
    return torch.empty(leaf.shape, device="meta") if isinstance(leaf, TensorSpec) else leaf


def roofline(signature: Signature) -> float:
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
    """Measures signatures; keeps what it measured for as long as it lives.

    ``table`` gives the workspace of what is not measured (default: the one that ships, with the user's own entries).
    Raises :class:`regrad.core.errors.UsageError` for a calibration file of the user's that cannot be read.
    """

    def __init__(
        self, *, limit_seconds: float = 4.0, largest_bytes: int | None = None, table: WorkspaceTable | None = None
    ) -> None:
        self.limit_seconds = limit_seconds
        self.largest_bytes = largest_bytes
        self.table = current_table() if table is None else table
        self.readings: dict[Any, Reading] = {}
        self._opaque: dict[Any, _Opaque] = {}
        self._ratios: dict[Any, list[float]] = {}

    def read(self, record: Record, progress: Callable[[float], None] | None = None) -> None:
        """Fill in seconds, workspace and hidden writes of every operation of a recorded step."""
        trace, signatures, signature_of = record.trace, record.signatures, record.signature_of
        generator = torch.get_rng_state()
        deadline = time.monotonic() + self.limit_seconds
        guesses = [roofline(signature) for signature in signatures]
        total = [0.0] * len(signatures)
        for index in signature_of:
            total[index] += guesses[index]
        order = sorted(range(len(signatures)), key=lambda index: -total[index])
        suspects = _suspects(record)
        self._opaque.update(_opaque(record))
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
                self._look_up(signatures[index], reading)
        self._read_workspaces([signatures[index] for index in order])
        torch.set_rng_state(generator)
        for operation, index in zip(trace.operations, signature_of, strict=True):
            reading = self.readings[signatures[index].key]
            operation.seconds = reading.seconds
            operation.workspace_bytes = reading.workspace_bytes or 0
            if reading.made_bytes is not None and len(reading.made_bytes) == len(operation.makes):
                for made, size in zip(operation.makes, reading.made_bytes, strict=True):
                    if reading.measured or not trace.storages[made].bytes:
                        trace.storages[made].bytes = size
            if reading.hidden_writes:
                hidden = tuple(operation.reads[position] for position in reading.hidden_writes)
                operation.writes = tuple(dict.fromkeys(operation.writes + hidden))

    def _look_up(self, signature: Signature, reading: Reading) -> None:
        """Workspace, and sizes of results that only the kernel knows, of what could not be measured."""
        found = self.table.find(signature)
        if found is not None:
            reading.workspace_bytes, reading.made_bytes = found.workspace_bytes, found.made_bytes

    def _read_workspaces(self, signatures: list[Signature]) -> None:
        new = [s for s in signatures if self.readings[s.key].measured and self.readings[s.key].workspace_bytes is None]

        def calls() -> Iterator[tuple[Any, Any, Any]]:
            for signature in new:
                args, kwargs, _ = _arguments(signature, opaque=self._opaque.get(signature.key))
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
            reading = _run(signature, suspect, self._opaque.get(signature.key))
        except (RuntimeError, IndexError, TypeError, ValueError, MemoryError, NotImplementedError):
            # A kernel may refuse made-up values (an index that must be positive, say); its time is then an estimate.
            return Reading(0.0, measured=False)
        self._ratios.setdefault(signature.func, []).append(reading.seconds / guess)
        return reading

    def _estimate(self, signature: Signature, guess: float) -> float:
        """The guess, corrected by how far it was off for this kernel, or for all kernels where this one was never run."""
        ratios = self._ratios.get(signature.func) or [ratio for found in self._ratios.values() for ratio in found]
        return guess * statistics.median(ratios or [1.0])


@dataclass(frozen=True, slots=True)
class _Opaque:
    """Private memory of another kernel that an operation is given: made-up bytes in there can crash the process, so the
    kernel that made it is run first. ``picks`` maps tensor arguments to storages that the producer makes."""

    producer: Signature
    picks: dict[int, int]


def _opaque(record: Record) -> dict[Any, _Opaque]:
    """For each signature with such an argument where it comes from."""
    found: dict[Any, _Opaque] = {}
    for operation, index in zip(record.trace.operations, record.signature_of, strict=True):
        signature = record.signatures[index]
        schema = signature.func._schema.arguments
        named = [i for i, a in enumerate(schema) if any(word in a.name for word in ("workspace", "reserve"))]
        if not named or signature.key in found:
            continue
        args, _ = pytree.tree_unflatten(list(signature.leaves), signature.structure)
        picks, producers = {}, []
        for position in named:
            before = sum(isinstance(leaf, TensorSpec) for leaf in pytree.tree_leaves(args[:position]))
            if position < len(args) and isinstance(args[position], TensorSpec):
                storage = operation.reads[before]
                birth = record.trace.storages[storage].birth
                if birth >= 0 and storage in record.trace.operations[birth].makes:
                    producers.append(record.signatures[record.signature_of[birth]])
                    picks[before] = record.trace.operations[birth].makes.index(storage)
        if picks:
            found[signature.key] = _Opaque(producers[0], picks)
    return found


def _made_bytes(given: list[torch.Tensor], result: Any) -> tuple[int, ...]:
    """Sizes of the storages in ``result`` that are in no argument, in order, each once."""
    known = {tensor.untyped_storage()._cdata for tensor in given}
    sizes: dict[int, int] = {}
    for tensor in operands(result):
        storage = tensor.untyped_storage()
        if storage._cdata not in known:
            sizes.setdefault(storage._cdata, storage.nbytes())
    return tuple(sizes.values())


def _arguments(
    signature: Signature, varied: bool = False, opaque: _Opaque | None = None
) -> tuple[Any, Any, list[torch.Tensor]]:
    leaves = [_realise(leaf, varied) if isinstance(leaf, TensorSpec) else leaf for leaf in signature.leaves]
    if opaque is not None:
        made = _produce(opaque.producer)
        positions = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
        for position, pick in opaque.picks.items():
            leaves[positions[position]] = made[pick]
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


def _produce(signature: Signature) -> list[torch.Tensor]:
    """One tensor for each storage that an operation makes, from a run of it."""
    args, kwargs, given = _arguments(signature)
    known = {tensor.untyped_storage()._cdata for tensor in given}
    found: dict[int, torch.Tensor] = {}
    for tensor in operands(signature.func(*args, **kwargs)):
        if tensor.untyped_storage()._cdata not in known:
            found.setdefault(tensor.untyped_storage()._cdata, tensor)
    return list(found.values())


def _run(signature: Signature, suspect: bool, opaque: _Opaque | None) -> Reading:
    """The fastest of three runs, each on arguments of its own: in a step operands are seldom in a cache.

    The fastest, because on a shared machine a thread that waits for a core burns CPU time of its own process.
    """
    hidden: tuple[int, ...] = ()
    made: tuple[int, ...] = ()
    seconds = []
    # Some kernels make more when a backward may follow. No argument requires a gradient, so no graph is built.
    with torch.enable_grad():
        for run in range(3):
            args, kwargs, given = _arguments(signature, opaque=opaque)
            if run == 0 and suspect:
                args, kwargs, given = _arguments(signature, True, opaque)
                hidden = _hidden_writes(signature.func, args, kwargs, given)
                args, kwargs, given = _arguments(signature, opaque=opaque)
            began = time.process_time()
            result = signature.func(*args, **kwargs)
            seconds.append(time.process_time() - began)
            made = _made_bytes(given, result)
            del result, args, kwargs, given
            if seconds[-1] > 0.1:
                break
    return Reading(max(min(seconds), 1e-7), None, made, hidden)


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
