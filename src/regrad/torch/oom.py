"""``rt.explain_oom``: puts an explanation on an out-of-memory error, and lets it go on as it is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from traceback import clear_frames, walk_tb
from types import TracebackType
from typing import Any

import torch
from torch import nn

from regrad.core.advice import Advice, Trap
from regrad.core.oom import Explanation
from regrad.core.timeline import modules
from regrad.core.trace import BACKWARD
from regrad.core.units import Budget, format_bytes
from regrad.memory.fragmentation import fragmentation
from regrad.torch.advise import advise
from regrad.torch.oom_facts import alive, asked_bytes, is_out_of_memory, kept_graph, objects_alive, place
from regrad.torch.profile import Profile, make_profile
from regrad.torch.room import available_bytes
from regrad.torch.step import Step


def explain_oom(
    model: nn.Module | Step | None = None,
    batch: Any = None,
    *,
    loss: Callable[[nn.Module, Any], torch.Tensor] | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    budget: str | int | Budget | None = None,
    devices: int | None = None,
    keep_frames: bool = False,
) -> OomExplainer:
    """A context in which an out-of-memory error is explained: ``with rt.explain_oom(model, batch, optimizer=opt): …``

    The error goes on as the very object that it was, so ``except torch.OutOfMemoryError`` still catches it. It has a
    note that Python prints below its traceback, and as attributes ``explanation`` (a
    :class:`regrad.core.oom.Explanation`) and, where a step is given, ``advice`` (:func:`regrad.torch.advise`). Both are
    also on what ``as seen`` names. Known as such errors are ``torch.OutOfMemoryError``, ``MemoryError``, and a
    ``RuntimeError`` with the words of an allocator; everything else passes untouched.

    model, batch, loss, optimizer   as for ``rt.advise``, all optional: without a step it says who asked for how much,
                                    where, what is alive, and the traps that can be seen from outside
    budget      what the step should fit; left out, it is the room that there was: what tensors held when it failed and
                what the process could still get
    keep_frames leave local variables in the error's traceback as they are. They hold what the failed step held, so that
                there may be no room to advise in; left out, with a step, they are let go of once they have been read

    Costs nothing until it happens; then a walk over the objects that are alive and, with a step, what ``rt.advise`` takes.
    Where the explanation fails, the note says why.
    """
    given = model
    if isinstance(model, nn.Module):
        given = Step(model, batch, loss, optimizer)
    return OomExplainer(given if isinstance(given, Step) else None, budget, devices, keep_frames)


class OomExplainer:
    """The context that :func:`explain_oom` makes. ``explanation`` is None until an error was explained."""

    def __init__(
        self, step: Step | None, budget: str | int | Budget | None, devices: int | None, keep_frames: bool
    ) -> None:
        self.step, self.budget, self.devices, self.keep_frames = step, budget, devices, keep_frames
        self.explanation: Explanation | None = None

    @property
    def advice(self) -> Advice | None:
        """Of the explanation, if there is one."""
        return None if self.explanation is None else self.explanation.advice

    def __enter__(self) -> OomExplainer:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if error is None or not is_out_of_memory(error):
            return
        try:
            plain, room = _what_is_known(self.step, error, at)
            if self.step is not None:
                if not self.keep_frames:
                    _let_go(error)
                plain = _with_advice(plain, self.step, room if self.budget is None else self.budget, self.devices)
            self.explanation = plain
        except Exception as failure:  # noqa: BLE001 - the user's error must go on, whatever happens to its explanation
            error.add_note(f"regrad: this could not be explained ({type(failure).__name__}: {failure})")
            return
        error.add_note(str(self.explanation))
        error.explanation = self.explanation  # type: ignore[attr-defined]
        if self.advice is not None:
            error.advice = self.advice  # type: ignore[attr-defined]


def _what_is_known(step: Step | None, error: BaseException, at: TracebackType | None) -> tuple[Explanation, int]:
    """What can be said without running anything, and the room that there was for tensors."""
    asked, where = asked_bytes(error), place(at, None if step is None else step.model)
    device = _device(step, error)
    objects = objects_alive()
    held = alive(objects, device)
    graph = kept_graph(objects, at)
    del objects
    traps: list[Trap] = [] if graph is None else [graph]
    if device == "cuda" and torch.cuda.is_available():
        broken = fragmentation(torch.cuda.memory_stats(), asked)
        traps += [] if broken is None else [broken]
    plain = Explanation(
        device, asked, where.phase, where.modules, where.code, where.where, where.operation, held, tuple(traps)
    )
    return plain, _room(device, sum(held.values()))


def _let_go(error: BaseException) -> None:
    """Clear the frames that have ended in the tracebacks of an error and of those that it was raised in handling."""
    one: BaseException | None = error
    while one is not None:
        clear_frames(one.__traceback__)
        for frame, _ in walk_tb(one.__traceback__):
            _ = frame.f_locals  # reading them made a copy, which only another reading empties (Python below 3.13)
        one = one.__cause__ or one.__context__


def _with_advice(plain: Explanation, step: Step, room: str | int | Budget, devices: int | None) -> Explanation:
    try:
        profile = make_profile(step)
        advice = advise(step, budget=room, devices=devices, profile=profile)
    except Exception as failure:  # noqa: BLE001 - what is known without the step's record is still worth saying
        return replace(plain, notes=(f"there is no advice: {type(failure).__name__}: {failure}",))
    return replace(plain, advice=advice, notes=_notes(plain, profile, advice))


def _notes(plain: Explanation, profile: Profile, advice: Advice) -> tuple[str, ...]:
    """What the step's record adds to what the error says."""
    notes = []
    if plain.phase == BACKWARD and plain.asked_bytes:
        module = _likely(profile, plain.asked_bytes)
        notes += [f"the backward asks for as much {module}"] if module else []
    if advice.fits:
        others = sum(plain.alive.values()) - advice.peak_bytes
        beyond = f"; {format_bytes(others)} more than that were alive" if others > 0 else ""
        notes.append(
            f"by its record the step needs {format_bytes(advice.peak_bytes)}, and there was room for "
            f"{format_bytes(advice.budget_bytes)}: look for what else holds memory{beyond}"
        )
    return tuple(notes)


def _likely(profile: Profile, asked: int) -> str:
    """The backward operation that asks for so many bytes, the one at the highest level of those, in words."""
    trace = profile.trace
    start = trace.phase_starts[BACKWARD]
    levels = profile.arithmetic.levels().during
    found = [
        index
        for index, operation in enumerate(trace.operations)
        if index >= start and any(abs(trace.storages[made].bytes - asked) <= 0.01 * asked for made in operation.makes)
    ]
    if not found:
        return ""
    best = max(found, key=lambda index: levels[index] if index < len(levels) else 0)
    module = modules(trace)[best]
    return f"in {trace.operations[best].name}" + (f" of {module}" if module else "")


def _device(step: Step | None, error: BaseException) -> str:
    if step is not None:
        return step.device.type
    return "cuda" if isinstance(error, torch.OutOfMemoryError) or "CUDA" in str(error) else "cpu"


def _room(device: str, held: int) -> int:
    """What the process's tensors could have taken: what they held, and what it could still get."""
    if device == "cuda" and torch.cuda.is_available():
        free, _ = torch.cuda.mem_get_info()
        return int(free) + int(torch.cuda.memory_reserved())
    return held + available_bytes()
