"""Runs a program for its three steps under one mode and takes down everything that must have eager's bits."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from regrad.torch.cohort.modes import Mode
from regrad.torch.cohort.programs import LOCAL, STEPS, Program, build
from regrad.torch.cohort.stages import run_stages
from regrad.torch.regions import region
from regrad.torch.regions.kept import retained_bytes

LEARNING_RATE = 0.05


@dataclass
class Outcome:
    """What one run came to.

    slots      (step, what) -> bits, in the order in which they came to be
    gradients  (step, name) -> the gradient itself
    raised     type and text of what stopped it
    bodies     how often the segment's body ran; alive: storages made in it that were there between the forward and the
               backward, the most of all steps
    retained_bytes  held by the mode for its replays between the forward and the backward, the most of all steps
    """

    slots: dict[tuple[int, str], Any] = field(default_factory=dict)
    gradients: dict[tuple[int, str], torch.Tensor] = field(default_factory=dict)
    raised: str | None = None
    steps: int = 0
    bodies: int = 0
    alive: int = 0
    retained_bytes: int = 0
    replays: int | None = None
    kept: tuple[tuple[str, int], ...] = ()
    old_versions: int | None = None
    max_gradient: float = 0.0


class _Tap:
    """Watches the body of segments from outside: counts its runs, and remembers the storages that one run made."""

    def __init__(self) -> None:
        self.bodies = 0
        self.made: list[StorageWeakRef] = []

    def __call__(self, frame: Any, event: str, argument: Any) -> None:
        if event == "return" and frame.f_code is run_stages.__code__:
            self.bodies += 1
            values = frame.f_locals.get("values", ())
            self.made = [StorageWeakRef(value.untyped_storage()) for value in values]

    def alive(self, others: tuple[torch.Tensor, ...]) -> int:
        """How many of those storages are still there, beside those of ``others``."""
        known = {tensor.untyped_storage()._cdata for tensor in others}
        return len({ref.cdata for ref in self.made if ref.cdata not in known and not ref.expired()})

    @contextmanager
    def watching(self) -> Iterator[_Tap]:
        """While watching; whoever watched before watches again afterwards."""
        before = sys.getprofile()
        sys.setprofile(self)
        try:
            yield self
        finally:
            sys.setprofile(before)


def bits(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Shape, type and bytes."""
    flat = tensor.detach().contiguous().reshape(-1)
    return (tuple(tensor.shape), str(tensor.dtype), flat.view(torch.uint8).numpy().tobytes())


def run(seed: int, condition: str, mode: Mode) -> Outcome:
    """Build the program of ``seed`` and ``condition`` and run it under ``mode``; what stops it is in the outcome."""
    program = build(seed, condition)
    outcome = Outcome()
    region._REGIONS.clear()  # a spec holds its tensors, and a region its settings: thousands of programs would pile up
    checkpoint, report = mode.make(program)
    torch.manual_seed(seed)
    tap = _Tap()
    for step in range(STEPS):
        try:
            _step(program, step, checkpoint, tap, outcome)
        except Exception as error:  # noqa: BLE001 - whatever stops a mode is its outcome
            outcome.raised = f"{type(error).__name__}: {error}"
            error.__traceback__ = None
            _state(program, step, outcome)
            break
        outcome.steps += 1
    outcome.bodies = tap.bodies
    if report is not None:
        outcome.replays = sum(one.replays for one in report.report())
        outcome.kept = tuple(entry for one in report.report() for entry in one.kept)
    return outcome


def _step(program: Program, step: int, checkpoint: Callable[..., Any], tap: _Tap, outcome: Outcome) -> None:
    x = program.inputs[step].clone().requires_grad_()
    state, before = program.memory, retained_bytes()
    entry = [view.of(state).detach().clone() for view in program.read_first]
    with tap.watching():
        result = checkpoint(program.segment, x, *program.arguments)
        out, returned = result if isinstance(result, tuple) else (result, None)
        # the loss draws too: a replay that leaves the generator at the segment's exit is then somewhere else
        loss = (out * (program.probe + 0.1 * torch.randn_like(out))).sum()
        if returned is not None:
            loss = loss + (returned * program.field).sum()
        held = (x, state, *program.parameters, *(() if returned is None else (returned,)), out)
        outcome.alive = max(outcome.alive, tap.alive(held))
        outcome.retained_bytes = max(outcome.retained_bytes, retained_bytes() - before)
        loss.backward()
    slots = outcome.slots
    slots[step, "output"] = bits(out)
    slots[step, "loss"] = bits(loss)
    if returned is not None:
        slots[step, "returned state"] = bits(returned)
    leaves = {"x": x, **{f"parameter {i}": one for i, one in enumerate(program.parameters)}}
    leaves |= {"state": state} if state.requires_grad else {}
    for name, leaf in leaves.items():
        if leaf.grad is None:
            slots[step, f"gradient of {name}"] = None
            continue
        slots[step, f"gradient of {name}"] = bits(leaf.grad)
        outcome.gradients[step, name] = leaf.grad.clone()
        if name != "state":
            outcome.max_gradient = max(outcome.max_gradient, float(leaf.grad.abs().max()))
    with torch.no_grad():
        for parameter in program.parameters:
            if parameter.grad is not None:
                parameter.sub_(LEARNING_RATE * parameter.grad)
                parameter.grad = None
    _carry(program, out, returned)
    _state(program, step, outcome)
    old = sum(
        not torch.equal(view.of(program.memory), was) for view, was in zip(program.read_first, entry, strict=True)
    )
    outcome.old_versions = old if outcome.old_versions is None else min(old, outcome.old_versions)


def _carry(program: Program, out: torch.Tensor, returned: torch.Tensor | None) -> None:
    """The state of the next step."""
    if program.condition not in LOCAL:
        return  # it is where the segment left it
    state = program.memory
    new = returned.detach() if returned is not None else state.detach() * 0.9 + 0.1 * torch.tanh(out.detach().mean())
    program.memory = new.requires_grad_(state.requires_grad)


def _state(program: Program, step: int, outcome: Outcome) -> None:
    """What a step leaves: bytes of the state, aliases of it, version counter, generator."""
    slots = outcome.slots
    if program.condition in LOCAL:
        slots[step, "state"] = bits(program.memory)
    else:
        base = program.storage.data_ptr()
        slots[step, "buffer"] = bits(program.storage)
        slots[step, "aliases of the buffer"] = [alias.data_ptr() - base for alias in program.aliases]
        slots[step, "version of the buffer"] = program.storage._version
    slots[step, "generator"] = bits(torch.get_rng_state())
