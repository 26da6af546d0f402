"""Operations of a run one by one, with the user's line, what runs then, digests of results; and changes of suspects.

A dispatch mode changes some programs that it watches (autograd adds ``detach`` and sums out of place), so verdicts come
from runs without one; a tape only says where.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch.utils import _pytree as pytree

from regrad.torch.audit.frames import LineTrace, user_line
from regrad.torch.audit.probe import BACKWARD, REPLAY, Borders, Call, Moment
from regrad.torch.audit.survey import GENERATOR_NAMES, Surveyor, generator_slot
from regrad.torch.audit.suspects import Suspect
from regrad.torch.audit.world import digest_of, flat
from regrad.torch.regions.discover import sources
from regrad.torch.regions.watch import Quiet, draws, is_view, storage_key, writes_of

SILENT = {"aten.detach.default", "aten.alias.default"}
PYTHON = "Python"
UNWRITTEN = ("aten.empty", "aten.new_empty")
"""Operations that give memory as it was left: what stands there is nobody's result."""


@dataclass(slots=True)
class Op:
    """One operation. ``reads`` and ``writes`` are slots of state that was there at the start; ``inputs`` and ``outs``
    digests. ``line`` of an operation of the backward is that of the operation it belongs to."""

    at: int
    step: int
    name: str
    role: str
    call: Call | None
    line: str
    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()
    draws: str = ""
    inputs: tuple[tuple[str, Any], ...] = ()
    outs: tuple[Any, ...] = ()


@dataclass(slots=True)
class Change:
    """A suspect changed: by an operation, or by plain code between two of them. ``value`` is what it is now."""

    at: int
    step: int
    slot: str
    name: str
    line: str
    role: str
    call: Call | None
    value: Any = field(repr=False)


class Tape(Quiet):
    """Records while it is entered. ``digests`` are taken of what each operation reads and gives (dear), ``lines`` are
    followed one by one for changes that no operation makes (dearer)."""

    def __init__(
        self, borders: Borders, surveyor: Surveyor, suspects: list[Suspect], *, digests: bool, lines: bool
    ) -> None:
        super().__init__()
        self.borders, self.surveyor, self.suspects, self.digests = borders, surveyor, suspects, digests
        self.lines = LineTrace(self._passed) if lines else None
        self.ops: list[Op] = []
        self.changes: list[Change] = []
        self.marks: dict[Moment, int] = {}
        self.found_hidden: dict[int, tuple[str, torch.Tensor, torch.Tensor]] = {}
        self._generators = {
            _identity(one): generator_slot(sources.source_of(one), surveyor.paths)
            for one in surveyor.world.found.generators
            if isinstance(one, torch.Generator)
        }
        self._at = 0
        self._made: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._nodes: dict[int, tuple[str, Call | None]] = {}

    @contextmanager
    def recording(self) -> Iterator[Tape]:
        """Record while entered."""
        for one in self.suspects:
            one.moved()
        with ExitStack() as stack:
            if self.lines is not None:
                stack.enter_context(self.lines)
            stack.enter_context(self)
            yield self
            self._passed("")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "_schema", None) is None or func.namespace in ("prim", "profiler"):
            return func(*args, **kwargs)
        self._mark()
        role, call = self.borders.roles[-1]
        name, line = str(func), user_line()
        self._passed(self.lines.line if self.lines is not None else line)
        if self.borders.phase == BACKWARD and role != REPLAY:
            role, (line, call) = BACKWARD, self._owner(line, call)
        else:
            self._nodes.setdefault(int(torch._C._autograd._get_sequence_nr()) - 1, (line, call))
        op = Op(self._at, self.borders.step, name, role, call, line)
        leaves = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        written = self._written(func, args, kwargs, line)
        self._read(op, func, leaves, written)
        op.draws = self._source(func, leaves, kwargs)
        out = func(*args, **kwargs)
        self._after(op, out, leaves)
        self.ops.append(op)
        self._at += 1
        self._check(name, line, role, call)
        return out

    # -- what an operation touches ----------------------------------------------------------------------------------------

    def _slot(self, key: int | None) -> str:
        if key is None or key in self._made:
            return ""
        found = self.surveyor.world.hidden.get(key) or self.found_hidden.get(key)
        return self.surveyor.storages.get(key, "") or (found[0] if found else "")

    def _written(self, func: Any, args: Any, kwargs: Any, line: str) -> list[int]:
        keys = []
        for position, name in writes_of(func):
            value = args[position] if position < len(args) else kwargs.get(name)
            for tensor in value if isinstance(value, (list, tuple)) else (value,):
                key = storage_key(tensor)
                if key is None:
                    continue
                keys.append(key)
                if not self._slot(key) and key not in self._made:
                    alias = flat(tensor)
                    shape = f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
                    slot = f"hidden tensor {shape} of {line.rpartition('/')[2] or 'unknown code'}"
                    self.found_hidden[key] = (slot, alias, alias.clone())
        return keys

    def _read(self, op: Op, func: Any, leaves: list[torch.Tensor], written: list[int]) -> None:
        slots = [self._slot(storage_key(leaf)) for leaf in leaves]
        only_writes = func._schema.name in ("aten::copy_", "aten::fill_", "aten::zero_") and bool(leaves)
        if not is_view(func):
            op.reads = tuple(slot for i, slot in enumerate(slots) if slot and not (only_writes and i == 0))
        op.writes = tuple(dict.fromkeys(slot for slot in map(self._slot, written) if slot))
        if self.digests:
            op.inputs = tuple((slot, _digest(leaf)) for slot, leaf in zip(slots, leaves, strict=True))

    def _after(self, op: Op, out: Any, leaves: list[torch.Tensor]) -> None:
        given = {storage_key(leaf) for leaf in leaves}
        results = pytree.tree_leaves(out)
        for leaf in results:
            key = storage_key(leaf)
            new = key not in given or op.name == "aten.lift_fresh.default"
            if key is not None and new and not self._slot(key) and key not in self._made:
                # A storage that is freed gives its key to another one.
                storage = leaf.untyped_storage()
                self._made[key] = weakref.ref(storage, partial(_forget, self._made, key))
        if self.digests and not op.name.startswith(UNWRITTEN):
            op.outs = tuple(_digest(leaf) for leaf in results)

    def _source(self, func: Any, leaves: list[torch.Tensor], kwargs: Any) -> str:
        if not draws(func):
            return ""
        generator = kwargs.get("generator")
        if generator is not None:
            return self._generators.get(_identity(generator), "torch.Generator that no name leads to")
        cuda = any(leaf.is_cuda for leaf in leaves)
        return GENERATOR_NAMES[id(sources.CUDA if cuda else sources.CPU)]

    def _owner(self, line: str, call: Call | None) -> tuple[str, Call | None]:
        """The line and the call of the forward that the node which runs now belongs to; a hook's own line goes first."""
        node: Any = torch._C._current_autograd_node()
        known = None if node is None else self._nodes.get(int(node._sequence_nr()))
        if line or known is None:
            return line, call if known is None else known[1]
        return known

    @property
    def end(self) -> int:
        """One past the last position."""
        return self._at

    def finish(self) -> None:
        """Let go of what only recording needed."""
        self._mark()
        self._made.clear()
        self.suspects = []

    # -- suspects --------------------------------------------------------------------------------------------------------

    def _mark(self) -> None:
        moments = self.borders.moments
        if len(moments) != len(self.marks):
            for moment in list(moments)[len(self.marks) :]:
                self.marks[moment] = self._at

    def _passed(self, line: str) -> None:
        if self.suspects:
            self._mark()
            role, call = self.borders.roles[-1]
            self._check(PYTHON, line, role, call)

    def _check(self, name: str, line: str, role: str, call: Call | None) -> None:
        for one in self.suspects:
            if one.moved():
                self.changes.append(Change(self._at, self.borders.step, one.slot, name, line, role, call, one.last))
                self._at += 1


def _identity(generator: Any) -> int:
    """The dispatcher hands over another object for the same generator."""
    return int(generator._cdata)


def _forget(made: dict[int, Any], key: int, _: object) -> None:
    made.pop(key, None)


def _digest(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return repr(value)
    return tuple(value.shape), digest_of(value)
