"""``rt.trace``: the record of one step, from fake tensors, from a real step on a copy, or both merged."""

from __future__ import annotations

from torch.profiler import ProfilerActivity, profile

from regrad.core.errors import CannotTrace, InvalidSubject
from regrad.core.simulate_trace import live_levels
from regrad.core.trace import Trace
from regrad.core.units import format_bytes
from regrad.torch.clock import Clock
from regrad.torch.dryrun import Rehearsal
from regrad.torch.fingerprint import step_fingerprint
from regrad.torch.room import available_bytes
from regrad.torch.step import Step
from regrad.torch.store import persistent_bytes, untouched
from regrad.torch.workspace import by_window

SOURCES = ("fake", "real", "merged")


def trace(step: Step, *, source: str = "fake", limit_bytes: int | None = None) -> Trace:
    """The trace of one step in its steady state. The step is left as it was.

    source       "fake": copies without bytes, seconds and workspace of each kernel run alone. "real": a real step on a
                 copy, seconds and workspace from the profiler's events in that step. "merged": the fake trace with the
                 real one's seconds, workspace and sizes; where the two differ in operations ``notes`` says so
    limit_bytes  the most that a real step and its copy may take on top of what is there; None: what the machine, the
                 control group and the process's limits leave

    Raises :class:`CannotTrace` if a real step is asked for and does not fit, and whatever the model raises.
    """
    if source not in SOURCES:
        raise InvalidSubject(f"source={source!r} is not known; it is one of {', '.join(SOURCES)}")
    with untouched(step):
        fake = Rehearsal(step).record()
        if source == "fake":
            Clock(largest_bytes=available_bytes() // 4).read(fake)
            found = fake.trace
        else:
            found = _real(step, live_levels(fake.trace).peak_bytes, limit_bytes)
            if source == "merged":
                found = merge_measured(fake.trace, found)
    found.fingerprint = step_fingerprint(step)
    return found


def _real(step: Step, eager_bytes: int, limit_bytes: int | None) -> Trace:
    """A real step on a copy, where the step's peak and the copy fit."""
    room = available_bytes() if limit_bytes is None else min(limit_bytes, available_bytes())
    needed = eager_bytes + persistent_bytes(step)
    if needed > room:
        raise CannotTrace(
            f"a real step on a copy needs {format_bytes(needed)} ({format_bytes(eager_bytes)} of it the step's peak), and "
            f'{format_bytes(room)} are free: ask for source="fake", which needs none of it'
        )
    rehearsal = Rehearsal(step, real=True)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        record = rehearsal.record(marked=True)
    found = by_window(recorded.profiler.kineto_results.events())
    for index, operation in enumerate(record.trace.operations):
        operation.workspace_bytes, operation.seconds = found.get(index, (0, 0.0))
    return record.trace


def merge_measured(fake: Trace, real: Trace) -> Trace:
    """``fake`` with what only a real step shows. Operations are aligned by name, in order; those that one record has and
    the other has not are left as they are and named in ``notes``."""
    pairs, missing, extra = align([o.name for o in fake.operations], [o.name for o in real.operations])
    for mine, theirs in pairs:
        one, other = fake.operations[mine], real.operations[theirs]
        one.seconds, one.workspace_bytes = other.seconds, other.workspace_bytes
        if len(one.makes) == len(other.makes):
            for made, measured in zip(one.makes, other.makes, strict=True):
                fake.storages[made].bytes = real.storages[measured].bytes
    for words, positions, operations in (("fake", missing, fake.operations), ("real", extra, real.operations)):
        if positions:
            first = operations[positions[0]]
            where = f" at {first.where}" if first.where else ""
            fake.notes.append(
                f"{len(positions)} operations are in the {words} step alone, {first.name}{where} ({first.phase}) is the first"
            )
    fake.source = "merged"
    return fake


def align(mine: list[str], theirs: list[str]) -> tuple[list[tuple[int, int]], list[int], list[int]]:
    """Pairs of equal names in order, and the positions that have no partner, by the longest common blocks."""
    from difflib import SequenceMatcher

    pairs: list[tuple[int, int]] = []
    if mine == theirs:
        return [(i, i) for i in range(len(mine))], [], []
    for block in SequenceMatcher(None, mine, theirs, autojunk=False).get_matching_blocks():
        pairs += [(block.a + i, block.b + i) for i in range(block.size)]
    in_mine, in_theirs = {a for a, _ in pairs}, {b for _, b in pairs}
    missing = [i for i in range(len(mine)) if i not in in_mine]
    extra = [i for i in range(len(theirs)) if i not in in_theirs]
    return pairs, missing, extra
