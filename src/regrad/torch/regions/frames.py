"""What runs on this thread: forwards of regions that are being recorded, and replays. And the lock around both."""

from __future__ import annotations

import sys
import threading
from typing import Any

import torch

from regrad.core.errors import ReplayDivergence, UnsupportedState


class Frame:
    """One recording or replay on the stack.

    owner      the call that it belongs to
    inner      how many calls of regions were made inside it so far: their order names what they lend
    once       results of :func:`once`, recorded or to be given again
    """

    def __init__(self, owner: Any, *, replaying: bool) -> None:
        self.owner, self.replaying = owner, replaying
        self.inner = 0
        self.once: list[Any] = owner.once if replaying else []
        self.cursor = 0
        self.effect: str | None = None

    def wants(self, key: tuple[int, int]) -> bool:
        """Whether this is a replay whose forward held that argument."""
        return self.replaying and key in self.owner.lent

    def lend(self, key: tuple[int, int], tensor: torch.Tensor) -> Any:
        """Let this frame hold an argument of a call inside it; returns what :func:`borrowed` takes."""
        return self.owner.lend(self, key, tensor)


class _Local(threading.local):
    def __init__(self) -> None:
        self.stack: list[Frame] = []
        self.in_once = 0


LOCAL = _Local()


def replaying() -> bool:
    """Whether a replay runs on this thread."""
    return any(frame.replaying for frame in LOCAL.stack)


def run_once(function: Any, args: Any, kwargs: Any) -> Any:
    """See :func:`regrad.torch.once`."""
    stack = LOCAL.stack
    source = next((i for i in range(len(stack) - 1, -1, -1) if stack[i].replaying), None)
    if source is not None:
        frame = stack[source]
        if frame.cursor >= len(frame.once):
            raise ReplayDivergence(
                "the replay calls more once(...) effects than the forward did", segment=frame.owner.name
            )
        result = frame.once[frame.cursor]
        frame.cursor += 1
        above = stack[source + 1 :]
    else:
        LOCAL.in_once += 1
        try:
            result = function(*args, **kwargs)
        finally:
            LOCAL.in_once -= 1
        above = stack
        if stack and isinstance(result, torch.Tensor) and result.requires_grad:
            raise UnsupportedState(
                "once(...) returned a tensor that requires a gradient, which cannot be given again",
                segment=stack[-1].owner.name,
                hint="Return a detached tensor, or take the computation out of once(...).",
            )
    for frame in above:
        frame.once.append(result)
    return result


class Lock:
    """One forward or replay at a time in the process, re-entrant.

    A worker thread of autograd may pass while the thread that holds the lock waits for autograd itself (a backward
    inside a region, on a device whose backward runs on a thread of its own).
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._holder = 0
        self._depth = 0
        self._passed = threading.local()

    def __enter__(self) -> None:
        while not self._lock.acquire(timeout=0.2):
            if self._holder_waits_for_autograd():
                self._passed.count = getattr(self._passed, "count", 0) + 1
                return
        self._holder = threading.get_ident()
        self._depth += 1

    def __exit__(self, *error: object) -> None:
        if getattr(self._passed, "count", 0):
            self._passed.count -= 1
            return
        self._depth -= 1
        if not self._depth:
            self._holder = 0
        self._lock.release()

    def _holder_waits_for_autograd(self) -> bool:
        if torch._C._current_graph_task_id() == -1:
            return False
        frame = sys._current_frames().get(self._holder)
        return frame is not None and frame.f_code.co_name == "_engine_run_backward"


LOCK = Lock()
