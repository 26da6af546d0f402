"""The fourteen modes: six of torch's checkpoint, eight of regrad's, each as a function like ``checkpoint``."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from regrad.torch.cohort.programs import Program
from regrad.torch.regions.public import Checkpoint
from regrad.torch.regions.settings import StateSpec

ENGINES = ("snapshot", "journal", "read_set", "guarded")
_SAVED = {torch.ops.aten.mm.default, torch.ops.aten.addmm.default}


def save_products(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """The selective policy: results of matrix products are saved, everything else is recomputed.

    It is the policy that torch's documentation shows: products are what is costly to compute again. It saves no random
    operation, so with the generator preserved every draw falls where it fell.
    """
    return CheckpointPolicy.MUST_SAVE if operation in _SAVED else CheckpointPolicy.PREFER_RECOMPUTE


@dataclass(frozen=True)
class Mode:
    """One way to run segments.

    make     from a program to ``checkpoint(function, *args)`` and what reports its replays (``None`` for torch's)
    selects  whether it may hold some of the tensors between the forward and the backward
    """

    name: str
    make: Callable[[Program], tuple[Callable[..., Any], Checkpoint | None]]
    selects: bool = False


def eager(function: Callable[..., Any], *args: Any) -> Any:
    """No checkpoint at all."""
    return function(*args)


def declared(program: Program) -> StateSpec:
    """What a user who knows the program would name: the buffer that it captures; nothing if it captures none."""
    return StateSpec() if program.arguments else StateSpec(tensors={"buffer": program.storage})


def ours(program: Program, engine: str, state: str, guard: str = "first") -> tuple[Callable[..., Any], Checkpoint]:
    """:class:`regrad.torch.Checkpoint` with one engine, its state declared or discovered."""
    made = Checkpoint(state="auto" if state == "discovered" else declared(program), engine=engine, guard=guard)
    return made, made


def _torchs(**settings: Any) -> Callable[[Program], tuple[Callable[..., Any], None]]:
    return lambda program: (functools.partial(torch_checkpoint, **settings), None)


def _modes() -> list[Mode]:
    found = []
    contexts = functools.partial(create_selective_checkpoint_contexts, save_products)
    for name, settings in (
        ("torch reentrant", {"use_reentrant": True}),
        ("torch non-reentrant", {"use_reentrant": False}),
        ("torch selective", {"use_reentrant": False, "context_fn": contexts}),
    ):
        for preserved in (True, False):
            label = name if preserved else f"{name}, no generator"
            make = _torchs(preserve_rng_state=preserved, **settings)
            found.append(Mode(label, make, selects="context_fn" in settings))
    for engine in ENGINES:
        for state in ("declared", "discovered"):
            made = functools.partial(ours, engine=engine, state=state)
            found.append(Mode(f"regrad {engine} {state}", made))
    return found


EAGER = Mode("eager", lambda program: (eager, None), selects=True)
MODES = tuple(_modes())
