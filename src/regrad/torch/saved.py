"""``rt.saved``: every tensor that autograd keeps after a forward pass, and why.

Saved-tensor hooks hand each node a token in place of what it saves. A node that dies takes its tokens along, so the
tokens that are alive after the forward are what autograd holds, no more and no less. Asking the nodes for their saved
tensors then brings back each token under the name that the node gives it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from regrad.core import trace as tr
from regrad.core.saved import ARGUMENT, ATTRIBUTE, NUMBER, RESULT, Saved, SavedStorage, SavedTensor
from regrad.core.trace import Operation
from regrad.core.units import format_bytes
from regrad.torch.dryrun import Rehearsal
from regrad.torch.record import Recorder, TensorSpec, tensors_in
from regrad.torch.room import available_bytes
from regrad.torch.step import Step
from regrad.torch.store import (
    generators,
    persistent_bytes,
    persistent_tensors,
    real_copy,
    set_generators,
    untouched,
)

_PREFIX = "_saved_"
_LIFT = "aten.lift_fresh.default"
"""Takes in what ``torch.tensor(…)`` made of Python values within the forward; no operation made it."""


def saved(
    model: nn.Module | Step,
    batch: Any = None,
    *,
    loss: Callable[[nn.Module, Any], torch.Tensor] | None = None,
) -> Saved:
    """Every tensor that autograd keeps after the forward pass of ``model`` on ``batch``; arguments as in ``rt.plan``.

    Runs on a copy without bytes where it can, on a real copy where it must (:attr:`Saved.source`); the user's own
    objects stay as they are. Bytes are those of whole storages, each counted once. Cost: about two forward passes, in
    time; on a real copy, one step's memory.

    Not for: what Python holds beside autograd, such as the inputs that ``torch.utils.checkpoint`` keeps.

    Raises :class:`regrad.core.errors.InvalidSubject` for an empty model, a batch on another device or a loss that is no
    scalar, :class:`CannotTrace` where neither kind of step can be run, and whatever the model itself raises.
    """
    given = model if isinstance(model, Step) else Step(model, batch, loss)
    step = Step(given.model, given.batch, given.loss, gradients=given.gradients)
    with untouched(step):
        begin = generators()
        rehearsal = Rehearsal(step)
        set_generators(begin)
        with rehearsal.entered():
            storages = saved_of(rehearsal.step)
        why = rehearsal.why_real
        notes = (f"the step was run for real on a copy: fake tensors do not carry it ({why})",) if why else ()
        found = Saved(storages, str(step.device), rehearsal.source, notes)
        unsized = sorted({one.operation for one in storages if one.bytes == 0 and one.operation})
        if unsized and rehearsal.source == "fake":
            set_generators(begin)
            found = _sized(found, step, unsized)
    return found


def _sized(found: Saved, step: Step, unsized: list[str]) -> Saved:
    """``found`` again with real tensors: the fake kernels of some libraries do not know what the real ones ask for."""
    note = f"fake tensors do not know the size of what {', '.join(unsized)} keeps"
    needed = 2 * persistent_bytes(step) + found.activation_bytes
    if needed > available_bytes():
        note += f"; a real run would, and there is no room for the {format_bytes(needed)} that it takes"
        return replace(found, notes=(*found.notes, note))
    note = f"the step was run for real on a copy: {note}"
    return Saved(saved_of(real_copy(step)), found.device, "real", (*found.notes, note))


def saved_of(step: Step) -> tuple[SavedStorage, ...]:
    """Run the forward of ``step`` as it is and list what autograd holds at its end. The step's own tensors are used."""
    recorder = Recorder()
    known = _register(step, recorder)
    ledger = _Ledger(recorder)
    with torch.autograd.graph.saved_tensors_hooks(ledger.pack, ledger.unpack):
        with recorder, recorder.watching(step.model):
            loss = step.compute_loss()
        ledger.ask(loss)
    return _Table(recorder, known, ledger).storages()


@dataclass(frozen=True, slots=True)
class _Known:
    """A storage that was there before the step: what it is called, and the tensor that it belongs to."""

    name: str
    spec: TensorSpec


def _register(step: Step, recorder: Recorder) -> dict[int, _Known]:
    for tensor, category in persistent_tensors(step):
        recorder.register(tensor, category)
    found: dict[int, _Known] = {}
    for name, tensor in _named(step):
        index = recorder.find(tensor)
        if index is not None:
            found.setdefault(index, _Known(name, TensorSpec.of(tensor)))
    return found


def _named(step: Step) -> Iterator[tuple[str, torch.Tensor]]:
    yield from step.model.named_parameters()
    yield from step.model.named_buffers()
    for path, leaf in pytree.tree_flatten_with_path(step.batch)[0]:
        if isinstance(leaf, torch.Tensor):
            yield f"batch{pytree.keystr(path)}", leaf


class _Token:
    """Stands in the graph for a saved tensor and keeps it alive there. ``operation`` is the one its node belongs to."""

    __slots__ = ("__weakref__", "after", "name", "node", "operation", "spec", "storage", "tensor", "what", "whole")

    def __init__(self, tensor: torch.Tensor, storage: int, operation: int, after: bool) -> None:
        self.tensor = tensor
        self.spec = TensorSpec.of(tensor)
        self.whole = tensor.storage_offset() == 0
        self.storage, self.operation, self.after = storage, operation, after
        self.node, self.name, self.what = "", "", ""


class _Ledger:
    """The hooks, and what they were given that is still held when the forward is over."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self.numbers: list[tuple[int, _Token]] = []
        self.attributes: list[_Token] = []
        self._packed: list[weakref.ref[_Token]] = []
        self._asked: list[_Token] = []

    def pack(self, tensor: torch.Tensor) -> _Token:
        """A node saves ``tensor``."""
        position = len(self.recorder.operations)
        self.recorder.saved(tensor)
        storage = self.recorder.find(tensor)
        assert storage is not None
        operation = self.recorder.storages[storage].saved_by[-1].operation
        # A result leads to its node, and the node to its token: detached, or the circle would never be let go.
        token = _Token(tensor.detach(), storage, operation, operation < position)
        self._packed.append(weakref.ref(token))
        return token

    def unpack(self, token: _Token) -> torch.Tensor:
        """A node is asked for what it saved."""
        self._asked.append(token)
        return token.tensor

    def held(self) -> list[_Token]:
        """The tokens that are alive, in the order in which they were made."""
        return [token for token in (ref() for ref in self._packed) if token is not None]

    def ask(self, loss: torch.Tensor) -> None:
        """Ask every node below ``loss`` what it holds and under which name; then keep the tokens, for the graph goes."""
        self.operations = {
            operation.sequence - 1: k for k, operation in reversed(list(enumerate(self.recorder.operations)))
        }
        for node in _nodes(loss):
            for name in _saved_names(type(node)):
                self._read(node, name.removeprefix(_PREFIX), getattr(node, name))
            if isinstance(node, torch.autograd.function.BackwardCFunction):
                self._read(node, "", node.saved_tensors)
                self._read_attributes(node)
        self.tokens = self.held()

    def _read(self, node: Any, name: str, value: Any) -> None:
        """``value`` is what ``node`` just answered, by way of the hook if it holds tokens."""
        asked, self._asked = self._asked, []
        tensors = tensors_in(value)
        for token in asked:
            token.node, token.name = node.name(), name
        if tensors and not asked:
            # Saved without asking a hook: a Python number that stands where the operation takes a tensor.
            for tensor in tensors:
                operation = self.operations.get(node._sequence_nr(), -1)
                token = _Token(tensor, -1, operation, False)
                token.node, token.name = node.name(), name
                self.numbers.append((tensor.untyped_storage().nbytes(), token))

    def _read_attributes(self, node: Any) -> None:
        for name, value in vars(node).items():
            for tensor in tensors_in(value):
                storage = self.recorder.find(tensor)
                if storage is not None:
                    token = _Token(tensor, storage, self.operations.get(node._sequence_nr(), -1), False)
                    token.node, token.name, token.what = node.name(), name, ATTRIBUTE
                    self.attributes.append(token)


def _nodes(loss: torch.Tensor) -> Iterator[Any]:
    """Every node of the graph, each once."""
    pending: list[Any] = [loss.grad_fn]
    seen: set[Any] = set()
    while pending:
        node = pending.pop()
        if node is not None and node not in seen:
            seen.add(node)
            yield node
            pending += [following for following, _ in node.next_functions]


def _saved_names(kind: type) -> list[str]:
    return [name for name in dir(kind) if name.startswith(_PREFIX)]


class _Table:
    """Makes the values that a user gets out of tokens and the record."""

    def __init__(self, recorder: Recorder, known: dict[int, _Known], ledger: _Ledger) -> None:
        self.recorder, self.known, self.ledger = recorder, known, ledger
        lifts = [operation for operation in recorder.operations if operation.name == _LIFT]
        self.lifted = {index: operation for operation in lifts for index in operation.reads}

    def storages(self) -> tuple[SavedStorage, ...]:
        """All storages that are held, in the order of their first save."""
        groups: dict[int, list[_Token]] = {}
        for token in (*self.ledger.tokens, *self.ledger.attributes):
            groups.setdefault(token.storage, []).append(token)
        found = [(tokens[0].operation, self._storage(index, tokens)) for index, tokens in groups.items()]
        found += [(token.operation, self._number(size, token)) for size, token in self.ledger.numbers]
        return tuple(storage for _, storage in sorted(found, key=lambda pair: pair[0]))

    def _storage(self, index: int, tokens: list[_Token]) -> SavedStorage:
        storage = self.recorder.storages[index]
        maker = self._maker(index)
        base = self._base(index) or tokens[0].spec
        known = self.known.get(index)
        category = storage.category
        if known is None and storage.category in (tr.INPUTS, tr.ACTIVATIONS):
            category = tr.INPUTS if maker is None else tr.ACTIVATIONS
        return SavedStorage(
            bytes=storage.bytes,
            category=category,
            name=known.name if known is not None else "",
            shape=base.shape,
            dtype=_dtype(base),
            operation=maker.name if maker is not None else "",
            module=self._module(maker),
            where=maker.where if maker is not None else "",
            saves=tuple(self._save(token, base) for token in tokens),
        )

    def _number(self, size: int, token: _Token) -> SavedStorage:
        save = self._save(token, token.spec)
        shape, dtype = token.spec.shape, _dtype(token.spec)
        return SavedStorage(size, tr.ACTIVATIONS, "", shape, dtype, NUMBER, save.module, save.where, (save,))

    def _maker(self, index: int) -> Operation | None:
        """The operation that made a storage; None for what was there before, seen by a node before any operation."""
        birth = self.recorder.storages[index].birth
        if birth < 0:
            return None if index in self.known else self.lifted.get(index)
        operation = self.recorder.operations[birth]
        return operation if index in operation.makes else None

    def _base(self, index: int) -> TensorSpec | None:
        """The tensor as it was made."""
        if index in self.known:
            return self.known[index].spec
        maker = self._maker(index)
        if maker is None or index not in maker.makes:
            return None
        signature = self.recorder.signatures[self.recorder.signature_of[self.recorder.storages[index].birth]]
        specs = [leaf for leaf in pytree.tree_leaves(signature.result) if isinstance(leaf, TensorSpec)]
        return specs[maker.makes.index(index)] if len(specs) == len(maker.makes) else None

    def _save(self, token: _Token, base: TensorSpec) -> SavedTensor:
        operation = self._operation(token)
        what, index = self._role(token, operation)
        same = token.whole and (token.spec.shape, token.spec.stride) == (base.shape, base.stride)
        return SavedTensor(
            node=token.node or (operation.name if operation is not None else "a node"),
            what=what,
            index=index,
            name=token.name,
            shape=token.spec.shape,
            dtype=_dtype(token.spec),
            view=not same,
            module=self._module(operation),
            where=operation.where if operation is not None else "",
        )

    def _operation(self, token: _Token) -> Operation | None:
        inside = 0 <= token.operation < len(self.recorder.operations)
        return self.recorder.operations[token.operation] if inside else None

    def _role(self, token: _Token, operation: Operation | None) -> tuple[str, int | None]:
        """Argument, result or attribute of the node's operation, and the how-manieth, by the name that the node has."""
        if token.what:
            return token.what, None
        if operation is not None:
            schema = self.recorder.signatures[self.recorder.signature_of[token.operation]].func._schema
            arguments = [argument.name for argument in schema.arguments]
            if token.name in arguments:
                return ARGUMENT, arguments.index(token.name)
            results = [result.name for result in schema.returns]
            if token.name in results:
                return RESULT, results.index(token.name)
            number = token.name.removeprefix(RESULT)
            if token.name.startswith(RESULT) and (not number or number.isdecimal()):
                return RESULT, int(number or 0)
        return (RESULT if token.after else ARGUMENT), None

    def _module(self, operation: Operation | None) -> str:
        return "" if operation is None or operation.call < 0 else self.recorder.calls[operation.call].module


def _dtype(spec: TensorSpec) -> str:
    return str(spec.dtype).removeprefix("torch.")
