"""What state each segment finds at its start, and what its engine copies of it: read off a rehearsal, in bytes.

The walk is the one that the engine itself does at a call's entry (``regions/discover``), here on the rehearsal's copy; the
writes are those of the recorded step. So the figures are the engine's own, before it has run once.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from regrad.core.simulate_trace import StateCopy
from regrad.core.trace import Call, Trace
from regrad.torch.record import Record, TensorSpec
from regrad.torch.regions.discover import sources
from regrad.torch.regions.discover.names import Reach
from regrad.torch.regions.discover.tensors import SMALL_BYTES
from regrad.torch.regions.discover.walk import walk
from regrad.torch.regions.region import JOURNAL, LARGE_SHARE, SNAPSHOT

PYTHON_BYTES = sources.PYTHON.size(None)


@dataclass(frozen=True)
class Reached:
    """The storages that one module's code can reach: bytes by index in the trace; small ones are copied at every call."""

    small: dict[int, int] = field(default_factory=dict)
    large: dict[int, int] = field(default_factory=dict)


def reached(module: nn.Module, index_of: dict[int, int]) -> Reached:
    """What the engine's walk finds from ``module``'s forward; ``index_of`` maps storages to their place in the trace."""
    found = Reached()
    for tensor in walk(Reach(), (module.forward,)).tensors:
        if tensor.layout != torch.strided:
            continue
        storage = tensor.untyped_storage()
        index = index_of.get(storage._cdata)
        if index is None or not storage.nbytes():
            continue
        weight = isinstance(tensor, nn.Parameter)
        (found.large if weight or storage.nbytes() > SMALL_BYTES else found.small)[index] = storage.nbytes()
    return found


class Writes:
    """Which operations of the forward write what was there before the step, in order."""

    def __init__(self, record: Record) -> None:
        self.record = record
        trace = record.trace
        self.by_storage: dict[int, list[int]] = {}
        self.draws: list[int] = []
        for position, operation in enumerate(trace.operations[: trace.phase_starts["backward"]]):
            for index in operation.writes:
                if trace.storages[index].birth < 0:
                    self.by_storage.setdefault(index, []).append(position)
            if operation.draws:
                self.draws.append(position)

    def version(self, index: int, at: int) -> int:
        """How often storage ``index`` was written before operation ``at``."""
        return sum(position < at for position in self.by_storage.get(index, ()))

    def written_bytes(self, index: int, start: int, stop: int) -> int:
        """Bytes of storage ``index`` that operations ``start`` … ``stop - 1`` overwrite."""
        total = 0
        for position in self.by_storage.get(index, ()):
            if start <= position < stop:
                total += self._bytes(position, index)
        return min(total, self.record.trace.storages[index].bytes)

    def _bytes(self, position: int, index: int) -> int:
        signature = self.record.signatures[self.record.signature_of[position]]
        operation = self.record.trace.operations[position]
        tensors = [leaf for leaf in signature.leaves if isinstance(leaf, TensorSpec)]
        sizes = [_view_bytes(spec) for spec, read in zip(tensors, operation.reads, strict=False) if read == index]
        whole = sizes[0] if sizes else self.record.trace.storages[index].bytes
        rows = _rows(signature)
        return whole if rows is None or not tensors else min(whole, whole // max(1, tensors[0].shape[0]) * rows)


class States:
    """The state of every module call of one recorded step.

    ``model`` is the copy that was recorded, ``candidates`` the calls that may be segments: what they write of large
    state is logged, what others write cannot be brought back.
    """

    def __init__(self, model: nn.Module, record: Record, candidates: list[Call]) -> None:
        self.record = record
        self.candidates = sorted(candidates, key=lambda call: call.start)
        self._modules = dict(model.named_modules())
        self._writes = Writes(record)
        self._reached: dict[str, Reached] = {}

    def reached(self, module: str) -> Reached:
        """The storages that the code of ``module`` can reach."""
        if module not in self._reached:
            self._reached[module] = reached(self._modules[module], self.record.index_of)
        return self._reached[module]

    def copies(self, call: Call) -> tuple[StateCopy, ...]:
        """What the engine copies for one call."""
        writers = self.candidates if call in self.candidates else [call]
        return copies_of(call, self.reached(call.module), self._writes, self.record.names, writers)

    def call(self, module: str, count: int) -> Call | None:
        """The candidate that is this call of this module."""
        return next((call for call in self.candidates if (call.module, call.count) == (module, count)), None)

    def logged(self, position: int) -> bool:
        """Whether what the operation at ``position`` overwrites is logged: some candidate runs it."""
        return any(call.start <= position < call.stop for call in self.candidates)


def _view_bytes(spec: TensorSpec) -> int:
    size = spec.dtype.itemsize
    for length in spec.shape:
        size *= length
    return size


def _rows(signature: Any) -> int | None:
    """How many rows an indexed write names; None for any other operation."""
    name = signature.func._schema.name.partition("::")[2]
    if name not in ("index_copy_", "index_add_", "index_fill_", "index_put_", "_index_put_impl_", "embedding_renorm_"):
        return None
    named = [
        leaf for leaf in signature.leaves if isinstance(leaf, TensorSpec) and leaf.dtype in (torch.int64, torch.int32)
    ]
    return max((_view_bytes(spec) // spec.dtype.itemsize for spec in named), default=None)


def copies_of(
    call: Call, found: Reached, writes: Writes, names: dict[int, str], writers: list[Call]
) -> tuple[StateCopy, ...]:
    """The copies that the engine takes for one call: generators, small state whole, and of large state what the call and
    later ones (``writers``) overwrite. A log keeps each overwritten piece once, for all calls that may need it."""
    trace: Trace = writes.record.trace
    draws = sum(position < call.start for position in writes.draws)
    random, drawn = torch.get_rng_state().nbytes, any(position >= call.start for position in writes.draws)
    copies = [
        StateCopy(("generator", 0, draws), random, random, "torch's generator", written=drawn),
        StateCopy(("python", 0, 0), PYTHON_BYTES, PYTHON_BYTES, "Python's generator"),
    ]
    given = {index: trace.storages[index].bytes for index in call.plain_inputs}
    for index, size in (found.small | {index: size for index, size in given.items() if size <= SMALL_BYTES}).items():
        later = any(position >= call.start for position in writes.by_storage.get(index, ()))
        key = ("storage", index, writes.version(index, call.start))
        copies.append(StateCopy(key, size, size if later else 0, _name(index, trace, names), written=later))
    large = {index for index in found.large | dict.fromkeys(_reads(trace, call), 0) if index not in found.small}
    for index in sorted(large & set(writes.by_storage)):
        whole = trace.storages[index].bytes
        for writer in writers:
            written = writes.written_bytes(index, writer.start, writer.stop) if writer.start >= call.start else 0
            if written:
                engine, size = (JOURNAL, written) if written <= LARGE_SHARE * whole else (SNAPSHOT, whole)
                key = ("log", index, writer.start)
                # its own writes are put aside twice: what they left for the present, and what the replay overwrites
                aside = 2 * size if writer.start == call.start else size
                copies.append(StateCopy(key, size, aside, _name(index, trace, names), engine, True, writer.start))
    return tuple(copies)


def _name(index: int, trace: Trace, names: dict[int, str]) -> str:
    if index in names:
        return names[index]
    return "an argument" if trace.storages[index].birth >= 0 else "a tensor"


def _reads(trace: Trace, call: Call) -> set[int]:
    return {index for operation in trace.operations[call.start : call.stop] for index in operation.reads}
