"""Finds the segments of any module: which calls in the forward pass can be run again, and why the others cannot.

Candidates are the calls of the children of ``nn.ModuleList`` and ``nn.Sequential`` wherever they sit. A candidate that
holds a large share of all activations and has such containers inside gives way to its own children. What lies outside
the candidates can only be kept.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Collection
from dataclasses import dataclass

from torch import nn

from regrad.core import trace as tr
from regrad.core.errors import InvalidSubject
from regrad.core.simulate_trace import live_levels
from regrad.core.trace import Call, Trace

LARGE_SHARE = 0.25
"""A candidate that retains more than this share of what all retain is looked into."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """One module call that could be a segment: its index among the trace's calls, and why not, if it cannot."""

    call: int
    reason: str = ""


def container_children(model: nn.Module) -> set[str]:
    """Names of all children of ``ModuleList``, ``Sequential`` and ``ModuleDict``, at any depth."""
    found = set()
    for name, module in model.named_modules():
        if isinstance(module, (nn.ModuleList, nn.Sequential, nn.ModuleDict)):
            prefix = f"{name}." if name else ""
            found |= {prefix + child for child, _ in module.named_children()}
    return found


def find_candidates(model: nn.Module, trace: Trace, pattern: str | None = None) -> list[Candidate]:
    """The candidates of a traced step, in the order of their calls, none inside another.

    ``pattern`` is a glob over module names (``transformer.h.*``; ``*`` does not cross a dot) that replaces the search.
    Raises :class:`InvalidSubject` if the pattern matches no module that the step calls.
    """
    if pattern is not None:
        chosen = [i for i, call in enumerate(trace.calls) if matches(call.module, pattern)]
        if not chosen:
            names = ", ".join(sorted({call.module for call in trace.calls if call.module})[:12])
            raise InvalidSubject(f"segments={pattern!r} matches no module that the step calls; it calls {names}, …")
        names_ = set(chosen)
        outer = [i for i in chosen if not _ancestors(trace, i) & names_]
    else:
        outer = _search(trace, container_children(model))
    return [Candidate(i) for i in outer if trace.calls[i].stop > trace.calls[i].start]


def matches(name: str, pattern: str) -> bool:
    """Whether a dotted module name matches a glob, part by part. The model itself (``""``) matches none."""
    parts, globs = name.split("."), pattern.split(".")
    return bool(name) and len(parts) == len(globs) and all(map(fnmatch.fnmatchcase, parts, globs))


def _ancestors(trace: Trace, call: int) -> set[int]:
    found = set()
    parent = trace.calls[call].parent
    while parent >= 0:
        found.add(parent)
        parent = trace.calls[parent].parent
    return found


def _search(trace: Trace, names: set[str]) -> list[int]:
    """Outermost calls of ``names``; the large ones give way to the calls of ``names`` inside them."""
    pool = [i for i, call in enumerate(trace.calls) if call.module in names]
    pooled = set(pool)
    outer = [i for i in pool if not _ancestors(trace, i) & pooled]
    inside: dict[int, list[int]] = {}
    for i in pool:
        parent = trace.calls[i].parent
        while parent >= 0 and parent not in pooled:
            parent = trace.calls[parent].parent
        if parent >= 0:
            inside.setdefault(parent, []).append(i)
    before = live_levels(trace).before
    held = {i: before[trace.calls[i].stop] - before[trace.calls[i].start] for i in pool}
    while True:
        total = sum(max(held[i], 0) for i in outer)
        large = [i for i in outer if held[i] > LARGE_SHARE * total and len(inside.get(i, ())) > 1]
        if not large:
            return outer
        split = large[0]
        at = outer.index(split)
        outer[at : at + 1] = inside[split]


def given(trace: Trace, call: Call) -> tuple[int, ...]:
    """Storages that a call needs from before it: its arguments, and what else it reads that does not outlive the step
    by itself (computed in this step, or state that this step puts another tensor in place of)."""
    read = set()
    for operation in trace.operations[call.start : call.stop]:
        for index in operation.reads:
            storage = trace.storages[index]
            if storage.birth < call.start and (storage.birth >= 0 or storage.death is not None):
                read.add(index)
    return (*call.inputs, *sorted(read.difference(call.inputs)))


def border_problem(
    trace: Trace,
    call: Call,
    names: dict[int, str],
    copied: Collection[int] = (),
    logged: Callable[[int], bool] = lambda position: False,
) -> str:
    """Why the tensors that a call reads would not be the same when it runs again; "" if they would.

    What was there before the call and is read by it may be written at or after its entry only where the engine brings
    it back: state that it copies whole at every call (``copied``, storages by index), and state that the call itself
    writes or an operation whose writes are ``logged``. Anything else must not be written: a computed tensor by no one
    (the in-place rule), other state by nobody else. ``names`` are those of persistent storages.
    """
    reads = set(call.inputs)
    for operation in trace.operations[call.start : call.stop]:
        reads |= {index for index in operation.reads + operation.writes if trace.storages[index].birth < call.start}
    for position in range(call.start, trace.phase_starts[tr.BACKWARD]):
        operation = trace.operations[position]
        for index in operation.writes:
            if index not in reads or trace.storages[index].birth >= call.start or index in copied:
                continue
            if position >= call.stop and not (trace.storages[index].birth < 0 and logged(position)):
                return f"{_name(index, call, names)} is written later in the forward by {operation.name}"
            if trace.storages[index].birth >= 0:
                return f"{operation.name} writes {_name(index, call, names)} in place after the call was entered"
    return ""


def _name(index: int, call: Call, names: dict[int, str]) -> str:
    if index in names:
        return names[index]
    return "its input" if index in call.inputs else "a tensor from outside it"
