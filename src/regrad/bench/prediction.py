"""Predicted against measured peaks on random nested plans: ``python -m regrad.bench.prediction``.

A plan is drawn over the tree of module calls: any call at any depth may be recomputed, inside recomputed ones too, so
ranges nest. Trace arithmetic predicts its peak; then the plan is run for real and the peak is measured by the
profiler's memory events and, where the process was started with the counting allocator, by that as well.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import random
import statistics
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

import regrad.torch as rt
from regrad.bench.record import write_result
from regrad.bench.subjects import SUBJECTS, Subject
from regrad.core.chain import RECOMPUTE
from regrad.core.simulate_trace import Range
from regrad.torch import execute
from regrad.torch.describe import UNSEEN_BYTES
from regrad.torch.measure import measure_peak
from regrad.torch.profile import Profile
from regrad.torch.store import persistent_bytes

PLANS = 30


@dataclass(frozen=True, slots=True)
class Row:
    """One plan of one subject. Ratios are predicted over measured, less 1; ``allocator_bytes`` is None without it."""

    subject: str
    gradients: str
    recomputed: int
    depth: int
    predicted_bytes: int
    profiler_bytes: int
    allocator_bytes: int | None
    error_ratio: float
    allocator_error_ratio: float | None


def draw(profile: Profile, chooser: random.Random) -> set[int]:
    """Calls to recompute: at least one, legal each, at any depth. Modules called more than once are left alone: in the
    replay of an outer range their calls could not be told from those of the first run."""
    trace = profile.arithmetic.trace
    counts: dict[str, int] = {}
    for call in trace.calls:
        counts[call.module] = counts.get(call.module, 0) + 1
    legal = [i for i, call in enumerate(trace.calls) if call.module and counts[call.module] == 1]
    legal = [i for i in legal if not profile.problem_of(trace.calls[i]) and trace.calls[i].stop > trace.calls[i].start]
    share = chooser.choice((0.05, 0.15, 0.3, 0.6))
    return {i for i in legal if chooser.random() < share} or {chooser.choice(legal)}


def ranges(profile: Profile, chosen: set[int]) -> tuple[list[Range], int]:
    """The chosen calls as nested ranges, and how deep they nest."""
    trace = profile.arithmetic.trace
    inside: dict[int, list[int]] = {}
    for index in sorted(chosen):
        parent = trace.calls[index].parent
        while parent >= 0 and parent not in chosen:
            parent = trace.calls[parent].parent
        inside.setdefault(parent, []).append(index)

    def build(index: int) -> tuple[Range, int]:
        call = trace.calls[index]
        children = [build(child) for child in inside.get(index, ())]
        depth = 1 + max((deep for _, deep in children), default=0)
        inner = tuple(child for child, _ in children)
        return profile.range_of(call, inner), depth

    built = [build(index) for index in inside.get(-1, ())]
    return [one for one, _ in built], max(depth for _, depth in built)


class Counter:
    """The counting allocator of this process, if it was started with one."""

    def __init__(self) -> None:
        library = ctypes.CDLL(None)
        self.present = hasattr(library, "counted_peak")
        if self.present:
            library.counted_peak.restype = library.counted_now.restype = ctypes.c_longlong
        self._library = library

    def peak(self, step: rt.Step, run: Callable[[], object] | None = None) -> int | None:
        """The peak of one step: what was there before it by its storages, and what it allocated on top.

        ``run`` runs it, where a step is more than one call of ``step``.
        """
        if not self.present:
            return None
        step.clear_gradients()
        before = self._library.counted_now()
        self._library.counted_peak()
        (run or step)()
        most = int(self._library.counted_peak())
        step.clear_gradients()
        return persistent_bytes(step) + most - int(before)


def try_subject(subject: Subject, gradients: str, plans: int, seed: int = 0) -> list[Row]:
    """Random plans of one subject, predicted and measured."""
    step = subject.step(gradients)
    step()
    step.clear_gradients()
    profile = rt.profile(step)
    chooser, counter = random.Random(seed), Counter()
    trace = profile.arithmetic.trace
    rows = []
    for _ in range(plans):
        chosen = draw(profile, chooser)
        nested, depth = ranges(profile, chosen)
        predicted = profile.arithmetic.levels(nested).peak_bytes + UNSEEN_BYTES
        options = execute.call_options((trace.calls[i].module, trace.calls[i].count, RECOMPUTE) for i in chosen)
        execute.install_plan(step.model, options, training=True, cache_off=profile.cache_off)
        try:
            counted = counter.peak(step) and counter.peak(step)
            measured = measure_peak(step).peak_bytes
        finally:
            rt.remove(step.model)
            step.clear_gradients()
        rows.append(
            Row(subject.name, gradients, len(chosen), depth, predicted, measured, counted, predicted / measured - 1,
                None if counted is None else predicted / counted - 1)
        )  # fmt: skip
    return rows


def main() -> int:
    """Exit code 1 if a prediction lies outside its subject's band by either measure."""
    parser = argparse.ArgumentParser(prog="python -m regrad.bench.prediction", description=__doc__)
    parser.add_argument("--subjects", nargs="+", default=[subject.name for subject in SUBJECTS])
    parser.add_argument("--gradients", nargs="+", default=["fresh", "kept"])
    parser.add_argument("--plans", type=int, default=PLANS)
    parser.add_argument("--json", type=Path, help="write every row to this file")
    parser.add_argument("--out", type=Path, help="folder for a dated result, such as benchmarks/results")
    settings = parser.parse_args()
    rows: list[Row] = []
    outside = 0
    for subject in SUBJECTS:
        if subject.name not in settings.subjects:
            continue
        for gradients in settings.gradients:
            found = try_subject(subject, gradients, settings.plans)
            rows += found
            errors = [abs(row.error_ratio) for row in found]
            counted = [abs(row.allocator_error_ratio) for row in found if row.allocator_error_ratio is not None]
            outside += sum(error > subject.band_ratio for error in errors + counted)
            distinct = len({row.predicted_bytes for row in found})
            deepest = max(row.depth for row in found)
            line = f"{subject.name:18} {gradients:5} {len(found)} plans, {distinct} distinct, depth <= {deepest}: "
            line += f"profiler median {statistics.median(errors):.4%} max {max(errors):.4%}"
            if counted:
                line += f"; allocator median {statistics.median(counted):.4%} max {max(counted):.4%}"
            sys.stdout.write(line + "\n")
            sys.stdout.flush()
    if settings.json is not None:
        settings.json.write_text(json.dumps([asdict(row) for row in rows], indent=1))
    if settings.out is not None:
        write_result("prediction", {"plans": settings.plans, "rows": [asdict(row) for row in rows]}, settings.out)
    return 1 if outside else 0


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(main())
