"""Workspace: what a kernel allocates for itself and frees before it returns. Only memory events show it."""

from __future__ import annotations

import os
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
            with torch.enable_grad(), record_function(f"{_MARK}.{index}"):
                result = function(*args, **kwargs)
            del result, args, kwargs
    windows: dict[int, tuple[int, int]] = {}
    changes: list[tuple[int, int]] = []
    for event in recorded.profiler.kineto_results.events():
        name = event.name()
        if name == "[memory]":
            changes.append((event.start_ns(), event.nbytes()))
        elif name.startswith(_MARK):
            windows[int(name.rsplit(".", 1)[1])] = (event.start_ns(), event.start_ns() + event.duration_ns())
    changes.sort(key=lambda change: change[0])
    found = []
    for index in range(count):
        start, stop = windows.get(index, (0, 0))
        held = most = 0
        for at, count in changes:
            if start <= at <= stop:
                held += count
                most = max(most, held)
        found.append(max(0, most - max(held, 0)))
    return found
