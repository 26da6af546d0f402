"""The blocks of a model that a user would wrap into torch's checkpoint: their order, their time, their hand-offs."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

import regrad.torch as rt
from regrad.core.errors import UsageError
from regrad.torch.watch import matches

_STEPS = 3


@dataclass(frozen=True, slots=True)
class Block:
    """A block in the order of its first call.

    forward_seconds  median process CPU seconds of its calls in one step
    follows          whether it is called once a step, with nothing but the very object that the block before it
                     returned: then both can be run as one
    """

    name: str
    forward_seconds: float
    follows: bool


class _Survey:
    """Forward hooks on the blocks of one model."""

    def __init__(self, model: nn.Module, names: Sequence[str]) -> None:
        modules = dict(model.named_modules())
        self.seconds: dict[str, list[float]] = {}
        self.calls: dict[str, int] = {}
        self.takes_last: dict[str, bool] = {}
        self._last: Any = None
        self._began = 0.0
        self.hooks = []
        for name in names:
            self.hooks.append(modules[name].register_forward_pre_hook(self._enter(name), with_kwargs=True))
            self.hooks.append(modules[name].register_forward_hook(self._leave(name)))

    def begin_step(self) -> None:
        self.calls.clear()
        self._last = None

    def _enter(self, name: str) -> Any:
        def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self.calls[name] = self.calls.get(name, 0) + 1
            handed_on = self._last is not None and len(args) == 1 and not kwargs and args[0] is self._last
            self.takes_last[name] = self.takes_last.get(name, True) and handed_on
            self._began = time.process_time()

        return enter

    def _leave(self, name: str) -> Any:
        def leave(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            self.seconds.setdefault(name, []).append(time.process_time() - self._began)
            self._last = output

        return leave


def survey(step: rt.Step, globs: Sequence[str]) -> list[Block]:
    """The modules of ``step`` that one of ``globs`` names (``*`` does not cross a dot), watched over three steps.

    The step trains meanwhile. Raises :class:`UsageError` if no such module is called.
    """
    names = [name for name, _ in step.model.named_modules() if any(matches(name, glob) for glob in globs)]
    watched = _Survey(step.model, names)
    try:
        for _ in range(_STEPS):
            watched.begin_step()
            step()
    finally:
        for hook in watched.hooks:
            hook.remove()
        step.clear_gradients()
    if not watched.seconds:
        raise UsageError(f"none of {', '.join(globs)} names a module that {type(step.model).__name__} calls")
    found: list[Block] = []
    for name, seconds in watched.seconds.items():
        once = watched.calls[name] == 1
        before_once = bool(found) and watched.calls[found[-1].name] == 1
        block_seconds = statistics.median(seconds) * watched.calls[name]
        found.append(Block(name, block_seconds, watched.takes_last[name] and once and before_once))
    return found
