"""The forward of one call: find the state, run the body, decide what to hold."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from regrad.core.errors import InvalidRegion
from regrad.torch.regions import log
from regrad.torch.regions.arguments import Arguments
from regrad.torch.regions.call import Call, unpack
from regrad.torch.regions.cut import PYTHON_LOOKS
from regrad.torch.regions.discover.tensors import SMALL_BYTES
from regrad.torch.regions.discover.walk import Found, walk
from regrad.torch.regions.effects import watch_effects
from regrad.torch.regions.entry import Entry, Swap, signature
from regrad.torch.regions.frames import LOCAL, LOCK, Frame
from regrad.torch.regions.guard import Check, digest
from regrad.torch.regions.old import Old
from regrad.torch.regions.region import (
    AUTO_ENGINE,
    JOURNAL,
    MANY_MODULES,
    READ_SET,
    SNAPSHOT,
    Region,
    numbers_of,
    region_of,
)
from regrad.torch.regions.selective import Draws
from regrad.torch.regions.settings import Settings, StateSpec
from regrad.torch.regions.watch import Watch, has_memory, storage_key

MOST_KINDS = 1024
Planned = Sequence[tuple[torch.Tensor, str]]
"""Tensors with the engine by which a call brings each back: "snapshot", "journal" or "read_set"."""
ContextFn = Callable[[], tuple[AbstractContextManager[Any], AbstractContextManager[Any]]]


def run(
    settings: Settings,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    context_fn: ContextFn | None = None,
    check_metas: bool = True,
    log_only: bool = False,
    planned: Planned = (),
) -> Any:
    """Run a region: what every public call comes to. With ``log_only`` it keeps its activations as eager does, and what
    it overwrites of large state is kept for the replays of others. ``planned`` says by which engine this call brings
    large tensors back."""
    if not callable(function):
        raise InvalidRegion(f"the region is a {type(function).__name__}, which cannot be called")
    if not torch.is_grad_enabled() or _is_traced():
        return function(*args, **kwargs)
    region = region_of(function, settings)
    region.calls += 1
    if torch._C._functorch.peek_interpreter_stack() is not None:
        region.keep("runs under a torch.func transform")
        return function(*args, **kwargs)
    watch_effects()
    with LOCK:
        forward = Forward(settings, region, function, args, kwargs, context_fn, check_metas, log_only, planned)
        if not forward.lazy:
            return forward.run()
    region.keep("gives lazy parameters their first shape")
    return function(*args, **kwargs)


def _is_traced() -> bool:
    key = torch._C._TorchDispatchModeKey.PROXY
    return torch._C._get_dispatch_mode(key) is not None or torch._C._get_tracing_state() is not None


class Forward:
    """The forward of one call."""

    def __init__(
        self,
        settings: Settings,
        region: Region,
        function: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        context_fn: ContextFn | None,
        check_metas: bool,
        log_only: bool,
        planned: Planned = (),
    ) -> None:
        self.settings, self.region, self.function = settings, region, function
        self.args, self.kwargs, self.context_fn, self.log_only = args, kwargs, context_fn, log_only
        arguments = self.arguments = Arguments(args, kwargs)
        training = function.training if isinstance(function, nn.Module) else None
        sign = (training, arguments.signature())
        self.learning = region.learning(sign) and settings.state is not None
        self.numbers = numbers_of(function)
        found = self._discover()
        self.lazy, self.deferred = bool(found.lazy), found.deferred
        self.sharded = found.sharded  # gathers weights into storages of its own, which are no state
        numpy = self.learning or region.draws_numpy or "random" in region.reach.names
        hidden = region.hidden_state() if settings.state == "auto" else ((), ())
        found.generators.extend(hidden[1])
        looks = bool(region.reach.names & PYTHON_LOOKS)
        self.planned = {} if log_only or settings.state != "auto" else _by_storage(planned, looks)
        self._add_planned(found)
        self.entry = Entry(found, log.begin(), numpy=numpy, large_only=log_only)
        self.entry.hidden = dict(hidden[0])
        self.entry.owns = frozenset(key for key, (_, engine) in self.planned.items() if engine != JOURNAL)
        self.call = call = Call(region, settings, function, arguments, self.entry)
        call.signature, call.check_metas = sign, check_metas
        first = settings.guard == "first" and settings.state is not None
        if settings.guard == "always" or (first and region.must_check(sign)):
            call.check = Check()
        self._reaches()
        self.logged: set[int] = set()
        self.watch = self._watch(found)
        call.watched = self.watch is not None
        call.operations = None if self.watch is None else self.watch.operations
        self._copy()

    def _add_planned(self, found: Found) -> None:
        known = {id(tensor) for tensor in found.tensors} if self.planned else set()
        found.tensors.extend(tensor for tensor, _ in self.planned.values() if id(tensor) not in known)

    def _engine(self, key: int | None) -> str | None:
        """How the old bytes of a large storage are kept, as far as that is planned or learnt."""
        if key is None:
            return None
        return self.planned[key][1] if key in self.planned else self.region.engines.get(key)

    def _reaches(self) -> None:
        entry = self.entry
        keys = (key for key in entry.keys if key is not None and key not in entry.owns)
        log.reaches(entry.epoch, [*keys, *entry.hidden])

    def _discover(self) -> Found:
        state = self.settings.state
        if state is None:
            return Found()
        if isinstance(state, StateSpec):
            roots: tuple[Any, ...] = (*state.tensors.values(), *state.objects, *state.generators)
        else:
            roots = (self.function, self.arguments.roots(), _modes())
        few = None if self.learning else self.region.few(self.numbers)
        found = walk(self.region.reach, roots, few)
        if few is None:
            self.region.modules = found.modules
        return found

    def _watch(self, found: Found) -> Watch | None:
        region, state = self.region, self.settings.state
        if state is None or self.context_fn is not None or found.compiled:
            return None
        pieces = any(self._engine(key) in (JOURNAL, READ_SET) for key in self.entry.keys)
        asked = any(log.reached_before(self.entry.epoch, key) for key in self.entry.owns)
        if not (self.learning or pieces or asked or region.writes_data or self.entry.hidden):
            return None
        wanted = self.settings.engine
        self.call.pieces = pieces
        reads = {key for key, (_, engine) in self.planned.items() if engine == READ_SET}
        return Watch(
            whole={held.key for held in self.arguments.held if held.key is not None},
            snapshot=wanted == "snapshot",
            read_set=wanted == "read_set" or reads,
            seen=isinstance(state, StateSpec) and region.calls == 1,
            wanted=functools.partial(_wants, self.entry, self.log_only),
        )

    def _copy(self) -> None:
        """Copy what this region is known to write."""
        region, entry = self.region, self.entry
        for index in region.mutated:
            if index < len(self.arguments.held):
                self.arguments.held[index].copy_before()
        for storage, (tensor, engine) in self.planned.items():
            if engine == SNAPSHOT or (engine == READ_SET and self.watch is None):
                entry.own[storage] = [Old(tensor, whole=True)]
                if self.watch is None and log.reached_before(entry.epoch, storage):
                    self.logged.add(storage)
                    log.add(entry.epoch, storage, entry.own[storage][0])
        for tensor, key in zip(entry.watched, entry.keys, strict=True):
            if key is not None and self._engine(key) == SNAPSHOT and key not in self.logged | entry.owns:
                self._log_whole(key, tensor)
        if self.settings.engine == "guarded":
            entry.owed = [
                (tensor, digest(tensor))
                for tensor, key in zip(entry.watched, entry.keys, strict=True)
                if not tensor.requires_grad and (key in region.engines or self.learning)
            ]
        for key, tensor in entry.hidden.items():
            if key not in self.logged:
                self._log_whole(key, tensor)

    def _log_whole(self, key: int, tensor: torch.Tensor) -> None:
        """Log a storage before it is overwritten, unless only this call could need it and it is not replayed."""
        if not self.log_only or log.reached_before(self.entry.epoch, key):
            self.logged.add(key)
            log.add(self.entry.epoch, key, Old(tensor, whole=True))

    def run(self) -> Any:
        """Run the body and decide."""
        stack = LOCAL.stack
        outer = stack[-1] if stack else None
        frame = Frame(self.call, replaying=False)
        self.call.once = frame.once
        ordinal = 0
        if outer is not None:
            ordinal, outer.inner = outer.inner, outer.inner + 1
        stack.append(frame)
        try:
            output = self._body()
        finally:
            stack.pop()
        self._never_seen()
        reason = self._changes()
        if reason and not self.log_only:
            self.region.changed()
        joined = self.entry.joined_graph()
        if joined is not None:
            reason = reason or f"made {self.entry.name_of(joined)} part of the graph in place"
        reason = reason or self.entry.what_happened_once()
        if frame.effect:
            reason = reason or f"{frame.effect}, which a replay would do again"
        for index, held in enumerate(self.arguments.held):
            held.settle(outer, (ordinal, index))
        self._reaches()  # what ran for the first time or showed itself has been added
        self.call.finish(output, keep=bool(reason) or self.log_only, nested=outer is not None)
        if reason and not self.log_only:
            self.region.keep(reason)
        return output

    def _body(self) -> Any:
        call = self.call
        with ExitStack() as stack:
            if self.deferred or (self.region.modules > MANY_MODULES and not self._knows_what_runs()):
                stack.callback(register_module_forward_pre_hook(self._runs).remove)
            if not self.log_only:
                stack.enter_context(saved_tensors_hooks(call.pack, unpack))
            if self.context_fn is not None:
                first, call.contexts = self.context_fn()
                stack.enter_context(first)
                call.draws = Draws()
                stack.enter_context(call.draws.first())
            elif self.watch is not None:
                stack.enter_context(self.watch)
            return self.function(*self.args, **self.kwargs)

    def _knows_what_runs(self) -> bool:
        if self.numbers in self.region.ran:
            return True
        if len(self.region.ran) >= MOST_KINDS:
            self.region.ran.clear()
        self.region.ran[self.numbers] = set()
        return False

    def _runs(self, module: nn.Module, args: Any) -> None:
        """A module is about to run: note it, or look at one that was deferred."""
        if not any(frame.owner is self.call for frame in LOCAL.stack):
            return  # another thread
        if id(module) in self.deferred:
            self.deferred.discard(id(module))
            self.entry.extend(walk(self.region.reach, (module,)))
            self.call.state.update(self.entry.by_address())
        self.region.ran.setdefault(self.numbers, set()).add(id(module))

    def _never_seen(self) -> None:
        """After the first call under a spec: refuse one that names tensors which no operation touched."""
        state = self.settings.state
        if self.watch is None or self.watch.seen is None or not isinstance(state, StateSpec):
            return
        names = [name for name, tensor in state.tensors.items() if storage_key(tensor) not in self.watch.seen]
        if names:
            self.region.calls -= 1
            Swap(self.entry, name=self.region.name).undo(self.watch.touched)
            raise InvalidRegion(
                f"the StateSpec names {', '.join(names)}, which no operation of region {self.region.name} touches. "
                "The call was undone. Leave it out, or name the tensor that the region uses."
            )

    def _changes(self) -> str | None:
        """After the body: what was written. The first thing that nothing foresaw, in words, else ``None``."""
        region, entry, watch = self.region, self.entry, self.watch
        touched = {} if watch is None else watch.touched
        reason = None
        for storage, (_, engine) in self.planned.items():
            if engine == READ_SET and watch is not None:
                entry.own[storage] = watch.reads.get(storage, [])
        for index, held in enumerate(self.arguments.held):
            pieces = touched.get(held.key) if held.key is not None else None
            if held.changed() or pieces:
                region.mutated.add(index)
                held.old = held.old or (pieces[0] if pieces else None)
                if held.old is None:
                    reason = f"changed {held.name} in place for the first time"
        written: set[int] = set()
        for position, (tensor, key) in enumerate(zip(entry.watched, entry.keys, strict=True)):
            now, before = signature(tensor), entry.signatures[position]
            entry.signatures[position] = now
            if now == before and key not in touched:
                continue
            logs = key is not None and self._logs(key, tensor, touched)
            if not (logs or key in entry.owns) or now[1] != before[1]:
                reason = f"wrote {entry.name_of(tensor)} for the first time"
            if key is not None:
                written.add(key)
        self._sign(written)
        if self.settings.state == "auto" and not self.sharded:
            self._hidden(touched, written)
        for key in self.logged - written - set(entry.hidden):
            log.withdraw(entry.epoch, key)
        return reason

    def _sign(self, written: set[int]) -> None:
        """Note what all aliases of the storages that were written look like now."""
        entry, signs = self.entry, {key: dict[int, Any]() for key in written}
        if signs:
            for tensor, key, now in zip(entry.watched, entry.keys, entry.signatures, strict=True):
                if key in signs:
                    signs[key][id(tensor)] = now
        for key, signatures in signs.items():
            log.sign(key, signatures)

    def _logs(self, key: int, tensor: torch.Tensor, touched: dict[int, list[Old]]) -> bool:
        """Whether the old bytes of a storage that was written are kept; chooses how they will be from now on."""
        region, entry = self.region, self.entry
        pieces = touched.get(key, [])
        if self.settings.engine == READ_SET and self.watch is not None and pieces:
            entry.own[key] = self.watch.reads.get(key, [])
            self.call.pieces = True  # what is restored is less than what the replay writes: that is to be undone too
        if pieces and key not in self.logged:
            for piece in pieces:
                log.add(entry.epoch, key, piece)
            self.logged.add(key)
        if key not in region.engines or region.engines[key] == AUTO_ENGINE:
            size = tensor.untyped_storage().nbytes()
            region.choose(key, self.settings.engine, sum(piece.nbytes for piece in pieces) or size, size)
        return key in self.logged

    def _hidden(self, touched: dict[int, list[Old]], written: set[int]) -> None:
        """State that operations wrote or drew from and that the walk did not find."""
        region, entry = self.region, self.entry
        if touched:
            known = {storage_key(tensor) for tensor, _, _ in entry.exact} | set(entry.keys)
            known |= {held.key for held in self.arguments.held}
            known |= set(self.planned)
            for key, pieces in touched.items():
                if key not in known:
                    for piece in pieces:
                        log.add(entry.epoch, key, piece)
                    entry.hidden[key] = pieces[0].alias
                    region.hide(key, pieces[0].alias)
                    written.add(key)
        if self.watch is not None and self.watch.generators:
            region.hide_generators(entry.add_generators(self.watch.generators))


def _wants(entry: Entry, log_only: bool, storage: int) -> bool:
    """Whether a call logs what is written to ``storage``: hidden state that is known has been copied whole, and what the
    call does not need from the log itself may be needed by earlier ones."""
    if storage in entry.hidden:
        return False
    return not (log_only or storage in entry.owns) or log.reached_before(entry.epoch, storage)


def _by_storage(planned: Planned, looks: bool) -> dict[int, tuple[torch.Tensor, str]]:
    """Large tensors with their engines, by storage; small ones are copied at every call anyway. Where Python ``looks`` at
    tensors behind torch's back a read set would miss it."""
    found = {}
    for tensor, engine in planned:
        key = storage_key(tensor)
        if key is not None and has_memory(tensor) and tensor.untyped_storage().nbytes() > SMALL_BYTES:
            found[key] = (tensor, SNAPSHOT if looks and engine == READ_SET else engine)
    return found


def _modes() -> tuple[Any, ...]:
    """The mode objects around a call, which may hold state."""
    modes: tuple[Any, ...] = ()
    if torch._C._len_torch_function_stack():
        modes += tuple(_get_current_function_mode_stack())
    if torch._C._len_torch_dispatch_stack():
        modes += tuple(_get_current_dispatch_mode_stack())
    return modes
