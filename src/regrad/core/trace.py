"""The trace: one training step, per operation and per storage. It is the ground truth of planning.

Times are positions in the list of operations. A storage that was there before the first operation has birth -1; one
that outlives the step has no death.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

FORWARD, BACKWARD, OPTIMIZER = "forward", "backward", "optimizer"
PHASES = (FORWARD, BACKWARD, OPTIMIZER)

WEIGHTS, GRADIENTS, OPTIMIZER_STATE, BUFFERS, INPUTS, ACTIVATIONS, TEMPORARIES = CATEGORIES = (
    "weights",
    "gradients",
    "optimizer",
    "buffers",
    "inputs",
    "activations",
    "temporaries",
)


NO_HOOK = -1


class Save(NamedTuple):
    """A backward node that saved a storage.

    operation  the forward operation that the node belongs to
    node       the node's sequence number
    position   operations before this one must have run for the saved tensor to be there: ``operation`` for an argument,
               ``operation + 1`` for a result; NO_HOOK if the node keeps it without asking a saved-tensor hook, so that
               no replay can be asked for it
    order      the how-many-th tensor that saved-tensor hooks of the forward were given
    """

    operation: int
    node: int
    position: int
    order: int = 0


@dataclass(slots=True)
class Storage:
    """A piece of memory from its birth to its death.

    birth      the operation that made it; -1 if it was there before the step
    death      it was freed before this operation ran; None if it outlives the step
    last_use   the last operation that reads or writes it
    saved_by   the backward nodes that saved it
    drop       before this forward operation everything but autograd let go of it; None if it is held beyond the forward
    """

    bytes: int
    category: str
    birth: int
    death: int | None = None
    last_use: int = -1
    saved_by: tuple[Save, ...] = ()
    drop: int | None = None


@dataclass(slots=True)
class Operation:
    """One operation of the step.

    name        of the kernel, such as ``aten.addmm.default``
    phase       forward, backward or optimizer
    call        index of the innermost module call that it ran in; -1 outside every call
    sequence    autograd's sequence number: of the nodes made from here on (forward), of the node that runs (backward)
    reads, makes, writes   indices of storages: its arguments, what it allocated, what it wrote in place
    workspace_bytes        the most that the kernel held for itself beyond what it made
    where       file:line of the user's code that called it (forward only)
    torch_call  which torch call of the forward it belongs to, counted from 0; -1 if none is known
    """

    name: str
    phase: str
    call: int
    sequence: int
    reads: tuple[int, ...] = ()
    makes: tuple[int, ...] = ()
    writes: tuple[int, ...] = ()
    seconds: float = 0.0
    workspace_bytes: int = 0
    draws: bool = False
    where: str = ""
    torch_call: int = -1


@dataclass(slots=True)
class Call:
    """One call of a module in the forward pass: operations ``start`` … ``stop - 1``, the ``count``-th call of it.

    ``inputs`` are the storages of the tensors that it is given, ``plain_inputs`` those that require no gradient.
    """

    module: str
    kind: str
    count: int
    start: int
    stop: int
    parent: int
    first_sequence: int
    stop_sequence: int
    inputs: tuple[int, ...] = ()
    outputs: tuple[int, ...] = ()
    plain_inputs: tuple[int, ...] = ()


@dataclass
class Trace:
    """The record of one step. ``source`` is "fake" or "real"; ``gradients`` "fresh" or "kept"."""

    operations: list[Operation]
    storages: list[Storage]
    calls: list[Call]
    source: str
    gradients: str
    device: str
    fingerprint: str = ""
    seconds: float = 0.0
    notes: list[str] = field(default_factory=list)

    @cached_property
    def persistent_bytes(self) -> int:
        """P: what is there before the step and outlives it."""
        return sum(s.bytes for s in self.storages if s.birth < 0 and s.death is None)

    @cached_property
    def phase_starts(self) -> dict[str, int]:
        """The first operation of each phase; a phase that has none starts where the next one does."""
        starts: dict[str, int] = {}
        for index, operation in enumerate(self.operations):
            starts.setdefault(operation.phase, index)
        end = len(self.operations)
        for phase in reversed(PHASES):
            end = starts.setdefault(phase, end)
        return starts
