"""Checkpoints that save nothing: one region around all blocks, or around the last ones alone, seen as they replay.

While a step is recorded, hooks watch which modules are called during the backward, and the frames above such a call tell
that a checkpoint (torch's, or :func:`regrad.torch.checkpoint`) runs it, and which of its replays it is.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from regrad.core import trace as tr
from regrad.core.advice import Trap
from regrad.core.simulate_trace import live_levels
from regrad.core.trace import Trace
from regrad.core.units import format_bytes
from regrad.torch.profile import Profile
from regrad.torch.record import Recorder
from regrad.torch.watch import find_candidates

AROUND_ALL, LAST_ONLY = "one checkpoint around everything", "a checkpoint around the last stage alone"
_REPLAYS = ("torch/utils/checkpoint.py", "regrad/torch/regions/replay.py")
CURE = (
    "put a checkpoint around each block by itself (rt.checkpoint(block, x)), or let rt.plan choose: only one block's "
    "activations are then there at a time"
)


@dataclass
class Replay:
    """One replay of a checkpointed region: where in the record it starts and stops, and the modules that it called."""

    start: int
    frame: FrameType
    stop: int = 0
    modules: set[str] = field(default_factory=set)


def record_replays(profile: Profile) -> tuple[Trace, list[Replay]]:
    """The record of a step, with the replays in its backward, in order."""
    found: list[Replay] = []
    handles: list[Any] = []

    def note(name: str) -> None:
        recorder = next((m for m in _get_current_dispatch_mode_stack() if isinstance(m, Recorder)), None)
        frame = _replay_frame()
        if recorder is None or recorder.phase != tr.BACKWARD or frame is None:
            return
        known = next((one for one in found if one.frame is frame), None)
        if known is None:
            known = Replay(len(recorder.operations), frame)
            found.append(known)
        known.modules.add(name)
        known.stop = len(recorder.operations)

    def entering(name: str) -> Any:
        return lambda module, args: note(name)

    def leaving(name: str) -> Any:
        return lambda module, args, result: note(name)

    def install(model: torch.nn.Module) -> None:
        for name, module in model.named_modules():
            handles.append(module.register_forward_pre_hook(entering(name)))
            # A replay is cut short by an exception once it has what the backward wants.
            handles.append(module.register_forward_hook(leaving(name), always_call=True))

    try:
        trace = profile.rehearsal.record(install, number=False).trace
    finally:
        for handle in handles:
            handle.remove()
    return trace, found


def _replay_frame() -> FrameType | None:
    """The innermost frame of a checkpoint's replay, if one runs."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename.replace("\\", "/").endswith(_REPLAYS):
            return frame
        frame = frame.f_back
    return None


def checkpoint_trap(profile: Profile) -> Trap | None:
    """The trap of a region that covers all blocks, or a run of blocks up to the last one while no other is replayed."""
    trace, replays = record_replays(profile)
    blocks = [trace.calls[one.call].module for one in find_candidates(profile.rehearsal.step.model, trace)]
    blocks = list(dict.fromkeys(blocks))
    if len(blocks) < 2 or not replays:
        return None
    covering = [(one, [name for name in blocks if name in one.modules]) for one in replays]
    covering = [(one, names) for one, names in covering if names]
    if len(covering) != 1:
        return None
    replay, names = covering[0]
    if names != blocks[-len(names) :]:
        return None
    during, before = live_levels(trace).during, live_levels(trace).before
    end = trace.phase_starts[tr.OPTIMIZER]
    at_once = before[replay.stop] - before[replay.start]
    whole = len(names) == len(blocks)
    if not whole and max(during[replay.start : end]) < max(during[: replay.start]):
        return None  # the step's working peak is over before the replay: there the checkpoint did help
    which = f"all {len(blocks)} blocks" if whole else f"the last {len(names)} of {len(blocks)} blocks and no other"
    return Trap(
        name=AROUND_ALL if whole else LAST_ONLY,
        what=f"one checkpointed region covers {which}: its replay brings {format_bytes(at_once)} back at once"
        + ("" if whole else ", on top of all that the other blocks hold until then")
        + ", so the peak is that of a step without it, and the forward runs twice",
        modules=tuple(names),
        bytes=at_once,
        cure=CURE,
    )
