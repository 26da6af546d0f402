"""Workspace: what a kernel allocates for itself and frees before it returns. Only memory events show it."""

from __future__ import annotations

import os
from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from typing import Any

import torch
from torch.autograd.profiler import record_function
from torch.profiler import ProfilerActivity, profile

os.environ.setdefault("KINETO_LOG_LEVEL", "5")

_MARK = "regrad.operation"


def workspaces(calls: Iterable[tuple[Any, Any, Any]]) -> list[int]:
    """For each (function, args, kwargs): the most bytes held during the call beyond what its result holds at the end.

    ``calls`` may make its arguments one call at a time. Runs every call once under one profiler session. Bytes are
    those of the framework's allocator; what a library inside a kernel takes from malloc by itself is not seen.
    """
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        count = 0
        for index, (function, args, kwargs) in enumerate(calls):
            count = index + 1
            with torch.enable_grad(), mark(index):
                result = function(*args, **kwargs)
            del result, args, kwargs
    found = by_window(recorded.profiler.kineto_results.events())
    return [found.get(index, (0, 0.0))[0] for index in range(count)]


def mark(index: int) -> Any:
    """A context whose window :func:`by_window` finds again under ``index``."""
    return record_function(f"{_MARK}.{index}")


def by_window(events: Any) -> dict[int, tuple[int, float]]:
    """For each marked window of a profile: workspace bytes (the most held in it beyond what was left at its end) and
    seconds. One pass over the memory events, which must not overlap in threads."""
    windows: list[tuple[int, int, int]] = []
    changes: list[tuple[int, int]] = []
    for event in events:
        name = event.name()
        if name == "[memory]":
            changes.append((event.start_ns(), event.nbytes()))
        elif name.startswith(_MARK):
            start = event.start_ns()
            windows.append((start, start + event.duration_ns(), int(name.rsplit(".", 1)[1])))
    changes.sort(key=lambda change: change[0])
    times = [at for at, _ in changes]
    found = {}
    for start, stop, index in windows:
        held = most = 0
        for _, count in changes[bisect_left(times, start) : bisect_right(times, stop)]:
            held += count
            most = max(most, held)
        found[index] = (max(0, most - max(held, 0)), (stop - start) / 1e9)
    return found
