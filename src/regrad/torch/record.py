"""Records one step as a :class:`regrad.core.trace.Trace`: operations, storages, module calls.

Works the same on fake and on real tensors: a dispatch mode sees every operation, weak references see every storage die,
module hooks give the calls. A dispatch mode changes the program that it watches in one way that matters: autograd sums
two gradients out of place while any mode is on, and in place otherwise. :meth:`Recorder._accumulate` puts that right.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from regrad.core import trace as tr
from regrad.core.trace import NO_HOOK, Call, Operation, Save, Storage, Trace
from regrad.torch.tape.calls import CallCounter
from regrad.torch.values import operands
from regrad.torch.workspace import mark

_SILENT = {"prim", "profiler"}
_DETACH = torch.ops.aten.detach.default
"""Not recorded: it makes no memory, and autograd adds it for saved results only while a mode watches."""
_ADD = torch.ops.aten.add.Tensor
_SUMS = {torch.ops.aten.add, torch.ops.aten.sub, torch.ops.aten.rsub}
_NUMBER_BYTES = 8
_OWNED_TENSOR, _OWNED_STORAGE = 4, 2
"""Use counts, seen from inside a dispatch, of a gradient that only the engine's buffer holds."""


def tensors_in(value: Any) -> list[torch.Tensor]:
    """All tensors in nested containers, dataclasses and model outputs, in order."""
    found: list[torch.Tensor] = []
    for leaf in pytree.tree_leaves(value):
        if isinstance(leaf, torch.Tensor):
            found.append(leaf)
        elif hasattr(leaf, "__dataclass_fields__"):
            found += tensors_in([getattr(leaf, name, None) for name in leaf.__dataclass_fields__])
    return found


def _use_count(tensor: torch.Tensor) -> int:
    count: int = tensor._use_count()  # type: ignore[attr-defined]
    return count


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether the elements fill one stretch of memory, each once, in whatever order of dimensions."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A tensor without its bytes: enough to make another one of the same kind."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, tensor: torch.Tensor) -> TensorSpec:
        """The spec of a (strided) tensor."""
        stride = tuple(tensor.stride()) if tensor.layout == torch.strided else ()
        return cls(tuple(tensor.shape), stride, tensor.dtype, tensor.device)


@dataclass(frozen=True, slots=True)
class Signature:
    """An operation with arguments and result, tensors as :class:`TensorSpec`; two of one ``key`` do the same work."""

    func: Any
    leaves: tuple[Any, ...]
    structure: Any
    result: Any
    key: Any

    @classmethod
    def of(cls, func: Any, args: Any, kwargs: Any, result: Any) -> Signature:
        """The signature of one call."""
        leaves, structure = pytree.tree_flatten((args, kwargs))
        plain = tuple(_spec(leaf) for leaf in leaves)
        parts = tuple(leaf if isinstance(leaf, TensorSpec) else repr(leaf) for leaf in plain)
        return cls(func, plain, structure, pytree.tree_map(_spec, result), (func, parts))


def _spec(leaf: Any) -> Any:
    return TensorSpec.of(leaf) if isinstance(leaf, torch.Tensor) else leaf


@dataclass
class Record:
    """One recorded step: the trace, signatures for the clock, and what else was seen.

    names     of the persistent storages in the trace
    index_of  the place in the trace of each storage that was there before the step, by the storage's identity
    changing  (module, which call) of the watched calls that change an object that they are given
    calls     names of the torch calls of the model's forward, in order; empty if the step calls the model itself more
              than once, or never
    """

    trace: Trace
    names: dict[int, str]
    signatures: list[Signature]
    signature_of: list[int]
    index_of: dict[int, int]
    changing: set[tuple[str, int]]
    calls: tuple[str, ...] = ()


LIBRARIES = tuple(str(Path(path).parent) + os.sep for path in (torch.__file__, __file__))


def source_line() -> str:
    """``file:line`` of the innermost frame that is neither torch's nor ours; "" if there is none."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if not code.co_filename.startswith(LIBRARIES) and not code.co_filename.startswith("<"):
            return f"{code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


def _in_own_function() -> bool:
    """Whether a ``torch.autograd.Function`` of the user's runs now."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "apply" and frame.f_code.co_filename.endswith("autograd/function.py"):
            return True
        frame = frame.f_back
    return False


class Recorder(TorchDispatchMode):
    """Records while it is entered; :meth:`finish` gives the trace.

    ``lifetimes`` is for a forward in which autograd keeps nothing (:meth:`saved`). ``marked`` gives every operation a
    window in the profile that is being taken.
    """

    def __init__(self, *, lifetimes: bool = False, marked: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operations: list[Operation] = []
        self.storages: list[Storage] = []
        self.calls: list[Call] = []
        self.phase = tr.FORWARD
        self.lifetimes = lifetimes
        self.marked = marked
        self._live: dict[int, tuple[weakref.ref[torch.UntypedStorage], int]] = {}
        self._stack: list[int] = []
        self._counts: dict[str, int] = {}
        self._by_kind: dict[Any, tuple[str, bool, tuple[int, ...]]] = {}
        self.signatures: list[Signature] = []
        self.signature_of: list[int] = []
        self._signature_index: dict[Any, int] = {}
        self.counter = CallCounter()
        self.forwards = self.hooked = 0

    # -- storages ---------------------------------------------------------------------------------------------

    def register(self, tensor: torch.Tensor, category: str) -> None:
        """Take a tensor that is there before the step into account, under its category."""
        self._index(tensor, category, -1)

    def _index(self, tensor: torch.Tensor, category: str, birth: int) -> tuple[int, bool]:
        storage = tensor.untyped_storage()
        key = id(storage)
        known = self._live.get(key)
        if known is not None:
            return known[1], False
        index = len(self.storages)
        self.storages.append(Storage(storage.nbytes(), category, birth, last_use=birth))
        self._live[key] = (weakref.ref(storage, functools.partial(self._died, key)), index)
        return index, True

    def _died(self, key: int, _: object) -> None:
        self.storages[self._live.pop(key)[1]].death = len(self.operations)

    def find(self, tensor: torch.Tensor) -> int | None:
        """The index of a tensor's storage, if it is known and alive."""
        known = self._live.get(id(tensor.untyped_storage()))
        return None if known is None else known[1]

    def alive(self) -> list[int]:
        """Indices of the storages that are alive now."""
        return [index for _, index in self._live.values()]

    # -- operations -------------------------------------------------------------------------------------------

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace in _SILENT or func is _DETACH:
            return func(*args, **kwargs)
        if func is _ADD and self.phase == tr.BACKWARD and self._accumulates(args, kwargs):
            func = torch.ops.aten.add_.Tensor
        given = [self._seen(tensor) for tensor in operands(args) + operands(kwargs)]
        sequence = self._sequence()
        with mark(len(self.operations)) if self.marked else contextlib.nullcontext():
            result = func(*args, **kwargs)
        self._note(func, args, kwargs, given, result, sequence)
        return result

    def _accumulates(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether this is the engine summing two gradients, which it does in place when no mode watches."""
        if kwargs or len(args) != 2 or torch.is_grad_enabled():
            return False
        held, new = args
        if not isinstance(held, torch.Tensor) or not isinstance(new, torch.Tensor) or held.shape != new.shape:
            return False
        return (
            _use_count(held) <= _OWNED_TENSOR
            and torch._C._storage_Use_Count(held.untyped_storage()._cdata) <= _OWNED_STORAGE
            and held.dtype == new.dtype
            and _is_dense(held)
        )

    def _seen(self, tensor: torch.Tensor) -> int:
        index, _ = self._index(tensor, tr.INPUTS, -1)
        return index

    def _sequence(self) -> int:
        if self.phase == tr.FORWARD:
            return int(torch._C._autograd._get_sequence_nr())
        node: Any = torch._C._current_autograd_node()
        return -1 if node is None else int(node._sequence_nr())

    def _note(self, func: Any, args: Any, kwargs: Any, given: list[int], result: Any, sequence: int) -> None:
        name, draws, written = self._kind(func)
        at = len(self.operations)
        category = {tr.FORWARD: tr.ACTIVATIONS, tr.BACKWARD: tr.TEMPORARIES}.get(self.phase, tr.OPTIMIZER_STATE)
        makes = []
        # The operation must stand in the list before its results are looked at: what dies from here on dies after it.
        where = source_line() if self.phase == tr.FORWARD else ""
        parent = self._stack[-1] if self._stack else -1
        number = self._torch_call()
        operation = Operation(name, self.phase, parent, sequence, where=where, torch_call=number)
        self.operations.append(operation)
        for tensor in operands(result):
            index, new = self._index(tensor, category, at)
            if new:
                makes.append(index)
        for index in given:
            self.storages[index].last_use = at
        operation.reads, operation.makes = tuple(given), tuple(makes)
        operation.writes = self._writes(func, written, args, kwargs)
        operation.draws = draws
        self._sign(func, args, kwargs, result)
        if self.lifetimes and torch.is_grad_enabled():
            self._save_numbers(func, args, at, sequence)

    def _torch_call(self) -> int:
        """The torch call that runs now; -1 outside the first forward, and inside a function with a backward of its own,
        whose operations autograd does not see."""
        if self.phase != tr.FORWARD or self.forwards != 1 or (not torch.is_grad_enabled() and _in_own_function()):
            return -1
        return self.counter.current

    def _save_numbers(self, func: Any, args: Any, at: int, sequence: int) -> None:
        """A Python number where a tensor is expected becomes a tensor of eight bytes, which the node keeps without
        asking any hook. Sums do not keep theirs."""
        if func._overloadpacket in _SUMS or not any(isinstance(a, torch.Tensor) and a.requires_grad for a in args):
            return
        for value, argument in zip(args, func._schema.arguments, strict=False):
            if isinstance(value, (int, float)) and str(argument.type) == "Tensor":
                storage = Storage(_NUMBER_BYTES, tr.ACTIVATIONS, at, at + 1, at, (Save(at, sequence - 1, NO_HOOK),))
                self.storages.append(storage)

    def saved(self, tensor: torch.Tensor) -> None:
        """A node saved ``tensor``: called while the node is made, before its operation (arguments) or after it (results).

        A Python number where a tensor is expected is a tensor here that no dispatcher saw.
        """
        position = len(self.operations)
        node = int(torch._C._autograd._get_sequence_nr()) - 1
        after = position > 0 and self.operations[-1].sequence == node + 1 and self.operations[-1].phase == tr.FORWARD
        index, _ = self._index(tensor, tr.ACTIVATIONS, max(position - 1, 0))
        storage = self.storages[index]
        storage.saved_by += (Save(position - 1 if after else position, node, position, self.hooked),)
        self.hooked += 1

    def _sign(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        signature = Signature.of(func, args, kwargs, result)
        index = self._signature_index.get(signature.key)
        if index is None:
            index = self._signature_index[signature.key] = len(self.signatures)
            self.signatures.append(signature)
        self.signature_of.append(index)

    def _kind(self, func: Any) -> tuple[str, bool, tuple[int, ...]]:
        kind = self._by_kind.get(func)
        if kind is None:
            arguments = func._schema.arguments
            written = tuple(i for i, a in enumerate(arguments) if a.alias_info is not None and a.alias_info.is_write)
            kind = (str(func), torch.Tag.nondeterministic_seeded in func.tags, written)
            self._by_kind[func] = kind
        return kind

    def _writes(self, func: Any, written: tuple[int, ...], args: Any, kwargs: Any) -> tuple[int, ...]:
        found = []
        for position in written:
            value = args[position] if position < len(args) else kwargs.get(func._schema.arguments[position].name)
            for tensor in operands(value):
                index = self.find(tensor)
                if index is not None:
                    found.append(index)
        return tuple(found)

    # -- calls ------------------------------------------------------------------------------------------------

    @contextmanager
    def watching(self, model: nn.Module, *, number: bool = True) -> Iterator[None]:
        """Record the calls of every module of ``model`` while in the forward phase; ``number`` the torch calls of its
        first forward."""
        handles = []
        original = model.forward

        def counted(*args: Any, **kwargs: Any) -> Any:
            self.forwards += 1
            if self.forwards > 1 or not number:
                return original(*args, **kwargs)
            with self.counter:
                return original(*args, **kwargs)

        own = vars(model).get("forward")
        model.forward = counted
        for name, module in model.named_modules():
            enter = module.register_forward_pre_hook(self._entering(name), with_kwargs=True, prepend=True)
            leave = module.register_forward_hook(self._leave, with_kwargs=True, always_call=True)
            handles += [enter, leave]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
            del model.forward
            if own is not None:
                model.forward = own

    def _entering(self, name: str) -> Callable[..., None]:
        def enter(module: nn.Module, args: Any, kwargs: Any) -> None:
            if self.phase != tr.FORWARD:
                return
            count = self._counts.get(name, 0)
            self._counts[name] = count + 1
            sequence = self._sequence()
            given = tensors_in((args, kwargs))
            inputs = tuple(dict.fromkeys(self._seen(tensor) for tensor in given))
            plain = tuple(dict.fromkeys(self._seen(tensor) for tensor in given if not tensor.requires_grad))
            parent = self._stack[-1] if self._stack else -1
            here = len(self.operations)
            self._stack.append(len(self.calls))
            kind = type(module).__name__
            call = Call(name, kind, count, here, here, parent, sequence, sequence, inputs, plain_inputs=plain)
            self.calls.append(call)

        return enter

    def _leave(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if self.phase != tr.FORWARD or not self._stack:
            return
        call = self.calls[self._stack.pop()]
        call.stop = len(self.operations)
        call.stop_sequence = self._sequence()
        call.outputs = tuple(dict.fromkeys(self._seen(tensor) for tensor in tensors_in(output)))

    # -- the end ----------------------------------------------------------------------------------------------

    def finish(self, *, source: str, gradients: str, device: str, seconds: float = 0.0) -> Trace:
        """The trace of what was recorded; the recorder must not be used afterwards."""
        self._live.clear()
        return Trace(self.operations, self.storages, self.calls, source, gradients, device, seconds=seconds)
