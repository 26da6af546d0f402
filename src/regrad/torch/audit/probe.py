"""The borders of segments: what runs there, how often, and a survey whenever the step comes by.

A probe is a bound method under the name ``forward`` in the ``__dict__`` of a segment's module, below the plan's own
:class:`PlannedForward`. An engine is handed the probe as the function that it checkpoints, and finds behind it what it
would find without: the module, its code and its state.
"""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import CodeType, FunctionType, MethodType
from typing import Any, NamedTuple

import torch
from torch import nn

from regrad.core.plan import Plan
from regrad.torch import execute
from regrad.torch.audit.survey import VALUE, Key, Table
from regrad.torch.audit.world import digest_of
from regrad.torch.record import tensors_in
from regrad.torch.regions.public import Checkpoint

FORWARD, REPLAY, BACKWARD, OUTSIDE = "forward", "replay", "backward", "outside"
Engine = Callable[..., Any]
_NUMBERS = itertools.count()


class Call(NamedTuple):
    """One call of a module in one step."""

    module: str
    number: int

    def __str__(self) -> str:
        return f"{self.module}#{self.number}" if self.number else self.module


class Moment(NamedTuple):
    """When a survey was taken: step, "forward of", "backward of", "end of …", and the call if it is one's border."""

    step: int
    kind: str
    call: Call | None

    def __str__(self) -> str:
        return f"{self.kind} {self.call}" if self.call else self.kind


class Borders:
    """Probes on the modules called ``names``; what they see is kept here.

    moments    surveys by moment, in the order in which the moments came
    entries    surveys at the entry of each forward, arguments included
    stale      for each call the keys that its replays found otherwise; ``altered`` those that the engine changed before it
               ran the body for the first time
    forwards, replays   runs of bodies by call
    role       (what runs now, of which call), the innermost first
    """

    def __init__(self, model: nn.Module, names: list[str], take: Callable[[], Table]) -> None:
        self.model, self.names, self.take = model, names, take
        self.moments: dict[Moment, Table] = {}
        self.entries: dict[tuple[int, Call], Table] = {}
        self.stale: dict[tuple[int, Call], list[Key]] = {}
        self.altered: dict[tuple[int, Call], list[Key]] = {}
        self.forwards: Counter[Call] = Counter()
        self.replays: Counter[Call] = Counter()
        self.step, self.phase = 0, FORWARD
        self.roles: list[tuple[str, Call | None]] = [(OUTSIDE, None)]
        self._owners: dict[int, tuple[str, Callable[..., Any]]] = {}
        self._counts: Counter[str] = Counter()
        self._bodies: Counter[Call] = Counter()
        self._begun: list[Call] = []
        self._handles: list[Any] = []
        self._engine: Engine | None = None
        self._taped: execute.Taped | None = None

    # -- installing -----------------------------------------------------------------------------------------------------

    @contextmanager
    def installed(
        self,
        calls: dict[str, tuple[str, ...]] | None,
        cache_off: str | None,
        engine: Engine | None,
        plan: Plan | None = None,
    ) -> Iterator[None]:
        """With probes on, and the plan on top of them if there is one. The world takes both off again."""
        # An engine may know functions by their code. New code for each run: nothing that an engine has learnt in one run
        # serves in another, and nothing of the audit serves the user's own steps.
        code: CodeType = _probe.__code__.replace(co_name=f"_probe_{next(_NUMBERS)}")
        probe = FunctionType(code, globals(), _probe.__name__)
        modules = dict(self.model.named_modules())
        for name in self.names:
            module = modules[name]
            previous = vars(module).get("forward")
            owner = module if previous is None else previous
            self._owners[id(owner)] = (name, previous or MethodType(type(module).forward, module))
            module.forward = MethodType(probe, owner)
        if calls is not None:
            self._engine = engine
            training = self.model.training
            self._taped = None if plan is None else execute.taped_of(plan)
            execute.install_plan(
                self.model, calls, training=training, cache_off=cache_off, engine=self._recompute, taped=self._taped
            )
            if plan is not None:
                execute.tell(self.model, plan)
        _RUNNING.append(self)
        try:
            yield
        finally:
            _RUNNING.remove(self)
            for handle in self._handles:
                handle.remove()

    @property
    def range_replays(self) -> int:
        """How often ranges of torch calls ran again."""
        return 0 if self._taped is None else sum(report.replays for report in self._taped.tape.report())

    def begin_step(self, index: int) -> None:
        """A step begins."""
        self.step, self.phase = index, FORWARD
        self._counts.clear()
        self._bodies.clear()
        self._begun.clear()

    # -- what runs ------------------------------------------------------------------------------------------------------

    def _recompute(self, forward: Any, args: tuple[Any, ...], kwargs: Any, planned: Any = ()) -> Any:
        """The executor's engine: the audited one, between the borders of a call. ``planned`` are the plan's own engines
        for its large state, of which only ours knows."""
        assert self._engine is not None
        engine = self._engine
        call = self._next(self._owners[id(forward.__self__)][0])

        def run() -> Any:
            if planned and isinstance(engine, Checkpoint):
                return engine.planned(planned, forward, args, kwargs)
            return engine(forward, *args, **kwargs)

        with self._as(OUTSIDE, call):
            return self._between(call, run, args, kwargs)

    def body(self, owner: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A segment's own code is to run: for the first time, or again."""
        name, original = self._owners[id(owner)]
        role, current = self.roles[-1]
        if self.phase == FORWARD and not (role == OUTSIDE and current is not None and current.module == name):
            call = self._next(name)
            self.forwards[call] += 1
            with self._as(FORWARD, call):
                return self._between(call, lambda: original(*args, **kwargs), args, kwargs)
        call = current if self.phase == FORWARD and current is not None else self._replayed(name)
        self._bodies[call] += 1
        first = self._bodies[call] == 1
        (self.forwards if first else self.replays)[call] += 1
        now, entry = self.take() | _tensors("argument", call, (args, kwargs)), self.entries.get((self.step, call), {})
        changed = [key for key in {**entry, **now} if entry.get(key) != now.get(key)]
        (self.altered if first else self.stale).setdefault((self.step, call), []).extend(changed)
        with self._as(FORWARD if first else REPLAY, call):
            return original(*args, **kwargs)

    @contextmanager
    def _as(self, role: str, call: Call) -> Iterator[None]:
        self.roles.append((role, call))
        try:
            yield
        finally:
            self.roles.pop()

    def _next(self, name: str) -> Call:
        number, self._counts[name] = self._counts[name], self._counts[name] + 1
        return Call(name, number)

    def _replayed(self, name: str) -> Call:
        """Which call of a module is run again in the backward: that whose backward began last."""
        for call in reversed(self._begun):
            if call.module == name:
                return call
        return Call(name, max(self._counts[name] - 1, 0))

    # -- surveys --------------------------------------------------------------------------------------------------------

    def _between(self, call: Call, run: Callable[[], Any], args: Any, kwargs: Any) -> Any:
        self.entries[self.step, call] = self.take() | _tensors("argument", call, (args, kwargs))
        for index, tensor in enumerate(tensors_in((args, kwargs))):
            if tensor.requires_grad:
                self._handles.append(tensor.register_hook(functools.partial(self._arrived, self.step, call, index)))
        output = run()
        for tensor in tensors_in(output):
            if tensor.requires_grad:
                self._handles.append(tensor.register_hook(functools.partial(self._began, call)))
        self.moments[Moment(self.step, "forward of", call)] = self.take() | _tensors("output", call, output)
        return output

    def _began(self, call: Call, gradient: torch.Tensor) -> None:
        self._begun.append(call)

    def _arrived(self, step: int, call: Call, index: int, gradient: torch.Tensor) -> None:
        """The gradient of an argument is known: whatever the segment's backward had to do for it is done."""
        moment = Moment(step, "backward of", call)
        if moment not in self.moments:
            self.moments[moment] = self.take()
        self.moments[moment][f"gradient of argument {index} of {call}", VALUE] = digest_of(gradient)

    def survey(self, kind: str, table: Table) -> None:
        """A moment that is no border of a segment."""
        self.moments[Moment(self.step, kind, None)] = table


_RUNNING: list[Borders] = []


def _probe(owner: Any, *args: Any, **kwargs: Any) -> Any:
    return _RUNNING[-1].body(owner, args, kwargs)


def _tensors(word: str, call: Call, value: Any) -> Table:
    return {
        (f"{word} {index} of {call}", VALUE): (str(tensor.dtype), tuple(tensor.shape), digest_of(tensor))
        for index, tensor in enumerate(tensors_in(value))
    }
